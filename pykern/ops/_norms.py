"""What rms_norm and layer_norm share: all but their formula, their arguments and how they are documented."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.ops._rows import LONG_THREADS, every_length, grid_block, group, whole
from pykern.plan import F32, I32, I64, In, Launch, OutPtr, Plan, Run, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem

SOURCE = "ops/norm.cuh"


def residual_shape(p: Problem) -> tuple[Any, ...]:
    """Shape of the second output: x's with a residual, else empty."""
    return p["x"].shape if p.has("residual") else (0,)


OUTPUTS = (Out("y", "*m n"), Out("h", residual_shape))


def make_plan(p: Problem, layer: bool) -> Plan:
    x, r = p["x"], p["residual"]
    rows, stride_x = x.rows("x")
    stride_r = r.rows("residual")[1] if r is not None else 0
    fast = whole(p.n, x.itemsize) and p.rows_aligned("x", "residual", "weight", "bias", "y", "h")
    fit = group(p.n, x.dtype)
    again: tuple[I32, ...] = ()
    if fit is None or not fast:
        variant, grid, block = "norm_again", rows, fit[0] if fit else LONG_THREADS
        kernel, again = template(variant, x.dtype, layer), (I32(int(fast)),)
        unfit = "is too long for one block's registers" if fast else "is not whole, aligned chunks of 16 bytes"
        why = (f"a row {unfit}: read again, from L2, for every pass",)
    else:
        variant = "norm_rows"
        grid, block = grid_block(rows, fit[0])
        kernel = template(variant, x.dtype, layer, *fit)
        why = (f"a row stays in the registers of {fit[0]} threads, {fit[1]} x 16 bytes each",)
    null = I64(0)
    args = (
        In("x"),
        In("residual"),
        In("weight"),
        In("bias") if layer else null,
        OutPtr("y"),
        OutPtr("h") if r is not None else null,
        I64(rows),
        I64(stride_x),
        I64(stride_r),
        I32(p.n),
        F32(1.0 / max(p.n, 1)),
        Run("eps"),
        *again,
    )
    return Plan((Launch(kernel, grid, block, args),), numerics=x.dtype, variant=variant, why=why)


def unpack(result: Any, args: Mapping[str, Any]) -> Any:
    """y alone, or (y, h) with a residual."""
    return result[0] if args.get("residual") is None else tuple(result)


def add_residual(x: Any, residual: Any) -> Any:
    """h in float64: x, or x + residual rounded to x's dtype."""
    if residual is None:
        return x.double()
    return (x.float() + residual.float()).to(x.dtype).double()


def tolerance(dtype: str) -> Tolerance:
    return {
        "float32": Tolerance(1e-5, 2e-6, "float32 sums of up to 1e5 terms, rsqrt.approx is exact to 2 ulp"),
        "float16": Tolerance(2e-3, 1e-5, "one rounding to 11 bits; float32 statistics"),
        "bfloat16": Tolerance(9e-3, 1e-5, "one rounding to 8 bits; float32 statistics"),
    }[dtype]


def cases(layer: bool) -> Iterator[Case]:
    for dtype, n in every_length():
        case: Case = {"x": Spec(dtype, (3, n)), "weight": Spec(dtype, (n,))}
        yield case | ({"bias": Spec(dtype, (n,))} if layer else {})
    yield {"x": Spec("float32", (3, 576)), "weight": Spec("float32", (576,)), "residual": Spec("float32", (3, 576))}


def draw(draw: Draw, layer: bool) -> Case:
    from pykern.testing import sizes, tensor_spec

    one_of = draw.one_of
    dtype = one_of(FLOATS)
    chunk = 16 // ITEMSIZE[dtype]
    n = draw(sizes(1, 600, around=[32 * chunk, chunk, 128 * chunk, 1]))
    m = draw(sizes(0, 6, around=[4]))
    fills = ("normal", "normal", "spiky", "zeros")
    case: Case = {"x": draw(tensor_spec(dtype, (m, n), fills=fills)), "eps": one_of((1e-5, 1e-6))}
    if not layer or one_of((True, False)):
        case["weight"] = draw(tensor_spec(dtype, (n,), ("contiguous", "offset"), ("normal",)))
    if layer and one_of((True, False)):
        case["bias"] = draw(tensor_spec(dtype, (n,), ("contiguous", "offset"), ("normal",)))
    if one_of((True, False)):
        case["residual"] = draw(tensor_spec(dtype, (m, n), fills=("normal",)))
    return case


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` through torch.compile, compiled at its first call."""
    found: list[Any] = []

    def call(**args: Any) -> Any:
        import torch

        if not found:
            found.append(torch.compile(function, dynamic=False))
        return found[0](**args)

    return call


def nbytes(p: Problem) -> int:
    """Each input read once, each output written once."""
    extra = sum(p[t].nbytes for t in ("weight", "bias") if p.tensors.get(t) is not None)
    return p["x"].nbytes * (4 if p.has("residual") else 2) + extra


BENCH_SHAPES = ((16384, 4096), (4096, 8192), (32768, 8192), (64, 4096))


def norm(layer: bool, **own: Any) -> Op:
    """rms_norm or layer_norm: ``own`` is what the other does not share."""
    return Op(
        source=SOURCE,
        outputs=OUTPUTS,
        plan=lambda p, target: make_plan(p, layer),
        tolerance=tolerance,
        cases=lambda: cases(layer),
        draw=lambda draw_: draw(draw_, layer),
        nbytes=nbytes,
        unpack=unpack,
        inplace=("x", "residual"),
        rowwise=(("x", 0), ("residual", 0)),
        keyword_only="residual",
        **own,
    )


def benches(residual: bool) -> tuple[Case, ...]:
    out = []
    for shape in BENCH_SHAPES:
        case: Case = {"x": Spec("bfloat16", shape), "weight": Spec("bfloat16", shape[1:])}
        out.append(case | ({"residual": Spec("bfloat16", shape)} if residual else {}))
    return tuple(out)
