// Rows kept in registers. A group of kThreads threads owns a row of n elements; each thread's share is whole chunks of
// 16 bytes, chunk number k * kThreads + t being its k-th, whatever the row's alignment (unaligned rows load a chunk
// element by element). So the order of any reduction over a row, and with it every bit, depends on n alone.
// kThreads = 32: a warp owns a row and a block holds 4; otherwise the block is the group.
#pragma once
#include "core/block.cuh"
#include "core/vec.cuh"
#include "core/warp.cuh"

namespace pk {

template <class T>
constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
template <class T>
using Chunk = Vec<T, kChunk<T>>;

// Elements [at, at + kChunk) of a row of n; `pad` past its end. at is a multiple of kChunk.
template <class T>
PK_DEVICE Chunk<T> row_load(const T* row, int at, int n, bool aligned, T pad) {
  if (aligned && at + kChunk<T> <= n) return ld_vec<T, kChunk<T>>(row + at);
  Chunk<T> v;
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) v[i] = at + i < n ? ld(row + at + i) : pad;
  return v;
}

template <class T>
PK_DEVICE void row_store(T* row, int at, int n, bool aligned, const Chunk<T>& v) {
  if (aligned && at + kChunk<T> <= n) {
    st_vec<T, kChunk<T>>(row + at, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i)
    if (at + i < n) st(row + at + i, v[i]);
}

// The same for data touched once: it does not stay in the cache.
template <class T>
PK_DEVICE Chunk<T> row_load_stream(const T* row, int at, int n, bool aligned, T pad) {
  if (aligned && at + kChunk<T> <= n) return ld_vec_stream<T, kChunk<T>>(row + at);
  return row_load(row, at, n, false, pad);
}
template <class T>
PK_DEVICE void row_store_stream(T* row, int at, int n, bool aligned, const Chunk<T>& v) {
  if (aligned && at + kChunk<T> <= n)
    st_vec_stream<T, kChunk<T>>(row + at, v);
  else
    row_store(row, at, n, false, v);
}

template <int kThreads>
struct RowGroup {
  static constexpr int kRows = kThreads == kWarp ? 4 : 1;
  static constexpr int kBlock = kRows * kThreads;
  struct Smem {
    float scratch[kBlock / kWarp];
  };
  PK_DEVICE static int64_t row() {
    return static_cast<int64_t>(blockIdx.x) * kRows + (kRows > 1 ? threadIdx.x / kWarp : 0);
  }
  PK_DEVICE static int thread() { return kRows > 1 ? threadIdx.x % kWarp : threadIdx.x; }
  PK_DEVICE static int at(int k, int chunk) { return (k * kThreads + thread()) * chunk; }
  PK_DEVICE static float sum(float v, Smem& smem) {
    if constexpr (kRows > 1) return warp_sum(v);
    return block_sum<kBlock>(v, smem.scratch);
  }
  PK_DEVICE static float max(float v, Smem& smem) {
    if constexpr (kRows > 1) return warp_max(v);
    return block_max<kBlock>(v, smem.scratch);
  }
};

}  // namespace pk
