// Merges two partial softmax states of the same queries: out = (wa a + wb b) / (wa + wb), w = exp(lse), lse natural
// log. A thread owns one chunk of a row (a query's head): two reads, one write. A state whose lse is -inf is empty: the
// other is copied bit for bit, whatever the empty one's out holds.
#pragma once
#include "core/target.cuh"
#include "core/vec.cuh"

namespace pk {

constexpr int kMergeThreads = 256;

// Strides in elements; rows of d elements, kVec (a divisor of d) per access.
template <class T, int kVec>
__global__ void __launch_bounds__(kMergeThreads)
    merge_states(const T* __restrict__ a, const float* __restrict__ lse_a, const T* __restrict__ b,
                 const float* __restrict__ lse_b, T* out, float* __restrict__ lse, int64_t tokens, int heads, int d,
                 int64_t a_stride, int64_t a_head_stride, int64_t b_stride, int64_t b_head_stride,
                 int64_t lse_a_stride, int64_t lse_b_stride) {
  const int chunks = d / kVec;
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kMergeThreads + threadIdx.x;
  const int64_t row = at / chunks, token = row / heads;
  const int column = static_cast<int>(at % chunks) * kVec, head = static_cast<int>(row % heads);
  grid_wait();
  if (token >= tokens) return;
  const float la = ld(&lse_a[token * lse_a_stride + head]), lb = ld(&lse_b[token * lse_b_stride + head]);
  const Vec<T, kVec> va = ld_vec<T, kVec>(a + token * a_stride + head * a_head_stride + column);
  const Vec<T, kVec> vb = ld_vec<T, kVec>(b + token * b_stride + head * b_head_stride + column);
  grid_launch_dependents();

  Vec<T, kVec> y;
  float total;
  if (la == -INFINITY && lb == -INFINITY) {
    total = -INFINITY;
#pragma unroll
    for (int i = 0; i < kVec; ++i) y[i] = from_float<T>(0.f);
  } else if (lb == -INFINITY) {
    total = la;
    y = va;
  } else if (la == -INFINITY) {
    total = lb;
    y = vb;
  } else {
    const float top = fmaxf(la, lb);
    const float wa = expf(la - top), wb = expf(lb - top), sum = wa + wb, share = 1.f / sum;
    total = top + logf(sum);
    const Vec<float, kVec> fa = to_float(va), fb = to_float(vb);
    Vec<float, kVec> mixed;
#pragma unroll
    for (int i = 0; i < kVec; ++i) mixed[i] = fmaf(fa[i], wa, fb[i] * wb) * share;
    y = from_float<T>(mixed);
  }
  st_vec(out + row * d + column, y);
  if (column == 0) st(&lse[row], total);
}

}  // namespace pk
