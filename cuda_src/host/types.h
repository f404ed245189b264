// The number types on the host, with the conversions of the GPU bit for bit: nearest even, subnormals kept,
// NaN as the cvt instruction gives it. Values only, no memory accesses that a checker would count. The vector
// structs (float4, ...) and the bit casts are in builtins.h.
#pragma once
#include "host/builtins.h"

#include "core/fp8_bits.cuh"

namespace pk {
namespace detail {

// Half bits to float bits without a conversion instruction. NaN gives 0x7fffffff, as the GPU does.
constexpr uint32_t half_to_float_bits(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  uint32_t exponent = x >> 10 & 31u;
  uint32_t mantissa = x & 0x3ffu;
  if (exponent == 31) return mantissa != 0 ? 0x7fffffffu : sign | 0x7f800000u;
  if (exponent == 0) {
    if (mantissa == 0) return sign;
    exponent = 1;
    while ((mantissa & 0x400u) == 0) {
      mantissa <<= 1;
      --exponent;  // wraps below zero; only exponent + 112 is used
    }
    mantissa &= 0x3ffu;
  }
  return sign | (exponent + 112u) << 23 | mantissa << 13;
}

// Float bits to half bits: nearest even, overflow to infinity, NaN to 0x7fff.
constexpr uint16_t half_from_float_bits(uint32_t x) {
  const uint32_t sign = x >> 16 & 0x8000u;
  const uint32_t magnitude = x & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7fffu;
  if (magnitude >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // 65520, half-way to 65536
  if (magnitude >= 0x38800000u) {                                              // 2^-14, the smallest normal
    const uint32_t rounded = (magnitude + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    return static_cast<uint16_t>(sign | (rounded - (112u << 10)));
  }
  const uint32_t shift = 126u - (magnitude >> 23);
  if (shift > 24) return static_cast<uint16_t>(sign);
  const uint32_t mantissa = (magnitude & 0x7fffffu) | 0x800000u;
  const uint32_t rounded = (mantissa + (1u << (shift - 1)) - 1u + (mantissa >> shift & 1u)) >> shift;
  return static_cast<uint16_t>(sign | rounded);
}

}  // namespace detail

namespace cvt {

PK_DEVICE float half_to_float(uint16_t x) {
#if defined(__F16C__)
  typedef short Halves __attribute__((vector_size(16)));
  typedef float Floats __attribute__((vector_size(16)));
  if (__builtin_expect((x & 0x7fffu) > 0x7c00u, 0)) return __uint_as_float(0x7fffffffu);
  const Halves in = {static_cast<short>(x)};
  Floats out;
  __asm__("vcvtph2ps %1, %0" : "=x"(out) : "x"(in));
  return out[0];
#else
  return __uint_as_float(detail::half_to_float_bits(x));
#endif
}

PK_DEVICE uint16_t half_from_float(float x) {
#if defined(__F16C__)
  typedef short Halves __attribute__((vector_size(16)));
  typedef float Floats __attribute__((vector_size(16)));
  if (__builtin_expect(x != x, 0)) return 0x7fffu;
  const Floats in = {x};
  Halves out;
  __asm__("vcvtps2ph $0, %1, %0" : "=x"(out) : "x"(in));
  return static_cast<uint16_t>(out[0]);
#else
  return detail::half_from_float_bits(__float_as_uint(x));
#endif
}

PK_DEVICE float bf16_to_float(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }

PK_DEVICE uint16_t bf16_from_float(float x) {
  const uint32_t u = __float_as_uint(x);
  if (__builtin_expect(x != x, 0)) return 0x7fffu;
  return static_cast<uint16_t>((u + 0x7fffu + (u >> 16 & 1u)) >> 16);
}

PK_DEVICE uint32_t half2_from_float(float low, float high) {
  return half_from_float(low) | static_cast<uint32_t>(half_from_float(high)) << 16;
}
PK_DEVICE uint32_t bf16x2_from_float(float low, float high) {
  return bf16_from_float(low) | static_cast<uint32_t>(bf16_from_float(high)) << 16;
}

// Ties away from zero; the low 13 bits of the result are zero.
PK_DEVICE uint32_t tf32_from_float(float x) {
  const uint32_t u = __float_as_uint(x);
  if ((u & 0x7f800000u) == 0x7f800000u) return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fffffffu : u;
  return (u + 0x1000u) & 0xffffe000u;
}

PK_DEVICE uint32_t e4m3x2_to_half2(uint16_t x) {
  return detail::e4m3_to_half_bits(static_cast<uint8_t>(x)) |
         static_cast<uint32_t>(detail::e4m3_to_half_bits(static_cast<uint8_t>(x >> 8))) << 16;
}
PK_DEVICE uint32_t e5m2x2_to_half2(uint16_t x) {
  return detail::e5m2_to_half_bits(static_cast<uint8_t>(x)) |
         static_cast<uint32_t>(detail::e5m2_to_half_bits(static_cast<uint8_t>(x >> 8))) << 16;
}
PK_DEVICE float e4m3_to_float(uint8_t x) { return half_to_float(detail::e4m3_to_half_bits(x)); }
PK_DEVICE float e5m2_to_float(uint8_t x) { return half_to_float(detail::e5m2_to_half_bits(x)); }
PK_DEVICE uint8_t e4m3_from_float(float x) { return detail::e4m3_from_float_bits(__float_as_uint(x)); }
PK_DEVICE uint8_t e5m2_from_float(float x) { return detail::e5m2_from_float_bits(__float_as_uint(x)); }
PK_DEVICE uint16_t e4m3x2_from_float(float low, float high) {
  return static_cast<uint16_t>(e4m3_from_float(low) | e4m3_from_float(high) << 8);
}
PK_DEVICE uint16_t e5m2x2_from_float(float low, float high) {
  return static_cast<uint16_t>(e5m2_from_float(low) | e5m2_from_float(high) << 8);
}

}  // namespace cvt
}  // namespace pk

#include "core/scalar.cuh"
#include "host/packed.h"
