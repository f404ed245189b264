// The GPU backend of the device vocabulary: thin wrappers around PTX, one instruction each where the card has
// it. Needs sm_80. What came later has either an exact fallback here (stmatrix, fp8, clusters of one block,
// grid_wait) or is left to ptxas, whose error names the feature and the card it needs (wgmma, TMA, setmaxnreg
// excepted). No CUDA toolkit header is included: the number types are ours, so that a kernel compiles in
// seconds and with NVRTC.
#pragma once

#if defined(__CUDACC_RTC__)
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
#define INFINITY __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)
#else
#include <math.h>
#include <stdint.h>
#endif

namespace pk {
// Shared memory as a 32-bit address, as PTX wants it.
PK_DEVICE uint32_t smem_u32(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }

}  // namespace pk

// One struct per kernel. Static shared memory holds 48 KB at most; the dynamic form needs Launch.smem =
// sizeof(T).
#define PK_SMEM(T, name)                                                      \
  __shared__ alignas(16) alignas(T) unsigned char name##_storage_[sizeof(T)]; \
  T& name = *reinterpret_cast<T*>(name##_storage_)
#define PK_DYN_SMEM(T, name)                                      \
  extern __shared__ __align__(1024) unsigned char pk_dyn_smem_[]; \
  T& name = *reinterpret_cast<T*>(pk_dyn_smem_)

#include "core/gpu/types.cuh"
#include "core/gpu/packed.cuh"
#include "core/gpu/math.cuh"
#include "core/gpu/memory.cuh"
#include "core/gpu/sync.cuh"
#include "core/gpu/mma.cuh"
#include "core/gpu/tma.cuh"
#include "core/gpu/wgmma.cuh"
