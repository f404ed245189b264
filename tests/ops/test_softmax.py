"""Softmax: its own algebra, and cases from public bug reports."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pykern
from pykern.errors import ArgumentError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@given(st.integers(1, 5), st.sampled_from([1, 7, 128, 513, 1000]), st.sampled_from(DTYPES), st.integers(0, 99))
def test_rows_sum_to_one(rows: int, n: int, dtype: torch.dtype, seed: int) -> None:
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)).to(dtype)
    y = pykern.softmax(x).double()
    assert bool((y >= 0).all())
    slack = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert torch.allclose(y.sum(-1), torch.ones(rows, dtype=torch.float64), atol=slack)


def test_a_shift_by_a_power_of_two_changes_nothing() -> None:
    x = torch.randint(-8, 8, (4, 100)).float()
    assert torch.equal(pykern.softmax(x), pykern.softmax(x + 64))


def test_log_is_the_logarithm() -> None:
    x = torch.randn(3, 300)
    assert torch.allclose(pykern.softmax(x, log=True).exp(), pykern.softmax(x), atol=1e-6)


def test_masked_rows_offsets_and_odd_widths() -> None:
    inf = math.inf
    assert pykern.softmax(torch.full((1, 3), -inf)).isnan().all()
    got = pykern.softmax(torch.tensor([[-inf, 1.0, 2.0]]))
    assert torch.allclose(got, torch.tensor([[0.0, 0.2689414, 0.7310586]]), atol=1e-6)
    got = pykern.softmax(torch.tensor([[-60000.0, -60000.0, -60001.0]]))
    assert torch.allclose(got, torch.tensor([[0.4223188, 0.4223188, 0.1553624]]), atol=1e-6)
    got = pykern.softmax(torch.tensor([[0.0, 1.0, 2.0]]) - 1e7, log=True)
    assert torch.allclose(got, torch.tensor([[-2.4076059, -1.4076059, -0.4076059]]), atol=1e-5)
    got = pykern.softmax(torch.tensor([[65504.0, 65504.0, -65504.0]], dtype=torch.float16))
    assert got.tolist() == [[0.5, 0.5, 0.0]]
    for w in (513, 781, 1023):
        got = pykern.softmax(torch.zeros(2, w)).double()
        assert torch.allclose(got, torch.full_like(got, 1 / w), rtol=1e-6) and abs(got[1].sum() - 1) < 1e-6


def test_more_than_two_gigaelements_are_addressed(tmp_path: Path) -> None:
    # Two rows whose starts are 2^31 elements apart, in a sparse file: the offset needs more than 32 bits.
    path = tmp_path / "sparse"
    with path.open("wb") as file:
        file.truncate(2 * (2**31 + 64))
    big = torch.from_file(str(path), shared=True, size=2**31 + 64, dtype=torch.float16)
    x = big.as_strided((2, 8), (2**31, 1))
    x.copy_(torch.tensor([[0.0] * 8, [1.0] + [-20.0] * 7]))
    assert torch.allclose(pykern.softmax(x).float(), torch.softmax(x.float(), -1), atol=1e-3)


def test_any_number_of_leading_axes() -> None:
    x = torch.randn(2, 3, 4, 50)
    assert torch.equal(pykern.softmax(x), pykern.softmax(x.view(24, 50)).view(2, 3, 4, 50))
    assert torch.equal(pykern.softmax(x[0, 0, 0]), pykern.softmax(x)[0, 0, 0])
    with pytest.raises(ArgumentError, match=r"x\.stride\(\)"):
        pykern.softmax(x.transpose(0, 1))
