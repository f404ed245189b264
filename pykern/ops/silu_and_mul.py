"""SwiGLU's elementwise part: y[m, n] = silu(x[m, n]) * x[m, N + n], silu(a) = a / (1 + exp(-a)).

Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from typing import Any

from pykern.op import Op
from pykern.ops import _gated_act as shared
from pykern.schema import Tensor


def reference(x: Any) -> Any:
    import torch.nn.functional as F

    a, b = x.double().chunk(2, -1)
    return F.silu(a) * b


op = Op(
    name="silu_and_mul",
    source=shared.SOURCE,
    inputs=(Tensor("x", "*m n"),),
    outputs=shared.OUTPUTS,
    plan=shared.make_plan("kSilu"),
    reference=reference,
    tolerance=shared.tolerance,
    cases=shared.cases,
    draw=shared.draw,
    check=shared.check,
    nbytes=lambda p: p["x"].nbytes * 3 // 2,
    flops=lambda p: 3 * p["x"].numel,
    rowwise=(("x", 0),),
    doc="""SiLU of the first half of the last axis, times the second half.

    Args:
        x: ``[..., 2 n]``, float32, float16 or bfloat16; last stride 1, leading axes one stride.
        out: optional result, contiguous.

    Returns:
        ``[..., n]`` of x's dtype, computed in float32.

    Raises:
        ArgumentError: an odd last axis, or a dtype, stride or ``out`` that is not as above.
    """,
    mutants=(
        ("activate<kAct>(g[i]) * u[i]", "activate<kAct>(u[i]) * g[i]"),
        ("x + row[k] * stride + n, at[k]", "x + row[k] * stride, at[k]"),
        ("y + row[k] * n, at[k], n", "y + row[k] * n, at[k], n - 1"),
    ),
    peers={"torch": shared.torch_gated("silu")},
    benches=shared.benches(),
)
