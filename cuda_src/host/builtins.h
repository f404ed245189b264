// CUDA's keywords, built-in variables and scalar functions, for a C++ compiler on the host.
#pragma once
#include <math.h>
#include <string.h>

#include "host/thread.h"

#define __global__
#define __device__
#define __host__
#define __constant__
#define __forceinline__ inline __attribute__((always_inline))
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __restrict__ __restrict
#define __align__(n) alignas(n)

#define threadIdx (::pk::host::self()->index)
#define blockIdx (::pk::host::self()->view->index)
#define blockDim (::pk::host::self()->view->block_dim)
#define gridDim (::pk::host::self()->view->grid_dim)
constexpr int warpSize = 32;

// ---- vector types
#define PK_VECTOR_TYPES(scalar, name)                                     \
  struct alignas(2 * sizeof(scalar)) name##2 {                            \
    scalar x, y;                                                          \
  };                                                                      \
  struct alignas(sizeof(scalar) < 8 ? 4 * sizeof(scalar) : 16) name##4 {  \
    scalar x, y, z, w;                                                    \
  };                                                                      \
  PK_DEVICE name##2 make_##name##2(scalar x, scalar y) { return {x, y}; } \
  PK_DEVICE name##4 make_##name##4(scalar x, scalar y, scalar z, scalar w) { return {x, y, z, w}; }
PK_VECTOR_TYPES(float, float)
PK_VECTOR_TYPES(double, double)
PK_VECTOR_TYPES(int, int)
PK_VECTOR_TYPES(unsigned, uint)
PK_VECTOR_TYPES(short, short)
PK_VECTOR_TYPES(unsigned short, ushort)
PK_VECTOR_TYPES(signed char, char)
PK_VECTOR_TYPES(unsigned char, uchar)
PK_VECTOR_TYPES(long long, longlong)
#undef PK_VECTOR_TYPES
struct float3 {
  float x, y, z;
};
struct int3 {
  int x, y, z;
};
PK_DEVICE float3 make_float3(float x, float y, float z) { return {x, y, z}; }
PK_DEVICE int3 make_int3(int x, int y, int z) { return {x, y, z}; }
PK_DEVICE uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }

// ---- min and max, with CUDA's overloads
#define PK_MIN_MAX(T)                                 \
  PK_DEVICE T min(T a, T b) { return a < b ? a : b; } \
  PK_DEVICE T max(T a, T b) { return a > b ? a : b; }
PK_MIN_MAX(int)
PK_MIN_MAX(unsigned)
PK_MIN_MAX(long)
PK_MIN_MAX(unsigned long)
PK_MIN_MAX(long long)
PK_MIN_MAX(unsigned long long)
#undef PK_MIN_MAX
PK_DEVICE unsigned min(int a, unsigned b) { return min(static_cast<unsigned>(a), b); }
PK_DEVICE unsigned min(unsigned a, int b) { return min(a, static_cast<unsigned>(b)); }
PK_DEVICE unsigned max(int a, unsigned b) { return max(static_cast<unsigned>(a), b); }
PK_DEVICE unsigned max(unsigned a, int b) { return max(a, static_cast<unsigned>(b)); }
PK_DEVICE float min(float a, float b) { return fminf(a, b); }
PK_DEVICE float max(float a, float b) { return fmaxf(a, b); }
PK_DEVICE double min(double a, double b) { return fmin(a, b); }
PK_DEVICE double max(double a, double b) { return fmax(a, b); }

// ---- bits
PK_DEVICE int __popc(unsigned v) { return __builtin_popcount(v); }
PK_DEVICE int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
PK_DEVICE int __ffs(int v) { return __builtin_ffs(v); }
PK_DEVICE int __ffsll(long long v) { return __builtin_ffsll(v); }
PK_DEVICE int __clz(int v) { return v == 0 ? 32 : __builtin_clz(static_cast<unsigned>(v)); }
PK_DEVICE int __clzll(long long v) {
  return v == 0 ? 64 : __builtin_clzll(static_cast<unsigned long long>(v));
}
PK_DEVICE unsigned __brev(unsigned v) {
  v = __builtin_bswap32(v);
  v = (v >> 4 & 0x0f0f0f0fu) | (v & 0x0f0f0f0fu) << 4;
  v = (v >> 2 & 0x33333333u) | (v & 0x33333333u) << 2;
  return (v >> 1 & 0x55555555u) | (v & 0x55555555u) << 1;
}
PK_DEVICE unsigned __umulhi(unsigned a, unsigned b) {
  return static_cast<unsigned>(static_cast<uint64_t>(a) * b >> 32);
}
PK_DEVICE int __mulhi(int a, int b) { return static_cast<int>(static_cast<int64_t>(a) * b >> 32); }
PK_DEVICE unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned long long>(static_cast<unsigned __int128>(a) * b >> 64);
}
PK_DEVICE unsigned __funnelshift_l(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>(((static_cast<uint64_t>(high) << 32 | low) << (shift & 31)) >> 32);
}
PK_DEVICE unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
  return static_cast<unsigned>((static_cast<uint64_t>(high) << 32 | low) >> (shift & 31));
}
// Byte i of the result is byte (selector >> 4 i) & 7 of {b, a}; bit 3 of a selector digit spreads the byte's
// sign.
PK_DEVICE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
  const uint64_t bytes = static_cast<uint64_t>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned pick = selector >> (4 * i);
    unsigned byte = static_cast<unsigned>(bytes >> (8 * (pick & 7))) & 0xffu;
    if (pick & 8) byte = byte & 0x80u ? 0xffu : 0u;
    r |= byte << (8 * i);
  }
  return r;
}
PK_DEVICE int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; ++i) {
    c += static_cast<int>(static_cast<int8_t>(a >> (8 * i))) * static_cast<int8_t>(b >> (8 * i));
  }
  return c;
}
namespace pk::host {
template <class To, class From>
PK_DEVICE To bits_as(From v) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To r;
  __builtin_memcpy(&r, &v, sizeof(To));
  return r;
}
}  // namespace pk::host
PK_DEVICE unsigned __float_as_uint(float v) { return pk::host::bits_as<unsigned>(v); }
PK_DEVICE int __float_as_int(float v) { return pk::host::bits_as<int>(v); }
PK_DEVICE float __uint_as_float(unsigned v) { return pk::host::bits_as<float>(v); }
PK_DEVICE float __int_as_float(int v) { return pk::host::bits_as<float>(v); }
PK_DEVICE long long __double_as_longlong(double v) { return pk::host::bits_as<long long>(v); }
PK_DEVICE double __longlong_as_double(long long v) { return pk::host::bits_as<double>(v); }

// ---- conversions: saturating, NaN to zero, as the device's cvt
namespace pk::host {
template <class I>
PK_DEVICE I saturate(double v) {
  constexpr I kLow = I(-1) < I(0) ? I(I(1) << (sizeof(I) * 8 - 1)) : I(0), kHigh = I(~kLow);
  return v != v ? I(0) : v <= double(kLow) ? kLow : v >= double(kHigh) ? kHigh : I(v);
}
}  // namespace pk::host
PK_DEVICE int __float2int_rn(float v) { return pk::host::saturate<int>(rintf(v)); }
PK_DEVICE int __float2int_rz(float v) { return pk::host::saturate<int>(v); }
PK_DEVICE int __float2int_rd(float v) { return pk::host::saturate<int>(floorf(v)); }
PK_DEVICE int __float2int_ru(float v) { return pk::host::saturate<int>(ceilf(v)); }
PK_DEVICE unsigned __float2uint_rn(float v) { return pk::host::saturate<unsigned>(rintf(v)); }
PK_DEVICE unsigned __float2uint_rz(float v) { return pk::host::saturate<unsigned>(v); }
PK_DEVICE float __int2float_rn(int v) { return static_cast<float>(v); }
PK_DEVICE float __uint2float_rn(unsigned v) { return static_cast<float>(v); }

// ---- arithmetic. The fast device functions are split as the device does (exp is ex2 of a product), not
// faster.
PK_DEVICE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
PK_DEVICE float __fadd_rn(float a, float b) { return a + b; }
PK_DEVICE float __fsub_rn(float a, float b) { return a - b; }
PK_DEVICE float __fmul_rn(float a, float b) { return a * b; }
PK_DEVICE float __fdiv_rn(float a, float b) { return a / b; }
PK_DEVICE float __frcp_rn(float a) { return 1.0f / a; }
PK_DEVICE float __fsqrt_rn(float a) { return sqrtf(a); }
PK_DEVICE float __frsqrt_rn(float a) { return static_cast<float>(1.0 / sqrt(static_cast<double>(a))); }
PK_DEVICE float rsqrtf(float a) { return 1.0f / sqrtf(a); }
PK_DEVICE double rsqrt(double a) { return 1.0 / sqrt(a); }
PK_DEVICE float __fdividef(float a, float b) { return a / b; }
PK_DEVICE float __expf(float v) { return exp2f(v * 1.44269504088896340736f); }
PK_DEVICE float __exp10f(float v) { return exp2f(v * 3.32192809488736234787f); }
PK_DEVICE float __logf(float v) { return log2f(v) * 0.693147180559945309417f; }
PK_DEVICE float __log2f(float v) { return log2f(v); }
PK_DEVICE float __log10f(float v) { return log2f(v) * 0.301029995663981195214f; }
PK_DEVICE float __powf(float a, float b) { return exp2f(b * log2f(a)); }
PK_DEVICE float __sinf(float v) { return sinf(v); }
PK_DEVICE float __cosf(float v) { return cosf(v); }
PK_DEVICE float __tanf(float v) { return tanf(v); }
PK_DEVICE void __sincosf(float v, float* s, float* c) {
  *s = sinf(v);
  *c = cosf(v);
}
PK_DEVICE float __saturatef(float v) { return v > 0.0f ? (v < 1.0f ? v : 1.0f) : 0.0f; }
PK_DEVICE float normcdff(float v) { return 0.5f * erfcf(-v * 0.707106781186547524401f); }

template <class T>
PK_DEVICE T __ldg(const T* p) {
  return *p;
}
PK_DEVICE void __nanosleep(unsigned) {}
PK_DEVICE long long clock64() { return 0; }
namespace pk {
PK_DEVICE float exp2_approx(float v) { return exp2f(v); }
}  // namespace pk
