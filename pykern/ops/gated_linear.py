"""Gated linear layer: y[m, n] = act(sum_k x[m, k] * w_gate[n, k]) * sum_k x[m, k] * w_up[n, k], one kernel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykern.op import Case, Op, Spec, Tolerance
from pykern.ops.linear import (
    ACTIVATIONS,
    MMA_SOURCE,
    Gemm,
    activate,
    check_sizes,
    copy_width,
    draw_sizes,
    make_tamed,
    plan_gemm,
    shapes_of_every_variant,
    weight_rows,
)
from pykern.plan import I32, I64, In, OutPtr, Plan, Target
from pykern.schema import FLOATS, Out, Problem, Scalar, Tensor


def plan(p: Problem, target: Target) -> Plan:
    x, gate, up = p["x"], p["w_gate"], p["w_up"]
    x_stride = x.rows("x")[1]
    # The kernels are linear's: no bias, no residual.
    args = (
        In("x"), In("w_gate"), In("w_up"), I64(0), I64(0), OutPtr("y"), I32(p.m), I32(p.n), I32(p.k), I64(x_stride),
        I64(weight_rows(gate)), I64(weight_rows(up)), I64(0), I64(p.n), I32(ACTIVATIONS[p.activation]),
    )  # fmt: skip
    vec = copy_width(p.k, x, x_stride, gate, up)
    return plan_gemm(Gemm(x.dtype, x.dtype, p.m, p.n, p.k, vec, True, args), target)


def reference(x: Any, w_gate: Any, w_up: Any, activation: str = "silu") -> Any:
    v = x.double()
    return activate(v @ w_gate.double().mT, activation) * (v @ w_up.double().mT)


def torch_gated_linear(x: Any, w_gate: Any, w_up: Any, activation: str = "silu") -> Any:
    """The same in torch: two matrix products and an elementwise kernel each."""
    import torch.nn.functional as F

    gate = F.linear(x, w_gate)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate)) * F.linear(x, w_up)


def tolerance(dtype: str) -> Tolerance:
    # The product of two sums: the error of one (2e-4 at most, see linear) times the size of the other. The sums of the
    # tests are below 100, most below 20.
    return {
        "float32": Tolerance(2e-5, 2e-3, "a product of two float32 chains over k"),
        "float16": Tolerance(1e-3, 4e-3, "one rounding to 11 bits after the product of two float32 chains"),
        "bfloat16": Tolerance(8e-3, 4e-3, "one rounding to 8 bits after the product of two float32 chains"),
    }[dtype]


def cases() -> Iterator[Case]:
    shapes = [("bfloat16", 65, 64, 64)]  # first the kernel that the planted errors are in
    shapes += [(dtype, *mnk) for dtype in FLOATS for mnk in shapes_of_every_variant(dtype, gated=True)]
    for dtype, m, n, k in shapes:
        yield {"x": Spec(dtype, (m, k)), "w_gate": Spec(dtype, (n, k)), "w_up": Spec(dtype, (n, k))}


def draw(draw: Any) -> Case:
    from pykern.testing import tensor_spec

    dtype = draw.one_of(FLOATS)
    m, n, k = draw_sizes(draw, dtype)
    return {
        "x": draw(tensor_spec(dtype, (m, k))),
        "w_gate": draw(tensor_spec(dtype, (n, k), fills=("normal",))),
        "w_up": draw(tensor_spec(dtype, (n, k), fills=("normal",))),
        "activation": draw.one_of(("relu", "gelu", "gelu_tanh", "silu")),
    }


def make(case: Case, rng: Any) -> dict[str, Any]:
    return {"activation": "silu", **make_tamed(case, rng)}


def nbytes(p: Problem) -> int:
    return p["x"].nbytes + p["w_gate"].nbytes + p["w_up"].nbytes + p.m * p.n * p["x"].itemsize


def flops(p: Problem) -> int:
    return 4 * p.m * p.n * p.k


def _bench(m: int, n: int, k: int) -> Case:
    w = Spec("bfloat16", (n, k))
    return {"x": Spec("bfloat16", (m, k)), "w_gate": w, "w_up": w}


op = Op(
    name="gated_linear",
    source=MMA_SOURCE,
    inputs=(
        Tensor("x", "*m k"),
        Tensor("w_gate", "n k", "like x", role="weight"),
        Tensor("w_up", "n k", "like x", role="weight"),
        Scalar("activation", "str", "silu", key=True, choices=tuple(ACTIVATIONS)),
    ),
    outputs=(Out("y", "*m n"),),
    plan=plan,
    reference=reference,
    tolerance=tolerance,
    cases=cases,
    draw=draw,
    nbytes=nbytes,
    flops=flops,
    make=make,
    check=check_sizes,
    rowwise=(("x", 0),),
    keyword_only="activation",
    doc="""act(x @ w_gate.T) * (x @ w_up.T) in one kernel: the first half of a gated MLP (SwiGLU with ``silu``).

    x is read once and neither product is written out: against a linear of both weights followed by silu_and_mul,
    2 m n elements are not written and not read back.

    Args:
        x: ``[..., k]``, float32, float16 or bfloat16; last stride 1, leading axes one stride.
        w_gate, w_up: ``[n, k]`` of x's dtype; last stride 1 (two halves of one ``[2 n, k]`` tensor will do). Weights:
            nothing may write them while kernels are in flight.
        activation: ``silu``, ``gelu`` (exact), ``gelu_tanh``, ``relu`` or ``none``.
        out: optional result, contiguous.

    Returns:
        ``[..., n]`` of x's dtype. Sums, activation and product are float32; numerics classes as in linear.

    Raises:
        ArgumentError: a dtype, shape or stride that is not as above.
    """,
    mutants=(
        ("warp_n * (kGated ? WN / 2 : WN), lane", "warp_n * WN, lane"),
        ("r % WN < WN / 2 ? w_from", "r % WN < WN ? w_from"),
        ("(a_chunk ^ kk * 2) * 8", "(a_chunk + kk * 2) % 8 * 8"),
        ("two[1] = acc[i][j][2 * h + 1];", "two[1] = acc[i][j][2 * h];"),
    ),
    peers={"torch": torch_gated_linear},
    benches=(_bench(2048, 14336, 4096), _bench(1, 14336, 4096), _bench(16, 14336, 4096)),
)
