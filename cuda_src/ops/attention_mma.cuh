// Tiles of 16-bit rows in shared memory for the tensor-core attention kernels, and the score and value products of
// one 16-row fragment. kDim is head_dim rounded up to a multiple of 32; columns beyond d are zeros.
#pragma once
#include "ops/attention_common.cuh"

namespace pk {
namespace attention {

// Where 16-byte chunk c of row r lies, in elements: chunks are permuted within a row so that the eight rows of an
// ldmatrix phase fall into different banks. Odd multiples of four chunks alternate between the two halves of the
// banks by themselves, so permuting within four is enough.
template <int kDim>
PK_DEVICE int tile_at(int r, int c) {
  static_assert(kDim % 32 == 0, "rows of whole groups of four chunks");
  if constexpr (kDim % 64 == 0) {
    return swizzle_chunk<kDim / 8>(r, c) * 8;
  } else {
    return (r * (kDim / 8) + (c ^ (r >> 1 & 3))) * 8;
  }
}

// The place 16 * step columns to the right of `at`, itself in one of the first two chunks of a row. Written so that
// only the permuted bits need a register each and the rest is an immediate offset.
template <int kDim>
PK_DEVICE int tile_step(int at, int step) {
  constexpr int kGroup = kDim % 64 == 0 ? 4 : 2;  // steps within the chunks that are permuted among themselves
  return (at ^ step % kGroup * 16) + step / kGroup * kGroup * 16;
}

// A key's row of k and v in units of 8 elements (16 bytes), so that 32 bits reach 64 GB.
struct alignas(8) KeyRow {
  uint32_t k, v;
};

// The row of a key that is copied for key `key` of a tile: keys at or past `end` (at least 1) repeat the last one
// before it, so that copies need no condition; their scores are masked. A page id out of range sets `bad` and is not
// followed.
template <class T>
PK_DEVICE KeyRow find_key_row(const Problem<T>& p, int s, const Sequence& seq, int key, int end, bool& bad) {
  Slot slot = find_slot(p, s, seq, min(key, end - 1));
  if (!slot.ok) {
    bad = true;
    slot.page = 0;
  }
  // Strides are multiples of 8 and the sum fits, so 32-bit arithmetic is exact.
  auto row_of = [&](int64_t page_stride, int64_t stride) {
    return static_cast<uint32_t>(slot.page) * static_cast<uint32_t>(page_stride / 8) +
           static_cast<uint32_t>(slot.row) * static_cast<uint32_t>(stride / 8);
  };
  return KeyRow{row_of(p.k_page_stride, p.k_stride), row_of(p.v_page_stride, p.v_stride)};
}

// Starts the copies of rows [0, kKeys) of a tile of k and of v; thread `rank` of kThreads takes every kThreads-th
// chunk. Columns from d on are left alone: they were zeroed before the first copy.
template <class T, int kDim, int kKeys, int kThreads>
PK_DEVICE void copy_keys(T* k, T* v, const T* k_head, const T* v_head, const KeyRow* rows, int rank, int d) {
  constexpr int kChunks = kDim / 8;
  constexpr int kUnroll = kKeys * kChunks > 8 * kThreads ? 4 : 8;  // more addresses at once would spill
#pragma unroll kUnroll
  for (int i = 0; i < kKeys * kChunks; i += kThreads) {
    const int key = (i + rank) / kChunks, c = (i + rank) % kChunks;
    if (c * 8 >= d) continue;
    const KeyRow row = ld(&rows[key]);
    const int at = tile_at<kDim>(key, c);
    cp_async<16>(&k[at], k_head + c * 8 + static_cast<uint64_t>(row.k) * 8);
    cp_async<16>(&v[at], v_head + c * 8 + static_cast<uint64_t>(row.v) * 8);
  }
}

// Zeroes columns [d, kDim) of `rows` rows of 16-bit values.
template <class T, int kDim, int kThreads>
PK_DEVICE void zero_padding(T* tile, int rows, int rank, int d) {
  if (d == kDim) return;
  for (int i = rank; i < rows * (kDim / 8); i += kThreads) {
    if (i % (kDim / 8) * 8 >= d) st_vec(&tile[tile_at<kDim>(i / (kDim / 8), i % (kDim / 8))], Vec<T, 8>{});
  }
}

// s[j] += rows of Q times keys 8 j .. 8 j + 7 of K, over one step of 16 columns; a is Q's fragment of that step,
// k_lane this lane's place in the first step.
template <class T, int kDim, int kKeys>
PK_DEVICE void score_step(float (&s)[kKeys / 8][4], const uint32_t (&a)[4], const T* k, int k_lane, int step) {
#pragma unroll
  for (int j = 0; j < kKeys / 16; ++j) {
    uint32_t b[4];
    ldmatrix<4>(b, &k[tile_step<kDim>(k_lane, step) + j * 16 * kDim]);
    mma_m16n8k16<T>(s[2 * j], a, b);
    mma_m16n8k16<T>(s[2 * j + 1], a, b + 2);
  }
}

// The weights of keys 16 j .. 16 j + 15, rounded to T, as the A fragment of the value product: an accumulator's
// layout is an operand's.
template <class T, int kTiles>
PK_DEVICE void weights_fragment(uint32_t (&a)[4], const float (&s)[kTiles][4], int j) {
  a[0] = pack2<T>(s[2 * j][0], s[2 * j][1]);
  a[1] = pack2<T>(s[2 * j][2], s[2 * j][3]);
  a[2] = pack2<T>(s[2 * j + 1][0], s[2 * j + 1][1]);
  a[3] = pack2<T>(s[2 * j + 1][2], s[2 * j + 1][3]);
}

// cap * tanh(x / cap) in log2 units, from exp2: absolute error below 1e-6 of the cap, under 16-bit rounding.
PK_DEVICE float capped_score(const ScoreScale& scale, float dot) {
  const float e = exp2_approx(dot * scale.inner * (2.f * kLog2e));
  return scale.outer * (1.f - 2.f * __fdividef(1.f, e + 1.f));
}

}  // namespace attention
}  // namespace pk
