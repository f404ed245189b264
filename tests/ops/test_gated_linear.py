"""gated_linear's own algebra: it is two linears, an activation and a product. The laws are in test_laws.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pykern
from pykern.errors import ArgumentError
from pykern.numerics import mismatch, same_bits
from pykern.op import Spec, get
from pykern.plan import TARGETS
from pykern.testing import sizes

OP = get("gated_linear")
SMS = (1, 4, 512)


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Small integers: every product and every partial sum is exact, whatever the order."""
    return torch.randint(-8, 9, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@given(st.data())
def test_exact_on_integers(data: st.DataObject) -> None:
    """float32 results are exact integers below 2**24, bfloat16 ones are those rounded once."""
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    m = data.draw(sizes(1, 140, around=(8, 32, 64, 128)))
    n = data.draw(sizes(1, 140, around=(8, 16, 32, 64, 128)))
    k = 8 * data.draw(sizes(1, 33, around=(2, 8, 16)))  # wide copies; narrow ones are linear's, and below
    x, gate, up = integers((m, k), 1, dtype), integers((n, k), 2, dtype), integers((n, k), 3, dtype)
    want = (x.double() @ gate.double().T).relu() * (x.double() @ up.double().T)
    with pykern.host(sms=data.draw(st.sampled_from(SMS))):
        y = pykern.gated_linear(x, gate, up, activation="relu")
    assert torch.equal(y, want.float().to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [1, 5, 20, 70])
def test_equals_two_linears(dtype: torch.dtype, m: int) -> None:
    """The sums are linear's bit for bit; the product of the float32 sums is rounded once."""
    x, gate, up = normal((m, 72), 1, dtype), normal((40, 72), 2, dtype), normal((40, 72), 3, dtype)
    a = pykern.linear(x, gate, activation="silu", out_dtype="float32")
    b = pykern.linear(x, up, out_dtype="float32")
    assert same_bits(pykern.gated_linear(x, gate, up), (a * b).to(dtype))


@pytest.mark.parametrize("activation", ["none", "relu", "gelu", "gelu_tanh", "silu"])
def test_activations(activation: str) -> None:
    x, gate, up = normal((6, 64), 1), normal((40, 64), 2), normal((40, 64), 3)
    tol = OP.tolerance("float32")
    y = pykern.gated_linear(x, gate, up, activation=activation)
    assert mismatch(y, OP.reference(x, gate, up, activation), tol.rtol, tol.atol) is None
    assert mismatch(y, OP.reference(x, up, gate, activation), tol.rtol, tol.atol) is not None or activation == "none"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [3, 70])
def test_packed_weights_and_strides(dtype: torch.dtype, m: int) -> None:
    """Halves of one [2 n, k] tensor, interleaved rows, and weights with different strides."""
    packed, x = normal((80, 64), 1, dtype), normal((m, 64), 2, dtype)
    want = pykern.gated_linear(x, packed[:40].clone(), packed[40:].clone())
    assert same_bits(pykern.gated_linear(x, packed[:40], packed[40:]), want)
    woven = torch.stack([packed[:40], packed[40:]], 1)
    assert same_bits(pykern.gated_linear(x, woven[:, 0], woven[:, 1]), want)
    assert same_bits(pykern.gated_linear(x, packed[:40], woven[:, 1]), want)
    odd = torch.empty(m, 65, dtype=dtype)[:, :64].copy_(x)  # copies of single elements
    assert same_bits(pykern.gated_linear(odd, packed[:40], packed[40:]), want)
    same = packed[:1].expand(40, 64)
    assert same_bits(pykern.gated_linear(x, same, packed[40:]), pykern.gated_linear(x, same.clone(), packed[40:]))


def test_classes() -> None:
    """float32: one class; bfloat16: up to 64 rows, and more."""
    gate, up, x = normal((96, 104), 2), normal((96, 104), 3), normal((200, 104), 1)
    want = pykern.gated_linear(x, gate, up)
    for sms in SMS:
        for m in (1, 8, 9, 64, 200):
            with pykern.host(sms=sms):
                assert same_bits(pykern.gated_linear(x[:m], gate, up), want[:m]), (sms, m)
    gate, up, x = gate.bfloat16(), up.bfloat16(), x.bfloat16()
    for counts in ((1, 9, 30, 64), (65, 129, 200)):
        want = pykern.gated_linear(x[: counts[-1]], gate, up)
        for sms in SMS:
            for m in counts:
                with pykern.host(sms=sms):
                    assert same_bits(pykern.gated_linear(x[:m], gate, up), want[:m]), (sms, m)


def test_nan_stays_in_its_row_and_column() -> None:
    for dtype, m in ((torch.float32, 4), (torch.float32, 20), (torch.bfloat16, 4), (torch.bfloat16, 70)):
        x, gate, up = normal((m, 40), 1, dtype), normal((30, 40), 2, dtype), normal((30, 40), 3, dtype)
        clean = pykern.gated_linear(x, gate, up)
        x[1, 39], gate[4, 0], up[7, 5] = (float("nan"),) * 3
        y = pykern.gated_linear(x, gate, up)
        wrong = torch.zeros_like(y, dtype=torch.bool)
        wrong[1], wrong[:, 4], wrong[:, 7] = True, True, True
        assert torch.equal(y.isnan(), wrong) and torch.equal(y[~wrong], clean[~wrong])


def test_empty() -> None:
    w = torch.ones(4, 8)
    assert pykern.gated_linear(torch.ones(0, 8), w, w).shape == (0, 4)
    assert pykern.gated_linear(torch.ones(2, 8), w[:0], w[:0]).shape == (2, 0)
    assert torch.equal(pykern.gated_linear(torch.ones(2, 0), w[:, :0], w[:, :0]), torch.zeros(2, 4))


@pytest.mark.parametrize(
    "change,name",
    [
        ({"w_up": torch.ones(5, 8)}, "w_up.shape"),
        ({"w_gate": torch.ones(6, 7)}, "w_gate.shape"),
        ({"w_up": torch.ones(6, 8).half()}, "w_up.dtype"),
        ({"w_up": torch.ones(8, 6).T}, "w_up.stride"),
        ({"x": torch.ones(8, 4).T}, "x.stride"),
        ({"activation": "swish"}, "activation"),
        ({"w_up": None}, "w_up"),
    ],
)
def test_refused_by_name(change: dict[str, object], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        pykern.gated_linear(**{"x": torch.ones(4, 8), "w_gate": torch.ones(6, 8), "w_up": torch.ones(6, 8), **change})
    assert str(error.value).startswith(name) and "allowed" in str(error.value)


@pytest.mark.parametrize("arch", TARGETS)
def test_plans(arch: str) -> None:
    """The large tile where it fits, also when half of it is gate; everything can be launched."""
    for m, variant in ((1, "mma_skinny_8"), (64, "mma_skinny_64"), (2048, "mma_128x")):
        w = Spec("bfloat16", (14336, 4096))
        problem = OP.problem_of({"x": Spec("bfloat16", (m, 4096)), "w_gate": w, "w_up": w})
        assert OP.planned(problem, TARGETS[arch]).variant.startswith(variant)
