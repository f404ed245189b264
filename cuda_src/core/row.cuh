// Rows, and the groups of threads that own them. A group's share of a row is whole chunks of 16 bytes, chunk number
// k * threads + t being thread t's k-th, whatever the row's alignment (unaligned rows load a chunk element by element).
// So the order of any reduction over a row, and with it every bit, depends on n alone.
#pragma once
#include "core/block.cuh"
#include "core/vec.cuh"
#include "core/warp.cuh"

namespace pk {

template <class T>
constexpr int kChunk = 16 / static_cast<int>(sizeof(T));
template <class T>
using Chunk = Vec<T, kChunk<T>>;

using ChunkWords = Vec<uint32_t, 4>;

// Makes the compiler forget what it knows of a chunk, which so stays packed: see forget().
PK_DEVICE void forget(ChunkWords& words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) forget(words[i]);
}

// kFast: every row touched starts on 16 bytes and n is a multiple of kChunk; otherwise rows go element by element. One
// test at the top of a kernel picks, or the plan: a test per chunk would keep the loads of a row from being in flight
// together.
//
// Elements [at, at + kChunk) of a row of n; `pad` past its end. at is a multiple of kChunk. kStream: data touched once,
// which does not stay in the cache.
template <bool kFast, bool kStream = false, class T>
PK_DEVICE Chunk<T> row_load(const T* row, int at, int n, T pad) {
  Chunk<T> v;
#pragma unroll
  for (int i = 0; i < kChunk<T>; ++i) v[i] = pad;
  if constexpr (kFast) {
    ChunkWords words = to_words(v);
    const ChunkWords* p = reinterpret_cast<const ChunkWords*>(row + at);
    if (at < n) words = kStream ? ld_stream(p) : ld(p);
    forget(words);
    return from_words<T>(words);
  } else {
#pragma unroll
    for (int i = 0; i < kChunk<T>; ++i)
      if (at + i < n) v[i] = ld(row + at + i);
    return v;
  }
}
template <bool kFast, class T>
PK_DEVICE Chunk<T> row_load_stream(const T* row, int at, int n, T pad) {
  return row_load<kFast, true>(row, at, n, pad);
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

template <bool kFast, class T>
PK_DEVICE void row_store_stream(T* row, int at, int n, const Chunk<T>& v) {
  if constexpr (!kFast) {
    row_store<false>(row, at, n, v);
  } else {
    if (at < n) st_vec_stream<T, kChunk<T>>(row + at, v);
  }
}

// kThreads = 32: a warp owns a row and a block holds 4; otherwise the block is the group.
template <int kThreads>
struct RowGroup {
  static constexpr int kRows = kThreads == kWarp ? 4 : 1;
  static constexpr int kBlock = kRows * kThreads;
  // Blocks an SM should hold, so that enough rows are in flight: 896 threads or more, of at most 72 registers.
  static constexpr int kResident = (896 + kBlock - 1) / kBlock;
  struct Smem {
    float scratch[kBlock / kWarp];
  };
  PK_DEVICE static int64_t row() {
    return static_cast<int64_t>(blockIdx.x) * kRows + (kRows > 1 ? threadIdx.x / kWarp : 0);
  }
  PK_DEVICE static int threads() { return kThreads; }
  PK_DEVICE static int thread() { return kRows > 1 ? threadIdx.x % kWarp : threadIdx.x; }
  PK_DEVICE static float sum(float v, Smem& smem) {
    if constexpr (kRows > 1) return warp_sum(v);
    return block_sum<kBlock>(v, smem.scratch);
  }
  PK_DEVICE static float max(float v, Smem& smem) {
    if constexpr (kRows > 1) return warp_max(v);
    return block_max<kBlock>(v, smem.scratch);
  }
};

// A block of any size owns a row; sums have the same order as RowGroup's of that size.
struct AnyRowGroup {
  struct Smem {
    float scratch[kWarp];
  };
  PK_DEVICE static int64_t row() { return blockIdx.x; }
  PK_DEVICE static int threads() { return blockDim.x; }
  PK_DEVICE static int thread() { return threadIdx.x; }
  // The warps' results, each in a lane, `identity` in the lanes without one.
  PK_DEVICE static float of_warps(float v, float identity, Smem& smem) {
    if (lane_id() == 0) smem.scratch[warp_id()] = v;
    __syncthreads();
    v = lane_id() < static_cast<int>(blockDim.x) / kWarp ? smem.scratch[lane_id()] : identity;
    __syncthreads();
    return v;
  }
  PK_DEVICE static float sum(float v, Smem& smem) { return warp_sum(of_warps(warp_sum(v), 0.0f, smem)); }
  PK_DEVICE static float max(float v, Smem& smem) { return warp_max(of_warps(warp_max(v), -INFINITY, smem)); }
};

// Where a thread's k-th chunk of a row starts.
template <class T, class Group>
PK_DEVICE int row_place(int k) {
  return (k * Group::threads() + Group::thread()) * kChunk<T>;
}

// A row's chunks where a kernel keeps them: in registers, kPer a thread, or in memory, where every pass reads them
// again. at(k) is where chunk k starts; again() comes between two passes.
template <class T, class Group, int kPer>
struct RegisterRow {
  static constexpr bool kFast = true;
  ChunkWords words[kPer];
  PK_DEVICE static constexpr int per() { return kPer; }
  PK_DEVICE static int at(int k) { return row_place<T, Group>(k); }
  PK_DEVICE Chunk<T> chunk(int k) const { return from_words<T>(words[k]); }
  PK_DEVICE void set(int k, const Chunk<T>& v) { words[k] = to_words(v); }
  PK_DEVICE void again() {
    // Else the compiler keeps the row both packed and as floats.
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int k = 0; k < kPer; ++k) forget(words[k]);
    }
  }
};

template <class T, class Group, bool kAligned>
struct MemoryRow {
  static constexpr bool kFast = kAligned;
  const T* row;
  int n;
  T pad;
  PK_DEVICE int per() const { return (n + Group::threads() * kChunk<T> - 1) / (Group::threads() * kChunk<T>); }
  PK_DEVICE static int at(int k) { return row_place<T, Group>(k); }
  PK_DEVICE Chunk<T> chunk(int k) const { return row_load<kFast>(row, at(k), n, pad); }
  PK_DEVICE void again() {}
};

}  // namespace pk
