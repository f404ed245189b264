// The packed weight layouts, one struct each, as the kernels of dequantize, quant_embedding and quant_linear
// see them: the bits of 8 neighbouring weights of a row, and those bits as floats. Loading and decoding are
// apart, so that a thread can have many loads in flight before the first is used.
//
// A weight is one float32 expression, each operation rounded once, whoever evaluates it:
//   q4_0    d * (q - 8)            q4_1    d * q + m          q8_0    d * q
//   int4    (q - zero) * scale     int4_min    q * scale + min
//   int8    q * scale              fp8     value * scale
#pragma once
#include "core/quant.cuh"
#include "core/vec.cuh"

namespace pk {

// Types of scales and offsets, and of results: TYPES in pykern/ops/_quant.py.
enum QuantType : int { kQuantF32 = 0, kQuantF16 = 1, kQuantBf16 = 2, kQuantU8 = 3 };

// What the planes of a matrix [n, k] have in common. A scale belongs to `group` neighbours of a row.
struct QuantPlanes {
  const uint8_t* codes;  // or blocks
  const void* scales;  // [n, groups]
  const void* offsets;  // [n, groups] zeros or minima; without: zero 8
  int k, group, groups;
  int tags;  // scale type, offset type << 2, minima << 4, fast << 5, 1 + log2(group) << 6 (0: no power of two),
             // has offsets << 11

  PK_DEVICE int scale_type() const { return tags & 3; }
  PK_DEVICE int offset_type() const { return tags >> 2 & 3; }
  PK_DEVICE bool minima() const { return tags >> 4 & 1; }
  // Whether 8 weights at a multiple of 8 are whole, aligned, and of one group.
  PK_DEVICE bool fast() const { return tags >> 5 & 1; }
  PK_DEVICE int shift() const { return (tags >> 6 & 31) - 1; }
  PK_DEVICE bool has_offsets() const { return tags >> 11 & 1; }
  // The same, its tags unknown to the compiler: else it makes a copy of a loop for each combination of them, and takes
  // minutes.
  PK_DEVICE QuantPlanes opaque() const {
    QuantPlanes q = *this;
    uint32_t bits = static_cast<uint32_t>(tags);
    forget(bits);
    q.tags = static_cast<int>(bits);
    return q;
  }
  PK_DEVICE int64_t group_at(int64_t row, int at) const {
    return row * groups + (shift() >= 0 ? at >> shift() : at / group);
  }
};

// Bits of element i of a plane of scales or offsets, and the number they are.
PK_DEVICE uint32_t quant_raw(const void* plane, int64_t i, int type) {
  if (type == kQuantF32) return ld(static_cast<const uint32_t*>(plane) + i);
  if (type == kQuantU8) return ld(static_cast<const uint8_t*>(plane) + i);
  return ld(static_cast<const uint16_t*>(plane) + i);
}
PK_DEVICE float quant_value(uint32_t raw, int type) {
  if (type == kQuantF32) return __uint_as_float(raw);
  if (type == kQuantU8) return static_cast<float>(raw);
  return type == kQuantF16 ? cvt::half_to_float(static_cast<uint16_t>(raw)) : __uint_as_float(raw << 16);
}

template <int kWords>
struct QuantRaw {
  uint32_t words[kWords];  // the codes
  uint32_t scale, offset;
};

PK_DEVICE void load_group(const QuantPlanes& q, int64_t row, int at, uint32_t& scale, uint32_t& offset) {
  const int64_t i = q.group_at(row, at);
  scale = quant_raw(q.scales, i, q.scale_type());
  offset = q.has_offsets() ? quant_raw(q.offsets, i, q.offset_type()) : 0;
}

// (q - zero) * scale + add, where zero or add is what the layout does not have.
struct Affine {
  float zero, scale, add;
  PK_DEVICE Affine(const QuantPlanes& q, uint32_t raw_scale, uint32_t raw_offset) {
    const float offset = q.has_offsets() ? quant_value(raw_offset, q.offset_type()) : 8.f;
    zero = q.minima() ? 0.f : offset;
    add = q.minima() ? offset : -0.f;  // adding -0 changes no value
    scale = quant_value(raw_scale, q.scale_type());
  }
  PK_DEVICE float operator()(float code) const {
    return __fadd_rn(__fmul_rn(__fadd_rn(code, -zero), scale), add);
  }
};

// Each layout L offers:
//   Raw, load(q, row, at): 8 weights at `at`, a multiple of 8; only where q.fast()
//   decode(q, raw, at): those weights
//   one(q, row, at): any one weight, whatever the alignment
// and those of 4-bit codes in words of 8
//   place(i): where word i of the weights is
//   pairs<T>(word, scale, zero, out): the weights as four pairs of neighbours of T, of a scale of T and a byte of zero

// (nibble i, nibble i + 4) of a word, less zero, times scale: rounded once, as differences of 4 and 8 bits are exact.
template <class T>
PK_DEVICE void affine_u4_pairs(uint32_t word, uint32_t scale, uint32_t zero, uint32_t (&out)[4]) {
  const float minus = -static_cast<float>(zero);
  const uint32_t minus_two = pack2<T>(minus, minus), scale_two = prmt(scale, scale, 0x1010u);
  unpack_u4_pairs<T, 0>(word, out);
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = mul2<T>(add2<T>(out[i], minus_two), scale_two);
}

// int4 and int4_min: element 2 j of a row in the low nibble of byte j, element 2 j + 1 in the high one.
struct QuantInt4 {
  using Raw = QuantRaw<1>;
  static constexpr bool kNibbles = true;
  static constexpr bool kPacked = false;
  PK_DEVICE static uint32_t place(uint32_t i) { return i; }
  template <class T>
  PK_DEVICE static void pairs(uint32_t word, uint32_t scale, uint32_t zero, uint32_t (&out)[4]) {
    uint32_t p[4];  // (0, 4), (1, 5), (2, 6), (3, 7)
    affine_u4_pairs<T>(word, scale, zero, p);
    // Nibble order is element order here: neighbours are the low halves of two pairs, or the high ones.
    out[0] = prmt(p[0], p[1], 0x5410u);
    out[1] = prmt(p[2], p[3], 0x5410u);
    out[2] = prmt(p[0], p[1], 0x7632u);
    out[3] = prmt(p[2], p[3], 0x7632u);
  }
  PK_DEVICE static Raw load(const QuantPlanes& q, int64_t row, int at) {
    Raw r;
    r.words[0] = ld_nc(reinterpret_cast<const uint32_t*>(q.codes + row * (q.k / 2) + at / 2));
    load_group(q, row, at, r.scale, r.offset);
    return r;
  }
  PK_DEVICE static Vec<float, 8> decode(const QuantPlanes& q, const Raw& r, int) {
    const Affine affine(q, r.scale, r.offset);
    Vec<float, 8> w = unpack_u4(r.words[0]);
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = affine(w[i]);
    return w;
  }
  PK_DEVICE static float one(const QuantPlanes& q, int64_t row, int at) {
    const int code = ld(q.codes + row * (q.k / 2) + at / 2) >> at % 2 * 4 & 15;
    uint32_t scale, offset;
    load_group(q, row, at, scale, offset);
    return Affine(q, scale, offset)(static_cast<float>(code));
  }
};

// packed4.v1: int4 reshuffled for quant_linear's fragments; k is a multiple of 128. Of the 16 words of 128
// weights, word 4 t + u holds weights 32 u + 8 t .. + 7: a lane's 16-byte load brings its weights of 4 mma
// steps. In a word, weight 2 i is nibble i and weight 2 i + 1 nibble i + 4, so that pairs unpack as pairs.
struct QuantPacked4 {
  using Raw = QuantRaw<1>;
  static constexpr bool kNibbles = true;
  static constexpr bool kPacked = true;
  PK_DEVICE static uint32_t place(uint32_t i) { return (i & ~15u) | (i & 3) << 2 | (i >> 2 & 3); }
  template <class T>
  PK_DEVICE static void pairs(uint32_t word, uint32_t scale, uint32_t zero, uint32_t (&out)[4]) {
    affine_u4_pairs<T>(word, scale, zero, out);
  }
  PK_DEVICE static Raw load(const QuantPlanes& q, int64_t row, int at) {
    Raw r;
    r.words[0] = ld_nc(reinterpret_cast<const uint32_t*>(q.codes + row * (q.k / 2)) + place(at / 8));
    load_group(q, row, at, r.scale, r.offset);
    return r;
  }
  PK_DEVICE static Vec<float, 8> decode(const QuantPlanes& q, const Raw& r, int) {
    const Affine affine(q, r.scale, r.offset);
    const Vec<float, 8> nibbles = unpack_u4(r.words[0]);
    Vec<float, 8> w;
#pragma unroll
    for (int i = 0; i < 8; ++i) w[i] = affine(nibbles[interleaved_nibble(i)]);
    return w;
  }
  PK_DEVICE static float one(const QuantPlanes& q, int64_t row, int at) {
    const int nibble = interleaved_nibble(at % 8);
    const int code = ld(q.codes + row * (q.k / 2) + place(at / 8) * 4 + nibble / 2) >> nibble % 2 * 4 & 15;
    uint32_t scale, offset;
    load_group(q, row, at, scale, offset);
    return Affine(q, scale, offset)(static_cast<float>(code));
  }
};

// int8 and fp8: a byte a weight.
template <bool kFp8>
struct QuantBytes {
  using Raw = QuantRaw<2>;
  static constexpr bool kNibbles = false;
  PK_DEVICE static Raw load(const QuantPlanes& q, int64_t row, int at) {
    Raw r;
    const auto two = ld_nc(reinterpret_cast<const Vec<uint32_t, 2>*>(q.codes + row * q.k + at));
    r.words[0] = two[0];
    r.words[1] = two[1];
    r.scale = quant_raw(q.scales, q.group_at(row, at), q.scale_type());
    return r;
  }
  PK_DEVICE static Vec<float, 8> decode(const QuantPlanes& q, const Raw& r, int) {
    const float scale = quant_value(r.scale, q.scale_type());
    Vec<float, 8> w;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const Vec<float, 4> v = kFp8 ? unpack_fp8<fp8e4m3>(r.words[h]) : unpack_s8(r.words[h]);
#pragma unroll
      for (int i = 0; i < 4; ++i) w[4 * h + i] = v[i] * scale;
    }
    return w;
  }
  PK_DEVICE static float one(const QuantPlanes& q, int64_t row, int at) {
    const uint8_t byte = ld(q.codes + row * q.k + at);
    const float scale = quant_value(quant_raw(q.scales, q.group_at(row, at), q.scale_type()), q.scale_type());
    return (kFp8 ? cvt::e4m3_to_float(byte) : static_cast<float>(static_cast<int8_t>(byte))) * scale;
  }
};
using QuantInt8 = QuantBytes<false>;
using QuantFp8 = QuantBytes<true>;

// GGUF blocks of 32 weights: a row is k / 32 blocks, each aligned to two bytes only.
template <class Block>
struct QuantBlocks {
  using Raw = QuantRaw<2>;
  static constexpr bool kNibbles = false;
  static constexpr bool kQ8 = detail::same<Block, BlockQ8_0>::value;
  static constexpr bool kMin = detail::same<Block, BlockQ4_1>::value;
  PK_DEVICE static const uint8_t* block(const QuantPlanes& q, int64_t row, int at) {
    return q.codes + (row * (q.k / 32) + at / 32) * static_cast<int>(sizeof(Block));
  }
  // 4-bit: weights at .. at + 7 are the low nibbles of 8 bytes, or for the later half of the block the high ones.
  using Apart = QuantRaw<4>;  // the words' halves
  PK_DEVICE static Apart load_apart(const QuantPlanes& q, int64_t row, int at) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(block(q, row, at));
    const uint16_t* codes = p + (kMin ? 2 : 1) + at % (kQ8 ? 32 : 16) / 2;
    Apart r;
#pragma unroll
    for (int i = 0; i < 4; ++i) r.words[i] = ld_nc(codes + i);
    r.scale = ld_nc(p);
    r.offset = kMin ? ld_nc(p + 1) : 0;
    return r;
  }
  PK_DEVICE static Raw join(const Apart& r) {
    return {{r.words[0] | r.words[1] << 16, r.words[2] | r.words[3] << 16}, r.scale, r.offset};
  }
  PK_DEVICE static Raw load(const QuantPlanes& q, int64_t row, int at) { return join(load_apart(q, row, at)); }
  PK_DEVICE static float weight(float code, float d, float m) {
    return kMin ? __fadd_rn(__fmul_rn(code, d), m) : code * d;
  }
  PK_DEVICE static Vec<float, 8> decode(const QuantPlanes&, const Raw& r, int at) {
    const float d = cvt::half_to_float(static_cast<uint16_t>(r.scale));
    const float m = cvt::half_to_float(static_cast<uint16_t>(r.offset));
    Vec<float, 8> w;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      if constexpr (kQ8) {
        const Vec<float, 4> v = unpack_s8(r.words[h]);
#pragma unroll
        for (int i = 0; i < 4; ++i) w[4 * h + i] = weight(v[i], d, m);
      } else {
        const uint32_t word = r.words[h] >> (at % 32 >= 16 ? 4 : 0);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float biased = __uint_as_float(lop3<detail::kAndOr>(word >> (8 * i), 0xfu, 0x4b000000u));
          w[4 * h + i] = weight(biased - (kMin ? 8388608.f : 8388616.f), d, m);
        }
      }
    }
    return w;
  }
  PK_DEVICE static float one(const QuantPlanes& q, int64_t row, int at) {
    const uint8_t* p = block(q, row, at);
    auto number = [&](int i) {
      return cvt::half_to_float(static_cast<uint16_t>(ld(p + 2 * i) | ld(p + 2 * i + 1) << 8));
    };
    const uint8_t byte = ld(p + (kMin ? 4 : 2) + at % (kQ8 ? 32 : 16));
    const int nibble = byte >> (at % 32 >= 16 ? 4 : 0) & 15;
    const int code = kQ8 ? static_cast<int8_t>(byte) : kMin ? nibble : nibble - 8;
    return weight(static_cast<float>(code), number(0), kMin ? number(1) : 0.f);
  }
};
using QuantQ4_0 = QuantBlocks<BlockQ4_0>;
using QuantQ4_1 = QuantBlocks<BlockQ4_1>;
using QuantQ8_0 = QuantBlocks<BlockQ8_0>;

// 8 weights on their way, for a kernel that is latency: what L::load puts together it waits for, so here that is left
// to the end, at the price of registers.
template <class L>
struct QuantAhead {
  typename L::Raw raw;
  PK_DEVICE void load(const QuantPlanes& q, int64_t row, int at) { raw = L::load(q, row, at); }
  PK_DEVICE typename L::Raw get() const { return raw; }
};
template <class Block>
struct QuantAhead<QuantBlocks<Block>> {
  using L = QuantBlocks<Block>;
  typename L::Apart raw;
  PK_DEVICE void load(const QuantPlanes& q, int64_t row, int at) { raw = L::load_apart(q, row, at); }
  PK_DEVICE typename L::Raw get() const { return L::join(raw); }
};

}  // namespace pk
