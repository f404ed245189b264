"""RMS norm: y[m, n] = h[m, n] / sqrt(mean_n h^2 + eps) * weight[n], h = x (+ residual).

Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""

from __future__ import annotations

from typing import Any

from pykern.ops import _norms
from pykern.schema import Scalar, Tensor


def reference(x: Any, weight: Any, eps: float = 1e-6, residual: Any = None) -> Any:
    import torch

    h = _norms.add_residual(x, residual)
    y = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.double()
    return y if residual is None else (y, h)


def torch_rms_norm(x: Any, weight: Any, eps: float = 1e-6, residual: Any = None) -> Any:
    import torch.nn.functional as F

    if residual is None:
        return F.rms_norm(x, weight.shape, weight, eps)
    h = x + residual
    return F.rms_norm(h, weight.shape, weight, eps), h


op = _norms.norm(
    layer=False,
    name="rms_norm",
    inputs=(
        Tensor("x", "*m n"),
        Tensor("weight", "n", "like x", role="weight"),
        Scalar("eps", "float", 1e-6, low=0.0),
        Tensor("residual", "*m n", "like x", optional=True),
    ),
    reference=reference,
    flops=lambda p: 4 * p["x"].numel,
    doc="""RMS norm over the last axis, with an optional residual added first.

    Args:
        x: ``[..., n]``, float32, float16 or bfloat16; last stride 1, leading axes one stride.
        weight: ``[n]`` of x's dtype.
        eps: added to the mean of squares. With 0, a row whose squares all underflow (magnitudes below about 1e-23,
            zeros) is divided by 0, as torch's is: infinite, and NaN where h is 0.
        residual: ``[..., n]`` of x's dtype. Then ``h = x + residual`` is rounded to that dtype, normalised and
            returned: the bits of ``rms_norm(x + residual, weight)``.
        out: result(s), contiguous: ``y``, or ``(y, h)``; may be ``x`` and ``residual`` themselves.

    Returns:
        ``y``, or ``(y, h)`` with a residual. Statistics are float32, and scaled where squares would overflow.

    Raises:
        ArgumentError: a dtype, shape, stride or ``out`` that is not as above.
    """,
    mutants=(
        ("st.r = rsqrtf(q * a.inv_n + a.eps * scale * scale);", "st.r = rsqrtf(q * a.inv_n);"),
        (" * st.r * weights[i];", " * st.r + weights[i];"),
        ("sum[i] += more[i];", "sum[i] -= more[i];"),
        ("q = Group::sum(q, smem);", "q = q;"),
        ("if (kMayOverflow && !(q < kNormLarge))", "if (false)"),
        ("return row_load<kFast>(a.w, at, a.w ? a.n : 0, one);", "return row_load<kFast>(a.w, 0, a.w ? a.n : 0, one);"),
    ),
    peers={"torch": torch_rms_norm, "compile": _norms.compiled(torch_rms_norm)},
    benches=(*_norms.benches(False), *_norms.benches(True)),
)
