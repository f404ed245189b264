"""Layer norm: its own algebra, and a case from public bug reports."""

from __future__ import annotations

import torch

import pykern


def test_mean_zero_variance_one() -> None:
    y = pykern.layer_norm(torch.randn(6, 500) * 3 + 7).double()
    assert y.mean(-1).abs().max() < 1e-5
    assert (y.var(-1, unbiased=False) - 1).abs().max() < 1e-4


def test_large_means_and_constant_rows() -> None:
    got = pykern.layer_norm(torch.tensor([[4096.5, 4097, 4095.25, 4096.75]]), eps=1e-5)
    want = torch.tensor([[0.1856933, 0.9284664, -1.6712395, 0.5570799]])
    assert torch.allclose(got, want, atol=2e-6)
    got = pykern.layer_norm(torch.tensor([[100000.0, 100001, 100002, 100003]]), eps=1e-5)
    assert torch.allclose(got, torch.tensor([[-1.3416354, -0.4472118, 0.4472118, 1.3416354]]), atol=2e-6)
    got = pykern.layer_norm(torch.tensor([[-9.9e-4, -9.9e-4, 9.9e-4, 9.9e-4]]), eps=1e-12)
    assert torch.allclose(got, torch.tensor([[-0.9999995, -0.9999995, 0.9999995, 0.9999995]]), atol=1e-6)
    for x in (16384 + torch.arange(8.0) / 512, 1e7 + torch.arange(8.0)):
        want = torch.nn.functional.layer_norm(x.double(), (8,))
        assert torch.allclose(pykern.layer_norm(x).double(), want, atol=1e-5)
    assert torch.equal(pykern.layer_norm(torch.tensor([[14.0, 14.0]]), eps=1e-6), torch.zeros(1, 2))
    assert torch.equal(pykern.layer_norm(torch.full((1, 33), 14.1), eps=1e-6), torch.zeros(1, 33))


def test_weight_and_bias_are_optional() -> None:
    x, w, b = torch.randn(3, 40), torch.randn(40), torch.randn(40)
    plain = pykern.layer_norm(x)
    assert torch.equal(pykern.layer_norm(x, torch.ones(40), torch.zeros(40)), plain)
    assert torch.allclose(pykern.layer_norm(x, w, b), plain * w + b, atol=1e-6)


def test_residual_is_the_sum_then_the_norm() -> None:
    x, r = torch.randn(3, 40), torch.randn(3, 40)
    y, h = pykern.layer_norm(x, residual=r)
    assert torch.equal(h, x + r) and torch.equal(y, pykern.layer_norm(x + r))
