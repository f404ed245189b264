// ldmatrix, stmatrix and mma.sync. All are collective over a full warp.
#pragma once

namespace pk {

// X 8x8 matrices of 16-bit elements from shared memory. Lane 8 i + r gives the address of row r of matrix i
// (16 bytes, aligned to 16); lane l receives of each matrix the elements (row l / 4, columns 2 (l % 4) and
// the next), or with Trans the elements (rows 2 (l % 4) and the next, column l / 4).
template <int X, bool Trans = false>
PK_DEVICE void ldmatrix(uint32_t* r, const void* row) {
  static_assert(X == 1 || X == 2 || X == 4, "ldmatrix moves 1, 2 or 4 matrices");
  const uint32_t a = smem_u32(row);
  if constexpr (X == 4 && !Trans) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a)
                 : "memory");
  } else if constexpr (X == 4) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(a)
                 : "memory");
  } else if constexpr (X == 2 && !Trans) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(a)
                 : "memory");
  } else if constexpr (X == 2) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(a)
                 : "memory");
  } else if constexpr (!Trans) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.shared.b16 {%0}, [%1];" : "=r"(r[0]) : "r"(a) : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x1.trans.shared.b16 {%0}, [%1];"
                 : "=r"(r[0])
                 : "r"(a)
                 : "memory");
  }
}

// The inverse of ldmatrix: the same lanes hold the same elements and addresses.
template <int X, bool Trans = false>
PK_DEVICE void stmatrix(void* row, const uint32_t* r) {
  static_assert(X == 1 || X == 2 || X == 4, "stmatrix moves 1, 2 or 4 matrices");
#if __CUDA_ARCH__ >= 900
  const uint32_t a = smem_u32(row);
  if constexpr (X == 4 && !Trans) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  } else if constexpr (X == 4) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(a), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
  } else if constexpr (X == 2 && !Trans) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(r[0]), "r"(r[1])
                 : "memory");
  } else if constexpr (X == 2) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};" ::"r"(a), "r"(r[0]),
                 "r"(r[1])
                 : "memory");
  } else if constexpr (!Trans) {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.shared.b16 [%0], {%1};" ::"r"(a), "r"(r[0]) : "memory");
  } else {
    asm volatile("stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};" ::"r"(a), "r"(r[0]) : "memory");
  }
#else
  // Before sm_90: each lane fetches the addresses of the rows it holds and stores its elements itself.
  const int lane = static_cast<int>(threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) & 31;
  const unsigned long long mine = reinterpret_cast<unsigned long long>(row);
#pragma unroll
  for (int i = 0; i < X; ++i) {
    if constexpr (!Trans) {
      const unsigned long long target = __shfl_sync(0xffffffffu, mine, 8 * i + lane / 4);
      *reinterpret_cast<uint32_t*>(target + lane % 4 * 4) = r[i];
    } else {
      const unsigned long long low = __shfl_sync(0xffffffffu, mine, 8 * i + lane % 4 * 2);
      const unsigned long long high = __shfl_sync(0xffffffffu, mine, 8 * i + lane % 4 * 2 + 1);
      reinterpret_cast<unsigned short*>(low)[lane / 4] = static_cast<unsigned short>(r[i]);
      reinterpret_cast<unsigned short*>(high)[lane / 4] = static_cast<unsigned short>(r[i] >> 16);
    }
  }
#endif
}

// d[16, 8] += a[16, k] b[k, 8]; which lane holds which element is in core/mma.cuh.
template <class T>
PK_DEVICE void mma_m16n8k16(float* d, const uint32_t* a, const uint32_t* b) {
  constexpr bool kHalf = detail::same<T, half>::value;
  static_assert(kHalf || detail::same<T, bf16>::value, "mma_m16n8k16 takes pk::half or pk::bf16");
  if constexpr (kHalf) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

PK_DEVICE void mma_m16n8k8_tf32(float* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

PK_DEVICE void mma_m16n8k32_s8(int32_t* d, const uint32_t* a, const uint32_t* b) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <class T>
PK_DEVICE void mma_m16n8k32_fp8(float* d, const uint32_t* a, const uint32_t* b) {
  constexpr bool kE4m3 = detail::same<T, fp8e4m3>::value;
  static_assert(kE4m3 || detail::same<T, fp8e5m2>::value,
                "mma_m16n8k32_fp8 takes pk::fp8e4m3 or pk::fp8e5m2");
#if __CUDA_ARCH__ >= 890
  if constexpr (kE4m3) {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
#else
  // Before sm_89: both formats are exact in half, and two k16 steps make one k32 step. The four values of a
  // register go to the two k-slots of the half fragment; A and B are permuted along k alike.
  auto widen = [](uint32_t packed, int pair) {
    const uint16_t two = static_cast<uint16_t>(packed >> (16 * pair));
    return kE4m3 ? cvt::e4m3x2_to_half2(two) : cvt::e5m2x2_to_half2(two);
  };
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    const uint32_t a16[4] = {widen(a[2 * step], 0), widen(a[2 * step + 1], 0), widen(a[2 * step], 1),
                             widen(a[2 * step + 1], 1)};
    const uint32_t b16[2] = {widen(b[step], 0), widen(b[step], 1)};
    mma_m16n8k16<half>(d, a16, b16);
  }
#endif
}

}  // namespace pk
