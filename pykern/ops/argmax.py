"""argmax of each row: y[m] = the lowest n with x[m, n] = max_n x[m, n]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykern.errors import require
from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.ops._rows import whole
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, Workspace, Ws, ceil_div, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Tensor

THREADS = 256
PIECE = 32 * 1024  # bytes of a row one block reduces before it pays to split: 8 loads of 16 bytes a thread


def plan(p: Problem, target: Target) -> Plan:
    x = p["x"]
    rows, stride = x.rows("x")
    # Few rows are split until every SM has a block; the words' maximum does not depend on the pieces.
    most = ceil_div(p.n * x.itemsize, PIECE)
    pieces = max(1, min(most, ceil_div(target.sms, rows)))
    fast = int(whole(p.n, x.itemsize) and p.rows_aligned("x"))
    words = Ws(0) if pieces > 1 else I64(0)
    first = Launch(
        template("argmax", x.dtype),
        rows * pieces,
        THREADS,
        (In("x"), OutPtr("y"), words, I32(p.n), I64(stride), I32(pieces), I32(fast)),
    )
    why = (f"{pieces} blocks a row of {p.n}",)
    if pieces == 1:
        return Plan((first,), numerics="exact", variant="argmax", why=why)
    join = Launch("argmax_join", rows, THREADS, (Ws(0), OutPtr("y"), I32(pieces)))
    return Plan((first, join), (Workspace(rows * pieces * 8),), numerics="exact", variant="argmax_split", why=why)


def check(p: Problem) -> None:
    require(p.n >= 1, "x.shape[-1]", p.n, ">= 1")


def reference(x: Any) -> Any:
    import torch

    wide = x.double()
    wide = torch.where(torch.isnan(wide), -torch.inf, wide)
    best = wide.max(-1, keepdim=True).values
    first = (wide == best).to(torch.int64).argmax(-1)
    # A row of NaN and -inf only: the first -inf wins over NaN.
    real = ~torch.isnan(x.double())
    only = real.any(-1) & torch.isinf(best.squeeze(-1)) & (best.squeeze(-1) < 0)
    return torch.where(only, real.to(torch.int64).argmax(-1), torch.where(real.any(-1), first, 0))


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield {"x": Spec(dtype, (2, 100))}
        yield {"x": Spec(dtype, (1, 2 * PIECE // ITEMSIZE[dtype] + 1))}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    dtype = draw.one_of(FLOATS)
    n = draw(sizes(1, 5000, around=[1, 256 * 16 // ITEMSIZE[dtype]]))
    if draw.one_of((False, False, False, True)):
        n = 2 * PIECE // ITEMSIZE[dtype] + draw(sizes(0, 9))
    return {"x": draw(tensor_spec(dtype, (draw(sizes(0, 4)), n), fills=("normal", "spiky", "ties")))}


op = Op(
    name="argmax",
    source="ops/argmax.cuh",
    inputs=(Tensor("x", "*m n"),),
    outputs=(Out("y", lambda p: p["x"].shape[:-1], "int64"),),
    plan=plan,
    reference=reference,
    tolerance=lambda dtype: Tolerance(0.0, 0.0, "an index"),
    cases=cases,
    draw=draw,
    check=check,
    nbytes=lambda p: p["x"].nbytes + 8 * (p["x"].numel // max(p.n, 1)),
    flops=lambda p: p["x"].numel,
    rowwise=(("x", 0),),
    doc="""Index of the largest value of each row, the lowest of equals.

    Args:
        x: ``[..., n]``, float32, float16 or bfloat16; last stride 1, leading axes one stride. n is 1..2^31-1.
        out: optional result, contiguous int64.

    Returns:
        int64 ``[...]``, always in 0..n-1. NaN never wins (torch's does); a row of nothing but NaN gives 0.

    Raises:
        ArgumentError: a dtype, stride or ``out`` that is not as above.
    """,
    mutants=(
        ("order_word(to_float(v[i]), static_cast<uint32_t>(at + i))", "order_word(to_float(v[i]), at)"),
        ("order_word(to_float(v[i])", "order_word(fabsf(to_float(v[i]))"),
        ("from_float<T>(NAN)", "from_float<T>(0.0f)"),
        ("best = word > best ? word : best;", "best = word >> 32 >= best >> 32 ? word : best;"),  # the last of equals
    ),
    benches=({"x": Spec("bfloat16", (1, 128256))}, {"x": Spec("bfloat16", (64, 128256))}),
)
