// Small kernels that use every part of a plan at least once: tensor maps, programmatic dependent launches with a
// workspace, counters that reset themselves, cooperative launches, clusters.
#pragma once
#include "core/async.cuh"
#include "core/block.cuh"
#include "core/vec.cuh"

namespace pk {

// y = x through TMA: a block moves one 8 x 32 box in and out of shared memory.
struct TileSmem {
  alignas(1024) float tile[8 * 32];
  uint64_t full;
};
__global__ void __launch_bounds__(32)
    tile_copy(const __grid_constant__ TensorMap from, const __grid_constant__ TensorMap to) {
  PK_SMEM(TileSmem, smem);
  const int x = blockIdx.x * 32, y = blockIdx.y * 8;
  grid_wait();
  if (threadIdx.x == 0) {
    mbar_init(&smem.full, 1);
    mbar_fence_init();
    mbar_arrive_expect_tx(&smem.full, sizeof(smem.tile));
    tma_load_2d(smem.tile, &from, x, y, &smem.full);
    mbar_wait(&smem.full, 0);
    tma_store_2d(&to, smem.tile, x, y);
    tma_store_commit();
    tma_store_wait<0>();
  }
}

// Two launches: squares into a workspace, then their prefix sums by one thread a row.
__global__ void squares(const float* __restrict__ x, float* __restrict__ work, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  grid_wait();
  if (i < n) st(work + i, ld(x + i) * ld(x + i));
  grid_launch_dependents();
}
__global__ void running(const float* __restrict__ work, const float* __restrict__ scale, float* __restrict__ y,
                        int rows, int n) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  const float s = ld(scale);  // a weight: may be read before the wait
  grid_wait();
  if (row >= rows) return;
  float sum = 0.0f;
  for (int i = 0; i < n; ++i) {
    sum += ld(work + row * n + i);
    st(y + row * n + i, s * sum);
  }
}

// The sum of all of x by whichever block comes last; the counter is zero again afterwards.
struct LastSmem {
  float scratch[4];
  int last;
};
__global__ void __launch_bounds__(128)
    last_block_sum(const float* __restrict__ x, float* __restrict__ parts, uint32_t* counter, float* __restrict__ y,
                   int n) {
  PK_SMEM(LastSmem, smem);
  grid_wait();
  float v = 0.0f;
  for (int i = blockIdx.x * 128 + threadIdx.x; i < n; i += gridDim.x * 128) v += ld(x + i);
  v = block_sum<128>(v, smem.scratch);
  if (threadIdx.x == 0) {
    st(parts + blockIdx.x, v);
    smem.last = atomic_add_acq_rel(counter, 1u) == gridDim.x - 1;
    if (smem.last) {
      float total = 0.0f;
      for (unsigned b = 0; b < gridDim.x; ++b) total += ld(parts + b);
      st(y, total);
      st_release(counter, 0u);
    }
  }
}

// Every block adds its part, waits for all, and writes the total: a grid barrier between.
__global__ void __launch_bounds__(128)
    grid_sum(const float* __restrict__ x, float* __restrict__ parts, uint32_t* barrier, float* __restrict__ y, int n) {
  PK_SMEM(LastSmem, smem);
  grid_wait();
  float v = 0.0f;
  for (int i = blockIdx.x * 128 + threadIdx.x; i < n; i += gridDim.x * 128) v += ld(x + i);
  v = block_sum<128>(v, smem.scratch);
  if (threadIdx.x == 0) st(parts + blockIdx.x, v);
  grid_barrier(barrier);
  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (unsigned b = 0; b < gridDim.x; ++b) total += ld(parts + b);
    st(y + blockIdx.x, total);
  }
}

// Blocks of a pair exchange their values through distributed shared memory.
struct PairSmem {
  float value;
};
__global__ void __launch_bounds__(32) pair_swap(const float* __restrict__ x, float* __restrict__ y) {
  PK_SMEM(PairSmem, smem);
  grid_wait();
  if (threadIdx.x == 0) smem.value = ld(x + blockIdx.x);
  cluster_sync();
  if (threadIdx.x == 0) st(y + blockIdx.x, ld(map_shared_rank(&smem.value, cluster_ctarank() ^ 1u)));
  cluster_sync();
}

}  // namespace pk
