// Arithmetic on two 16-bit values in one register, each rounded once. T is half or bf16.
#pragma once

namespace pk {

// a * b + c
template <class T>
PK_DEVICE uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(detail::same<T, half>::value || detail::same<T, bf16>::value,
                "fma2 takes pk::half or pk::bf16");
  uint32_t d;
  if constexpr (detail::same<T, half>::value) {
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  } else {
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  }
  return d;
}
template <class T>
PK_DEVICE uint32_t add2(uint32_t a, uint32_t b) {
  if constexpr (detail::same<T, half>::value) {
    uint32_t d;
    asm("add.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  } else {
    return fma2<T>(a, 0x3f803f80u, b);  // a bf16 add needs sm_90; times one is exact
  }
}
template <class T>
PK_DEVICE uint32_t mul2(uint32_t a, uint32_t b) {
  if constexpr (detail::same<T, half>::value) {
    uint32_t d;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
  } else {
    return fma2<T>(a, b, 0x80008000u);  // plus minus zero keeps the sign of a zero product
  }
}

}  // namespace pk
