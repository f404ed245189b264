"""linear's own algebra: exact integers, epilogues, strides, positions, classes. The laws are in test_laws.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pykern
from pykern import check
from pykern.errors import ArgumentError
from pykern.numerics import mismatch, same_bits
from pykern.op import Spec, get
from pykern.ops.linear import ACTIVATIONS, F32_TILES, MMA_TILES, OUT_DTYPES
from pykern.plan import TARGETS, host_target
from pykern.testing import sizes

OP = get("linear")
# One SM makes the plan take the largest tiles and most rows a thread; many make it take the smallest.
SMS = (1, 4, 512)


def integers(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, high: int = 9) -> torch.Tensor:
    """Small integers: every product and every partial sum is exact, whatever the order."""
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(1 - high, high, shape, generator=rng).to(dtype)


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def misaligned(t: torch.Tensor) -> torch.Tensor:
    """The same values one element off in memory, with rows one element longer than they need be."""
    rows, k = t.shape
    out = torch.full((rows * (k + 1) + 1,), float("nan"), dtype=t.dtype)[1:].as_strided((rows, k), (k + 1, 1))
    return out.copy_(t)


def agrees(y: torch.Tensor, **args: object) -> None:
    tol = OP.tolerance(str(y.dtype).removeprefix("torch."))
    problem = mismatch(y, OP.reference(**args), tol.rtol, tol.atol)
    assert problem is None, problem


def variant(sms: int, **args: object) -> str:
    return OP.planned(OP.problem_of_args(args), host_target("90a", sms)).variant


@given(st.data())
def test_exact_on_integers(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from((torch.float32, torch.bfloat16)))
    m = data.draw(sizes(1, 140, around=(8, 32, 64, 128)))
    n = data.draw(sizes(1, 140, around=(16, 32, 64, 128)))
    k = data.draw(sizes(1, 260, around=(16, 64, 128)))
    x, w = integers((m, k), 1, dtype), integers((n, k), 2, dtype)
    if data.draw(st.booleans()):
        x = misaligned(x)
    bias = integers((n,), 3, dtype) if data.draw(st.booleans()) else None
    residual = integers((m, n), 4) if data.draw(st.booleans()) else None
    want = x.double() @ w.double().T
    if bias is not None:
        want += bias.double()
    want = want.relu()
    if residual is not None:
        want += residual.double()
    with pykern.host(sms=data.draw(st.sampled_from(SMS))):
        y = pykern.linear(x, w, bias, activation="relu", residual=residual, out_dtype="float32")
    assert torch.equal(y.double(), want)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("m", [3, 20])
def test_epilogue_in_order(activation: str, m: int) -> None:
    """act(x w + bias) + residual, in float32 (bias before, residual after the activation), exact tails included."""
    x, w, bias, residual = normal((m, 50), 1), normal((37, 50), 2), normal((37,), 3) * 20, normal((m, 37), 4)
    args = {"x": x, "w": w, "bias": bias, "activation": activation, "residual": residual}
    agrees(pykern.linear(**args), **args)
    plain = {"x": x, "w": w, "activation": activation}
    agrees(pykern.linear(**plain), **plain)


@pytest.mark.parametrize("x_dtype,out", [(a, b) for a, outs in OUT_DTYPES.items() for b in outs if a != "float16"])
@pytest.mark.parametrize("m", [2, 70])
def test_output_dtypes(x_dtype: str, out: str, m: int) -> None:
    t, to = getattr(torch, x_dtype), getattr(torch, out)
    x, w, residual = normal((m, 64), 1, t), normal((24, 64), 2, t), normal((m, 24), 3, to)
    y = pykern.linear(x, w, residual=residual, out_dtype=out)
    assert y.dtype == to
    agrees(y, x=x, w=w, residual=residual)


def test_rounds_once() -> None:
    """A 16-bit result is the float32 result rounded: one rounding, not two."""
    x, w = normal((70, 96), 1, torch.bfloat16), normal((24, 96), 2, torch.bfloat16)
    bias = normal((24,), 3, torch.bfloat16)
    for m in (5, 70):
        wide = pykern.linear(x[:m], w, bias, activation="silu", out_dtype="float32")
        assert same_bits(pykern.linear(x[:m], w, bias, activation="silu"), wide.to(torch.bfloat16))


def test_float16_overflows_to_infinity() -> None:
    x = torch.full((2, 64), 200.0)
    y = pykern.linear(x, torch.full((8, 64), 200.0), out_dtype="float16")
    assert torch.equal(y, torch.full((2, 8), float("inf"), dtype=torch.float16))


@pytest.mark.parametrize("m", [1, 6, 20])
def test_row_strides(m: int) -> None:
    """Rows of a wider tensor (a split QKV), stride 0, and leading axes are honoured in x, w and residual."""
    wide_x, wide_w, wide_r = normal((m, 200), 1), normal((30, 150), 2), normal((m, 64), 3)
    x, w, residual = wide_x[:, 40:104], wide_w[:, 8:72], wide_r[:, 4:34]
    want = pykern.linear(x.contiguous(), w.contiguous(), residual=residual.contiguous())
    assert same_bits(pykern.linear(x, w, residual=residual), want)
    same = x[:1].expand(m, -1)
    assert same_bits(pykern.linear(same, w), pykern.linear(same.contiguous(), w))
    lead = normal((2, m, 64), 4)
    assert same_bits(pykern.linear(lead, w), pykern.linear(lead.view(2 * m, 64), w).view(2, m, 30))
    assert same_bits(pykern.linear(lead[0, 0], w), pykern.linear(lead[0, :1], w)[0])


def test_offsets_beyond_32_bits() -> None:
    """Two rows more than 2**31 elements apart (untouched memory costs nothing)."""
    far = 2**31 + 8

    def rows(values: torch.Tensor) -> torch.Tensor:
        try:
            storage = torch.empty(far + values.shape[1], dtype=values.dtype)
        except RuntimeError:
            pytest.skip("no 4 GB of address space")
        return storage.as_strided(tuple(values.shape), (far, 1)).copy_(values)

    x, w = integers((2, 64), 1, torch.bfloat16), integers((2, 64), 2, torch.bfloat16)
    want = (x.double() @ w.double().T).float()
    assert torch.equal(pykern.linear(rows(x), w, out_dtype="float32"), want)
    assert torch.equal(pykern.linear(x, rows(w), out_dtype="float32"), want)
    tall = torch.cat([x[:1].expand(65, -1), x[1:]])  # the kernel for many tokens
    assert torch.equal(pykern.linear(tall, rows(w), out_dtype="float32")[64:], want)
    residual = integers((2, 2), 3, torch.bfloat16)
    got = pykern.linear(x, w, residual=rows(residual))
    assert torch.equal(got.double(), (want.double() + residual.double()).to(torch.bfloat16).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_empty_and_small(dtype: torch.dtype) -> None:
    assert pykern.linear(torch.ones(0, 8, dtype=dtype), torch.ones(4, 8, dtype=dtype)).shape == (0, 4)
    assert pykern.linear(torch.ones(3, 8, dtype=dtype), torch.ones(0, 8, dtype=dtype)).shape == (3, 0)
    assert pykern.linear(torch.ones(1, 1, dtype=dtype), torch.full((1, 1), 3.0, dtype=dtype)).item() == 3.0
    for m in (2, 20, 70):  # an empty sum, in every kernel
        bias, residual = integers((5,), 1, dtype), integers((m, 5), 2, dtype)
        y = pykern.linear(
            torch.ones(m, 0, dtype=dtype), torch.ones(5, 0, dtype=dtype), bias, activation="relu", residual=residual
        )
        assert torch.equal(y, bias.relu() + residual)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [4, 20, 70])
def test_nan_and_inf_stay_in_their_row_and_column(dtype: torch.dtype, m: int) -> None:
    x, w = normal((m, 70), 1, dtype), normal((40, 70), 2, dtype)
    clean = pykern.linear(x, w, out_dtype="float32")
    x[1, 69], x[2, 3], w[5, 0] = float("nan"), float("inf"), float("nan")
    y = pykern.linear(x, w, out_dtype="float32")
    agrees(y, x=x, w=w)
    touched = torch.zeros_like(y, dtype=torch.bool)
    touched[1:3], touched[:, 5] = True, True
    assert torch.equal(y[~touched], clean[~touched])
    assert bool(y[1].isnan().all()) and bool(y[:, 5].isnan().all())
    for activation in ACTIVATIONS:
        poisoned = pykern.linear(x[:4], w, activation=activation)
        assert bool(poisoned[1].isnan().all()), activation


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [2, 20, 70])
def test_linear_under_powers_of_two(dtype: torch.dtype, m: int) -> None:
    """Scaling x or w by a power of two scales every rounding: exact."""
    x, w = normal((m, 90), 1, dtype), normal((33, 90), 2, dtype)
    y = pykern.linear(x, w, out_dtype="float32")
    assert same_bits(pykern.linear(x * 8, w, out_dtype="float32"), y * 8)
    assert same_bits(pykern.linear(x, w / 4, out_dtype="float32"), y / 4)
    assert same_bits(pykern.linear(-x, w, out_dtype="float32") + 0.0, -y + 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m", [7, 70])
def test_place_in_the_tile_does_not_matter(dtype: torch.dtype, m: int) -> None:
    """Permuting rows of x and of w permutes the result, bit for bit."""
    x, w = normal((m, 130), 1, dtype), normal((75, 130), 2, dtype)
    y = pykern.linear(x, w)
    rows, cols = torch.randperm(m), torch.randperm(75)
    assert same_bits(pykern.linear(x[rows], w[cols]), y[rows][:, cols])


def test_float32_is_one_class() -> None:
    """The same bits for a row in every batch, under every plan, with aligned and misaligned copies."""
    x, w, bias = normal((200, 132), 1), normal((140, 132), 2), normal((140,), 3)
    seen = set()
    want = pykern.linear(x, w, bias, activation="gelu_tanh")
    for sms in SMS:
        for m in (1, 2, 8, 9, 33, 65, 200):
            with pykern.host(sms=sms):
                y = pykern.linear(x[:m], w, bias, activation="gelu_tanh")
            seen.add(variant(sms, x=x[:m], w=w))
            assert same_bits(y, want[:m]), (sms, m)
    for m in (1, 8, 40):
        y = pykern.linear(misaligned(x[:m]), misaligned(w), bias, activation="gelu_tanh")
        assert same_bits(y, want[:m]), m
    tiles = {f"f32_{t.bm}x{t.bn}" for t in F32_TILES}
    assert tiles | {"f32_skinny_1x1", "f32_skinny_4x1", "f32_skinny_1x8", "f32_skinny_4x8"} <= seen, seen


@pytest.mark.parametrize("counts", [(1, 2, 9, 17, 40, 64), (65, 128, 129, 200)])
def test_16_bit_has_two_classes(counts: tuple[int, ...]) -> None:
    x, w = normal((200, 136), 1, torch.bfloat16), normal((140, 136), 2, torch.bfloat16)
    want = pykern.linear(x[: counts[-1]], w, out_dtype="float32")
    seen = set()
    for sms in SMS:
        for m in counts:
            with pykern.host(sms=sms):
                y = pykern.linear(x[:m], w, out_dtype="float32")
            seen.add(variant(sms, x=x[:m], w=w))
            assert same_bits(y, want[:m]), (sms, m)
    for m in (counts[0], counts[-1]):  # copies of one element, then of two
        assert same_bits(pykern.linear(misaligned(x[:m]), w, out_dtype="float32"), want[:m])
        even = x.new_empty(m, 138)[:, :136].copy_(x[:m])
        assert same_bits(pykern.linear(even, w, out_dtype="float32"), want[:m])
    every = {f"mma_skinny_{8 * t}" for t in (1, 2, 4, 8)} if counts[0] == 1 else {
        f"mma_{t.bm}x{t.bn}" for t in MMA_TILES
    }  # fmt: skip
    assert every <= seen, seen


def test_order_of_the_float32_chain() -> None:
    """k runs from 0 up with one rounding a step: 2**24 + 1 + 1 stays 2**24, 1 + 1 + 2**24 does not."""
    big = 2.0**24
    for m in (1, 20):
        x = torch.ones(m, 3)
        w = torch.tensor([[big, 1.0, 1.0], [1.0, 1.0, big]])
        assert pykern.linear(x, w).tolist() == [[big, big + 2]] * m


# (m, n, SMs, dtype): one block of each kernel. Wavefronts are the least possible but for the epilogue, which reads 32
# bytes a lane, and the last sum of the skinny kernel.
TRACED = [(1, 32, 4, "float32"), (128, 64, 1, "float32"), (1, 16, 4, "bfloat16"), (128, 256, 1, "bfloat16")]


@pytest.mark.parametrize("m,n,sms,dtype", TRACED)
def test_traffic(m: int, n: int, sms: int, dtype: str) -> None:
    """Aligned problems: whole sectors, no bank conflicts in the main loops, x and w read once."""
    t = getattr(torch, dtype)
    x, w = normal((m, 128), 1, t), normal((n, 128), 2, t)
    with pykern.host(trace=True, sms=sms), check.recording() as reports:
        pykern.linear(x, w)
    lines = reports[0]["lines"]
    assert {(row["space"], row["op"]) for row in lines} >= {("global", "load"), ("global", "store"), ("shared", "load")}
    for row in lines:
        skinny_sum = row["file"] == "linear_skinny_mma.cuh" and row["bytes"] == 4 and row["op"] == "load"
        allowed = 2 if row["file"] == "linear_epilogue.cuh" or skinny_sum else 1
        assert row["wavefronts"] <= allowed * row["ideal_wavefronts"], row
        assert row["sectors"] == row["ideal_sectors"] or row["op"] == "store", row
    loaded = sum(row["sectors"] * 32 for row in lines if row["space"] == "global" and row["op"] == "load")
    assert loaded == (m + n) * 128 * t.itemsize


def test_out_may_be_the_residual() -> None:
    x, w, residual = normal((20, 40), 1), normal((30, 40), 2), normal((20, 30), 3)
    want = pykern.linear(x, w, residual=residual)
    assert pykern.linear(x, w, residual=residual, out=residual) is residual
    assert same_bits(residual, want)


X, W = torch.ones(4, 8), torch.ones(6, 8)
BAD = [
    ({"w": torch.ones(6, 9)}, "w.shape"),
    ({"w": torch.ones(8)}, "w.dim"),
    ({"w": W.half()}, "w.dtype"),
    ({"x": X.double(), "w": W.double()}, "x.dtype"),
    ({"x": torch.ones(8, 4).T}, "x.stride"),
    ({"w": torch.ones(8, 6).T}, "w.stride"),
    ({"x": torch.ones(4, 3, 8).transpose(0, 1)}, "x.stride"),
    ({"bias": torch.ones(5)}, "bias.shape"),
    ({"bias": torch.ones(6).bfloat16()}, "bias.dtype"),
    ({"bias": torch.ones(1).expand(6)}, "bias.stride"),
    ({"residual": torch.ones(4, 5)}, "residual.shape"),
    ({"residual": torch.ones(4, 6).half()}, "residual.dtype"),
    ({"residual": torch.ones(6, 4).T}, "residual.stride"),
    ({"residual": torch.ones(4, 6), "out_dtype": "float16"}, "residual.dtype"),
    ({"activation": "tanh"}, "activation"),
    ({"out_dtype": "float64"}, "out_dtype"),
    ({"x": X.half(), "w": W.half(), "out_dtype": "bfloat16"}, "out_dtype"),
    ({"out": torch.empty(4, 7)}, "out.shape"),
    ({"out": torch.empty(4, 6).half()}, "out.dtype"),
    ({"out": torch.empty(6, 4).T}, "out.stride"),
    ({"w": "w"}, "w"),
    ({"activation": 3}, "activation"),
]


@pytest.mark.parametrize("change,name", BAD, ids=[f"{n}-{i}" for i, (_, n) in enumerate(BAD)])
def test_refused_by_name(change: dict[str, object], name: str) -> None:
    with pytest.raises(ArgumentError) as error:
        pykern.linear(**{"x": X, "w": W, **change})
    assert str(error.value).startswith(name) and "allowed" in str(error.value)


@pytest.mark.parametrize("arch", TARGETS)
def test_plans(arch: str) -> None:
    """Big problems get big tiles where they fit; skinny ones read the weights once; every plan can be launched."""

    def chosen(dtype: str, m: int, n: int, k: int) -> str:
        case = {"x": Spec(dtype, (m, k)), "w": Spec(dtype, (n, k))}
        return OP.planned(OP.problem_of(case), TARGETS[arch]).variant  # check_plan raises what cannot be launched

    large = TARGETS[arch].smem_optin >= 3 * (128 + 256) * 64 * 2
    assert chosen("bfloat16", 4096, 4096, 4096) == ("mma_128x256" if large else "mma_128x128")
    assert chosen("bfloat16", 65, 576, 576) == "mma_64x64"
    assert chosen("float32", 4096, 4096, 4096) == "f32_128x64"
    assert chosen("float32", 9, 64, 64) == "f32_32x64"
    assert chosen("float16", 1, 4096, 4096) == "mma_skinny_8"
    assert chosen("float32", 1, 4096, 4096) == "f32_skinny_1x1"
    big = OP.problem_of({"x": Spec("bfloat16", (2**31 - 300, 8)), "w": Spec("bfloat16", (8, 8))})
    assert OP.planned(big, TARGETS[arch]).launches
    with pytest.raises(ArgumentError, match=r"x\.shape"):
        OP.problem_of({"x": Spec("bfloat16", (2**31, 8)), "w": Spec("bfloat16", (8, 8))})
