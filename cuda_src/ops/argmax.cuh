// argmax of each row, ties to the lowest index. A block owns one piece of a row and reduces it to the largest of its
// words (core/order.cuh). NaN never wins; a row of nothing but NaN gives 0. argmax_join reduces the pieces of a row
// that was split.
#pragma once
#include "core/order.cuh"
#include "core/row.cuh"

namespace pk {

constexpr int kArgmaxThreads = 256;

struct ArgmaxSmem {
  uint64_t scratch[kArgmaxThreads / kWarp];
};

// The best word of chunks piece, piece + pieces, ... of a row, for this thread.
template <bool kFast, class T>
PK_DEVICE uint64_t argmax_piece(const T* row, int n, int piece, int pieces) {
  uint64_t best = 0;
  const int step = pieces * kArgmaxThreads * kChunk<T>;
  for (int64_t at = static_cast<int64_t>(piece * kArgmaxThreads + threadIdx.x) * kChunk<T>; at < n; at += step) {
    const Chunk<T> v = row_load<kFast>(row, static_cast<int>(at), n, from_float<T>(NAN));
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) {
      const uint64_t word = order_word(to_float(v[i]), static_cast<uint32_t>(at + i));
      best = word > best ? word : best;
    }
  }
  return best;
}

// Writes the index itself when `pieces` is 1, else the piece's word to `words` [rows, pieces].
template <class T>
__global__ void __launch_bounds__(kArgmaxThreads)
    argmax(const T* __restrict__ x, int64_t* __restrict__ y, uint64_t* __restrict__ words, int n, int64_t stride,
           int pieces, int fast) {
  PK_SMEM(ArgmaxSmem, smem);
  const int64_t row = blockIdx.x / pieces;
  const int piece = static_cast<int>(blockIdx.x % pieces);
  const T* in = x + row * stride;
  grid_wait();
  uint64_t best = fast ? argmax_piece<true>(in, n, piece, pieces) : argmax_piece<false>(in, n, piece, pieces);
  best = block_max<kArgmaxThreads>(best, smem.scratch);
  if (threadIdx.x == 0) {
    if (pieces == 1)
      st(y + row, order_index(best));
    else
      st(words + blockIdx.x, best);
  }
  grid_launch_dependents();
}

__global__ void __launch_bounds__(kArgmaxThreads)
    argmax_join(const uint64_t* __restrict__ words, int64_t* __restrict__ y, int pieces) {
  PK_SMEM(ArgmaxSmem, smem);
  grid_wait();
  uint64_t best = 0;
  for (int i = threadIdx.x; i < pieces; i += kArgmaxThreads) {
    const uint64_t word = ld(words + static_cast<int64_t>(blockIdx.x) * pieces + i);
    best = word > best ? word : best;
  }
  best = block_max<kArgmaxThreads>(best, smem.scratch);
  if (threadIdx.x == 0) st(y + blockIdx.x, order_index(best));
  grid_launch_dependents();
}

}  // namespace pk
