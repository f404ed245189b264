"""``pykern check OP_OR_FILE``: run a kernel under the host checker and print its findings and its traffic per line."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import click


@click.command("check", short_help="Run a kernel under the checker: races, bounds, traffic per line.")
@click.argument("target")
@click.option("--shape", help='Sizes of the tensors of an op: "64x1000", or "x=16x512,w=64x512".')
@click.option("--dtype", default="fp32", show_default=True, help="dtype of the floating-point inputs of an op.")
@click.option("--set", "scalars", multiple=True, metavar="NAME=VALUE", help="A scalar argument of an op.")
@click.option("--arch", default="90a", show_default=True, help="Architecture an op is planned for.")
@click.option("--seeds", default=3, show_default=True, help="Schedules to try; each also reorders asynchronous copies.")
@click.option("--kernel", help="For a .cuh file: the instance to run, e.g. 'scale<float>'.")
@click.option("--grid", default="1", show_default=True, help="For a .cuh file: blocks, e.g. 4 or 4x2.")
@click.option("--block", default="32", show_default=True, help="For a .cuh file: threads of a block.")
@click.option("--smem", default=0, show_default=True, help="For a .cuh file: bytes of dynamic shared memory.")
@click.option("--arg", "args", multiple=True, metavar="ARG", help="For a .cuh file: f32[1024], i32[8x8], 5 or 2.5.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    target: str,
    shape: str | None,
    dtype: str,
    scalars: tuple[str, ...],
    arch: str,
    seeds: int,
    kernel: str | None,
    grid: str,
    block: str,
    smem: int,
    args: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check TARGET: an op's name, a .py file that defines ``op = Op(...)``, or a .cuh file with --kernel and --arg.

    Without --shape an op's smallest declared case is run. Exits with 1 when anything is found.
    """
    from pykern import check
    from pykern.errors import ArgumentError, CheckError, KernelError

    if seeds < 1:
        raise ArgumentError("--seeds", seeds, ">= 1")
    findings: list[dict[str, Any]] = []
    with check.recording() as reports:
        for seed in range(seeds):
            try:
                if target.endswith((".cuh", ".cu")):
                    run_file(target, kernel, grid, block, smem, args, seed)
                else:
                    run_op(find_op(target), shape, dtype, scalars, arch, seed)
            except CheckError as error:
                findings += [f for f in error.reports if not known(f, findings)]
            except KernelError as error:
                findings.append({"kind": "failure", "message": str(error)})
                break
    rows = check.table(reports[:1])  # counts are the same for every schedule
    if as_json:
        launches = reports[0]["launches"] if reports else []
        click.echo(json.dumps({"target": target, "findings": findings, "lines": rows, "launches": launches}))
    else:
        show(target, findings, rows, seeds)
    if findings:
        raise SystemExit(1)


def known(finding: dict[str, Any], found: list[dict[str, Any]]) -> bool:
    keys = ("kind", "kernel", "file", "line")
    return any(all(finding.get(k) == f.get(k) for k in keys) for f in found)


def find_op(target: str) -> Any:
    """The op called ``target``, or the one a .py file defines."""
    from pykern import op as registry
    from pykern.errors import ArgumentError

    if not target.endswith(".py"):
        return registry.get(target)
    path = Path(target)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ArgumentError("TARGET", repr(target), "an op's name, a .py or a .cuh file that exists")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found = getattr(module, "op", None)
    if not isinstance(found, registry.Op):
        raise ArgumentError("TARGET", repr(target), "a file that binds op = pykern.op.Op(...)")
    return registry.register(found)


def run_op(op: Any, shape: str | None, dtype: str, scalars: tuple[str, ...], arch: str, seed: int) -> None:
    import math

    from pykern.commands.explain import case_of
    from pykern.op import ASYNC_ORDERS, Spec, host
    from pykern.schema import dtype_name
    from pykern.testing import make_args

    if shape:
        case = case_of(op, shape, dtype_name(dtype), scalars)
    else:
        case = min(op.cases(), key=lambda c: sum(math.prod(v.shape) for v in c.values() if isinstance(v, Spec)))
    args = make_args(op, case, seed)
    with host(arch=arch, check=True, trace=True, seed=seed, async_order=ASYNC_ORDERS[seed % 3]):
        op(**args)


_TENSOR = re.compile(r"^(\w+)\[([\dx]+)\]$")


def parse_arg(text: str, seed: int) -> Any:
    """A tensor of random values for ``f32[4x8]``, else a number."""
    import torch

    from pykern.errors import ArgumentError
    from pykern.schema import dtype_name
    from pykern.testing.data import fill

    found = _TENSOR.match(text)
    if found:
        shape = tuple(int(v) for v in found[2].split("x") if v)
        return fill(shape, dtype_name(found[1]), "normal", torch.Generator().manual_seed(seed))
    try:
        return float(text) if any(c in text for c in ".en") else int(text, 0)
    except ValueError:
        raise ArgumentError("--arg", repr(text), "a tensor such as f32[4x8], or a number") from None


def run_file(
    target: str, kernel: str | None, grid: str, block: str, smem: int, args: tuple[str, ...], seed: int
) -> None:
    from pykern.errors import ArgumentError
    from pykern.jit.raw import load

    source = load(target)
    if kernel is None:
        raise ArgumentError("--kernel", None, "one of " + ", ".join(source.declarations))

    def dims(text: str) -> tuple[int, ...]:
        try:
            return tuple(int(v) for v in text.split("x"))
        except ValueError:
            raise ArgumentError("--grid/--block", repr(text), "numbers such as 4 or 4x2") from None

    values = [parse_arg(a, seed) for a in args]
    source.kernel(kernel).launch(dims(grid), dims(block), *values, smem=smem, check=True, seed=seed, device="cpu")


def show(target: str, findings: list[dict[str, Any]], rows: list[dict[str, Any]], seeds: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from pykern.check import sentence

    console = Console()
    if findings:
        for f in findings:
            console.print(sentence(f) if "kernel" in f else f["message"], markup=False, style="red")
    else:
        console.print(f"{target}: nothing found in {seeds} schedules")
    if not rows:
        return
    table = Table(box=None, header_style="bold")
    for name in ("line", "access", "requests", "sectors/request", "ideal", "wavefronts/request", "ideal", "unique bytes"):
        table.add_column(name, justify="left" if name in ("line", "access") else "right")
    for r in rows:
        n = max(r["requests"], 1)
        shared = r["space"] == "shared"
        sectors = ("", "") if shared else (f"{r['sectors'] / n:.2f}", f"{r['ideal_sectors'] / n:.2f}")
        waves = (f"{r['wavefronts'] / n:.2f}", f"{r['ideal_wavefronts'] / n:.2f}") if shared else ("", "")
        bad = r["sectors"] > 1.25 * r["ideal_sectors"] if not shared else r["wavefronts"] > r["ideal_wavefronts"]
        table.add_row(
            f"{r['file']}:{r['line']}",
            f"{r['op']} {r['space']} {8 * r['bytes']} bit",
            str(r["requests"]),
            *sectors,
            *waves,
            f"{r['unique_bytes']:,}",
            style="yellow" if bad else "",
        )
    console.print(table)
