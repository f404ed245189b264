"""The one-page report in a real headless Chromium: controls move, figures match the tools' JSON, nothing is fetched.

A test appends a script to the page. It moves controls as a user would (value, then an input event), reads what
plotly was given and drew, and leaves the answer in the document, which ``chromium --dump-dom`` prints.
"""

from __future__ import annotations

import html
import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pykern.analysis import occupancy as occ
from pykern.analysis.coalescing import Pattern, global_cost, shared_cost
from pykern.analysis.coalescing_expr import strided
from pykern.analysis.coalescing_plot import bank_grid, sector_grid
from pykern.analysis.report import SWIZZLES, report_data, report_page
from pykern.analysis.roofline import Work
from pykern.commands.coalescing import command as coalescing
from pykern.commands.report import command
from pykern.commands.roofline import command as roofline
from pykern.commands.traffic import command as traffic
from pykern.errors import ArgumentError

DATA = Path(__file__).resolve().parents[1] / "data"
BROWSER = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium here: the page is not opened")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--virtual-time-budget=20000",
]
PROBE = """
<script>
window.errors = [];
window.addEventListener("error", (e) => window.errors.push(String(e.message)));
window.addEventListener("securitypolicyviolation", (e) => window.errors.push("CSP " + e.blockedURI));
function move(section, ids, values) {
  ids.forEach((id, n) => {
    const input = document.getElementById(section + "-" + id + "-control"), value = String(values[n]);
    if (input.value === value) return;
    input.value = value;
    if (input.value !== value) throw new Error(section + "-" + id + " does not take " + value);
    input.dispatchEvent(new Event("input", { bubbles: true }));
  });
}
const trace = (t) => ({ x: t.x && [...t.x], y: t.y && [...t.y], z: t.z, text: t.text, name: t.name });
const figure = (id) => document.getElementById(id).data.map(trace);
const said = (id) => document.getElementById(id).textContent;
</script>
<script>
(async function () {
  const out = document.createElement("pre");
  out.id = "probe";
  try {
    const answers = { @@BODIES@@ };
    const fetched = performance.getEntriesByType("resource").map((r) => r.name);
    out.textContent = JSON.stringify({ answers, errors: window.errors, fetched });
  } catch (e) { out.textContent = JSON.stringify({ errors: [String(e.stack || e)] }); }
  document.body.append(out);
})();
</script>
"""


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    presets = [
        {"name": "softmax_block<bf16, 256, 4>", "threads": 256, "regs": 40, "smem": 1024, "barriers": 1}
    ]
    return report_data([Work("softmax </script><b>4096x4096", 8.4e7, 6.7e7), Work("copy", 0, 1e9)], presets)


@pytest.fixture(scope="module")
def page(data: dict[str, Any]) -> str:
    pytest.importorskip("plotly")
    return report_page(data)


def open_page(text: str, folder: Path, bodies: dict[str, str]) -> dict[str, Any]:
    """Run JavaScript bodies one after another in the page: ``{"answers", "errors", "fetched"}``."""
    path = folder / "report.html"
    before, found, after = text.rpartition("</body>")
    assert found
    calls = ",".join(
        f"{json.dumps(name)}: await (async () => {{ {body} }})()" for name, body in bodies.items()
    )
    path.write_text(before + PROBE.replace("@@BODIES@@", calls) + found + after, encoding="utf-8")
    args = [str(BROWSER), *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", path.as_uri()]
    done = subprocess.run(args, capture_output=True, text=True, timeout=240)
    match = re.search(r'<pre id="probe">(.*?)</pre>', done.stdout, re.S)
    assert match, done.stderr[-2000:]
    return json.loads(html.unescape(match[1]))


@pytest.fixture(scope="module")
def answers(page: str, data: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What every probe found in the page, from one browser session (opening five megabytes takes seconds)."""
    bodies = {
        "draws": DRAWS,
        "counted": COUNTED
        % json.dumps([[r["space"], r["op"], r["width"], r["addrs"]] for r in counted_rows()]),
        "grids": GRIDS % json.dumps(GRID_MOVES),
        "occupancy": OCCUPANCY % json.dumps(OCCUPANCY_MOVES),
        "traffic": TRAFFIC % json.dumps(traffic_moves(data)),
        "roofline": ROOFLINE % json.dumps(roofline_moves(data)),
    }
    result = open_page(page, tmp_path_factory.mktemp("report"), bodies)
    assert result["errors"] == []
    assert result["fetched"] == []
    return result["answers"]


def tool(program: Any, *args: str) -> Any:
    run = CliRunner().invoke(program, [*args, "--json"])
    assert run.exit_code == 0, run.output
    return json.loads(run.stdout)


# --- the page as text


def test_page_is_self_contained(page: str) -> None:
    head = page[: page.index("<script")]
    assert "default-src 'none'" in head
    assert not re.search(
        r"<(script|link|img|iframe)[^>]*(src|href)=", page[: page.index('<script type="application/json"')]
    )
    assert "@@" not in page[:4000]
    assert page.count('<script type="application/json" id="data">') == 1
    text = page.split('id="data">', 1)[1].split("</script>", 1)[0]
    assert json.loads(text)["roofline"]["ops"][0][0] == "softmax </script><b>4096x4096", (
        "data cannot end its element"
    )


def test_missing_plotly_is_named(data: dict[str, Any]) -> None:
    def missing() -> str:
        raise ArgumentError("report", "plotly is missing", "pip install plotly")

    with pytest.raises(ArgumentError, match="pip install plotly"):
        report_page(data, missing)


def test_occupancy_table_is_the_calculator() -> None:
    table = report_data()["occupancy"]["ccs"]
    assert set(table) == set(occ.known_ccs())
    draw = random.Random(7)
    for _ in range(300):
        cc = draw.choice(occ.known_ccs())
        chip = table[cc]
        config = occ.Config(
            threads=draw.randint(1, 32) * 32,
            regs=draw.randint(1, 255),
            dyn_smem=draw.randint(0, chip["smem_per_block"]),
            barriers=draw.randint(0, 15) + 1,
        )
        limits = [
            chip["regs"][config.warps - 1][-(-config.regs // 8) - 1],
            chip["max_warps"] // config.warps,
            chip["max_blocks"],
        ]
        fitting = sum(config.dyn_smem <= most for most in chip["smem"])
        limits += [fitting] if fitting < len(chip["smem"]) else []
        limits += [chip["barriers"][config.barriers - 1]] if chip["barriers"] else []
        assert min(limits) == occ.occupancy(cc, config).blocks, (cc, config)


def test_command_writes_the_page(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    run = CliRunner().invoke(command, ["--op", "softmax:64x512", "--regs", "40", "-o", str(path)])
    assert run.exit_code == 0, run.output
    assert path.stat().st_size > 1e6
    inside = json.loads(
        CliRunner().invoke(command, ["--op", "softmax:64x512", "--regs", "40", "--json"]).stdout
    )
    assert inside["roofline"]["ops"] == [["softmax 64x512 bfloat16", 1, 5 * 64 * 512, 2 * 64 * 512 * 2]]
    assert inside["occupancy"]["presets"] and inside["occupancy"]["presets"][0]["threads"] >= 32
    for args in (
        ["--op", "nope"],
        ["--op", "softmax:4xx"],
        ["--arch", "10"],
        ["--op", "softmax", "--arch", "1"],
        ["-o", "/no/dir/x.html"],
    ):
        bad = CliRunner().invoke(command, args if "-o" in args else [*args, "-o", str(path)])
        if args == ["--arch", "10"]:
            continue  # only asked of an op
        assert bad.exit_code == 2 and bad.stderr.startswith("error: "), args


@pytest.mark.nvcc
def test_an_op_starts_from_its_compiled_kernel() -> None:
    run = CliRunner().invoke(command, ["--op", "softmax:64x512", "--json"])
    assert run.exit_code == 0, run.output
    (preset,) = json.loads(run.stdout)["occupancy"]["presets"]
    assert preset["name"].startswith("softmax") and preset["threads"] == 128 and 16 <= preset["regs"] <= 255


# --- the page in a browser: what the probes do


DRAWS = """
  const ids = ["occupancy-threads", "occupancy-regs", "occupancy-smem", "sector-plot", "bank-plot", "traffic-time",
               "traffic-share", "roofline-plot"];
  const size = (id) => document.getElementById(id).clientHeight;
  return {
    drawn: ids.map((id) => [id, document.querySelectorAll("#" + id + " svg.main-svg").length, size(id)]),
    lines: document.querySelectorAll("path.js-line").length,
    said: ["occupancy-answer", "sector-answer", "bank-answer", "traffic-answer", "roofline-answer"].map(said),
    preset: [window.pykern.state.occupancy.threads, window.pykern.state.occupancy.regs],
    table: document.querySelectorAll("#roofline-table tr").length,
    texts: figure("roofline-plot")[1].text,
  };
"""
COUNTED = """
  const { sectorCount, bankCount } = window.pykern;
  return %s.map(([space, op, width, addrs]) => {
    const c = space === "global" ? sectorCount(width, addrs) : bankCount(op, width, addrs);
    return { requests: c.requests, sectors: c.sectors, wavefronts: c.wavefronts, bank_conflicts: c.bank_conflicts };
  });
"""
GRIDS = """
  return %s.map((values) => {
    move("coalescing", ["op", "width", "stride", "offset", "lanes", "swizzle"], values);
    return { sector: figure("sector-plot")[0], bank: figure("bank-plot")[0],
             said: [said("sector-answer"), said("bank-answer")] };
  });
"""
OCCUPANCY = """
  return %s.map((values) => {
    move("occupancy", ["cc", "threads", "regs", "smem", "barriers"], values);
    return { said: said("occupancy-answer"), curves: ["threads", "regs", "smem"].map((a) => figure("occupancy-" + a)) };
  });
"""
TRAFFIC = """
  return %s.map((values) => {
    move("traffic", ["chain", "types", "gpu", "batch"], values);
    return { time: figure("traffic-time"), share: figure("traffic-share"), said: said("traffic-answer") };
  });
"""
ROOFLINE = """
  const rows = () => [...document.querySelectorAll("#roofline-table tr")].slice(1);
  return %s.map((values) => {
    move("roofline", ["roof", "work", "phase", "batch", "context"], values);
    return { figure: figure("roofline-plot"), said: said("roofline-answer"), placed: window.pykern.placed(),
             cells: rows().map((r) => [...r.cells].map((c) => c.textContent)) };
  });
"""


def counted_rows() -> list[dict[str, Any]]:
    """The 600 counted patterns and the 38 named cases."""
    rows = [json.loads(line) for line in (DATA / "coalescing_h200.jsonl").read_text().splitlines()]
    named = json.loads((DATA / "coalescing_measured.json").read_text())
    for space in ("global", "shared", "shared_flagged"):
        rows += [{"space": space.split("_")[0], "op": "load", **case} for case in named[space]]
    return rows


_draw = random.Random(11)
GRID_MOVES = [
    [
        _draw.choice(["load", "store"]),
        _draw.choice([1, 2, 4, 8, 16]),
        _draw.choice([0, 1, 2, 3, 8, 32, 33]),
        _draw.choice([0, 1, 8]),
        _draw.choice([32, 32, 17, 1]),
        _draw.randint(0, len(SWIZZLES)),
    ]
    for _ in range(16)
] + [["load", 4, 2, 1, 32, 0], ["load", 4, 32, 0, 32, 4], ["load", 16, 8, 0, 32, 1], ["load", 8, 0, 0, 32, 0]]
OCCUPANCY_MOVES = [
    [
        _draw.choice(["7.0", "8.0", "8.6", "9.0", "10.0", "12.0"]),
        _draw.randint(1, 32) * 32,
        _draw.randint(16, 255),
        512 * _draw.randint(0, 120),
        _draw.randint(1, 16),
    ]
    for _ in range(16)
]


def traffic_moves(data: dict[str, Any]) -> list[list[Any]]:
    rates = data["traffic"]["gpus"]
    gb10 = next(n for n, g in enumerate(rates) if g["name"].startswith("GB10"))
    return [
        ["mlp", "bf16/bf16", data["traffic"]["gpu"], 0],
        ["gated-mlp", "bf16/int4", gb10, 6],
        ["residual-norm", "fp8/fp8", 0, 12],
        ["attention", "fp32/fp32", len(rates) - 1, 14],
    ]


def roofline_moves(data: dict[str, Any]) -> list[list[Any]]:
    roofs = data["roofline"]["roofs"]
    kinds = [n for n, r in enumerate(roofs) if r["name"].startswith("H200") and r["dtype"] == "bf16"]
    assert [roofs[n]["kind"] for n in kinds] == ["datasheet", "measured"]
    return [
        [kinds[0], "llama-3-8b", "decode", 1, 4096],
        [kinds[1], "llama-3-8b", "decode", 64, 4096],
        [kinds[1], "smollm2-135m", "prefill", 8, 512],
    ]


# --- and what they must find


@needs_browser
def test_page_draws_every_section(answers: dict[str, Any]) -> None:
    found = answers["draws"]
    assert all(svgs >= 1 and height > 80 for _, svgs, height in found["drawn"]), found
    assert found["lines"] >= 8 and all(found["said"])
    assert found["preset"] == [256, 40] and found["table"] == 3
    assert found["texts"] == ["softmax </script><b>4096x4096"], "work without arithmetic has no place"


@needs_browser
def test_counted_patterns_are_exact_in_the_page(answers: dict[str, Any]) -> None:
    """The one piece of logic written twice: all 600 counted patterns and every named case, in the browser."""
    rows = counted_rows()
    assert len(answers["counted"]) == len(rows) == 638
    for row, got in zip(rows, answers["counted"]):
        expect = {k: v for k, v in row["expect"].items() if k in got}
        assert expect and {k: got[k] for k in expect} == expect, row


@needs_browser
def test_grids_follow_the_controls(answers: dict[str, Any]) -> None:
    """Moving width, stride, offset, lanes and swizzle redraws both grids as the tool draws them."""
    found = answers["grids"]
    for (op, width, stride, offset, lanes, swizzle), got in zip(GRID_MOVES, found):
        active = frozenset(range(lanes))
        flat = strided("global", op, width, stride * width, offset * width, active)
        shared = Pattern("shared", op, width, flat.addrs)
        if swizzle and (1 << SWIZZLES[swizzle - 1].base) >= width:
            shared = shared.moved(None if a is None else SWIZZLES[swizzle - 1](a) for a in shared.addrs)
        for picture, drawn in ((sector_grid(flat), got["sector"]), (bank_grid(shared), got["bank"])):
            expect = picture.to_json()
            assert [[int(v) for v in row] for row in drawn["z"]] == expect["cells"]
            assert drawn["text"] == expect["texts"]
        cost = global_cost(flat)
        assert got["said"][0].startswith(f"global: {cost.sectors} sectors, ideal {cost.ideal_sectors};")
        assert got["said"][1].startswith(f"shared: {shared_cost(shared).wavefronts} wavefronts,")
    program = tool(coalescing, "--width", "4", "--stride", "2", "--offset", "1")
    assert f"{program['sectors']} sectors" in found[-4]["said"][0]
    assert found[-3]["said"][1].startswith("shared: 1 wavefronts"), (
        "the swizzle control frees a 32-way conflict"
    )


@needs_browser
def test_occupancy_follows_the_controls(answers: dict[str, Any]) -> None:
    for (cc, threads, regs, smem, barriers), got in zip(OCCUPANCY_MOVES, answers["occupancy"]):
        config = occ.Config(threads=threads, regs=regs, dyn_smem=smem, barriers=barriers)
        expect = occ.occupancy(cc, config)
        assert got["said"].startswith(
            f"{expect.blocks} blocks, {expect.warps} of {occ.arch(cc).max_warps} warps"
        )
        assert got["said"].endswith(
            "limited by " + ", ".join(name.replace("_", " ") for name in expect.limiters)
        )
        for name, (line, here) in zip(("threads", "regs", "dyn_smem"), got["curves"]):
            assert here["x"] == [getattr(config, name)]
            for x, y in list(zip(line["x"], line["y"]))[:: 1 if name == "threads" else 13]:
                value = 100 * occ.occupancy(cc, config.but(**{name: x})).occupancy
                assert y == pytest.approx(value), (cc, name, x)


@needs_browser
def test_traffic_follows_the_controls(answers: dict[str, Any], data: dict[str, Any]) -> None:
    for (chain, types, gpu, batch), got in zip(traffic_moves(data), answers["traffic"]):
        dtype, weights = types.split("/")
        rate = str(data["traffic"]["gpus"][gpu]["gbps"])
        args = [chain, "--dtype", dtype, "--weights", weights, "--gbps", rate, "--batch", "1:16384"]
        expect = tool(traffic, *args)
        rows = expect["batches"]
        assert got["time"][0]["x"] == [r["batch"] for r in rows]
        assert got["time"][0]["y"] == pytest.approx([r["unfused_us"] for r in rows])
        assert got["time"][1]["y"] == pytest.approx([r["fused_us"] for r in rows])
        assert got["share"][0]["y"] == pytest.approx([100 * r["saved_share"] for r in rows])
        assert got["share"][1]["y"] == pytest.approx([100 * r["weight_share"] for r in rows])
        assert got["time"][3]["x"] == [rows[batch]["batch"]]
        assert got["said"].startswith(f"batch {rows[batch]['batch']}:")
        pays = expect["pays_from_batch"]
        assert got["said"].endswith("at no batch" if pays is None else f"from batch {pays}")


@needs_browser
def test_roofline_follows_the_controls(answers: dict[str, Any], data: dict[str, Any]) -> None:
    for (roof, work, phase, batch, context), got in zip(roofline_moves(data), answers["roofline"]):
        args = ["--model", work, "--phase", phase, "--batch", str(batch), "--context", str(context)]
        expect = tool(roofline, *args, "--roof", data["roofline"]["roofs"][roof]["kind"])["steps"][0]
        assert (
            [p["name"] for p in got["placed"]]
            == [o["name"] for o in expect["ops"]]
            == [c[0] for c in got["cells"]]
        )
        assert [p["floor"] for p in got["placed"]] == pytest.approx([o["floor_us"] for o in expect["ops"]])
        assert [float(c[5]) for c in got["cells"]] == pytest.approx(
            [o["total_us"] for o in expect["ops"]], rel=1e-3
        )
        shown = [o for o in expect["ops"] if o["flops"] > 0]
        assert got["figure"][1]["x"] == pytest.approx([o["intensity"] for o in shown])
        assert got["figure"][1]["y"] == pytest.approx([o["attainable_tflops"] for o in shown])
        match = re.match(r"step floor ([\d.]+) ms, ([\d.e+]+) tokens/s", got["said"])
        assert match, got["said"]
        assert float(match[1]) == pytest.approx(expect["floor_us"] / 1e3, rel=1e-3)
        assert float(match[2]) == pytest.approx(expect["tokens_per_s"], rel=1e-3)


@needs_browser
def test_the_probe_can_fail(page: str, tmp_path: Path) -> None:
    """A page that fetches, and a page whose rules are wrong, are seen to."""
    wrong = page.replace("Math.floor((a + width - 1) / 32)", "Math.floor(a / 32) + 1", 1)
    assert wrong != page
    fetch = "const i = new Image(); i.src = 'http://127.0.0.1:9/x.png'; await new Promise((r) => setTimeout(r, 300)); "
    result = open_page(
        wrong, tmp_path, {"x": fetch + "return window.pykern.sectorCount(4, [0, 4, 8]).sectors;"}
    )
    assert result["answers"]["x"] == 2, "one sector, were the rule right"
    assert any("127.0.0.1" in error for error in result["errors"])
