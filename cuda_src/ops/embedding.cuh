// y[t] = table[ids[t]]: a thread copies one chunk of 16 bytes. An id outside the table gives a row of NaN.
#pragma once
#include "core/row.cuh"

namespace pk {

constexpr int kEmbeddingThreads = 256;
constexpr int kEmbeddingAligned = 1;  // bit of `flags`: rows of the table and of y start on 16 bytes

template <class T, class I>
__global__ void __launch_bounds__(kEmbeddingThreads)
    embedding(const I* __restrict__ ids, const T* __restrict__ table, T* __restrict__ y, int64_t tokens, int64_t rows,
              int64_t stride, int n, int flags) {
  const bool aligned = flags & kEmbeddingAligned;
  const int per_row = (n + kChunk<T> - 1) / kChunk<T>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kEmbeddingThreads + threadIdx.x;
  grid_wait();
  if (i >= tokens * per_row) return;
  const int64_t token = i / per_row;
  const int at = static_cast<int>(i - token * per_row) * kChunk<T>;
  const int64_t id = ld(ids + token);
  Chunk<T> v;
  if (id >= 0 && id < rows) {
    v = row_load(table + id * stride, at, n, aligned, from_float<T>(0.0f));
  } else {
#pragma unroll
    for (int k = 0; k < kChunk<T>; ++k) v[k] = from_float<T>(NAN);
  }
  row_store(y + token * n, at, n, aligned, v);
  grid_launch_dependents();
}

}  // namespace pk
