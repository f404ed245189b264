"""What docs/ops.md says of the ends: of eps = 0, of the largest values, of arguments that look right and are not."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch.nn import functional

import pykern
from pykern import op
from pykern.errors import ArgumentError
from pykern.schema import FLOATS


def said(name: str, text: str) -> None:
    """The op's documentation says so, whatever its line breaks: else the test guards nothing that a user reads."""
    assert text in re.sub(r"\s+", " ", op.get(name).doc), text


def dtype(name: str) -> torch.dtype:
    return getattr(torch, name)


# ---- norms without an eps


@pytest.mark.parametrize("name", ["float32", "bfloat16"])  # of float16 the least magnitude's square is a float32
def test_rms_norm_without_eps(name: str) -> None:
    said("rms_norm", "With 0, a row whose squares all underflow")
    one = torch.ones(4, dtype=dtype(name))
    rows = {"below": [1e-23, -2e-24, 0.0, 1e-30], "above": [1e-21, -2e-22, 0.0, 1e-21], "zeros": [0.0, -0.0, 0.0, 0.0]}
    for what, values in rows.items():
        x = torch.tensor([values], dtype=dtype(name))
        y, torchs = pykern.rms_norm(x, one, 0.0), functional.rms_norm(x, (4,), one, 0.0)
        assert torch.equal(y.isfinite(), torchs.isfinite()) and torch.equal(y.isnan(), torchs.isnan()), what
        assert bool(y.isfinite().all()) == (what == "above")
        assert torch.equal(y.isnan(), (x == 0) & (what != "above"))
    x = torch.tensor([[6e-8, -1.2e-7, 0.0, 6e-8]], dtype=torch.float16)
    assert bool(pykern.rms_norm(x, one.half(), 0.0).isfinite().all())


@pytest.mark.parametrize("name", FLOATS)
def test_layer_norm_without_eps(name: str) -> None:
    said("layer_norm", "With 0, a row whose deviations' squares all underflow")
    said("layer_norm", "constant rows give exactly ``bias`` (with eps > 0)")
    x, b = torch.full((1, 4), 3.0, dtype=dtype(name)), torch.tensor([1.0, -2.0, 0.5, 8.0], dtype=dtype(name))
    assert bool(functional.layer_norm(x, (4,), None, b, 0.0).isnan().all())
    assert bool(pykern.layer_norm(x, None, b, 0.0).isnan().all())
    assert torch.equal(pykern.layer_norm(x, None, b, 1e-12), b[None])
    if name != "float16":
        y = pykern.layer_norm(torch.tensor([[1e-30, 2e-30, 0.0, -1e-30]], dtype=dtype(name)), None, None, 0.0)
        assert not bool(y.isfinite().any())


# ---- the largest values, packed and read back


def read_back(layout: str, largest: float, name: str = "float32") -> Any:
    w = (torch.linspace(-1, 1, 32) * largest).to(dtype(name))[None]
    return pykern.dequantize(pykern.quantize(w, layout), layout, 0, name)


def test_the_largest_values_may_read_back_as_infinity() -> None:
    said("quantize", "The largest finite values may read back as infinity")
    finite = {}
    for name in FLOATS:
        for layout in ("int4", "int8", "fp8"):
            largest = torch.finfo(dtype(name)).max
            finite[layout, name] = bool(read_back(layout, largest, name).isfinite().all())
            assert bool(read_back(layout, largest / 2, name).isfinite().all()), (layout, name)
    assert not all(finite.values()) and any(finite.values())  # "may": it depends on which way the scale is rounded


@pytest.mark.parametrize(("layout", "edge"), [("q4_0", 5.2e5), ("q8_0", 8.3e6), ("q4_1", 65504.0)])
def test_where_the_scales_of_gguf_end(layout: str, edge: float) -> None:
    said(
        "quantize", "magnitudes from about 5.2e5 (q4_0) and 8.3e6 (q8_0) read back as infinity or NaN, in q4_1 a range"
    )
    assert bool(read_back(layout, edge * 0.99).isfinite().all())
    assert not bool(read_back(layout, edge * 1.01).isfinite().any())


# ---- arguments


@pytest.mark.parametrize("name", ["dequantize", "quant_embedding"])
def test_a_dtype_is_a_name(name: str) -> None:
    said(name, 'a str: ``"float32"``, ``"float16"`` or ``"bfloat16"`` (no ``torch.dtype``)')
    planes = pykern.quantize(torch.randn(4, 32), "int4")
    ids = () if name == "dequantize" else (torch.tensor([1]),)
    assert getattr(pykern, name)(*ids, planes, "int4", 0, "float16").dtype == torch.float16
    with pytest.raises(ArgumentError, match="^dtype: got dtype torch.float16, allowed: a str"):
        getattr(pykern, name)(*ids, planes, "int4", 0, torch.float16)
    with pytest.raises(ArgumentError, match="^dtype: got 'float64', allowed: 'float32', 'float16', 'bfloat16'"):
        getattr(pykern, name)(*ids, planes, "int4", 0, "float64")


@pytest.mark.parametrize("name", FLOATS)
def test_quant_linear_is_linear_of_dequantize_by_name(name: str) -> None:
    said("quant_linear", "``linear(x, dequantize(planes, layout, group, d), ...)`` with d the name")
    planes = pykern.quantize(torch.randn(24, 64), "int4", 32)
    x = torch.randn(3, 64).to(dtype(name))
    w = pykern.dequantize(planes, "int4", 32, name)
    assert torch.equal(pykern.quant_linear(x, planes, "int4", 32), pykern.linear(x, w))


def test_the_rotary_width() -> None:
    said("rope", "r is even, 2..head_dim (0 is refused)")
    said("rope_append_kv", "(r even, 2..head_dim)")
    x, at, cache = torch.randn(3, 2, 6), torch.arange(3), torch.zeros(2, 2, 2, 6)
    for r in (0, 1, 3, 8):
        table = torch.zeros(4, r)
        with pytest.raises(ArgumentError, match=rf"^cos_sin.shape\[1\]: got {r}, allowed: an even number, 2..6"):
            pykern.rope(x, at, table)
        with pytest.raises(ArgumentError, match=rf"^cos_sin.shape\[1\]: got {r}, allowed: an even number, 2..6"):
            pykern.rope_append_kv(x, x, x, at, table, cache, cache.clone(), at)
    for r in (2, 6):
        assert bool(pykern.rope(x, at, torch.zeros(4, r))[..., :r].eq(0).all())


@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_rows_before_the_first_query_offset_stay_as_they_were(name: str) -> None:
    said("attention", "of a cu_q that begins above 0, the first rows of out and lse hold whatever their memory held")
    q, k = torch.randn(6, 2, 32).to(dtype(name)), torch.randn(8, 1, 32).to(dtype(name))
    out, lse = torch.full_like(q, 7.0), torch.full((6, 2), 7.0)
    lens = {"cu_q": torch.tensor([2, 5], dtype=torch.int32), "cu_kv": torch.tensor([0, 8], dtype=torch.int32)}
    pykern.attention(q, k, k, **lens, causal=True, return_lse=True, out=(out, lse))
    assert bool((out[:2] == 7).all()) and bool((lse[:2] == 7).all())
    lens["cu_q"] = torch.tensor([0, 3], dtype=torch.int32)
    alone = pykern.attention(q[2:5].contiguous(), k, k, **lens, causal=True)
    assert torch.equal(out[2:5], alone)
    assert bool((out[5] == 0).all()) and bool((lse[5] == -torch.inf).all())  # after cu_q's end
