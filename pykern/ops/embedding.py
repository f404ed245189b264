"""Embedding: y[t, n] = table[ids[t], n]."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.ops._rows import whole
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, ceil_div, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Tensor

THREADS = 256
IDS = ("int64", "int32")


def plan(p: Problem, target: Target) -> Plan:
    table, ids = p["table"], p["ids"]
    tokens = ids.numel
    fast = whole(p.n, table.itemsize) and p.rows_aligned("table", "y")
    chunks = tokens * ceil_div(p.n, 16 // table.itemsize)
    kernel = template("embedding", table.dtype, ids.dtype)
    args = (
        In("ids"), In("table"), OutPtr("y"), I64(tokens), I64(p.v), I64(table.strides[0]), I32(p.n), I32(int(fast)),
    )  # fmt: skip
    why = "a thread copies 16 bytes" + ("" if fast else "; rows not 16-byte aligned: element access")
    launch = Launch(kernel, ceil_div(chunks, THREADS), THREADS, args)
    return Plan((launch,), numerics="copy", variant="embedding", why=(why,))


def reference(ids: Any, table: Any) -> Any:
    import torch

    valid = (ids >= 0) & (ids < table.shape[0])
    rows = table.double()[ids.clamp(0, max(table.shape[0] - 1, 0)).long()]
    return torch.where(valid.unsqueeze(-1), rows, torch.nan)


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for ids in IDS:
            yield {"ids": Spec(ids, (5,)), "table": Spec(dtype, (11, 96))}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    one_of = draw.one_of
    dtype = one_of(FLOATS)
    n = draw(sizes(1, 300, around=[16 // ITEMSIZE[dtype], 256]))
    return {
        "ids": Spec(one_of(IDS), (draw(sizes(0, 9)),)),
        "table": draw(tensor_spec(dtype, (draw(sizes(1, 40)), n))),
    }


def make(case: Case, rng: Any) -> dict[str, Any]:
    """Ids inside the table, and now and then one that is not."""
    import torch

    from pykern.testing import make_tensor

    table, ids = case["table"], case["ids"]
    values = torch.randint(0, table.shape[0], ids.shape, generator=rng)
    if values.numel() > 4:
        values[1] = (-1, table.shape[0])[int(torch.randint(0, 2, (1,), generator=rng))]
    return {"ids": values.to(getattr(torch, ids.dtype)), "table": make_tensor(table, rng)}


op = Op(
    name="embedding",
    source="ops/embedding.cuh",
    inputs=(Tensor("ids", "*t", IDS, strides="contiguous"), Tensor("table", "v n", FLOATS, role="weight")),
    outputs=(Out("y", "*t n", "like table"),),
    plan=plan,
    reference=reference,
    tolerance=lambda dtype: Tolerance(0.0, 0.0, "a copy"),
    cases=cases,
    draw=draw,
    make=make,
    nbytes=lambda p: 2 * p["ids"].numel * p.n * p["table"].itemsize + p["ids"].nbytes,
    flops=lambda p: 0,
    rowwise=(("ids", 0),),
    doc="""Rows of a table.

    Args:
        ids: ``[...]`` int64 or int32, contiguous.
        table: ``[v, n]``, float32, float16 or bfloat16; last stride 1.
        out: optional result, contiguous.

    Returns:
        ``[..., n]`` of the table's dtype: a copy, bit for bit. An id outside 0..v-1 gives a row of NaN.

    Raises:
        ArgumentError: a dtype, shape, stride or ``out`` that is not as above.
    """,
    mutants=(
        ("table + id * stride", "table + (id + 1) % rows * stride"),
        ("const T nan = from_float<T>(NAN);", "const T nan = from_float<T>(0.0f);"),
    ),
    benches=({"ids": Spec("int64", (8192,)), "table": Spec("bfloat16", (128256, 4096))},),
)
