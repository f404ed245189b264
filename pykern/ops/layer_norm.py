"""Layer norm: y[m, n] = (h[m, n] - mean_n h) / sqrt(var_n h + eps) * weight[n] + bias[n], h = x (+ residual).

Ba, Kiros and Hinton, "Layer Normalization", 2016. The variance is the biased one, as in torch.
"""

from __future__ import annotations

from typing import Any

from pykern.ops import _norms
from pykern.schema import Scalar, Tensor


def reference(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, residual: Any = None) -> Any:
    import torch

    h = _norms.add_residual(x, residual)
    centred = h - h.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    if weight is not None:
        y = y * weight.double()
    if bias is not None:
        y = y + bias.double()
    return y if residual is None else (y, h)


def torch_layer_norm(x: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, residual: Any = None) -> Any:
    import torch.nn.functional as F

    if residual is None:
        return F.layer_norm(x, x.shape[-1:], weight, bias, eps)
    h = x + residual
    return F.layer_norm(h, x.shape[-1:], weight, bias, eps), h


op = _norms.norm(
    layer=True,
    name="layer_norm",
    inputs=(
        Tensor("x", "*m n"),
        Tensor("weight", "n", "like x", role="weight", optional=True),
        Tensor("bias", "n", "like x", role="weight", optional=True),
        Scalar("eps", "float", 1e-5, low=0.0),
        Tensor("residual", "*m n", "like x", optional=True),
    ),
    reference=reference,
    flops=lambda p: 7 * p["x"].numel,
    doc="""Layer norm over the last axis, with an optional residual added first.

    Args:
        x: ``[..., n]``, float32, float16 or bfloat16; last stride 1, leading axes one stride.
        weight, bias: ``[n]`` of x's dtype, or None for ones and zeros.
        eps: added to the variance. With 0, a row whose deviations' squares all underflow (below about 1e-23; a constant
            row) is divided by 0: infinite or NaN, as torch's.
        residual: as in :func:`pykern.rms_norm`.
        out: result(s), contiguous: ``y``, or ``(y, h)``.

    Returns:
        ``y``, or ``(y, h)`` with a residual. The mean is taken relative to the row's first element and the variance
        relative to the mean, in float32: no cancellation when the mean is large, and constant rows give exactly
        ``bias`` (with eps > 0).

    Raises:
        ArgumentError: a dtype, shape, stride or ``out`` that is not as above.
    """,
    mutants=(
        ("st.mean = Group::sum(s, smem) * a.inv_n;", "st.mean = 0.0f;"),
        ("f[i] += b[i];", "f[i] -= b[i];"),
        (" * st.r * weights[i];", " * st.r;"),
        ("if (kLayer && kFast && at >= n) return s;", ";"),
        ("if (!kLayer || kFast || at + i < n)", "if (true)"),
    ),
    peers={"torch": torch_layer_norm},
    benches=_norms.benches(False),
)
