// fp32 linear without tensor cores: y[m, n] = act(sum_k x[m, k] * w[n, k] + bias[n]) + residual[m, n].
//
// One numerics class: in both kernels every output is one chain acc = fmaf(x[k], w[k], acc) over k from 0
// up, so a row has the same bits alone and in any batch. It rules out split-K, and costs the skinny kernel
// nothing where the weights come from memory: k * 4 cycles of chain against n * k * 4 bytes of weights.
#pragma once
#include "core/async.cuh"
#include "core/target.cuh"
#include "core/vec.cuh"
#include "ops/linear_epilogue.cuh"

namespace pk {

// ----------------------------------------------------------------------------------------------------
// Tiled: a block owns BM x BN outputs, a warp WM x WN of them, a thread (WM / 4) x (WN / 8) in registers:
// rows lane_m + 4 i and columns lane_n + 8 j of its warp's part. Tiles of x and w keep their rows along k in
// shared memory, filled by cp.async with no register in between; a thread reads 4 k of a row at once, so that
// 64 outputs take 16 16-byte reads per 256 multiply-adds. Two buffers, one barrier per 16 k.
//
// Gated: rows of the w tile alternate per warp between WN / 2 gate and WN / 2 up rows, and a block owns
// BM x BN / 2 outputs.

constexpr int kF32Depth = 16;  // 64 bytes of a row: two full sectors
constexpr int kF32Pitch = kF32Depth + 4;  // 20 c mod 32 differs by 4 or more for c = 0..7: no bank conflicts

template <int BM, int BN, int kWarps, int WN>
union LinearF32Smem {
  struct {
    float a[2][BM * kF32Pitch];
    float b[2][BN * kF32Pitch];
  };
  static constexpr int kPitch = WN + 8;  // 8 r + c differs over 4 rows and 8 columns: the epilogue's stores
  float stage[kWarps][16 * kPitch];
};

// 3 blocks of 4 warps: up to 168 registers, which an 8 x 8 thread needs (64 sums, two rounds of operands) and
// which blocks of 8 warps cannot have twice on an SM.
template <typename To, int BM, int BN, int WM, int WN, int kVec, bool kGated>
__global__ void __launch_bounds__((BM / WM) * (BN / WN) * 32, 3)
    linear_f32_tiled(const float* __restrict__ x, const float* __restrict__ w, const float* __restrict__ w_up,
                     const float* __restrict__ bias, const To* residual, To* y, int m, int n, int k,
                     int64_t x_stride, int64_t w_stride, int64_t w_up_stride, int64_t residual_stride,
                     int64_t y_stride, int activation) {
  constexpr int kWarps = (BM / WM) * (BN / WN), kThreads = kWarps * 32, TM = WM / 4, TN = WN / 8;
  constexpr int kPieces = kF32Depth / kVec;  // copies per row of a tile
  constexpr int kRowStep = kThreads / kPieces;  // rows that one round of all threads copies
  static_assert(BM % kRowStep == 0 && BN % kRowStep == 0 && WM % 16 == 0, "threads share the tiles evenly");
  static_assert(kRowStep % 8 == 0, "rows are dealt out in eights");
  using Smem = LinearF32Smem<BM, BN, kWarps, WN>;
  PK_SMEM(Smem, s);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  // Blocks go down m first: those in flight share few rows of w, and x stays in L2.
  const int tiles_m = (m + BM - 1) / BM;
  const int m0 = int(blockIdx.x % tiles_m) * BM, n0 = int(blockIdx.x / tiles_m) * (kGated ? BN / 2 : BN);

  // This thread copies k copy_k .. + kVec of rows copy_row + i * kRowStep of either tile, from pointers that
  // move along k with the tiles.
  // Neighbouring runs of a warp go to rows 4 apart, 4 * 20 mod 32 = 16 banks from each other.
  const int run = threadIdx.x / kPieces, copy_k = threadIdx.x % kPieces * kVec;
  const int copy_row = run / 8 * 8 + run % 2 * 4 + run % 8 / 2;
  const float* x_from = x + (m0 + copy_row) * x_stride + copy_k;
  auto load_x = [&](int k0, int buf) {
#pragma unroll
    for (int r = 0; r < BM; r += kRowStep) {
      const bool in = m0 + copy_row + r < m && k0 + copy_k < k;
      cp_async<kVec * 4>(&s.a[buf][(r + copy_row) * kF32Pitch + copy_k], in ? x_from + r * x_stride + k0 : x,
                         in);
    }
  };
  // Gated: is a row of the w tile an up row, and which output column is it for? Either all rows of a thread
  // are of one kind (kRowStep is a multiple of WN), or r alone decides (kRowStep divides WN / 2).
  constexpr bool kOneKind = kRowStep % WN == 0;
  static_assert(!kGated || kOneKind || (WN / 2) % kRowStep == 0, "see above");
  const bool thread_up = kGated && kOneKind && copy_row % WN >= WN / 2;
  const int copy_col = n0 + (kGated && kOneKind ? copy_row / WN * (WN / 2) + copy_row % (WN / 2) : copy_row);
  auto load_w = [&](int k0, int buf) {
#pragma unroll
    for (int r = 0; r < BN; r += kRowStep) {
      const int col = copy_col + (!kGated ? r : kOneKind ? r / 2 : r / WN * (WN / 2) + r % (WN / 2));
      const bool up = kOneKind ? thread_up : kGated && r % WN >= WN / 2;
      const bool in = col < n && k0 + copy_k < k;
      const float* from = up ? w_up + col * w_up_stride : w + col * w_stride;
      cp_async<kVec * 4>(&s.b[buf][(r + copy_row) * kF32Pitch + copy_k], in ? from + copy_k + k0 : w, in);
    }
  };

  // Lanes i, i ^ 1 share their columns and i, i ^ 2 their rows, so that two wavefronts serve a 16-byte read.
  const int lane_m = lane / 16 * 2 + lane % 2, lane_n = lane % 16 / 2;
  const int warp_m = warp % (BM / WM), warp_n = warp / (BM / WM);
  const int a_base = (warp_m * WM + lane_m) * kF32Pitch, b_base = (warp_n * WN + lane_n) * kF32Pitch;

  float acc[TM][TN];
#pragma unroll
  for (int i = 0; i < TM; ++i)
#pragma unroll
    for (int j = 0; j < TN; ++j) acc[i][j] = 0.f;

  if (k > 0) load_w(0, 0);  // weights may be read before the kernel that wrote x is done
  grid_wait();
  if (k > 0) load_x(0, 0);
  cp_async_commit();

  int buf = 0;
  for (int k0 = 0; k0 < k; k0 += kF32Depth, buf ^= 1) {
    cp_async_wait<0>();
    __syncthreads();  // this tile has landed for everyone, and everyone is done with the buffer filled next
    if (k0 + kF32Depth < k) {
      load_x(k0 + kF32Depth, buf ^ 1);
      load_w(k0 + kF32Depth, buf ^ 1);
      cp_async_commit();
    }
#pragma unroll
    for (int kk = 0; kk < kF32Depth; kk += 4) {
      float b[4][TN];
#pragma unroll
      for (int j = 0; j < TN; ++j) {
        const Vec<float, 4> v = ld_vec<float, 4>(&s.b[buf][b_base + j * 8 * kF32Pitch + kk]);
#pragma unroll
        for (int c = 0; c < 4; ++c) b[c][j] = v[c];
      }
#pragma unroll
      for (int i = 0; i < TM; ++i) {
        const Vec<float, 4> a = ld_vec<float, 4>(&s.a[buf][a_base + i * 4 * kF32Pitch + kk]);
#pragma unroll
        for (int c = 0; c < 4; ++c)
#pragma unroll
          for (int j = 0; j < TN; ++j) acc[i][j] = fmaf(a[c], b[c][j], acc[i][j]);
      }
    }
  }
  grid_launch_dependents();

  // Through shared memory, 16 rows of a warp's part at a time, so that y is written in whole sectors.
  const LinearEpilogue<float, To, 4> out(bias, residual, y, residual_stride, y_stride, m, n, activation);
  float* stage = s.stage[warp];
  __syncthreads();  // the stage lies over the tiles
#pragma unroll
  for (int i0 = 0; i0 < TM; i0 += 4) {
#pragma unroll
    for (int i = 0; i < 4; ++i)
#pragma unroll
      for (int j = 0; j < TN; ++j)
        st(&stage[(i * 4 + lane_m) * Smem::kPitch + j * 8 + lane_n], acc[i0 + i][j]);
    __syncwarp();
    store_staged<16, WN, Smem::kPitch, kGated>(out, stage, m0 + warp_m * WM + i0 * 4,
                                               n0 + warp_n * (kGated ? WN / 2 : WN), lane);
    __syncwarp();
  }
}

// ----------------------------------------------------------------------------------------------------
// Skinny: few tokens, the weights are the traffic and each is read once. A block owns 32 * kRows rows of w
// and kWarps * kTokens tokens. All threads copy w (and x) through a cp.async ring; lane l of every warp then
// owns rows l, l + 32, ... and walks k in order, each warp for its own tokens.
//
// Gated: the first half of a thread's kRows is gate, the second up, and a block owns 16 * kRows outputs.

template <int kRows, int kBlockTokens>
struct LinearSkinnyF32Smem {
  // Depth of a ring stage: about 17 KB of weights, enough copies in flight per SM with 3 stages.
  static constexpr int kDepth = kRows == 1 ? 128 : 64;
  static constexpr int kStages = 3;
  struct Stage {
    float w[32 * kRows][kDepth + 4];  // + 4: lanes on 8 neighbouring rows read 16 bytes from different banks
    float x[kBlockTokens][kDepth];
  } stage[kStages];
};

template <typename To, int kTokens, int kWarps, int kRows, int kVec, bool kGated>
__global__ void __launch_bounds__(kWarps * 32)
    linear_f32_skinny(const float* __restrict__ x, const float* __restrict__ w,
                      const float* __restrict__ w_up, const float* __restrict__ bias, const To* residual,
                      To* y, int m, int n, int k, int64_t x_stride, int64_t w_stride, int64_t w_up_stride,
                      int64_t residual_stride, int64_t y_stride, int activation) {
  using Smem = LinearSkinnyF32Smem<kRows, kWarps * kTokens>;
  constexpr int kThreads = kWarps * 32, kDepth = Smem::kDepth, kStages = Smem::kStages;
  constexpr int kOutRows = kGated ? 16 * kRows : 32 * kRows;
  constexpr int kPieces = kDepth / kVec;  // copies per row of a stage
  static_assert(!kGated || kRows % 2 == 0, "gate and up rows come in pairs");
  PK_DYN_SMEM(Smem, s);

  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int tiles_m = (m + kWarps * kTokens - 1) / (kWarps * kTokens);
  const int m0 = int(blockIdx.x % tiles_m) * kWarps * kTokens, n0 = int(blockIdx.x / tiles_m) * kOutRows;

  // A warp copies whole runs of a row; a thread keeps its place along k and walks down the rows.
  constexpr int kAcross = kPieces < kThreads ? kPieces : kThreads, kDown = kThreads / kAcross;
  const int copy_row = threadIdx.x / kAcross, copy_k = threadIdx.x % kAcross * kVec;
  auto load_rows = [&](float* to, int pitch, const float* from, int64_t stride, int rows, int rows_in,
                       int k_in) {
#pragma unroll
    for (int kk = 0; kk < kDepth; kk += kAcross * kVec) {
      const bool k_ok = kk + copy_k < k_in;
      float* dst = to + copy_row * pitch + kk + copy_k;
      const float* src = from + copy_row * stride + kk + copy_k;
#pragma unroll 8
      for (int r = copy_row; r < rows; r += kDown) {
        cp_async<kVec * 4>(dst, src, k_ok && r < rows_in);  // where nothing is read, src may be past the end
        dst += kDown * pitch;
        src += kDown * stride;
      }
    }
  };
  auto load_w = [&](int k0, int slot) {
    float* to = s.stage[slot].w[0];
    load_rows(to, kDepth + 4, w + n0 * w_stride + k0, w_stride, kOutRows, n - n0, k - k0);
    if constexpr (kGated)
      load_rows(to + kOutRows * (kDepth + 4), kDepth + 4, w_up + n0 * w_up_stride + k0, w_up_stride, kOutRows,
                n - n0, k - k0);
  };
  auto load_x = [&](int k0, int slot) {
    load_rows(s.stage[slot].x[0], kDepth, x + m0 * x_stride + k0, x_stride, kWarps * kTokens, m - m0, k - k0);
  };

  // Weights of the whole prologue go first: they do not depend on the kernel before.
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i)
    if (i * kDepth < k) load_w(i * kDepth, i);
  grid_wait();
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) {
    if (i * kDepth < k) load_x(i * kDepth, i);
    cp_async_commit();
  }

  float acc[kRows][kTokens];
#pragma unroll
  for (int r = 0; r < kRows; ++r)
#pragma unroll
    for (int t = 0; t < kTokens; ++t) acc[r][t] = 0.f;

  int slot = 0;
  for (int k0 = 0; k0 < k; k0 += kDepth) {
    cp_async_wait<kStages - 2>();
    __syncthreads();  // this stage has landed for everyone, and everyone is done with the one refilled next
    const int ahead = k0 + (kStages - 1) * kDepth, free_slot = slot == 0 ? kStages - 1 : slot - 1;
    if (ahead < k) {
      load_w(ahead, free_slot);
      load_x(ahead, free_slot);
    }
    cp_async_commit();
    const auto& stage = s.stage[slot];
#pragma unroll 4
    for (int kk = 0; kk < kDepth; kk += 4) {
      Vec<float, 4> wv[kRows], xv[kTokens];
#pragma unroll
      for (int r = 0; r < kRows; ++r) wv[r] = ld_vec<float, 4>(&stage.w[r * 32 + lane][kk]);
#pragma unroll
      for (int t = 0; t < kTokens; ++t) xv[t] = ld_vec<float, 4>(&stage.x[warp * kTokens + t][kk]);
#pragma unroll
      for (int j = 0; j < 4; ++j)
#pragma unroll
        for (int r = 0; r < kRows; ++r)
#pragma unroll
          for (int t = 0; t < kTokens; ++t) acc[r][t] = fmaf(xv[t][j], wv[r][j], acc[r][t]);
    }
    slot = slot == kStages - 1 ? 0 : slot + 1;
  }
  grid_launch_dependents();

  const LinearEpilogue<float, To, 1> out(bias, residual, y, residual_stride, y_stride, m, n, activation);
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const int row = m0 + warp * kTokens + t;
#pragma unroll
    for (int r = 0; r < (kGated ? kRows / 2 : kRows); ++r) {
      float sum[1] = {acc[r][t]};
      if constexpr (kGated) {
        float up[1] = {acc[r + kRows / 2][t]};
        out.store_gated(row, n0 + r * 32 + lane, sum, up);
      } else {
        out.store(row, n0 + r * 32 + lane, sum);
      }
    }
  }
}

}  // namespace pk
