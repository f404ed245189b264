"""Dequantize: y[n, k] = the weights of a packed matrix, each one float32 expression, rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pykern.op import Case, Draw, Op, Tolerance
from pykern.ops._quant import (
    LAYOUTS,
    TYPES,
    Packed,
    dequantize_reference,
    draw_planes,
    make_planes,
    packed,
    plane_specs,
)
from pykern.ops._rows import out_aligned, whole
from pykern.plan import I32, I64, Arg, In, Launch, OutPtr, Plan, Target, Ws, ceil_div, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Scalar, Tensor

SOURCE = "ops/dequantize.cuh"
THREADS, PIECES = 256, 4
ID_TYPES = {"int32": 1, "int64": 2}


def launch(q: Packed, y: OutPtr | Ws, dtype: str, wide: bool, ids: tuple[int, str] | None = None) -> Launch:
    """The kernel that writes ``q`` as ``dtype`` to ``y``; ``ids`` = (how many, dtype): those rows of it."""
    rows = q.n if ids is None else ids[0]
    pieces = rows * ceil_div(q.k, 8)
    id_args: tuple[Arg, int] = (I64(0), 0) if ids is None else (In("ids"), ID_TYPES[ids[1]])
    args = (
        *q.pointers, id_args[0], y, I32(pieces), I32(q.n), I32(q.k), *q.sizes, I32(TYPES[dtype]), I32(id_args[1]),
        I32(int(wide)),
    )  # fmt: skip
    kernel = template("pk::dequantize", f"pk::{q.layout.struct}")
    return Launch(kernel, ceil_div(pieces, THREADS * PIECES), THREADS, args, source=SOURCE)


def plan(p: Problem, target: Target) -> Plan:
    q = packed(p)
    wide = whole(q.k, ITEMSIZE[p.dtype]) and out_aligned(p, "y")
    why = ["a thread decodes 4 pieces of 8 weights, all loaded first"]
    if not (wide and q.tags & 32):
        why.append("k, the group or an address is not a multiple of what 8 weights need: one by one")
    return Plan((launch(q, OutPtr("y"), p.dtype, wide),), numerics="exact", variant="dequantize", why=tuple(why))


def reference(planes: Sequence[Any], layout: str, group: int = 0, dtype: str = "float32") -> Any:
    import torch

    return dequantize_reference(planes, layout, group).to(getattr(torch, dtype)).double()


def cases() -> Iterator[Case]:
    for name, kind in LAYOUTS.items():
        offsets = "float16" if kind.minima else None
        for dtype in FLOATS:
            planes = plane_specs(name, 3, 256, 0 if kind.block else 64, "float16", offsets, "contiguous")
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
        dtype: of the result.
        out: optional result, contiguous.

    Returns:
        ``[n, k]``: the expression above, each operation rounded to float32, the result rounded to ``dtype``. GGUF
        layouts are bit-equal to gguf-py's.

    Raises:
        ArgumentError: a plane that is not as above, by its index.
    """,
    mutants=(
        ("to[p] = static_cast<int64_t>(r) * k + at[p]", "to[p] = static_cast<int64_t>(r) * k + (at[p] ^ 8)"),
        ("L::one(q.opaque(), row[p], at[p] + i)", "L::one(q.opaque(), row[p], at[p])"),
        ("if (type == kQuantF16) store_eight<half>", "if (type == kQuantF16) store_eight<bf16>"),
        ("for (int i = 0; i < 8; i += kStep) {", "for (int i = 0; i < 8; i += 8) {"),
    ),
    benches=(
        bench("int4", 28672, 8192, 128), bench("int4_min", 28672, 8192, 128), bench("packed4.v1", 28672, 8192, 128),
        bench("int8", 28672, 8192, 0), bench("fp8", 28672, 8192, 0), bench("q4_0", 28672, 8192, 0),
        bench("q4_1", 28672, 8192, 0), bench("q8_0", 28672, 8192, 0),
    ),
)  # fmt: skip
