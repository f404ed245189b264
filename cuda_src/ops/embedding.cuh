// y[t] = table[ids[t]]: a thread copies one chunk of 16 bytes. An id outside the table gives a row of NaN.
#pragma once
#include "core/row.cuh"

namespace pk {

constexpr int kEmbeddingThreads = 256;

// row is null for an id outside the table.
template <bool kFast, class T>
PK_DEVICE void embedding_chunk(const T* row, T* out, int at, int n) {
  const T nan = from_float<T>(NAN);
  // A load from place n of any row reads nothing and is all padding.
  row_store<kFast>(out, at, n, row ? row_load<kFast>(row, at, n, nan) : row_load<kFast>(out, n, n, nan));
}

template <class T, class I>
__global__ void __launch_bounds__(kEmbeddingThreads)
    embedding(const I* __restrict__ ids, const T* __restrict__ table, T* __restrict__ y, int64_t tokens, int64_t rows,
              int64_t stride, int n, int fast) {
  const int per_row = (n + kChunk<T> - 1) / kChunk<T>;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kEmbeddingThreads + threadIdx.x;
  grid_wait();
  if (i >= tokens * per_row) return;
  const int64_t token = i / per_row;
  const int at = static_cast<int>(i - token * per_row) * kChunk<T>;
  const int64_t id = ld(ids + token);
  const T* row = id >= 0 && id < rows ? table + id * stride : nullptr;
  T* out = y + token * n;
  if (fast)
    embedding_chunk<true>(row, out, at, n);
  else
    embedding_chunk<false>(row, out, at, n);
  grid_launch_dependents();
}

}  // namespace pk
