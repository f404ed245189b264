"""Embedding: copies, bit for bit."""

from __future__ import annotations

import torch

import pykern
from pykern.numerics import same_bits


def test_rows_are_copied_bit_for_bit() -> None:
    table = torch.randint(-(2**31), 2**31 - 1, (20, 33), dtype=torch.int32).view(torch.float32)  # NaN payloads too
    ids = torch.tensor([3, 0, 19, 3])
    assert same_bits(pykern.embedding(ids, table), table[ids])


def test_any_shape_of_ids() -> None:
    table = torch.randn(10, 16, dtype=torch.float32).bfloat16()
    ids = torch.randint(0, 10, (2, 3, 4), dtype=torch.int32)
    assert torch.equal(pykern.embedding(ids, table), table[ids.long()])
    assert pykern.embedding(torch.zeros(0, dtype=torch.int64), table).shape == (0, 16)


def test_ids_outside_the_table_give_nan_rows() -> None:
    y = pykern.embedding(torch.tensor([-1, 2, 5]), torch.ones(5, 8))
    assert y[0].isnan().all() and y[2].isnan().all() and bool((y[1] == 1).all())
