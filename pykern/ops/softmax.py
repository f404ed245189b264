"""Row softmax: y[m, n] = exp(x[m, n] - max_n x) / sum_n exp(x[m, n] - max_n x); with ``log`` its logarithm."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykern.errors import require
from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.ops._rows import LONG_THREADS, every_length, grid_block, group, whole
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Scalar, Tensor


def plan(p: Problem, target: Target) -> Plan:
    x = p["x"]
    rows, stride = x.rows("x")
    fast = whole(p.n, x.itemsize) and p.rows_aligned("x", "y")
    fit = group(p.n, x.dtype)
    if fit is None:
        variant, grid, block = "softmax_long", rows, LONG_THREADS
        kernel = template(variant, x.dtype, LONG_THREADS)
        why = ["a row is too long for one block's registers: read twice, the second time from L2"]
        why += [] if fast else ["rows are not whole, aligned chunks of 16 bytes: element access"]
    elif not fast:
        variant, grid, block = "softmax_again", rows, fit[0]
        kernel = template(variant, x.dtype)
        why = ["rows are not whole, aligned chunks of 16 bytes: element access, for every pass again"]
    else:
        variant = "softmax_rows"
        grid, block = grid_block(rows, fit[0])
        kernel = template(variant, x.dtype, *fit)
        why = [f"a row stays in the registers of {fit[0]} threads, {fit[1]} x 16 bytes each"]
    flags = fast | bool(p.log) << 1
    args = (In("x"), OutPtr("y"), I64(rows), I32(p.n), I64(stride), I32(flags))
    return Plan((Launch(kernel, grid, block, args),), numerics=x.dtype, variant=variant, why=tuple(why))


def check(p: Problem) -> None:
    require(p.n >= 1, "x.shape[-1]", p.n, ">= 1")


def reference(x: Any, log: bool = False) -> Any:
    import torch

    return torch.log_softmax(x.double(), -1) if log else torch.softmax(x.double(), -1)


def torch_softmax(x: Any, log: bool = False) -> Any:
    import torch

    return torch.log_softmax(x, -1) if log else torch.softmax(x, -1)


def tolerance(dtype: str) -> Tolerance:
    # __expf is exact to about |x| * 2^-23 for the differences x - max, of which results above 1e-6 have |x| < 14;
    # 16-bit results are rounded once (2^-9 for bfloat16, 2^-11 for float16; below 2^-14 float16 is denormal).
    return {
        "float32": Tolerance(4e-6, 2e-6, "exp by ex2.approx, sum of up to 1e5 terms"),
        "float16": Tolerance(1e-3, 1e-6, "one rounding to 11 bits, denormals below 6e-5"),
        "bfloat16": Tolerance(8e-3, 1e-6, "one rounding to 8 bits"),
    }[dtype]


def cases() -> Iterator[Case]:
    for dtype, n in every_length():
        yield {"x": Spec(dtype, (3, n))}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    dtype = draw.one_of(FLOATS)
    chunk = 16 // ITEMSIZE[dtype]
    n = draw(sizes(1, 700, around=[32 * chunk, chunk, 128 * chunk, 1]))
    m = draw(sizes(0, 6, around=[4]))
    return {"x": draw(tensor_spec(dtype, (m, n))), "log": draw.one_of((False, True))}


op = Op(
    name="softmax",
    source="ops/softmax.cuh",
    inputs=(Tensor("x", "*m n"), Scalar("log", "bool", False, key=True)),
    outputs=(Out("y", "*m n"),),
    plan=plan,
    reference=reference,
    tolerance=tolerance,
    cases=cases,
    draw=draw,
    check=check,
    nbytes=lambda p: 2 * p["x"].nbytes,
    flops=lambda p: 5 * p["x"].numel,
    inplace=("x",),
    rowwise=(("x", 0),),
    keyword_only="log",
    doc="""Softmax over the last axis.

    Args:
        x: ``[..., n]``, float32, float16 or bfloat16; last stride 1, leading axes one stride (padding between rows and
            stride 0 are fine). n >= 1.
        log: return ``log(softmax(x))``, computed as ``(x - max) - log(sum)``.
        out: optional result, contiguous, same shape and dtype; may be ``x`` itself.

    Returns:
        ``[..., n]`` of x's dtype. A row with NaN or +inf is NaN; a row of nothing but -inf is NaN (as torch.softmax;
        attention treats its masked rows itself). Sums are float32.

    Raises:
        ArgumentError: a dtype, stride or ``out`` that is not as above.
    """,
    mutants=(
        ("m = Group::max(m, smem);", "m = m;"),
        ("s = Group::sum(s, smem);", "s = s;"),
        ("pad = from_float<T>(-INFINITY)", "pad = from_float<T>(0.0f)"),
        ("if (row >= rows) return;", "if (row >= rows - 1) return;"),
    ),
    peers={"torch": torch_softmax},
    benches=(
        {"x": Spec("bfloat16", (16384, 4096))},
        {"x": Spec("bfloat16", (32768, 8192))},
        {"x": Spec("bfloat16", (4096, 32768))},
        {"x": Spec("bfloat16", (2048, 131072))},
    ),
)
