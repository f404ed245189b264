"""What rope and rope_append_kv share."""

from __future__ import annotations

from typing import Any

from pykern.errors import require
from pykern.op import Tolerance
from pykern.schema import Problem

THREADS = 256


def check(p: Problem) -> None:
    """Rotary width: even, and at most a head."""
    require(p.r % 2 == 0 and 0 < p.r <= p.d, "cos_sin.shape[1]", p.r, f"an even number, 2..{p.d} (head_dim)")


def fast(p: Problem, *names: str) -> bool:
    """Whether halves are whole chunks of 16 bytes and every head of the named tensors and the table starts on one."""
    chunk = 16 // p[names[0]].itemsize
    whole = p.r // 2 % chunk == 0 and (p.d - p.r) % chunk == 0 and not p.interleaved
    return whole and p.rows_aligned("cos_sin", *names)


def pieces(p: Problem, is_fast: bool, itemsize: int) -> int:
    """Threads a head needs: one per chunk of first halves (or copied elements), else one per pair."""
    if is_fast:
        return (p.r // 2 + p.d - p.r) // (16 // itemsize)
    return p.r // 2 + (p.d - p.r + 1) // 2


def rotate(x: Any, positions: Any, cos_sin: Any, interleaved: bool) -> Any:
    """float64 rotation of x [t, h, d]; rows whose position is outside the table are NaN where rotated."""
    import torch

    rows, r = cos_sin.shape
    valid = ((positions >= 0) & (positions < rows)).view(-1, 1, 1)
    angles = cos_sin.double()[positions.clamp(0, max(rows - 1, 0))].unsqueeze(1)
    cos, sin = angles[..., : r // 2], angles[..., r // 2 :]
    y = x.double().clone()
    part = y[..., :r]
    if interleaved:
        a, b = part[..., 0::2], part[..., 1::2]
    else:
        a, b = part[..., : r // 2], part[..., r // 2 :]
    first = torch.where(valid, a * cos - b * sin, torch.nan)
    second = torch.where(valid, b * cos + a * sin, torch.nan)
    if interleaved:
        y[..., 0:r:2], y[..., 1:r:2] = first, second
    else:
        y[..., : r // 2], y[..., r // 2 : r] = first, second
    return y


def angles(rows: int, r: int, rng: Any) -> Any:
    """A cos_sin table of random angles."""
    import torch

    theta = torch.rand(rows, r // 2, generator=rng, dtype=torch.float64) * 6.3
    return torch.cat([theta.cos(), theta.sin()], -1).float()


def tolerance(dtype: str) -> Tolerance:
    return {
        "float32": Tolerance(1e-6, 2e-6, "two products and a sum, which may cancel"),
        "float16": Tolerance(1e-3, 1e-5, "one rounding to 11 bits"),
        "bfloat16": Tolerance(8e-3, 1e-5, "one rounding to 8 bits"),
    }[dtype]
