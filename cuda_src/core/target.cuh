// The one place where the two backends part. nvcc and NVRTC get core/gpu (inline PTX), any other compiler gets the host
// backend, which offers the same names. Kernels and every other header of core/ are free of #ifdef.
//
// What a backend supplies (semantics in docs/dialect.md):
//   shared memory  PK_SMEM, PK_DYN_SMEM, smem_u32
//   numbers        half, bf16, fp8e4m3, fp8e5m2, to_float, from_float, pack2, unpack2, to_tf32, fma2, add2, mul2,
//                  exp2_approx
//   accesses       ld, st, ld_nc, ld_stream, st_stream, cp_async, cp_async_commit, cp_async_wait
//   tensor cores   ldmatrix, stmatrix, mma_m16n8k16, mma_m16n8k8_tf32, mma_m16n8k32_s8, mma_m16n8k32_fp8, wgmma,
//                  wgmma_fence, wgmma_commit, wgmma_wait, setmaxnreg_inc, setmaxnreg_dec
//   TMA            mbar_*, TensorMap, tma_*, bulk_load, fence_proxy_async
//   threads        named_barrier_*, cluster_*, map_shared_rank, grid_wait, grid_launch_dependents, grid_barrier
//   flags          ld_acquire, st_release, atomic_add_release, atomic_add_acq_rel, spin_until_ge
//   bits           lop3, prmt, forget
//   for core/      detail::butterfly (warp.cuh)
// and PK_EXPORT_HEADER, the header that defines PK_VARIANT.
#pragma once

#if defined(__CUDACC__)
#define PK_DEVICE __device__ __forceinline__
#define PK_EXPORT_HEADER "core/gpu/export.cuh"
#include "core/gpu/gpu.cuh"
#else
#ifndef PK_DEVICE
#define PK_DEVICE inline __attribute__((always_inline))
#endif
#define PK_EXPORT_HEADER "host/export.h"
#include "host/device.h"
#endif
