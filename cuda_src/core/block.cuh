// Reductions over a block of Threads threads, a multiple of 32: a butterfly in each warp, then one over the
// warps' results. Every thread gets the result; the order of the additions depends on Threads only. `scratch`
// is shared memory for Threads / 32 values; it may be reused at once, as the last thing done is a barrier.
#pragma once
#include "core/warp.cuh"

namespace pk {

template <int Threads, class T, class Combine>
PK_DEVICE T block_reduce(T v, T* scratch, T identity, Combine combine) {
  static_assert(Threads % kWarp == 0 && Threads >= kWarp && Threads <= 1024,
                "whole warps, 32 to 1024 threads");
  constexpr int kWarps = Threads / kWarp;
  v = warp_reduce(v, combine);
  if constexpr (kWarps > 1) {
    constexpr int kWidth = kWarps > 16 ? 32 : kWarps > 8 ? 16 : kWarps > 4 ? 8 : kWarps > 2 ? 4 : 2;
    const int lane = lane_id();
    if (lane == 0) scratch[warp_id()] = v;
    __syncthreads();
    const int slot = lane % kWidth;
    v = warp_reduce<kWidth>(slot < kWarps ? scratch[slot] : identity, combine);
    __syncthreads();
  }
  return v;
}
template <int Threads, class T>
PK_DEVICE T block_sum(T v, T* scratch) {
  return block_reduce<Threads>(v, scratch, T(0), [](T a, T b) { return a + b; });
}
template <int Threads>
PK_DEVICE float block_max(float v, float* scratch) {
  return block_reduce<Threads>(v, scratch, -INFINITY, [](float a, float b) { return fmaxf(a, b); });
}
template <int Threads>
PK_DEVICE uint64_t block_max(uint64_t v, uint64_t* scratch) {
  return block_reduce<Threads>(v, scratch, uint64_t(0), [](uint64_t a, uint64_t b) { return a > b ? a : b; });
}
template <int Threads>
PK_DEVICE float block_min(float v, float* scratch) {
  return block_reduce<Threads>(v, scratch, INFINITY, [](float a, float b) { return fminf(a, b); });
}

}  // namespace pk
