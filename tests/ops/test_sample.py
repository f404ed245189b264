"""Sampling: filters exactly, draws that belong to their request, and cases from public bug reports."""

from __future__ import annotations

import math

import pytest
import torch

import pykern
from pykern.errors import ArgumentError


def support(row: list[float], draws: int = 300, **settings: object) -> set[int]:
    """Every id that comes up in many draws."""
    x = torch.tensor(row).expand(draws, len(row)).contiguous()
    return set(pykern.sample(x, torch.arange(draws), **settings).tolist())


def test_the_token_that_crosses_top_p_is_kept_and_none_after_it() -> None:
    assert support([0.4, 0.3, 0.2, 0.1], top_p=0.8, probs=True) == {0, 1, 2}
    assert support([0.1, 0.2, 0.3, 0.4], top_p=0.8, probs=True) == {1, 2, 3}
    dyadic = [0.5, 0.25, 0.125, 0.125]
    assert support(dyadic, top_p=0.5, probs=True) == {0}
    assert support(dyadic, top_p=0.75, probs=True) == {0, 1}
    assert support(dyadic, top_p=1.0, probs=True) == {0, 1, 2, 3}
    assert support(dyadic, top_p=0.0, probs=True) == {0} and support(dyadic, top_p=1e-9, probs=True) == {0}


def test_renormalised_frequencies() -> None:
    draws = 9000
    x = torch.tensor([0.4, 0.3, 0.2, 0.1]).expand(draws, 4).contiguous()
    counts = pykern.sample(x, torch.arange(draws), top_p=0.8, probs=True).bincount(minlength=4) / draws
    assert torch.allclose(counts, torch.tensor([4 / 9, 3 / 9, 2 / 9, 0.0]), atol=0.02)


def test_exactly_k_with_ties_to_the_lowest_index() -> None:
    assert support([1.0, 3.0, 3.0, 3.0, 3.0], top_k=2) == {1, 2}
    assert support([0.0] * 6, top_k=1) == {0}


def test_temperature_zero_and_tiny() -> None:
    row = torch.tensor([[2.875, 2.955, 11.0625, -2.4473]], dtype=torch.float16)
    assert all(pykern.sample(row, torch.tensor([s]), temperature=1e-5).item() == 2 for s in range(20))
    assert pykern.sample(row, torch.tensor([0]), temperature=0.0).item() == 2
    assert pykern.sample(torch.tensor([[2, -math.inf, 5, 5]]), torch.tensor([1]), temperature=0.0).item() == 2
    for wrong in (-1.0, math.nan):
        with pytest.raises(ArgumentError, match="temperature"):
            pykern.sample(row, torch.tensor([0]), temperature=wrong)


def test_a_request_draws_the_same_in_any_batch() -> None:
    x = torch.randn(6, 500)
    seeds, offsets = torch.arange(6) * 7, torch.arange(6)
    temperatures = torch.tensor([0.0, 0.8, 1.0, 0.0, 2.0, 0.8])
    batch = pykern.sample(x, seeds, offsets=offsets, temperatures=temperatures)
    for r in range(6):
        one = slice(r, r + 1)
        alone = pykern.sample(x[one], seeds[one], offsets=offsets[one], temperatures=temperatures[one])
        assert alone.item() == batch[r].item()


def test_rows_without_a_probability_are_reported() -> None:
    nan, inf = math.nan, math.inf
    x = torch.tensor([[nan, nan], [-inf, -inf], [inf, 0.0], [nan, 1.0]])
    ids, valid = pykern.sample(x, torch.arange(4), return_valid=True)
    assert valid.tolist() == [False, False, False, True] and ids.tolist() == [0, 0, 0, 1]


def test_min_p_is_relative_to_the_likeliest() -> None:
    row = [math.log(p) for p in (0.5, 0.3, 0.15, 0.05)]
    assert support(row, min_p=0.2) == {0, 1, 2} and support(row, min_p=0.99) == {0}


@pytest.mark.parametrize("filters", [{}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_k": 3}], ids=str)
def test_probabilities_need_not_be_normalised(filters: dict) -> None:
    """Whatever they sum to, and over 1 each: a power of two changes no bit, another factor no frequency."""
    p = torch.softmax(torch.tensor([1.0, 2.0, 0.0, -1.0, 3.0]), 0)
    draws = 4000
    seeds = torch.arange(draws)
    ids = pykern.sample(p.expand(draws, 5), seeds, probs=True, **filters)
    for factor in (0.25, 4.0, 2.0**40):
        assert torch.equal(pykern.sample((p * factor).expand(draws, 5), seeds, probs=True, **filters), ids), factor
    other = pykern.sample((p * 3).expand(draws, 5), seeds, probs=True, **filters)
    assert (other != ids).sum() <= 2  # draws that lie on a boundary, to the last bit of a weight
    if not filters:
        counts = ids.bincount(minlength=5) / draws
        assert float((counts - p).abs().max()) < 0.03
