// 16-bit linear for few tokens (m <= 64) on mma.sync: y[m, n] = act(sum_k x[m, k] * w[n, k] + bias[n]) + res.
//
// The weights are the traffic, and each is read once, from global memory straight into fragments: w is the
// 16-row operand, tokens are the 8 columns. Within 32 k, lane group t = lane % 4 holds k 8 t .. 8 t + 7 of
// its row, one 16-byte load, and both operands are permuted along k alike, so the sum is the same. A block
// owns 16 * kRowTiles rows of w and 8 * kTokenTiles tokens; its warps split k into slices of 128, and their
// partial sums are added in warp order.
//
// One numerics class: which k a warp takes, and in which order, is fixed, so a row's bits depend neither on
// the batch nor on the variant.
//
// Gated: the first half of the row tiles is gate, the second up, and a block owns 8 * kRowTiles outputs a
// token.
#pragma once
#include "core/mma.cuh"
#include "core/target.cuh"
#include "core/vec.cuh"
#include "ops/linear_warp_sums.cuh"

namespace pk {

// Elements at .. at + 7 of a row of k, zeros outside, as mma operand registers. p points to element `at`.
template <int kVec, bool kStream, typename T>
PK_DEVICE void load_eight(const T* p, int at, int k, bool row_in, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = 0;
#pragma unroll
  for (int i = 0; i < 8; i += kVec) {
    if (!row_in || at + i >= k) continue;
    if constexpr (kVec == 1) {
      const T v = kStream ? ld_stream(p + i) : ld(p + i);
      out[i / 2] |= uint32_t(v.bits) << (i % 2 * 16);
    } else {
      const uint32_t* words = reinterpret_cast<const uint32_t*>(p + i);
      const auto v = kStream ? ld_vec_stream<uint32_t, kVec / 2>(words) : ld_vec<uint32_t, kVec / 2>(words);
#pragma unroll
      for (int j = 0; j < kVec / 2; ++j) out[i / 2 + j] = v[j];
    }
  }
}

// 8 warps with 8 loads of 16 bytes in flight per lane: 32 KB per block.
template <typename T, typename To, int kRowTiles, int kTokenTiles, int kVec, bool kGated>
__global__ void __launch_bounds__(kSkinnyWarps * 32, kVec == 8 && kRowTiles * kTokenTiles <= 2 ? 2 : 1)
    linear_skinny_mma(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ w_up,
                      const T* __restrict__ bias, const To* residual, To* y, int m, int n, int k,
                      int64_t x_stride, int64_t w_stride, int64_t w_up_stride, int64_t residual_stride,
                      int64_t y_stride, int activation) {
  constexpr int kUnits = kRowTiles == 1 ? 4 : 2, kBatch = 32 * kUnits;  // 8 loads of w in flight per lane
  constexpr int kOutRows = (kGated ? 8 : 16) * kRowTiles;
  static_assert(!kGated || kRowTiles % 2 == 0, "gate and up tiles come in pairs");
  using Smem = WarpSums<kRowTiles, kTokenTiles>;
  PK_DYN_SMEM(Smem, sums);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  const int n0 = int(blockIdx.x) * kOutRows;

  // Row pointers at this lane's k; w rows g and g + 8 of each tile, x row g of each token tile.
  const T* w_row[kRowTiles][2];
  bool w_in[kRowTiles][2];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool up = kGated && i >= kRowTiles / 2;
      const int col = n0 + (up ? i - kRowTiles / 2 : i) * 16 + h * 8 + g;
      w_in[i][h] = col < n;
      w_row[i][h] = (up ? w_up + col * w_up_stride : w + col * w_stride) + t * 8;
    }
  auto load_w = [&](int k0, uint32_t (&regs)[kUnits][kRowTiles][2][4]) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u)
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h)
          load_eight<kVec, true>(w_row[i][h] + k0 + u * 32, k0 + u * 32 + t * 8, k, w_in[i][h],
                                 regs[u][i][h]);
  };

  float acc[kRowTiles][kTokenTiles][4];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[i][j][c] = 0.f;

  uint32_t wr[kUnits][kRowTiles][2][4];
  int k0 = warp * kSkinnySlice;
  load_w(k0, wr);  // weights may be read before the kernel that wrote x is done
  grid_wait();
  while (k0 < k) {
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const int at = k0 + u * 32;
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) {
        uint32_t xr[4];
        load_eight<kVec, false>(x + (j * 8 + g) * x_stride + at + t * 8, at + t * 8, k, j * 8 + g < m, xr);
#pragma unroll
        for (int half8 = 0; half8 < 2; ++half8)  // registers 0, 1 of the eight k, then 2, 3
#pragma unroll
          for (int i = 0; i < kRowTiles; ++i) {
            const uint32_t a[4] = {wr[u][i][0][2 * half8], wr[u][i][1][2 * half8], wr[u][i][0][2 * half8 + 1],
                                   wr[u][i][1][2 * half8 + 1]};
            mma_m16n8k16<T>(acc[i][j], a, xr + 2 * half8);
          }
      }
    }
    k0 += k0 % kSkinnySlice + kBatch == kSkinnySlice ? (kSkinnyWarps - 1) * kSkinnySlice + kBatch : kBatch;
    if (k0 < k) load_w(k0, wr);
  }
  grid_launch_dependents();

  const LinearEpilogue<T, To, 1> out(bias, residual, y, residual_stride, y_stride, m, n, activation);
  sums.template store<kGated>(acc, out, n0);
}

}  // namespace pk
