// Linear layer on 4-bit codes for few tokens (m <= 16) of 16-bit x, the quick way of quant_linear.cuh's first kernel
// and with its bits: for groups of 32, 64 or a multiple of 128 weights whose scales are of x's type and whose zeros, if
// any, are bytes.
//
// What held the general kernel back was latency (a load of x before each step of 32 k, used at once) and then
// instructions (5 a weight). Here each warp has a ring of slices of codes in shared memory, filled by cp.async
// kStages - 1 slices ahead, x and scales come a slice or two ahead into registers, and ldmatrix hands each lane the
// word that its place in the fragment wants. A pair of weights then costs 1 or 2 bit operations and 2 of arithmetic,
// in all 2.9 instructions a weight.
//
// Codes become numbers in x's own type, each operation exact but the last, which rounds as float32 arithmetic and one
// conversion do:
//   half   1024 + q is q under the bits of 1024; 1024 + 16 q takes the high nibble of a byte. One fma removes what is
//          too much, and the zero; one product with the scale rounds.
//   bf16   has 7 bits of mantissa, too few for that. But the bits 0 to 255 alone are the numbers 0 to 255 times 2^-133
//          (subnormal, then the first normal ones), so a nibble in either half of a byte is itself, or 16 times
//          itself. One fma by 2^127 (2^123) subtracts zero / 64; the scale is taken times 64. Where that overflows,
//          a scale over 2^121, the slice takes the long way: scale first, then 64.
#pragma once
#include "core/mma.cuh"
#include "ops/linear_warp_sums.cuh"
#include "ops/quant_formats.cuh"

namespace pk {

constexpr int kNibbleRound = kSkinnyWarps * kSkinnySlice;

template <int kRowTiles, int kTokenTiles, int kStages>
struct QuantNibblesSmem {
  uint8_t ring[kSkinnyWarps][kStages][16 * kRowTiles * 64];  // a slice is 64 bytes a row
  WarpSums<kRowTiles, kTokenTiles> sums;
};

// Codes of one word as 16-bit pairs (weight 2 i, weight 2 i + 1), raw: see nibble_factor.
template <class T, bool kPacked>
PK_DEVICE void spread_nibbles(uint32_t word, uint32_t (&out)[4]) {
  constexpr bool kHalf = detail::same<T, half>::value;
  if constexpr (kPacked) {  // nibbles i and i + 4: both low in their bytes, then both high
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t w = i < 2 ? word : word >> 8, mask = i % 2 == 0 ? 0x000f000fu : 0x00f000f0u;
      out[i] = kHalf ? lop3<detail::kAndOr>(w, mask, 0x64006400u) : w & mask;
    }
  } else if constexpr (kHalf) {  // the low and the high nibble of byte i
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[i] = lop3<detail::kAndOr>(prmt(word, word, 0x1111u * i), 0x00f0000fu, 0x64006400u);
  } else {
    const uint32_t low = word & 0x0f0f0f0fu, high = word & 0xf0f0f0f0u;
    out[0] = prmt(low, high, 0x8480u);  // selector 8 + i: the sign of low's byte i, which is 0
    out[1] = prmt(low, high, 0x9591u);
    out[2] = prmt(low, high, 0xa6a2u);
    out[3] = prmt(low, high, 0xb7b3u);
  }
}

// What pair i of spread_nibbles is multiplied by: 1 and 1/16 (half), 2^127 and 2^123 (bf16).
template <class T, bool kPacked>
PK_DEVICE constexpr uint32_t nibble_factor(int i) {
  constexpr uint32_t kLow = detail::same<T, half>::value ? 0x3c00u : 0x7f00u;
  constexpr uint32_t kHigh = detail::same<T, half>::value ? 0x2c00u : 0x7d00u;
  return kPacked ? (i % 2 == 0 ? kLow * 0x10001u : kHigh * 0x10001u) : kHigh << 16 | kLow;
}

// A group's scale and zero, made ready for pairs.
template <class T, bool kPacked>
struct NibbleGroup {
  static constexpr bool kHalf = detail::same<T, half>::value;
  uint32_t add[2];  // to pairs 2 i and 2 i + 1
  uint32_t scale;  // twice; bf16: times 64
  PK_DEVICE void set(uint32_t raw_scale, uint32_t zero_code) {
    const uint32_t zeros = prmt(zero_code, zero_code, 0x1010u);
    scale = prmt(raw_scale, raw_scale, 0x1010u);
    if constexpr (kHalf) {
      const uint32_t low = zeros | 0xe400e400u;  // -1024 - zero
      add[0] = kPacked ? low : add2<T>(low, 0x63800000u);  // 960 more in the high half: -64 - zero
      add[1] = kPacked ? add2<T>(low, 0x63806380u) : add[0];
    } else {
      add[0] = add[1] = mul2<T>(zeros, 0xff00ff00u);  // by -2^127
      scale = mul2<T>(scale, 0x42804280u);
    }
  }
  // Whether the scale times 64 is no number.
  PK_DEVICE bool large() const { return !kHalf && (scale & 0x7f80u) == 0x7f80u; }

  PK_DEVICE void decode(uint32_t word, uint32_t (&out)[4]) const {
    spread_nibbles<T, kPacked>(word, out);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      out[i] = mul2<T>(fma2<T>(out[i], nibble_factor<T, kPacked>(i), add[i % 2]), scale);
  }
  // The same where the scale may be large.
  PK_DEVICE void decode_large(uint32_t word, uint32_t raw_scale, uint32_t (&out)[4]) const {
    const bool longer = large();
    const uint32_t by = longer ? prmt(raw_scale, raw_scale, 0x1010u) : scale;
    spread_nibbles<T, kPacked>(word, out);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      out[i] = mul2<T>(fma2<T>(out[i], nibble_factor<T, kPacked>(i), add[i % 2]), by);
      if (longer) out[i] = mul2<T>(out[i], 0x42804280u);
    }
  }
};

// One warp's slices of a block's rows. kScales: 1 where a row's slice has one scale, else 4, one for each 32 weights.
// kZeros: whether there is a plane of zeros, or, with 4 scales, may be; without, each is 8.
template <class T, class L, int kRowTiles, int kTokenTiles, int kStages, int kScales, bool kZeros>
struct NibbleWarp {
  static_assert((kStages & (kStages - 1)) == 0, "a ring of 2, 4, 8 stages");
  static constexpr bool kPacked = L::kPacked;
  static constexpr int kStageBytes = kRowTiles * 16 * 64;
  static constexpr int kScalesAhead = kScales == 1 ? 2 : 1;  // slices

  using Groups = NibbleGroup<T, kPacked>[kRowTiles][2][kScales];
  using Words = uint32_t[kRowTiles][2][4];  // of rows g and g + 8 of each tile, step by step
  using Tokens = uint32_t[4][kTokenTiles][4];
  using Sums = float[kRowTiles][kTokenTiles][4];
  struct Raw {
    uint32_t scale[kRowTiles][2][kScales], zero[kRowTiles][2][kScales];
  };

  const uint8_t* codes[2 * kRowTiles];  // the chunks that this lane copies next: rows lane / 4 and every 8th after
  const uint16_t* scales;
  const uint8_t* zeros;  // or null
  const T* x[kTokenTiles];  // this lane's k of the slice to load next, in a token of each tile; past m the last one's
  uint8_t* ring;  // [kStages][kStageBytes], rows of 4 swizzled chunks of 16 bytes
  int k, shift;  // shift: log2(group)
  int group_row[kRowTiles][2];  // where the groups of rows g and g + 8 of each tile start
  int copy_k, copy_to, read_from;  // this lane's chunk: its k in a slice; places in a stage

  // Rows past the end: the last one's weights, whose results are dropped.
  PK_DEVICE NibbleWarp(const QuantPlanes& q, const T* x0, int64_t x_stride, uint8_t* ring, int m, int n0, int n)
      : scales(static_cast<const uint16_t*>(q.scales)),
        zeros(q.has_offsets() ? static_cast<const uint8_t*>(q.offsets) : nullptr),
        ring(ring),
        k(q.k),
        shift(q.groups == 1 ? 31 : q.shift()) {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, first = threadIdx.x / 32 * kSkinnySlice;
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const int row = min(n0 + 8 * i + g, n - 1);
      codes[i] = q.codes + row * static_cast<int64_t>(q.k / 2) + first / 2 + 16 * t;
      group_row[i / 2][i % 2] = row * q.groups;
    }
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) x[j] = x0 + min(j * 8 + g, m - 1) * x_stride + first + 8 * t;
    copy_k = 32 * t;
    copy_to = swizzle_chunk<4>(g, t) * 16;
    // ldmatrix: lanes 0-15 give rows 0-15 of step 0, the others of step 1
    read_from = kPacked ? copy_to : swizzle_chunk<4>(lane % 16, lane / 16) * 16;
  }
  // Starts the copy of the slice at k0, the next that `codes` point to, or of nothing past the end of k; either way a
  // group of cp.async.
  PK_DEVICE void fetch(int k0, int stage) {
    const bool in = k0 + copy_k < k;  // past the end zeros: ldmatrix reads whole slices
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) cp_async<16>(ring + stage + copy_to + i * 512, codes[i], in);
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) codes[i] += kNibbleRound / 2;
    cp_async_commit();
  }
  // ldmatrix gives lane 4 g + t word t of row g's chunk u, which is step u's; packed4 has a lane's words in one chunk.
  PK_DEVICE void read_words(int stage, Words& words) const {
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      uint32_t r[4];
      if constexpr (kPacked) {
        const auto v = ld_vec<uint32_t, 4>(reinterpret_cast<const uint32_t*>(ring + stage + read_from + i * 512));
#pragma unroll
        for (int u = 0; u < 4; ++u) words[i / 2][i % 2][u] = v[u];
      } else {  // a tile's steps 0 and 1, or 2 and 3, whose chunks differ in bit 1
        ldmatrix<4>(r, ring + stage + i / 2 * 1024 + (i % 2 == 0 ? read_from : read_from ^ 32));
#pragma unroll
        for (int u = 0; u < 4; ++u) words[i / 2][u % 2][i % 2 * 2 + u / 2] = r[u];
      }
    }
  }
  PK_DEVICE void load_scales(int k0, Raw& raw) const {
    uint32_t has_zeros = zeros != nullptr;
    forget(has_zeros);  // a test of what the loop does not change would make nvcc copy the loop
#pragma unroll
    for (int u = 0; u < kScales; ++u) {
      const int group = min(k0 + 32 * u, k - 1) >> shift;  // past the end: any
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint32_t at = group_row[i][h] + group;
          raw.scale[i][h][u] = ld(scales + at);
          raw.zero[i][h][u] = 8;
          if (kZeros && (kScales == 1 || has_zeros)) raw.zero[i][h][u] = ld(zeros + at);
        }
    }
  }
  // The tokens of a whole slice; of another, nothing: multiply_odd loads them.
  PK_DEVICE void load_tokens(int k0, Tokens& to) {
    if (k0 + kSkinnySlice <= k) {
#pragma unroll
      for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int j = 0; j < kTokenTiles; ++j) load_chunk(x[j] + 32 * u, to[u][j]);
    }
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j) x[j] += kNibbleRound;
  }
  PK_DEVICE static void load_chunk(const T* p, uint32_t (&to)[4]) {
    const auto v = ld(reinterpret_cast<const Vec<uint32_t, 4>*>(p));
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = v[i];
  }

  PK_DEVICE static void multiply_step(const uint32_t (&w)[kRowTiles][2][4], const uint32_t (&x)[kTokenTiles][4],
                                      Sums& acc) {
#pragma unroll
    for (int j = 0; j < kTokenTiles; ++j)
#pragma unroll
      for (int half8 = 0; half8 < 2; ++half8)
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          const uint32_t a[4] = {w[i][0][2 * half8], w[i][1][2 * half8], w[i][0][2 * half8 + 1],
                                 w[i][1][2 * half8 + 1]};
          mma_m16n8k16<T>(acc[i][j], a, x[j] + 2 * half8);
        }
  }
  PK_DEVICE void multiply(const Words& words, const Tokens& tokens, const Groups& groups, Sums& acc) const {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      uint32_t w[kRowTiles][2][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) groups[i][h][kScales == 1 ? 0 : u].decode(words[i][h][u], w[i][h]);
      multiply_step(w, tokens[u], acc);
    }
  }
  // The same for a slice with large scales or the end of k in it, reading all again: rare, so small rather than fast.
  PK_DEVICE void multiply_odd(int k0, int stage, Sums& acc) const {
    const int t = threadIdx.x % 4, g = threadIdx.x % 32 / 4;
#pragma unroll 1
    for (int u = 0; u < 4 && k0 + 32 * u < k; ++u) {
      uint32_t w[kRowTiles][2][4], x_now[kTokenTiles][4];
#pragma unroll
      for (int j = 0; j < kTokenTiles; ++j) load_chunk(x[j] - 2 * kNibbleRound + 32 * u, x_now[j]);
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int chunk = swizzle_chunk<4>(g, kPacked ? t : u) * 16 + (kPacked ? u : t) * 4;
          const uint8_t* word = ring + stage + (2 * i + h) * 512 + chunk;
          const uint32_t at = group_row[i][h] + ((k0 + 32 * u) >> shift), raw = ld(scales + at);
          NibbleGroup<T, kPacked> group;
          group.set(raw, zeros ? ld(zeros + at) : 8u);
          group.decode_large(ld(reinterpret_cast<const uint32_t*>(word)), raw, w[i][h]);
        }
      multiply_step(w, x_now, acc);
    }
  }

  PK_DEVICE void sum(Sums& acc) {
    const int first = threadIdx.x / 32 * kSkinnySlice;
    Raw raw[kScalesAhead];
    Tokens tokens[2];
#pragma unroll 1
    for (int i = 0; i < kStages - 1; ++i) fetch(first + i * kNibbleRound, i * kStageBytes);
#pragma unroll
    for (int i = 0; i < kScalesAhead; ++i) load_scales(first + i * kNibbleRound, raw[i]);
    grid_wait();
    grid_launch_dependents();  // they may read their weights while this kernel sums
    load_tokens(first, tokens[0]);
    constexpr int kRing = kStages * kStageBytes;
    uint32_t stage = 0;
#pragma unroll 1
    for (int base = first; base < k; base += 2 * kNibbleRound) {
#pragma unroll
      for (int p = 0; p < 2; ++p) {
        const int k0 = base + p * kNibbleRound;
        if (k0 >= k) break;
        cp_async_wait<kStages - 2>();
        __syncwarp();  // this slice is there, and every lane has read the one before, whose place is filled next
        Words words;
        read_words(stage, words);
        fetch(k0 + (kStages - 1) * kNibbleRound, (stage + kRing - kStageBytes) % kRing);
        load_tokens(k0 + kNibbleRound, tokens[p ^ 1]);
        Groups groups;
        bool odd = k0 + kSkinnySlice > k;
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i)
#pragma unroll
          for (int h = 0; h < 2; ++h)
#pragma unroll
            for (int u = 0; u < kScales; ++u) {
              groups[i][h][u].set(raw[p % kScalesAhead].scale[i][h][u], raw[p % kScalesAhead].zero[i][h][u]);
              odd = odd || groups[i][h][u].large();
            }
        load_scales(k0 + kScalesAhead * kNibbleRound, raw[p % kScalesAhead]);
        if (__any_sync(0xffffffffu, odd))
          multiply_odd(k0, stage, acc);
        else
          multiply(words, tokens[p], groups, acc);
        stage = (stage + kStageBytes) % kRing;
      }
    }
  }
};

// A block owns 16 kRowTiles rows of w, the tensor cores' 16-row operand, and all tokens; its 8 warps take slices of
// 128 k in turn, and their sums are added in warp order. Within 32 k, lane group t holds weights 8 t .. 8 t + 7 of its
// rows (as linear_skinny_mma). Several row tiles share what they read of x, which for 16 tokens is the larger traffic.
template <class T, class L, int kRowTiles, int kTokenTiles, int kStages>
__global__ void __launch_bounds__(kSkinnyWarps * 32, kRowTiles * kTokenTiles == 1 ? 2 : 1)
    quant_linear_nibbles(const T* __restrict__ x, const uint8_t* __restrict__ codes, const void* __restrict__ scales,
                         const void* __restrict__ offsets, const T* __restrict__ bias, const T* residual, T* y, int m,
                         int n, int k, int group, int groups, int tags, int64_t x_stride, int64_t residual_stride,
                         int activation) {
  using Smem = QuantNibblesSmem<kRowTiles, kTokenTiles, kStages>;
  PK_DYN_SMEM(Smem, s);
  const QuantPlanes q{codes, scales, offsets, k, group, groups, tags};
  const int warp = threadIdx.x / 32, n0 = static_cast<int>(blockIdx.x) * 16 * kRowTiles;
  float acc[kRowTiles][kTokenTiles][4] = {};
  if (group % kSkinnySlice != 0)
    NibbleWarp<T, L, kRowTiles, kTokenTiles, kStages, 4, true>(q, x, x_stride, s.ring[warp][0], m, n0, n).sum(acc);
  else if (q.has_offsets())
    NibbleWarp<T, L, kRowTiles, kTokenTiles, kStages, 1, true>(q, x, x_stride, s.ring[warp][0], m, n0, n).sum(acc);
  else
    NibbleWarp<T, L, kRowTiles, kTokenTiles, kStages, 1, false>(q, x, x_stride, s.ring[warp][0], m, n0, n).sum(acc);
  const LinearEpilogue<T, T, 1> out(bias, residual, y, residual_stride, n, m, n, activation);
  s.sums.template store<false>(acc, out, n0);
}

}  // namespace pk
