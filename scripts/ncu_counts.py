"""Memory traffic of shipped kernels: what Nsight Compute counts on a GPU, beside what the host checker counts.

    python scripts/ncu_counts.py collect [--out FILE] [--keep DIR]   on a GPU with ncu on PATH: run, count, write FILE
    python scripts/ncu_counts.py compare [--data FILE] [NAME ...]    anywhere: host counts beside the recorded ones
    python scripts/ncu_counts.py host [NAME ...]                     anywhere: host counts alone
    python scripts/ncu_counts.py parse --out FILE --keep DIR         write FILE from what collect left in DIR
    python scripts/ncu_counts.py warm | run [--plan FILE]            what collect does, without and under ncu

A problem is one call of an op on fixed data. Counts are per call (summed over its launches): for global loads and
stores and for cp.async's reads, requests (a warp's instruction with at least one active lane) and sectors of 32 bytes;
for shared loads, stores and matrix loads, requests and wavefronts.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import hashlib
import io
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "ncu_counts.json"


# ---- problems


@dataclass(frozen=True)
class Problem:
    """One op call. ``case``: as the op's ``cases()`` yields; ``data``: seed of its values."""

    name: str
    op: str
    case: Callable[[], dict[str, Any]]
    data: int = 0

    def args(self, device: str) -> dict[str, Any]:
        from pykern import op as registry
        from pykern.testing import make_args

        return make_args(registry.get(self.op), self.case(), self.data, device)

    def launches(self, device: str, sms: int) -> list[dict[str, Any]]:
        """Kernel, grid and block of each launch of the plan on a card of ``sms`` SMs."""
        from pykern import op as registry
        from pykern.plan import host_target

        op = registry.get(self.op)
        plan = op.planned(op.problem_of_args(self.args(device)), host_target("90a", sms))
        return [
            {
                "kernel": launch.kernel,
                "source": launch.source or op.source,
                "digest": digest(launch.source or op.source),
                "grid": list(three(launch.grid)),
                "block": list(three(launch.block)),
            }
            for launch in plan.launches
        ]


def digest(source: str) -> str:
    """Of the files under cuda_src/ops that a kernel is made of: whether it is still what was measured."""
    seen: dict[str, str] = {}
    waiting = [source]
    while waiting:
        path = waiting.pop()
        if path not in seen:
            seen[path] = (ROOT / "cuda_src" / path).read_text()
            waiting += re.findall(r'#include "(ops/[^"]+)"', seen[path])
    return hashlib.sha256(json.dumps(sorted(seen.items())).encode()).hexdigest()[:16]


def three(size: Any) -> tuple[int, int, int]:
    sizes = (size,) if isinstance(size, int) else tuple(size)
    return (*sizes, 1, 1)[:3]


def row(dtype: str, shape: tuple[int, ...], layout: str = "contiguous", name: str = "x", **more: Any) -> Any:
    def case() -> dict[str, Any]:
        from pykern.op import Spec

        specs = {k: Spec(*v) if isinstance(v, tuple) else v for k, v in more.items()}
        return {name: Spec(dtype, shape, layout), **specs}

    return case


def linear(dtype: str, m: int, n: int, k: int, layout: str = "contiguous", bias: bool = False) -> Any:
    more: dict[str, Any] = {"bias": (dtype, (n,))} if bias else {}
    return row(dtype, (m, k), layout, w=(dtype, (n, k)), **more)


def attention(dtype: str, lens: Sequence[tuple[int, int]], **more: Any) -> Any:
    def case() -> dict[str, Any]:
        from pykern.ops._attention_data import batch

        return batch(dtype, lens, **more)

    return case


def rope_append() -> dict[str, Any]:
    from pykern.ops.rope_append_kv import _case

    return _case("bfloat16", 7, 4, 2, 64, 64, 4, 3)


def quantised(layout: str, n: int, k: int, dtype: str) -> Any:
    def case() -> dict[str, Any]:
        from pykern.ops._quant import LAYOUTS, plane_specs

        group = 0 if LAYOUTS[layout].block else 64
        minima = "float16" if LAYOUTS[layout].minima else None
        planes = plane_specs(layout, n, k, group, "float16", minima, "contiguous")
        return {"planes": planes, "layout": layout, "group": group, "dtype": dtype}

    return case


def quant_linear(m: int, layout: str) -> Any:
    def case() -> dict[str, Any]:
        from pykern.ops.quant_linear import case as make

        return make("bfloat16", m, 48, 256, layout)

    return case


def declared(op: str, number: int = 0) -> Any:
    """A case that the op itself declares."""

    def case() -> dict[str, Any]:
        from pykern import op as registry

        return list(registry.get(op).cases())[number]

    return case


def problems() -> list[Problem]:
    """Small ones of a few blocks; those named ``_rows`` or ``_offset`` have rows that do not start on 16 bytes."""
    bf16, f32 = "bfloat16", "float32"
    angles = ("float32", (16, 64))
    return [
        Problem("softmax_warp", "softmax", row(bf16, (9, 1000))),
        Problem("softmax_block", "softmax", row(f32, (5, 3000), log=True)),
        Problem("softmax_long", "softmax", row(bf16, (2, 20000))),
        Problem("softmax_rows", "softmax", row(bf16, (9, 777), "rows")),
        Problem("rms_norm", "rms_norm", row(bf16, (6, 2048), weight=(bf16, (2048,)))),
        Problem(
            "rms_norm_residual",
            "rms_norm",
            row(bf16, (6, 576), weight=(bf16, (576,)), residual=(bf16, (6, 576))),
        ),
        Problem("layer_norm", "layer_norm", row(f32, (5, 1024), weight=(f32, (1024,)), bias=(f32, (1024,)))),
        Problem(
            "layer_norm_offset", "layer_norm", row("float16", (5, 501), "offset", weight=("float16", (501,)))
        ),
        Problem("silu_and_mul", "silu_and_mul", row(bf16, (7, 2 * 1536))),
        Problem("gelu_and_mul_rows", "gelu_and_mul", row("float16", (7, 2 * 333), "rows")),
        Problem("embedding", "embedding", row("int64", (5,), name="ids", table=(bf16, (11, 576)))),
        Problem("rope", "rope", row(bf16, (9, 3, 64), positions=("int64", (9,)), cos_sin=angles)),
        Problem(
            "rope_interleaved",
            "rope",
            row(f32, (9, 3, 64), positions=("int64", (9,)), cos_sin=angles, interleaved=True),
        ),
        Problem("rope_append_kv", "rope_append_kv", rope_append),
        Problem("argmax", "argmax", row(f32, (3, 5000))),
        Problem("argmax_split", "argmax", row(bf16, (1, 49152))),
        Problem("linear_f32_tiled", "linear", linear(f32, 40, 72, 80)),
        Problem("linear_f32_skinny", "linear", linear(f32, 1, 72, 320)),
        Problem("linear_mma", "linear", linear(bf16, 72, 136, 192, bias=True)),
        Problem("linear_mma_rows", "linear", linear(bf16, 72, 72, 130, "rows")),
        Problem("linear_mma_skinny", "linear", linear(bf16, 5, 48, 576)),
        Problem(
            "attention_prefill",
            "attention",
            attention(bf16, [(80, 80)], d=64, group=3, uniform=True, causal=True),
        ),
        Problem("attention_decode", "attention", attention(bf16, [(1, 300)], d=64, group=3, uniform=True)),
        Problem(
            "attention_paged", "attention", attention(bf16, [(1, 90), (1, 37)], d=64, group=4, page_size=16)
        ),
        Problem(
            "attention_f32", "attention", attention(f32, [(20, 50)], d=64, group=2, uniform=True, causal=True)
        ),
        Problem("merge_states", "merge_states", merge_case),
        Problem("dequantize_q4_1", "dequantize", quantised("q4_1", 5, 512, f32)),
        Problem("dequantize_int4", "dequantize", quantised("int4", 5, 512, bf16)),
        Problem("quant_linear_q4_1", "quant_linear", quant_linear(3, "q4_1")),
        Problem("quant_linear_int4", "quant_linear", quant_linear(1, "int4")),
        Problem("quant_embedding", "quant_embedding", declared("quant_embedding")),
        Problem("quantize", "quantize", declared("quantize")),
        Problem("apply_penalties", "apply_penalties", declared("apply_penalties")),
        Problem("sample", "sample", declared("sample")),
    ]


def merge_case() -> dict[str, Any]:
    from pykern.ops.merge_states import batch

    return batch("bfloat16", 9, 3, 64)


def chosen(names: Iterable[str]) -> list[Problem]:
    known = {p.name: p for p in problems()}
    unknown = [n for n in names if n not in known]
    if unknown:
        raise SystemExit(f"unknown problem {unknown[0]!r}: {', '.join(known)}")
    return [known[n] for n in names] or list(known.values())


# ---- what is counted, and Nsight Compute's names of it

# count -> metrics whose sum it is. The first alternative that the card's ncu has is used.
COUNTS: dict[str, tuple[tuple[str, ...], ...]] = {
    "global load requests": (("l1tex__t_requests_pipe_lsu_mem_global_op_ld",),),
    "global load sectors": (("l1tex__t_sectors_pipe_lsu_mem_global_op_ld",),),
    "global store requests": (("l1tex__t_requests_pipe_lsu_mem_global_op_st",),),
    "global store sectors": (("l1tex__t_sectors_pipe_lsu_mem_global_op_st",),),
    "cp.async requests": (
        (
            "l1tex__t_requests_pipe_lsu_mem_global_op_ldgsts_cache_access",
            "l1tex__t_requests_pipe_lsu_mem_global_op_ldgsts_cache_bypass",
        ),
        ("l1tex__t_requests_pipe_lsu_mem_global_op_ldgsts",),
    ),
    "cp.async sectors": (
        (
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_access",
            "l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts_cache_bypass",
        ),
        ("l1tex__t_sectors_pipe_lsu_mem_global_op_ldgsts",),
    ),
    "shared load requests": (
        ("smsp__inst_executed_op_shared_ld",),
        ("smsp__sass_inst_executed_op_shared_ld",),
    ),
    "shared load wavefronts": (
        ("smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld",),
        ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld",),
    ),
    "shared store requests": (
        ("smsp__inst_executed_op_shared_st",),
        ("smsp__sass_inst_executed_op_shared_st",),
    ),
    "shared store wavefronts": (
        ("smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_st",),
        ("l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st",),
    ),
    "matrix load requests": (("smsp__inst_executed_op_ldsm",), ("smsp__sass_inst_executed_op_ldsm",)),
    "matrix load wavefronts": (("smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm",),),
}
# Everything near them is recorded as well: it tells why a count differs.
RELATED = re.compile(
    r"l1tex__t_(requests|sectors)_pipe_lsu_mem_(global|local)_op_(ld|st|red|atom|ldgsts\w*)$"
    r"|l1tex__data_pipe_lsu_wavefronts_mem_shared(_op_\w+)?$"
    r"|smsp__inst_executed_op_(shared|shared_\w+|ldsm|stsm|ldgsts\w*|global_\w+|local_\w+)$"
    r"|smsp__sass_inst_executed_op_(shared|shared_\w+|ldsm|ldgsts\w*|global_\w+)$"
    r"|smsp__sass_l1tex_(t_sectors|t_requests|data_pipe_lsu_wavefronts)_\w*mem_(global|shared)\w*$"
    r"|smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared\w*$"
)
NOT_RELATED = re.compile(r"lookup|_evict|_pct|_dsmem|_remote|_ideal_|surface|texture")


def pick_metrics(available: str) -> list[str]:
    """The metrics of COUNTS and RELATED in the text of ``ncu --query-metrics``; of COUNTS all when it is empty."""
    names = re.findall(r"^\s*(\w+__\w+)\b", available, re.M)
    wanted = {name for alternatives in COUNTS.values() for names_ in alternatives for name in names_}
    if not names:
        return sorted({name for alternatives in COUNTS.values() for name in alternatives[0]})
    return sorted({n for n in names if n in wanted or (RELATED.search(n) and not NOT_RELATED.search(n))})


def counts_of(metrics: dict[str, float]) -> dict[str, int]:
    """COUNTS of one launch from its metrics (``.sum``); a count none of whose alternatives was measured is left out."""
    found = {}
    for count, alternatives in COUNTS.items():
        for names in alternatives:
            values = [metrics[f"{n}.sum"] for n in names if f"{n}.sum" in metrics]
            if values and (len(values) == len(names) or "cp.async" in count):
                found[count] = round(sum(values))
                break
    return found


def total(launches: Iterable[dict[str, int]]) -> dict[str, int]:
    out: dict[str, int] = {}
    for counts in launches:
        for name, value in counts.items():
            out[name] = out.get(name, 0) + value
    return out


# ---- on the GPU


def warm_up() -> None:
    """Compile the kernels of all problems at once, so that nothing is compiled under ncu."""
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from pykern.jit import build, limits
    from pykern.jit.target import default_target

    build.launcher(True)
    target = default_target("cuda")
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    wanted = {(launch["source"], launch["kernel"]) for p in problems() for launch in p.launches("cpu", sms)}
    with ThreadPoolExecutor(limits.jobs(True)) as pool:
        list(pool.map(lambda w: build.variant(*w, backend="cuda", arch=target.arch), sorted(wanted)))


def run(plan_file: str | None) -> None:
    """Every problem once, between cudaProfilerStart and cudaProfilerStop; their plans go to ``plan_file``."""
    import torch

    from pykern import op as registry

    properties = torch.cuda.get_device_properties(0)
    plans = []
    for p in problems():
        op, args = registry.get(p.op), p.args("cuda")
        try:
            op(
                **args
            )  # plan and load; the measured call gets data of its own, as ops may write their arguments
            args = p.args("cuda")
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            try:
                op(**args)
                torch.cuda.synchronize()
            finally:
                torch.cuda.cudart().cudaProfilerStop()
        except Exception as error:
            print(f"{p.name}: {type(error).__name__}: {error}", file=sys.stderr)
            continue
        plans.append({"name": p.name, "launches": p.launches("cpu", properties.multi_processor_count)})
    if plan_file:
        found = {"gpu": properties.name, "sms": properties.multi_processor_count, "torch": torch.__version__}
        Path(plan_file).write_text(json.dumps({**found, "problems": plans}))


def parse_raw(text: str) -> list[dict[str, Any]]:
    """Launches of ``ncu --csv --page raw``, in order: id, kernel, grid, block and metrics by full name."""
    lines = [line for line in text.splitlines() if line.startswith('"')]
    launches = []
    for record in csv.DictReader(io.StringIO("\n".join(lines))):
        if not (record.get("ID") or "").isdigit():
            continue  # the row of units
        metrics: dict[str, float] = {}
        for name, value in record.items():
            if name and "__" in name and value:
                try:
                    number = float(value.replace(",", ""))
                    metrics[name] = int(number) if number.is_integer() else number
                except ValueError:
                    continue
        sizes = [[int(v) for v in re.findall(r"\d+", record[k])] for k in ("Grid Size", "Block Size")]
        launches.append(
            {
                "id": int(record["ID"]),
                "kernel": record["Kernel Name"],
                "grid": sizes[0],
                "block": sizes[1],
                "metrics": metrics,
            }
        )
    return launches


def match(plans: list[dict[str, Any]], launches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """``plans`` with what was measured, launch by launch; kernels that are not planned (torch's) are passed over."""
    waiting = list(launches)
    out = []
    for problem in plans:
        measured = []
        for planned in problem["launches"]:
            base = planned["kernel"].split("<")[0].split("::")[-1]
            while waiting and not re.search(rf"\b{base}\b", waiting[0]["kernel"]):
                waiting.pop(0)
            if not waiting:
                raise SystemExit(f"{problem['name']}: no launch of {base} was measured")
            got = waiting.pop(0)
            for what in ("grid", "block"):
                if got[what] != planned[what]:
                    raise SystemExit(
                        f"{problem['name']}: {what} {got[what]} measured, {planned[what]} planned"
                    )
            measured.append({**planned, "metrics": got["metrics"]})
        counts = total(counts_of(launch["metrics"]) for launch in measured)
        out.append({"name": problem["name"], "counts": counts, "launches": measured})
    return out


def shell(command: Sequence[str], timeout: int) -> subprocess.CompletedProcess[str]:
    print("$ " + " ".join(str(c) for c in command)[:200], flush=True)
    return subprocess.run(list(command), capture_output=True, text=True, timeout=timeout, cwd=ROOT)


def collect(out: Path, keep: Path | None) -> int:
    """Warm up, count under ncu, write ``out``; what ncu said is kept in ``keep``, for ``parse``."""
    keep = keep or Path(tempfile.mkdtemp(prefix="ncu_counts"))
    keep.mkdir(parents=True, exist_ok=True)
    me = [sys.executable, str(Path(__file__).resolve())]
    warmed = shell([*me, "warm"], 300)
    if warmed.returncode:
        print(warmed.stdout + warmed.stderr)
        return 1
    version = shell(["ncu", "--version"], 60).stdout.strip().splitlines()
    driver = shell(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], 60).stdout.split()
    head = {"driver": driver[0] if driver else "", "ncu": version[-1] if version else ""}
    (keep / "head.json").write_text(json.dumps({**head, "date": datetime.date.today().isoformat()}))
    query = shell(["ncu", "--query-metrics", "--chips", "gh100"], 120)
    (keep / "query_metrics.txt").write_text(query.stdout + query.stderr)
    metrics = pick_metrics(query.stdout if query.returncode == 0 else "")
    print(f"{len(metrics)} metrics")
    watch = ["ncu", "--profile-from-start", "off", "--target-processes", "application-only", "--clock-control", "none"]
    watch += ["--cache-control", "none", "--csv", "--print-units", "base"]
    started = [*me, "run", "--plan", str(keep / "plans.json")]
    while True:
        wanted = ",".join(f"{m}.sum" for m in metrics)
        done = shell([*watch, "--page", "raw", "--metrics", wanted, *started], 500)
        # A name that this ncu does not know stops it: go on without.
        errors = " ".join(re.findall(r"^==ERROR==.*$", done.stdout + done.stderr, re.M))
        left = [m for m in metrics if m not in re.findall(r"\w+__\w+", errors)]
        if parse_raw(done.stdout) or len(left) == len(metrics) or not left:
            break
        print(f"without {sorted(set(metrics) - set(left))}")
        metrics = left
    (keep / "raw.csv").write_text(done.stdout)
    (keep / "stderr.txt").write_text(done.stderr)
    if done.stderr.strip():
        print(done.stderr[-3000:])
    failed = parse(out, keep)
    # Instruction by instruction, to see where a count comes from; not needed for the record.
    try:
        source = shell([*watch, "--page", "source", "--section", "SourceCounters", *started], 100)
        (keep / "source.csv").write_text(source.stdout + source.stderr)
    except subprocess.TimeoutExpired:
        print("no instruction table: over 100 s")
    return failed


def parse(out: Path, keep: Path) -> int:
    """Write ``out`` from what collect left in ``keep``; ``because`` entries of an ``out`` that exists are kept."""
    text = (keep / "raw.csv").read_text()
    launches = parse_raw(text)
    if not launches or not (keep / "plans.json").exists():
        print(f"nothing measured: {text[-3000:]}")
        return 1
    found = json.loads((keep / "plans.json").read_text())
    matched = match(found.pop("problems"), launches)
    before = {p["name"]: p for p in json.loads(out.read_text())["problems"]} if out.exists() else {}
    for entry in matched:
        if "because" in before.get(entry["name"], {}):
            entry["because"] = before[entry["name"]]["because"]
    write(out, {**found, **json.loads((keep / "head.json").read_text()), "problems": matched})
    print(f"{out}: {len(matched)} problems")
    return 0


def write(path: Path, record: dict[str, Any]) -> None:
    """One problem a line."""
    head = {k: v for k, v in record.items() if k != "problems"}
    lines = ",\n".join("  " + json.dumps(p) for p in record["problems"])
    path.write_text(json.dumps(head)[:-1] + f', "problems": [\n{lines}\n]}}\n')


# ---- on the host


def host_rows(problem: Problem, sms: int) -> list[dict[str, Any]]:
    """The checker's per-instruction rows of one call, planned for a card of ``sms`` SMs; findings raise."""
    from pykern import check
    from pykern import op as registry
    from pykern.op import host

    args = problem.args("cpu")
    with check.recording() as reports, host(arch="90a", check=True, trace=True, sms=sms):
        registry.get(problem.op)(**args)
    return [r for report in reports for r in report["lines"]]


# (space, op, by) -> (requests, sectors or wavefronts)
HOST = {
    ("global", "load", ""): ("global load requests", "global load sectors"),
    ("global", "store", ""): ("global store requests", "global store sectors"),
    ("global", "load", "cp.async"): ("cp.async requests", "cp.async sectors"),
    ("shared", "load", ""): ("shared load requests", "shared load wavefronts"),
    ("shared", "store", ""): ("shared store requests", "shared store wavefronts"),
    ("shared", "load", "matrix"): ("matrix load requests", "matrix load wavefronts"),
}


def host_counts(rows: Iterable[dict[str, Any]]) -> dict[str, int]:
    """COUNTS of the checker's rows."""
    out = dict.fromkeys(COUNTS, 0)
    for r in rows:
        names = HOST.get((r["space"], r["op"], r["by"]))
        if names:
            out[names[0]] += r["requests"]
            out[names[1]] += r["wavefronts" if r["space"] == "shared" else "sectors"]
    return out


def differences(recorded: dict[str, int], counted: dict[str, int]) -> dict[str, tuple[int, int]]:
    """count -> (ncu, host), where they differ. Counts that were not measured are left out."""
    return {n: (v, counted.get(n, 0)) for n, v in recorded.items() if v != counted.get(n, 0)}


def compare(data: Path, names: list[str]) -> int:
    record = json.loads(data.read_text())
    recorded = {p["name"]: p for p in record["problems"]}
    exact = 0
    for problem in chosen(names):
        if problem.name not in recorded:
            print(f"{problem.name}: not recorded")
            continue
        rows = host_rows(problem, record["sms"])
        counted, entry = host_counts(rows), recorded[problem.name]
        wrong = differences(entry["counts"], counted)
        exact += not wrong
        print(
            f"{problem.name}: " + ("equal" if not wrong else "DIFFERENT") + " " * bool(entry.get("because"))
        )
        for count, (ncu, host) in wrong.items():
            reason = entry.get("because", {}).get(count, {}).get("reason", "")
            print(f"    {count:24} ncu {ncu:8}  host {host:8}  {reason}")
        if wrong:
            print_rows(rows)
    print(f"{exact} of {len(recorded)} problems equal")
    return 0


def print_rows(rows: list[dict[str, Any]]) -> None:
    for r in sorted(rows, key=lambda r: (r["space"], r["op"], str(r.get("file")), r.get("line") or 0)):
        text = f"{r['space']} {r['op']} {r['by']} {r['bytes']} B"
        where = f"{r.get('file')}:{r.get('line')}"
        print(
            f"      {where:30} {text:30} {r['requests']:7} {r['sectors']:7} sectors {r['wavefronts']:7} wavefronts"
        )


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("mode", choices=("collect", "compare", "host", "list", "parse", "run", "warm"))
    parser.add_argument("names", nargs="*", help="problems; default: all")
    parser.add_argument("--out", type=Path, default=DATA)
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--keep", type=Path)
    parser.add_argument("--plan")
    parser.add_argument("--sms", type=int, default=132)
    a = parser.parse_args(argv)
    if a.mode == "collect":
        return collect(a.out, a.keep)
    if a.mode == "parse":
        return parse(a.out, a.keep)
    if a.mode == "compare":
        return compare(a.data, a.names)
    if a.mode == "warm":
        warm_up()
    if a.mode == "run":
        run(a.plan)
    if a.mode == "list":
        for p in chosen(a.names):
            print(p.name, [(x["kernel"], x["grid"], x["block"]) for x in p.launches("cpu", a.sms)])
    if a.mode == "host":
        for p in chosen(a.names):
            rows = host_rows(p, a.sms)
            print(p.name, {k: v for k, v in host_counts(rows).items() if v}, flush=True)
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    sys.exit(main())
