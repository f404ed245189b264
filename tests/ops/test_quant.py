"""QuantTensor: what checkpoints hold, bit for bit; public bug reports as cases; refusals."""

from __future__ import annotations

import warnings
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import pykern
from pykern.errors import ArgumentError
from pykern.numerics import same_bits
from pykern.quant import QuantTensor, embedding, linear, prepack, prepack_cost

GGUF_TYPES = {
    "q4_0": gguf.GGMLQuantizationType.Q4_0,
    "q4_1": gguf.GGMLQuantizationType.Q4_1,
    "q8_0": gguf.GGMLQuantizationType.Q8_0,
}
GPTQ_ROWS = ([0x76543210] + [0xFEDCBA98 - 2**32] + [0x76543210] * 6,)


def gptq(version: int, zeros: int, group_size: int | None = None) -> QuantTensor:
    """K = 8, N = 8, one group, scale 0.5."""
    qweight = torch.tensor(GPTQ_ROWS, dtype=torch.int32)
    qzeros = torch.tensor([[zeros]], dtype=torch.int64).to(torch.int32)
    scales = torch.full((1, 8), 0.5)
    version_: Any = version
    return QuantTensor.from_gptq(qweight, qzeros, scales, version=version_, group_size=group_size)


# ---- GPTQ and AWQ


def test_gptq_version_is_the_callers_word() -> None:
    """vLLM 26092, 38966: a v2 zero read as v1 shifts every weight by one scale."""
    x = torch.ones(1, 8)
    v1, v2 = gptq(1, 0x77777777), gptq(2, 0x77777777)
    assert v1.dequantize()[0].tolist() == [-4, -3.5, -3, -2.5, -2, -1.5, -1, -0.5]
    assert v1.dequantize()[1].tolist() == [0, 0.5, 1, 1.5, 2, 2.5, 3, 3.5]
    assert v2.dequantize()[0].tolist() == [-3.5, -3, -2.5, -2, -1.5, -1, -0.5, 0]
    assert v2.dequantize()[1].tolist() == [0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4]
    y1, y2 = linear(x, v1)[0], linear(x, v2)[0]
    assert (float(y1[0]), float(y1[1]), float(y2[0]), float(y2[1])) == (-18, 14, -14, 18)
    assert bool((y2 - y1 == 4).all())
    with pytest.raises(ArgumentError, match="version: got 3"):
        gptq(3, 0x77777777)
    with pytest.raises(TypeError, match="version"):
        QuantTensor.from_gptq(*(torch.zeros(1),) * 3)  # type: ignore[call-arg]


def test_symmetric_zeros_declared_version_1_warn() -> None:
    with pytest.warns(UserWarning, match="0x88888888"):
        gptq(1, 0x88888888 - 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gptq(2, 0x88888888 - 2**32)
        gptq(1, 0x77777777)


def test_gptq_version_1_masks_to_four_bits() -> None:
    assert gptq(1, -1).planes["zeros"].tolist() == [[0]] * 8  # 15 + 1


def test_gptq_partial_group() -> None:
    """vllm-omni 3714: groups are counted up, never down."""
    nines = torch.full((5, 8), 0x99999999 - 2**32, dtype=torch.int64).to(torch.int32)
    eights = torch.full((3, 1), 0x88888888 - 2**32, dtype=torch.int64).to(torch.int32)
    scales = torch.tensor([1.0, 2.0, 4.0])[:, None].expand(3, 8)
    qt = QuantTensor.from_gptq(nines, eights, scales, version=2, group_size=16)
    assert linear(torch.ones(1, 40), qt).tolist() == [[80.0] * 8]
    assert linear(torch.ones(40, 40, dtype=torch.bfloat16), qt).tolist() == [[80.0] * 8] * 40
    with pytest.raises(ArgumentError, match="K = 40, group_size = 16"):
        QuantTensor.from_gptq(nines, eights[:2], scales[:2], version=2, group_size=16)
    with pytest.raises(ArgumentError, match="group_size"):
        QuantTensor.from_gptq(nines, eights, scales, version=2)


def packed_rows(codes: torch.Tensor) -> torch.Tensor:
    """int32 words of eight codes along the last axis, the first in the lowest nibble."""
    shifts = torch.arange(8) * 4
    words = (codes.long().reshape(*codes.shape[:-1], -1, 8) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([8, 16, 24]), st.booleans(), st.integers(0, 99))
def test_gptq_is_the_formula(steps: int, eights: int, group: int, act_order: bool, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    k, n = 8 * steps, 8 * eights
    groups = -(-k // group)
    codes = torch.randint(0, 16, (k, n), generator=rng)
    zeros = torch.randint(0, 16, (groups, n), generator=rng)
    zeros[0, 0] = 3  # not a symmetric checkpoint
    scales = torch.rand(groups, n, generator=rng).half()
    g_idx = torch.arange(k) // group
    if act_order:
        g_idx = g_idx[torch.randperm(k, generator=rng)]
    want = ((codes - zeros[g_idx]).float() * scales[g_idx].float()).T
    for version, stored in ((1, (zeros - 1) & 15), (2, zeros)):
        qt = QuantTensor.from_gptq(
            packed_rows(codes.T).T,
            packed_rows(stored),
            scales,
            g_idx.int(),
            version=version,
            group_size=group,  # type: ignore[arg-type]
        )
        assert same_bits(qt.dequantize() + 0.0, want + 0.0)
        assert (qt.perm is None) == bool((g_idx == torch.arange(k) // group).all())
        x = torch.randn(3, k, generator=rng)
        assert torch.allclose(linear(x, qt), x @ want.T, atol=1e-4)
        assert same_bits(embedding(torch.tensor([n - 1, 0]), qt) + 0.0, want[[n - 1, 0]] + 0.0)


def test_gptq_g_idx_of_uneven_groups_is_refused() -> None:
    words = torch.zeros(2, 8, dtype=torch.int32)
    scales, zeros = torch.ones(2, 8), torch.zeros(2, 1, dtype=torch.int32)
    with pytest.raises(ArgumentError, match="g_idx"):
        QuantTensor.from_gptq(words, zeros, scales, torch.zeros(16, dtype=torch.int32), version=2)
    with pytest.raises(ArgumentError, match="g_idx.shape"):
        QuantTensor.from_gptq(words, zeros, scales, torch.zeros(8, dtype=torch.int32), version=2)


def test_awq_interleave() -> None:
    """AutoAWQ 275, llm-compressor 1613: nibble i is column [0, 2, 4, 6, 1, 3, 5, 7][i]."""
    qweight = torch.full((32, 1), 0x76543210, dtype=torch.int32)
    qzeros = torch.tensor([[0x80F10842 - 2**32]], dtype=torch.int64).to(torch.int32)
    qt = QuantTensor.from_awq(qweight, qzeros, torch.full((1, 8), 0.25))
    assert (qt.planes["codes"][:, 0] & 15).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert qt.planes["zeros"][:, 0].tolist() == [2, 1, 4, 15, 8, 0, 0, 8]
    weights = [-0.5, 0.75, -0.75, -2.5, -1.5, 1.5, 0.75, -0.25]
    assert qt.dequantize().T.tolist() == [weights] * 32


@settings(max_examples=10, deadline=None)
@given(st.integers(1, 3), st.integers(1, 4), st.integers(0, 99))
def test_awq_is_the_formula(eights: int, groups: int, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    k, n = 16 * groups, 8 * eights
    codes = torch.randint(0, 16, (k, n), generator=rng)
    zeros = torch.randint(0, 16, (groups, n), generator=rng)
    scales = torch.rand(groups, n, generator=rng).half()
    spread = torch.arange(n).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(-1)
    qt = QuantTensor.from_awq(packed_rows(codes[:, spread]), packed_rows(zeros[:, spread]), scales)
    g = torch.arange(k) // 16
    assert same_bits(qt.dequantize(), ((codes - zeros[g]).float() * scales[g].float()).T.contiguous())


# ---- GGUF


def hexed(text: str) -> list[int]:
    return list(bytes.fromhex(text.replace(" ", "")))


def test_gguf_bytes_of_the_reference_encoders() -> None:
    """llama.cpp 729, 1405, 8939: the scale has the sign of the value of largest magnitude."""
    a = torch.zeros(32)
    a[:8] = torch.tensor([-8, 7, 0.5, -0.5, 1.5, -1.5, 2.49, 7.5])
    a[16:20] = torch.tensor([3, -3, -7.5, 0.49])
    codes = "b05f1988 8a878a8f" + "88" * 8
    blocks = pykern.quantize(torch.stack([a, -a, torch.zeros(32)]), "q4_0")[0]
    assert blocks.tolist() == [hexed("003c" + codes), hexed("00bc" + codes), hexed("0080" + "88" * 16)]
    w = pykern.dequantize([blocks], "q4_0")
    assert w[0, :8].tolist() == [-8, 7, 1, 0, 2, -1, 2, 7] and w[0, 16:20].tolist() == [3, -3, -7, 0]
    assert torch.equal(w[1], -w[0])
    ramp = torch.arange(32) / 2 - 4
    q4_1 = pykern.quantize(ramp[None], "q4_1")[0]
    assert q4_1.tolist() == [hexed("223c00c4 80809191a2a2b3b3c4c4d5d5e6e6f7f7")]


@settings(max_examples=20, deadline=None)
@given(
    st.sampled_from(sorted(GGUF_TYPES)), st.integers(1, 5), st.integers(1, 4), st.integers(-6, 4), st.integers(0, 9999)
)
def test_gguf_equals_gguf_py(layout: str, n: int, blocks: int, power: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal((n, 32 * blocks)) * 10.0**power).astype(np.float32)
    if seed % 2:
        x = np.round(x * 4) / 4  # ties
    x[rng.random(x.shape) < 0.1] = 0
    kind = GGUF_TYPES[layout]
    want = gguf.quants.quantize(x, kind)
    (made,) = pykern.quantize(torch.from_numpy(x), layout)
    assert np.array_equal(made.numpy(), want)
    qt = QuantTensor.from_gguf(torch.from_numpy(want), layout, x.shape)
    assert same_bits(qt.dequantize(), torch.from_numpy(gguf.quants.dequantize(want, kind)))


def test_gguf_blocks_never_straddle_a_row() -> None:
    """llama.cpp 6614: 4 x 40 is 5 blocks of values, and no matrix."""
    with pytest.raises(ArgumentError, match=r"shape: got \(4, 40\).*multiple of 32"):
        QuantTensor.from_gguf(torch.zeros(4, 5 * 34 // 4, dtype=torch.uint8), "q8_0", (4, 40))
    with pytest.raises(ArgumentError, match=r"w.shape\[1\]"):
        pykern.quantize(torch.zeros(4, 40), "q4_0")
    with pytest.raises(ArgumentError, match="18 bytes per 32"):
        QuantTensor.from_gguf(torch.zeros(4, 34, dtype=torch.uint8), "q4_0", (4, 32))
    with pytest.raises(ArgumentError, match="layout"):
        QuantTensor.from_gguf(torch.zeros(4, 34, dtype=torch.uint8), "q5_0", (4, 32))


# ---- the value itself


def test_quantise_and_back() -> None:
    w = torch.randn(6, 72)
    for layout, steps in (("int4", 7), ("int4_min", 15), ("int8", 127)):
        qt = QuantTensor.quantize(w, layout, 24)
        width = w.reshape(6, 3, 24)
        span = width.amax(-1) - width.amin(-1) if layout == "int4_min" else width.abs().amax(-1)
        error = (qt.dequantize() - w).abs().reshape(6, 3, 24).amax(-1)
        assert bool((error <= 0.5001 * span / steps).all()), layout
    fp8 = QuantTensor.quantize(w, "fp8", 24).dequantize()
    assert bool(((fp8 - w).abs() <= w.abs() / 16 + 1e-3).all())


def test_a_group_with_nan_or_infinity_reads_as_nan() -> None:
    w = torch.ones(2, 16)
    w[0, 3], w[1, 12] = float("nan"), float("-inf")
    for layout in ("int4", "int4_min", "int8", "fp8"):
        back = QuantTensor.quantize(w, layout, 8).dequantize()
        nan = torch.zeros(2, 16, dtype=torch.bool)
        nan[0, :8] = nan[1, 8:] = True
        assert torch.equal(back.isnan(), nan), layout


def test_prepacked_weights_are_the_same_weights() -> None:
    for layout in ("int4", "int4_min"):
        qt = QuantTensor.quantize(torch.randn(20, 256).bfloat16(), layout, 64)
        fast = prepack(qt)
        assert fast.layout.endswith(".v1") and fast.nbytes == qt.nbytes
        assert same_bits(fast.dequantize("bfloat16"), qt.dequantize("bfloat16"))
        x = torch.randn(3, 256).bfloat16()
        assert same_bits(linear(x, fast), linear(x, qt))
        seconds, calls = prepack_cost(qt)
        assert seconds > 0 and calls > 0
    with pytest.raises(ArgumentError, match=r"w.shape\[1\]: got 96"):
        prepack(QuantTensor.quantize(torch.randn(4, 96), "int4"))
    with pytest.raises(ArgumentError, match="w.layout"):
        prepack(QuantTensor.quantize(torch.randn(4, 128), "int8"))


def test_it_is_a_pytree() -> None:
    import torch.utils._pytree as pytree

    qt = QuantTensor.quantize(torch.randn(4, 64), "int4_min", 32)
    leaves, spec = pytree.tree_flatten({"w": qt})
    assert [t for t in leaves if t is not None] == qt.tensors
    back = pytree.tree_unflatten(leaves, spec)["w"]
    assert (back.layout, back.shape, back.group) == (qt.layout, qt.shape, qt.group)
    assert same_bits(back.to("cpu").dequantize(), qt.dequantize())


def test_planes_that_do_not_fit_are_named() -> None:
    codes, scales = torch.zeros(4, 20, dtype=torch.uint8), torch.ones(4, 2)
    with pytest.raises(ArgumentError, match=r"planes\[1\].shape.*ceil\(40 / 16\)"):
        QuantTensor({"codes": codes, "scales": scales}, "int4", (4, 40), 16)
    with pytest.raises(ArgumentError, match="shape: got"):
        QuantTensor({"codes": codes, "scales": scales}, "int4", (4, 42), 20)
    with pytest.raises(ArgumentError, match="in this order"):
        QuantTensor({"codes": codes, "scale": scales}, "int4", (4, 40), 20)
    x = torch.zeros(1, 40)
    for planes, layout, group, message in (
        ([codes, scales], "int3", 20, "layout"),
        ([codes], "int4", 20, "planes: got 1 tensors"),
        ([codes, scales], "int4_min", 20, "planes: got 2 tensors"),
        ([codes.char(), scales], "int4", 20, r"planes\[0\].dtype"),
        ([codes, scales.double()], "int4", 20, r"planes\[1\].dtype"),
        ([codes, scales.T.contiguous().T], "int4", 20, r"planes\[1\].stride"),
        ([codes, scales], "int4", -1, "group"),
        ([codes, scales], "packed4.v1", 20, "multiple of 128"),
        ([codes[:, :19]], "q4_0", 0, "planes"),
    ):
        for call in (
            lambda p=planes, lay=layout, g=group: pykern.dequantize(p, lay, g),
            lambda p=planes, lay=layout, g=group: pykern.quant_linear(x, p, lay, g),
            lambda p=planes, lay=layout, g=group: pykern.quant_embedding(torch.zeros(1, dtype=torch.int64), p, lay, g),
        ):
            with pytest.raises(ArgumentError, match=message):
                call()
    with pytest.raises(ArgumentError, match=r"k = x.shape\[-1\] = 38"):
        pykern.quant_linear(x[:, :38], [codes, scales], "int4", 20)
    with pytest.raises(ArgumentError, match=r"bias.shape\[0\]: got 3"):
        pykern.quant_linear(x, [codes, scales], "int4", 20, bias=torch.zeros(3))
    with pytest.raises(ArgumentError, match="residual.shape"):
        pykern.quant_linear(x, [codes, scales], "int4", 20, residual=torch.zeros(1, 5))


# ---- what a QuantTensor may be made of

CODES, SCALES = torch.randint(0, 255, (4, 32), dtype=torch.uint8), torch.rand(4, 2)
PLANES = {"codes": CODES, "scales": SCALES}


@pytest.mark.parametrize(
    ("perm", "says"),
    [
        (torch.arange(63), r"perm.shape: got \(63,\), allowed: \(64,\)"),
        (torch.arange(64).view(8, 8), r"perm.shape: got \(8, 8\)"),
        (torch.arange(64).int(), "perm.dtype: got int32, allowed: int64"),
        (torch.arange(64).float(), "perm.dtype: got float32"),
        (torch.zeros(64, dtype=torch.int64), "perm: got column 0 64 times, allowed: each of 0..63 once"),
        (torch.arange(64).clamp(max=62), "perm: got column 62 2 times"),
        (torch.arange(64) + 1, r"perm: got 1..64, allowed: columns in 0..63"),
        (torch.arange(64) - 1, r"perm: got -1..62"),
        (torch.arange(64, device="meta"), "perm.device: got meta, allowed: cpu"),
        (list(range(64)), "perm: got list"),
        (np.arange(64), "perm: got a numpy ndarray of "),
        ("x", "perm: got str"),
    ],
)
def test_a_perm_is_a_permutation(perm: Any, says: str) -> None:
    with pytest.raises(ArgumentError, match="^" + says):
        QuantTensor(PLANES, "int4", (4, 64), 32, perm)


def test_a_permuted_matrix_is_checked_against_x() -> None:
    qt = QuantTensor(PLANES, "int4", (4, 64), 32, torch.randperm(64))
    x = torch.randn(3, 64)
    assert torch.allclose(linear(x, qt), x @ qt.dequantize().T, atol=1e-4)
    for wrong, says in (
        (x[:, :60], r"x.shape: got \(3, 60\)"), (torch.tensor(1.0), "x.shape"), (None, "x: got NoneType"),
        (x.numpy(), r"x: got a numpy ndarray of float32 \(3, 64\), allowed: a tensor"), (3, "x: got int"),
        (x.to("meta"), "x.device: got meta, allowed: cpu"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=says):
            linear(wrong, qt)


@pytest.mark.parametrize("wrong", [None, "x", CODES, PLANES], ids=lambda w: type(w).__name__)
def test_functions_of_quant_tensors_want_one(wrong: Any) -> None:
    calls = (lambda: linear(torch.zeros(1, 64), wrong), lambda: embedding(torch.tensor([0]), wrong),
             lambda: prepack(wrong), lambda: prepack_cost(wrong))  # fmt: skip
    for call in calls:
        with pytest.raises(ArgumentError, match=r"^(w|table): got .*, allowed: a pykern.QuantTensor"):
            call()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"planes": None}, "planes: got NoneType"), ({"planes": [CODES, SCALES]}, "planes: got list"),
        ({"planes": {"codes": None, "scales": SCALES}}, r"planes\['codes'\]: got NoneType"),
        ({"planes": {"codes": CODES.numpy(), "scales": SCALES}}, r"planes\['codes'\]: got a numpy ndarray of "),
        ({"planes": {"codes": CODES, "scales": SCALES.to_sparse()}}, "a torch.sparse_coo tensor"),
        ({"planes": {"codes": CODES, "scales": SCALES.to("meta")}}, "planes: got tensors on cpu, meta"),
        ({"layout": None}, "layout: got None"), ({"layout": ["int4"]}, "layout: got"), ({"layout": "int5"}, "layout"),
        ({"group": None}, "group: got None"), ({"group": "32"}, "group: got '32'"),
        ({"group": True}, "group: got True"),
        ({"group": 32.0}, "group: got 32.0"), ({"shape": None}, "shape: got None"), ({"shape": (4,)}, "shape: got"),
        ({"shape": (4.0, 64)}, "shape: got"), ({"shape": (4, 63)}, r"shape: got \(4, 63\)"),
    ],
)  # fmt: skip
def test_fields_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        QuantTensor(**{"planes": PLANES, "layout": "int4", "shape": (4, 64), "group": 32, **change})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"version": True}, "version: got True"), ({"version": 2.0}, "version: got 2.0"),
        ({"version": "2"}, "version: got '2'"), ({"group_size": "32"}, "group_size: got '32'"),
        ({"group_size": 32.0}, "group_size: got 32.0"), ({"group_size": True}, "group_size: got True"),
        ({"g_idx": [0] * 8}, "g_idx: got list"), ({"g_idx": torch.zeros(8)}, "g_idx.dtype: got float32"),
        ({"scales": torch.ones(1, 8).to_sparse()}, "scales: got a torch.sparse_coo tensor"),
        ({"qweight": np.zeros((1, 8), np.int32)}, "qweight: got a numpy"), ({"qzeros": None}, "qzeros: got NoneType"),
    ],
)  # fmt: skip
def test_checkpoints_are_named(change: dict[str, Any], says: str) -> None:
    good = {"qweight": torch.tensor(GPTQ_ROWS, dtype=torch.int32), "qzeros": torch.zeros(1, 1, dtype=torch.int32),
            "scales": torch.ones(1, 8), "version": 2}  # fmt: skip
    QuantTensor.from_gptq(**good)
    with pytest.raises(ArgumentError, match="^" + says):
        QuantTensor.from_gptq(**{**good, **change})


def test_nothing_costs_nothing_and_bad_costs_are_named() -> None:
    assert prepack_cost(QuantTensor.quantize(torch.zeros(0, 128), "int4", 32)) == (0.0, 0)
    qt = QuantTensor(PLANES, "int4", (4, 64), 32)
    for name, value in (("saved", 0), ("saved", 2), ("bytes_per_second", 0), ("bytes_per_second", float("nan"))):
        with pytest.raises(ArgumentError, match=f"^{name}: got"):
            prepack_cost(qt, **{name: value})
    for device in ("nowhere", 3.5, "cuda:x"):
        with pytest.raises(ArgumentError, match="^device: got"):
            qt.to(device)  # type: ignore[arg-type]


def test_a_tree_of_planes_is_rebuilt_with_any_leaves() -> None:
    from torch.utils import _pytree as pytree

    qt = QuantTensor(PLANES, "int4", (4, 64), 32, torch.randperm(64))
    shapes = pytree.tree_map(lambda t: tuple(t.shape), qt)
    assert shapes.planes == {"codes": (4, 32), "scales": (4, 2)} and shapes.perm == (64,)
    back = pytree.tree_map(lambda t: t.clone(), qt)
    assert torch.equal(back.dequantize(), qt.dequantize())
