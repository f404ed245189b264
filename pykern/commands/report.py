"""``pykern report``: occupancy, sectors and banks, fusion traffic and rooflines on one interactive page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pykern.analysis import _cli
from pykern.analysis.roofline import Work


@click.command(name="report", short_help="Every analysis on one interactive page that needs no network.")
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
    default=64,
    show_default=True,
    help="Registers a thread to start from, until 'pykern occupancy OP' has compiled the kernel.",
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
    ops: tuple[str, ...], shape: str | None, dtype: str, arch: str, regs: int, out: str, as_json: bool
) -> None:
    """Write one self-contained page: occupancy curves, sector and bank grids, traffic over batch, rooflines."""
    from pykern.analysis.report import report_data, report_page

    works: list[Work] = []
    presets: list[dict[str, Any]] = []
    for text in ops:
        name, _, own = text.partition(":")
        made, shapes = _op(name, own or shape, dtype, arch, regs)
        works += made
        presets += [p for p in shapes if p not in presets]
    about = f"Kernels of {', '.join(ops)} planned for sm_{arch}; registers start at {regs}." if ops else ""
    data = report_data(works, presets, about)
    if as_json:
        _cli.print_json(data)
        return
    page = report_page(data)
    Path(out).write_text(page, encoding="utf-8")
    print(f"{out}: {len(page) / 1e6:.1f} MB, open it in a browser")


def _op(
    name: str, shape: str | None, dtype: str, arch: str, regs: int
) -> tuple[list[Work], list[dict[str, Any]]]:
    """An op's work, and the block shapes of its kernels at those problems."""
    from pykern import op as registry
    from pykern.commands._problems import op_problems
    from pykern.errors import require
    from pykern.plan import TARGETS, Launch

    require(arch in TARGETS, "--arch", repr(arch), ", ".join(TARGETS))
    found = registry.get(name)
    works, presets = [], []
    for label, problem in op_problems(name, shape, dtype):
        works.append(Work(label, found.flops(problem), found.nbytes(problem)))
        for launch in found.planned(problem, TARGETS[arch]).launches:
            x, y, z = Launch.triple(launch.block)
            presets.append({"name": launch.kernel, "threads": min(1024, -(-x * y * z // 32) * 32), "regs": regs,
                            "smem": launch.smem, "barriers": 1})  # fmt: skip
    return works, presets
