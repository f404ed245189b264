"""Linear layer on packed weights: y = act(x @ w.T + bias) + residual, w = dequantize(planes) in x's dtype."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from pykern.errors import ArgumentError
from pykern.op import Case, Draw, Op, Spec
from pykern.ops import dequantize, linear
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
from pykern.ops.linear import ACTIVATIONS, F32_SKINNY_TOKENS, MMA_SKINNY_TOKENS, Gemm
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, Workspace, Ws, ceil_div, template, tuned
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Scalar, Tensor, TensorInfo

SOURCE = "ops/quant_linear.cuh"
NIBBLES_SOURCE = "ops/quant_linear_nibbles.cuh"
MMA_TOKENS = 16  # two token tiles: beyond, decoding once for all tokens is the smaller cost
# What a card has to decide for the 4-bit kernel: tiles of 16 rows a block, and slices in a warp's ring of shared
# memory, for one tile of 8 tokens and for two. Candidates, the default first; scripts/tune.py times them.
TUNING = {
    "row_tiles_8": (1, 2),
    "stages_8": (4, 8),
    "row_tiles_16": (2, 1),
    "stages_16": (8, 4),
}


def plan(p: Problem, target: Target) -> Plan:
    x, residual, q = p["x"], p["residual"], packed(p)
    x_stride = x.rows("x")[1]
    residual_stride = residual.rows("residual")[1] if residual is not None else 0
    few = F32_SKINNY_TOKENS if x.dtype == "float32" else MMA_TOKENS
    if p.m > few:
        return plan_unfused(p, target, x_stride, residual_stride)
    args = (
        In("x"), *q.pointers, In("bias"), In("residual"), OutPtr("y"), I32(p.m), I32(q.n), I32(q.k), *q.sizes,
        I64(x_stride), I64(residual_stride), I32(ACTIVATIONS[p.activation]),
    )  # fmt: skip
    slow = () if q.fast else ("k, the group or an address is not a multiple of what 8 weights need: one by one",)
    if x.dtype == "float32":
        kernel = template("pk::quant_linear_f32", f"pk::{q.layout.struct}")
        launch = Launch(kernel, ceil_div(q.n, 32), 128, args)
        why = (f"{p.m} tokens: codes are the traffic, decoded tile by tile in shared memory", *slow)
        return Plan((launch,), numerics="float32", variant="quant_f32", why=why)
    wide = p.rows_aligned("x") and q.k % 8 == 0
    if p.m and wide and nibbles_allowed(p, q):
        return plan_nibbles(p, q, args, target)
    kernel = template("pk::quant_linear_mma", x.dtype, f"pk::{q.layout.struct}")
    launch = Launch(kernel, ceil_div(q.n, 16), 256, (*args, I32(int(wide))))
    why = (f"{p.m} tokens: codes are the traffic, decoded into tensor-core fragments", *slow)
    return Plan((launch,), numerics=f"{x.dtype} m<={MMA_SKINNY_TOKENS}", variant="quant_mma", why=why)


def nibbles_allowed(p: Problem, q: Packed) -> bool:
    """Whether 4-bit codes can be decoded in x's own type, a group at a time: what quant_linear_nibbles.cuh wants."""
    if not in_own_type(p, q, p["x"].dtype) or not q.fast or not 0 < q.k < 1 << 30:
        return False
    return q.groups == 1 or (q.group >= 32 and q.group & (q.group - 1) == 0)


def plan_nibbles(p: Problem, q: Packed, args: tuple[Any, ...], target: Target) -> Plan:
    tokens = ceil_div(p.m, 8)
    rows, stages = (knob(target, f"{name}_{8 * tokens}") for name in ("row_tiles", "stages"))
    # Two of the smallest blocks share an SM, if their rings leave room for two.
    sharing = 2 if rows * tokens == 1 else 1
    if sharing * nibbles_smem(rows, tokens, stages) > target.smem_optin:
        stages = 4
    smem = nibbles_smem(rows, tokens, stages)
    kernel = template("pk::quant_linear_nibbles", p["x"].dtype, f"pk::{q.layout.struct}", rows, tokens, stages)
    launch = Launch(kernel, ceil_div(q.n, 16 * rows), 256, args, smem=smem, source=NIBBLES_SOURCE)
    why = (f"{p.m} tokens: codes are the traffic, {stages - 1} slices of a warp in flight, decoded in x's own type",)
    return Plan((launch,), numerics=f"{p['x'].dtype} m<={MMA_SKINNY_TOKENS}", variant="quant_nibbles", why=why)


def nibbles_smem(rows: int, tokens: int, stages: int) -> int:
    """sizeof(QuantNibblesSmem)."""
    return 8 * (stages * rows * 1024 + 8 * tokens * (16 * rows + 4) * 4)


def knob(target: Target, name: str) -> int:
    """The tuned value of ``name``, one of its candidates."""
    value = tuned(target, "quant_linear", name, TUNING[name][0])
    if value not in TUNING[name]:
        raise ArgumentError(f"tuning {target.arch}.quant_linear.{name}", value, ", ".join(map(str, TUNING[name])))
    return value


def plan_unfused(p: Problem, target: Target, x_stride: int, residual_stride: int) -> Plan:
    """Many tokens: the weights are written out in x's dtype once, and linear runs on them."""
    x, q = p["x"], packed(p)
    w = TensorInfo(x.dtype, (q.n, q.k), (q.k, 1))
    args = (
        In("x"), Ws(0), I64(0), In("bias"), In("residual"), OutPtr("y"), I32(p.m), I32(q.n), I32(q.k), I64(x_stride),
        I64(q.k), I64(0), I64(residual_stride), I64(q.n), I32(ACTIVATIONS[p.activation]),
    )  # fmt: skip
    vec = linear.copy_width(q.k, x, x_stride, w)
    gemm = linear.plan_gemm(Gemm(x.dtype, x.dtype, p.m, q.n, q.k, vec, False, args), target)
    # linear reads its weights before it waits for the kernel before: here that kernel writes them.
    launches = tuple(replace(launch, pdl=False) for launch in gemm.launches)
    if q.k:
        wide = q.k * x.itemsize % 16 == 0
        launches = (dequantize.launch(p, q, Ws(0), x.dtype, wide), *launches)
    why = (f"{p.m} tokens: not fused, weights go to a workspace of {w.nbytes} bytes first", *gemm.why)
    return Plan(launches, (Workspace(w.nbytes),), gemm.numerics, f"unfused_{gemm.variant}", why)


def reference(
    x: Any,
    planes: Sequence[Any],
    layout: str,
    group: int = 0,
    bias: Any = None,
    activation: str = "none",
    residual: Any = None,
) -> Any:
    w = dequantize_reference(planes, layout, group).to(x.dtype)
    return linear.reference(x, w, bias, activation, residual)


def check(p: Problem) -> None:
    q = packed(p)
    k = p["x"].shape[-1]
    if q.k != k:
        raise ArgumentError("planes", f"weights [{q.n}, {q.k}]", f"k = x.shape[-1] = {k}")
    for name, at, size in (("m", "x.shape[:-1]", p.m), ("n", "planes[0].shape[0]", q.n)):
        if size >= 2**31 - 256:
            raise ArgumentError(at, size, f"{name} less than 2**31 - 256")
    bias, residual = p["bias"], p["residual"]
    if bias is not None and bias.shape[0] != q.n:
        raise ArgumentError("bias.shape[0]", bias.shape[0], f"{q.n}, the rows of the weights")
    if residual is not None and residual.shape != (*p["x"].shape[:-1], q.n):
        raise ArgumentError("residual.shape", residual.shape, str((*p["x"].shape[:-1], q.n)))


def case(dtype: str, m: int, n: int, k: int, layout: str, group: int = 128, scales: str = "") -> Case:
    kind = LAYOUTS[layout]
    group = 0 if kind.block else group
    scales = scales or dtype
    planes = plane_specs(layout, n, k, group, scales, scales if kind.minima else None, "contiguous")
    return {"x": Spec(dtype, (m, k)), "planes": planes, "layout": layout, "group": group}


def cases() -> Iterator[Case]:
    # The first few are what planted errors are tried on.
    yield case("float32", 3, 48, 256, "int4")
    for dtype in ("bfloat16", "float16"):
        yield case(dtype, 3, 48, 256, "int4", 32)
        yield case(dtype, 3, 16, 3200, "int4")  # warps go round more often than there are stages, not all alike
        yield case(dtype, 12, 16, 3200, "int8")
        yield case(dtype, 3, 48, 256, "int4", 24)
        yield case(dtype, 3, 48, 90, "int4", 6)
        for layout in ("int4", "packed4.v1"):
            yield case(dtype, 12, 48, 256, layout)
    for dtype in reversed(FLOATS):
        for layout in LAYOUTS:
            yield case(dtype, 3, 48, 256, layout)
            yield case(dtype, 18, 16, 128, layout)
        for m, n, k in linear.shapes_of_every_variant(dtype, gated=False):
            if m > (F32_SKINNY_TOKENS if dtype == "float32" else MMA_TOKENS):
                yield case(dtype, m, n, k, "int8")


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    layout, dtype = draw.one_of(tuple(LAYOUTS)), draw.one_of(FLOATS)
    planes, k, group = draw_planes(draw, layout, draw.one_of((12, 12, 100)))
    n = planes[0].shape[0]
    m = draw(sizes(0, 70, around=[1, F32_SKINNY_TOKENS, MMA_TOKENS, MMA_SKINNY_TOKENS]))
    return {
        "x": draw(tensor_spec(dtype, (m, k))),
        "planes": planes,
        "layout": layout,
        "group": group,
        "bias": draw.one_of((None, Spec(dtype, (n,)))),
        "activation": draw.one_of(tuple(ACTIVATIONS)),
        "residual": draw.one_of((None, draw(tensor_spec(dtype, (m, n), fills=("normal",))))),
    }


def make(case: Case, rng: Any) -> dict[str, Any]:
    rest = {name: v for name, v in case.items() if name != "planes"}
    planes = make_planes(case["planes"], case["layout"], rng)
    given = {"bias": None, "activation": "none", "residual": None}
    return {**given, **linear.make_tamed(rest, rng), "planes": planes}


def nbytes(p: Problem) -> int:
    planes = sum(t.nbytes for t in p["planes"])
    out = p.m * packed(p).n * ITEMSIZE[p["x"].dtype]
    return planes + sum(p[t].nbytes for t in ("x", "bias", "residual") if p.has(t)) + out


op = Op(
    name="quant_linear",
    source=SOURCE,
    inputs=(
        Tensor("x", "*m k"),
        Tensor("planes", "", many=True, role="weight"),
        Scalar("layout", "str", "int4", key=True, required=True),
        Scalar("group", "int", 0, key=True),
        Tensor("bias", "n", "like x", role="weight", optional=True),
        Scalar("activation", "str", "none", key=True, choices=tuple(ACTIVATIONS)),
        Tensor("residual", "*m _", "like x", optional=True),
    ),
    outputs=(Out("y", lambda p: (*p["x"].shape[:-1], packed(p).n)),),
    plan=plan,
    reference=reference,
    tolerance=linear.tolerance,
    cases=cases,
    draw=draw,
    nbytes=nbytes,
    flops=lambda p: 2 * p.m * packed(p).n * p.k,
    make=make,
    check=check,
    inplace=("residual",),
    rowwise=(("x", 0), ("residual", 0)),
    keyword_only="bias",
    doc="""act(x @ w.T + bias) + residual with packed weights; sums in float32.

    Args:
        x: ``[..., k]``, float32, float16 or bfloat16; last stride 1, leading axes one stride.
        planes, layout, group: a packed matrix ``[n, k]``, as :func:`pykern.dequantize` takes it.
        bias: ``[n]`` of x's dtype, or None.
        activation: ``none``, ``relu``, ``gelu`` (exact), ``gelu_tanh`` or ``silu``.
        residual: ``[..., n]`` of x's dtype, or None; added after the activation.
        out: optional result, contiguous; may be ``residual`` itself.

    Returns:
        ``[..., n]`` of x's dtype: the bits of ``linear(x, dequantize(planes, layout, group, d), ...)`` with d the name
        of that dtype (``"float16"`` for a ``torch.float16`` x), and linear's promises about rows alone and in batches.
        Up to 16 tokens (8 of float32) the weights are decoded in the kernel, and only codes are read; more tokens are
        not fused: weights go to a workspace ``[n, k]`` first.

    Raises:
        ArgumentError: an argument that is not as above.
    """,
    mutants=(
        ("at + i < q.k ? L::one(q, row, at + i) : 0.f", "at + i < q.k - 1 ? L::one(q, row, at + i) : 0.f"),
        ("swap_with<2>(t, 1, 3);", "swap_with<2>(t, 3, 1);"),
        ("load_step(k0 + kStride, u, 0, ahead[u])", "load_step(k0, u, 0, ahead[u])"),
        ("load_step(k0, u + 1, 1, second[1]);", "load_step(k0, u, 1, second[1]);"),
        ("&s.x[buf][first + 1][kk]", "&s.x[buf][first][kk]"),
    ),
    benches=(
        case("bfloat16", 1, 4096, 14336, "int4"), case("bfloat16", 1, 4096, 14336, "packed4.v1"),
        case("bfloat16", 16, 4096, 14336, "int4"), case("bfloat16", 1, 28672, 4096, "int4"),
        case("bfloat16", 1, 4096, 14336, "q4_0"), case("bfloat16", 1, 4096, 14336, "q8_0"),
        case("bfloat16", 1, 4096, 14336, "int8", 0), case("float32", 1, 4096, 4096, "q4_1"),
        case("bfloat16", 4096, 4096, 4096, "int4"),
    ),
)  # fmt: skip
