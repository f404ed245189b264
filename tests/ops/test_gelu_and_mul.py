"""gelu_and_mul: its own algebra."""

from __future__ import annotations

import pytest
import torch

import pykern
from pykern.errors import ArgumentError


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_of_x_minus_gelu_of_minus_x_is_x(approximate: str) -> None:
    a, ones = torch.randn(3, 64), torch.ones(3, 64)
    up = pykern.gelu_and_mul(torch.cat([a, ones], -1), approximate)
    down = pykern.gelu_and_mul(torch.cat([-a, ones], -1), approximate)
    assert torch.allclose(up - down, a, atol=2e-6)


def test_the_two_forms_differ_where_they_should() -> None:
    x = torch.cat([torch.tensor([[-2.0]]), torch.ones(1, 1)], -1)
    exact, tanh = (pykern.gelu_and_mul(x, a).item() for a in ("none", "tanh"))
    assert exact == pytest.approx(-0.0455003, abs=1e-6) and tanh == pytest.approx(-0.0454023, abs=1e-6)


def test_unknown_form_is_refused() -> None:
    with pytest.raises(ArgumentError, match="approximate: got 'fast', allowed: 'none', 'tanh'"):
        pykern.gelu_and_mul(torch.randn(2, 8), "fast")
