"""Quantised embedding: y[t, k] = row ids[t] of a packed table, as dequantize gives it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pykern.errors import ArgumentError
from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.ops import dequantize
from pykern.ops._quant import LAYOUTS, dequantize_reference, draw_planes, make_planes, packed, plane_specs
from pykern.ops._rows import whole
from pykern.plan import OutPtr, Plan, Target, ceil_div
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Scalar, Tensor

IDS = ("int64", "int32")


def plan(p: Problem, target: Target) -> Plan:
    ids, q = p["ids"], packed(p)
    wide = whole(q.k, ITEMSIZE[p.dtype]) and p.rows_aligned("y")
    launch = dequantize.launch(p, q, OutPtr("y"), p.dtype, wide, ids)
    why = ("rows are decoded as they are read", dequantize.mode(p, q, p.dtype, wide, ids)[1])
    return Plan((launch,), numerics="exact", variant="quant_embedding", why=why)


def reference(ids: Any, planes: Sequence[Any], layout: str, group: int = 0, dtype: str = "float32") -> Any:
    import torch

    table = dequantize_reference(planes, layout, group).to(getattr(torch, dtype)).double()
    valid = (ids >= 0) & (ids < table.shape[0])
    return torch.where(valid.unsqueeze(-1), table[ids.clamp(0, table.shape[0] - 1).long()], torch.nan)


def check(p: Problem) -> None:
    q = packed(p)
    if q.n == 0:
        raise ArgumentError("planes[0].shape[0]", 0, "at least one row")
    if p["ids"].numel * ceil_div(q.k, 8) >= 2**31:
        raise ArgumentError("ids.numel()", p["ids"].numel, f"a result of fewer than 2**34 values, {q.k} a row")


def cases() -> Iterator[Case]:
    for name, kind in LAYOUTS.items():
        group = 0 if kind.block else 64
        planes = plane_specs(name, 11, 256, group, "float16", "float16" if kind.minima else None, "contiguous")
        for dtype, ids in (("bfloat16", "int64"), ("float16", "int32"), ("float32", "int64")):
            yield {"ids": Spec(ids, (5,)), "planes": planes, "layout": name, "group": group, "dtype": dtype}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes

    name = draw.one_of(tuple(LAYOUTS))
    planes, _, group = draw_planes(draw, name, 6)
    ids = Spec(draw.one_of(IDS), (draw(sizes(0, 9)),))
    return {"ids": ids, "planes": planes, "layout": name, "group": group, "dtype": draw.one_of(FLOATS)}


def make(case: Case, rng: Any) -> dict[str, Any]:
    """Ids inside the table, and now and then one that is not."""
    import torch

    ids, rows = case["ids"], case["planes"][0].shape[0]
    values = torch.randint(0, rows, ids.shape, generator=rng)
    if values.numel() > 4:
        values[1] = (-1, rows)[int(torch.randint(0, 2, (1,), generator=rng))]
    planes = make_planes(case["planes"], case["layout"], rng)
    return {**case, "ids": values.to(getattr(torch, ids.dtype)), "planes": planes}


def nbytes(p: Problem) -> int:
    q, rows = packed(p), p["ids"].numel
    read = sum(t.nbytes for t in p["planes"]) // q.n * min(rows, q.n)
    return read + rows * q.k * ITEMSIZE[p.dtype] + p["ids"].nbytes


op = Op(
    name="quant_embedding",
    source=dequantize.SOURCE,
    inputs=(
        Tensor("ids", "*t", IDS, strides="contiguous"),
        Tensor("planes", "", many=True, role="weight"),
        Scalar("layout", "str", "int4", key=True, required=True),
        Scalar("group", "int", 0, key=True),
        Scalar("dtype", "str", "float32", key=True, choices=FLOATS),
    ),
    outputs=(Out("y", lambda p: (*p["ids"].shape, packed(p).k), lambda p: p.dtype),),
    plan=plan,
    reference=reference,
    tolerance=lambda dtype: Tolerance(0.0, 0.0, "the definition, bit for bit"),
    cases=cases,
    draw=draw,
    make=make,
    check=check,
    nbytes=nbytes,
    flops=lambda p: 3 * p["ids"].numel * packed(p).k,
    rowwise=(("ids", 0),),
    doc="""Rows of a packed table.

    Args:
        ids: ``[...]`` int64 or int32, contiguous.
        planes, layout, group: a packed matrix ``[v, k]``, as :func:`pykern.dequantize` takes it; v >= 1.
        dtype: of the result, a str: ``"float32"``, ``"float16"`` or ``"bfloat16"`` (no ``torch.dtype``).
        out: optional result, contiguous.

    Returns:
        ``[..., k]`` of ``dtype``: the bits of ``dequantize``'s rows. An id outside 0..v-1 gives a row of NaN.

    Raises:
        ArgumentError: a plane, dtype, shape or ``out`` that is not as above.
    """,
    mutants=(
        ("return id >= 0 && id < n ? id : -1;", "return id >= 0 ? (id < n ? id : 0) : -1;"),
        ("return id >= 0 && id < n ? id : -1;", "return id < n ? max(id, int64_t(0)) : -1;"),
        ("d.row[p] = matrix_row(ids, id_type, r, n);", "d.row[p] = r % n;"),
    ),
    benches=(
        {
            "ids": Spec("int64", (8192,)),
            "planes": plane_specs("q8_0", 128256, 4096, 0, "float16", None, "contiguous"),
            "layout": "q8_0",
            "group": 0,
            "dtype": "bfloat16",
        },
    ),
)
