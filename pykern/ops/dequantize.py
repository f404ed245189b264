"""Dequantize: y[n, k] = the weights of a packed matrix, each one float32 expression, rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pykern.op import Case, Draw, Op, Tolerance
from pykern.ops._quant import (
    LAYOUTS,
    Packed,
    dequantize_reference,
    draw_planes,
    in_own_type,
    make_planes,
    packed,
    plane_specs,
)
from pykern.ops._rows import whole
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, Ws, ceil_div, divider, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Scalar, Tensor, TensorInfo

SOURCE = "ops/dequantize.cuh"
THREADS, PIECES = 256, 4
ID_TYPES = {"int32": 1, "int64": 2}


def mode(p: Problem, q: Packed, dtype: str, wide: bool, ids: TensorInfo | None = None) -> tuple[int, str]:
    """How a thread goes about 8 weights, a DequantizeMode of the kernel, and that in words."""
    if not (wide and q.fast):
        return 0, "k, the group or an address is not a multiple of what 8 weights need: one by one"
    if ids is None and in_own_type(p, q, dtype) and q.k % q.group == 0:
        return 2, "in pairs of the result's own type"
    return 1, "8 at a time, in float32"


def launch(p: Problem, q: Packed, y: OutPtr | Ws, dtype: str, wide: bool, ids: TensorInfo | None = None) -> Launch:
    """The kernel that writes ``q``, the packed matrix of ``p``, as ``dtype`` to ``y``, or rows ``ids`` of it. ``wide``:
    rows of y are whole, aligned chunks of 16 bytes."""
    per_row, how = ceil_div(q.k, 8), mode(p, q, dtype, wide, ids)[0]
    pieces = (q.n if ids is None else ids.numel) * per_row
    args = (
        *q.pointers, I64(0) if ids is None else In("ids"), y, I32(pieces),
        *divider(max(1, q.group // 8 if how == 2 else per_row)), I32(q.n), I32(q.k), *q.sizes,
        I32(0 if ids is None else ID_TYPES[ids.dtype]), I32(how),
    )  # fmt: skip
    kernel = template("pk::dequantize", f"pk::{q.layout.struct}", dtype)
    return Launch(kernel, ceil_div(pieces, THREADS * PIECES), THREADS, args, source=SOURCE)


def plan(p: Problem, target: Target) -> Plan:
    q = packed(p)
    wide = whole(q.k, ITEMSIZE[p.dtype]) and p.rows_aligned("y")
    why = ("a thread decodes 4 pieces of 8 weights, all loaded first", mode(p, q, p.dtype, wide)[1])
    return Plan((launch(p, q, OutPtr("y"), p.dtype, wide),), numerics="exact", variant="dequantize", why=why)


def reference(planes: Sequence[Any], layout: str, group: int = 0, dtype: str = "float32") -> Any:
    import torch

    return dequantize_reference(planes, layout, group).to(getattr(torch, dtype)).double()


def cases() -> Iterator[Case]:
    for name, kind in LAYOUTS.items():
        offsets = "float16" if kind.minima else None
        for dtype in FLOATS:
            # More pieces than a block's threads, the last block not full.
            planes = plane_specs(name, 37, 256, 0 if kind.block else 64, "float16", offsets, "contiguous")
            yield {"planes": planes, "layout": name, "group": 0 if kind.block else 64, "dtype": dtype}


def draw(draw: Draw) -> Case:
    name = draw.one_of(tuple(LAYOUTS))
    planes, _, group = draw_planes(draw, name)
    return {"planes": planes, "layout": name, "group": group, "dtype": draw.one_of(FLOATS)}


def make(case: Case, rng: Any) -> dict[str, Any]:
    return {**case, "planes": make_planes(case["planes"], case["layout"], rng)}


def bench(name: str, n: int, k: int, group: int, scales: str = "bfloat16") -> Case:
    planes = plane_specs(name, n, k, group, scales, "bfloat16" if LAYOUTS[name].minima else None, "contiguous")
    return {"planes": planes, "layout": name, "group": group, "dtype": "bfloat16"}


def check(p: Problem) -> None:
    packed(p)


def shape(p: Problem) -> tuple[int, int]:
    q = packed(p)
    return q.n, q.k


def nbytes(p: Problem) -> int:
    q = packed(p)
    return sum(t.nbytes for t in p["planes"]) + q.n * q.k * ITEMSIZE[p.dtype]


op = Op(
    name="dequantize",
    source=SOURCE,
    inputs=(
        Tensor("planes", "", many=True, role="weight"),
        Scalar("layout", "str", "int4", key=True, required=True),
        Scalar("group", "int", 0, key=True),
        Scalar("dtype", "str", "float32", key=True, choices=FLOATS),
    ),
    outputs=(Out("y", shape, lambda p: p.dtype),),
    plan=plan,
    reference=reference,
    tolerance=lambda dtype: Tolerance(0.0, 0.0, "the definition, bit for bit"),
    cases=cases,
    draw=draw,
    make=make,
    check=check,
    nbytes=nbytes,
    flops=lambda p: 3 * packed(p).n * packed(p).k,
    doc="""The weights of a packed matrix.

    Args:
        planes: contiguous tensors of the layout, in the order below.
        layout: ``q4_0``, ``q4_1``, ``q8_0``: ``blocks`` uint8 ``[n, k / 32 * 18 | 20 | 34]``, GGUF's own bytes.
            ``int4``: ``codes`` uint8 ``[n, k / 2]`` (weight 2 j in the low nibble of byte j), ``scales``
            ``[n, groups]``, optionally ``zeros`` ``[n, groups]`` (floats or uint8; 8 without): ``(code - zero) *
            scale``. ``int4_min``: ``codes``, ``scales``, ``mins``: ``code * scale + min``. ``int8``: ``codes`` int8
            ``[n, k]``, ``scales``. ``fp8``: ``codes`` float8_e4m3fn ``[n, k]``, ``scales``. ``packed4.v1`` and
            ``packed4_min.v1``: as int4 and int4_min, codes reshuffled by :func:`pykern.prepack`.
            Scales, minima and real zeros are float32, float16 or bfloat16.
        group: neighbours of a row that share a scale; ``groups = ceil(k / group)``, the last may be partial. 0: a
            whole row. GGUF blocks: 0 or 32.
        dtype: of the result, a str: ``"float32"``, ``"float16"`` or ``"bfloat16"`` (no ``torch.dtype``).
        out: optional result, contiguous.

    Returns:
        ``[n, k]``: the expression above, each operation rounded to float32, the result rounded to ``dtype``. GGUF
        layouts are bit-equal to gguf-py's.

    Raises:
        ArgumentError: a plane that is not as above, by its index.
    """,
    mutants=(
        ("d.to[p] = static_cast<int64_t>(r) * k + d.at[p]", "d.to[p] = static_cast<int64_t>(r) * k + (d.at[p] ^ 8)"),
        ("L::one(q.opaque(), d.row[p], d.at[p] + i)", "L::one(q.opaque(), d.row[p], d.at[p])"),
        ("const uint32_t r = divide(piece);", "const uint32_t r = divide(piece) & 1;"),
        ("g = per_group(piece);", "g = 0;"),
        ("L::template pairs<T>(words[p], scales[p],", "L::template pairs<T>(words[p], scales[0],"),
        ("for (int i = 0; i < 8; i += kStep) {", "for (int i = 0; i < 8; i += 8) {"),
    ),
    benches=(
        bench("int4", 28672, 8192, 128), bench("int4_min", 28672, 8192, 128), bench("packed4.v1", 28672, 8192, 128),
        bench("int8", 28672, 8192, 0), bench("fp8", 28672, 8192, 0), bench("q4_0", 28672, 8192, 0),
        bench("q4_1", 28672, 8192, 0), bench("q8_0", 28672, 8192, 0),
    ),
)  # fmt: skip
