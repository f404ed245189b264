"""RoPE: rotations, and a case from public bug reports."""

from __future__ import annotations

import pytest
import torch

import pykern
from pykern.errors import ArgumentError


def table(positions: int, r: int, base: float = 10000.0) -> torch.Tensor:
    theta = torch.outer(torch.arange(positions).double(), base ** -(torch.arange(0, r, 2).double() / r))
    return torch.cat([theta.cos(), theta.sin()], -1).float()


X = torch.arange(1.0, 9.0).view(1, 1, 8)


@pytest.mark.parametrize(
    ("interleaved", "r", "want"),
    [
        (False, 8, [-1.6955925, 0.1375517, 2.7886816, 3.9759820, -4.8088425, 6.3230594, 7.0868367, 8.0119640]),
        (True, 8, [-1.2722325, -1.8388650, 1.6839286, 4.7079066, 4.8177772, 6.1472777, 6.9759685, 8.0209640]),
        (False, 4, [-1.4133525, 1.8791181, -2.8288575, 4.0581911, 5, 6, 7, 8]),
        (True, 4, [-1.2722325, -1.8388650, 2.8786681, 4.0881866, 5, 6, 7, 8]),
    ],
)
def test_pairing_and_partial_rotation(interleaved: bool, r: int, want: list[float]) -> None:
    got = pykern.rope(X, torch.tensor([3]), table(4, r), interleaved=interleaved)
    assert torch.allclose(got.flatten(), torch.tensor(want), atol=2e-6)
    assert torch.equal(pykern.rope(X, torch.tensor([0]), table(4, r), interleaved=interleaved), X)


def test_rotations_keep_lengths_and_add_up() -> None:
    x, t = torch.randn(5, 3, 16), table(64, 16)
    once = pykern.rope(pykern.rope(x, torch.full((5,), 9), t), torch.full((5,), 20), t)
    assert torch.allclose(once, pykern.rope(x, torch.full((5,), 29), t), atol=3e-6)
    assert torch.allclose(once.norm(dim=-1), x.norm(dim=-1), rtol=1e-5)


def test_positions_outside_the_table_give_nan() -> None:
    y = pykern.rope(torch.ones(2, 1, 8), torch.tensor([4, 1]), table(4, 4))
    assert y[0, 0, :4].isnan().all() and bool((y[0, 0, 4:] == 1).all()) and not y[1].isnan().any()


def test_an_odd_rotary_width_is_refused() -> None:
    with pytest.raises(ArgumentError, match=r"cos_sin\.shape\[1\]: got 3, allowed: an even number"):
        pykern.rope(torch.ones(1, 1, 8), torch.tensor([0]), torch.ones(4, 3))
