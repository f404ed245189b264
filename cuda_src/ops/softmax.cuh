// Row softmax along the last axis: y = exp(x - max) / sum exp(x - max), or its logarithm.
//
//   softmax_warp   a warp owns one row and keeps it in registers; 4 rows a block; one read, one write.
//   softmax_block  a block owns one row and keeps it in registers; one read, one write.
//   softmax_long   a block owns one row too long for registers: it reads it twice (the second time from L2) and keeps a
//                  running maximum and sum.
//
// A thread's share of a row is whole chunks of 16 bytes whatever the alignment (unaligned rows load a chunk element by
// element), so the order of the additions, and with it every bit of the result, depends on the row's length alone.
// NaN and +inf poison the whole row, a row of -inf gives NaN, as torch.softmax does.
#pragma once
#include "core/block.cuh"
#include "core/vec.cuh"
#include "core/warp.cuh"

namespace pk {

constexpr int kAlignedX = 1;  // bits of `flags`: rows of x (of y) start on 16 bytes
constexpr int kAlignedY = 2;
constexpr int kLog = 4;

template <class T>
constexpr int kChunk = 16 / static_cast<int>(sizeof(T));

// Elements [at, at + kChunk) of a row of n, -inf past its end.
template <class T>
PK_DEVICE Vec<T, kChunk<T>> softmax_load(const T* row, int at, int n, bool aligned) {
  if (aligned && at + kChunk<T> <= n) return ld_vec_stream<T, kChunk<T>>(row + at);
  Vec<T, kChunk<T>> v;
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) v[i] = at + i < n ? ld(row + at + i) : from_float<T>(-INFINITY);
  return v;
}

template <class T>
PK_DEVICE void softmax_store(T* row, int at, int n, bool aligned, const Vec<T, kChunk<T>>& v) {
  if (aligned && at + kChunk<T> <= n) {
    st_vec_stream<T, kChunk<T>>(row + at, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i)
    if (at + i < n) st(row + at + i, v[i]);
}

template <class T>
PK_DEVICE float chunk_max(const Vec<T, kChunk<T>>& v, float m) {
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) m = fmaxf(m, to_float(v[i]));
  return m;
}

template <class T>
PK_DEVICE float chunk_sum(const Vec<T, kChunk<T>>& v, float m, float s) {
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) s += __expf(to_float(v[i]) - m);
  return s;
}

template <class T>
PK_DEVICE Vec<T, kChunk<T>> chunk_result(const Vec<T, kChunk<T>>& v, float m, float s, bool log) {
  Vec<float, kChunk<T>> f;
  const float inv = 1.0f / s, shift = logf(s);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    const float d = to_float(v[i]) - m;
    f[i] = log ? d - shift : __expf(d) * inv;
  }
  return from_float<T>(f);
}

template <class T, int kPer>
__global__ void __launch_bounds__(128)
    softmax_warp(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n, int64_t stride, int flags) {
  const int lane = threadIdx.x % kWarp;
  const int64_t row = static_cast<int64_t>(blockIdx.x) * 4 + threadIdx.x / kWarp;
  grid_wait();
  if (row >= rows) return;
  const T* in = x + row * stride;
  T* out = y + row * n;
  Vec<T, kChunk<T>> v[kPer];
#pragma unroll
  for (int k = 0; k < kPer; ++k) v[k] = softmax_load(in, (k * kWarp + lane) * kChunk<T>, n, flags & kAlignedX);
  grid_launch_dependents();
  float m = -INFINITY, s = 0.0f;
#pragma unroll
  for (int k = 0; k < kPer; ++k) m = chunk_max(v[k], m);
  m = warp_max(m);
#pragma unroll
  for (int k = 0; k < kPer; ++k) s = chunk_sum(v[k], m, s);
  s = warp_sum(s);
#pragma unroll
  for (int k = 0; k < kPer; ++k)
    softmax_store(out, (k * kWarp + lane) * kChunk<T>, n, flags & kAlignedY, chunk_result(v[k], m, s, flags & kLog));
}

template <int kThreads>
struct SoftmaxSmem {
  float scratch[kThreads / kWarp];
};

template <class T, int kThreads, int kPer>
__global__ void __launch_bounds__(kThreads)
    softmax_block(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n, int64_t stride, int flags) {
  PK_SMEM(SoftmaxSmem<kThreads>, smem);
  const int t = threadIdx.x;
  const T* in = x + static_cast<int64_t>(blockIdx.x) * stride;
  T* out = y + static_cast<int64_t>(blockIdx.x) * n;
  grid_wait();
  Vec<T, kChunk<T>> v[kPer];
#pragma unroll
  for (int k = 0; k < kPer; ++k) v[k] = softmax_load(in, (k * kThreads + t) * kChunk<T>, n, flags & kAlignedX);
  grid_launch_dependents();
  float m = -INFINITY, s = 0.0f;
#pragma unroll
  for (int k = 0; k < kPer; ++k) m = chunk_max(v[k], m);
  m = block_max<kThreads>(m, smem.scratch);
#pragma unroll
  for (int k = 0; k < kPer; ++k) s = chunk_sum(v[k], m, s);
  s = block_sum<kThreads>(s, smem.scratch);
#pragma unroll
  for (int k = 0; k < kPer; ++k)
    softmax_store(out, (k * kThreads + t) * kChunk<T>, n, flags & kAlignedY, chunk_result(v[k], m, s, flags & kLog));
}

// A maximum and the sum of exp(x - maximum) over some elements; merging is exact about -inf.
struct RunningSum {
  float m, s;
};
PK_DEVICE RunningSum merge(RunningSum a, RunningSum b) {
  const float m = fmaxf(a.m, b.m);
  if (m == -INFINITY) return {m, a.s + b.s};
  return {m, a.s * __expf(a.m - m) + b.s * __expf(b.m - m)};
}

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    softmax_long(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n, int64_t stride, int flags) {
  PK_SMEM(SoftmaxSmem<kThreads>, smem);
  constexpr int kAhead = 4;  // chunks in flight a thread
  const int t = threadIdx.x;
  const T* in = x + static_cast<int64_t>(blockIdx.x) * stride;
  T* out = y + static_cast<int64_t>(blockIdx.x) * n;
  const bool ax = flags & kAlignedX, ay = flags & kAlignedY;
  grid_wait();
  RunningSum r{-INFINITY, 0.0f};
  for (int64_t base = 0; base < n; base += kAhead * kThreads * kChunk<T>) {
    Vec<T, kChunk<T>> v[kAhead];
    float m = r.m;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t at = base + static_cast<int64_t>(k * kThreads + t) * kChunk<T>;
      v[k] = softmax_load(in, static_cast<int>(at < n ? at : n), n, ax);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) m = chunk_max(v[k], m);
    if (m == -INFINITY) {  // nothing but -inf and NaN so far: keep what NaN there is
#pragma unroll
      for (int k = 0; k < kAhead; ++k) r.s = chunk_sum(v[k], 0.0f, r.s);
      continue;
    }
    r.s = r.m == -INFINITY ? r.s : r.s * __expf(r.m - m);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) r.s = chunk_sum(v[k], m, r.s);
    r.m = m;
  }
  const float m = block_max<kThreads>(r.m, smem.scratch);
  const float part = m == -INFINITY || r.m == -INFINITY ? r.s : r.s * __expf(r.m - m);
  const float s = block_sum<kThreads>(part, smem.scratch);
  grid_launch_dependents();
  for (int64_t base = 0; base < n; base += kAhead * kThreads * kChunk<T>) {
    Vec<T, kChunk<T>> v[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t at = base + static_cast<int64_t>(k * kThreads + t) * kChunk<T>;
      v[k] = softmax_load(in, static_cast<int>(at < n ? at : n), n, ax);
    }
#pragma unroll
    for (int k = 0; k < kAhead; ++k) {
      const int64_t at = base + static_cast<int64_t>(k * kThreads + t) * kChunk<T>;
      if (at < n) softmax_store(out, static_cast<int>(at), n, ay, chunk_result(v[k], m, s, flags & kLog));
    }
  }
}

}  // namespace pk
