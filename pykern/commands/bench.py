"""``pykern bench``: time the ops on a GPU beside their peers, as a share of the measured roof."""

from __future__ import annotations

import json
import time
from typing import Any

import click

from pykern.commands._once import Once


@click.command("bench", cls=Once, short_help="Time the ops on this GPU beside their peers.")
@click.argument("ops", nargs=-1)
@click.option(
    "--repeats", type=click.IntRange(1), default=9, show_default=True, help="Replays of each arm; the median is shown."
)
@click.option(
    "--limit",
    type=click.FloatRange(0),
    default=0.0,
    help="Stop starting new rows after this many seconds; 0: no limit.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a row.")
def command(ops: tuple[str, ...], repeats: int, limit: float, as_json: bool) -> None:
    """Time every declared benchmark problem of OPS (default: all).

    Random normal data, buffers rotated so that the L2 is cold, dozens of calls in one CUDA graph, arms alternated.
    """
    import torch

    from pykern import op as registry
    from pykern.errors import PykernError, ToolchainError

    chosen = [registry.get(name) for name in ops or registry.names()]
    if not torch.cuda.is_available():
        raise ToolchainError("pykern bench needs a CUDA GPU, and torch sees none")
    started = time.monotonic()
    roofs = measure_roofs()
    if not as_json:
        click.echo(
            f"{torch.cuda.get_device_name()}: read {roofs['read']:.2f} TB/s, copy {roofs['copy']:.2f} TB/s, "
            f"bf16 matrix product {roofs['bf16']:.0f} TFLOP/s (measured now)"
        )
        click.echo(
            f"{'op':<16} {'problem':<46} {'us':>9} {'TB/s':>6} {'TFLOP/s':>8} {'roof':>5}  peers (their time / ours)"
        )
    for op in chosen:
        name = op.name
        for case in op.benches:
            if limit and time.monotonic() - started > limit:
                click.echo("time limit reached: remaining rows are not run")
                return
            try:
                row = time_case(op, case, repeats, roofs)
            except (PykernError, RuntimeError) as error:
                row = {"op": name, "problem": describe(case), "error": f"{type(error).__name__}: {error}"[:300]}
            torch.cuda.empty_cache()
            click.echo(json.dumps(row) if as_json else text(row))


def describe(case: dict[str, Any]) -> str:
    from pykern.op import Spec

    parts = []
    for k, v in case.items():
        if isinstance(v, Spec):
            parts.append(f"{k} {'x'.join(map(str, v.shape))} {v.dtype.replace('float', 'f').replace('bf', 'bf')}")
        elif not isinstance(v, (list, tuple)):
            parts.append(f"{k}={v}")
    return ", ".join(parts)


def text(row: dict[str, Any]) -> str:
    if "error" in row:
        return f"{row['op']:<16} {row['problem']:<46} {row['error']}"
    peers = ", ".join(f"{k} {v:.2f}x" if isinstance(v, float) else f"{k} {v}" for k, v in row["peers"].items())
    return (
        f"{row['op']:<16} {row['problem'][:46]:<46} {row['us']:>9.2f} {row['tbs']:>6.2f} {row['tflops']:>8.1f} "
        f"{row['roof']:>4.0%}  {peers}"
    )


def measure_roofs() -> dict[str, float]:
    """Read and copy bandwidth (TB/s) over 2 GiB and the bf16 matrix product rate (TFLOP/s, 8192^3), measured."""
    import torch

    from pykern.timing import alternate, capture

    x = torch.randn(1 << 29, device="cuda")
    y = torch.empty_like(x)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    read, copy, product = alternate(
        [
            (capture(lambda i: x.sum(), 4), 4),
            (capture(lambda i: torch.mul(x, 1.0, out=y), 4), 4),  # copy_ would be a memcpy node, which is slower
            (capture(lambda i: torch.mm(a, b), 8), 8),
        ],
        5,
    )
    n = x.numel() * 4
    return {
        "read": n / read.median / 1e6,
        "copy": 2 * n / copy.median / 1e6,
        "bf16": 2 * 8192**3 / product.median / 1e6,
    }


def time_case(op: Any, case: dict[str, Any], repeats: int, roofs: dict[str, float]) -> dict[str, Any]:
    """One row: our time, rates, share of the roof, and each peer's time over ours."""
    import torch

    from pykern.testing import make_args
    from pykern.testing.data import clone
    from pykern.timing import alternate, capture, rotation

    first = make_args(op, case, 1, "cuda")
    problem = op.problem_of_args(first)
    nbytes, flops = op.nbytes(problem), op.flops(problem)
    sets = [first, *(clone(first) for _ in range(rotation(nbytes, 60 << 20) - 1))]
    calls = max(len(sets), min(48, max(4, int(4e9 // max(nbytes, 1)))))
    calls = max(4, min(calls, int(2e13 // max(flops, 1)))) if flops > nbytes * 200 else calls
    arms: list[tuple[str, Any]] = [("pykern", lambda i: op(**sets[i % len(sets)]))]
    peers: dict[str, Any] = {}
    for name, peer in op.peers.items():
        try:
            if peer(**first) is NotImplemented:
                continue
            arms.append((name, lambda i, peer=peer: peer(**sets[i % len(sets)])))
        except Exception as error:
            peers[name] = f"failed: {type(error).__name__}"
    graphs = []
    for name, call in arms:
        try:
            graphs.append((name, capture(call, calls)))
        except Exception as error:
            if name == "pykern":
                raise
            torch.cuda.synchronize()
            peers[name] = f"no graph: {type(error).__name__}"
    times = alternate([(g, calls) for _, g in graphs], repeats)
    ours = times[0].median
    for (name, _), t in list(zip(graphs, times, strict=True))[1:]:
        peers[name] = t.median / ours
    seconds = ours * 1e-6
    matrix = flops / max(nbytes, 1) > roofs["bf16"] / roofs["copy"]
    bandwidth = roofs["read"] if nbytes_written(op, problem) * 20 < nbytes else roofs["copy"]
    roof = flops / seconds / 1e12 / roofs["bf16"] if matrix else nbytes / seconds / 1e12 / bandwidth
    return {
        "op": op.name,
        "problem": describe(case),
        "variant": op.planned(problem, _target()).variant,
        "us": ours,
        "us_low": times[0].low,
        "us_high": times[0].high,
        "tbs": nbytes / seconds / 1e12,
        "tflops": flops / seconds / 1e12,
        "roof": roof,
        "peers": peers,
    }


def nbytes_written(op: Any, problem: Any) -> int:
    """Bytes of the outputs."""
    import math

    from pykern.schema import ITEMSIZE, output_info

    total = 0
    for out in op.outputs:
        dtype, shape = output_info(problem, out)
        total += math.prod(shape) * ITEMSIZE[dtype]
    return total


def _target() -> Any:
    from pykern.op import runtime

    return runtime().target(0)
