// y[m, n] = act(x[m, n]) * x[m, N + n]: the two halves of a gated MLP's first projection, side by side in x.
// A thread owns kPer chunks of 16 bytes of y, one grid apart: three streams, each byte touched once.
#pragma once
#include "core/epilogue.cuh"
#include "core/row.cuh"

namespace pk {

constexpr int kGatedThreads = 256;

template <class T, Act kAct, int kPer, bool kFast>
PK_DEVICE void gated_act_chunks(const T* x, T* y, int64_t rows, int64_t stride, int n) {
  const uint32_t per_row = (n + kChunk<T> - 1) / kChunk<T>;
  const int64_t total = rows * per_row, step = static_cast<int64_t>(gridDim.x) * kGatedThreads;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kGatedThreads + threadIdx.x;
  const T zero = from_float<T>(0.0f);
  Chunk<T> gate[kPer], up[kPer];
  int64_t row[kPer];
  int at[kPer];
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const int64_t i = first + k * step;
    // 32-bit division is several times cheaper, and covers all but the largest tensors.
    row[k] = total >> 32 ? i / per_row : static_cast<int64_t>(static_cast<uint32_t>(i) / per_row);
    // Past the end: a place at the end of the last row, where nothing is loaded or stored.
    at[k] = i < total ? static_cast<int>(i - row[k] * per_row) * kChunk<T> : n;
    row[k] = i < total ? row[k] : rows - 1;
    gate[k] = row_load_stream<kFast>(x + row[k] * stride, at[k], n, zero);
    up[k] = row_load_stream<kFast>(x + row[k] * stride + n, at[k], n, zero);
  }
  grid_launch_dependents();
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    Vec<float, kChunk<T>> g = to_float(gate[k]);
    const Vec<float, kChunk<T>> u = to_float(up[k]);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) g[i] = activate<kAct>(g[i]) * u[i];
    row_store_stream<kFast>(y + row[k] * n, at[k], n, from_float<T>(g));
  }
}

template <class T, Act kAct, int kPer>
__global__ void __launch_bounds__(kGatedThreads)
    gated_act(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int64_t stride, int n, int fast) {
  grid_wait();
  if (fast)
    gated_act_chunks<T, kAct, kPer, true>(x, y, rows, stride, n);
  else
    gated_act_chunks<T, kAct, kPer, false>(x, y, rows, stride, n);
}

}  // namespace pk
