"""Rotary position embedding: (a, b) -> (a cos - b sin, b cos + a sin) for each pair of a head, by the token's position.

Su et al., "RoFormer", 2021. Pairs are (i, i + R/2) (half-split, as in Hugging Face and Llama) or (2i, 2i + 1).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykern.op import Case, Draw, Op, Spec
from pykern.ops import _rope
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, ceil_div, template
from pykern.schema import FLOATS, Out, Problem, Scalar, Tensor


def plan(p: Problem, target: Target) -> Plan:
    x = p["x"]
    fast = _rope.fast(p, "x", "y")
    threads = p.t * p.h * _rope.pieces(p, fast, x.itemsize)
    args = (
        In("x"), In("positions"), In("cos_sin"), OutPtr("y"), I64(p.t), I32(p.h), I32(p.d), I32(p.r), I64(p.rows),
        I64(x.strides[0]), I64(x.strides[1]), I32(int(p.interleaved)), I32(int(fast)),
    )  # fmt: skip
    launch = Launch(template("rope", x.dtype), ceil_div(threads, _rope.THREADS), _rope.THREADS, args)
    return Plan(
        (launch,),
        numerics=x.dtype,
        variant="rope",
        why=("a thread rotates 16 bytes of pairs" if fast else "a thread rotates one pair",),
    )


def reference(x: Any, positions: Any, cos_sin: Any, interleaved: bool = False) -> Any:
    return _rope.rotate(x, positions, cos_sin, interleaved)


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield {"x": Spec(dtype, (3, 2, 64)), "positions": Spec("int64", (3,)), "cos_sin": Spec("float32", (16, 64))}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    dtype = draw.one_of(FLOATS)
    t, h, d = draw(sizes(0, 6)), draw(sizes(1, 4)), draw(sizes(2, 40, around=[8, 16, 32]))
    r = 2 * draw(sizes(1, d // 2, around=[d // 2]))
    return {
        "x": draw(tensor_spec(dtype, (t, h, d))),
        "positions": Spec("int64", (t,)),
        "cos_sin": Spec("float32", (draw(sizes(1, 12)), r)),
        "interleaved": draw.one_of((False, True)),
    }


def make(case: Case, rng: Any) -> dict[str, Any]:
    """Positions inside the table, one in six outside."""
    import torch

    from pykern.testing import make_tensor

    rows, r = case["cos_sin"].shape
    positions = torch.randint(0, rows, case["positions"].shape, generator=rng)
    outside = torch.randint(0, 6, positions.shape, generator=rng) == 0
    return {
        "x": make_tensor(case["x"], rng),
        "positions": torch.where(outside & (positions > 0), rows + positions, positions),
        "cos_sin": _rope.angles(rows, r, rng),
        "interleaved": case.get("interleaved", False),
    }


op = Op(
    name="rope",
    source="ops/rope.cuh",
    inputs=(
        Tensor("x", "t h d", FLOATS),
        Tensor("positions", "t", ("int64",), strides="contiguous"),
        Tensor("cos_sin", "rows r", ("float32",), role="weight", strides="contiguous"),
        Scalar("interleaved", "bool", False, key=True),
    ),
    outputs=(Out("y", "t h d"),),
    plan=plan,
    reference=reference,
    tolerance=_rope.tolerance,
    cases=cases,
    draw=draw,
    make=make,
    check=_rope.check,
    nbytes=lambda p: 2 * p["x"].nbytes + p.t * (8 + 4 * p.r),
    flops=lambda p: 3 * p.t * p.h * p.r,
    rowwise=(("x", 0), ("positions", 0)),
    keyword_only="interleaved",
    doc="""Rotary position embedding.

    Args:
        x: ``[tokens, heads, head_dim]``, float32, float16 or bfloat16; last stride 1, others free.
        positions: int64 ``[tokens]``. A position outside the table gives NaN.
        cos_sin: float32 ``[positions, r]``: r/2 cosines, then r/2 sines of each position's angles; elements from r on
            are copied. r is even, 2..head_dim (0 is refused). See :func:`pykern.models.rope.cos_sin_table`.
        interleaved: pairs are (2i, 2i + 1) instead of (i, i + r/2).
        out: optional result, contiguous.

    Returns:
        ``[tokens, heads, head_dim]`` of x's dtype, computed in float32.

    Raises:
        ArgumentError: a dtype, shape, stride or ``out`` that is not as above; an r that is odd, 0 or above head_dim.
    """,
    mutants=(
        ("a[i + j] * c[j] - b[i + j] * s[j]", "a[i + j] * c[j] + b[i + j] * s[j]"),
        ("a * c - b * s", "a * c + b * s"),
        ("RopePair{2 * pair, 2 * pair + 1, true}", "RopePair{pair, pair + half, true}"),
        ("const int a = rotary + 2 * (pair - half);", "const int a = 2 * (pair - half);"),
    ),
    benches=(
        {
            "x": Spec("bfloat16", (8192, 32, 128)),
            "positions": Spec("int64", (8192,)),
            "cos_sin": Spec("float32", (8192, 128)),
        },
    ),
)
