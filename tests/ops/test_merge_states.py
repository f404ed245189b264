"""merge_states' algebra: the natural log, empty states, symmetry, and attention over split keys put together again."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pykern
from pykern.errors import ArgumentError
from pykern.numerics import mismatch, same_bits
from pykern.ops import merge_states as module
from pykern.ops.merge_states import op
from pykern.testing.data import make_args

INF = math.inf
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def state(value, lse, dtype=torch.float32):
    return torch.tensor([[[value]]], dtype=dtype), torch.tensor([[lse]], dtype=torch.float32)


def test_lse_is_natural():
    # sglang#40903, flashinfer#4051, #4485: chunk 1 has scores 0 and 1, values 1 and 2; chunk 2 score 2, value 10.
    out, lse = op(*state(1.7310585786, 1.3132616875), *state(10, 2.0))
    assert out.item() == pytest.approx(7.2318970730, abs=2e-6)
    assert lse.item() == pytest.approx(2.4076059644, abs=1e-6)
    # What a wrong base would give is far outside that tolerance.
    out, _ = op(*state(1.7310585786, 1.8946361240), *state(10, 2.8853900818))
    assert out.item() == pytest.approx(7.7610751, abs=1e-5)


def test_attention_gives_what_merge_takes():
    q, k = torch.ones(1, 1, 1), torch.tensor([0.0, 1, 2]).reshape(3, 1, 1)
    v = torch.tensor([1.0, 2, 10]).reshape(3, 1, 1)
    parts = [pykern.attention(q, k[a:b], v[a:b], scale=1.0, return_lse=True) for a, b in ((0, 2), (2, 3))]
    assert parts[0][1].item() == pytest.approx(1.3132616875, abs=1e-6)
    assert parts[1][1].item() == pytest.approx(2.0, abs=1e-6)
    out, lse = op(*parts[0], *parts[1])
    assert out.item() == pytest.approx(7.2318970730, abs=2e-6)
    assert lse.item() == pytest.approx(2.4076059644, abs=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rubbish", [0.0, math.nan, INF])
def test_an_empty_state_changes_nothing(dtype, rubbish):
    g = torch.Generator().manual_seed(0)
    out, lse = torch.randn(5, 3, 24, generator=g).to(dtype), 30 * torch.randn(5, 3, generator=g)
    out[0, 0, :2] = torch.tensor([-0.0, 1e-8])
    empty, nothing = torch.full_like(out, rubbish), torch.full_like(lse, -INF)
    for a, b in ((op(out, lse, empty, nothing), (out, lse)), (op(empty, nothing, out, lse), (out, lse))):
        assert same_bits(a[0], b[0]) and same_bits(a[1], b[1])
    both, minus = op(empty, nothing, empty, nothing)
    assert bool((both == 0).all()) and bool((minus == -INF).all())


@given(st.integers(1, 30), st.integers(0, 12), st.integers(0, 1000))
def test_split_keys_merge_to_the_whole(n, cut, seed):
    g = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(4, 2, 8, generator=g), *torch.randn(2, n, 1, 8, generator=g)
    want, want_lse = pykern.attention(q, k, v, return_lse=True)
    cut = min(cut, n)
    halves = [pykern.attention(q, x, y, return_lse=True) for x, y in ((k[:cut], v[:cut]), (k[cut:], v[cut:]))]
    out, lse = op(*halves[0], *halves[1])
    assert mismatch(out, want.double(), 1e-5, 1e-5) is None
    assert mismatch(lse, want_lse.double(), 1e-5, 1e-5) is None
    swapped = op(*halves[1], *halves[0])
    assert mismatch(swapped[0], out.double(), 1e-6, 1e-6) is None and same_bits(swapped[1], lse)


def test_large_and_distant_lse():
    out, lse = op(*state(1.0, 500.0), *state(3.0, 500.0))
    assert out.item() == pytest.approx(2.0) and lse.item() == pytest.approx(500.6931472)
    out, lse = op(*state(1.0, -500.0), *state(3.0, 500.0))
    assert (out.item(), lse.item()) == (3.0, 500.0)
    out, lse = op(*state(1.0, math.nan), *state(3.0, 0.0))
    assert math.isnan(out.item()) and math.isnan(lse.item())


def test_out_may_be_an_input():
    args = make_args(op, module.batch("float32", 6, 2, 16), 3)
    want = op(**args)
    lse = torch.empty_like(args["lse_a"])
    out, _ = op(**args, out=(args["out_a"], lse))
    assert out is args["out_a"] and same_bits(out, want[0]) and same_bits(lse, want[1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"lse_a": torch.zeros(3, 2, dtype=torch.float64)}, "lse_a.dtype: got float64"),
        ({"lse_b": torch.zeros(2, 3)}, "lse_b.shape"),
        ({"out_b": torch.zeros(3, 2, 8)}, "out_b.shape[2]: got 8"),
        ({"out_b": torch.zeros(3, 2, 4, dtype=torch.float16)}, "out_b.dtype: got float16"),
        ({"out_a": torch.zeros(3, 2, 8)[..., ::2]}, "out_a.stride(-1): got 2"),
    ],
)
def test_bad_arguments_are_named(change, message):
    good = {"out_a": torch.zeros(3, 2, 4), "out_b": torch.zeros(3, 2, 4)}
    good |= {"lse_a": torch.zeros(3, 2), "lse_b": torch.zeros(3, 2)}
    with pytest.raises(ArgumentError) as error:
        pykern.merge_states(**(good | change))
    assert message in str(error.value) and "allowed" in str(error.value)
