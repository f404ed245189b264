"""The host runtime: blocks, barriers, warp collectives, atomics, cp.async and mma.sync on real kernels."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from . import harness as h

rng = np.random.default_rng(0)

REDUCE = """
template <int Threads> struct ReduceSmem { float partial[Threads / 32]; };
template <int Threads>
__global__ void row_sum(const float* x, float* y, int n) {
  PK_SMEM(ReduceSmem<Threads>, s);
  float a = 0;
  for (int i = threadIdx.x; i < n; i += Threads) a += x[(size_t)blockIdx.x * n + i];
  a = pk::block_sum<Threads>(a, s.partial);
  if (threadIdx.x == 0) y[blockIdx.x] = a;
}
"""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("seed", [0, 3])
def test_block_reduction(threads: int, seed: int) -> None:
    kernel = h.Kernel(REDUCE, "row_sum<256>")
    x, y = h.copy_of(rng.integers(-9, 9, (37, 1000)), np.float32), h.aligned(37)
    h.launch(kernel, 37, 256, x, h.out(y), 1000, options=h.Options(threads=threads, seed=seed))
    assert (y == x.sum(1)).all()


TRANSPOSE = """
struct Tile { float t[32][33]; };
__global__ void transpose(const float* x, float* y, int rows, int cols) {
  PK_SMEM(Tile, s);
  int c = blockIdx.x * 32 + threadIdx.x, r0 = blockIdx.y * 32;
  for (int i = threadIdx.y; i < 32; i += 8)
    if (r0 + i < rows && c < cols) s.t[i][threadIdx.x] = x[(size_t)(r0 + i) * cols + c];
  __syncthreads();
  int r = r0 + threadIdx.x, c0 = blockIdx.x * 32;
  for (int i = threadIdx.y; i < 32; i += 8)
    if (r < rows && c0 + i < cols) y[(size_t)(c0 + i) * rows + r] = s.t[threadIdx.x][i];
}
"""


def test_transpose() -> None:
    kernel = h.Kernel(TRANSPOSE, "transpose")
    x = h.copy_of(rng.standard_normal((70, 50)), np.float32)
    y = h.aligned((50, 70))
    for seed in (0, 1, 2):
        h.launch(kernel, (2, 3), (32, 8), x, h.out(y), 70, 50, options=h.Options(seed=seed))
        assert (y == x.T).all()


WARP = """
__global__ void warp(int* y, float* f, double* d) {
  const int l = threadIdx.x;
  int i = 0;
  auto put = [&](int v) { y[i++ * 32 + l] = v; };
  put(__shfl_sync(~0u, l * 3, 5));
  put(__shfl_sync(~0u, l * 3, l + 1, 8));
  put(__shfl_up_sync(~0u, l, 2));
  put(__shfl_up_sync(~0u, l, 3, 16));
  put(__shfl_down_sync(~0u, l, 4));
  put(__shfl_down_sync(~0u, l, 1, 8));
  put(__shfl_xor_sync(~0u, l, 9));
  put(__shfl_xor_sync(~0u, l, 8, 8));
  put(__ballot_sync(~0u, l % 3 == 0));
  put(__any_sync(~0u, l == 7));
  put(__any_sync(~0u, l == 77));
  put(__all_sync(~0u, l < 32));
  put(__all_sync(~0u, l < 31));
  put(__match_any_sync(~0u, l / 5));
  int p;
  put(__match_all_sync(~0u, 7, &p));
  put(p);
  put(__match_all_sync(~0u, l / 31, &p));
  put(p);
  put(__reduce_add_sync(~0u, l - 10));
  put(__reduce_min_sync(~0u, l - 10));
  put(__reduce_max_sync(~0u, l - 10));
  put(__reduce_max_sync(~0u, (unsigned)(l - 10)));
  put(__reduce_and_sync(~0u, (unsigned)(l | 64)));
  put(__reduce_or_sync(~0u, (unsigned)l));
  put(__reduce_xor_sync(~0u, (unsigned)l * l));
  int half = -1;
  if (l < 16) half = __shfl_xor_sync(0x0000ffffu, l, 1); else half = __shfl_down_sync(0xffff0000u, l, 2);
  put(half);
  __syncwarp();
  f[l] = pk::warp_sum((float)l);
  d[l] = __shfl_xor_sync(~0u, l * 0.5, 1);
}
"""


def test_warp_collectives() -> None:
    kernel = h.Kernel(WARP, "warp")
    y, f, d = h.aligned((26, 32), np.int32), h.aligned(32), h.aligned(32, np.float64)
    lane = np.arange(32)

    def picked(source: np.ndarray, ok: np.ndarray) -> np.ndarray:
        return np.where(ok, source, lane)

    match_any = [sum(1 << k for k in range(32) if k // 5 == v // 5) for v in range(32)]
    full = -1
    xor = int(np.bitwise_xor.reduce(lane * lane))
    want = [
        np.full(32, 15), ((lane & 24) | (lane + 1) & 7) * 3, picked(lane - 2, lane >= 2),
        picked(lane - 3, lane % 16 >= 3), picked(lane + 4, lane < 28), picked(lane + 1, lane % 8 < 7), lane ^ 9,
        np.where(lane & 8, lane ^ 8, lane), sum(1 << v for v in range(0, 32, 3)), 1, 0, 1, 0, match_any, full, 1, 0, 0,
        int((lane - 10).sum()), -10, 21, -1, 64, 31, xor,
        np.where(lane < 16, lane ^ 1, np.where(lane < 30, lane + 2, lane)),
    ]  # fmt: skip
    for seed in range(4):
        h.launch(kernel, 1, 32, h.out(y), h.out(f), h.out(d), options=h.Options(seed=seed))
        for i, w in enumerate(want):
            expected = (np.broadcast_to(np.asarray(w, np.int64), (32,)) & 0xFFFFFFFF).astype(np.uint32)
            assert (y[i].view(np.uint32) == expected).all(), i
        assert (f == 496).all() and (d == (lane ^ 1) * 0.5).all()


VOTES = """
__global__ void votes(int* y) {
  int t = threadIdx.x;
  y[t * 3] = __syncthreads_count(t % 3 == 0);
  y[t * 3 + 1] = __syncthreads_and(t < 64);
  y[t * 3 + 2] = __syncthreads_or(t == 65);
}
__global__ void early(int* y, int n) {
  int t = threadIdx.x;
  if (t >= n) return;
  y[t] = 1;
  __syncthreads();
  y[t] += __syncthreads_count(1);
}
__global__ void counters(int* sum, float* fsum, unsigned* most, int* cas) {
  atomicAdd(sum, (int)threadIdx.x);
  atomicAdd(fsum, 0.5f);
  atomicMax(most, blockIdx.x * 1000u + threadIdx.x);
  while (atomicCAS(cas, 0, 1) != 0) {}
  cas[1] += 1;
  __threadfence();
  atomicExch(cas, 0);
}
"""


def test_block_votes_and_early_exit() -> None:
    y = h.aligned((100, 3), np.int32)
    h.launch(h.Kernel(VOTES, "votes"), 1, 100, h.out(y))
    assert (y == [34, 0, 1]).all()
    y = h.aligned(128, np.int32, fill=0)
    h.launch(h.Kernel(VOTES, "early"), 1, 128, h.Arg(y, h.MUTATED), 50)
    assert (y[:50] == 51).all() and (y[50:] == 0).all()


@pytest.mark.parametrize("seed", [0, 5])
def test_atomics_and_a_spin_lock(seed: int) -> None:
    kernel = h.Kernel(VOTES, "counters")
    s, f, m, c = (h.aligned(2, d, fill=0) for d in (np.int32, np.float32, np.uint32, np.int32))
    h.launch(kernel, 40, 96, *[h.Arg(a, h.MUTATED) for a in (s, f, m, c)], options=h.Options(threads=2, seed=seed))
    assert s[0] == 40 * 96 * 95 // 2 and f[0] == 40 * 48 and m[0] == 39095 and c.tolist() == [0, 3840]


GEMM = """
struct GemmSmem { pk::bf16 a[2][64 * 32], b[2][64 * 32]; };
PK_DEVICE int at(int r, int c) { return pk::swizzle_chunk<4>(r, c) * 8; }
// a [m, k], b [n, k], c [m, n]; 64 x 64 x 32 tiles, two stages of cp.async
template <bool Wait>
__global__ void gemm(const pk::bf16* a, const pk::bf16* b, float* c, int m, int n, int k) {
  PK_SMEM(GemmSmem, s);
  const int tid = threadIdx.x, lane = tid % 32, wm = tid / 64 * 32, wn = tid / 32 % 2 * 32;
  const int m0 = blockIdx.y * 64, n0 = blockIdx.x * 64;
  float acc[2][4][4] = {};
  auto load = [&](int k0, int stage) {
    for (int i = 0; i < 2; ++i) {
      int v = tid + i * 128, r = v / 4, ch = v % 4;
      bool pa = m0 + r < m && k0 + ch * 8 < k, pb = n0 + r < n && k0 + ch * 8 < k;
      pk::cp_async<16>(&s.a[stage][at(r, ch)], pa ? a + (size_t)(m0 + r) * k + k0 + ch * 8 : a, pa);
      pk::cp_async<16>(&s.b[stage][at(r, ch)], pb ? b + (size_t)(n0 + r) * k + k0 + ch * 8 : b, pb);
    }
    pk::cp_async_commit();
  };
  load(0, 0);
  int stage = 0;
  for (int k0 = 0; k0 < k; k0 += 32, stage ^= 1) {
    if (k0 + 32 < k) {
      load(k0 + 32, stage ^ 1);
      if (Wait) pk::cp_async_wait<1>();
    } else if (Wait) pk::cp_async_wait<0>();
    __syncthreads();
    for (int kk = 0; kk < 2; ++kk) {
      uint32_t fa[2][4], fb[4][2];
      for (int i = 0; i < 2; ++i)
        pk::ldmatrix<4>(fa[i], &s.a[stage][at(wm + i * 16 + pk::ldm_a_row(lane), kk * 2 + pk::ldm_a_col(lane) / 8)]);
      for (int j = 0; j < 2; ++j)
        pk::ldmatrix<4>(fb[2 * j],
                        &s.b[stage][at(wn + j * 16 + pk::ldm_b_row(lane), kk * 2 + pk::ldm_b_col(lane) / 8)]);
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 4; ++j) pk::mma_m16n8k16<pk::bf16>(acc[i][j], fa[i], fb[j]);
    }
    __syncthreads();
  }
  for (int i = 0; i < 2; ++i) for (int j = 0; j < 4; ++j) for (int r = 0; r < 4; ++r) {
    int row = m0 + wm + i * 16 + pk::mma_row(lane, r), col = n0 + wn + j * 8 + pk::mma_col(lane, r);
    if (row < m && col < n) c[(size_t)row * n + col] = acc[i][j][r];
  }
}
"""


def to_bf16(x: np.ndarray) -> np.ndarray:
    u = np.asarray(x, np.float32).view(np.uint32)
    return h.copy_of(((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype(np.uint16))


def from_bf16(u: np.ndarray) -> np.ndarray:
    return (u.astype(np.uint32) << 16).view(np.float32)


def gemm_error(kernel: h.Kernel, m: int, n: int, k: int, options: h.Options) -> float:
    a, b = to_bf16(rng.standard_normal((m, k))), to_bf16(rng.standard_normal((n, k)))
    c = h.aligned((m, n))
    h.launch(kernel, (-(-n // 64), -(-m // 64)), 128, a, b, h.out(c), m, n, k, options=options)
    ref = from_bf16(a).astype(np.float64) @ from_bf16(b).T
    return float(np.abs(c - ref).max() / np.abs(ref).max())


@pytest.mark.parametrize("order", [h.EAGER, h.LAZY, h.RANDOM])
@pytest.mark.parametrize("seed", [0, 1])
def test_gemm_with_cp_async(order: int, seed: int) -> None:
    kernel = h.Kernel(GEMM, "gemm<true>")
    for m, n, k in ((128, 128, 128), (70, 65, 40)):
        assert gemm_error(kernel, m, n, k, h.Options(async_order=order, seed=seed)) < 1e-6


def test_a_missing_wait_shows_when_copies_are_lazy() -> None:
    kernel = h.Kernel(GEMM, "gemm<false>")
    assert gemm_error(kernel, 64, 64, 64, h.Options(async_order=h.EAGER)) < 1e-6
    assert not gemm_error(kernel, 64, 64, 64, h.Options(async_order=h.LAZY)) < 1e-2


WRONG = """
__global__ void div_line(float* y) {
  if (threadIdx.x < 32) __syncthreads();
  else __syncthreads();
  y[threadIdx.x] = 1;
}
__global__ void div_some(float* y) {
  if (threadIdx.x != 40) __shfl_sync(~0u, 1, 0);
  else __syncwarp();
  y[threadIdx.x] = 1;
}
__global__ void waits(float* y) {
  if (threadIdx.x < 40) y[0] = __shfl_xor_sync(~0u, 1.f, 1);
  if (threadIdx.x >= 40) pk::named_barrier_sync(3, 64);
}
__global__ void inactive(float* y) {
  if (threadIdx.x < 16) y[threadIdx.x] = __shfl_sync(0xffffu, 1.f, 20);
}
__global__ void not_named(float* y) { y[0] = __shfl_sync(0xffffu, 1.f, 0); }
struct Big { float x[20000]; };
__global__ void big(float* y) { PK_SMEM(Big, s); y[0] = s.x[0]; }
__global__ void dyn(float* y) { PK_DYN_SMEM(Big, s); y[0] = s.x[0]; }
"""


@pytest.mark.parametrize(
    "name, threads, words",
    [
        ("div_line", 64, ["kernel.cuh:4", "kernel.cuh:3", "barrier divergence", "div_line", "thread (32,0,0)"]),
        ("div_some", 64, ["kernel.cuh:8", "warp divergence"]),
        ("waits", 64, ["deadlock in waits", "24 threads in a named barrier at kernel.cuh:14",
                       "8 threads in a shuffle at kernel.cuh:13"]),
        ("inactive", 32, ["kernel.cuh:17", "lane 0 reads lane 20", "does not take part"]),
        ("not_named", 32, ["kernel.cuh:19", "lane 16"]),
        ("big", 32, ["kernel.cuh:21", "80000 bytes of static shared memory"]),
        ("dyn", 32, ["kernel.cuh:22", "80000 bytes of dynamic shared memory"]),
    ],
)  # fmt: skip
def test_misuse_is_named_with_its_line(name: str, threads: int, words: list[str]) -> None:
    kernel = h.Kernel(WRONG, name)
    for seed in range(3):
        with pytest.raises(h.HostError) as error:
            h.launch(kernel, 1, threads, h.out(h.aligned(64)), options=h.Options(seed=seed))
        if seed == 0:
            for word in words:
                assert word in str(error.value)
    # the runtime is as good as new
    y = h.aligned(128, np.int32, fill=0)
    h.launch(h.Kernel(VOTES, "early"), 1, 128, h.Arg(y, h.MUTATED), 50)
    assert h.runtime().pkh_error() == b""


@pytest.mark.parametrize(
    "kw, word",
    [
        (dict(grid=1, block=1025), "1025 threads"), (dict(grid=0, block=32), "grid (0, 1, 1)"),
        (dict(grid=3, block=32, cluster=2), "no multiple of the cluster"),
        (dict(grid=1, block=32, smem=1 << 20), "dynamic shared memory"),
        (dict(grid=5000, block=32, flags=h.COOPERATIVE), "cooperative launch of 5000 blocks"),
    ],
)  # fmt: skip
def test_bad_launches_are_refused(kw: dict, word: str) -> None:
    kernel = h.Kernel(VOTES, "votes")
    kw = dict(kw)
    with pytest.raises(h.HostError, match=word.replace("(", r"\(").replace(")", r"\)")):
        h.launch(kernel, kw.pop("grid"), kw.pop("block"), h.out(h.aligned(9, np.int32)), **kw)


def test_launches_from_many_threads() -> None:
    kernel = h.Kernel(REDUCE, "row_sum<256>")
    bad: list[int] = []

    def work(i: int) -> None:
        x, y = h.copy_of(np.full((64, 512), i), np.float32), h.aligned(64)
        for _ in range(20):
            y[:] = -1
            h.launch(kernel, 64, 256, x, h.out(y), 512, options=h.Options(threads=2))
            if not (y == 512 * i).all():
                bad.append(i)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(5)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(60)
    assert not bad
