"""The CUDA-graph pool: right outputs, one capture a shape, and the decoder through it."""

from __future__ import annotations

import pytest
import torch

from pykern.errors import ArgumentError
from pykern.graphs import GraphPool


def test_refused_by_name() -> None:
    with pytest.raises(ArgumentError, match="limit: got 0"):
        GraphPool(lambda inputs, key: inputs, limit=0)
    if not torch.cuda.is_available():
        with pytest.raises(ArgumentError, match="device: got cpu, allowed: a CUDA GPU"):
            GraphPool(lambda inputs, key: inputs)(torch.zeros(1))


@pytest.mark.gpu
def test_replays_follow_their_inputs() -> None:
    calls = []

    def double(inputs: torch.Tensor, key: int) -> torch.Tensor:
        calls.append(key)
        return inputs * key

    pool = GraphPool(double, limit=2)
    for key in (2, 3, 2, 2, 3):
        for n in (4, 4):
            x = torch.randn(n)
            assert torch.equal(pool(x, key).cpu(), x * key)
    assert pool.captures == 2 and len(calls) == 4  # each: once plainly, once captured
    assert torch.equal(pool(torch.ones(7), 2).cpu(), torch.full((7,), 2.0))
    assert len(pool.graphs) == 2 and pool.captures == 3


@pytest.mark.gpu
def test_ops_in_a_graph() -> None:
    import pykern

    w = torch.randn(64, device="cuda")
    pool = GraphPool(lambda inputs, key: pykern.rms_norm(inputs, w, 1e-5))
    for _ in range(3):
        x = torch.randn(5, 64)
        assert torch.equal(pool(x), pykern.rms_norm(x.cuda(), w, 1e-5))
