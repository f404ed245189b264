// Rows scaled into [-1, 1]: s = max(max |x|, floor), y = x / s. A row with NaN is NaN, as is its s.
//
//   unit_rows  a block owns a row and passes over it twice: for the largest |x|, then (from L1 or L2) to divide.
#pragma once
#include "core/row.cuh"

namespace pk {

constexpr int kUnitThreads = 128;  // rows of a few thousand elements: 1 to 8 chunks of 16 bytes a thread

struct UnitSmem {
  int largest[kUnitThreads / kWarp];
};

template <class T, bool kFast>
PK_DEVICE void unit_row(const T* in, T* out, float* s, int n, float floor, UnitSmem& smem) {
  constexpr int kStep = kUnitThreads * kChunk<T>;
  // Floats without a sign are ordered as their bits are, and NaN is above infinity: an integer maximum keeps it.
  int bits = 0;
  for (int at = threadIdx.x * kChunk<T>; at < n; at += kStep) {
    const Chunk<T> v = row_load<kFast>(in, at, n, from_float<T>(0.0f));
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) bits = max(bits, __float_as_int(fabsf(to_float(v[i]))));
  }
  bits = warp_max(bits);
  if (lane_id() == 0) smem.largest[warp_id()] = bits;
  __syncthreads();
  for (int w = 0; w < kUnitThreads / kWarp; ++w) bits = max(bits, smem.largest[w]);
  const float most = __int_as_float(bits);
  const float scale = most < floor ? floor : most;  // NaN is not below anything
  if (threadIdx.x == 0) st(s, scale);
  grid_launch_dependents();
  for (int at = threadIdx.x * kChunk<T>; at < n; at += kStep) {
    Chunk<T> v = row_load<kFast>(in, at, n, from_float<T>(0.0f));
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) v[i] = from_float<T>(to_float(v[i]) / scale);
    row_store<kFast>(out, at, n, v);
  }
}

template <class T>
__global__ void __launch_bounds__(kUnitThreads)
    unit_rows(const T* __restrict__ x, T* __restrict__ y, float* __restrict__ s, int n, int64_t stride, float floor,
              int fast) {
  PK_SMEM(UnitSmem, smem);
  const int64_t row = blockIdx.x;
  grid_wait();  // x may come from the kernel before, and y may still be read by it
  if (fast)
    unit_row<T, true>(x + row * stride, y + row * n, s + row, n, floor, smem);
  else
    unit_row<T, false>(x + row * stride, y + row * n, s + row, n, floor, smem);
}

}  // namespace pk
