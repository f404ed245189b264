// Rings of stages for cp.async and TMA pipelines, and wgmma's operand descriptors.
#pragma once
#include "core/target.cuh"

namespace pk {

// A position in a ring of kStages buffers with a full and an empty mbarrier each. The parity flips on each
// turn, so a consumer waits for full[stage] with `parity`; a producer waits for empty[stage] with `parity ^
// 1`, which passes at once on the first turn.
template <int kStages>
struct PipelineState {
  int stage = 0;
  uint32_t parity = 0;
  PK_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1u;
    }
  }
};

// Descriptor of a K-major operand in shared memory in the 128-byte swizzle that TMA writes: rows of 64 16-bit
// values, the tile aligned to 1024 bytes. k steps of 16 values move p by 32 bytes within the row. Fields:
// address / 16, the leading offset (unused in this layout, 1 by convention), 1024 / 16 between groups of
// eight rows, swizzle mode 1.
PK_DEVICE uint64_t wgmma_desc_sw128(const void* p) {
  return static_cast<uint64_t>((smem_u32(p) & 0x3ffffu) >> 4) | uint64_t(1) << 16 |
         uint64_t(1024 >> 4) << 32 | uint64_t(1) << 62;
}

// wgmma_wait that says which accumulators it completes. Without that the compiler may move arithmetic on them
// before the wait, and ptxas then serialises every wgmma to keep it right.
template <int kPending, int N>
PK_DEVICE void wgmma_wait(float (&d)[N]) {
  wgmma_wait<kPending>();
#pragma unroll
  for (int i = 0; i < N; ++i) forget(d[i]);
}

}  // namespace pk
