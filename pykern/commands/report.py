"""``pykern report``: occupancy, sectors and banks, fusion traffic and rooflines on one interactive page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pykern.analysis import _cli
from pykern.analysis.roofline import Work
from pykern.commands._once import Once
from pykern.errors import require


@click.command(name="report", cls=Once, short_help="Every analysis on one interactive page that needs no network.")
@click.option(
    "--op",
    "ops",
    multiple=True,
    metavar="OP[:SHAPE]",
    help="Also show this op: its kernels and its roofline; repeatable.",
)
@click.option("--shape", help="Sizes for ops without their own: 4096x4096.")
@click.option("--dtype", default="bf16", show_default=True, help="dtype of those ops.")
@click.option("--arch", default="90a", show_default=True, help="Architecture their kernels are planned for.")
@click.option(
    "--regs",
    type=click.IntRange(1, 255),
    help="Registers a thread to start from; without it their kernels are compiled (needs nvcc, no GPU).",
)
@click.option(
    "-o",
    "--out",
    "out",
    default="report.html",
    show_default=True,
    metavar="FILE.html",
    help="Where to write.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the page's data instead of writing the page.")
@_cli.reporting_errors
def command(
    ops: tuple[str, ...], shape: str | None, dtype: str, arch: str, regs: int | None, out: str, as_json: bool
) -> None:
    """Write one self-contained page: occupancy curves, sector and bank grids, traffic over batch, rooflines."""
    from pykern.analysis.report import report_data, report_page
    from pykern.plan import TARGETS

    require(arch in TARGETS, "--arch", repr(arch), ", ".join(TARGETS))
    if not ops:
        _cli.only_with("no --op", {"--shape": shape, "--regs": regs})
    works: list[Work] = []
    presets: list[dict[str, Any]] = []
    for text in ops:
        name, _, own = text.partition(":")
        made, launches = _op(name, own or shape, dtype, arch)
        works += made
        for launch in {la.kernel: la for la in launches}.values():
            presets.append(_preset(launch, arch, regs))
    about = f"Kernels of {', '.join(ops)} for sm_{arch}." if ops else ""
    data = report_data(works, presets, about)
    if as_json:
        _cli.print_json(data)
        return
    page = report_page(data)
    Path(out).write_text(page, encoding="utf-8")
    print(f"{out}: {len(page) / 1e6:.1f} MB, open it in a browser")


def _op(name: str, shape: str | None, dtype: str, arch: str) -> tuple[list[Work], list[Any]]:
    """An op's work, and the launches of its kernels at those problems."""
    from pykern import op as registry
    from pykern.commands._problems import op_problems
    from pykern.plan import TARGETS

    found = registry.get(name)
    works: list[Work] = []
    launches: list[Any] = []
    for label, problem in op_problems(name, shape, dtype):
        works.append(Work(label, found.flops(problem), found.nbytes(problem)))
        launches += found.planned(problem, TARGETS[arch]).launches
    return works, launches


def _preset(launch: Any, arch: str, regs: int | None) -> dict[str, Any]:
    """Where the occupancy controls start for one kernel: its block, and registers and barriers from the compiler.

    ``regs`` given: nothing is compiled.
    """
    from pykern.plan import Launch

    x, y, z = Launch.triple(launch.block)
    threads = min(1024, -(-x * y * z // 32) * 32)
    preset = {"name": launch.kernel, "threads": threads, "regs": regs, "smem": launch.smem, "barriers": 1}
    if regs is None:
        from pykern.analysis.occupancy_sources import Given, case_of
        from pykern.commands._occupancy_build import facts_of
        from pykern.jit import build

        compiled = build.compile_only(launch.source, launch.kernel, arch)
        facts = facts_of(compiled.path, launch.kernel)
        config = case_of(facts, Given(threads=threads, dyn_smem=launch.smem)).config
        preset |= {"regs": max(16, config.regs), "smem": config.smem, "barriers": max(1, config.barriers)}
    return preset
