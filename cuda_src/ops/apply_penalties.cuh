// Penalties on logits, one thread a chunk of 16 bytes: a token seen in the prompt or the output has its logit divided
// (if positive) or multiplied (if negative) by the repetition penalty, once; then count * frequency is subtracted, and
// presence if it was generated at all.
#pragma once
#include "core/row.cuh"

namespace pk {

constexpr int kPenaltyThreads = 256;

template <bool kFast, class T>
PK_DEVICE void penalise(const T* x, const int32_t* counts, const bool* prompt, T* y, int at, int n, float repetition,
                        float frequency, float presence) {
  Vec<float, kChunk<T>> f = to_float(row_load<kFast>(x, at, n, from_float<T>(0.0f)));
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) {
    if (at + i >= n) continue;
    const int32_t count = counts ? ld(counts + at + i) : 0;
    const bool seen = count > 0 || (prompt && ld(prompt + at + i));
    if (seen) f[i] = f[i] > 0.0f ? f[i] / repetition : f[i] * repetition;
    if (count > 0) f[i] = f[i] - static_cast<float>(count) * frequency - presence;
  }
  row_store<kFast>(y, at, n, from_float<T>(f));
}

template <class T>
__global__ void __launch_bounds__(kPenaltyThreads)
    apply_penalties(const T* __restrict__ x, const int32_t* __restrict__ counts, const bool* __restrict__ prompt,
                    const float* __restrict__ repetition, const float* __restrict__ frequency,
                    const float* __restrict__ presence, T* __restrict__ y, int64_t rows, int64_t stride, int n,
                    int fast) {
  const int per_row = (n + kChunk<T> - 1) / kChunk<T>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kPenaltyThreads + threadIdx.x;
  grid_wait();
  if (i >= rows * per_row) return;
  const int64_t row = i / per_row;
  const int at = static_cast<int>(i - row * per_row) * kChunk<T>;
  const float r = repetition ? ld(repetition + row) : 1.0f;
  const float f = frequency ? ld(frequency + row) : 0.0f, p = presence ? ld(presence + row) : 0.0f;
  const int32_t* c = counts ? counts + row * n : nullptr;
  const bool* s = prompt ? prompt + row * n : nullptr;
  if (fast)
    penalise<true>(x + row * stride, c, s, y + row * n, at, n, r, f, p);
  else
    penalise<false>(x + row * stride, c, s, y + row * n, at, n, r, f, p);
  grid_launch_dependents();
}

}  // namespace pk
