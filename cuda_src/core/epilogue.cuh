// What a GEMM does with its sums: y = activation(acc + bias) + residual, rounded once to the output type.
#pragma once
#include "core/vec.cuh"

namespace pk {

enum class Act : int { kNone = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };

// NaN passes through every activation.
PK_DEVICE float relu(float x) { return x < 0.f ? 0.f : x; }
// x Phi(x), exact form.
PK_DEVICE float gelu(float x) { return 0.5f * x * (1.f + erff(x * 0.70710678118654752f)); }
// 0.5 x (1 + tanh(u)) with u = sqrt(2 / pi) (x + 0.044715 x^3), written as x / (1 + exp(-2 u)): one
// exponential.
PK_DEVICE float gelu_tanh(float x) {
  const float u = 0.79788456080286536f * (x + 0.044715f * x * x * x);
  return __fdividef(x, 1.f + __expf(-2.f * u));
}
PK_DEVICE float silu(float x) { return __fdividef(x, 1.f + __expf(-x)); }

template <Act kAct>
PK_DEVICE float activate(float x) {
  if constexpr (kAct == Act::kRelu) return relu(x);
  if constexpr (kAct == Act::kGelu) return gelu(x);
  if constexpr (kAct == Act::kGeluTanh) return gelu_tanh(x);
  if constexpr (kAct == Act::kSilu) return silu(x);
  return x;
}

template <Act kAct, int N>
PK_DEVICE Vec<float, N> activate(Vec<float, N> x) {
#pragma unroll
  for (int i = 0; i < N; ++i) x[i] = activate<kAct>(x[i]);
  return x;
}

// The gated form: activation(gate) * up, both already with their bias.
template <Act kAct, int N>
PK_DEVICE Vec<float, N> gated(Vec<float, N> gate, Vec<float, N> up) {
#pragma unroll
  for (int i = 0; i < N; ++i) gate[i] = activate<kAct>(gate[i]) * up[i];
  return gate;
}

// In place of a bias or residual type: there is none.
struct Absent {};

// y[m, n] = activation(acc[m, n] + bias[n]) + residual[m, n]. Strides are in elements; the last one is 1.
// A kernel builds one from its parameters; what is Absent costs nothing.
template <class Out, Act kAct = Act::kNone, class Bias = Absent, class Residual = Absent>
struct Epilogue {
  static constexpr bool kBias = !detail::same<Bias, Absent>::value;
  static constexpr bool kResidual = !detail::same<Residual, Absent>::value;

  Out* out;
  int64_t out_stride;
  const Bias* bias;
  const Residual* residual;
  int64_t residual_stride;

  // N sums of row m, columns n to n + N - 1, all inside; every pointer there is aligned to its N elements.
  template <int N>
  PK_DEVICE void store(Vec<float, N> acc, int64_t m, int64_t n) const {
    if constexpr (kBias) {
      const Vec<float, N> b = to_float(ld_vec<Bias, N>(bias + n));
#pragma unroll
      for (int i = 0; i < N; ++i) acc[i] += b[i];
    }
    acc = activate<kAct>(acc);
    if constexpr (kResidual) {
      const Vec<float, N> r = to_float(ld_vec<Residual, N>(residual + m * residual_stride + n));
#pragma unroll
      for (int i = 0; i < N; ++i) acc[i] += r[i];
    }
    st_vec(out + m * out_stride + n, from_float<Out>(acc));
  }

  // As store, of which the first `count` columns exist, or whose pointers are not aligned: element by
  // element.
  template <int N>
  PK_DEVICE void store_edge(Vec<float, N> acc, int64_t m, int64_t n, int count) const {
#pragma unroll
    for (int i = 0; i < N; ++i) {
      if (i < count) store<1>(Vec<float, 1>{{acc[i]}}, m, n + i);
    }
  }
};

}  // namespace pk
