// Reductions over the lanes of a warp, by butterfly: every lane gets the result, and the order of the
// additions, so the bits too, does not depend on anything but W. All 32 lanes take part, in groups of W
// neighbours.
#pragma once
#include "core/target.cuh"

namespace pk {

constexpr int kWarp = 32;
constexpr uint32_t kFullMask = 0xffffffffu;

// The linear index of the thread in its block, and its place in its warp.
PK_DEVICE int thread_rank() {
  return static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z));
}
PK_DEVICE int lane_id() { return thread_rank() % kWarp; }
PK_DEVICE int warp_id() { return thread_rank() / kWarp; }

template <int W = kWarp, class T, class Combine>
PK_DEVICE T warp_reduce(T v, Combine combine) {
  static_assert(W == 1 || W == 2 || W == 4 || W == 8 || W == 16 || W == 32, "a power of two up to 32 lanes");
  return detail::butterfly<W>(v, combine);
}
template <int W = kWarp, class T>
PK_DEVICE T warp_sum(T v) {
  return warp_reduce<W>(v, [](T a, T b) { return a + b; });
}
// NaN is ignored where the other operand is a number, as fmaxf and fminf do.
template <int W = kWarp>
PK_DEVICE float warp_max(float v) {
  return warp_reduce<W>(v, [](float a, float b) { return fmaxf(a, b); });
}
template <int W = kWarp>
PK_DEVICE float warp_min(float v) {
  return warp_reduce<W>(v, [](float a, float b) { return fminf(a, b); });
}
template <int W = kWarp>
PK_DEVICE int warp_max(int v) {
  return warp_reduce<W>(v, [](int a, int b) { return a > b ? a : b; });
}
template <int W = kWarp>
PK_DEVICE int warp_min(int v) {
  return warp_reduce<W>(v, [](int a, int b) { return a < b ? a : b; });
}

}  // namespace pk
