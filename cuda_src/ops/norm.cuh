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

constexpr int kNormAlignedX = 1;  // bits of `flags`: 16-byte rows of x, of the residual, of y and the new residual
constexpr int kNormAlignedR = 2;
constexpr int kNormAlignedY = 4;
constexpr int kNormAlignedW = 8;

template <class T>
struct NormArgs {
  const T* x;
  const T* residual;  // null: none
  const T* w;         // null: ones
  const T* b;         // null: zeros
  T* y;
  T* h_out;  // x + residual, when there is one
  int64_t rows, stride_x, stride_r;
  int n, flags;
  float eps;
};

template <class T>
PK_DEVICE Chunk<T> norm_load(const NormArgs<T>& a, int64_t row, int at) {
  const T zero = from_float<T>(0.0f);
  Chunk<T> v = row_load(a.x + row * a.stride_x, at, a.n, a.flags & kNormAlignedX, zero);
  if (a.residual) {
    const Chunk<T> r = row_load(a.residual + row * a.stride_r, at, a.n, a.flags & kNormAlignedR, zero);
    Vec<float, kChunk<T>> sum = to_float(v);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) sum[i] += to_float(r[i]);
    v = from_float<T>(sum);
    row_store(a.h_out + row * a.n, at, a.n, a.flags & kNormAlignedY, v);
  }
  return v;
}

// sum over the chunk of (v * scale - shift)^2, elements past n left out.
template <class T>
PK_DEVICE float chunk_squares(const Chunk<T>& v, int at, int n, float scale, float shift, float s) {
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    const float d = to_float(v[i]) * scale - shift;
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

template <class T>
PK_DEVICE void norm_store(const NormArgs<T>& a, int64_t row, int at, const Chunk<T>& v, float scale, float mean, float r) {
  if (at >= a.n) return;
  const T one = from_float<T>(1.0f), zero = from_float<T>(0.0f);
  Vec<float, kChunk<T>> f = to_float(v);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) f[i] = (f[i] * scale - mean) * r;
  if (a.w) {
    const Chunk<T> w = row_load(a.w, at, a.n, a.flags & kNormAlignedW, one);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) f[i] *= to_float(w[i]);
  }
  if (a.b) {
    const Chunk<T> b = row_load(a.b, at, a.n, a.flags & kNormAlignedW, zero);
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) f[i] += to_float(b[i]);
  }
  row_store_stream(a.y + row * a.n, at, a.n, a.flags & kNormAlignedY, from_float<T>(f));
}

// What a row is multiplied with before its statistics are taken. 1, unless its squares overflow.
constexpr float kNormSmall = 0x1p-100f;
constexpr float kNormLarge = 1e37f;  // a sum of squares above this may already have lost terms to rounding up

// Statistics of a row given by load(k) -> chunk and at(k) for k in [0, per): the mean (0 for RMS) and the reciprocal
// root, of h * scale.
struct NormStats {
  float scale, mean, r;
};
template <bool kLayer, class Group, class T, class Load, class At>
PK_DEVICE NormStats norm_stats(int per, int n, float eps, float first, typename Group::Smem& smem, Load load, At at) {
  const float inv_n = 1.0f / static_cast<float>(n);
  NormStats st{1.0f, 0.0f, 0.0f};
  for (int attempt = 0; attempt < 2; ++attempt) {
    st.mean = 0.0f;
    if constexpr (kLayer) {
      const float origin = first * st.scale;
      float s = 0.0f;
#pragma unroll
      for (int k = 0; k < per; ++k) s = chunk_total<T>(load(k), at(k), n, st.scale, origin, s);
      st.mean = origin + Group::sum(s, smem) * inv_n;
    }
    float q = 0.0f;
#pragma unroll
    for (int k = 0; k < per; ++k) q = chunk_squares<T>(load(k), at(k), n, st.scale, st.mean, q);
    q = Group::sum(q, smem);
    st.r = rsqrtf(q * inv_n + eps);
    if (q < kNormLarge || attempt == 1) break;  // the same for every thread of the group
    st.scale = kNormSmall;
    eps *= kNormSmall * kNormSmall;
  }
  return st;
}

template <class T, bool kLayer, int kThreads, int kPer>
__global__ void __launch_bounds__(RowGroup<kThreads>::kBlock) norm_rows(const T* x, const T* residual,
                                                                      const T* __restrict__ w, const T* __restrict__ b,
                                                                      T* y, T* h_out, int64_t rows, int64_t stride_x,
                                                                      int64_t stride_r, int n, float eps, int flags) {
  using Group = RowGroup<kThreads>;
  PK_SMEM(typename Group::Smem, smem);
  const NormArgs<T> a{x, residual, w, b, y, h_out, rows, stride_x, stride_r, n, flags, eps};
  const int64_t row = Group::row();
  grid_wait();
  if (row >= rows) return;
  auto at = [&](int k) { return Group::at(k, kChunk<T>); };
  Chunk<T> v[kPer];
#pragma unroll
  for (int k = 0; k < kPer; ++k) v[k] = norm_load(a, row, at(k));
  grid_launch_dependents();
  float first = 0.0f;
  if constexpr (kLayer) {
    first = to_float(ld(x + row * stride_x));
    if (residual) first = to_float(from_float<T>(first + to_float(ld(residual + row * stride_r))));
  }
  const NormStats st = norm_stats<kLayer, Group, T>(kPer, n, eps, first, smem, [&](int k) { return v[k]; }, at);
#pragma unroll
  for (int k = 0; k < kPer; ++k) norm_store(a, row, at(k), v[k], st.scale, st.mean, st.r);
}

template <class T, bool kLayer, int kThreads>
__global__ void __launch_bounds__(kThreads) norm_long(const T* x, const T* residual, const T* __restrict__ w,
                                                      const T* __restrict__ b, T* y, T* h_out, int64_t rows,
                                                      int64_t stride_x, int64_t stride_r, int n, float eps, int flags) {
  using Group = RowGroup<kThreads>;
  PK_SMEM(typename Group::Smem, smem);
  const NormArgs<T> a{x, residual, w, b, y, h_out, rows, stride_x, stride_r, n, flags, eps};
  const int64_t row = blockIdx.x;
  const int per = (n + kThreads * kChunk<T> - 1) / (kThreads * kChunk<T>);
  grid_wait();
  auto at = [&](int k) { return Group::at(k, kChunk<T>); };
  float first = 0.0f;
  if constexpr (kLayer) {
    first = to_float(ld(x + row * stride_x));
    if (residual) first = to_float(from_float<T>(first + to_float(ld(residual + row * stride_r))));
  }
  // A thread reads back only what it wrote itself, so no barrier is needed between the passes.
  if (residual)
    for (int k = 0; k < per; ++k) norm_load(a, row, at(k));
  const T* h = residual ? h_out + row * n : x + row * stride_x;
  const bool aligned = flags & (residual ? kNormAlignedY : kNormAlignedX);
  auto load = [&](int k) { return row_load(h, at(k), n, aligned, from_float<T>(0.0f)); };
  const NormStats st = norm_stats<kLayer, Group, T>(per, n, eps, first, smem, load, at);
  grid_launch_dependents();
  for (int k = 0; k < per; ++k) norm_store(a, row, at(k), load(k), st.scale, st.mean, st.r);
}

}  // namespace pk
