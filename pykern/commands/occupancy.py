"""``pykern occupancy``: what limits a kernel's occupancy, and what to change."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from pykern.analysis import _cli
from pykern.analysis.occupancy import from_fields, occupancy, parse_cc
from pykern.commands._once import Once
from pykern.errors import ArgumentError

HELP = """What limits the occupancy of a kernel, and what to change.

INPUT is a .cubin, .fatbin, host object or library, .ptx, text of ptxas -v, a .cu or .cuh source (compiled with nvcc),
or the name of a pykern op with --shape. Without INPUT the numbers are taken from --cc, --threads and --regs.

\b
Examples:
  pykern occupancy --cc 9.0 --threads 256 --regs 64 --dyn-smem 65536
  pykern occupancy --cc 8.0,9.0,12.0 --threads 256 --regs 64
  pykern occupancy kernels.cubin --gate 'regs<=128, spills==0, occupancy>=0.5'
  pykern occupancy softmax --shape 4096x4096 --dtype bf16
  pykern occupancy --diff old.cubin new.cubin
  pykern occupancy --ncu report.csv

Exit codes: 0 answered, 1 a kernel that cannot be launched, a gate that failed, or --diff found something worse,
2 bad input.
"""


@click.command(cls=Once, help=HELP, short_help="What limits a kernel's occupancy, and what to change.")
@click.argument("source", required=False, metavar="[INPUT]")
@click.option("--cc", "--arch", "cc", metavar="LIST", help="Compute capabilities: 9.0, sm_90a, or 8.0,9.0,12.0.")
@click.option("--threads", type=int, help="Threads a block.")
@click.option("--regs", type=int, help="Registers a thread.")
@click.option("--static-smem", type=int, help="Static shared memory a block, bytes (without the reserved 1 KiB).")
@click.option("--dyn-smem", type=int, help="Dynamic shared memory a block, bytes.")
@click.option("--barriers", type=int, help="Named barriers a block (default 1).")
@click.option("--carveout", type=int, default=-1, help="Preferred shared-memory carve-out, percent (default -1).")
@click.option("--smem-per-thread", type=float, default=0.0, help="Dynamic bytes a thread adds, for ranking.")
@click.option("--grid", type=int, help="Blocks of the grid: waves and tail.")
@click.option("--gpu", help="Chip by name (H200, RTX 4090): its cc and SM count.")
@click.option("--sms", type=int, help="SMs of the GPU.")
@click.option("--cluster", type=int, help="Blocks a cluster.")
@click.option("--gpcs", metavar="LIST", help="SMs of each GPC for the cluster estimate, e.g. 18,18,16; or 'h200'.")
@click.option("--kernel", metavar="TEXT", help="Only kernels whose name contains TEXT.")
@click.option("--shape", default="", help="Shape for an op: 4096x4096, x=8x4096,w=1024x4096, or m=8,n=1024,k=4096.")
@click.option("--dtype", default="bf16", help="dtype for an op (default bf16).")
@click.option("-D", "defines", multiple=True, metavar="NAME[=VALUE]", help="Define for a .cu source.")
@click.option("-I", "includes", multiple=True, metavar="DIR", help="Include folder for a .cu source.")
@click.option("--instance", "instances", multiple=True, metavar="EXPR", help="Template instance: 'kernel<float, 4>'.")
@click.option("--maxrregcount", type=int, help="Cap registers when compiling a source.")
@click.option("--tune-regs", is_flag=True, help="Compile a source or PTX with each launch bound: registers, spills.")
@click.option("--live", is_flag=True, help="Ask the driver of the GPU here too, and say where it differs.")
@click.option("--device", type=int, default=0, help="GPU for --live (default 0).")
@click.option("--ncu", "ncu", metavar="FILE.csv", help="Theoretical against achieved, from ncu --csv.")
@click.option("--diff", nargs=2, metavar="OLD NEW", help="Compare two builds.")
@click.option("--gate", metavar="CONDITIONS", help="Conditions that must hold: 'regs<=128, spills==0, occupancy>=0.5'.")
@_cli.common_options
@_cli.reporting_errors
def command(**options: Any) -> None:
    if options["plot"]:
        _cli.plot_format(options["plot"])
    modes = [name for name in ("batch", "ncu", "diff") if options[name]]
    if len(modes) + bool(options["source"]) > 1:
        raise ArgumentError("INPUT, --batch, --ncu, --diff", "several", "one of them")
    _check_ranges(options)
    if modes:
        unused = ["plot", "live", "tune_regs", "grid", "cluster", *(["gate"] if modes == ["batch"] else [])]
        given = {f"--{name.replace('_', '-')}": options[name] for name in unused}
        _cli.only_with(f"--{modes[0]}", given)
    if options["batch"]:
        sys.exit(_cli.run_batch(options["batch"], lambda row: occupancy(*from_fields(row)).to_expect()))
    sys.exit(_ncu(options) if options["ncu"] else _diff(options) if options["diff"] else _answer(options))


_RANGES = {
    "smem_per_thread": (0, 2**20, "bytes"),
    "grid": (1, 2**62, "blocks"),
    "sms": (1, 10_000, "SMs"),
    "cluster": (1, 16, "blocks"),
    "device": (0, 1023, "(the number of a GPU)"),
    "maxrregcount": (1, 255, "registers"),
}


def _check_ranges(options: dict[str, Any]) -> None:
    for name, (least, most, unit) in _RANGES.items():
        value = options[name]  # NaN is in no range
        if value is not None and not least <= value <= most:
            raise ArgumentError(f"--{name.replace('_', '-')}", value, f"{least} to {most} {unit}")


def _answer(options: dict[str, Any]) -> int:
    from pykern.analysis.occupancy_answer import answer

    conditions = _conditions(options)
    cases, remarks = _cases(options, options["source"])
    answers = []
    for case in cases:
        sms, gpcs = _machine(options, case.cc)
        answers.append(
            answer(
                case, grid=options["grid"], sms=sms, gpcs=gpcs, cluster_size=options["cluster"],
                smem_per_thread=options["smem_per_thread"],
            )
        )  # fmt: skip
    live = _live(options, cases) if options["live"] else []
    tried = _tried(options, answers) if options["tune_regs"] else []
    verdicts = _verdicts(conditions, [(a.case, a.result) for a in answers])
    if options["as_json"]:
        document: dict[str, Any] = {"kernels": [a.to_dict() for a in answers], "remarks": remarks}
        if conditions:
            document["gate"] = [verdict.to_dict() for verdict in verdicts]
        if options["live"]:
            document["live"] = live
        if options["tune_regs"]:
            document["tune_regs"] = tried
        _cli.print_json(document)
    else:
        from pykern.analysis import occupancy_text

        console = _cli.console()
        if len(answers) > 1 and answers[0].case.facts is None:
            occupancy_text.show_side_by_side(console, answers)
            for remark in remarks:
                console.print(f"note: {remark}", markup=False)
        else:
            occupancy_text.show(console, answers, remarks)
        for row in live:
            state = "the driver agrees" if row["same"] else "[red]the driver differs[/]"
            console.print(f"  live ({row['gpu']}): ours {row['ours']}, driver {row['driver']} blocks an SM: {state}")
        if tried:
            occupancy_text.show_tried(console, tried)
        if conditions:
            occupancy_text.show_verdicts(console, verdicts)
    if options["plot"]:
        _plot(options["plot"], answers)
    good = all(v.ok for v in verdicts) and all(a.launchable for a in answers)
    return _cli.OK if good else _cli.FAILED


def _conditions(options: dict[str, Any]) -> list[Any]:
    if not options["gate"]:
        return []
    from pykern.analysis.occupancy_gate import parse_gate

    return parse_gate(options["gate"])


def _verdicts(conditions: list[Any], pairs: Sequence[tuple[Any, Any]]) -> list[Any]:
    if not conditions:
        return []
    from pykern.analysis.occupancy_gate import apply_gate

    return [verdict for case, result in pairs for verdict in apply_gate(conditions, case, result)]


def _tried(options: dict[str, Any], answers: Sequence[Any]) -> list[dict[str, Any]]:
    """Each kernel compiled with the launch bounds of its table: what they cost in spills."""
    from pykern.analysis.occupancy_sources import SOURCE_SUFFIXES
    from pykern.commands._occupancy_build import Source, try_launch_bounds

    path = options["source"]
    if path is None or not (Path(path).suffix in SOURCE_SUFFIXES or Path(path).suffix == ".ptx"):
        raise ArgumentError("--tune-regs", path or "numbers", "a .cu, .cuh or .ptx file: it is compiled again")
    rows = []
    for a in answers:
        case, facts, by_regs = a.case, a.case.facts, {}
        for row in a.bounds:
            by_regs[row.max_regs] = row.blocks  # of rows that leave the same registers, the most blocks
        unit: Any = path
        if Path(path).suffix in SOURCE_SUFFIXES:
            unit = Source(path, facts.target, options["defines"], options["includes"], options["instances"])
        found = try_launch_bounds(unit, facts.name, facts.target, case.config.threads, sorted(by_regs.values()))
        for blocks, got in found.items():
            result = occupancy(case.cc, case.config.but(regs=got.regs))
            named = {"kernel": facts.name, "cc": case.cc, "threads": case.config.threads, "min_blocks": blocks}
            numbers = {"regs": got.regs, "spills": got.spills, "blocks": result.blocks}
            rows.append({**named, **numbers, "occupancy": round(result.occupancy, 6)})
    return rows


# --- inputs ------------------------------------------------------------------------------------------------


def _cases(options: dict[str, Any], source: str | None) -> tuple[list[Any], list[str]]:
    from pykern.analysis.occupancy_advice import count
    from pykern.analysis.occupancy_sources import Given, case_of, case_of_numbers, select

    given = Given(
        options["threads"], options["regs"], options["static_smem"], options["dyn_smem"], options["barriers"],
        options["carveout"],
    )  # fmt: skip
    archs = [part.strip() for part in options["cc"].split(",") if part.strip()] if options["cc"] else []
    if not archs and options["gpu"]:
        archs = [_gpu(options["gpu"]).cc]
    if source is None:
        if not archs:
            raise ArgumentError("--cc", "nothing", "a compute capability such as 9.0, or --gpu, or an INPUT")
        return [case_of_numbers(parse_cc(one, "--cc"), given) for one in archs], []
    if _is_op(source):
        return _op_cases(options, source, archs or ["90a"], given)
    reading = _read(options, source, archs)
    ccs = [parse_cc(one, "--cc") for one in archs] or None
    kernels = select(reading.kernels, options["kernel"], ccs)
    if len({kernel.name for kernel in kernels}) > 1:  # a block size need not suit every kernel of a file
        suited = [k for k in kernels if given.threads is None or _suits(k, given.threads)]
        if len(suited) < len(kernels):
            left = count(len(kernels) - len(suited), "kernel")
            reading.remarks.append(f"{left} that cannot run {given.threads} threads left out")
        kernels = suited or kernels
    return [case_of(kernel, given) for kernel in kernels], reading.remarks


def _suits(kernel: Any, threads: int) -> bool:
    fixed, most = kernel.required_threads, kernel.max_threads
    return (fixed is None or threads == fixed) and (most is None or threads <= most)


def _is_op(source: str) -> bool:
    if Path(source).suffix == ".py":  # one that binds an op
        return True
    return not os.path.exists(source) and Path(source).suffix == "" and os.sep not in source


def _op_cases(options: dict[str, Any], name: str, archs: Sequence[str], given: Any) -> tuple[list[Any], list[str]]:
    from pykern.commands._occupancy_build import op_cases

    cases, remarks = [], []
    for one in archs:
        found, why = op_cases(name, options["shape"], options["dtype"], one, given)
        cases += found
        remarks.append(why)
    if not cases:
        raise ArgumentError("--shape", options["shape"], f"sizes at which a kernel is launched ({remarks[0]})")
    return cases, remarks


def _read(options: dict[str, Any], source: str, archs: Sequence[str]) -> Any:
    from pykern.analysis.occupancy_sources import SOURCE_SUFFIXES, Reading, read_file

    if Path(source).suffix in SOURCE_SUFFIXES:
        from pykern.commands._occupancy_build import Source, compile_source

        if not archs:
            raise ArgumentError("--arch", "nothing", "what to compile for, such as sm_90a or 8.0,9.0")
        reading = Reading([])
        includes, instances = options["includes"], options["instances"]
        for one in archs:
            unit = Source(source, one, options["defines"], includes, instances, _flags(options))
            reading.kernels += compile_source(unit).kernels
        return reading
    reading = read_file(source)
    if all(kernel.regs is None for kernel in reading.kernels) and options["regs"] is None:
        if reading.kernels[0].origin == source and not _is_binary(source):
            from pykern.commands._occupancy_build import assemble_ptx

            return assemble_ptx(source, reading.kernels, archs[0] if archs else None)
    return reading


def _is_binary(path: str) -> bool:
    with open(path, "rb") as file:
        return b"\0" in file.read(4096)


def _gpu(name: str) -> Any:
    from pykern.analysis.roofline_gpus import find_gpu

    return find_gpu(name)


def _machine(options: dict[str, Any], cc: str) -> tuple[int | None, list[int] | None]:
    """SMs of the GPU and of its GPCs, as far as they are asked for."""
    from pykern.analysis.occupancy_cluster import H200

    gpcs = None
    if options["gpcs"]:
        text = options["gpcs"]
        try:
            gpcs = list(H200) if text.lower() == "h200" else [int(part) for part in text.split(",")]
        except ValueError:
            raise ArgumentError("--gpcs", text, "SM counts joined by commas, or h200") from None
    sms = sum(gpcs) if gpcs and options["sms"] is None else options["sms"]
    if sms is None and options["gpu"]:
        chip = _gpu(options["gpu"])
        if chip.cc != cc:
            raise ArgumentError("--gpu", options["gpu"], f"a chip of compute capability {cc} (this one has {chip.cc})")
        sms = chip.sm_count
    if sms is None and not (options["grid"] is options["cluster"] is None):
        raise ArgumentError("--sms", "nothing", "the GPU's SMs, or --gpu NAME: --grid and --cluster need it")
    return sms, gpcs


def _live(options: dict[str, Any], cases: Sequence[Any]) -> list[dict[str, Any]]:
    """Our blocks beside the driver's, for kernels whose image can be loaded here."""
    from pykern.analysis import occupancy_live

    driver = occupancy_live.Driver(options["device"])
    rows = []
    for case in cases:
        if case.facts is None:
            raise ArgumentError("--live", "numbers", "an INPUT with a kernel that can be loaded")
        if case.cc != driver.cc:
            raise ArgumentError("--live", f"code for {case.cc}", f"a kernel for {driver.cc}, this GPU ({driver.name})")
        module = driver.load(_image(options, case, driver.cc))
        function = driver.function(module, case.facts.name)
        said = driver.facts(function, case.facts.name)
        config = case.config
        row = occupancy_live.compare(driver, function, config, [(config.threads, config.dyn_smem)])[0]
        attributes = {"regs": said.regs, "static_smem": said.static_smem}
        named = {"kernel": case.facts.name, "gpu": driver.name}
        rows.append({**named, **row.to_dict(), "same": row.same, "driver_says": attributes})
        driver.unload(module)
    return rows


def _image(options: dict[str, Any], case: Any, cc: str) -> bytes:
    from pykern.analysis.occupancy_sources import SOURCE_SUFFIXES, loadable_image

    source = options["source"]
    if Path(source).suffix in SOURCE_SUFFIXES:
        from pykern.commands._occupancy_build import Source, cubin_of_source

        instances, flags = options["instances"], _flags(options)
        wanted = case.facts.target
        return cubin_of_source(Source(source, wanted, options["defines"], options["includes"], instances, flags))
    return loadable_image(case.facts.origin, cc)


def _flags(options: dict[str, Any]) -> tuple[str, ...]:
    return (f"-maxrregcount={options['maxrregcount']}",) if options["maxrregcount"] else ()


# --- the other modes ---------------------------------------------------------------------------------------


def _ncu(options: dict[str, Any]) -> int:
    from pykern.analysis.occupancy_ncu import read_ncu_csv

    conditions = _conditions(options)
    launches = read_ncu_csv(options["ncu"])
    if options["kernel"] is not None:
        launches = [launch for launch in launches if options["kernel"] in launch.kernel]
        if not launches:
            raise ArgumentError("--kernel", options["kernel"], f"part of the name of a launch in {options['ncu']}")
    verdicts = _verdicts(conditions, [(launch.case(), launch.result) for launch in launches])
    if options["as_json"]:
        document: dict[str, Any] = {"launches": [launch.to_dict() for launch in launches]}
        if conditions:
            document["gate"] = [verdict.to_dict() for verdict in verdicts]
        _cli.print_json(document)
    else:
        from pykern.analysis.occupancy_text import show_ncu, show_verdicts

        console = _cli.console()
        show_ncu(console, launches)
        if conditions:
            show_verdicts(console, verdicts)
    return _cli.OK if all(v.ok for v in verdicts) else _cli.FAILED


def _diff(options: dict[str, Any]) -> int:
    from pykern.analysis.occupancy_gate import compare

    conditions = _conditions(options)
    old, new = ([(case, occupancy(case.cc, case.config)) for case in _cases(options, f)[0]] for f in options["diff"])
    changes = compare(old, new)
    if all(change.state in ("added", "removed") for change in changes):
        both = "builds with a kernel in common, by name and compute capability: nothing was compared"
        raise ArgumentError("--diff", " ".join(options["diff"]), both)
    verdicts = _verdicts(conditions, new)
    if options["as_json"]:
        gate = [v.to_dict() for v in verdicts]
        _cli.print_json({"changes": [change.to_dict() for change in changes], "gate": gate})
    else:
        from pykern.analysis.occupancy_text import show_diff, show_verdicts

        console = _cli.console()
        show_diff(console, changes)
        if conditions:
            show_verdicts(console, verdicts)
    worse = any(change.state == "worse" for change in changes) or not all(v.ok for v in verdicts)
    return _cli.FAILED if worse else _cli.OK


def _plot(path: str, answers: Sequence[Any]) -> None:
    from pykern.analysis.occupancy_advice import count
    from pykern.analysis.occupancy_plot import Series, draw_matplotlib, draw_plotly

    shown = answers[:6]
    series = [Series(_label(a), a.case.cc, a.case.config) for a in shown]
    config, ccs = shown[0].case.config, ", ".join(a.case.cc for a in shown)
    title = f"{count(config.threads, 'thread')}, {count(config.regs, 'register')}, "
    title += f"{config.smem:,} B of shared memory on {ccs}"
    if len({a.case.config for a in shown}) > 1:
        title = f"occupancy of {len(series)} kernels" + (f" of {len(answers)}" if len(answers) > 6 else "")
    elif shown[0].case.facts is not None:
        title = f"{shown[0].case.name[:70]}: {title}"
    _cli.save_plot(path, matplotlib=lambda: draw_matplotlib(title, series), plotly=lambda: draw_plotly(title, series))


def _label(answer: Any) -> str:
    return answer.case.cc if answer.case.facts is None else f"{answer.case.name[:40]} ({answer.case.cc})"
