// ldmatrix, stmatrix, mma.sync and wgmma: the lanes meet in the runtime, the arithmetic is mma.h's.
#pragma once
#include <type_traits>

#include "host/hopper.h"
#include "host/mma.h"

namespace pk {

template <int X, bool Trans = false>
PK_DEVICE void ldmatrix(uint32_t* r, const void* row, PK_HERE) {
  static_assert(X == 1 || X == 2 || X == 4, "ldmatrix moves 1, 2 or 4 matrices");
  host::LdmatrixLane mine{row, r};
  pkh_warp_matrix("ldmatrix", &mine, host::ldmatrix_warp<X, Trans>, X, 0, PK_AT);
}
template <int X, bool Trans = false>
PK_DEVICE void stmatrix(void* row, const uint32_t* r, PK_HERE) {
  static_assert(X == 1 || X == 2 || X == 4, "stmatrix moves 1, 2 or 4 matrices");
  host::StmatrixLane mine{row, r};
  pkh_warp_matrix("stmatrix", &mine, host::stmatrix_warp<X, Trans>, X, 1, PK_AT);
}

template <class T>
PK_DEVICE void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b, PK_HERE) {
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bf16>,
                "mma_m16n8k16 takes pk::half or pk::bf16");
  host::MmaLane mine{d, a, b};
  pkh_warp("mma_m16n8k16", &mine, host::mma_warp<T>, PK_AT);
}
PK_DEVICE void mma_m16n8k8_tf32(float* d, const uint32_t* a, const uint32_t* b, PK_HERE) {
  host::MmaLane mine{d, a, b};
  pkh_warp("mma_m16n8k8_tf32", &mine, host::mma_warp<host::Tf32>, PK_AT);
}
PK_DEVICE void mma_m16n8k32_s8(int32_t* d, const uint32_t* a, const uint32_t* b, PK_HERE) {
  host::MmaLane mine{d, a, b};
  pkh_warp("mma_m16n8k32_s8", &mine, host::mma_warp<int8_t>, PK_AT);
}
template <class T>
PK_DEVICE void mma_m16n8k32_fp8(float* d, const uint32_t* a, const uint32_t* b, PK_HERE) {
  static_assert(std::is_same_v<T, fp8e4m3> || std::is_same_v<T, fp8e5m2>,
                "mma_m16n8k32_fp8 takes pk::fp8e4m3 or pk::fp8e5m2");
  host::MmaLane mine{d, a, b};
  pkh_warp("mma_m16n8k32_fp8", &mine, host::mma_warp<T>, PK_AT);
}

// d[64, N] (+)= a[64, 16] b[N, 16]^T for the 128 threads of a warpgroup. Takes effect between the issue and
// the wait.
template <int N, class T>
PK_DEVICE void wgmma(float (&d)[N / 2], uint64_t desc_a, uint64_t desc_b, int scale_d, PK_HERE) {
  static_assert(N % 8 == 0 && N >= 8 && N <= 256, "wgmma: N is a multiple of 8 up to 256");
  static_assert(std::is_same_v<T, half> || std::is_same_v<T, bf16>, "wgmma takes pk::half or pk::bf16");
  pkh_wgmma(d, desc_a, desc_b, N, scale_d, host::wgmma_warpgroup<T>, PK_AT);
}

}  // namespace pk
