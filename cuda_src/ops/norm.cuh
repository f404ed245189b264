// Row normalisation: y = h * rsqrt(mean(h^2) + eps) * w (RMS), or y = (h - mean) * rsqrt(var + eps) * w + b (layer),
// where h = x, or x + residual rounded to T, which is stored too.
//
//   norm_rows   a warp (4 rows a block) or a block owns one row and keeps h in registers: one read, one write.
//   norm_again  a block owns a row too long for registers, or not aligned, and reads h again, from L2, for every pass.
//
// The mean of layer norm is taken of h - h[0], then the variance of h - mean: two passes over registers, no
// cancellation when the mean is large. Squares are float32; a row whose sum of squares leaves float32's range is done
// again on h * 2^-100 (norm_scale), so that 1e30 normalises like 1.
#pragma once
#include "core/row.cuh"

namespace pk {

template <class T>
struct NormRow {
  const T* x;
  const T* residual;  // null: none
  const T* w;         // null: ones
  const T* b;         // null: zeros
  T* y;
  T* h_out;  // x + residual, when there is one
  int n;
  float inv_n, eps;
};

template <class T>
PK_DEVICE NormRow<T> norm_row(const T* x, const T* residual, const T* w, const T* b, T* y, T* h_out, int64_t row,
                              int64_t stride_x, int64_t stride_r, int n, float inv_n, float eps) {
  return {x + row * stride_x, residual ? residual + row * stride_r : nullptr, w, b, y + row * n, h_out + row * n,
          n, inv_n, eps};
}

// A chunk of h = x + residual, which is stored.
template <bool kFast, class T>
PK_DEVICE Chunk<T> norm_add(const NormRow<T>& a, int at, const Chunk<T>& x, const Chunk<T>& r) {
  Vec<float, kChunk<T>> sum = to_float(x);
  const Vec<float, kChunk<T>> more = to_float(r);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) sum[i] += more[i];
  const Chunk<T> h = from_float<T>(sum);
  row_store<kFast>(a.h_out, at, a.n, h);
  return h;
}

// What normalises a row: y = (h * scale - origin - mean) * r. The mean is kept relative to the origin, the row's first
// element: their sum, rounded, would be off by as much as the elements differ when they are large.
struct NormStats {
  float scale, origin, mean, r;
};

// (h * scale - origin - mean), for RMS h * scale alone.
template <bool kLayer>
PK_DEVICE float norm_centred(float h, const NormStats& st) {
  return kLayer ? fmaf(h, st.scale, -st.origin) - st.mean : h * st.scale;
}

// s + the sum over a chunk of its centred elements' squares, or of the elements less the origin. Past the end of the
// row a chunk holds zeros: nothing to RMS, but off the mean. Whole chunks (kFast) are in the row or past it.
template <bool kLayer, bool kFast, class T>
PK_DEVICE float chunk_squares(const Chunk<T>& v, int at, int n, const NormStats& st, float s) {
  if (kLayer && kFast && at >= n) return s;
  const Vec<float, kChunk<T>> f = to_float(v);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    const float d = norm_centred<kLayer>(f[i], st);
    if (!kLayer || kFast || at + i < n) s = fmaf(d, d, s);
  }
  return s;
}

template <bool kFast, class T>
PK_DEVICE float chunk_total(const Chunk<T>& v, int at, int n, const NormStats& st, float s) {
  if (kFast && at >= n) return s;
  const Vec<float, kChunk<T>> f = to_float(v);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i)
    if (kFast || at + i < n) s += fmaf(f[i], st.scale, -st.origin);
  return s;
}

template <bool kLayer, bool kFast, class T>
PK_DEVICE void norm_store(const NormRow<T>& a, int at, const Chunk<T>& v, const Chunk<T>& w,
                          const NormStats& st) {
  if (at >= a.n) return;
  Vec<float, kChunk<T>> f = to_float(v);
  const Vec<float, kChunk<T>> weights = to_float(w);
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) f[i] = norm_centred<kLayer>(f[i], st) * st.r * weights[i];
  if (kLayer && a.b) {
    const Vec<float, kChunk<T>> b = to_float(row_load<kFast>(a.b, at, a.n, from_float<T>(0.0f)));
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i) f[i] += b[i];
  }
  row_store_stream<kFast>(a.y, at, a.n, from_float<T>(f));
}

template <bool kFast, class T>
PK_DEVICE Chunk<T> norm_weights(const NormRow<T>& a, int at) {
  const T one = from_float<T>(1.0f);
  return row_load<kFast>(a.w, at, a.w ? a.n : 0, one);
}

// What a row is multiplied with before its statistics are taken. 1, unless its squares overflow.
constexpr float kNormSmall = 0x1p-100f;
constexpr float kNormLarge = 1e37f;  // a sum of squares above this may already have lost terms to rounding up

// Statistics of a row's elements times scale. Returns their sum of squares.
template <bool kLayer, class Group, class T, class Row>
PK_DEVICE float norm_pass(const NormRow<T>& a, Row& row, float first, float scale, typename Group::Smem& smem,
                          NormStats& st) {
  st = {scale, 0.0f, 0.0f, 0.0f};
  if constexpr (kLayer) {
    st.origin = first * scale;
    float s = 0.0f;
#pragma unroll
    for (int k = 0; k < row.per(); ++k) s = chunk_total<Row::kFast>(row.chunk(k), row.at(k), a.n, st, s);
    st.mean = Group::sum(s, smem) * a.inv_n;
    row.again();
  }
  float q = 0.0f;
#pragma unroll
  for (int k = 0; k < row.per(); ++k) q = chunk_squares<kLayer, Row::kFast>(row.chunk(k), row.at(k), a.n, st, q);
  q = Group::sum(q, smem);
  row.again();
  st.r = rsqrtf(q * a.inv_n + a.eps * scale * scale);
  return q;
}

template <bool kLayer, class Group, class T, class Row>
PK_DEVICE NormStats norm_stats(const NormRow<T>& a, Row& row, float first, typename Group::Smem& smem) {
  NormStats st;
  const float q = norm_pass<kLayer, Group>(a, row, first, 1.0f, smem, st);
  constexpr bool kMayOverflow = !detail::same<T, half>::value;
  // The same for every thread of the group. A NaN, too, goes round again, and stays one.
  if (kMayOverflow && !(q < kNormLarge)) norm_pass<kLayer, Group>(a, row, first, kNormSmall, smem, st);
  return st;
}

// The row's first element, the origin its mean is taken from.
template <class T>
PK_DEVICE float norm_first(const NormRow<T>& a) {
  const float first = to_float(ld(a.x));
  return a.residual ? to_float(from_float<T>(first + to_float(ld(a.residual)))) : first;
}

// Blocks an SM: layer norm makes one pass more and needs the registers for it, as a residual does in float32.
template <bool kLayer, int kThreads>
constexpr int kNormResident = kLayer ? (RowGroup<kThreads>::kResident + 1) / 2 : RowGroup<kThreads>::kResident;

// The weights are read before the kernel waits for those before it, and while the row is on its way.
template <class T, bool kLayer, int kThreads, int kPer>
__global__ void __launch_bounds__(RowGroup<kThreads>::kBlock, kNormResident<kLayer, kThreads>)
    norm_rows(const T* x, const T* residual, const T* __restrict__ w, const T* __restrict__ b, T* y, T* h_out,
              int64_t rows, int64_t stride_x, int64_t stride_r, int n, float inv_n, float eps) {
  using Group = RowGroup<kThreads>;
  PK_SMEM(typename Group::Smem, smem);
  const int64_t row = Group::row();
  const NormRow<T> a = norm_row(x, residual, w, b, y, h_out, row, stride_x, stride_r, n, inv_n, eps);
  const T zero = from_float<T>(0.0f);
  constexpr bool kAhead = kThreads < 256;  // with more, the registers for it halve the rows in flight
  RegisterRow<T, Group, kPer> h, weights;
#pragma unroll
  for (int k = 0; kAhead && k < kPer; ++k) weights.set(k, norm_weights<true>(a, h.at(k)));
  grid_wait();
  if (row >= rows) return;
#pragma unroll
  for (int k = 0; k < kPer; ++k) h.set(k, row_load_stream<true>(a.x, h.at(k), n, zero));
  if (a.residual) {
    RegisterRow<T, Group, kPer> r;
#pragma unroll
    for (int k = 0; k < kPer; ++k) r.set(k, row_load_stream<true>(a.residual, h.at(k), n, zero));
#pragma unroll
    for (int k = 0; k < kPer; ++k) h.set(k, norm_add<true>(a, h.at(k), h.chunk(k), r.chunk(k)));
  }
  grid_launch_dependents();
  const float first = kLayer ? norm_first(a) : 0.0f;
  const NormStats st = norm_stats<kLayer, Group>(a, h, first, smem);
#pragma unroll
  for (int k = 0; k < kPer; ++k) {
    const Chunk<T> w = kAhead ? weights.chunk(k) : norm_weights<true>(a, h.at(k));
    norm_store<kLayer, true>(a, h.at(k), h.chunk(k), w, st);
  }
}

template <class T, bool kLayer, bool kFast>
PK_DEVICE void norm_memory_row(const NormRow<T>& a, AnyRowGroup::Smem& smem) {
  const T zero = from_float<T>(0.0f);
  const float first = kLayer ? norm_first(a) : 0.0f;
  MemoryRow<T, AnyRowGroup, kFast> h{a.residual ? a.h_out : a.x, a.n, zero};
  // A thread reads back only what it wrote itself, so no barrier is needed between the passes.
  if (a.residual)
    for (int k = 0; k < h.per(); ++k)
      norm_add<kFast>(a, h.at(k), row_load_stream<kFast>(a.x, h.at(k), a.n, zero),
                      row_load_stream<kFast>(a.residual, h.at(k), a.n, zero));
  const NormStats st = norm_stats<kLayer, AnyRowGroup>(a, h, first, smem);
  grid_launch_dependents();
  for (int k = 0; k < h.per(); ++k)
    norm_store<kLayer, kFast>(a, h.at(k), h.chunk(k), norm_weights<kFast>(a, h.at(k)), st);
}

template <class T, bool kLayer>
__global__ void __launch_bounds__(1024)
    norm_again(const T* x, const T* residual, const T* __restrict__ w, const T* __restrict__ b, T* y, T* h_out,
               int64_t rows, int64_t stride_x, int64_t stride_r, int n, float inv_n, float eps, int fast) {
  PK_SMEM(AnyRowGroup::Smem, smem);
  const int64_t row = AnyRowGroup::row();
  const NormRow<T> a = norm_row(x, residual, w, b, y, h_out, row, stride_x, stride_r, n, inv_n, eps);
  grid_wait();
  if (fast)
    norm_memory_row<T, kLayer, true>(a, smem);
  else
    norm_memory_row<T, kLayer, false>(a, smem);
}

}  // namespace pk
