"""``pykern check OP_OR_FILE``: run a kernel under the host checker and print its findings and its traffic per line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from typing import Any

import click

from pykern.analysis import _cli
from pykern.commands._once import Once


@click.command("check", cls=Once, short_help="Run a kernel under the checker: races, bounds, traffic per line.")
@click.argument("target")
@click.option("--shape", help='Sizes of the tensors of an op: "64x1000", or "x=16x512,w=64x512".')
@click.option("--dtype", help="dtype of the floating-point inputs of an op; fp32 unless given. Needs --shape.")
@click.option("--set", "scalars", multiple=True, metavar="NAME=VALUE", help="A scalar argument of an op.")
@click.option("--arch", help="Architecture an op is planned for; 90a unless given.")
@click.option("--seeds", default=3, show_default=True, help="Schedules to try; each also reorders asynchronous copies.")
@click.option("--kernel", help="For a .cuh file: the instance to run, e.g. 'scale<float>'.")
@click.option("--grid", help="For a .cuh file: blocks, e.g. 4 or 4x2; 1 unless given.")
@click.option("--block", help="For a .cuh file: threads of a block, e.g. 256 or 16x16; 32 unless given.")
@click.option("--smem", type=int, help="For a .cuh file: bytes of dynamic shared memory; 0 unless given.")
@click.option("--arg", "args", multiple=True, metavar="ARG", help="For a .cuh file: f32[1024], i32[8x8], 5 or 2.5.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    target: str,
    shape: str | None,
    dtype: str | None,
    scalars: tuple[str, ...],
    arch: str | None,
    seeds: int,
    kernel: str | None,
    grid: str | None,
    block: str | None,
    smem: int | None,
    args: tuple[str, ...],
    as_json: bool,
) -> None:
    """Check TARGET: an op's name, a .py file that binds op = Op(...), or a .cuh file with --kernel and --arg.

    Without --shape an op's smallest declared case is run.

    \b
    Examples:
      pykern check softmax --shape 64x1000 --dtype bf16 --set log=true --seeds 20
      pykern check my_op.py
      pykern check scale.cuh --kernel 'scale<float>' --grid 4 --block 256 --arg 'f32[1000]' --arg 'f32[1000]' --arg 1000
      pykern check softmax --json | pykern coalescing --table -

    Exit codes: 0 nothing found, 1 findings, 2 bad input, a kernel that does not compile, or nothing that ran.
    """
    from pykern import check
    from pykern.errors import ArgumentError, CheckError, KernelError

    if not 1 <= seeds <= 1_000_000:
        raise ArgumentError("--seeds", seeds, "1..1000000")
    ops_own = {"--shape": shape, "--dtype": dtype, "--set": scalars or None, "--arch": arch}
    files_own = {"--kernel": kernel, "--grid": grid, "--block": block, "--smem": smem, "--arg": args or None}
    raw = target.endswith((".cuh", ".cu"))
    for name, value in (ops_own if raw else files_own).items():
        if value is not None:
            shown = ", ".join(value) if isinstance(value, tuple) else value
            allowed = ", ".join(files_own if raw else ops_own)
            raise ArgumentError(name, shown, f"none for {'a file' if raw else 'an op'}, which takes {allowed}")
    if raw:
        run = of_file(target, kernel, "1" if grid is None else grid, "32" if block is None else block, smem or 0, args)
    else:
        run = of_op(target, shape, dtype, scalars, "90a" if arch is None else arch)
    findings: list[dict[str, Any]] = []
    with check.recording() as reports:
        for seed in range(seeds):
            try:
                run(seed)
            except CheckError as error:
                findings += [{**f, "seed": seed} for f in error.reports if not known(f, findings)]
            except KernelError as error:
                findings.append({"kind": "failure", "message": str(error), "seed": seed})
                break
    if not findings and not any(report["launches"] for report in reports):
        allowed = "sizes of 1 or more: with a dimension of 0 there is nothing to compute, and nothing ran"
        raise ArgumentError("--shape", shape, allowed)
    rows = check.table(reports[:1])  # counts are the same for every schedule
    if as_json:
        launches = reports[0]["launches"] if reports else []
        click.echo(json.dumps({"target": target, "findings": findings, "lines": rows, "launches": launches}))
    else:
        show(target, findings, rows, seeds)
    if findings:
        raise SystemExit(_cli.FAILED)


def known(finding: dict[str, Any], found: list[dict[str, Any]]) -> bool:
    keys = ("kind", "kernel", "file", "line")
    return any(all(finding.get(k) == f.get(k) for k in keys) for f in found)


MOST_BYTES = 1 << 30  # of one call's tensors: the checker keeps several copies, and goes through every byte


def refuse_large(what: str, nbytes: int) -> None:
    from pykern.errors import ArgumentError

    if nbytes > MOST_BYTES:
        raise ArgumentError(what, f"{nbytes:,} bytes of tensors", f"up to {MOST_BYTES:,} under the checker")


def of_op(
    name: str, shape: str | None, dtype: str | None, scalars: tuple[str, ...], arch: str
) -> Callable[[int], None]:
    """Runs an op under the checker with a seed; what is wrong with the options is said before anything is compiled."""
    from pykern import op as registry
    from pykern.commands.explain import case_of
    from pykern.errors import ArgumentError
    from pykern.op import ASYNC_ORDERS, Spec, host
    from pykern.plan import host_target
    from pykern.schema import ITEMSIZE, dtype_name, output_info
    from pykern.testing import make_args

    op = registry.get(name)
    kind = dtype_name(dtype) if dtype is not None else None
    if shape is not None:
        case = case_of(op, shape, kind, scalars, default="float32")
        problem = op.problem_of(case)
        outs = [output_info(problem, o) for o in op.outputs]
        sizes = [v.nbytes for v in problem.tensors.values() if v is not None]
        refuse_large("--shape", sum(sizes) + sum(math.prod(s) * ITEMSIZE[d] for d, s in outs))
    else:
        if kind is not None:
            raise ArgumentError("--shape", None, "sizes, where --dtype is given")
        smallest = min(op.cases(), key=lambda c: sum(math.prod(v.shape) for v in c.values() if isinstance(v, Spec)))
        case = {**smallest, **case_of(op, None, None, scalars)}
    try:
        first = make_args(op, case, 0)
    except (LookupError, TypeError, ValueError) as error:
        if op.make is None or shape is None or isinstance(error, ArgumentError):
            raise
        # Lengths, page tables and the like hang together: the op makes them from words of its own cases.
        why = f"none for {op.name}, whose arguments hang together: leave --shape out ({type(error).__name__}: {error})"
        raise ArgumentError("--shape", repr(shape), why) from error
    op.planned(op.problem_of_args(first), host_target(arch))

    def run(seed: int) -> None:
        args = make_args(op, case, seed)
        with host(arch=arch, check=True, trace=True, seed=seed, async_order=ASYNC_ORDERS[seed % 3]):
            op(**args)

    return run


_TENSOR = re.compile(r"^(\w+)\[([\dx]+)\]$")


def parse_arg(text: str, seed: int) -> Any:
    """A tensor of random values for ``f32[4x8]``, else a number."""
    import torch

    from pykern.errors import ArgumentError
    from pykern.schema import ITEMSIZE, dtype_name
    from pykern.testing.data import fill

    found = _TENSOR.match(text)
    if found:
        shape, dtype = dims("--arg", found[2]), dtype_name(found[1])
        refuse_large(f"--arg {text}", math.prod(shape) * ITEMSIZE[dtype])
        return fill(shape, dtype, "normal", torch.Generator().manual_seed(seed))
    for number in (lambda: int(text, 0), lambda: float(text)):
        try:
            return number()
        except ValueError:
            continue
    raise ArgumentError("--arg", repr(text), "a tensor such as f32[4x8], or a number")


def dims(name: str, text: str) -> tuple[int, ...]:
    from pykern.errors import ArgumentError

    try:
        return tuple(int(v) for v in text.split("x"))
    except ValueError:
        raise ArgumentError(name, repr(text), "numbers such as 4 or 4x2") from None


def of_file(
    path: str, kernel: str | None, grid: str, block: str, smem: int, args: tuple[str, ...]
) -> Callable[[int], None]:
    """Runs a kernel of a .cuh file under the checker with a seed."""
    from pykern.errors import ArgumentError
    from pykern.jit.raw import load

    source = load(path)
    declared = source.declarations()
    if kernel is None:
        if len(declared) > 1:
            raise ArgumentError("--kernel", None, "one of " + ", ".join(declared))
        kernel = next(iter(declared))
    chosen = source.kernel(kernel)
    blocks, threads = dims("--grid", grid), dims("--block", block)
    for text in args:
        parse_arg(text, 0)

    def run(seed: int) -> None:
        values = [parse_arg(text, seed) for text in args]
        chosen.launch(blocks, threads, *values, smem=smem, check=True, seed=seed, device="cpu")

    return run


def show(target: str, findings: list[dict[str, Any]], rows: list[dict[str, Any]], seeds: int) -> None:
    from rich.table import Table

    from pykern.check import sentence

    console = _cli.console()
    for f in findings:
        text = sentence(f) if "kernel" in f else f["message"]
        console.print(f"{text} (seed {f['seed']})", markup=False, style="red", soft_wrap=True)
    schedules = "1 schedule" if seeds == 1 else f"{seeds} schedules"
    if not findings:
        console.print(f"{target}: nothing found in {schedules}", markup=False)
    if not rows:
        return
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for name in ("line", "access", "requests", "sect/req", "ideal", "wf/req", "ideal", "unique bytes"):
        left = name in ("line", "access")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for r in rows:
        n = max(r["requests"], 1)
        shared = r["space"] == "shared"
        counts = [f"{r[key] / n:.4g}" for key in ("sectors", "ideal_sectors", "wavefronts", "ideal_wavefronts")]
        bad = r["wavefronts"] > r["ideal_wavefronts"] if shared else r["sectors"] > 1.25 * r["ideal_sectors"]
        table.add_row(
            f"{r['file'] or '?'}:{r['line'] or '?'}",
            f"{r['op']} {r['space']} {r['bytes']} B",
            str(r["requests"]),
            *(["", "", *counts[2:]] if shared else [*counts[:2], "", ""]),
            f"{r['unique_bytes']:,}",
            style="yellow" if bad else "",
        )
    console.print(table)
    console.print("sect/req: 32-byte sectors a request of a warp; wf/req: wavefronts of shared memory; ideal: at best")
