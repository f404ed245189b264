// Decoding packed weights in registers: 4-bit values, int8, fp8, and the GGUF blocks. Everything here is
// exact: integers become halves, bf16 or floats by placing their bits under a large power of two and
// subtracting it, which takes one lop3 or prmt and one fma where a conversion instruction runs at a quarter
// of the rate.
#pragma once
#include "core/vec.cuh"

namespace pk {

namespace detail {
constexpr int kAndOr = (0xf0 & 0xcc) | 0xaa;  // a & b | c as a lop3 table
}  // namespace detail

// ---- 4-bit values, eight in a word, nibble 0 lowest

// Nibble i as a float, 0 to 15: 2^23 + q has q in its lowest bits.
template <int N = 8>
PK_DEVICE Vec<float, N> unpack_u4(uint32_t word) {
  static_assert(N <= 8, "a word has eight nibbles");
  Vec<float, N> q;
#pragma unroll
  for (int i = 0; i < N; ++i)
    q[i] = __uint_as_float(lop3<detail::kAndOr>(word >> (4 * i), 0xfu, 0x4b000000u)) - 8388608.f;
  return q;
}

// Four pairs of 16-bit values, out[i] = (nibble i, nibble i + 4) - zero, zero 0 or 8. Pairs of neighbours
// come out when element 2 i is packed in nibble i and element 2 i + 1 in nibble i + 4, AWQ's order (see
// interleaved_nibble).
template <class T, int kZero>
PK_DEVICE void unpack_u4_pairs(uint32_t word, uint32_t* out) {
  static_assert(kZero == 0 || kZero == 8, "the zero is 0 or 8");
  if constexpr (detail::same<T, half>::value) {
    // 0x6400 is 1024: its last bits count ones, so a nibble in bits 0-3 adds q and one in bits 4-7 adds 16 q.
    constexpr uint32_t kOnes = kZero == 0 ? 0xe400e400u : 0xe408e408u;      // -1024, -1032
    constexpr uint32_t kSixteens = kZero == 0 ? 0xd400d400u : 0xd480d480u;  // -64, -72
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t w = word >> (8 * i);
      out[2 * i] = add2<T>(lop3<detail::kAndOr>(w, 0x000f000fu, 0x64006400u), kOnes);
      out[2 * i + 1] =
          fma2<T>(lop3<detail::kAndOr>(w, 0x00f000f0u, 0x64006400u), 0x2c002c00u, kSixteens);  // * 1/16
    }
  } else {
    // 0x4300 is 128 in bf16: seven bits of mantissa, so a nibble must come down to bits 0-3 first.
    constexpr uint32_t kOnes = kZero == 0 ? 0xc300c300u : 0xc308c308u;  // -128, -136
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[i] = fma2<T>(lop3<detail::kAndOr>(word >> (4 * i), 0x000f000fu, 0x43004300u), 0x3f803f80u, kOnes);
  }
}

// The nibble that holds element j (0 to 7) of a word in the interleaved order.
PK_DEVICE constexpr int interleaved_nibble(int j) { return j / 2 + j % 2 * 4; }

// ---- int8, four in a word, byte 0 lowest

PK_DEVICE Vec<float, 4> unpack_s8(uint32_t word) {
  const uint32_t biased = word ^ 0x80808080u;  // 0 to 255
  Vec<float, 4> q;
  q[0] = __uint_as_float(prmt(biased, 0x4b000000u, 0x7540u)) - 8388736.f;  // 2^23 + 128
  q[1] = __uint_as_float(prmt(biased, 0x4b000000u, 0x7541u)) - 8388736.f;
  q[2] = __uint_as_float(prmt(biased, 0x4b000000u, 0x7542u)) - 8388736.f;
  q[3] = __uint_as_float(prmt(biased, 0x4b000000u, 0x7543u)) - 8388736.f;
  return q;
}

// Two pairs of neighbours: out[0] = (byte 0, byte 1), out[1] = (byte 2, byte 3).
template <class T>
PK_DEVICE void unpack_s8_pairs(uint32_t word, uint32_t* out) {
  if constexpr (detail::same<T, half>::value) {
    const uint32_t biased = word ^ 0x80808080u;
    out[0] = add2<T>(prmt(biased, 0x64646464u, 0x4140u), 0xe480e480u);  // 1024 + (q + 128), minus 1152
    out[1] = add2<T>(prmt(biased, 0x64646464u, 0x4342u), 0xe480e480u);
  } else {
    const Vec<float, 4> q = unpack_s8(word);
    out[0] = pack2<T>(q[0], q[1]);
    out[1] = pack2<T>(q[2], q[3]);
  }
}

// ---- fp8, four in a word

// As two pairs of halves, which hold both formats exactly.
template <class T>
PK_DEVICE void unpack_fp8_half(uint32_t word, uint32_t* out) {
  static_assert(detail::same<T, fp8e4m3>::value || detail::same<T, fp8e5m2>::value,
                "pk::fp8e4m3 or pk::fp8e5m2");
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint16_t two = static_cast<uint16_t>(word >> (16 * i));
    out[i] = detail::same<T, fp8e4m3>::value ? cvt::e4m3x2_to_half2(two) : cvt::e5m2x2_to_half2(two);
  }
}
template <class T>
PK_DEVICE Vec<float, 4> unpack_fp8(uint32_t word) {
  uint32_t pairs[2];
  unpack_fp8_half<T>(word, pairs);
  const float2 low = unpack2<half>(pairs[0]), high = unpack2<half>(pairs[1]);
  return Vec<float, 4>{{low.x, low.y, high.x, high.y}};
}

// ---- GGUF blocks of 32 weights, as they lie in the file: 2-byte aligned, no padding.
// Element j of the first 16 is in the low nibble of byte j, element j + 16 in its high nibble.
struct BlockQ4_0 {  // x = d (q - 8)
  half d;
  uint16_t q[8];
};
struct BlockQ4_1 {  // x = d q + m
  half d, m;
  uint16_t q[8];
};
struct BlockQ8_0 {  // x = d q
  half d;
  uint16_t q[16];
};
static_assert(sizeof(BlockQ4_0) == 18 && sizeof(BlockQ4_1) == 20 && sizeof(BlockQ8_0) == 34, "GGUF's sizes");

// Word i (0 to 3; to 7 in Q8_0) of a block's quants. Blocks are aligned to two bytes only, hence two loads.
template <class Block>
PK_DEVICE uint32_t block_word(const Block* block, int i) {
  return ld(&block->q[2 * i]) | static_cast<uint32_t>(ld(&block->q[2 * i + 1])) << 16;
}

namespace detail {
// GGUF's order: low nibbles of the four bytes, then high ones, each minus kZero.
template <int kZero>
PK_DEVICE Vec<float, 8> unpack_block_word(uint32_t word) {
  Vec<float, 8> q;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    q[i] = __uint_as_float(lop3<kAndOr>(word >> (8 * i), 0xfu, 0x4b000000u)) - (8388608.f + kZero);
    q[i + 4] =
        __uint_as_float(lop3<kAndOr>(word >> (8 * i + 4), 0xfu, 0x4b000000u)) - (8388608.f + kZero);
  }
  return q;
}
}  // namespace detail

// Word i of a 4-bit block: x[0..3] are elements 4 i .. 4 i + 3, x[4..7] elements 16 + 4 i .. 16 + 4 i + 3.
// The scale has 11 bits and q at most 5, so the product is exact and only adding m rounds: bit-equal to
// gguf's float32.
PK_DEVICE Vec<float, 8> decode_q4_0(uint32_t word, half d) {
  Vec<float, 8> x = detail::unpack_block_word<8>(word);
  const float scale = to_float(d);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] *= scale;
  return x;
}
PK_DEVICE Vec<float, 8> decode_q4_1(uint32_t word, half d, half m) {
  Vec<float, 8> x = detail::unpack_block_word<0>(word);
  const float scale = to_float(d), minimum = to_float(m);
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = fmaf(x[i], scale, minimum);
  return x;
}

// Word i of a Q8_0 block: elements 4 i .. 4 i + 3.
PK_DEVICE Vec<float, 4> decode_q8_0(uint32_t word, half d) {
  Vec<float, 4> x = unpack_s8(word);
  const float scale = to_float(d);
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] *= scale;
  return x;
}

}  // namespace pk
