// What every `linear` kernel does with its fp32 sums: y = act(sum + bias) + residual, or, gated,
// y = act(gate) * up. One definition, so that kernels of one numerics class agree in the last bit.
#pragma once
#include "core/target.cuh"
#include "core/vec.cuh"

namespace pk {

// The values are part of the plan's argument list (ACTIVATIONS in pykern/ops/linear.py).
enum LinearActivation : int { kLinearRelu = 1, kLinearGelu = 2, kLinearGeluTanh = 3, kLinearSilu = 4 };

// Run-time, not a template argument: a uniform branch per output vector, and a fifth of the variants.
// Additions are __fadd_rn: no compiler may fuse one with a multiplication in this kernel and not in that one.
template <int N>
PK_DEVICE void linear_activate(float (&v)[N], int activation) {
  if (activation == kLinearRelu) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = v[j] < 0.f ? 0.f : v[j];  // NaN stays NaN, which fmaxf would drop
  } else if (activation == kLinearGelu) {
#pragma unroll
    for (int j = 0; j < N; ++j) v[j] = 0.5f * v[j] * __fadd_rn(1.f, erff(v[j] * 0.70710678118654752f));
  } else if (activation == kLinearGeluTanh) {
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float inner = 0.79788456080286536f * fmaf(0.044715f * v[j] * v[j], v[j], v[j]);
      v[j] = 0.5f * v[j] * __fadd_rn(1.f, tanhf(inner));
    }
  } else if (activation == kLinearSilu) {
#pragma unroll
    for (int j = 0; j < N; ++j)
      v[j] = v[j] / __fadd_rn(1.f, expf(-v[j]));  // -v > 88.7 gives v / inf = -0, the limit
  }
}

// Runs of N neighbours of a row: whole, in accesses of at most 16 bytes, or the first `valid` one by one.
template <int N, typename T>
PK_DEVICE void load_run(const T* p, bool whole, int valid, float (&out)[N]) {
  constexpr int kPiece = N * int(sizeof(T)) <= 16 ? N : 16 / int(sizeof(T));
  if (whole) {
#pragma unroll
    for (int i = 0; i < N; i += kPiece) {
      const Vec<float, kPiece> v = to_float(ld_vec<T, kPiece>(p + i));
#pragma unroll
      for (int j = 0; j < kPiece; ++j) out[i + j] = v[j];
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j) out[j] = j < valid ? to_float(ld(p + j)) : 0.f;
  }
}

template <int N, typename T>
PK_DEVICE void store_run(T* p, bool whole, int valid, const float (&in)[N]) {
  constexpr int kPiece = N * int(sizeof(T)) <= 16 ? N : 16 / int(sizeof(T));
  if (whole) {
#pragma unroll
    for (int i = 0; i < N; i += kPiece) {
      Vec<float, kPiece> v;
#pragma unroll
      for (int j = 0; j < kPiece; ++j) v[j] = in[i + j];
      st_vec<T, kPiece>(p + i, from_float<T>(v));
    }
  } else {
#pragma unroll
    for (int j = 0; j < N; ++j)
      if (j < valid) st(p + j, from_float<T>(in[j]));
  }
}

// Do all rows that start at p allow accesses of min(bytes, 16) bytes?
PK_DEVICE bool rows_aligned(const void* p, int64_t stride_bytes, int bytes) {
  const uint64_t bits = reinterpret_cast<uintptr_t>(p) | static_cast<uint64_t>(stride_bytes);
  return (bits & uint64_t((bytes < 16 ? bytes : 16) - 1)) == 0;
}

// T: type of x, w and bias; To: type of y and the residual; N: outputs of a row handled together.
template <typename T, typename To, int N>
struct LinearEpilogue {
  const T* bias;  // [n] or null
  const To* residual;  // [m, n] or null
  To* y;  // [m, n]
  int64_t residual_stride, y_stride;
  int m, n, activation;
  bool wide;  // y, residual and bias all allow vectors of N at columns that are multiples of N

  PK_DEVICE LinearEpilogue(const T* bias, const To* residual, To* y, int64_t residual_stride,
                           int64_t y_stride, int m, int n, int activation)
      : bias(bias),
        residual(residual),
        y(y),
        residual_stride(residual_stride),
        y_stride(y_stride),
        m(m),
        n(n),
        activation(activation),
        wide(rows_aligned(y, y_stride * int(sizeof(To)), N * int(sizeof(To)))) {
    if (bias) wide = wide && rows_aligned(bias, 0, N * int(sizeof(T)));
    if (residual)
      wide = wide && rows_aligned(residual, residual_stride * int(sizeof(To)), N * int(sizeof(To)));
  }

  // Whether any of the N outputs from there on is in y.
  PK_DEVICE bool has(int row, int col) const { return row < m && col < n; }

  // The N sums of row `row` from column `col`, a multiple of N; what lies outside y is dropped.
  PK_DEVICE void store(int row, int col, float (&sum)[N]) const {
    if (!has(row, col)) return;
    const int valid = n - col;
    const bool whole = wide && valid >= N;
    settle(sum);
    if (bias) {
      float add[N];
      load_run<N>(bias + col, whole, valid, add);
#pragma unroll
      for (int j = 0; j < N; ++j) sum[j] = __fadd_rn(sum[j], add[j]);
    }
    linear_activate<N>(sum, activation);
    finish(row, col, whole, valid, sum);
  }

  // Gated: y = act(gate) * up + residual.
  PK_DEVICE void store_gated(int row, int col, float (&gate)[N], float (&up)[N]) const {
    if (!has(row, col)) return;
    const int valid = n - col;
    settle(gate);
    settle(up);
    linear_activate<N>(gate, activation);
#pragma unroll
    for (int j = 0; j < N; ++j) gate[j] = __fmul_rn(gate[j], up[j]);
    finish(row, col, wide && valid >= N, valid, gate);
  }

 private:
  // A sum of -0 (products that underflow) becomes +0: kernels differ in how many zero-padded steps they run,
  // and one such step does this already.
  PK_DEVICE static void settle(float (&sum)[N]) {
#pragma unroll
    for (int j = 0; j < N; ++j) sum[j] += 0.f;
  }

  PK_DEVICE void finish(int row, int col, bool whole, int valid, float (&v)[N]) const {
    if (residual) {
      float add[N];
      load_run<N>(residual + row * residual_stride + col, whole, valid, add);
#pragma unroll
      for (int j = 0; j < N; ++j) v[j] = __fadd_rn(v[j], add[j]);
    }
    store_run<N>(y + row * y_stride + col, whole, valid, v);
  }
};

// A warp's part of y, staged in shared memory as fp32 rows of kCols (gated: half gate, half up), goes out in
// whole vectors: neighbouring lanes hold neighbouring vectors of a row. One rolled loop also keeps the
// activations' code small, which the accumulators' static register indices would unroll by the number of
// accumulators.
template <int kRows, int kCols, int kPitch, bool kGated, typename T, typename To, int N>
PK_DEVICE void store_staged(const LinearEpilogue<T, To, N>& out, const float* stage, int row0, int col0,
                            int lane) {
  constexpr int kRuns = kCols / (kGated ? 2 : 1) / N;  // vectors of y per row
#pragma unroll 1
  for (int i = lane; i < kRows * kRuns; i += 32) {
    const int r = i / kRuns, c = i % kRuns * N;
    if (!out.has(row0 + r, col0 + c)) continue;
    float sum[N], up[N];
    load_run<N>(stage + r * kPitch + c, true, N, sum);
    if constexpr (kGated) {
      load_run<N>(stage + r * kPitch + kCols / 2 + c, true, N, up);
      out.store_gated(row0 + r, col0 + c, sum, up);
    } else {
      out.store(row0 + r, col0 + c, sum);
    }
  }
}

}  // namespace pk
