// The page's logic. Every figure is a pure function of the data and of the controls' state, so that a test can hold
// figures against the tools' JSON. Limits, bytes and FLOPs come from the data; only the rules of sectors and banks
// are computed here, because their controls span too many patterns to tabulate.
"use strict";
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const BLUE = "#2f6fb3", RED = "#d1495b", GREEN = "#3a9a5b", GREY = "#7a8699";
  const range = (n) => Array.from({ length: n }, (_, i) => i);
  const percent = (v) => (100 * v).toPrecision(3).replace(/\.?0+$/, "") + "%";

  // ---- state and controls

  const choices = (items) => items.map((v) => (typeof v === "string" ? [v, v] : v));
  const controls = {
    occupancy: [
      { id: "preset", label: "start from", options: choices(["-", ...data.occupancy.presets.map((p) => p.name)]), value: "-" },
      { id: "cc", label: "compute capability", options: choices(Object.entries(data.occupancy.ccs).map(([k, v]) => [k, k + " " + v.names])), value: "9.0" },
      { id: "threads", label: "threads a block", min: 32, max: 1024, step: 32, value: 256 },
      { id: "regs", label: "registers a thread", min: 16, max: 255, step: 1, value: 64 },
      { id: "smem", label: "shared memory a block (B)", min: 0, max: 232448, step: 512, value: 16384 },
      { id: "barriers", label: "named barriers", min: 1, max: 16, step: 1, value: 1 },
    ],
    coalescing: [
      { id: "op", label: "access", options: choices(["load", "store"]), value: "load" },
      { id: "width", label: "bytes a lane", options: choices(["1", "2", "4", "8", "16"]), value: "4" },
      { id: "stride", label: "stride (elements)", min: 0, max: 64, step: 1, value: 2 },
      { id: "offset", label: "offset (elements)", min: 0, max: 32, step: 1, value: 0 },
      { id: "lanes", label: "active lanes", min: 1, max: 32, step: 1, value: 32 },
      { id: "swizzle", label: "XOR swizzle of shared", options: choices([["0", "none"], ...data.swizzles.map((s, i) => [String(i + 1), s.code])]), value: "0" },
    ],
    traffic: [
      { id: "chain", label: "chain", options: data.traffic.chains.map((c) => [c.name, c.name]), value: data.traffic.chains[0].name },
      { id: "types", label: "activations / weights", options: choices(data.traffic.types), value: "bf16/bf16" },
      { id: "gpu", label: "bandwidth", options: data.traffic.gpus.map((g, i) => [String(i), g.name + ", " + g.gbps + " GB/s"]), value: String(data.traffic.gpu) },
      { id: "batch", label: "batch (power of two)", min: 0, max: data.traffic.batches.length - 1, step: 1, value: 0 },
    ],
    roofline: [
      { id: "roof", label: "roof", options: data.roofline.roofs.map((r, i) => [String(i), r.name + " " + r.kind + ", " + r.dtype]), value: String(data.roofline.roof) },
      { id: "work", label: "work", options: choices(data.roofline.works), value: data.roofline.works[0] },
      { id: "phase", label: "phase", options: choices(["decode", "prefill"]), value: "decode" },
      { id: "batch", label: "batch", options: choices(data.roofline.batches.map(String)), value: String(data.roofline.batches[0]) },
      { id: "context", label: "context", options: choices(data.roofline.contexts.map(String)), value: String(data.roofline.contexts[0]) },
    ],
  };
  const state = {};

  function build(section) {
    const box = document.querySelector(`.controls[data-section=${section}]`);
    state[section] = {};
    for (const c of controls[section]) {
      const label = document.createElement("label");
      label.append(c.label + " ");
      let input;
      if (c.options) {
        input = document.createElement("select");
        for (const [value, text] of c.options) input.add(new Option(text, value));
      } else {
        input = Object.assign(document.createElement("input"), { type: "range", min: c.min, max: c.max, step: c.step });
        label.append(document.createElement("output"));
      }
      input.id = `${section}-${c.id}-control`;
      input.value = c.value;
      input.addEventListener("input", () => { read(section, c, input); changed(section, c.id); });
      label.append(input);
      box.append(label);
      read(section, c, input);
    }
  }

  function read(section, control, input) {
    state[section][control.id] = control.options ? input.value : Number(input.value);
    const output = input.parentNode.querySelector("output");
    if (output) output.textContent = section === "traffic" ? data.traffic.batches[input.value] : input.value;
  }

  function put(section, id, value) {
    const input = document.getElementById(`${section}-${id}-control`);
    input.value = value;
    read(section, controls[section].find((c) => c.id === id), input);
  }

  function changed(section, id) {
    if (section === "occupancy" && id === "preset") {
      const preset = data.occupancy.presets.find((p) => p.name === state.occupancy.preset);
      if (preset) for (const key of ["threads", "regs", "smem", "barriers"]) put("occupancy", key, preset[key]);
    }
    draw[section]();
  }

  // ---- occupancy: the least of the tabulated limits

  function occupancy(cc, threads, regs, smem, barriers) {
    const chip = data.occupancy.ccs[cc], warps = Math.ceil(threads / 32);
    const limits = { registers: chip.regs[warps - 1][Math.ceil(regs / 8) - 1], warps: Math.floor(chip.max_warps / warps), blocks: chip.max_blocks };
    // smem[n - 1] is the most shared memory with which n blocks fit; past the end it does not limit.
    limits.shared_memory = chip.smem.filter((most) => smem <= most).length;
    if (limits.shared_memory === chip.smem.length) limits.shared_memory = Infinity;
    if (chip.barriers) limits.barriers = chip.barriers[barriers - 1];
    const blocks = Math.min(...Object.values(limits));
    const order = ["registers", "shared_memory", "warps", "blocks", "barriers"];
    return { blocks, warps: blocks * warps, occupancy: blocks * warps / chip.max_warps, limiters: order.filter((k) => limits[k] === blocks) };
  }

  function occupancyFigure(axis) {
    const s = state.occupancy, chip = data.occupancy.ccs[s.cc];
    const xs = { threads: range(32).map((i) => 32 * (i + 1)), regs: range(240).map((i) => i + 16), smem: range(Math.floor(chip.smem_per_block / 512) + 1).map((i) => 512 * i) }[axis];
    const at = (x) => { const p = { ...s, [axis]: x }; return 100 * occupancy(p.cc, p.threads, p.regs, p.smem, p.barriers).occupancy; };
    const title = { threads: "threads a block", regs: "registers a thread", smem: "shared memory a block (B)" }[axis];
    const here = Math.min(s[axis], xs[xs.length - 1]);
    return [[
      { x: xs, y: xs.map(at), mode: "lines", line: { color: BLUE, shape: "hv" }, name: "occupancy" },
      { x: [s[axis]], y: [here === s[axis] ? at(s[axis]) : 0], mode: "markers", marker: { color: RED, size: 11 }, name: "here" },
    ], { xaxis: { title: { text: title } }, yaxis: { title: { text: "occupancy (%)" }, range: [0, 105] }, showlegend: false, height: 290 }];
  }

  // ---- coalescing: the rules that Nsight Compute's counters follow

  function pattern(s) {
    const width = Number(s.width);
    return range(32).map((lane) => (lane < s.lanes ? (s.offset + lane * s.stride) * width : null));
  }

  function sectorCount(width, addrs) {
    const sectors = new Set(), asked = new Set();
    for (const a of addrs) if (a !== null) {
      asked.add(a);
      for (let k = Math.floor(a / 32); k <= Math.floor((a + width - 1) / 32); k++) sectors.add(k);
    }
    return { requests: sectors.size ? 1 : 0, sectors: sectors.size, bytes_used: asked.size * width, ideal_sectors: Math.ceil(asked.size * width / 32), set: sectors };
  }

  function phases(op, width, addrs) {
    let lanes = width <= 4 ? 32 : width === 8 ? 16 : 8;
    if (op === "load" && width >= 8 && [1, 2].some((x) => addrs.every((a, i) => a === null || [null, a].includes(addrs[i ^ x])))) lanes *= 2;
    const out = [];
    for (let first = 0; first < 32; first += lanes) {
      const banks = range(32).map(() => new Map());
      for (let lane = first; lane < first + lanes; lane++) if (addrs[lane] !== null) {
        for (let w = Math.floor(addrs[lane] / 4); w <= Math.floor((addrs[lane] + width - 1) / 4); w++) {
          const bank = banks[w % 32];
          if (!bank.has(w)) bank.set(w, []);
          bank.get(w).push(lane);
        }
      }
      out.push({ banks, wavefronts: Math.max(...banks.map((b) => b.size)) });
    }
    return out;
  }

  function bankCount(op, width, addrs) {
    const list = phases(op, width, addrs);
    const wavefronts = list.reduce((sum, p) => sum + p.wavefronts, 0);
    const ideal = list.filter((p) => p.wavefronts > 0).length;
    return { wavefronts, ideal_wavefronts: ideal, bank_conflicts: wavefronts - ideal, list };
  }

  const label = (lanes) => (lanes.length === 1 ? String(lanes[0]) : lanes.length ? lanes[0] + "+" : "");

  function sectorGrid(width, addrs) {
    const cell = Math.min(width, 4), owner = new Map(), { set } = sectorCount(width, addrs);
    addrs.forEach((a, lane) => {
      if (a !== null) for (let b = a; b < a + width; b += cell) { const k = b / cell; owner.set(k, [...(owner.get(k) || []), lane]); }
    });
    const lines = [...new Set([...set].map((s) => Math.floor(s / 4)))].sort((a, b) => a - b);
    const cells = lines.map((line) => range(128 / cell).map((i) => {
      const k = line * 128 / cell + i;
      return owner.has(k) ? 1 : set.has(Math.floor(k * cell / 32)) ? 2 : 0;
    }));
    const texts = lines.map((line) => range(128 / cell).map((i) => label(owner.get(line * 128 / cell + i) || [])));
    return { rows: lines.map((l) => "line at byte " + l * 128), cells, texts };
  }

  function bankGrid(op, width, addrs) {
    const rows = [], cells = [], texts = [];
    bankCount(op, width, addrs).list.forEach((phase, number) => {
      for (let turn = 0; turn < phase.wavefronts; turn++) {
        const served = phase.banks.map((b) => [...b.values()][turn] || []);
        rows.push(turn ? `phase ${number} +${turn}` : `phase ${number}`);
        cells.push(served.map((l) => (l.length ? (turn ? 3 : 1) : turn ? 2 : 0)));
        texts.push(served.map(label));
      }
    });
    return { rows, cells, texts };
  }

  function gridFigure(grid, axis) {
    const steps = data.kinds.length;
    const scale = data.kinds.flatMap((k, i) => [[i / steps, k.colour], [(i + 1) / steps, k.colour]]);
    return [[{
      type: "heatmap", z: grid.cells.map((r) => r.map((v) => v + 0.5)), text: grid.texts, y: grid.rows, x: range(grid.cells[0].length),
      texttemplate: grid.cells[0].length <= 32 ? "%{text}" : "", hovertemplate: "%{y}, %{x}: lane %{text}<extra></extra>",
      zmin: 0, zmax: steps, colorscale: scale, showscale: false, xgap: 1, ygap: 1,
    }], { xaxis: { title: { text: axis }, dtick: grid.cells[0].length / 4 }, yaxis: { autorange: "reversed", type: "category" }, height: 130 + 19 * grid.rows.length, margin: { l: 130, r: 10, t: 10, b: 45 } }];
  }

  // ---- traffic and roofline

  function trafficFigures() {
    const s = state.traffic, t = data.traffic, moved = t.bytes[`${s.chain}|${s.types}`], gpu = t.gpus[Number(s.gpu)];
    const us = (list) => list.map((b) => b / gpu.gbps / 1e3), here = t.batches[s.batch];
    const saved = moved.unfused.map((u, i) => 100 * (u - moved.fused[i]) / u), weights = moved.unfused.map((u) => 100 * moved.weights / u);
    const line = (name, y, color, dash) => ({ x: t.batches, y, name, mode: "lines", line: { color, dash: dash || "solid" } });
    const mark = (y) => ({ x: [here], y: [y[s.batch]], mode: "markers", marker: { color: RED, size: 11 }, name: "batch " + here, showlegend: false });
    const unfused = us(moved.unfused);
    return {
      time: [[line("unfused", unfused, BLUE), line("fused", us(moved.fused), GREEN), line("weights alone", t.batches.map(() => moved.weights / gpu.gbps / 1e3), GREY, "dash"), mark(unfused)],
        { xaxis: { type: "log", title: { text: "batch" } }, yaxis: { type: "log", title: { text: "microseconds" } }, legend: { orientation: "h", y: 1.15 }, height: 360 }],
      share: [[line("saved by fusing", saved, GREEN), line("weights", weights, GREY, "dash"), mark(saved)],
        { xaxis: { type: "log", title: { text: "batch" } }, yaxis: { title: { text: "% of the unfused traffic" }, range: [0, 105] }, legend: { orientation: "h", y: 1.15 }, height: 360 }],
    };
  }

  function rooflineOps() {
    const s = state.roofline;
    if (s.work === "ops") return data.roofline.ops;
    return data.roofline.steps[[s.work, s.phase, s.batch, s.context].join("|")];
  }

  function placed() {
    const roof = data.roofline.roofs[Number(state.roofline.roof)];
    return rooflineOps().map(([name, count, flops, bytes]) => {
      const memory = bytes / roof.gbps / 1e3, compute = roof.tflops === null ? 0 : flops / roof.tflops / 1e6;
      const floor = Math.max(memory, compute);
      return { name, count, flops, bytes, floor, bound: memory >= compute ? "memory" : "compute", intensity: bytes ? flops / bytes : null };
    });
  }

  function rooflineFigure() {
    const roof = data.roofline.roofs[Number(state.roofline.roof)], ops = placed().filter((o) => o.flops > 0 && o.bytes > 0);
    const ridge = roof.tflops === null ? null : roof.tflops * 1e3 / roof.gbps;
    const high = 2 * Math.max(1000, ridge || 0, ...ops.map((o) => o.intensity));
    const xs = [0.05, ...(ridge ? [ridge] : []), high];
    return [[
      { x: xs, y: xs.map((x) => Math.min(x * roof.gbps / 1e3, roof.tflops === null ? Infinity : roof.tflops)), mode: "lines", name: roof.name, line: { color: BLUE } },
      { x: ops.map((o) => o.intensity), y: ops.map((o) => o.flops / o.floor / 1e6), text: ops.map((o) => o.name), mode: "markers", name: "at the roof", marker: { color: RED, size: 10 }, hovertemplate: "%{text}<br>%{x:.4g} FLOPs/B, %{y:.4g} TFLOP/s<extra></extra>" },
    ], { xaxis: { type: "log", title: { text: "FLOPs a byte" } }, yaxis: { type: "log", title: { text: "TFLOP/s" } }, height: 420, showlegend: false }];
  }

  // ---- drawing

  const show = (id, [traces, layout]) => Plotly.react(id, traces, { margin: { l: 60, r: 15, t: 25, b: 45 }, ...layout }, { displayModeBar: false, responsive: true });
  const say = (id, text) => { document.getElementById(id).textContent = text; };

  const draw = {
    occupancy() {
      const s = state.occupancy, chip = data.occupancy.ccs[s.cc];
      for (const axis of ["threads", "regs", "smem"]) show("occupancy-" + axis, occupancyFigure(axis));
      const r = occupancy(s.cc, s.threads, s.regs, s.smem, s.barriers);
      say("occupancy-answer", `${r.blocks} blocks, ${r.warps} of ${chip.max_warps} warps, ${percent(r.occupancy)}; limited by ${r.limiters.join(", ").replace("_", " ")}`);
    },
    coalescing() {
      const s = state.coalescing, width = Number(s.width), addrs = pattern(s), sectors = sectorCount(width, addrs);
      const swizzle = data.swizzles[Number(s.swizzle) - 1];
      // A swizzle below the vector width would tear the access: it then leaves the address alone.
      const moved = addrs.map((a) => (a === null || !swizzle || (1 << swizzle.base) < width ? a : a ^ ((a >> swizzle.shift) & swizzle.mask)));
      const banks = bankCount(s.op, width, moved);
      show("sector-plot", gridFigure(sectorGrid(width, addrs), `${Math.min(width, 4)}-byte element of the line`));
      show("bank-plot", gridFigure(bankGrid(s.op, width, moved), "bank"));
      say("sector-answer", `global: ${sectors.sectors} sectors, ideal ${sectors.ideal_sectors}; ${percent(sectors.bytes_used / (32 * sectors.sectors))} of ${32 * sectors.sectors} B used`);
      say("bank-answer", `shared: ${banks.wavefronts} wavefronts, ideal ${banks.ideal_wavefronts}; ${banks.bank_conflicts} bank conflicts`);
    },
    traffic() {
      const s = state.traffic, t = data.traffic, moved = t.bytes[`${s.chain}|${s.types}`], figures = trafficFigures();
      show("traffic-time", figures.time);
      show("traffic-share", figures.share);
      const u = moved.unfused[s.batch], f = moved.fused[s.batch], gbps = t.gpus[Number(s.gpu)].gbps;
      const pays = moved.pays === null ? "at no batch" : `from batch ${moved.pays}`;
      say("traffic-answer", `batch ${t.batches[s.batch]}: ${(u / 1e6).toPrecision(4)} MB unfused, ${(f / 1e6).toPrecision(4)} MB fused; ` +
        `${(u / gbps / 1e3).toPrecision(4)} -> ${(f / gbps / 1e3).toPrecision(4)} us, ${percent((u - f) / u)} saved; weights are ${percent(moved.weights / u)}; 10% is saved ${pays}`);
    },
    roofline() {
      const s = state.roofline, ops = placed(), total = ops.reduce((sum, o) => sum + o.count * o.floor, 0);
      show("roofline-plot", rooflineFigure());
      const roof = data.roofline.roofs[Number(s.roof)];
      const tokens = Number(s.batch) * (s.phase === "decode" ? 1 : Number(s.context));
      say("roofline-answer", s.work === "ops" ? roof.source : `step floor ${(total / 1e3).toPrecision(4)} ms, ${(tokens / total * 1e6).toPrecision(4)} tokens/s; ${roof.source}`);
      const table = document.getElementById("roofline-table");
      table.replaceChildren();
      const add = (cells, tag) => { const row = table.insertRow(); for (const c of cells) { const cell = document.createElement(tag); cell.textContent = c; row.append(cell); } };
      add(["op", "calls", "FLOPs/B", "bound", "floor us", "x calls", "share"], "th");
      for (const o of ops) add([o.name, o.count, o.intensity === null ? "-" : o.intensity.toPrecision(4), o.bound, o.floor.toPrecision(4), (o.floor * o.count).toPrecision(4), percent(o.floor * o.count / total)], "td");
    },
  };

  document.getElementById("about").textContent = data.about;
  const key = document.getElementById("key");
  for (const kind of data.kinds) {
    const chip = document.createElement("span");
    chip.style.background = kind.colour;
    key.append(chip, kind.meaning);
  }
  for (const section of Object.keys(controls)) build(section);
  if (data.occupancy.presets.length) { put("occupancy", "preset", data.occupancy.presets[0].name); changed("occupancy", "preset"); }
  for (const section of Object.keys(controls)) draw[section]();
  window.pykern = { data, state, occupancy, occupancyFigure, sectorCount, bankCount, sectorGrid, bankGrid, trafficFigures, rooflineFigure, placed };
})();
