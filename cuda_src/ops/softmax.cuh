// Row softmax along the last axis: y = exp(x - max) / sum exp(x - max), or its logarithm.
//
//   softmax_rows   a warp (4 rows a block) or a block owns one row and keeps it in registers: one read, one write.
//   softmax_again  a block owns a row that is not aligned, and reads it again for every pass.
//   softmax_long   a block owns a row too long for registers: it reads it twice, the second time from L2, and keeps a
//                  running maximum and sum.
//
// NaN and +inf poison the whole row, a row of -inf gives NaN, as torch.softmax does.
#pragma once
#include "core/row.cuh"

namespace pk {

constexpr int kFastRows = 1;  // bits of `flags`: see core/row.cuh
constexpr int kLog = 2;

template <class T>
PK_DEVICE float chunk_max(const Chunk<T>& v, float m) {
  const Vec<float, kChunk<T>> f = to_float(v);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) m = fmaxf(m, f[i]);
  return m;
}

template <class T>
PK_DEVICE float chunk_sum(const Chunk<T>& v, float m, float s) {
  const Vec<float, kChunk<T>> f = to_float(v);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) s += __expf(f[i] - m);
  return s;
}

template <class T>
PK_DEVICE Chunk<T> chunk_result(const Chunk<T>& v, float m, float s, bool log) {
  Vec<float, kChunk<T>> f = to_float(v);
  const float inv = 1.0f / s, shift = logf(s);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    const float d = f[i] - m;
    f[i] = log ? d - shift : __expf(d) * inv;
  }
  return from_float<T>(f);
}

template <class Group, class T, class Row>
PK_DEVICE void softmax_row(Row& v, T* out, int n, bool log, typename Group::Smem& smem) {
  float m = -INFINITY, s = 0.0f;
#pragma unroll
  for (int k = 0; k < v.per(); ++k) m = chunk_max<T>(v.chunk(k), m);
  m = Group::max(m, smem);
  v.again();
#pragma unroll
  for (int k = 0; k < v.per(); ++k) s = chunk_sum<T>(v.chunk(k), m, s);
  s = Group::sum(s, smem);
  v.again();
#pragma unroll
  for (int k = 0; k < v.per(); ++k)
    row_store_stream<Row::kFast>(out, v.at(k), n, chunk_result<T>(v.chunk(k), m, s, log));
}

template <class T, int kThreads, int kPer>
__global__ void __launch_bounds__(RowGroup<kThreads>::kBlock, RowGroup<kThreads>::kResident)
    softmax_rows(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n, int64_t stride, int flags) {
  using Group = RowGroup<kThreads>;
  PK_SMEM(typename Group::Smem, smem);
  const int64_t row = Group::row();
  const T* in = x + row * stride;
  const T pad = from_float<T>(-INFINITY);
  RegisterRow<T, Group, kPer> v;
  grid_wait();
  if (row >= rows) return;
#pragma unroll
  for (int k = 0; k < kPer; ++k) v.set(k, row_load_stream<true>(in, v.at(k), n, pad));
  grid_launch_dependents();
  softmax_row<Group>(v, y + row * n, n, flags & kLog, smem);
}

template <class T>
__global__ void __launch_bounds__(1024)
    softmax_again(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n, int64_t stride, int flags) {
  PK_SMEM(AnyRowGroup::Smem, smem);
  const int64_t row = AnyRowGroup::row();
  MemoryRow<T, AnyRowGroup, false> v{x + row * stride, n, from_float<T>(-INFINITY)};
  grid_wait();
  grid_launch_dependents();
  softmax_row<AnyRowGroup>(v, y + row * n, n, flags & kLog, smem);
}

template <class T, int kThreads, bool kFast>
PK_DEVICE void softmax_twice(const T* in, T* out, int n, bool log, typename RowGroup<kThreads>::Smem& smem) {
  using Group = RowGroup<kThreads>;
  constexpr int kAhead = 4;  // chunks in flight a thread
  constexpr int kStep = kAhead * kThreads * kChunk<T>;
  const T pad = from_float<T>(-INFINITY);
  // Past the end a chunk is all padding; the bound keeps its index an int.
  auto place = [&](int64_t base, int k) {
    const int64_t at = base + row_place<T, Group>(k);
    return static_cast<int>(at < n ? at : n);
  };
  float m = -INFINITY, s = 0.0f;
  for (int64_t base = 0; base < n; base += kStep) {
    Chunk<T> v[kAhead];
    float top = m;
#pragma unroll
    for (int k = 0; k < kAhead; ++k) v[k] = row_load<kFast>(in, place(base, k), n, pad);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) top = chunk_max<T>(v[k], top);
    // Nothing but -inf and NaN so far: exp(-inf - 0) = 0 and NaN stays.
    const float shift = top == -INFINITY ? 0.0f : top;
    s = m == -INFINITY ? s : s * __expf(m - shift);
#pragma unroll
    for (int k = 0; k < kAhead; ++k) s = chunk_sum<T>(v[k], shift, s);
    m = top;
  }
  const float top = Group::max(m, smem);
  s = Group::sum(m == -INFINITY ? s : s * __expf(m - top), smem);
  grid_launch_dependents();
  for (int64_t base = 0; base < n; base += kStep) {
    Chunk<T> v[kAhead];
#pragma unroll
    for (int k = 0; k < kAhead; ++k) v[k] = row_load<kFast>(in, place(base, k), n, pad);
#pragma unroll
    for (int k = 0; k < kAhead; ++k)
      row_store_stream<kFast>(out, place(base, k), n, chunk_result<T>(v[k], top, s, log));
  }
}

template <class T, int kThreads>
__global__ void __launch_bounds__(kThreads)
    softmax_long(const T* __restrict__ x, T* __restrict__ y, int64_t rows, int n, int64_t stride, int flags) {
  PK_SMEM(typename RowGroup<kThreads>::Smem, smem);
  const T* in = x + static_cast<int64_t>(blockIdx.x) * stride;
  T* out = y + static_cast<int64_t>(blockIdx.x) * n;
  grid_wait();
  if (flags & kFastRows)
    softmax_twice<T, kThreads, true>(in, out, n, flags & kLog, smem);
  else
    softmax_twice<T, kThreads, false>(in, out, n, flags & kLog, smem);
}

}  // namespace pk
