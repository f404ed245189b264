// Number conversions as instructions. bf16 and half need sm_80; fp8 needs sm_89 and falls back to integers
// before.
#pragma once
#include "core/fp8_bits.cuh"

namespace pk {
namespace cvt {

PK_DEVICE float half_to_float(uint16_t x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
  return y;
}
PK_DEVICE uint16_t half_from_float(float x) {
  uint16_t y;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
PK_DEVICE uint32_t half2_from_float(float low, float high) {
  uint32_t y;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

PK_DEVICE float bf16_to_float(uint16_t x) { return __uint_as_float(static_cast<uint32_t>(x) << 16); }
PK_DEVICE uint16_t bf16_from_float(float x) {
  uint16_t y;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
  return y;
}
PK_DEVICE uint32_t bf16x2_from_float(float low, float high) {
  uint32_t y;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

PK_DEVICE uint32_t tf32_from_float(float x) {
  uint32_t y;
  asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
  return y;
}

#if __CUDA_ARCH__ >= 890
// Two fp8 values as two halves, exactly.
PK_DEVICE uint32_t e4m3x2_to_half2(uint16_t x) {
  uint32_t y;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(y) : "h"(x));
  return y;
}
PK_DEVICE uint32_t e5m2x2_to_half2(uint16_t x) {
  uint32_t y;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(y) : "h"(x));
  return y;
}
PK_DEVICE uint16_t e4m3x2_from_float(float low, float high) {
  uint16_t y;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
PK_DEVICE uint16_t e5m2x2_from_float(float low, float high) {
  uint16_t y;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
  return y;
}
#else
PK_DEVICE uint32_t e4m3x2_to_half2(uint16_t x) {
  return detail::e4m3_to_half_bits(static_cast<uint8_t>(x)) |
         static_cast<uint32_t>(detail::e4m3_to_half_bits(static_cast<uint8_t>(x >> 8))) << 16;
}
PK_DEVICE uint32_t e5m2x2_to_half2(uint16_t x) {
  return detail::e5m2_to_half_bits(static_cast<uint8_t>(x)) |
         static_cast<uint32_t>(detail::e5m2_to_half_bits(static_cast<uint8_t>(x >> 8))) << 16;
}
PK_DEVICE uint16_t e4m3x2_from_float(float low, float high) {
  return detail::e4m3_from_float_bits(__float_as_uint(low)) |
         static_cast<uint16_t>(detail::e4m3_from_float_bits(__float_as_uint(high)) << 8);
}
PK_DEVICE uint16_t e5m2x2_from_float(float low, float high) {
  return detail::e5m2_from_float_bits(__float_as_uint(low)) |
         static_cast<uint16_t>(detail::e5m2_from_float_bits(__float_as_uint(high)) << 8);
}
#endif

PK_DEVICE float e4m3_to_float(uint8_t x) { return half_to_float(static_cast<uint16_t>(e4m3x2_to_half2(x))); }
PK_DEVICE float e5m2_to_float(uint8_t x) { return half_to_float(static_cast<uint16_t>(e5m2x2_to_half2(x))); }
PK_DEVICE uint8_t e4m3_from_float(float x) { return static_cast<uint8_t>(e4m3x2_from_float(x, 0.f)); }
PK_DEVICE uint8_t e5m2_from_float(float x) { return static_cast<uint8_t>(e5m2x2_from_float(x, 0.f)); }

}  // namespace cvt
}  // namespace pk

#include "core/scalar.cuh"
