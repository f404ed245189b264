"""Linear layer: y[m, n] = act(sum_k x[m, k] * w[n, k] + bias[n]) + residual[m, n], sums in float32."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pykern.errors import ArgumentError
from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, ceil_div, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Scalar, Tensor

# The numbers are LinearActivation in cuda_src/ops/linear_epilogue.cuh.
ACTIVATIONS = {"none": 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}

F32_SOURCE = "ops/linear_f32.cuh"
MMA_SOURCE = "ops/linear_mma.cuh"
SKINNY_SOURCE = "ops/linear_skinny_mma.cuh"

F32_SKINNY_TOKENS = 8  # up to here every thread of a warp would mostly compute padding in a tile
MMA_SKINNY_TOKENS = 64  # the boundary between the two numerics classes of 16-bit inputs


@dataclass(frozen=True)
class Tile:
    """One tile shape. ``speed``: throughput relative to the largest tile's, by reuse of what a block loads."""

    bm: int
    bn: int
    wm: int
    wn: int
    speed: float

    @property
    def threads(self) -> int:
        return (self.bm // self.wm) * (self.bn // self.wn) * 32

    def cost(self, m: int, n: int, sms: int) -> float:
        """Relative time: the work of the SM with the most blocks."""
        blocks = ceil_div(m, self.bm) * ceil_div(n, self.bn)
        return ceil_div(blocks, sms) * self.bm * self.bn / self.speed


F32_TILES = (Tile(128, 64, 32, 64, 1.0), Tile(64, 64, 32, 32, 0.8), Tile(32, 64, 16, 32, 0.5))
MMA_TILES = (Tile(128, 256, 64, 64, 1.0), Tile(128, 128, 64, 64, 0.8), Tile(64, 64, 32, 32, 0.5))
MMA_DEPTH = 64
# Tile rows that blocks in flight share: 8 x 128 rows of x and about 16 tiles of w fill an H200's 132 SMs squarely.
GROUP_M = 8


@dataclass(frozen=True)
class Gemm:
    """What linear and gated_linear have in common once their arguments are named."""

    dtype: str
    out_dtype: str
    m: int
    n: int  # output columns
    k: int
    vec: int  # elements per copy that x and the weights allow
    gated: bool
    args: tuple[Any, ...]

    @property
    def cols(self) -> int:
        """Rows of weights that are read: the width of the GEMM."""
        return 2 * self.n if self.gated else self.n


def plan_gemm(g: Gemm, target: Target) -> Plan:
    """The kernel for one problem: fp32 or tensor cores, few tokens or many."""
    if g.dtype == "float32":
        return plan_f32_skinny(g, target) if g.m <= F32_SKINNY_TOKENS else plan_f32_tiled(g, target)
    return plan_mma_skinny(g, target) if g.m <= MMA_SKINNY_TOKENS else plan_mma(g, target)


def narrow(g: Gemm) -> tuple[str, ...]:
    full = 16 // ITEMSIZE[g.dtype]
    return () if g.vec == full else (f"x, w or k allow copies of {g.vec} elements, not {full}: slower",)


def plan_f32_skinny(g: Gemm, target: Target) -> Plan:
    tokens, warps = (1, 1) if g.m == 1 else (2, 4)
    vec = 4 if g.vec >= 4 else 1
    # More rows a thread are more independent sums, fewer blocks: only where the blocks still cover the SMs.
    least = 2 if g.gated else 1
    rows = 4 if ceil_div(g.cols, 128) >= target.sms and skinny_smem(4, warps * tokens) <= target.smem_optin else least
    blocks = ceil_div(g.cols, 32 * rows) * ceil_div(g.m, warps * tokens)
    kernel = template("pk::linear_f32_skinny", g.out_dtype, tokens, warps, rows, vec, g.gated)
    why = (f"{g.m} tokens: weights are the traffic; {rows} rows a thread, {blocks} blocks", *narrow(g))
    smem = skinny_smem(rows, warps * tokens)
    launch = Launch(kernel, blocks, warps * 32, g.args, smem=smem, source=F32_SOURCE)
    return Plan((launch,), numerics="float32", variant=f"f32_skinny_{rows}x{tokens * warps}", why=why)


def skinny_smem(rows: int, tokens: int) -> int:
    """sizeof(LinearSkinnyF32Smem): 3 stages of w rows, padded by 4, and x rows."""
    depth = 128 if rows == 1 else 64
    return 3 * 4 * (32 * rows * (depth + 4) + tokens * depth)


def plan_f32_tiled(g: Gemm, target: Target) -> Plan:
    vec = 4 if g.vec >= 4 else 1
    tile = F32_TILES[-1] if vec == 1 else min(F32_TILES, key=lambda t: t.cost(g.m, g.cols, target.sms))
    blocks = ceil_div(g.m, tile.bm) * ceil_div(g.cols, tile.bn)
    kernel = template("pk::linear_f32_tiled", g.out_dtype, tile.bm, tile.bn, tile.wm, tile.wn, vec, g.gated)
    launch = Launch(kernel, blocks, tile.threads, g.args, source=F32_SOURCE)
    why = (f"{blocks} tiles of {tile.bm} x {tile.bn} on {target.sms} SMs", *narrow(g))
    return Plan((launch,), numerics="float32", variant=f"f32_{tile.bm}x{tile.bn}", why=why)


def mma_vec(g: Gemm) -> int:
    return 8 if g.vec >= 8 else 2 if g.vec >= 2 else 1


def plan_mma_skinny(g: Gemm, target: Target) -> Plan:
    vec = mma_vec(g)
    tiles = ceil_div(g.m, 8)
    # Every vector width and token count gives the same bits; the narrow ones come in two sizes only.
    tokens = next(t for t in ((1, 2, 4, 8) if vec == 8 else (1, 8)) if t >= tiles)
    rows = 2 if g.gated else 1
    kernel = template("pk::linear_skinny_mma", g.dtype, g.out_dtype, rows, tokens, vec, g.gated)
    blocks = ceil_div(g.n, 16)
    smem = 8 * 8 * tokens * (16 * rows + 4) * 4
    launch = Launch(kernel, blocks, 256, g.args, smem=smem, source=SKINNY_SOURCE)
    why = (f"{g.m} tokens: weights are the traffic, read once into fragments; {blocks} blocks", *narrow(g))
    return Plan((launch,), numerics=f"{g.dtype} m<=64", variant=f"mma_skinny_{8 * tokens}", why=why)


def plan_mma(g: Gemm, target: Target) -> Plan:
    vec = mma_vec(g)
    options = []
    for tile in MMA_TILES if vec == 8 else MMA_TILES[-1:]:
        ring = (tile.bm + tile.bn) * MMA_DEPTH * 2
        # The largest tile has an SM to itself; of the others two share one, so that one block's barrier is no stall.
        stages = 4 if tile is MMA_TILES[0] and 4 * ring <= target.smem_optin else 3
        if stages * ring <= target.smem_optin:
            options.append((tile.cost(g.m, g.cols, target.sms), tile, stages, stages * ring))
    _, tile, stages, smem = min(options, key=lambda o: o[0])
    kernel = template(
        "pk::linear_mma", g.dtype, g.out_dtype, tile.bm, tile.bn, tile.wm, tile.wn, stages, vec, g.gated
    )
    blocks = ceil_div(g.m, tile.bm) * ceil_div(g.cols, tile.bn)
    launch = Launch(kernel, blocks, tile.threads, (*g.args, I32(GROUP_M)), smem=smem, source=MMA_SOURCE)
    why = (f"{blocks} tiles of {tile.bm} x {tile.bn}, {stages} stages, on {target.sms} SMs", *narrow(g))
    if tile is not MMA_TILES[0]:
        why = (*why, "smaller tiles: the large one would leave SMs idle, or does not fit")
    return Plan((launch,), numerics=f"{g.dtype} m>64", variant=f"mma_{tile.bm}x{tile.bn}", why=why)


def weight_rows(w: Any) -> int:
    """Row stride of a weight [n, k], in elements."""
    return w.strides[0] if w.shape[0] > 1 else w.shape[1]


def copy_width(k: int, x: Any, x_stride: int, *weights: Any) -> int:
    """Elements per copy that k, pointers and row strides of x and the weights allow (16 bytes at most)."""
    width = 16 // x.itemsize
    for t, stride in ((x, x_stride), *((w, weight_rows(w)) for w in weights)):
        width = min(width, t.vector(stride, k))
    return width


def check_sizes(p: Problem) -> None:
    for name, at in (("m", "x.shape[:-1]"), ("n", "w.shape[0]"), ("k", "x.shape[-1]")):
        size = getattr(p, name)
        if size >= 2**31 - 256:
            raise ArgumentError(at, size, "less than 2**31 - 256")


def plan(p: Problem, target: Target) -> Plan:
    x, w, residual = p["x"], p["w"], p["residual"]
    x_stride = x.rows("x")[1]
    residual_stride = residual.rows("residual")[1] if residual is not None else 0
    args = (
        In("x"), In("w"), I64(0), In("bias"), In("residual"), OutPtr("y"), I32(p.m), I32(p.n), I32(p.k), I64(x_stride),
        I64(weight_rows(w)), I64(0), I64(residual_stride), I64(p.n), I32(ACTIVATIONS[p.activation]),
    )  # fmt: skip
    vec = copy_width(p.k, x, x_stride, w)
    return plan_gemm(Gemm(x.dtype, out_dtype(p), p.m, p.n, p.k, vec, False, args), target)


def out_dtype(p: Problem) -> str:
    return p.scalars["out_dtype"] or p["x"].dtype


def check(p: Problem) -> None:
    check_sizes(p)
    residual = p["residual"]
    if residual is not None and residual.dtype != out_dtype(p):
        raise ArgumentError("residual.dtype", residual.dtype, f"{out_dtype(p)}, as the result")
    allowed = OUT_DTYPES[p["x"].dtype]
    if out_dtype(p) not in allowed:
        raise ArgumentError("out_dtype", repr(out_dtype(p)), f"{', '.join(allowed)} for {p['x'].dtype} inputs")


# A 16-bit type never becomes the other one: no model asks for it, and it would double the variants.
OUT_DTYPES = {
    "float32": FLOATS,
    "float16": ("float16", "float32"),
    "bfloat16": ("bfloat16", "float32"),
}


def activate(v: Any, activation: str) -> Any:
    """The activation in torch (any dtype)."""
    import torch.nn.functional as F

    if activation == "gelu_tanh":
        return F.gelu(v, approximate="tanh")
    return {"none": lambda t: t, "relu": F.relu, "gelu": F.gelu, "silu": F.silu}[activation](v)


def reference(
    x: Any, w: Any, bias: Any = None, activation: str = "none", residual: Any = None, out_dtype: str = ""
) -> Any:
    v = x.double() @ w.double().mT
    if bias is not None:
        v = v + bias.double()
    v = activate(v, activation)
    return v if residual is None else v + residual.double()


def torch_linear(
    x: Any, w: Any, bias: Any = None, activation: str = "none", residual: Any = None, out_dtype: str = ""
) -> Any:
    """The same in torch (cuBLAS; TF32 is off by default)."""
    import torch.nn.functional as F

    v = F.linear(x, w, bias)
    if activation != "none":
        functions: dict[str, Any] = {"relu": F.relu, "silu": F.silu, "gelu": F.gelu}
        v = functions[activation](v) if activation in functions else F.gelu(v, approximate="tanh")
    return v if residual is None else v + residual


def tolerance(dtype: str) -> Tolerance:
    # A chain of k roundings drifts by about sqrt(k) * 2^-24 of the partial sums: for the k <= 600 of the tests and
    # values near 1, 25 * 25 * 6e-8 = 4e-5, and tensor cores truncate. A 16-bit result is rounded once more.
    return {
        "float32": Tolerance(2e-5, 2e-4, "a float32 chain over k"),
        "float16": Tolerance(1e-3, 3e-4, "one rounding to 11 bits after a float32 chain"),
        "bfloat16": Tolerance(8e-3, 3e-4, "one rounding to 8 bits after a float32 chain"),
    }[dtype]


def make_tamed(case: Case, rng: Any) -> dict[str, Any]:
    """Arguments of a case. Spikes are kept below what makes a float32 sum overflow half-way to a finite result."""
    import torch

    from pykern.testing.data import fill, lay_out

    made: dict[str, Any] = {}
    for name, v in case.items():
        if isinstance(v, Spec):
            values = fill(v.shape, v.dtype, v.fill, rng)
            huge = values.isfinite() & (values.float().abs() > 1e15)
            made[name] = lay_out(torch.where(huge, values.sign() * 1000, values).to(values.dtype), v.layout, torch)
        else:
            made[name] = v
    return made


def make(case: Case, rng: Any) -> dict[str, Any]:
    return {"bias": None, "activation": "none", "residual": None, "out_dtype": "", **make_tamed(case, rng)}


def shapes_of_every_variant(dtype: str, gated: bool) -> Iterator[tuple[int, int, int]]:
    """(m, n, k) that together reach every kernel on GPUs and on the host backend's few SMs."""
    half = 2 if gated else 1
    # First those that show the planted errors, so that few mutants are compiled: tiled or mma, then 8 tokens.
    if dtype == "float32":
        yield 9, 64 // half, 64
        for m in (8, 1):
            for k in (64, 65):
                yield m, 32, k
                yield m, 128 * 200 // half, k  # enough rows for 4 a thread, on every card
        sizes = [(9, 64), (32, 128), (64, 256), (64, 4096), (128, 512), (512, 1024), (4096, 4096)]
    else:
        for m in (1, 16, 32, 64):
            for k in (64, 66, 65):
                yield m, 32, k
        sizes = [(65, 64), (128, 256), (256, 512), (512, 1024), (1024, 4096), (8192, 8192)]
    for m, n in sizes:
        for k in (64, 66, 65):
            yield m, n // half, k


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        for to in OUT_DTYPES[dtype]:
            for m, n, k in shapes_of_every_variant(dtype, gated=False):
                yield {"x": Spec(dtype, (m, k)), "w": Spec(dtype, (n, k)), "out_dtype": to}


def draw_sizes(draw: Draw, dtype: str) -> tuple[int, int, int]:
    """(m, n, k) around tile and class boundaries, small enough for the host backend."""
    from pykern.testing import sizes

    m = draw(sizes(0, 140, around=[1, F32_SKINNY_TOKENS, 32, MMA_SKINNY_TOKENS, 128]))
    n = draw(sizes(0, 150, around=[16, 32, 64, 128]))
    k = draw(sizes(0, 300, around=[16, 64, 128])) // draw.one_of((1, 1, 8)) * draw.one_of((1, 1, 8))
    return m, n, min(k, 600)


def draw(draw: Draw) -> Case:
    from pykern.testing import tensor_spec

    dtype = draw.one_of(FLOATS)
    to = draw.one_of(("", *OUT_DTYPES[dtype]))
    m, n, k = draw_sizes(draw, dtype)
    case: Case = {
        "x": draw(tensor_spec(dtype, (m, k))),
        "w": draw(tensor_spec(dtype, (n, k), fills=("normal",))),
        "activation": draw.one_of(tuple(ACTIVATIONS)),
        "out_dtype": to,
    }
    case["bias"] = draw.one_of((None, Spec(dtype, (n,))))
    case["residual"] = draw.one_of((None, draw(tensor_spec(to or dtype, (m, n), fills=("normal",)))))
    return case


def nbytes(p: Problem) -> int:
    out = p.m * p.n * ITEMSIZE[out_dtype(p)]
    return sum(p[t].nbytes for t in ("x", "w", "bias", "residual") if p.has(t)) + out


def flops(p: Problem) -> int:
    return 2 * p.m * p.n * p.k


op = Op(
    name="linear",
    source=F32_SOURCE,
    inputs=(
        Tensor("x", "*m k"),
        Tensor("w", "n k", "like x", role="weight"),
        Tensor("bias", "n", "like x", role="weight", optional=True),
        Scalar("activation", "str", "none", key=True, choices=tuple(ACTIVATIONS)),
        Tensor("residual", "*m n", optional=True),
        Scalar("out_dtype", "str", "", key=True, choices=("", *FLOATS)),
    ),
    outputs=(Out("y", "*m n", out_dtype),),
    plan=plan,
    reference=reference,
    tolerance=tolerance,
    cases=cases,
    draw=draw,
    nbytes=nbytes,
    flops=flops,
    make=make,
    check=check,
    inplace=("residual",),
    rowwise=(("x", 0), ("residual", 0)),
    keyword_only="activation",
    doc="""act(x @ w.T + bias) + residual, in one kernel; sums in float32.

    Args:
        x: ``[..., k]``, float32, float16 or bfloat16; last stride 1, leading axes one stride.
        w: ``[n, k]`` of x's dtype, as in ``nn.Linear``; last stride 1. A weight: nothing may write it while kernels
            are in flight.
        bias: ``[n]`` of x's dtype, or None.
        activation: ``none``, ``relu``, ``gelu`` (exact), ``gelu_tanh`` or ``silu``.
        residual: ``[..., n]`` of the result's dtype, or None; added after the activation.
        out_dtype: dtype of the result, a str such as ``"float32"`` (no ``torch.dtype``), ``""`` for x's; float32 inputs
            may also give float16 or bfloat16, 16-bit inputs float32.
        out: optional result, contiguous; may be ``residual`` itself.

    Returns:
        ``[..., n]``. float32 sums run over k in order, one rounding a step, so a row has the same bits alone and in
        any batch. 16-bit inputs use tensor cores: a row has the same bits in all batches of at most 64 rows, and in
        all of more. k = 0 gives act(bias) + residual.

    Raises:
        ArgumentError: a dtype, shape or stride that is not as above.
    """,
    mutants=(
        ("k0 + copy_k < k;", "k0 + copy_k + kVec < k;"),
        ("b_base + j * 8 * kF32Pitch", "b_base + j * 4 * kF32Pitch"),
        ("stage.x[warp * kTokens + t][kk]", "stage.x[t][kk]"),
        ("n0 + warp_n * (kGated ? WN / 2 : WN), lane", "n0, lane"),
    ),
    peers={"torch": torch_linear},
    benches=(
        {"x": Spec("float32", (4096, 4096)), "w": Spec("float32", (4096, 4096))},
        {"x": Spec("bfloat16", (4096, 4096)), "w": Spec("bfloat16", (4096, 4096))},
        {"x": Spec("bfloat16", (8192, 8192)), "w": Spec("bfloat16", (8192, 8192))},
        {"x": Spec("bfloat16", (1, 4096)), "w": Spec("bfloat16", (28672, 4096))},
        {"x": Spec("bfloat16", (16, 4096)), "w": Spec("bfloat16", (28672, 4096))},
        {"x": Spec("float32", (1, 4096)), "w": Spec("float32", (4096, 4096))},
    ),
)
