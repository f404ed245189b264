"""silu_and_mul: its own algebra."""

from __future__ import annotations

import pytest
import torch

import pykern
from pykern.errors import ArgumentError


def test_linear_in_the_second_half() -> None:
    a, b = torch.randn(4, 96), torch.randn(4, 96)
    one = pykern.silu_and_mul(torch.cat([a, b], -1))
    assert torch.equal(pykern.silu_and_mul(torch.cat([a, 4 * b], -1)), 4 * one)


def test_silu_of_minus_x_is_silu_minus_x() -> None:
    a, ones = torch.randn(3, 50), torch.ones(3, 50)
    up = pykern.silu_and_mul(torch.cat([a, ones], -1))
    down = pykern.silu_and_mul(torch.cat([-a, ones], -1))
    assert torch.allclose(up - down, a, atol=1e-6)


def test_odd_last_axis_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"x\.shape\[-1\]: got 7, allowed: an even number"):
        pykern.silu_and_mul(torch.randn(2, 7))
