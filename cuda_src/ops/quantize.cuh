// Packs a matrix w [n, k]. A warp owns one group of a row (32 weights of a GGUF block) and reads it twice, the
// second time from L1: for its range, and for the codes. Arithmetic is float32, each operation rounded once.
#pragma once
#include "core/vec.cuh"
#include "core/warp.cuh"
#include "ops/quant_formats.cuh"

namespace pk {

constexpr int kQuantizeThreads = 128;

PK_DEVICE float load_weight(const void* w, int64_t i, int type) {
  return quant_value(quant_raw(w, i, type), type);
}

// A number as a code of low..high: NaN becomes low.
PK_DEVICE int code_of(float v, int low, int high) {
  return static_cast<int>(fminf(fmaxf(v, static_cast<float>(low)), static_cast<float>(high)));
}

// Of a warp's values, the first (by lane) of largest magnitude, with its sign. No NaN among them.
PK_DEVICE float warp_extreme(float v) {
  const float most = warp_max(fabsf(v));
  const unsigned who = __ballot_sync(0xffffffffu, fabsf(v) == most);
  return __shfl_sync(0xffffffffu, v, who ? __ffs(who) - 1 : 0);
}

// GGUF's encoders, as gguf-py has them: 1 / d is rounded, then multiplied with; halves go away from zero in
// Q8_0, and up in Q4_0 and Q4_1. Q4_0's scale has the sign that maps the value of largest magnitude to -8.
template <class Block>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_blocks(const void* __restrict__ w, uint8_t* __restrict__ blocks, int64_t count, int per_row,
                    int64_t stride, int type) {
  constexpr bool kQ8 = detail::same<Block, BlockQ8_0>::value, kMin = detail::same<Block, BlockQ4_1>::value;
  const int64_t b = static_cast<int64_t>(blockIdx.x) * (kQuantizeThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  grid_wait();
  grid_launch_dependents();
  if (b >= count) return;
  const int64_t row = b / per_row;
  const float v = load_weight(w, row * stride + (b - row * per_row) * 32 + lane, type);
  float d, m = 0.f;
  if constexpr (kQ8) {
    d = __fdiv_rn(warp_max(fabsf(v)), 127.f);
  } else if constexpr (kMin) {
    m = warp_min(v);
    d = __fdiv_rn(warp_max(v) - m, 15.f);
  } else {
    d = warp_extreme(v) / -8.f;
  }
  const float inverse = d == 0.f ? 0.f : __fdiv_rn(1.f, d);
  uint8_t* out = blocks + b * static_cast<int>(sizeof(Block));
  if constexpr (kQ8) {
    const float scaled = __fmul_rn(v, inverse), size = fabsf(scaled), whole = floorf(size);
    const float rounded = whole + floorf(2.f * (size - whole));
    const int code = code_of(rounded, 0, 127);
    st(out + 2 + lane, static_cast<uint8_t>(scaled < 0.f ? -code : code));
  } else {
    const float scaled = kMin ? __fadd_rn(__fmul_rn(v - m, inverse), 0.5f) : __fadd_rn(__fmul_rn(v, inverse), 8.5f);
    const int code = code_of(scaled, 0, 15);
    const int high = __shfl_down_sync(0xffffffffu, code, 16);
    if (lane < 16) st(out + (kMin ? 4 : 2) + lane, static_cast<uint8_t>(code | high << 4));
  }
  if (lane == 0) {
    uint16_t* numbers = reinterpret_cast<uint16_t*>(out);
    st(numbers, from_float<half>(d).bits);
    if constexpr (kMin) st(numbers + 1, from_float<half>(m).bits);
  }
}

enum QuantKind : int { kQuantKindInt4 = 0, kQuantKindInt8 = 1, kQuantKindFp8 = 2 };

PK_DEVICE float store_number(void* p, int64_t i, float v, int type) {
  if (type == kQuantF32) st(static_cast<float*>(p) + i, v);
  if (type == kQuantF16) st(static_cast<half*>(p) + i, from_float<half>(v));
  if (type == kQuantBf16) st(static_cast<bf16*>(p) + i, from_float<bf16>(v));
  return type == kQuantF32 ? v : type == kQuantF16 ? to_float(from_float<half>(v)) : to_float(from_float<bf16>(v));
}

// Groups of any size: scale = largest magnitude / 7, 127 or 448, or with minima (max - min) / 15, rounded to the
// planes' type; codes are taken with the rounded numbers, to nearest even, and clamped. A group of zeros has
// scale 0 and the code of 0; a group with NaN or infinity has scale NaN, so that all of it reads as NaN.
template <int kKind>
__global__ void __launch_bounds__(kQuantizeThreads)
    quantize_groups(const void* __restrict__ w, uint8_t* __restrict__ codes, void* __restrict__ scales,
                    void* __restrict__ mins, int64_t count, int groups, int group, int k, int64_t stride, int type) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (kQuantizeThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  grid_wait();
  grid_launch_dependents();
  if (i >= count) return;
  const int64_t row = i / groups;
  const int from = static_cast<int>(i - row * groups) * group, to = min(k - from, group) + from;
  const int64_t base = row * stride;
  float low = INFINITY, high = -INFINITY;
  bool finite = true;
  for (int at = from + lane; at < to; at += 32) {
    const float v = load_weight(w, base + at, type);
    finite = finite && fabsf(v) < INFINITY;
    low = fminf(low, v);
    high = fmaxf(high, v);
  }
  low = warp_min(low);
  high = warp_max(high);
  finite = __all_sync(0xffffffffu, finite);
  constexpr float kSteps = kKind == kQuantKindInt4 ? 7.f : kKind == kQuantKindInt8 ? 127.f : 448.f;
  // Halves first: the range of float32 values may be beyond float32.
  float scale = mins ? __fmul_rn(2.f, __fdiv_rn(0.5f * high - 0.5f * low, 15.f)) : __fdiv_rn(fmaxf(-low, high), kSteps);
  if (!finite) scale = NAN;
  float minimum = 0.f;
  if (lane == 0) {
    scale = store_number(scales, i, scale, type);
    if (mins) minimum = store_number(mins, i, finite ? low : NAN, type);
  }
  scale = __shfl_sync(0xffffffffu, scale, 0);
  minimum = __shfl_sync(0xffffffffu, minimum, 0);
  const bool some = scale > 0.f;  // not of zeros, which would give 0 / 0, and not NaN
  auto quotient = [&](int at) { return some ? __fdiv_rn(load_weight(w, base + at, type) - minimum, scale) : 0.f; };
  if constexpr (kKind == kQuantKindInt4) {
    auto code = [&](int at) {
      if (at >= k) return 0;
      const float q = rintf(quotient(at));
      return mins ? code_of(q, 0, 15) : code_of(q, -8, 7) + 8;
    };
    // A byte is two neighbours of one group: k and group are even.
    for (int at = from + 2 * lane; at < to; at += 64)
      st(codes + row * (k / 2) + at / 2, static_cast<uint8_t>(code(at) | code(at + 1) << 4));
  } else {
    for (int at = from + lane; at < to; at += 32) {
      const float q = quotient(at);
      const uint8_t code = kKind == kQuantKindInt8 ? static_cast<uint8_t>(code_of(rintf(q), -127, 127))
                                                   : from_float<fp8e4m3>(q).bits;
      st(codes + row * k + at, code);
    }
  }
}

}  // namespace pk
