"""SwiGLU's elementwise part: y[m, n] = silu(x[m, n]) * x[m, N + n], silu(a) = a / (1 + exp(-a)).

Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from typing import Any

from pykern.ops import _gated_act as shared
from pykern.schema import Tensor


def reference(x: Any) -> Any:
    import torch.nn.functional as F

    a, b = x.double().chunk(2, -1)
    return F.silu(a) * b


op = shared.gated(
    "silu",
    inputs=(Tensor("x", "*m n"),),
    plan=lambda p, target: shared.make_plan(p, "kSilu"),
    reference=reference,
    cases=shared.cases,
    draw=shared.draw,
    doc="""SiLU of the first half of the last axis, times the second half.

    Args:
        x: ``[..., 2 n]``, float32, float16 or bfloat16; last stride 1, leading axes one stride.
        out: optional result, contiguous.

    Returns:
        ``[..., n]`` of x's dtype, computed in float32.

    Raises:
        ArgumentError: an odd last axis, or a dtype, stride or ``out`` that is not as above.
    """,
)
