// What the tensor cores compute, as pure functions: a warp's (or warpgroup's) fragments in, fragments out. The
// runtime calls them when the last lane of a collective has arrived; they touch no runtime state and check nothing
// but their own arguments. Sums run in float, in k order, and are then added to the accumulator: the GPU's order and
// rounding differ, so results agree within tolerance, not in bits. int8 is exact.
#pragma once
#include "host/types.h"

#define PK_PURE inline __attribute__((no_sanitize("thread")))

namespace pk::host {

typedef float Float8 __attribute__((vector_size(32)));
typedef uint32_t Uint8x32 __attribute__((vector_size(32)));
typedef uint16_t Uint8x16 __attribute__((vector_size(16)));

// One lane's arguments. A collective's slots hold pointers to these, in lane order.
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
PK_PURE void ldmatrix(const LdmatrixLane* const* lanes) {
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
PK_PURE void stmatrix(const StmatrixLane* const* lanes) {
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

// ---- eight values at once
template <class T>
PK_PURE void widen8(const uint16_t* from, float* to) {
  Uint8x16 in;
  __builtin_memcpy(&in, from, 16);
  if constexpr (detail::same<T, bf16>::value) {
    const Uint8x32 bits = __builtin_convertvector(in, Uint8x32) << 16;
    __builtin_memcpy(to, &bits, 32);
  } else {
    static_assert(detail::same<T, half>::value, "16-bit operands are pk::half or pk::bf16");
#if defined(__F16C__) && defined(__AVX__)
    Float8 out;
    __asm__("vcvtph2ps %1, %0" : "=x"(out) : "x"(in));
    __builtin_memcpy(to, &out, 32);
#else
    for (int i = 0; i < 8; ++i) to[i] = __uint_as_float(detail::half_to_float_bits(from[i]));
#endif
  }
}

// d[16, 8] += a[16, K] b[K, 8] on dense tiles; D lives in the lanes' registers.
template <int K>
PK_PURE void mma_dense(const float (*a)[K], const float (*b)[8], const MmaLane* const* lanes) {
  for (int half_tile = 0; half_tile < 2; ++half_tile) {  // eight rows: eight accumulators fit the register file
    Float8 sum[8] = {};
    for (int k = 0; k < K; ++k) {
      Float8 column;
      __builtin_memcpy(&column, b[k], 32);
#pragma GCC unroll 8
      for (int i = 0; i < 8; ++i) sum[i] += a[8 * half_tile + i][k] * column;
    }
    for (int l = 0; l < 32; ++l) {
      float* d = static_cast<float*>(lanes[l]->d) + 2 * half_tile;
      d[0] += reinterpret_cast<const float*>(&sum[l / 4])[2 * (l % 4)];
      d[1] += reinterpret_cast<const float*>(&sum[l / 4])[2 * (l % 4) + 1];
    }
  }
}

template <class T>
PK_PURE void mma_m16n8k16(const MmaLane* const* lanes) {
  uint32_t a_bits[16][8];
  uint16_t b_bits[16][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4;
    const uint32_t *a = lanes[l]->a, *b = lanes[l]->b;
    for (int i = 0; i < 4; ++i) a_bits[g + 8 * (i & 1)][t + 4 * (i >> 1)] = a[i];
    for (int i = 0; i < 2; ++i) {
      b_bits[2 * t + 8 * i][g] = static_cast<uint16_t>(b[i]);
      b_bits[2 * t + 8 * i + 1][g] = static_cast<uint16_t>(b[i] >> 16);
    }
  }
  alignas(32) float a[16][16];
  alignas(32) float b[16][8];
  for (int i = 0; i < 16; ++i) {
    widen8<T>(reinterpret_cast<const uint16_t*>(a_bits[i]), a[i]);
    widen8<T>(reinterpret_cast<const uint16_t*>(a_bits[i]) + 8, a[i] + 8);
    widen8<T>(b_bits[i], b[i]);
  }
  mma_dense<16>(a, b, lanes);
}

// The hardware ignores the low 13 bits of a tf32 operand.
PK_PURE void mma_m16n8k8_tf32(const MmaLane* const* lanes) {
  alignas(32) float a[16][8];
  alignas(32) float b[8][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4;
    for (int i = 0; i < 4; ++i) a[g + 8 * (i & 1)][t + 4 * (i >> 1)] = __uint_as_float(lanes[l]->a[i] & 0xffffe000u);
    for (int i = 0; i < 2; ++i) b[t + 4 * i][g] = __uint_as_float(lanes[l]->b[i] & 0xffffe000u);
  }
  mma_dense<8>(a, b, lanes);
}

// Sums wrap around on overflow, as on the GPU without .satfinite.
PK_PURE void mma_m16n8k32_s8(const MmaLane* const* lanes) {
  int32_t a[16][32];
  int32_t b[32][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4;
    for (int byte = 0; byte < 4; ++byte) {
      for (int i = 0; i < 4; ++i)
        a[g + 8 * (i & 1)][4 * t + byte + 16 * (i >> 1)] = static_cast<int8_t>(lanes[l]->a[i] >> (8 * byte));
      for (int i = 0; i < 2; ++i) b[4 * t + byte + 16 * i][g] = static_cast<int8_t>(lanes[l]->b[i] >> (8 * byte));
    }
  }
  for (int i = 0; i < 16; ++i) {
    typedef int32_t Int8x32 __attribute__((vector_size(32)));
    Int8x32 sum = {};
    for (int k = 0; k < 32; ++k) {
      Int8x32 column;
      __builtin_memcpy(&column, b[k], 32);
      sum += a[i][k] * column;
    }
    for (int t = 0; t < 4; ++t) {
      int32_t* d = static_cast<int32_t*>(lanes[4 * (i % 8) + t]->d) + 2 * (i / 8);
      d[0] = static_cast<int32_t>(static_cast<uint32_t>(d[0]) + static_cast<uint32_t>(sum[2 * t]));
      d[1] = static_cast<int32_t>(static_cast<uint32_t>(d[1]) + static_cast<uint32_t>(sum[2 * t + 1]));
    }
  }
}

// All 256 values of an fp8 format as floats.
struct Fp8Table {
  uint32_t bits[256];
  template <class T>
  static constexpr Fp8Table make() {
    Fp8Table table{};
    for (int i = 0; i < 256; ++i) {
      const uint8_t x = static_cast<uint8_t>(i);
      table.bits[i] = detail::half_to_float_bits(detail::same<T, fp8e4m3>::value ? detail::e4m3_to_half_bits(x)
                                                                                  : detail::e5m2_to_half_bits(x));
    }
    return table;
  }
};
template <class T>
constexpr Fp8Table kFp8Table = Fp8Table::make<T>();

template <class T>
PK_PURE void mma_m16n8k32_fp8(const MmaLane* const* lanes) {
  static_assert(detail::same<T, fp8e4m3>::value || detail::same<T, fp8e5m2>::value, "fp8e4m3 or fp8e5m2");
  const uint32_t* table = kFp8Table<T>.bits;
  alignas(32) float a[16][32];
  alignas(32) float b[32][8];
  for (int l = 0; l < 32; ++l) {
    const int g = l / 4, t = l % 4;
    for (int byte = 0; byte < 4; ++byte) {
      for (int i = 0; i < 4; ++i)
        a[g + 8 * (i & 1)][4 * t + byte + 16 * (i >> 1)] = __uint_as_float(table[lanes[l]->a[i] >> (8 * byte) & 255u]);
      for (int i = 0; i < 2; ++i)
        b[4 * t + byte + 16 * i][g] = __uint_as_float(table[lanes[l]->b[i] >> (8 * byte) & 255u]);
    }
  }
  mma_dense<32>(a, b, lanes);
}

// ---- wgmma: m64 nN k16, both operands K-major in shared memory under the 128-byte swizzle

PK_PURE uint32_t wgmma_start(uint64_t desc) { return static_cast<uint32_t>(desc & 0x3fffu) << 4; }
PK_PURE uint32_t wgmma_stride(uint64_t desc) { return static_cast<uint32_t>(desc >> 32 & 0x3fffu) << 4; }

// Shared-memory offset of 16-byte chunk c (0 or 1: eight k values) of operand row r. The swizzle acts on the address:
// bits 4-6 are xored with bits 7-9.
PK_PURE uint32_t wgmma_chunk(uint64_t desc, int r, int c) {
  const uint32_t plain = wgmma_start(desc) + static_cast<uint32_t>(r / 8) * wgmma_stride(desc) +
                         static_cast<uint32_t>(r % 8) * 128u + static_cast<uint32_t>(c) * 16u;
  return plain ^ (plain >> 7 & 7u) << 4;
}

// Why an operand of `rows` rows cannot be read through the descriptor, or null. smem_bytes: the block's shared memory.
PK_PURE const char* wgmma_desc_problem(uint64_t desc, int rows, uint64_t smem_bytes) {
  if (desc >> 62 != 1) return "only the 128-byte swizzle is modelled (bits 62-63 of the descriptor are 1)";
  if ((desc >> 49 & 7u) != 0) return "the base offset field is not zero: the tile must be aligned to 1024 bytes";
  if (wgmma_start(desc) % 1024 >= 128 || wgmma_start(desc) % 32 != 0)
    return "the operand does not start at a k step (32 bytes) of a tile aligned to 1024 bytes";
  if (rows > 8 && wgmma_stride(desc) < 1024) return "the stride between groups of eight rows is under 1024 bytes";
  if (wgmma_stride(desc) % 1024 != 0) return "the stride between groups of eight rows is no multiple of 1024 bytes";
  const uint64_t groups = static_cast<uint64_t>((rows + 7) / 8);
  const uint64_t end = wgmma_start(desc) / 1024 * 1024 + (groups - 1) * wgmma_stride(desc) + 1024;
  if (end > smem_bytes) return "the operand reaches beyond the block's shared memory";
  return nullptr;
}

// d[thread][i] (+)= a b^T; d holds the 128 threads' accumulators of n / 2 floats. smem is the start of the block's
// shared memory, which is aligned to 1024 bytes. The descriptors have been checked.
template <class T>
PK_PURE void wgmma_m64k16(float* const* d, const unsigned char* smem, uint64_t desc_a, uint64_t desc_b, int n,
                          bool accumulate) {
  alignas(32) float a[64][16];
  alignas(32) float b[16][256];
  uint16_t row[8];
  for (int r = 0; r < 64; ++r)
    for (int c = 0; c < 2; ++c) {
      __builtin_memcpy(row, smem + wgmma_chunk(desc_a, r, c), 16);
      widen8<T>(row, a[r] + 8 * c);
    }
  for (int r = 0; r < n; ++r)
    for (int c = 0; c < 2; ++c) {
      float values[8];
      __builtin_memcpy(row, smem + wgmma_chunk(desc_b, r, c), 16);
      widen8<T>(row, values);
      for (int k = 0; k < 8; ++k) b[8 * c + k][r] = values[k];
    }
  for (int j = 0; j < n / 8; ++j) {
    for (int r0 = 0; r0 < 64; r0 += 8) {
      Float8 sum[8] = {};
      for (int k = 0; k < 16; ++k) {
        Float8 column;
        __builtin_memcpy(&column, &b[k][8 * j], 32);
#pragma GCC unroll 8
        for (int i = 0; i < 8; ++i) sum[i] += a[r0 + i][k] * column;
      }
      // Rows r0 .. r0 + 7 belong to warp r0 / 16; they are the upper or the lower half of its 16.
      float* const* warp = d + 32 * (r0 / 16);
      const int first = 4 * j + 2 * (r0 / 8 % 2);
      for (int l = 0; l < 32; ++l) {
        float* out = warp[l] + first;
        const float* values = reinterpret_cast<const float*>(&sum[l / 4]) + 2 * (l % 4);
        out[0] = (accumulate ? out[0] : 0.f) + values[0];
        out[1] = (accumulate ? out[1] : 0.f) + values[1];
      }
    }
  }
}

}  // namespace pk::host
