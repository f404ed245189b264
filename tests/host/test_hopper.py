"""mbarriers, named barriers, TMA, wgmma and clusters on the host runtime, under every order of asynchronous work."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from . import harness as h
from .kernels_hopper import CLUSTER, GEMM, RINGS, TMA
from .test_runtime import from_bf16, to_bf16

rng = np.random.default_rng(1)
SCHEDULES = list(product([h.EAGER, h.LAZY, h.RANDOM], [0, 1, 2]))


def gemm_smem(stages: int, n: int) -> int:
    return stages * (64 + n) * 128 + 1024


def gemm(kernel: h.Kernel, stages: int, tile_n: int, m: int, n: int, k: int, half: bool = False, **kw: int) -> float:
    if half:
        a, b = (h.copy_of(rng.standard_normal(s).astype(np.float16)) for s in ((m, k), (n, k)))
        fa, fb = a.astype(np.float64), b.astype(np.float64)
    else:
        a, b = to_bf16(rng.standard_normal((m, k))), to_bf16(rng.standard_normal((n, k)))
        fa, fb = from_bf16(a).astype(np.float64), from_bf16(b).astype(np.float64)
    c = h.aligned((m, n))
    maps = h.tensor_map(a, (64, 64)), h.tensor_map(b, (64, tile_n))
    h.launch(kernel, (-(-n // tile_n), -(-m // 64)), 256, *maps, h.out(c), m, n, k, smem=gemm_smem(stages, tile_n),
             options=h.Options(**kw))  # fmt: skip
    ref = fa @ fb.T
    return float(np.abs(c - ref).max() / np.abs(ref).max())


@pytest.mark.parametrize("order, seed", SCHEDULES)
def test_wgmma_gemm(order: int, seed: int) -> None:
    kernel = h.Kernel(GEMM, "gemm<3, 128, pk::bf16>")
    for m, n, k in ((128, 128, 256), (100, 136, 200)):
        assert gemm(kernel, 3, 128, m, n, k, async_order=order, seed=seed) < 2e-6


@pytest.mark.parametrize("tile_n", [8, 24, 72, 200, 256])
def test_wgmma_widths(tile_n: int) -> None:
    assert gemm(h.Kernel(GEMM, f"gemm<2, {tile_n}, pk::half>"), 2, tile_n, 70, tile_n + 8, 136, half=True) < 2e-6


def test_hopper_deadlocks_are_diagnosed() -> None:
    empty = "mbar_wait at " + h.line_of(GEMM, "pk::mbar_wait(&s.empty")
    full = "128 threads in mbar_wait at " + h.line_of(GEMM, "pk::mbar_wait(&s.full")
    for bug, words in ((1, ["deadlock", "1 thread in " + empty, full]), (3, ["deadlock", full])):
        with pytest.raises(h.HostError) as error:
            gemm(h.Kernel(GEMM, f"gemm<3, 128, pk::bf16, {bug}>"), 3, 128, 64, 128, 512)
        assert all(w in str(error.value) for w in words), str(error.value)


def test_releasing_a_stage_early_gives_wrong_numbers_when_wgmma_is_lazy() -> None:
    kernel = h.Kernel(GEMM, "gemm<3, 128, pk::bf16, 2>")
    errors = [gemm(kernel, 3, 128, 64, 128, 1024, async_order=h.RANDOM, seed=s) for s in range(1, 6)]
    assert any(not e < 1e-2 for e in errors), errors


@pytest.mark.parametrize("order, seed", SCHEDULES)
@pytest.mark.parametrize("poll", ["false", "true"])
def test_mbarrier_ring(order: int, seed: int, poll: str) -> None:
    kernel = h.Kernel(RINGS, f"ring<3, {poll}>")
    for n, threads in ((10, 128), (7, 512)):
        x, y = h.copy_of(rng.integers(-9, 9, (n, 32)), np.int32), h.aligned(threads - 32, np.int32)
        h.launch(kernel, 1, threads, x, h.out(y), n, options=h.Options(async_order=order, seed=seed))
        assert (y == np.tile((x**2).sum(0)[::-1], threads // 32 - 1)).all()


@pytest.mark.parametrize("seed", range(4))
def test_named_barriers(seed: int) -> None:
    x, y = h.copy_of(rng.integers(-9, 9, (9, 32)), np.int32), h.aligned(32, np.int32)
    h.launch(h.Kernel(RINGS, "named"), 1, 64, x, h.out(y), 9, options=h.Options(seed=seed))
    assert (y == x.sum(0)[::-1]).all()


def swizzled(box: np.ndarray, mode: int) -> np.ndarray:
    """Where TMA puts the bytes of a box [rows, row bytes] in shared memory aligned to 1024."""
    offset = np.arange(box.size)
    out = np.zeros(box.size, np.uint8)
    out[offset ^ ((offset >> 7) & ((1 << mode) - 1)) << 4] = box.reshape(-1)
    return out


@pytest.mark.parametrize("mode, columns", [(0, 96), (1, 8), (2, 16), (3, 32), (3, 16)])
@pytest.mark.parametrize("corner", [(0, 0), (-3, -2), (38, 15), (100, 3)])
def test_tma_load_and_store(mode: int, columns: int, corner: tuple[int, int]) -> None:
    rows = 12
    whole = h.copy_of(rng.integers(0, 1 << 30, (20, 44)), np.int32)
    x = whole[:, :41]  # a view: rows 176 bytes apart
    back = h.aligned((20, 44), np.int32, fill=0)
    raw = h.aligned(rows * columns * 4, np.uint8)
    kernel = h.Kernel(TMA, f"box<{rows * columns * 4}>")
    maps = h.tensor_map(x, (columns, rows), mode), h.tensor_map(back[:, :41], (columns, rows), mode)
    maps[1].role = h.MUTATED
    for order in (h.EAGER, h.LAZY, h.RANDOM):
        back[:] = 0
        h.launch(kernel, 1, 64, *maps, h.out(raw), *corner, options=h.Options(async_order=order))
        cx, cy = corner
        box = np.zeros((rows, columns), np.int32)
        want = np.zeros_like(back)
        for r, c in product(range(rows), range(columns)):
            if 0 <= cy + r < 20 and 0 <= cx + c < 41:
                box[r, c] = x[cy + r, cx + c]
                want[cy + r, cx + c] = x[cy + r, cx + c] ^ 0x01010101
        assert (raw == swizzled(box.view(np.uint8), mode)).all()
        assert (back == want).all()


def test_bulk_load() -> None:
    x, y = h.copy_of(np.arange(96 * 5), np.float32), h.aligned(96 * 5)
    for order in (h.EAGER, h.LAZY, h.RANDOM):
        h.launch(h.Kernel(TMA, "bulk<96>"), 5, 64, x, h.out(y), options=h.Options(async_order=order))
        assert (y.reshape(5, 96) == x.reshape(5, 96)[:, ::-1]).all()


@pytest.mark.parametrize("kw, word", [
    (dict(box=(64, 64), swizzle=3), "wider than the swizzle"), (dict(box=(3, 8), swizzle=0), "multiple of 16"),
    (dict(box=(8, 300), swizzle=0), "1 to 256"), (dict(box=(8, 8), swizzle=4), "swizzle 4"),
])  # fmt: skip
def test_tensor_maps_are_refused(kw: dict, word: str) -> None:
    with pytest.raises(h.HostError, match=word):
        h.tensor_map(h.aligned((100, 100), fill=0), **kw)


@pytest.mark.parametrize("size", [1, 2, 8])
@pytest.mark.parametrize("order, seed", [*SCHEDULES[::3], (h.RANDOM, 7)])
def test_clusters(size: int, order: int, seed: int) -> None:
    options = h.Options(async_order=order, seed=seed, threads=2)
    x, y = h.copy_of(rng.integers(-9, 9, 777), np.float32), h.aligned(2)
    h.launch(h.Kernel(CLUSTER, f"cluster_sum<{size}>"), 2 * size, 32, x, h.out(y), 777, cluster=size, options=options)
    assert (y == x.sum()).all()
    x, y = h.copy_of(rng.integers(-9, 9, (40, 32)), np.float32), h.aligned((2, size, 32))
    tile = h.tensor_map(x, (32, 8), 0)
    h.launch(h.Kernel(CLUSTER, f"multicast<{size}>"), 2 * size, 32, tile, h.out(y), 5, cluster=size, options=options)
    assert (y == x.sum(0) * np.arange(1, size + 1)[:, None]).all()
