"""argmax: ties, NaN, order."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pykern


@given(st.lists(st.sampled_from([-1.0, 0.0, -0.0, 2.0, math.inf, -math.inf, math.nan]), min_size=1, max_size=40))
def test_lowest_index_of_the_largest_number(row: list[float]) -> None:
    numbers = [v for v in row if not math.isnan(v)]
    want = row.index(max(numbers)) if numbers else 0
    assert pykern.argmax(torch.tensor([row])).item() == want


@pytest.mark.parametrize("n", [16384, 16385, 40000])
def test_rows_split_over_blocks(n: int) -> None:
    x = torch.randn(1, n)
    for at in (0, 1, n // 2, n - 1):
        y = x.clone()
        y[0, at] = 100
        assert pykern.argmax(y).item() == at
    ties = torch.zeros(1, n)
    assert pykern.argmax(ties).item() == 0


def test_greedy_tie_with_a_masked_token() -> None:
    assert pykern.argmax(torch.tensor([2.0, -math.inf, 5.0, 5.0])).item() == 2
