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

// Between two passes over a row: 16-bit elements are converted again rather than kept as floats, in half the registers.
template <class T, int kPer>
PK_DEVICE void row_stays_packed(Chunk<T> (&v)[kPer]) {
  if constexpr (sizeof(T) == 2) {
#pragma unroll
    for (int k = 0; k < kPer; ++k)
#pragma unroll
      for (int i = 0; i < 4; ++i) forget(reinterpret_cast<uint32_t*>(&v[k])[i]);
  }
}

// A row kernel has two bodies: kFast, where every row it touches starts on 16 bytes and n is a multiple of kChunk, and
// the other, which goes element by element. One test at the top picks: a test per chunk would keep the loads of a row
// from being in flight together.
//
// Elements [at, at + kChunk) of a row of n; `pad` past its end. at is a multiple of kChunk.
template <bool kFast, class T>
PK_DEVICE Chunk<T> row_load(const T* row, int at, int n, T pad) {
  Chunk<T> v;
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) v[i] = pad;
  if constexpr (kFast) {
    if (at < n) v = ld_vec<T, kChunk<T>>(row + at);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i)
      if (at + i < n) v[i] = ld(row + at + i);
  }
  return v;
}

template <bool kFast, class T>
PK_DEVICE void row_store(T* row, int at, int n, const Chunk<T>& v) {
  if constexpr (kFast) {
    if (at < n) st_vec<T, kChunk<T>>(row + at, v);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i)
      if (at + i < n) st(row + at + i, v[i]);
  }
}

// The same for data touched once: it does not stay in the cache.
template <bool kFast, class T>
PK_DEVICE Chunk<T> row_load_stream(const T* row, int at, int n, T pad) {
  if constexpr (!kFast) return row_load<false>(row, at, n, pad);
  Chunk<T> v;
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) v[i] = pad;
  if (at < n) v = ld_vec_stream<T, kChunk<T>>(row + at);
  return v;
}
template <bool kFast, class T>
PK_DEVICE void row_store_stream(T* row, int at, int n, const Chunk<T>& v) {
  if constexpr (!kFast) {
    row_store<false>(row, at, n, v);
  } else {
    if (at < n) st_vec_stream<T, kChunk<T>>(row + at, v);
  }
}

template <int kThreads>
struct RowGroup {
  // Blocks an SM should hold, so that enough rows are in flight: caps registers at 64, at 80 for a warp's row.
  static constexpr int kResident = kThreads == kWarp ? 6 : kThreads >= 512 ? 2 : 1024 / kThreads;
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
