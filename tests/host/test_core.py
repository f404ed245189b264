"""The portable vocabulary of cuda_src/core: as kernels on the host runtime, and as pure functions.

What needs nvcc (headers compile for every arch, PTX widths) is in test_core_nvcc.py.
"""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch
from _native import address, compile_host, convert

from . import harness
from .harness import Kernel, aligned, copy_of, launch, out


def bf16_values(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


# ---- vectors

COPY = """
template <class T, int N> __global__ void copy(const T* x, T* y, T* z) {
  const int i = (blockIdx.x * blockDim.x + threadIdx.x) * N;
  pk::st_vec<T, N>(y + i, pk::ld_vec<T, N>(x + i));
  pk::st_vec_stream<T, N>(z + i, pk::ld_vec_stream<T, N>(x + i));
}
"""


@pytest.mark.parametrize(
    "ctype,n",
    [
        ("unsigned char", 1),
        ("unsigned char", 16),
        ("pk::half", 4),
        ("float", 1),
        ("float", 4),
        ("pk::bf16", 8),
    ],
)
def test_vector_copies(ctype: str, n: int) -> None:
    rng = np.random.default_rng(0)
    width = {"unsigned char": 1, "float": 4}.get(ctype, 2)
    x = copy_of(rng.integers(0, 255, 64 * n * width, dtype=np.uint8))
    y, z = aligned(x.size, np.uint8), aligned(x.size, np.uint8)
    launch(Kernel(COPY, f"copy<{ctype}, {n}>", check=True), 2, 32, x, out(y), out(z))
    assert np.array_equal(x, y)
    assert np.array_equal(x, z)


def test_a_type_not_aligned_to_its_size_is_refused() -> None:
    with pytest.raises(AssertionError, match="aligned to its size"):
        compile_host(
            '#include "core/vec.cuh"\nstruct S { int a, b; };\nS f(const S* p) { return pk::ld(p); }\n'
        )
    with pytest.raises(AssertionError, match="1, 2, 4, 8 or 16 bytes"):
        compile_host(
            '#include "core/vec.cuh"\nusing V = pk::Vec<float, 8>;\nV f(const V* p) { return pk::ld(p); }\n'
        )


# ---- reductions

WARP = """
template <int W> __global__ void warp(const float* x, const int* n, float* sums, float* maxima, float* minima,
                                      int* isums, int* imax) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  sums[i] = pk::warp_sum<W>(x[i]);
  maxima[i] = pk::warp_max<W>(x[i]);
  minima[i] = pk::warp_min<W>(x[i]);
  isums[i] = pk::warp_sum<W>(n[i]);
  imax[i] = pk::warp_max<W>(n[i]) - pk::warp_min<W>(n[i]);
}
"""


def butterfly(x: np.ndarray, width: int) -> np.ndarray:
    """The sum over groups of `width` neighbours in the documented order: xor with width / 2, width / 4, ..., 1."""
    offset = width // 2
    while offset:
        x = (x + x[..., np.arange(x.shape[-1]) ^ offset]).astype(x.dtype)
        offset //= 2
    return x


@pytest.mark.parametrize("width", [1, 2, 8, 32])
def test_warp_reductions(width: int) -> None:
    rng = np.random.default_rng(width)
    x = copy_of(rng.standard_normal(256).astype(np.float32))
    n = copy_of(rng.integers(-1000, 1000, 256).astype(np.int32))
    outs = [aligned(256), aligned(256), aligned(256), aligned(256, np.int32), aligned(256, np.int32)]
    launch(Kernel(WARP, f"warp<{width}>", check=True), 2, 128, x, n, *[out(o) for o in outs])
    groups, integers = x.reshape(-1, width), n.reshape(-1, width)
    assert np.array_equal(
        outs[0].reshape(-1, width), butterfly(groups, width)
    )  # bits: the order is part of the contract
    assert np.array_equal(outs[1], groups.max(1).repeat(width))
    assert np.array_equal(outs[2], groups.min(1).repeat(width))
    assert np.array_equal(outs[3], integers.sum(1).repeat(width))
    assert np.array_equal(outs[4], np.ptp(integers, axis=1).repeat(width))


BLOCK = """
template <int Threads> struct Smem {
  float scratch[Threads / 32];
  int counts[Threads / 32];
  uint64_t words[Threads / 32];
};
template <int Threads> __global__ void __launch_bounds__(Threads) block(const float* x, float* y, int* counts,
                                                                           uint64_t* words) {
  using S = Smem<Threads>;
  PK_SMEM(S, smem);
  const float v = x[blockIdx.x * Threads + threadIdx.x];
  // One scratch array for three reductions in a row: each must be done with it when it returns.
  const float sum = pk::block_sum<Threads>(v, smem.scratch);
  const float high = pk::block_max<Threads>(v, smem.scratch);
  const float low = pk::block_min<Threads>(v, smem.scratch);
  float* out = y + (blockIdx.x * Threads + threadIdx.x) * 3;
  out[0] = sum; out[1] = high; out[2] = low;
  counts[blockIdx.x * Threads + threadIdx.x] = pk::block_sum<Threads>(v > 0.f ? 1 : 0, smem.counts);
  const uint64_t word = static_cast<uint64_t>(__float_as_uint(v)) << 32 | threadIdx.x;
  words[blockIdx.x * Threads + threadIdx.x] = pk::block_max<Threads>(word, smem.words);
}
"""


@pytest.mark.parametrize("threads", [32, 64, 96, 160, 288, 544, 1024])
def test_block_reductions(threads: int) -> None:
    rng = np.random.default_rng(threads)
    x = copy_of(rng.standard_normal((2, threads)).astype(np.float32))
    y, counts, words = aligned((2, threads, 3)), aligned((2, threads), np.int32), aligned((2, threads), np.uint64)
    each = x.view(np.uint32).astype(np.uint64) << np.uint64(32) | np.arange(threads, dtype=np.uint64)
    kernel = Kernel(BLOCK, f"block<{threads}>", check=True)
    for seed in (0, 1):
        options = harness.Options(seed=seed)
        launch(kernel, 2, threads, x, out(y), out(counts), out(words), options=options)
        warps = butterfly(x.reshape(2, -1, 32), 32)[:, :, 0]
        width = 1 << max(warps.shape[1] - 1, 0).bit_length()
        padded = np.zeros((2, width), np.float32)
        padded[:, : warps.shape[1]] = warps
        want = butterfly(padded, width)[:, :1]
        assert np.array_equal(y[..., 0], want.repeat(threads, 1))  # bits, in every thread
        assert np.array_equal(y[..., 1], x.max(1, keepdims=True).repeat(threads, 1))
        assert np.array_equal(y[..., 2], x.min(1, keepdims=True).repeat(threads, 1))
        assert np.array_equal(counts, (x > 0).sum(1, keepdims=True).repeat(threads, 1))
        assert np.array_equal(words, each.max(1, keepdims=True).repeat(threads, 1))


def test_the_checker_sees_a_block_reduction_without_its_barrier() -> None:
    """The same reduction written without the barrier that frees the scratch array is a race: the test has teeth."""
    source = """
struct Smem { float scratch[4]; };
__global__ void broken(const float* x, float* y) {
  PK_SMEM(Smem, smem);
  float total = 0.f;
  for (int round = 0; round < 2; ++round) {
    const float v = pk::warp_sum(x[threadIdx.x] + round);
    if (threadIdx.x % 32 == 0) smem.scratch[threadIdx.x / 32] = v;
    __syncthreads();
    for (int w = 0; w < 4; ++w) total += smem.scratch[w];
  }
  y[threadIdx.x] = total;
}
"""
    x, y = copy_of(np.ones(128, np.float32)), aligned(128)
    with pytest.raises(harness.HostError):
        launch(Kernel(source, "broken", check=True), 1, 128, x, out(y))


# ---- fragments: a warp's tile product through ldmatrix, swizzles and mma

TILE = """
// d[16, 16] = a[16, 64] b[64, 16], b stored [n, k] (kKMajor) or [k, n]; one warp.
template <class T, bool KMajor> struct TileSmem { T a[16 * 64]; T b[64 * 16]; };
template <class T, bool KMajor> __global__ void tile(const T* a, const T* b, float* d) {
  using S = TileSmem<T, KMajor>;
  PK_SMEM(S, smem);
  constexpr int kRowChunks = KMajor ? 8 : 2;  // chunks in a row of b
  const int lane = pk::lane_id();
  for (int i = lane; i < 16 * 8; i += 32)
    pk::st_vec<T, 8>(smem.a + pk::swizzle_chunk<8>(i / 8, i % 8) * 8, pk::ld_vec<T, 8>(a + i * 8));
  for (int i = lane; i < 16 * 8; i += 32)
    pk::st_vec<T, 8>(smem.b + pk::swizzle_chunk<kRowChunks>(i / kRowChunks, i % kRowChunks) * 8,
                     pk::ld_vec<T, 8>(b + i * 8));
  __syncwarp();
  float acc[2][4] = {};
  for (int k = 0; k < 64; k += 16) {
    uint32_t fa[4], fb[4];
    pk::ldmatrix<4>(fa, smem.a + pk::swizzle_chunk<8>(pk::ldm_a_row(lane), (k + pk::ldm_a_col(lane)) / 8) * 8);
    if constexpr (KMajor)
      pk::ldmatrix<4>(fb, smem.b + pk::swizzle_chunk<8>(pk::ldm_b_row(lane), (k + pk::ldm_b_col(lane)) / 8) * 8);
    else
      pk::ldmatrix<4, true>(fb, smem.b + pk::swizzle_chunk<2>(k + pk::ldm_bt_row(lane), pk::ldm_bt_col(lane) / 8) * 8);
    pk::mma_m16n8k16<T>(acc[0], fa, fb);
    pk::mma_m16n8k16<T>(acc[1], fa, fb + 2);
  }
  for (int j = 0; j < 2; ++j)
    for (int i = 0; i < 4; ++i) d[pk::mma_row(lane, i) * 16 + 8 * j + pk::mma_col(lane, i)] = acc[j][i];
}
"""


@pytest.mark.parametrize("name", ["half", "bf16"])
@pytest.mark.parametrize("k_major", ["true", "false"])
def test_tile_product(name: str, k_major: str) -> None:
    rng = np.random.default_rng(0)
    dtype = torch.float16 if name == "half" else torch.bfloat16
    a, b = (
        torch.from_numpy(rng.standard_normal(s).astype(np.float32)).to(dtype) for s in ((16, 64), (64, 16))
    )
    stored = b.T.contiguous() if k_major == "true" else b
    bits = [copy_of(t.view(torch.int16).numpy().view(np.uint16)) for t in (a, stored)]
    d = aligned((16, 16))
    launch(Kernel(TILE, f"tile<pk::{name}, {k_major}>", check=True), 1, 32, *bits, out(d))
    want = (a.double() @ b.double()).numpy()
    assert not (np.abs(d - want) > 1e-4).any()


def test_wgmma_accumulator_positions_cover_the_tile() -> None:
    library = compile_host(
        '#include "core/mma.cuh"\nextern "C" int row(int t, int i) { return pk::wgmma_row(t, i); }\n'
        'extern "C" int col(int t, int i) { return pk::wgmma_col(t, i); }\n'
    )
    for n in (8, 64, 256):
        seen = {(library.row(t, i), library.col(t, i)) for t in range(128) for i in range(n // 2)}
        assert seen == {(r, c) for r in range(64) for c in range(n)}
    assert [(library.row(37, i), library.col(37, i)) for i in (0, 1, 2, 4)] == [
        (17, 2),
        (17, 3),
        (25, 2),
        (17, 10),
    ]


@pytest.mark.parametrize("chunks", [2, 4, 8, 16])
def test_swizzles_are_permutations_without_bank_conflicts(chunks: int) -> None:
    library = compile_host(
        f'#include "core/mma.cuh"\nextern "C" int at(int r, int c) {{ return pk::swizzle_chunk<{chunks}>(r, c); }}\n'
    )
    rows = 64
    places = np.array([[library.at(r, c) for c in range(chunks)] for r in range(rows)])
    assert np.array_equal(np.sort(places.ravel()), np.arange(rows * chunks))
    assert (places // chunks == np.arange(rows)[:, None]).all()  # a chunk stays in its row
    for first in range(0, rows, 8):
        for c in range(chunks):  # the eight rows of an ldmatrix phase: eight different groups of four banks
            assert len(set(places[first : first + 8, c] % 8)) == 8, (first, c)
    if chunks == 8:  # TMA's 128-byte swizzle
        assert places[3, 5] == 3 * 8 + (5 ^ 3)


# ---- bit tricks, order and packed weights, as pure functions

PURE = """
#include "core/epilogue.cuh"
#include "core/order.cuh"
#include "core/quant.cuh"
#include <utility>
template <size_t... T> void tables(unsigned a, unsigned b, unsigned c, unsigned* out, std::index_sequence<T...>) {
  ((out[T] = pk::lop3<static_cast<int>(T)>(a, b, c)), ...);
}
extern "C" void lop3(unsigned a, unsigned b, unsigned c, unsigned* out) {
  tables(a, b, c, out, std::make_index_sequence<256>());
}
extern "C" unsigned prmt(unsigned a, unsigned b, unsigned s) { return pk::prmt(a, b, s); }
extern "C" void order(const float* x, const unsigned* index, uint64_t* words, int64_t* back, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    words[i] = pk::order_word(x[i], index[i]);
    back[i] = pk::order_index(words[i]);
  }
}
extern "C" void u4(const unsigned* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int j = 0; j < 8; ++j) out[8 * i + j] = pk::unpack_u4(in[i])[j];
}
template <class T, int Zero> void pairs(const unsigned* in, unsigned* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) pk::unpack_u4_pairs<T, Zero>(in[i], out + 4 * i);
}
extern "C" void half_0(const unsigned* in, unsigned* out, int64_t n) { pairs<pk::half, 0>(in, out, n); }
extern "C" void half_8(const unsigned* in, unsigned* out, int64_t n) { pairs<pk::half, 8>(in, out, n); }
extern "C" void bf16_0(const unsigned* in, unsigned* out, int64_t n) { pairs<pk::bf16, 0>(in, out, n); }
extern "C" void bf16_8(const unsigned* in, unsigned* out, int64_t n) { pairs<pk::bf16, 8>(in, out, n); }
extern "C" void s8(const unsigned* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int j = 0; j < 4; ++j) out[4 * i + j] = pk::unpack_s8(in[i])[j];
}
template <class T> void s8_pairs(const unsigned* in, unsigned* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) pk::unpack_s8_pairs<T>(in[i], out + 2 * i);
}
extern "C" void half_s8(const unsigned* in, unsigned* out, int64_t n) { s8_pairs<pk::half>(in, out, n); }
extern "C" void bf16_s8(const unsigned* in, unsigned* out, int64_t n) { s8_pairs<pk::bf16>(in, out, n); }
template <class T> void fp8(const unsigned* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int j = 0; j < 4; ++j) out[4 * i + j] = pk::unpack_fp8<T>(in[i])[j];
}
extern "C" void e4m3(const unsigned* in, float* out, int64_t n) { fp8<pk::fp8e4m3>(in, out, n); }
extern "C" void e5m2(const unsigned* in, float* out, int64_t n) { fp8<pk::fp8e5m2>(in, out, n); }
extern "C" void q4_0(const pk::BlockQ4_0* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int w = 0; w < 4; ++w) {
      const auto x = pk::decode_q4_0(pk::block_word(in + i, w), in[i].d);
      for (int j = 0; j < 4; ++j) out[32 * i + 4 * w + j] = x[j], out[32 * i + 16 + 4 * w + j] = x[j + 4];
    }
}
extern "C" void q4_1(const pk::BlockQ4_1* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int w = 0; w < 4; ++w) {
      const auto x = pk::decode_q4_1(pk::block_word(in + i, w), in[i].d, in[i].m);
      for (int j = 0; j < 4; ++j) out[32 * i + 4 * w + j] = x[j], out[32 * i + 16 + 4 * w + j] = x[j + 4];
    }
}
extern "C" void q8_0(const pk::BlockQ8_0* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i)
    for (int w = 0; w < 8; ++w) {
      const auto x = pk::decode_q8_0(pk::block_word(in + i, w), in[i].d);
      for (int j = 0; j < 4; ++j) out[32 * i + 4 * w + j] = x[j];
    }
}
extern "C" int interleaved(int j) { return pk::interleaved_nibble(j); }
template <pk::Act A> void act(const float* in, float* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) out[i] = pk::activate<A>(in[i]);
}
extern "C" void act_none(const float* in, float* out, int64_t n) { act<pk::Act::kNone>(in, out, n); }
extern "C" void act_relu(const float* in, float* out, int64_t n) { act<pk::Act::kRelu>(in, out, n); }
extern "C" void act_gelu(const float* in, float* out, int64_t n) { act<pk::Act::kGelu>(in, out, n); }
extern "C" void act_gelu_tanh(const float* in, float* out, int64_t n) { act<pk::Act::kGeluTanh>(in, out, n); }
extern "C" void act_silu(const float* in, float* out, int64_t n) { act<pk::Act::kSilu>(in, out, n); }
"""


@pytest.fixture(scope="module")
def pure() -> ctypes.CDLL:
    library = compile_host(PURE)
    library.prmt.restype = ctypes.c_uint32
    return library


def test_lop3_is_its_truth_table(pure: ctypes.CDLL) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (int(v) for v in rng.integers(0, 2**32, 3))
    got = np.empty(256, np.uint32)
    pure.lop3(ctypes.c_uint32(a), ctypes.c_uint32(b), ctypes.c_uint32(c), address(got))
    for table in range(256):
        want = 0
        for bit in range(32):
            row = (a >> bit & 1) << 2 | (b >> bit & 1) << 1 | (c >> bit & 1)
            want |= (table >> row & 1) << bit
        assert got[table] == want, table


def test_prmt(pure: ctypes.CDLL) -> None:
    a, b = 0x83020100, 0x07060584
    both = np.array([a, b], np.uint32).view(np.uint8)
    rng = np.random.default_rng(2)
    for selector in [0x7540, 0x4140, 0x3210, 0x7654, 0xB3A8, *map(int, rng.integers(0, 65536, 200))]:
        want = 0
        for i in range(4):
            pick = selector >> (4 * i) & 15
            byte = int(both[pick & 7])
            want |= ((0xFF if byte & 0x80 else 0) if pick & 8 else byte) << (8 * i)
        assert pure.prmt(ctypes.c_uint32(a), ctypes.c_uint32(b), ctypes.c_uint32(selector)) == want, hex(
            selector
        )


def test_order_words_sort_by_value_then_by_place(pure: ctypes.CDLL) -> None:
    """Any two finite or infinite values, equal ones, both zeros and NaN of every kind, at places up to 2^32 - 1."""
    rng = np.random.default_rng(3)
    special = np.float32([0.0, -0.0, 1.0, -1.0, np.inf, -np.inf, 1e-45, -1e-45, np.nan, -np.nan])
    x = np.concatenate([rng.integers(0, 2**32, 4000, dtype=np.uint32).view(np.float32), np.repeat(special, 20)])
    x = copy_of(x)
    index = copy_of(rng.choice(2**32, x.size, replace=False).astype(np.uint32))
    index[:2] = 0, 2**32 - 1
    order, back = aligned(x.size, np.uint64), aligned(x.size, np.int64)
    pure.order(address(x), address(index), address(order), address(back), ctypes.c_int64(x.size))
    nan = np.isnan(x)
    assert nan.sum() > 40
    assert np.array_equal(back, np.where(nan, 0, index.astype(np.int64)))
    # The largest word first: by value, equal values (so -0 and 0 too) by place, NaN last.
    want = np.lexsort((index, np.where(nan, np.inf, -x.astype(np.float64)), nan))
    assert np.array_equal(np.argsort(order)[::-1], want)


def words() -> np.ndarray:
    """Words in which every byte value stands in every place."""
    rng = np.random.default_rng(3)
    every = np.arange(256, dtype=np.uint8)
    return (
        np.stack([np.roll(every, int(s)) for s in rng.integers(0, 256, 4)], axis=1)
        .copy()
        .view(np.uint32)
        .ravel()
    )


def nibbles(word: np.ndarray) -> np.ndarray:
    return (word[:, None] >> (4 * np.arange(8, dtype=np.uint32)) & 15).astype(np.int64)


def test_unpack_u4(pure: ctypes.CDLL) -> None:
    word = words()
    got = np.empty((word.size, 8), np.float32)
    pure.u4(address(word), address(got), ctypes.c_int64(word.size))
    assert np.array_equal(got, nibbles(word))


@pytest.mark.parametrize("zero", [0, 8])
@pytest.mark.parametrize("name", ["half", "bf16"])
def test_unpack_u4_pairs(pure: ctypes.CDLL, name: str, zero: int) -> None:
    word = words()
    got = np.empty((word.size, 8), np.uint16)
    getattr(pure, f"{name}_{zero}")(address(word), address(got), ctypes.c_int64(word.size))
    value = got.view(np.float16).astype(np.float32) if name == "half" else bf16_values(got)
    want = nibbles(word)[:, [0, 4, 1, 5, 2, 6, 3, 7]] - zero
    assert np.array_equal(value, want)
    assert not (np.signbit(value) & (value == 0)).any()  # +0
    # Elements packed in the interleaved order come out in order.
    assert [pure.interleaved(j) for j in range(8)] == [0, 4, 1, 5, 2, 6, 3, 7]


def test_unpack_s8(pure: ctypes.CDLL) -> None:
    word = words()
    want = word.view(np.int8).reshape(-1, 4).astype(np.float32)
    got = np.empty((word.size, 4), np.float32)
    pure.s8(address(word), address(got), ctypes.c_int64(word.size))
    assert np.array_equal(got, want)
    for name in ("half", "bf16"):
        bits = np.empty((word.size, 4), np.uint16)
        getattr(pure, f"{name}_s8")(address(word), address(bits), ctypes.c_int64(word.size))
        value = bits.view(np.float16).astype(np.float32) if name == "half" else bf16_values(bits)
        assert np.array_equal(value, want)


@pytest.mark.parametrize("name,dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_unpack_fp8(pure: ctypes.CDLL, name: str, dtype: torch.dtype) -> None:
    word = words()
    got = np.empty((word.size, 4), np.float32)
    getattr(pure, name)(address(word), address(got), ctypes.c_int64(word.size))
    want = torch.from_numpy(word.view(np.uint8)).view(dtype).float().numpy().reshape(-1, 4)
    assert np.array_equal(got, want, equal_nan=True)


@pytest.mark.parametrize("name,size,quants", [("q4_0", 18, 2), ("q4_1", 20, 4), ("q8_0", 34, 2)])
def test_gguf_blocks_bit_for_bit(pure: ctypes.CDLL, name: str, size: int, quants: int) -> None:
    """As gguf-py dequantises, in float32: scales of every exponent and sign, subnormal, zero, infinite; all quants."""
    rng = np.random.default_rng(4)
    count = 4096
    block = rng.integers(0, 256, (count, size), dtype=np.uint8)
    scales = rng.integers(0, 65536, (count, quants // 2)).astype(np.uint16)
    scales[:6, 0] = [0x0000, 0x8000, 0x0001, 0x83FF, 0x7C00, 0xFC00]
    scales = np.where((scales & 0x7FFF) > 0x7C00, scales & 0xBFFF, scales)  # NaN has a test of its own
    block[:, :quants] = scales.view(np.uint8)
    block = np.ascontiguousarray(block)
    got = np.empty((count, 32), np.float32)
    getattr(pure, name)(address(block), address(got), ctypes.c_int64(count))
    d = scales[:, :1].view(np.float16).astype(np.float32)
    raw = block[:, quants:]
    with np.errstate(invalid="ignore"):
        if name == "q8_0":
            want = raw.view(np.int8).astype(np.float32) * d
        else:
            q = np.concatenate([raw & 15, raw >> 4], axis=1)
            if name == "q4_0":
                want = (q.astype(np.int8) - 8).astype(np.float32) * d
            else:
                want = q.astype(np.float32) * d + scales[:, 1:].view(np.float16).astype(np.float32)
    number = ~np.isnan(want)
    assert np.array_equal(np.isnan(got), ~number)
    assert np.array_equal(got[number].view(np.uint32), want[number].view(np.uint32))


def test_gguf_blocks_against_gguf_py(pure: ctypes.CDLL) -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(5)
    x = (rng.standard_normal((64, 256)) * np.exp2(rng.integers(-8, 8, (64, 1)))).astype(np.float32)
    for name, kind in (("q4_0", "Q4_0"), ("q4_1", "Q4_1"), ("q8_0", "Q8_0")):
        kind = gguf.GGMLQuantizationType[kind]
        packed = np.ascontiguousarray(gguf.quants.quantize(x, kind))
        want = gguf.quants.dequantize(packed, kind)
        got = np.empty(x.shape, np.float32)
        getattr(pure, name)(address(packed), address(got), ctypes.c_int64(x.size // 32))
        assert np.array_equal(got.view(np.uint32), np.ascontiguousarray(want).view(np.uint32)), name


# ---- epilogues

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(pure: ctypes.CDLL, name: str) -> None:
    rng = np.random.default_rng(6)
    x = np.concatenate(
        [rng.standard_normal(20000) * 4, np.linspace(-120, 120, 4801), [0.0, -0.0, 1e-30, 1e30, -1e30]]
    )
    x = x.astype(np.float32)
    got = convert(pure, f"act_{name}", x, np.float32)
    want = ACTIVATIONS[name](torch.from_numpy(x).double()).numpy()
    # exp, erf and the division cost a few ulp each; in the tail of gelu 1 + erf cancels to an absolute error.
    error = np.abs(got - want)
    assert not (error > 2e-6 * np.abs(want) + 4e-7 * np.minimum(np.abs(x), 1)).any(), x[np.argmax(error)]
    assert np.isnan(convert(pure, f"act_{name}", np.array([np.nan], np.float32), np.float32)).all()
    assert convert(pure, f"act_{name}", np.array([np.inf], np.float32), np.float32)[0] == np.inf


EPILOGUE = """
using Half = pk::half;
using Bf16 = pk::bf16;
template <class Out, pk::Act A, class Bias, class Residual>
__global__ void epilogue(const float* acc, const void* bias, const void* residual, Out* y, int m, int n, int stride) {
  const pk::Epilogue<Out, A, Bias, Residual> e{y, stride, static_cast<const Bias*>(bias),
                                               static_cast<const Residual*>(residual), stride};
  const int column = threadIdx.x * 4;
  if (column + 4 <= n) {
    e.store(pk::ld_vec<float, 4>(acc + blockIdx.x * stride + column), blockIdx.x, column);
  } else if (column < n) {
    pk::Vec<float, 4> v{};
    for (int i = 0; column + i < n; ++i) v[i] = acc[blockIdx.x * stride + column + i];
    e.store_edge(v, blockIdx.x, column, n - column);
  }
}
"""


@pytest.mark.parametrize(
    "result,act,bias,residual",
    [
        ("float", "kNone", "pk::Absent", "pk::Absent"),
        ("Bf16", "kGelu", "Bf16", "pk::Absent"),
        ("Half", "kSilu", "float", "Half"),
        ("float", "kRelu", "Half", "float"),
        ("Bf16", "kGeluTanh", "pk::Absent", "Bf16"),
    ],
)
def test_epilogue(result: str, act: str, bias: str, residual: str) -> None:
    rng = np.random.default_rng(7)
    m, n, stride = 3, 37, 40
    dtypes = {
        "float": torch.float32,
        "Half": torch.float16,
        "Bf16": torch.bfloat16,
        "pk::Absent": torch.float32,
    }

    def tensor(shape: tuple[int, ...], kind: str) -> torch.Tensor:
        return torch.from_numpy(rng.standard_normal(shape).astype(np.float32)).to(dtypes[kind])

    def raw(t: torch.Tensor) -> np.ndarray:
        return copy_of(t.numpy() if t.dtype == torch.float32 else t.view(torch.int16).numpy())

    acc, b, r = tensor((m, stride), "float"), tensor((stride,), bias), tensor((m, stride), residual)
    y = raw(torch.full((m, stride), 7.0, dtype=dtypes[result]))
    name = f"epilogue<{result}, pk::Act::{act}, {bias}, {residual}>"
    kernel = Kernel('#include "core/epilogue.cuh"\n' + EPILOGUE, name, check=True)
    mutated = harness.Arg(y, harness.MUTATED, "y")
    launch(kernel, m, 32, raw(acc), raw(b), raw(r), mutated, m, n, stride)
    want = acc.double()
    if bias != "pk::Absent":
        want = want + b.double()
    names = {"kNone": "none", "kRelu": "relu", "kGelu": "gelu", "kGeluTanh": "gelu_tanh", "kSilu": "silu"}
    want = ACTIVATIONS[names[act]](want)
    if residual != "pk::Absent":
        want = want + r.double()
    got = torch.from_numpy(y) if result == "float" else torch.from_numpy(y).view(dtypes[result])
    unit = {"float": 2.0**-22, "Half": 2.0**-11, "Bf16": 2.0**-8}[result]
    error = (got.double() - want)[:, :n].abs()
    assert not (error > unit * want[:, :n].abs() + 2e-6).any()
    assert (got[:, n:] == 7).all()  # nothing beyond the edge
