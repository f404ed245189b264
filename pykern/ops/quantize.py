"""Quantize: a matrix w [n, k] into the planes of a layout; the inverse of dequantize up to its rounding."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pykern.errors import ArgumentError
from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.ops._quant import LAYOUTS, LIMIT, TYPES
from pykern.plan import I32, I64, Arg, In, Launch, OutPtr, Plan, Target, ceil_div, template
from pykern.schema import FLOATS, Out, Problem, Scalar, Tensor

SOURCE = "ops/quantize.cuh"
THREADS = 128  # 4 warps, a group or block each
MADE = tuple(name for name in LAYOUTS if not name.startswith("packed"))
BLOCKS = {"q4_0": "pk::BlockQ4_0", "q4_1": "pk::BlockQ4_1", "q8_0": "pk::BlockQ8_0"}
KINDS = {"int4": 0, "int4_min": 0, "int8": 1, "fp8": 2}  # QuantKind in cuda_src/ops/quantize.cuh


def groups(p: Problem) -> tuple[int, int]:
    """(size of a group, groups a row)."""
    size = 32 if LAYOUTS[p.layout].block else p.group or max(p.k, 1)
    return size, ceil_div(p.k, size)


def plane(p: Problem, i: int) -> tuple[str, tuple[int, int] | tuple[int]]:
    """dtype and shape of plane i; shape (0,) of one that the layout does not have."""
    kind = LAYOUTS[p.layout]
    if kind.block:
        return ("uint8", (p.n, p.k // 32 * kind.block)) if i == 0 else ("uint8", (0,))
    if i == 0:
        return kind.codes, (p.n, p.k * kind.bits // 8)
    made = i == 1 or (i == 2 and kind.minima)
    return p["w"].dtype, (p.n, groups(p)[1]) if made else (0,)


def plan(p: Problem, target: Target) -> Plan:
    w, kind = p["w"], LAYOUTS[p.layout]
    size, per_row = groups(p)
    stride = w.strides[0] if p.n > 1 else p.k
    count = p.n * per_row
    args: tuple[Arg, ...]
    if kind.block:
        kernel = template("pk::quantize_blocks", BLOCKS[p.layout])
        args = (In("w"), OutPtr("codes"), I64(count), I32(per_row), I64(stride), I32(TYPES[w.dtype]))
    else:
        kernel = template("pk::quantize_groups", KINDS[p.layout])
        args = (
            In("w"), OutPtr("codes"), OutPtr("scales"), OutPtr("mins") if kind.minima else I64(0), I64(count),
            I32(per_row), I32(size), I32(p.k), I64(stride), I32(TYPES[w.dtype]),
        )  # fmt: skip
    launch = Launch(kernel, ceil_div(count, 4), THREADS, args)
    return Plan((launch,), numerics="exact", variant="quantize", why=("a warp packs a group, read twice",))


def check(p: Problem) -> None:
    kind = LAYOUTS[p.layout]
    if p.k % kind.multiple:
        raise ArgumentError("w.shape[1]", p.k, f"a multiple of {kind.multiple} ({p.layout})")
    if kind.block and p.group not in (0, 32):
        raise ArgumentError("group", p.group, f"0 or 32: blocks of {p.layout} hold 32 weights")
    codes = p.outs.get("codes")
    if kind.block and codes is not None and codes.align < 2:
        raise ArgumentError("codes.data_ptr()", "an odd address", "a multiple of 2: blocks begin with 16-bit numbers")
    if not 0 <= p.group < LIMIT:
        raise ArgumentError("group", p.group, "0 (a whole row) or the number of neighbours that share a scale")
    if not kind.block and kind.bits == 4 and p.group % 2:
        raise ArgumentError("group", p.group, "an even number: two 4-bit codes share a byte")
    if max(p.n, p.k) >= LIMIT:
        raise ArgumentError("w.shape", p["w"].shape, "sides below 2**31")


def reference(w: Any, layout: str, group: int = 0) -> tuple[Any, ...]:
    import torch

    kind = LAYOUTS[layout]
    n, k = w.shape
    none = torch.zeros(0)
    if kind.block:
        return blocks_reference(w.float().reshape(n, k // 32, 32), layout), none.byte(), none.byte()
    size = group or max(k, 1)
    count = ceil_div(k, size)
    pad = torch.nn.functional.pad(w.float(), (0, count * size - k), value=float("nan")).reshape(n, count, size)
    inside = (torch.arange(count * size) < k).reshape(count, size)
    finite = (pad.isfinite() | ~inside).all(-1)
    low = torch.where(inside, pad, torch.inf).amin(-1)
    high = torch.where(inside, pad, -torch.inf).amax(-1)
    if kind.minima:
        scale = 2 * ((0.5 * high - 0.5 * low) / 15)
    else:
        scale = torch.maximum(-low, high) / {"int4": 7, "int8": 127, "fp8": 448}[layout]
    nan = torch.tensor(torch.nan)
    scale = torch.where(finite, scale, nan).to(w.dtype)
    minimum = torch.where(finite, low, nan).to(w.dtype)
    base = minimum.float() if kind.minima else torch.zeros(())
    q = (pad - base[..., None] if kind.minima else pad) / scale.float()[..., None]
    q = torch.where((scale > 0)[..., None], q, 0.0).reshape(n, count * size)[:, :k]
    if layout == "fp8":
        codes = q.clamp(-448, 448).to(torch.float8_e4m3fn).double()
    elif layout == "int8":
        codes = q.round().clamp(-127, 127).to(torch.int8)
    else:
        nibbles = (q.round().clamp(0, 15) if kind.minima else q.round().clamp(-8, 7) + 8).to(torch.uint8)
        codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    return codes, scale.double(), (minimum if kind.minima else none).double()


def blocks_reference(x: Any, layout: str) -> Any:
    """GGUF bytes ``[n, row bytes]`` of float32 blocks ``[n, blocks, 32]``: the rules of gguf-py in torch."""
    import torch

    n = x.shape[0]
    if not x.numel():
        return torch.zeros((n, x.shape[1] * LAYOUTS[layout].block), dtype=torch.uint8)
    numbers = []
    if layout == "q8_0":
        d = x.abs().amax(-1, keepdim=True) / 127
    elif layout == "q4_1":
        numbers = [x.amin(-1, keepdim=True)]
        d = (x.amax(-1, keepdim=True) - numbers[0]) / 15
    else:
        d = x.gather(-1, x.abs().argmax(-1, keepdim=True)) / -8
    inverse = torch.where(d == 0, 0.0, 1 / d)
    if layout == "q8_0":
        size = (x * inverse).abs()
        whole = size.floor()
        codes = (torch.sign(x * inverse) * (whole + (2 * (size - whole)).floor())).to(torch.int8).view(torch.uint8)
    else:
        scaled = (x - numbers[0]) * inverse + 0.5 if numbers else x * inverse + 8.5
        q = scaled.trunc().clamp(0, 15).to(torch.uint8)
        codes = q[..., :16] | q[..., 16:] << 4
    heads = [v.half().view(torch.uint8) for v in (d, *numbers)]
    return torch.cat([*heads, codes], -1).reshape(n, -1)


def cases() -> Iterator[Case]:
    for layout in MADE:
        for dtype in FLOATS:
            yield {"w": Spec(dtype, (5, 256)), "layout": layout, "group": 0 if LAYOUTS[layout].block else 64}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    layout = draw.one_of(MADE)
    kind = LAYOUTS[layout]
    k = kind.multiple * draw(sizes(0, 320 // kind.multiple))
    group = 0 if kind.block else draw.one_of((0, 8, 32, 128, 6 if kind.bits == 4 else 3))
    fills = ("normal", "zeros") if kind.block else ("normal", "spiky", "zeros")  # of gguf-py's NaN nothing is known
    w = draw(tensor_spec(draw.one_of(FLOATS), (draw(sizes(0, 9)), k), fills=fills))
    return {"w": w, "layout": layout, "group": group}


def unpack(result: Any, args: Mapping[str, Any]) -> Any:
    """The planes that the layout has."""
    kind = LAYOUTS[args["layout"]]
    count = 1 if kind.block else 3 if kind.minima else 2
    return tuple(result)[:count]


op = Op(
    name="quantize",
    source=SOURCE,
    inputs=(
        Tensor("w", "n k"),
        Scalar("layout", "str", "int4", key=True, required=True, choices=MADE),
        Scalar("group", "int", 0, key=True),
    ),
    outputs=tuple(
        Out(name, lambda p, i=i: plane(p, i)[1], lambda p, i=i: plane(p, i)[0])  # type: ignore[misc]
        for i, name in enumerate(("codes", "scales", "mins"))
    ),
    plan=plan,
    reference=lambda **args: unpack(reference(**args), args),
    # Codes are compared exactly; fp8 codes and scales too.
    tolerance=lambda dtype: Tolerance(0.0, 0.0, "the same float32 operations"),
    cases=cases,
    draw=draw,
    unpack=unpack,
    check=check,
    nbytes=lambda p: p["w"].nbytes + p.n * p.k * LAYOUTS[p.layout].bits // 8,
    flops=lambda p: 4 * p.n * p.k,
    rowwise=(("w", 0),),
    doc="""The planes of a packed matrix, as :func:`pykern.dequantize` takes them.

    Args:
        w: ``[n, k]``, float32, float16 or bfloat16; last stride 1.
        layout: ``q4_0``, ``q4_1``, ``q8_0``: bytes equal to gguf-py's encoders (k a multiple of 32; for values that
            are NaN or infinite the codes are unspecified). ``int4``: scale = largest magnitude / 7, zero 8;
            ``int4_min``: scale = (max - min) / 15; ``int8``: / 127; ``fp8``: / 448. These round the scale to w's dtype,
            then divide by it and round to nearest even. A group with NaN or infinity reads back as NaN. The largest
            finite values may read back as infinity: the rounded scale can carry them past the dtype's end. GGUF's
            scales are float16: in its blocks magnitudes from about 5.2e5 (q4_0) and 8.3e6 (q8_0) read back as infinity
            or NaN, in q4_1 a range from 9.8e5 or a minimum beyond 65504.
        group: neighbours of a row that share a scale, the last group may be partial; 0: a whole row. Even for 4 bits.
        out: optional results: (codes, scales, mins), empty where the layout has none.

    Returns:
        (blocks,), (codes, scales) or (codes, scales, mins); scales and mins ``[n, ceil(k / group)]`` of w's dtype.

    Raises:
        ArgumentError: an argument that is not as above.
    """,
    mutants=(
        ("d = warp_extreme(v) / -8.f;", "d = warp_max(fabsf(v)) / -8.f;"),
        ("__fadd_rn(__fmul_rn(v, inverse), 8.5f)", "__fadd_rn(__fmul_rn(v, inverse), 8.f)"),
        ("code(at) | code(at + 1) << 4", "code(at + 1) | code(at) << 4"),
        ("to = min(k - from, group) + from", "to = from + group / 2"),
    ),
    benches=(
        {"w": Spec("bfloat16", (8192, 8192)), "layout": "int4", "group": 128},
        {"w": Spec("bfloat16", (8192, 8192)), "layout": "q4_0", "group": 0},
    ),
)
