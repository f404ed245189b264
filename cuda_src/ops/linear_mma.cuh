// 16-bit linear for many tokens (m > 64) on mma.sync: y[m, n] = act(sum_k x[m, k] * w[n, k] + bias[n]) + res.
//
// A block owns BM x BN outputs, a warp WM x WN of them in registers. Tiles of 64 k (128-byte rows, 16-byte
// chunks XOR-swizzled by row) come through a cp.async ring of kStages; fragments of the next 16 k are fetched
// by ldmatrix while the current ones multiply.
//
// One numerics class: each output is one chain of mma over k = 0, 16, 32, ... whatever the tile, so a row's
// bits do not depend on the batch.
//
// Gated: rows of the w tile alternate per warp between WN / 2 gate and WN / 2 up rows, and a block owns
// BM x BN / 2 outputs.
#pragma once
#include "core/async.cuh"
#include "core/mma.cuh"
#include "core/target.cuh"
#include "core/vec.cuh"
#include "ops/linear_epilogue.cuh"

namespace pk {

constexpr int kMmaDepth = 64;  // k per stage: a row is 128 bytes, 8 chunks, one per bank group

template <typename T, int BM, int BN, int kStages, int kWarps, int WN>
union LinearMmaSmem {
  struct {
    T a[kStages][BM * kMmaDepth];
    T b[kStages][BN * kMmaDepth];
  };
  static constexpr int kPitch = WN + 8;  // the epilogue's stores: 8 g + 2 t differs over 4 rows x 4 pairs
  float stage[kWarps][16 * kPitch];
};

// Copies kVec elements to shared memory, zeros when !in. Single elements are below what cp.async can move.
template <int kVec, typename T>
PK_DEVICE void copy_async(T* to, const T* from, bool in) {
  constexpr int kBytes = kVec * int(sizeof(T));
  if constexpr (kBytes >= 4) {
    cp_async<kBytes>(to, from, in);
  } else {
    st(to, in ? ld(from) : from_float<T>(0.f));
  }
}

template <typename T, typename To, int BM, int BN, int WM, int WN, int kStages, int kVec, bool kGated>
__global__ void __launch_bounds__((BM / WM) * (BN / WN) * 32, BM * BN <= 128 * 128 ? 2 : 1)
    linear_mma(const T* __restrict__ x, const T* __restrict__ w, const T* __restrict__ w_up,
               const T* __restrict__ bias, const To* residual, To* y, int m, int n, int k, int64_t x_stride,
               int64_t w_stride, int64_t w_up_stride, int64_t residual_stride, int64_t y_stride,
               int activation, int group_m) {
  constexpr int kWarps = (BM / WM) * (BN / WN), kThreads = kWarps * 32;
  constexpr int kTilesM = WM / 16, kTilesN = WN / 8;  // mma tiles of a warp
  constexpr int kPieces = kMmaDepth / kVec;  // copies per row of a tile
  constexpr int kRowStep = kThreads / kPieces;  // rows that one round of all threads copies
  static_assert(BM % kRowStep == 0 && BN % kRowStep == 0, "threads share the tiles evenly");
  static_assert(kVec < 8 || kRowStep % 8 == 0, "a thread's chunks are all swizzled alike");
  using Smem = LinearMmaSmem<T, BM, BN, kStages, kWarps, WN>;
  PK_DYN_SMEM(Smem, s);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int warp_m = warp % (BM / WM), warp_n = warp / (BM / WM);

  // Blocks in flight cover group_m x (blocks / group_m) tiles, nearly square: both operands stay in L2.
  constexpr int kOutN = kGated ? BN / 2 : BN;
  const int tiles_m = (m + BM - 1) / BM, tiles_n = (n + kOutN - 1) / kOutN;
  const int group = int(blockIdx.x) / (group_m * tiles_n), in_group = int(blockIdx.x) % (group_m * tiles_n);
  const int group_rows = min(group_m, tiles_m - group * group_m);
  const int m0 = (group * group_m + in_group % group_rows) * BM, n0 = in_group / group_rows * kOutN;

  // This thread copies k copy_k .. + kVec of rows copy_row + i * kRowStep of either tile. Pointers only move
  // forward along the rows and, between stages, along k; where they leave the tensor the copy writes zeros
  // and reads nothing. That goes for stages past the end too, which keeps the main loop free of branches.
  const int copy_row = threadIdx.x / kPieces, copy_k = threadIdx.x % kPieces * kVec;
  const int rows_x = m - m0 - copy_row;
  int k_left = k - copy_k;  // of the stage to fill next
  const T* x_from = x + (m0 + copy_row) * x_stride + copy_k;
  auto in_tile = [&](int r) {  // where the piece of row copy_row + r lies
    if constexpr (kRowStep % 8 == 0)
      return swizzle_chunk<8>(copy_row, copy_k / 8) * 8 + copy_k % 8 + r * kMmaDepth;
    return swizzle_chunk<8>(copy_row + r, copy_k / 8) * 8 + copy_k % 8;
  };
  auto copy_x = [&](int slot, int r) {
    copy_async<kVec>(&s.a[slot][in_tile(r)], x_from + r * x_stride, r < rows_x && k_left > 0);
  };
  // Gated: which row of w_gate or w_up is row copy_row + r of the tile? A thread's rows are all of one kind
  // (kRowStep is a multiple of WN), or r alone decides (kRowStep divides WN / 2).
  constexpr bool kOneKind = kRowStep % WN == 0;
  static_assert(!kGated || kOneKind || (WN / 2) % kRowStep == 0, "see above");
  const bool thread_up = kGated && kOneKind && copy_row % WN >= WN / 2;
  const int copy_col = kGated && kOneKind ? copy_row / WN * (WN / 2) + copy_row % (WN / 2) : copy_row;
  const int rows_w = n - n0 - copy_col;
  const int64_t w_step = thread_up ? w_up_stride : w_stride;
  const T* w_from =
      (thread_up ? w_up + (n0 + copy_col) * w_up_stride : w + (n0 + copy_col) * w_stride) + copy_k;
  const T* up_from = kGated && !kOneKind ? w_up + (n0 + copy_col) * w_up_stride + copy_k : nullptr;
  auto copy_w = [&](int slot, int r) {
    T* to = &s.b[slot][in_tile(r)];
    if constexpr (!kGated) {
      copy_async<kVec>(to, w_from + r * w_step, r < rows_w && k_left > 0);
    } else if constexpr (kOneKind) {
      copy_async<kVec>(to, w_from + r / 2 * w_step, r / 2 < rows_w && k_left > 0);
    } else {
      const int col = r / WN * (WN / 2) + r % (WN / 2);
      const T* from = r % WN < WN / 2 ? w_from + col * w_stride : up_from + col * w_up_stride;
      copy_async<kVec>(to, from, col < rows_w && k_left > 0);
    }
  };
  auto next_stage = [&] {
    k_left -= kMmaDepth;
    x_from += kMmaDepth;
    w_from += kMmaDepth;
    if constexpr (kGated && !kOneKind) up_from += kMmaDepth;
  };

  float acc[kTilesM][kTilesN][4];
#pragma unroll
  for (int i = 0; i < kTilesM; ++i)
#pragma unroll
    for (int j = 0; j < kTilesN; ++j)
#pragma unroll
      for (int c = 0; c < 4; ++c) acc[i][j][c] = 0.f;

  // Double-buffered fragments of 16 k. Row r's chunk c lies at c ^ (r % 8): rows 16 i apart are alike.
  uint32_t a[2][kTilesM][4], b[2][kTilesN][2];
  const int a_row = warp_m * WM + ldm_a_row(lane), a_chunk = ldm_a_col(lane) / 8 ^ a_row % 8;
  const int b_row = warp_n * WN + ldm_b_row(lane), b_chunk = ldm_b_col(lane) / 8 ^ b_row % 8;
  auto load_fragments = [&](int slot, int kk, int to) {
    const T* a_from = &s.a[slot][a_row * kMmaDepth + (a_chunk ^ kk * 2) * 8];
    const T* b_from = &s.b[slot][b_row * kMmaDepth + (b_chunk ^ kk * 2) * 8];
#pragma unroll
    for (int i = 0; i < kTilesM; ++i) ldmatrix<4>(a[to][i], a_from + i * 16 * kMmaDepth);
#pragma unroll
    for (int j = 0; j < kTilesN; j += 2) {
      uint32_t pair[4];
      ldmatrix<4>(pair, b_from + j * 8 * kMmaDepth);
      b[to][j][0] = pair[0];
      b[to][j][1] = pair[1];
      b[to][j + 1][0] = pair[2];
      b[to][j + 1][1] = pair[3];
    }
  };

  // Weights of the whole prologue go first: they do not depend on the kernel before.
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
#pragma unroll
    for (int r = 0; r < BN; r += kRowStep) copy_w(i, r);
    next_stage();
  }
  x_from -= (kStages - 1) * kMmaDepth;
  k_left += (kStages - 1) * kMmaDepth;
  grid_wait();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
#pragma unroll
    for (int r = 0; r < BM; r += kRowStep) copy_x(i, r);
    cp_async_commit();
    x_from += kMmaDepth;
    k_left -= kMmaDepth;
  }
  cp_async_wait<kStages - 2>();
  __syncthreads();
  load_fragments(0, 0, 0);

  // Copies of one stage are spread over the first 3 of its 4 steps; the fourth fetches from the next stage.
  constexpr int kCopiesA = BM / kRowStep, kCopiesB = BN / kRowStep;
  int slot = 0, fill = kStages - 1;
#pragma unroll 1
  for (int k0 = 0; k0 < k; k0 += kMmaDepth) {
    const int next = slot == kStages - 1 ? 0 : slot + 1;
#pragma unroll
    for (int kk = 0; kk < 4; ++kk) {
      if (kk < 3) {
        load_fragments(slot, kk + 1, (kk + 1) % 2);
#pragma unroll
        for (int c = kCopiesA * kk / 3; c < kCopiesA * (kk + 1) / 3; ++c) copy_x(fill, c * kRowStep);
#pragma unroll
        for (int c = kCopiesB * kk / 3; c < kCopiesB * (kk + 1) / 3; ++c) copy_w(fill, c * kRowStep);
      } else {
        cp_async_commit();
        cp_async_wait<kStages - 2>();
        __syncthreads();  // the next stage has landed for everyone, and everyone is done with this one
        load_fragments(next, 0, 0);
      }
#pragma unroll
      for (int i = 0; i < kTilesM; ++i)
#pragma unroll
        for (int j = 0; j < kTilesN; ++j) mma_m16n8k16<T>(acc[i][j], a[kk % 2][i], b[kk % 2][j]);
    }
    next_stage();
    fill = slot;
    slot = next;
  }
  grid_launch_dependents();

  // Through shared memory, 16 rows of a warp's part at a time, so that y is written in whole sectors.
  constexpr int N = 16 / int(sizeof(To));
  const LinearEpilogue<T, To, N> out(bias, residual, y, residual_stride, y_stride, m, n, activation);
  float* stage = s.stage[warp];
  cp_async_wait<0>();
  __syncthreads();  // the stage lies over the ring
#pragma unroll
  for (int i = 0; i < kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < kTilesN; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        Vec<float, 2> two;
        two[0] = acc[i][j][2 * h];
        two[1] = acc[i][j][2 * h + 1];
        st_vec<float, 2>(&stage[mma_row(lane, 2 * h) * Smem::kPitch + j * 8 + mma_col(lane, 0)], two);
      }
    __syncwarp();
    store_staged<16, WN, Smem::kPitch, kGated>(out, stage, m0 + warp_m * WM + i * 16,
                                               n0 + warp_n * (kGated ? WN / 2 : WN), lane);
    __syncwarp();
  }
}

}  // namespace pk
