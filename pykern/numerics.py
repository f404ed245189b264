"""Comparing results: against a float64 reference within a tolerance, and bit by bit. NaN never passes by accident."""

from __future__ import annotations

from typing import Any


def mismatch(y: Any, ref: Any, rtol: float, atol: float) -> str | None:
    """None when ``y`` agrees with the float64 ``ref``; else a sentence about the worst element.

    NaN agrees only with NaN, an infinity only with the same infinity (or with a reference that overflows y's dtype,
    within the tolerance). Written as ``not (error <= allowed)``, so that NaN errors fail.
    """
    import torch

    if tuple(y.shape) != tuple(ref.shape):
        return f"shape {tuple(y.shape)}, reference {tuple(ref.shape)}"
    if y.numel() == 0:
        return None
    if not y.dtype.is_floating_point:
        wrong = y.to(ref.dtype) != ref
        return _describe(y, ref, wrong, "differs") if bool(wrong.any()) else None
    got, want = y.double(), ref.double().to(y.device)
    limit = torch.finfo(y.dtype).max
    nan = torch.isnan(want)
    wrong = nan != torch.isnan(got)
    # A reference beyond the dtype's range may come out as infinity or, within tolerance, as the largest number.
    over = (want.abs() > limit) & ~nan
    allowed = atol + rtol * want.abs()
    near_limit = want.abs() + allowed > limit
    same_inf = torch.isinf(got) & (torch.sign(got) == torch.sign(want)) & (over | near_limit | torch.isinf(want))
    close = (got - want).abs() <= allowed
    clipped = over & ((got - torch.sign(want) * limit).abs() <= rtol * limit)
    wrong |= ~nan & ~(close | same_inf | clipped)
    return _describe(y, ref, wrong, f"not within {rtol:g} * |ref| + {atol:g}") if bool(wrong.any()) else None


def _describe(y: Any, ref: Any, wrong: Any, what: str) -> str:
    at = tuple(int(i) for i in wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {y.numel()} elements: first at {at}: got {y[at].item()!r}, "
        f"reference {ref[at].item()!r}, {what}"
    )


def same_bits(a: Any, b: Any) -> bool:
    """Whether two tensors hold the same bits (NaN equals NaN, 0 differs from -0)."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b = a.contiguous(), b.contiguous()
    if a.numel() == 0:
        return True
    return bool(torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)))
