"""Quantised ops: the fused kernels have the bits of their plain counterparts on dequantised weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pykern
from pykern.numerics import same_bits
from pykern.op import get
from pykern.ops._quant import LAYOUTS, pack_words, unpack_words
from pykern.testing.data import DrawFn, make_args

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@settings(max_examples=25, deadline=None)
@given(st.data(), st.integers(0, 9999))
def test_quant_linear_is_linear_of_dequantised_weights(data: st.DataObject, seed: int) -> None:
    """Every layout, alignment, group and number of tokens: one definition of a weight, one order of the sum."""
    op = get("quant_linear")
    args = make_args(op, op.draw(DrawFn(data.draw)), seed)
    dtype = str(args["x"].dtype).removeprefix("torch.")
    w = pykern.dequantize(args["planes"], args["layout"], args["group"], dtype)
    rest = {name: args[name] for name in ("bias", "activation", "residual")}
    assert same_bits(pykern.quant_linear(**args), pykern.linear(args["x"], w, **rest))


@settings(max_examples=15, deadline=None)
@given(st.data(), st.integers(0, 9999))
def test_quant_embedding_is_rows_of_dequantised_weights(data: st.DataObject, seed: int) -> None:
    op = get("quant_embedding")
    args = make_args(op, op.draw(DrawFn(data.draw)), seed)
    table = pykern.dequantize(args["planes"], args["layout"], args["group"], args["dtype"])
    assert same_bits(pykern.quant_embedding(**args), pykern.embedding(args["ids"], table))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_every_code_of_four_bits(dtype: torch.dtype) -> None:
    """All codes x all whole zeros: the packed 16-bit arithmetic of quant_linear is exact, and so is dequantize."""
    codes = (torch.arange(16) | torch.arange(16).roll(1) << 4).to(torch.uint8).repeat(17, 4)  # [17, 64]: k = 128
    zeros = torch.arange(17, dtype=torch.uint8)[:, None]
    scales = torch.full((17, 1), 0.3, dtype=dtype)
    scales[3:6] *= -1
    q = torch.stack([codes & 15, codes >> 4], -1).reshape(17, 128).float()
    want = ((q - zeros) * scales.float()).to(dtype)
    planes = [codes, scales, zeros]
    assert same_bits(pykern.dequantize(planes, "int4", 128, str(dtype).removeprefix("torch.")), want)
    for column in range(0, 128, 16):  # a unit vector reads one column
        x = torch.zeros(16, 128, dtype=dtype)
        x[:, column : column + 16] = torch.eye(16, dtype=dtype)
        for layout, words in (("int4", codes), ("packed4.v1", pack_words(codes))):
            y = pykern.quant_linear(x, [words, scales, zeros], layout, 128)
            assert torch.equal(y.T, want[:, column : column + 16]), layout


def test_all_int8_and_fp8_codes() -> None:
    every = torch.arange(256, dtype=torch.int32).to(torch.uint8).reshape(1, 256)
    scales = torch.full((1, 2), 0.7)
    int8 = every.view(torch.int8)
    assert same_bits(pykern.dequantize([int8, scales], "int8", 128), int8.float() * 0.7)
    fp8 = every.view(torch.float8_e4m3fn)
    got = pykern.dequantize([fp8, scales], "fp8", 128)
    assert torch.equal(got.nan_to_num(9e9), (fp8.float() * 0.7).nan_to_num(9e9))
    assert int(got.isnan().sum()) == 2


def test_pack_words_round_trips() -> None:
    codes = torch.randint(0, 256, (5, 128), dtype=torch.uint8)
    assert torch.equal(unpack_words(pack_words(codes)), codes)
    assert not torch.equal(pack_words(codes), codes)


def test_empty_problems() -> None:
    codes, scales = torch.zeros(4, 32, dtype=torch.uint8), torch.ones(4, 1)
    assert pykern.quant_linear(torch.zeros(0, 64), [codes, scales], "int4").shape == (0, 4)
    assert pykern.quant_linear(torch.zeros(2, 64), [codes[:0], scales[:0]], "int4").shape == (2, 0)
    assert pykern.dequantize([codes[:0], scales[:0]], "int4").shape == (0, 64)
    nothing = [torch.zeros(4, 0, dtype=torch.uint8), torch.zeros(4, 0)]
    for m in (2, 20):  # k = 0: act(bias) + residual
        y = pykern.quant_linear(torch.zeros(m, 0), nothing, "int4", bias=torch.arange(4.0))
        assert y.tolist() == [[0, 1, 2, 3]] * m


@pytest.mark.parametrize("layout", LAYOUTS)
def test_out_and_torch_op(layout: str) -> None:
    op = get("dequantize")
    case = next(c for c in op.cases() if c["layout"] == layout)
    args = make_args(op, case, 1)
    out = torch.empty(37, 256)
    pykern.dequantize(**args, out=out)
    assert same_bits(torch.ops.pykern.dequantize(args["planes"], layout, args["group"], "float32"), out)
