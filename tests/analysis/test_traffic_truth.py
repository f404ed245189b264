"""The traffic formula against the truth: unique bytes that the host checker counts while pykern's kernels run.

A chain's fused bytes are what its fused kernel touches, its unfused bytes what the separate kernels touch, each
tensor's reads and writes counted once a kernel, all exact.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from pykern.analysis.coalescing_table import rank, read_table
from pykern.analysis.traffic_chains import parse_chain

torch = pytest.importorskip("torch")

DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


def touched(op: str, *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """(unique bytes read and written by the launches of one call, its result)."""
    from pykern import check
    from pykern import op as registry

    with check.recording() as reports, registry.host(check=True, trace=True):
        result = registry.get(op)(*args, **kwargs)
    launches = [launch for report in reports for launch in report["launches"]]
    assert launches, "the checker reported no launch"
    return sum(la["unique_bytes_read"] + la["unique_bytes_written"] for la in launches), result


def random(*shape: int, dtype: str = "bf16") -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(
        getattr(torch, DTYPES[dtype])
    )


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("batch", [1, 5])
def test_residual_and_norm_in_one_kernel(dtype: str, batch: int) -> None:
    x, r, w = random(batch, 256, dtype=dtype), random(batch, 256, dtype=dtype), random(256, dtype=dtype)
    moved = parse_chain("256 -> add keep -> norm", dtype=dtype).traffic(batch)
    assert touched("rms_norm", x, w, residual=r)[0] == moved.fused


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("batch", [1, 6])
def test_gate_up_fused_and_unfused(dtype: str, batch: int) -> None:
    """x Wgu then SiLU x gate as two kernels, against the gated product as one."""
    k, n = 64, 96
    x, gate, up = random(batch, k, dtype=dtype), random(n, k, dtype=dtype), random(n, k, dtype=dtype)
    moved = parse_chain(f"{k} -> linear {2 * n} -> silu_mul", dtype=dtype).traffic(batch)
    first, both = touched("linear", x, torch.cat([gate, up]))
    second, _ = touched("silu_and_mul", both)
    assert first + second == moved.unfused
    assert touched("gated_linear", x, gate, up)[0] == moved.fused


@pytest.mark.parametrize("batch", [1, 6])
def test_gated_mlp_unfused_and_in_two_kernels(batch: int) -> None:
    k, n = 64, 96
    x, gate, up, down = random(batch, k), random(n, k), random(n, k), random(k, n)
    chain = parse_chain(f"{k} -> linear {2 * n} -> silu_mul -> linear {k}")
    first, both = touched("linear", x, torch.cat([gate, up]))
    second, hidden = touched("silu_and_mul", both)
    third, _ = touched("linear", hidden, down)
    assert first + second + third == chain.traffic(batch).unfused
    assert sum(b for _, b, _ in chain.steps_traffic(batch)) == first + second + third
    fused, hidden = touched("gated_linear", x, gate, up)
    last, _ = touched("linear", hidden, down)
    assert fused + last == chain.traffic(batch).fused + 2 * batch * n * 2, "one intermediate is left"


@pytest.mark.parametrize("batch", [1, 6])
def test_linear_bias_activation_in_one_kernel(batch: int) -> None:
    k, n = 64, 96
    moved = parse_chain(f"{k} -> linear {n} -> bias -> gelu").traffic(batch)
    assert touched("linear", random(batch, k), random(n, k), random(n), activation="gelu")[0] == moved.fused


def test_softmax_and_activation_alone() -> None:
    assert touched("softmax", random(3, 200))[0] == parse_chain("200 -> softmax").traffic(3).fused
    assert touched("silu_and_mul", random(3, 200))[0] == parse_chain("200 -> silu_mul").traffic(3).fused


def test_decode_attention_in_one_kernel() -> None:
    heads, kv, dim, keys = 4, 2, 64, 40
    q, k, v = random(1, heads, dim), random(keys, kv, dim), random(keys, kv, dim)
    text = f"{heads * dim} -> scores heads={heads} kv={kv} dim={dim} keys={keys} -> softmax -> values"
    assert touched("attention", q, k, v)[0] == parse_chain(text).traffic(1).fused


def test_the_checkers_table_of_a_real_kernel_is_ranked() -> None:
    """Rows of 201 bf16 start inside a sector and are read an element at a time: every line that loads wastes."""
    from pykern import check
    from pykern import op as registry

    with check.recording() as reports, registry.host(check=True, trace=True):
        registry.get("softmax")(random(6, 256))
        registry.get("softmax")(random(6, 201))
    even, odd = (rank(read_table(json.dumps(report)), 4800, 30000) for report in reports)
    assert {line.space for line, _ in even} >= {"global"} and all(
        line.ideal <= line.actual for line, _ in even + odd
    )
    assert sum(line.wasted for line, _ in even if line.space == "global") == 0
    assert odd[0][0].space == "global" and odd[0][0].wasted > 0 and odd[0][1] > 0
    assert sum(line.unique_bytes for line, _ in odd if line.space == "global") >= 2 * 6 * 201 * 2


def test_a_wrong_formula_is_caught() -> None:
    """What the exact equality above can tell apart: an intermediate counted once, a weight counted twice."""
    x, gate, up = random(5, 64), random(96, 64), random(96, 64)
    moved = parse_chain("64 -> linear 192 -> silu_mul").traffic(5)
    first, both = touched("linear", x, torch.cat([gate, up]))
    total = first + touched("silu_and_mul", both)[0]
    wrong: list[Callable[[Any], int]] = [lambda m: m.fused + m.intermediates, lambda m: m.unfused + m.weights]
    assert all(formula(moved) != total for formula in wrong)
