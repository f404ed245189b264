"""quant_linear's 4-bit kernel: every weight bit for bit, whatever its scale and zero; planted errors; its tuning."""

from __future__ import annotations

import itertools
import json
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch

import pykern
from pykern import op as registry
from pykern.errors import ArgumentError
from pykern.numerics import same_bits
from pykern.ops import quant_linear
from pykern.plan import TARGETS, Plan, Target
from pykern.testing.laws import Where, mutants_are_caught

DTYPES = (torch.bfloat16, torch.float16)
LAYOUTS = ("int4", "packed4.v1")
DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def planes(dtype: torch.dtype, n: int, k: int, group: int, zeros: bool, seed: int) -> list[torch.Tensor]:
    """Codes of every value, scales of every size: normal, subnormal, largest, infinite, NaN, of either sign."""
    rng = torch.Generator().manual_seed(seed)
    groups = -(-k // (group or k))
    scales = torch.randn((n, groups), generator=rng).to(dtype)
    limit = torch.finfo(dtype)
    for value in (limit.max, limit.max / 8, limit.tiny, limit.smallest_normal / 16, float("inf"), float("nan"), 0.0):
        chosen = torch.rand((n, groups), generator=rng) < 0.08
        scales[chosen] = torch.sign(scales[chosen]) * torch.tensor(value, dtype=dtype)
    made = [torch.randint(0, 256, (n, k // 2), generator=rng, dtype=torch.uint8), scales]
    if zeros:
        made.append(torch.randint(0, 256, (n, groups), generator=rng, dtype=torch.uint8))
    return made


def variant(dtype: torch.dtype, m: int, k: int, packed: list[torch.Tensor], layout: str, group: int) -> str:
    op = registry.get("quant_linear")
    x = torch.empty(m, k, dtype=dtype, device=packed[0].device)
    problem = op.problem_of_args({"x": x, "planes": packed, "layout": layout,
                                  "group": group, "bias": None, "activation": "none", "residual": None})  # fmt: skip
    return op.planned(problem, TARGETS["90a"]).variant


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES, ids=name_of)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_weight_is_bit_for_bit_what_dequantize_gives(dtype: torch.dtype, layout: str, device: str) -> None:
    """Rows of x with a single one read the weights of its column: 0 * inf elsewhere is kept out by one row a column."""
    for seed, (group, zeros) in enumerate(itertools.product((32, 64, 128, 0), (False, True))):
        n, k = 40, 256 if layout != "int4" or group == 128 else 160
        packed = planes(dtype, n, k, group, zeros, seed)
        packed = [plane.to(device) for plane in packed]
        assert variant(dtype, 16, k, packed, layout, group) == "quant_nibbles"
        w = pykern.dequantize(packed, layout=layout, group=group, dtype=name_of(dtype))
        # A row of weights that are all finite gives them one by one; a row with others is compared as linear gives it.
        for first in range(0, k, 16 * 5):
            x = torch.zeros(min(16, k - first), k, dtype=dtype, device=device)
            x[torch.arange(len(x)), torch.arange(first, first + len(x))] = 1
            y = pykern.quant_linear(x, packed, layout=layout, group=group)
            finite = w.isfinite().all(1)
            picked = w[finite][:, first : first + len(x)].T
            if device == "cpu":  # tensor cores need not keep numbers that are subnormal in float32
                assert same_bits(y[:, finite], picked + 0.0), f"{layout} {group} {zeros}: k {first}"
            assert same_bits(y, pykern.linear(x, w)), f"{layout} {group} {zeros}: k {first}"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_scale_a_row_of_any_size(layout: str, device: str) -> None:
    """No infinite or NaN scale is near to hide what a large or a tiny one gives."""
    for dtype, k in itertools.product(DTYPES, (128, 1280)):
        packed = [plane.to(device) for plane in planes(dtype, 64, k, 0, True, 5)]
        w = pykern.dequantize(packed, layout=layout, dtype=name_of(dtype))
        x = torch.randn(4, k, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        y = pykern.quant_linear(x, packed, layout=layout)
        assert same_bits(y, pykern.linear(x, w))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", quant_linear.TUNING["row_tiles_16"])
def test_every_candidate_gives_the_same_bits(rows: int, device: str) -> None:
    """Tuning changes speed, not results: neither tiles nor stages, for rows alone nor in a batch."""
    dtype, n, k = torch.bfloat16, 72, 1024 * 5 + 128  # more slices a warp than stages, and a warp with one more
    packed = planes(dtype, n, k, 128, False, 9)
    packed[1] = torch.rand(n, k // 128).to(dtype) * 0.1
    packed = [plane.to(device) for plane in packed]
    x = torch.randn(12, k).to(device, dtype)
    want = pykern.linear(x, pykern.dequantize(packed, layout="int4", group=128, dtype="bfloat16"))
    arch = "90a" if device == "cpu" else registry.runtime().target(0).arch
    try:
        for stages in quant_linear.TUNING["stages_16"]:
            knobs = {"row_tiles_16": rows, "stages_16": stages, "row_tiles_8": rows, "stages_8": stages}
            registry.use_tuning(json.dumps({arch: {"quant_linear": knobs}}))
            with pykern.host(arch="90a", check=True) if device == "cpu" else nullcontext():
                assert same_bits(pykern.quant_linear(x, packed, layout="int4", group=128), want)
                alone = pykern.quant_linear(x[3:4], packed, layout="int4", group=128)
                assert same_bits(alone, want[3:4])
    finally:
        registry.use_tuning(None)


@pytest.mark.parametrize("k", [32, 96, 160, 224, 576])
@pytest.mark.parametrize("m", [1, 9])
def test_ends_of_k_that_are_no_whole_slice_are_no_finding(m: int, k: int) -> None:
    """ldmatrix reads whole slices: what lies past the end of k must have been written, too."""
    planes = pykern.quantize(torch.randn(21, k, generator=torch.Generator().manual_seed(k)).half(), "int4", 32)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(m)).half()
    assert variant(torch.float16, m, k, planes, "int4", 32) == "quant_nibbles"
    want = pykern.linear(x, pykern.dequantize(planes, "int4", 32, "float16"))
    for seed in (0, 1):
        with pykern.host(arch="90a", check=True, seed=seed):
            assert same_bits(pykern.quant_linear(x, planes, "int4", 32), want)


def test_a_knob_has_candidates() -> None:
    registry.use_tuning('{"90a": {"quant_linear": {"stages_8": 5}}}')
    try:
        with pytest.raises(ArgumentError, match=r"stages_8.*5.*4, 8"):
            quant_linear.knob(TARGETS["90a"], "stages_8")
    finally:
        registry.use_tuning(None)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("m", [1, 9])
def test_rings_fit_every_card(arch: str, m: int) -> None:
    """Any combination of knobs keeps within the shared memory of a block."""
    packed = planes(torch.bfloat16, 32, 256, 128, False, 1)
    op = registry.get("quant_linear")
    args = {"x": torch.empty(m, 256, dtype=torch.bfloat16), "planes": packed, "layout": "int4", "group": 128,
            "bias": None, "activation": "none", "residual": None}  # fmt: skip
    problem = op.problem_of_args(args)
    try:
        for values in itertools.product(*quant_linear.TUNING.values()):
            knobs = dict(zip(quant_linear.TUNING, values, strict=True))
            registry.use_tuning(json.dumps({arch: {"quant_linear": knobs}}))
            (launch,) = op.plan(problem, TARGETS[arch]).launches
            assert launch.smem <= TARGETS[arch].smem_optin
    finally:
        registry.use_tuning(None)


MUTANTS = (
    ("out[1] = prmt(low, high, 0x9591u);", "out[1] = prmt(low, high, 0xa6a2u);"),
    ("mul2<T>(zeros, 0xff00ff00u)", "mul2<T>(zeros, 0xfe80fe80u)"),
    ("read_from ^ 32", "read_from"),
    ("codes[i] += kNibbleRound / 2;", "codes[i] += kSkinnySlice / 2;"),
    ("groups[i][h][kScales == 1 ? 0 : u]", "groups[i][h][0]"),
    ("x[j] += kNibbleRound;", "x[j] += kSkinnySlice;"),
)


def test_planted_errors_are_caught() -> None:
    """As the law of planted errors, for the kernel that is not in the op's first source file."""
    op = registry.get("quant_linear")

    def plan(p: Any, target: Target) -> Plan:
        made = op.plan(p, target)
        return replace(made, launches=tuple(replace(la, source=la.source or op.source) for la in made.launches))

    with pykern.host(arch="90a"):
        mutants_are_caught(
            replace(op, plan=plan, source=quant_linear.NIBBLES_SOURCE, mutants=MUTANTS), Where("host", "90a")
        )
