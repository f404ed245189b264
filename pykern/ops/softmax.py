"""Row softmax: y[m, n] = exp(x[m, n] - max_n x) / sum_n exp(x[m, n] - max_n x); with ``log`` its logarithm."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pykern.op import Case, Op, Spec, Tolerance
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, ceil_div, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Scalar, Tensor

# (chunks of 16 bytes a row may have, kernel, threads, chunks a thread): the first that fits. 4 chunks a thread are
# enough bytes in flight for HBM; 8, or 1024 threads, spill: the compiler keeps the row both packed and as floats.
FITS = (
    (32, "softmax_rows", 32, 1),
    (128, "softmax_rows", 32, 4),
    (512, "softmax_rows", 128, 4),
    (1024, "softmax_rows", 256, 4),
    (2048, "softmax_rows", 512, 4),
)
LONG_THREADS = 1024


def plan(p: Problem, target: Target) -> Plan:
    x = p["x"]
    rows, stride = x.rows("x")
    chunks = ceil_div(p.n, 16 // x.itemsize)
    aligned_x = x.align >= 16 and (rows == 1 or stride * x.itemsize % 16 == 0)
    y_align = p.outs["y"].align if "y" in p.outs else 256
    aligned_y = y_align >= 16 and (rows == 1 or p.n * x.itemsize % 16 == 0)
    flags = aligned_x | aligned_y << 1 | bool(p.log) << 2
    fit = next((f for f in FITS if chunks <= f[0]), None)
    if fit is None:
        name, threads = "softmax_long", LONG_THREADS
        kernel = template(name, x.dtype, threads)
        grid, block = rows, threads
    else:
        _, name, threads, per = fit
        rows_per_block = 4 if threads == 32 else 1
        kernel = template(name, x.dtype, threads, per)
        grid, block = ceil_div(rows, rows_per_block), threads * rows_per_block
    args = (In("x"), OutPtr("y"), I64(rows), I32(p.n), I64(stride), I32(flags))
    why = [f"a row is {chunks} chunks of 16 bytes: {name}, {threads} threads"]
    if not aligned_x:
        why.append(f"rows of x are not 16-byte aligned (stride {stride}): element loads")
    if not aligned_y:
        why.append("rows of y are not 16-byte aligned: element stores")
    return Plan((Launch(kernel, grid, block, args),), numerics=x.dtype, variant=kernel.split('<')[0], why=tuple(why))


def reference(x: Any, log: bool = False) -> Any:
    import torch

    return torch.log_softmax(x.double(), -1) if log else torch.softmax(x.double(), -1)


def tolerance(dtype: str) -> Tolerance:
    # __expf is exact to about |x| * 2^-23 for the differences x - max, of which results above 1e-6 have |x| < 14;
    # 16-bit results are rounded once (2^-9 for bfloat16, 2^-11 for float16; below 2^-14 float16 is denormal).
    return {
        "float32": Tolerance(4e-6, 2e-6, "exp by ex2.approx, sum of up to 1e5 terms"),
        "float16": Tolerance(1e-3, 1e-6, "one rounding to 11 bits, denormals below 6e-5"),
        "bfloat16": Tolerance(8e-3, 1e-6, "one rounding to 8 bits"),
    }[dtype]


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        chunk = 16 // ITEMSIZE[dtype]
        for limit, *_ in FITS:
            yield {"x": Spec(dtype, (3, limit * chunk))}
        yield {"x": Spec(dtype, (2, FITS[-1][0] * chunk + 1))}


def draw(draw: Callable[..., Any]) -> Case:
    from pykern.testing import sizes, tensor_spec

    dtype = draw.one_of(FLOATS)
    chunk = 16 // ITEMSIZE[dtype]
    n = draw(sizes(1, 700, around=[32 * chunk, chunk, 128 * chunk, 1]))
    m = draw(sizes(0, 6, around=[4]))
    return {"x": draw(tensor_spec(dtype, (m, n))), "log": draw.one_of((False, True))}


def nbytes(p: Problem) -> int:
    return 2 * p["x"].nbytes


def flops(p: Problem) -> int:
    return 5 * p["x"].numel


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
    nbytes=nbytes,
    flops=flops,
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
    benches=(
        {"x": Spec("bfloat16", (16384, 4096))},
        {"x": Spec("bfloat16", (32768, 8192))},
        {"x": Spec("bfloat16", (4096, 32768))},
        {"x": Spec("bfloat16", (2048, 131072))},
    ),
)
