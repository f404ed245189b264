"""Rows scaled into [-1, 1]: s[m] = max(max_n |x[m, n]|, floor), y[m, n] = x[m, n] / s[m]."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pykern.errors import require
from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Run, Target, template
from pykern.schema import FLOATS, Out, Problem, Scalar, Tensor

THREADS = 128  # kUnitThreads


def check(p: Problem) -> None:
    require(1 <= p.n < 1 << 30, "x.shape[-1]", p.n, "1 to 2**30 - 1")


def plan(p: Problem, target: Target) -> Plan:
    x = p["x"]
    rows, stride = x.rows("x")
    out = p.outs.get("y")  # given by out=, else fresh and aligned
    starts = x.vector(stride) * x.itemsize >= 16 and (out is None or out.align >= 16)
    fast = starts and p.n * x.itemsize % 16 == 0
    args = (In("x"), OutPtr("y"), OutPtr("s"), I32(p.n), I64(stride), Run("floor"), I32(fast))
    why = "whole, aligned chunks of 16 bytes" if fast else "rows that are not aligned to 16 bytes: element by element"
    kernel = template("unit_rows", x.dtype)
    return Plan((Launch(kernel, rows, THREADS, args),), numerics=x.dtype, variant="unit_rows", why=(why,))


def reference(x: Any, floor: float = 1e-12) -> Any:
    x = x.double()
    s = x.abs().amax(-1).clamp(min=floor)
    return x / s[..., None], s


def tolerance(dtype: str) -> Tolerance:
    # s is exact; y is one division in float32, rounded to the result's type, with that type's denormals below.
    return {
        "float32": Tolerance(1.3e-7, 1e-44, "one rounding to 24 bits"),
        "float16": Tolerance(5e-4, 6e-8, "one rounding to 11 bits"),
        "bfloat16": Tolerance(4e-3, 1e-40, "one rounding to 8 bits"),
    }[dtype]


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield {"x": Spec(dtype, (3, 1024))}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    dtype = draw.one_of(FLOATS)
    n = draw(sizes(1, 1200, around=[8, THREADS * 4, THREADS * 8]))
    return {"x": draw(tensor_spec(dtype, (draw(sizes(0, 4)), n))), "floor": draw.one_of((1e-12, 3.5))}


op = Op(
    name="unit_rows",
    source=str(Path(__file__).with_suffix(".cuh")),
    inputs=(Tensor("x", "*m n"), Scalar("floor", "float", 1e-12, low=1e-30)),
    outputs=(Out("y", "*m n"), Out("s", "*m", "float32")),
    plan=plan,
    reference=reference,
    tolerance=tolerance,
    cases=cases,
    draw=draw,
    check=check,
    nbytes=lambda p: 2 * p["x"].nbytes + 4 * p.m,
    flops=lambda p: 2 * p["x"].numel,
    rowwise=(("x", 0),),
    mutants=(
        ("bits = warp_max(bits);", ""),
        ("__float_as_int(fabsf(to_float(v[i])))", "__float_as_int(to_float(v[i]))"),
        ("most < floor ? floor : most", "most"),
    ),
)
