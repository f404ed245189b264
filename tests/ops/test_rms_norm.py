"""RMS norm: its own algebra."""

from __future__ import annotations

import pytest
import torch

import pykern
from pykern.errors import ArgumentError


def test_scaling_by_a_power_of_two_changes_nothing_without_eps() -> None:
    x, w = torch.randn(5, 200), torch.randn(200)
    assert torch.equal(pykern.rms_norm(x, w, 0.0), pykern.rms_norm(x * 16, w, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [96, 4096, 20000])
def test_the_residual_form_is_the_sum_then_the_norm(dtype: torch.dtype, n: int) -> None:
    x, r, w = torch.randn(3, n).to(dtype), torch.randn(3, n).to(dtype), torch.randn(n).to(dtype)
    y, h = pykern.rms_norm(x, w, 1e-5, residual=r)
    assert torch.equal(h, x + r)
    assert torch.equal(y, pykern.rms_norm(x + r, w, 1e-5))


def test_in_place_with_residual() -> None:
    x, r, w = torch.randn(4, 64), torch.randn(4, 64), torch.randn(64)
    want = pykern.rms_norm(x, w, residual=r)
    pykern.rms_norm(x, w, residual=r, out=(x, r))
    assert torch.equal(x, want[0]) and torch.equal(r, want[1])


def test_overlapping_output_is_refused() -> None:
    buffer, w = torch.randn(200), torch.randn(50)
    with pytest.raises(ArgumentError, match="overlaps"):
        pykern.rms_norm(buffer[:100].view(2, 50), w, out=buffer[50:150].view(2, 50))


def test_half_precision_sums_do_not_overflow() -> None:
    x = torch.full((1, 4096), 300.0, dtype=torch.float16)  # the sum of squares is 3.7e8, past 65504
    y = pykern.rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6)
    assert torch.equal(y, torch.ones_like(y))


def test_huge_float32_rows_are_scaled() -> None:
    x = torch.tensor([[1e30, -1e30, 1e30, 1e30]])
    y = pykern.rms_norm(x, torch.ones(4), 1e-6)
    assert torch.allclose(y, torch.tensor([[1.0, -1.0, 1.0, 1.0]]), rtol=1e-6)


def test_a_view_of_a_fused_buffer() -> None:
    qkv, w = torch.randn(6, 300), torch.randn(100)
    for part in qkv.split(100, -1):
        assert torch.equal(pykern.rms_norm(part, w), pykern.rms_norm(part.contiguous(), w))
