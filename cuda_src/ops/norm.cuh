// Row normalisation: y = h * rsqrt(mean(h^2) + eps) * w (RMS), or y = (h - mean) * rsqrt(var + eps) * w + b (layer),
// where h = x, or x + residual rounded to T, which is stored too.
//
//   norm_rows  a warp (4 rows a block) or a block owns one row and keeps h in registers: one read, one write.
//   norm_long  a block owns a row too long for registers and reads h again, from L2, for every pass.
//
// The mean of layer norm is taken of h - h[0], then the variance of h - mean: two passes over registers, no
// cancellation when the mean is large. Squares are float32; a row whose sum of squares leaves float32's range is done
// again on h * 2^-100 (norm_scale), so that 1e30 normalises like 1.
#pragma once
#include "core/row.cuh"

namespace pk {

template <class T>
struct NormArgs {
  const T* x;
  const T* residual;  // null: none
  const T* w;         // null: ones
  const T* b;         // null: zeros
  T* y;
  T* h_out;  // x + residual, when there is one
  int64_t rows, stride_x, stride_r;
  int n;
  float eps;
};

template <bool kFast, class T>
PK_DEVICE Chunk<T> norm_load(const NormArgs<T>& a, int64_t row, int at) {
  const T zero = from_float<T>(0.0f);
  Chunk<T> v = row_load_stream<kFast>(a.x + row * a.stride_x, at, a.n, zero);
  if (a.residual) {
    const Chunk<T> r = row_load_stream<kFast>(a.residual + row * a.stride_r, at, a.n, zero);
    Vec<float, kChunk<T>> sum = to_float(v);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) sum[i] += to_float(r[i]);
    v = from_float<T>(sum);
    row_store<kFast>(a.h_out + row * a.n, at, a.n, v);
  }
  return v;
}

// sum over the chunk of (v * scale - origin - mean)^2, elements past n left out.
template <class T>
PK_DEVICE float chunk_squares(const Chunk<T>& v, int at, int n, float scale, float origin, float mean, float s) {
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    const float d = to_float(v[i]) * scale - origin - mean;
    if (at + i < n) s = fmaf(d, d, s);
  }
  return s;
}

template <class T>
PK_DEVICE float chunk_total(const Chunk<T>& v, int at, int n, float scale, float shift, float s) {
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i)
    if (at + i < n) s += to_float(v[i]) * scale - shift;
  return s;
}

// What normalises a row: y = (h * scale - origin - mean) * r. The mean is kept relative to the origin, the row's first
// element: their sum, rounded, would be off by as much as the elements differ when they are large.
struct NormStats {
  float scale, origin, mean, r;
};

template <bool kFast, class T>
PK_DEVICE void norm_store(const NormArgs<T>& a, int64_t row, int at, const Chunk<T>& v, const NormStats& st) {
  if (at >= a.n) return;
  const T one = from_float<T>(1.0f), zero = from_float<T>(0.0f);
  Vec<float, kChunk<T>> f = to_float(v);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) f[i] = (f[i] * st.scale - st.origin - st.mean) * st.r;
  if (a.w) {
    const Chunk<T> w = row_load<kFast>(a.w, at, a.n, one);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) f[i] *= to_float(w[i]);
  }
  if (a.b) {
    const Chunk<T> b = row_load<kFast>(a.b, at, a.n, zero);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) f[i] += to_float(b[i]);
  }
  row_store_stream<kFast>(a.y + row * a.n, at, a.n, from_float<T>(f));
}

// What a row is multiplied with before its statistics are taken. 1, unless its squares overflow.
constexpr float kNormSmall = 0x1p-100f;
constexpr float kNormLarge = 1e37f;  // a sum of squares above this may already have lost terms to rounding up

// Statistics of a row given by load(k) -> chunk and at(k) for k in [0, per), both zero for RMS.
template <bool kLayer, class Group, class T, class Load, class At>
PK_DEVICE NormStats norm_stats(int per, int n, float eps, float first, typename Group::Smem& smem, Load load, At at) {
  const float inv_n = 1.0f / static_cast<float>(n);
  constexpr int kAttempts = detail::same<T, half>::value ? 1 : 2;  // squares of float16 cannot overflow
  NormStats st{1.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int attempt = 0; attempt < kAttempts; ++attempt) {
    st.mean = 0.0f;
    if constexpr (kLayer) {
      st.origin = first * st.scale;
      float s = 0.0f;
#pragma unroll
      for (int k = 0; k < per; ++k) s = chunk_total<T>(load(k), at(k), n, st.scale, st.origin, s);
      st.mean = Group::sum(s, smem) * inv_n;
    }
    float q = 0.0f;
#pragma unroll
    for (int k = 0; k < per; ++k) q = chunk_squares<T>(load(k), at(k), n, st.scale, st.origin, st.mean, q);
    q = Group::sum(q, smem);
    st.r = rsqrtf(q * inv_n + eps);
    if (q < kNormLarge || attempt == kAttempts - 1) break;  // the same for every thread of the group
    st.scale = kNormSmall;
    eps *= kNormSmall * kNormSmall;
  }
  return st;
}

// The row's first element, the origin its mean is taken from.
template <class T>
PK_DEVICE float norm_first(const NormArgs<T>& a, int64_t row) {
  const float first = to_float(ld(a.x + row * a.stride_x));
  return a.residual ? to_float(from_float<T>(first + to_float(ld(a.residual + row * a.stride_r)))) : first;
}

template <class T, bool kLayer, int kThreads, int kPer, bool kFast>
PK_DEVICE void norm_in_registers(const NormArgs<T>& a, int64_t row, typename RowGroup<kThreads>::Smem& smem) {
  using Group = RowGroup<kThreads>;
  auto at = [&](int k) { return Group::at(k, kChunk<T>); };
  Chunk<T> v[kPer];
#pragma unroll
  for (int k = 0; k < kPer; ++k) v[k] = norm_load<kFast>(a, row, at(k));
  grid_launch_dependents();
  const float first = kLayer ? norm_first(a, row) : 0.0f;
  const NormStats st = norm_stats<kLayer, Group, T>(kPer, a.n, a.eps, first, smem, [&](int k) { return v[k]; }, at);
#pragma unroll
  for (int k = 0; k < kPer; ++k) norm_store<kFast>(a, row, at(k), v[k], st);
}

// Layer norm makes one pass more and needs the registers for it.
template <bool kLayer, int kThreads>
constexpr int kNormResident =
    RowGroup<kThreads>::kResident > 1 ? RowGroup<kThreads>::kResident * (kLayer ? 4 : 6) / 8 : 1;

template <class T, bool kLayer, int kThreads, int kPer>
__global__ void __launch_bounds__(RowGroup<kThreads>::kBlock, kNormResident<kLayer, kThreads>)
    norm_rows(const T* x, const T* residual, const T* __restrict__ w, const T* __restrict__ b, T* y, T* h_out,
              int64_t rows, int64_t stride_x, int64_t stride_r, int n, float eps, int fast) {
  using Group = RowGroup<kThreads>;
  PK_SMEM(typename Group::Smem, smem);
  const NormArgs<T> a{x, residual, w, b, y, h_out, rows, stride_x, stride_r, n, eps};
  const int64_t row = Group::row();
  grid_wait();
  if (row >= rows) return;
  if (fast)
    norm_in_registers<T, kLayer, kThreads, kPer, true>(a, row, smem);
  else
    norm_in_registers<T, kLayer, kThreads, kPer, false>(a, row, smem);
}

template <class T, bool kLayer, int kThreads, bool kFast>
PK_DEVICE void norm_again(const NormArgs<T>& a, int64_t row, typename RowGroup<kThreads>::Smem& smem) {
  using Group = RowGroup<kThreads>;
  const int per = (a.n + kThreads * kChunk<T> - 1) / (kThreads * kChunk<T>);
  auto at = [&](int k) { return Group::at(k, kChunk<T>); };
  const float first = kLayer ? norm_first(a, row) : 0.0f;
  // A thread reads back only what it wrote itself, so no barrier is needed between the passes.
  if (a.residual)
    for (int k = 0; k < per; ++k) norm_load<kFast>(a, row, at(k));
  const T* h = a.residual ? a.h_out + row * a.n : a.x + row * a.stride_x;
  auto load = [&](int k) { return row_load<kFast>(h, at(k), a.n, from_float<T>(0.0f)); };
  const NormStats st = norm_stats<kLayer, Group, T>(per, a.n, a.eps, first, smem, load, at);
  grid_launch_dependents();
  for (int k = 0; k < per; ++k) norm_store<kFast>(a, row, at(k), load(k), st);
}

template <class T, bool kLayer, int kThreads>
__global__ void __launch_bounds__(kThreads, 1)
    norm_long(const T* x, const T* residual, const T* __restrict__ w, const T* __restrict__ b, T* y, T* h_out,
              int64_t rows, int64_t stride_x, int64_t stride_r, int n, float eps, int fast) {
  PK_SMEM(typename RowGroup<kThreads>::Smem, smem);
  const NormArgs<T> a{x, residual, w, b, y, h_out, rows, stride_x, stride_r, n, eps};
  grid_wait();
  if (fast)
    norm_again<T, kLayer, kThreads, true>(a, blockIdx.x, smem);
  else
    norm_again<T, kLayer, kThreads, false>(a, blockIdx.x, smem);
}

}  // namespace pk
