// The end of a tensor-core kernel for few tokens whose warps split k: each warp's accumulators go to shared memory and
// are added in warp order. The number of warps, the slices of k they take in turn, and this order are one numerics
// class, which linear_skinny_mma.cuh, quant_linear.cuh and quant_linear_nibbles.cuh share.
#pragma once
#include "core/mma.cuh"
#include "ops/linear_epilogue.cuh"

namespace pk {

constexpr int kSkinnyWarps = 8;
constexpr int kSkinnySlice = 128;  // k of one warp per pass

// Sums of 16 kRowTiles rows of w, the tensor cores' 16-row operand, and 8 kTokenTiles tokens.
template <int kRowTiles, int kTokenTiles>
struct WarpSums {
  static constexpr int kRows = 16 * kRowTiles, kTokens = 8 * kTokenTiles;
  static constexpr int kPitch = kRows + 4;  // 2 t kPitch + g falls into 32 different banks
  float part[kSkinnyWarps][kTokens][kPitch];

  // Adds up the warps' accumulators and writes outputs n0, n0 + 1, .. of every token. Gated: the first half of the rows
  // is gate, the second up. A barrier for the whole block.
  template <bool kGated, class T, class To>
  PK_DEVICE void store(const float (&acc)[kRowTiles][kTokenTiles][4], const LinearEpilogue<T, To, 1>& out, int n0) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
        for (int c = 0; c < 4; ++c)
          st(&part[warp][j * 8 + mma_col(lane, c)][i * 16 + mma_row(lane, c)], acc[i][j][c]);
    __syncthreads();
    constexpr int kOutRows = kRows / (kGated ? 2 : 1);
#pragma unroll 1
    for (int i = threadIdx.x; i < kTokens * kOutRows; i += kSkinnyWarps * 32) {
      const int token = i / kOutRows, r = i % kOutRows;
      if (!out.has(token, n0 + r)) continue;
      float sum[1] = {0.f}, up[1] = {0.f};
#pragma unroll
      for (int v = 0; v < kSkinnyWarps; ++v) {
        sum[0] += ld(&part[v][token][r]);
        if constexpr (kGated) up[0] += ld(&part[v][token][kOutRows + r]);
      }
      if constexpr (kGated) {
        out.store_gated(token, n0 + r, sum, up);
      } else {
        out.store(token, n0 + r, sum);
      }
    }
  }
};

}  // namespace pk
