// Arithmetic on two 16-bit values in one register, each rounded once, as fma.rn.f16x2 and fma.rn.bf16x2 do.
#pragma once
#include "core/scalar.cuh"

namespace pk {
namespace host {

// Rounded to odd: an inexact result gets an odd last bit, so that a later rounding to half the precision or
// less sees on which side of a tie the exact value lies.
inline double fma_to_odd(double a, double b, double c) {
  const double product = a * b;  // exact: 11 bits times 11 bits
  const double sum = product + c;
  const double part = sum - product;
  const double error = (product - (sum - part)) + (c - part);  // exact (Knuth's two-sum)
  uint64_t bits;
  __builtin_memcpy(&bits, &sum, 8);
  if (error != 0 && (bits & 1) == 0 && sum - sum == 0) {
    bits += (error > 0) == (sum > 0) ? 1 : -1;
    double odd;
    __builtin_memcpy(&odd, &bits, 8);
    return odd;
  }
  return sum;
}

inline float to_float_odd(double x) {
  const float f = static_cast<float>(x);
  const double back = f;
  if (back == x || back - back != 0) return f;  // exact; or overflow, which is one for every 16-bit type
  const uint32_t bits = __float_as_uint(f);
  if ((bits & 1) != 0) return f;
  return __uint_as_float((back < x) == (x > 0) ? bits + 1 : bits - 1);
}

template <class T>
PK_DEVICE T lane_of(uint32_t pair, int i) {
  T v;
  v.bits = static_cast<uint16_t>(pair >> (16 * i));
  return v;
}

}  // namespace host

// a * b + c
template <class T>
inline uint32_t fma2(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(detail::same<T, half>::value || detail::same<T, bf16>::value,
                "fma2 takes pk::half or pk::bf16");
  uint32_t d = 0;
  for (int i = 0; i < 2; ++i) {
    const double exact = host::fma_to_odd(to_float(host::lane_of<T>(a, i)), to_float(host::lane_of<T>(b, i)),
                                          to_float(host::lane_of<T>(c, i)));
    d |= static_cast<uint32_t>(from_float<T>(host::to_float_odd(exact)).bits) << (16 * i);
  }
  return d;
}
// Times one and plus minus zero are exact.
template <class T>
inline uint32_t add2(uint32_t a, uint32_t b) {
  return fma2<T>(a, detail::same<T, half>::value ? 0x3c003c00u : 0x3f803f80u, b);
}
template <class T>
inline uint32_t mul2(uint32_t a, uint32_t b) {
  return fma2<T>(a, b, 0x80008000u);
}

}  // namespace pk
