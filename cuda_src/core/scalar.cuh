// The 16-bit and 8-bit number types, the same on both backends: bits, and conversions that the backend
// supplies as pk::cvt::* on bit patterns. A backend includes this after defining them; kernels get it through
// target.cuh. Arithmetic is done in float (or by the tensor cores), so the types have no operators.
#pragma once

namespace pk {
namespace detail {
template <class A, class B>
struct same {
  static constexpr bool value = false;
};
template <class A>
struct same<A, A> {
  static constexpr bool value = true;
};
}  // namespace detail

struct alignas(2) half {
  uint16_t bits;
  half() = default;
  PK_DEVICE explicit half(float x) : bits(cvt::half_from_float(x)) {}
  PK_DEVICE explicit operator float() const { return cvt::half_to_float(bits); }
};

struct alignas(2) bf16 {
  uint16_t bits;
  bf16() = default;
  PK_DEVICE explicit bf16(float x) : bits(cvt::bf16_from_float(x)) {}
  PK_DEVICE explicit operator float() const { return cvt::bf16_to_float(bits); }
};

struct fp8e4m3 {
  uint8_t bits;
  fp8e4m3() = default;
  PK_DEVICE explicit fp8e4m3(float x) : bits(cvt::e4m3_from_float(x)) {}
  PK_DEVICE explicit operator float() const { return cvt::e4m3_to_float(bits); }
};

struct fp8e5m2 {
  uint8_t bits;
  fp8e5m2() = default;
  PK_DEVICE explicit fp8e5m2(float x) : bits(cvt::e5m2_from_float(x)) {}
  PK_DEVICE explicit operator float() const { return cvt::e5m2_to_float(bits); }
};

PK_DEVICE float to_float(float x) { return x; }
PK_DEVICE float to_float(half x) { return static_cast<float>(x); }
PK_DEVICE float to_float(bf16 x) { return static_cast<float>(x); }
PK_DEVICE float to_float(fp8e4m3 x) { return static_cast<float>(x); }
PK_DEVICE float to_float(fp8e5m2 x) { return static_cast<float>(x); }

// from_float<T>(x): nearest even; fp8 saturates to its largest finite value (infinities too); NaN stays NaN.
template <class T>
PK_DEVICE T from_float(float x) {
  return static_cast<T>(x);
}

// Two values in one register, the first in the low half: what mma fragments and packed stores want.
template <class T>
PK_DEVICE uint32_t pack2(float low, float high);
template <>
PK_DEVICE uint32_t pack2<half>(float low, float high) {
  return cvt::half2_from_float(low, high);
}
template <>
PK_DEVICE uint32_t pack2<bf16>(float low, float high) {
  return cvt::bf16x2_from_float(low, high);
}

template <class T>
PK_DEVICE float2 unpack2(uint32_t packed);
template <>
PK_DEVICE float2 unpack2<half>(uint32_t packed) {
  return make_float2(cvt::half_to_float(static_cast<uint16_t>(packed)),
                     cvt::half_to_float(static_cast<uint16_t>(packed >> 16)));
}
template <>
PK_DEVICE float2 unpack2<bf16>(uint32_t packed) {
  return make_float2(cvt::bf16_to_float(static_cast<uint16_t>(packed)),
                     cvt::bf16_to_float(static_cast<uint16_t>(packed >> 16)));
}

// A float as the tf32 operand of the tensor cores: nearest, ties away from zero, 10 mantissa bits kept.
PK_DEVICE uint32_t to_tf32(float x) { return cvt::tf32_from_float(x); }

}  // namespace pk
