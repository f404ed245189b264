// What the tensor cores compute, as pure functions: a warp's (or warpgroup's) fragments in, fragments out.
// The runtime calls them when the last lane of a collective has arrived; they touch no runtime state. Sums
// run in float, in k order, and are then added to the accumulator: the GPU's order and rounding differ, so
// results agree within tolerance, not in bits. int8 is exact.
//
// All operand tiles have rows of 32 bytes, eight words: k is 8 tf32, 16 half or bf16, 32 fp8 or int8 values.
// A word therefore splits into 1, 2 or 4 planes, and the same code serves every type.
#pragma once
#include "host/types.h"

#define PK_PURE inline __attribute__((no_sanitize("thread")))

namespace pk::host {

typedef float Float4 __attribute__((vector_size(16)));
typedef float Float8 __attribute__((vector_size(32)));
typedef int32_t Int8 __attribute__((vector_size(32)));
typedef uint32_t Word8 __attribute__((vector_size(32)));
typedef uint16_t Short8 __attribute__((vector_size(16)));

// One lane's arguments. A collective's slots are pointers to these, one for each of the 32 lanes.
struct LdmatrixLane {
  const void* row;
  uint32_t* r;
};
struct StmatrixLane {
  void* row;
  const uint32_t* r;
};
struct MmaLane {
  void* d;  // float[4] or int32_t[4]: accumulator, read and written
  const uint32_t* a;
  const uint32_t* b;
};

// ---- ldmatrix, stmatrix: see core/gpu/mma.cuh for who holds what
template <int X, bool Trans>
PK_PURE void ldmatrix_warp(void** slots) {
  const LdmatrixLane* const* lanes = reinterpret_cast<const LdmatrixLane* const*>(slots);
  for (int m = 0; m < X; ++m) {
    uint16_t tile[8][8];
    for (int i = 0; i < 8; ++i) __builtin_memcpy(tile[i], lanes[8 * m + i]->row, 16);
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = 2 * (l % 4);
      const uint32_t low = Trans ? tile[t][g] : tile[g][t];
      const uint32_t high = Trans ? tile[t + 1][g] : tile[g][t + 1];
      lanes[l]->r[m] = low | high << 16;
    }
  }
}

template <int X, bool Trans>
PK_PURE void stmatrix_warp(void** slots) {
  const StmatrixLane* const* lanes = reinterpret_cast<const StmatrixLane* const*>(slots);
  for (int m = 0; m < X; ++m) {
    uint16_t tile[8][8];
    for (int l = 0; l < 32; ++l) {
      const int g = l / 4, t = 2 * (l % 4);
      const uint32_t v = lanes[l]->r[m];
      (Trans ? tile[t][g] : tile[g][t]) = static_cast<uint16_t>(v);
      (Trans ? tile[t + 1][g] : tile[g][t + 1]) = static_cast<uint16_t>(v >> 16);
    }
    for (int i = 0; i < 8; ++i) __builtin_memcpy(lanes[8 * m + i]->row, tile[i], 16);
  }
}

// ---- operand types: plane p of eight words, element by element what the tensor core multiplies
struct Tf32 {};  // a float whose low 13 bits are ignored

// Half bits in the low 16 bits of each word.
PK_PURE Float8 widen_half(Word8 bits) {
  Float8 out;
#if defined(__F16C__) && defined(__AVX__)
  const Short8 in = __builtin_convertvector(bits, Short8);
  __asm__("vcvtph2ps %1, %0" : "=x"(out) : "x"(in));
#else
  for (int i = 0; i < 8; ++i)
    out[i] = __uint_as_float(detail::half_to_float_bits(static_cast<uint16_t>(bits[i])));
#endif
  return out;
}

template <class T>
struct Operand;
template <>
struct Operand<bf16> {
  static constexpr int kPlanes = 2;
  using Sum = Float8;
  static PK_PURE Float8 plane(Word8 w, int p) { return (Float8)(p == 0 ? w << 16 : w & 0xffff0000u); }
};
template <>
struct Operand<half> {
  static constexpr int kPlanes = 2;
  using Sum = Float8;
  static PK_PURE Float8 plane(Word8 w, int p) { return widen_half(p == 0 ? w & 0xffffu : w >> 16); }
};
template <>
struct Operand<Tf32> {
  static constexpr int kPlanes = 1;
  using Sum = Float8;
  static PK_PURE Float8 plane(Word8 w, int) { return (Float8)(w & 0xffffe000u); }
};
template <>
struct Operand<fp8e5m2> {
  static constexpr int kPlanes = 4;
  using Sum = Float8;
  static PK_PURE Float8 plane(Word8 w, int p) { return widen_half((w >> (8 * p) & 0xffu) << 8); }
};
template <>
struct Operand<fp8e4m3> {
  static constexpr int kPlanes = 4;
  using Sum = Float8;
  // The exponent and mantissa, read as those of a half, are 2^8 too small; only NaN has other bits.
  static PK_PURE Float8 plane(Word8 w, int p) {
    const Word8 x = w >> (8 * p);
    const Float8 value = widen_half((x & 0x80u) << 8 | (x & 0x7fu) << 7) * 256.f;
    const Word8 nan = (Word8)((x & 0x7fu) == 0x7fu) & 0x7fffffffu;
    return (Float8)((Word8)value | nan);
  }
};
template <>
struct Operand<int8_t> {
  static constexpr int kPlanes = 4;
  using Sum = Int8;
  static PK_PURE Int8 plane(Word8 w, int p) { return (Int8)(w << (24 - 8 * p)) >> 24; }
};

// Eight rows of words as planes: planes[row][p][word] for A, planes[word][p][column] for B.
template <class T>
PK_PURE void split(const Word8* words, typename Operand<T>::Sum (*planes)[Operand<T>::kPlanes]) {
  for (int i = 0; i < 8; ++i) {
#pragma GCC unroll 4
    for (int p = 0; p < Operand<T>::kPlanes; ++p) planes[i][p] = Operand<T>::plane(words[i], p);
  }
}

// sum[i] = sum over k of a[i, k] b[k, 0..7] for eight rows.
template <class Sum, int kPlanes>
PK_PURE void multiply_8x8(const Sum (*a)[kPlanes], const Sum (*b)[kPlanes], Sum* sum) {
  // Not an array: they stay in registers.
  Sum s0 = {}, s1 = {}, s2 = {}, s3 = {}, s4 = {}, s5 = {}, s6 = {}, s7 = {};
  for (int w = 0; w < 8; ++w) {
#pragma GCC unroll 4
    for (int p = 0; p < kPlanes; ++p) {
      s0 += a[0][p][w] * b[w][p];
      s1 += a[1][p][w] * b[w][p];
      s2 += a[2][p][w] * b[w][p];
      s3 += a[3][p][w] * b[w][p];
      s4 += a[4][p][w] * b[w][p];
      s5 += a[5][p][w] * b[w][p];
      s6 += a[6][p][w] * b[w][p];
      s7 += a[7][p][w] * b[w][p];
    }
  }
  sum[0] = s0, sum[1] = s1, sum[2] = s2, sum[3] = s3, sum[4] = s4, sum[5] = s5, sum[6] = s6, sum[7] = s7;
}

PK_PURE float add_wrapping(float a, float b) { return a + b; }
PK_PURE int32_t add_wrapping(int32_t a, int32_t b) {  // as the GPU does without .satfinite
  return static_cast<int32_t>(static_cast<uint32_t>(a) + static_cast<uint32_t>(b));
}

// ---- mma.sync, m16n8: lane 4 g + t holds the words t and t + 4 of A's rows g and g + 8 and of B's column g,
// and of D the elements 2 t and 2 t + 1 of rows g and g + 8.
template <class T>
PK_PURE void mma_warp(void** slots) {
  using Sum = typename Operand<T>::Sum;
  using D = decltype(Sum{}[0] + 0);
  const MmaLane* const* lanes = reinterpret_cast<const MmaLane* const*>(slots);
  alignas(32) uint32_t a_words[16][8];
  alignas(32) uint32_t b_words[8][8];
  for (int g = 0; g < 8; ++g) {
    for (int t = 0; t < 4; ++t) {
      const MmaLane& lane = *lanes[4 * g + t];
      a_words[g][t] = lane.a[0];
      a_words[g + 8][t] = lane.a[1];
      a_words[g][t + 4] = lane.a[2];
      a_words[g + 8][t + 4] = lane.a[3];
      b_words[t][g] = lane.b[0];
      b_words[t + 4][g] = lane.b[1];
    }
  }
  constexpr int kPlanes = Operand<T>::kPlanes;
  Sum a[16][kPlanes], b[8][kPlanes], sum[16];
  split<T>(reinterpret_cast<const Word8*>(a_words), a);
  split<T>(reinterpret_cast<const Word8*>(a_words) + 8, a + 8);
  split<T>(reinterpret_cast<const Word8*>(b_words), b);
  multiply_8x8<Sum, kPlanes>(a, b, sum);
  multiply_8x8<Sum, kPlanes>(a + 8, b, sum + 8);
  for (int l = 0; l < 32; ++l) {
    D* d = static_cast<D*>(lanes[l]->d);
    const D* low = reinterpret_cast<const D*>(&sum[l / 4]) + 2 * (l % 4);
    const D* high = low + 64;
    d[0] = add_wrapping(d[0], low[0]);
    d[1] = add_wrapping(d[1], low[1]);
    d[2] = add_wrapping(d[2], high[0]);
    d[3] = add_wrapping(d[3], high[1]);
  }
}

// ---- wgmma: m64 nN k16, both operands K-major in shared memory under the 128-byte swizzle

PK_PURE uint32_t wgmma_start(uint64_t desc) { return static_cast<uint32_t>(desc & 0x3fffu) << 4; }
PK_PURE uint32_t wgmma_stride(uint64_t desc) { return static_cast<uint32_t>(desc >> 32 & 0x3fffu) << 4; }

// Shared-memory offset of 16-byte chunk c (0 or 1: eight k values) of operand row r. The swizzle acts on the
// address: bits 4-6 are xored with bits 7-9.
PK_PURE uint32_t wgmma_chunk(uint64_t desc, int r, int c) {
  const uint32_t plain = wgmma_start(desc) + static_cast<uint32_t>(r / 8) * wgmma_stride(desc) +
                         static_cast<uint32_t>(r % 8) * 128u + static_cast<uint32_t>(c) * 16u;
  return plain ^ (plain >> 7 & 7u) << 4;
}

// Why an operand of `rows` rows cannot be read through the descriptor, or null. smem_bytes: the block's
// shared memory.
PK_PURE const char* wgmma_desc_problem(uint64_t desc, int rows, uint64_t smem_bytes) {
  if (desc >> 62 != 1) return "only the 128-byte swizzle is modelled (bits 62-63 of the descriptor are 1)";
  if ((desc >> 49 & 7u) != 0)
    return "the base offset field is not zero: the tile must be aligned to 1024 bytes";
  if (wgmma_start(desc) % 1024 >= 128 || wgmma_start(desc) % 32 != 0)
    return "the operand does not start at a k step (32 bytes) of a tile aligned to 1024 bytes";
  if (rows > 8 && (wgmma_stride(desc) == 0 || wgmma_stride(desc) % 1024 != 0))
    return "the stride between groups of eight rows is no positive multiple of 1024 bytes";
  const uint64_t groups = static_cast<uint64_t>((rows + 7) / 8);
  const uint64_t end = wgmma_start(desc) / 1024 * 1024 + (groups - 1) * wgmma_stride(desc) + 1024;
  if (end > smem_bytes) return "the operand reaches beyond the block's shared memory";
  return nullptr;
}

// d[thread][i] (+)= a b^T; d holds the 128 threads' accumulators of n / 2 floats. smem is the start of the
// block's shared memory, which is aligned to 1024 bytes. The descriptors have been checked.
template <class T>
PK_PURE void wgmma_warpgroup(float* const* d, const unsigned char* smem, uint64_t desc_a, uint64_t desc_b,
                             int n, int scale_d) {
  alignas(32) uint32_t words[8][8];
  Float8 a[64][2];
  for (int r = 0; r < 64; ++r) {
    for (int c = 0; c < 2; ++c) __builtin_memcpy(&words[r % 8][4 * c], smem + wgmma_chunk(desc_a, r, c), 16);
    if (r % 8 == 7) split<T>(reinterpret_cast<const Word8*>(words), a + r - 7);
  }
  // 64 columns at a time, as this may run on a fiber's small stack; within them one warp's 16 rows at a time,
  // then lane by lane, as the accumulators of 128 threads lie far apart in memory.
  for (int first = 0; first < n; first += 64) {
    const int columns = n - first < 64 ? n - first : 64;
    Float8 b[64][2];  // in groups of eight: the planes of one block of eight columns
    for (int r = 0; r < columns; ++r) {
      for (int c = 0; c < 2; ++c) {
        uint32_t chunk[4];
        __builtin_memcpy(chunk, smem + wgmma_chunk(desc_b, first + r, c), 16);
        for (int w = 0; w < 4; ++w) words[4 * c + w][r % 8] = chunk[w];
      }
      if (r % 8 == 7) split<T>(reinterpret_cast<const Word8*>(words), b + r - 7);
    }
    for (int warp = 0; warp < 4; ++warp) {
      Float8 tile[8][16];
      for (int j = 0; j < columns / 8; ++j) {
        multiply_8x8<Float8, 2>(a + 16 * warp, b + 8 * j, tile[j]);
        multiply_8x8<Float8, 2>(a + 16 * warp + 8, b + 8 * j, tile[j] + 8);
      }
      for (int l = 0; l < 32; ++l) {
        float* out = d[32 * warp + l] + first / 2;
        for (int j = 0; j < columns / 8; ++j) {
          const float* low = reinterpret_cast<const float*>(&tile[j][l / 4]) + 2 * (l % 4);
          const float* high = low + 64;
          Float4 sum = {low[0], low[1], high[0], high[1]};
          Float4 old;
          __builtin_memcpy(&old, out + 4 * j, 16);
          if (scale_d != 0) sum += old;
          __builtin_memcpy(out + 4 * j, &sum, 16);
        }
      }
    }
  }
}

}  // namespace pk::host
