// Linear layer on packed weights: y[m, n] = act(sum_k x[m, k] * w[n, k] + bias[n]) + residual[m, n], where w is
// what dequantize gives in x's type. Both kernels add up in the order of the plain linear kernel they stand
// in for (linear_skinny_mma for 16-bit x, the fp32 chain for float32), so their bits are those of
// linear(x, dequantize(w)), and they share its numerics classes. quant_linear_nibbles.cuh does the same for
// most 4-bit weights, faster.
#pragma once
#include "core/mma.cuh"
#include "ops/linear_warp_sums.cuh"
#include "ops/quant_formats.cuh"

namespace pk {

// ----------------------------------------------------------------------------------------------------
// 16-bit x, m <= 16, on mma.sync. A block owns 16 rows of w, the tensor cores' 16-row operand, and all tokens; its
// 8 warps take slices of 128 k in turn, and their sums are added in warp order. Within 32 k, lane group t
// holds weights 8 t .. 8 t + 7 of its rows (as linear_skinny_mma).

// Four pairs of neighbours as mma operands, each weight rounded once to T; zeros where they are past the end of k.
template <class T>
PK_DEVICE void pack_eight(const Vec<float, 8>& w, bool in, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = in ? pack2<T>(w[2 * i], w[2 * i + 1]) : 0;
}

// The codes of one row and slice that a lane needs: step u is weights 32 u + 8 t .. + 7.
template <class L, bool kNibbles = L::kNibbles>
struct QuantSlice {
  typename L::Raw raw[4];
  PK_DEVICE void load(const QuantPlanes& q, int64_t row, int k0, int t) {
#pragma unroll
    for (int u = 0; u < 4; ++u) {
      const int at = k0 + 32 * u + 8 * t;
      raw[u] = L::load(q, row, at < q.k ? at : 0);  // past the end: any, step drops them
    }
  }
  PK_DEVICE void arrange(int) {}
  template <class T>
  PK_DEVICE void step(const QuantPlanes& q, int64_t, int u, int at, uint32_t (&out)[4]) const {
    pack_eight<T>(L::decode(q, raw[u], at), at < q.k, out);
  }
};

// 4-bit codes: one 16-byte load of a lane covers 32 weights, so that the four lanes of a row read 64 bytes in a
// row. packed4 has them in the order that the steps want; int4's are exchanged among the four lanes.
template <class L>
struct QuantSlice<L, true> {
  Vec<uint32_t, 4> words;
  PK_DEVICE void load(const QuantPlanes& q, int64_t row, int k0, int t) {
    const uint8_t* p = q.codes + row * (q.k / 2);
    const int at = k0 + 32 * t;
    words = ld_stream(reinterpret_cast<const Vec<uint32_t, 4>*>(p + (at < q.k ? at : 0) / 2));
  }
  // With lane t ^ kLane: a lane with that bit of t set gives word a for the other's b. By masks, as selects of words
  // take nvcc minutes to simplify.
  template <int kLane>
  PK_DEVICE void swap_with(int t, int a, int b) {
    const uint32_t mask = t & kLane ? 0xffffffffu : 0u, x = words[a], y = words[b];
    const uint32_t got = __shfl_xor_sync(0xffffffffu, y ^ ((x ^ y) & mask), kLane);
    words[a] = x ^ ((x ^ got) & mask);
    words[b] = got ^ ((got ^ y) & mask);
  }
  // A 4 x 4 transpose of words over the lanes of a row: lane t had words 4 t .., and gets word t of each lane.
  PK_DEVICE void arrange(int t) {
    if constexpr (!L::kPacked) {
      swap_with<1>(t, 0, 1);
      swap_with<1>(t, 2, 3);
      swap_with<2>(t, 0, 2);
      swap_with<2>(t, 1, 3);
    }
  }
  template <class T>
  PK_DEVICE void step(const QuantPlanes& q, int64_t row, int u, int at, uint32_t (&out)[4]) const {
    typename L::Raw raw;
    raw.words[0] = u == 0 ? words[0] : u == 1 ? words[1] : u == 2 ? words[2] : words[3];  // u is no constant here
    load_group(q, row, at < q.k ? at : 0, raw.scale, raw.offset);
    pack_eight<T>(L::decode(q, raw, 0), at < q.k, out);
  }
};

// Elements at .. at + 7 of a row of x, zeros past k.
template <bool kFast, class T>
PK_DEVICE void load_tokens(const T* p, int at, int k, bool row_in, uint32_t (&out)[4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) out[i] = 0;
  if (!row_in) return;
  if constexpr (kFast) {
    if (at >= k) return;
    const auto v = ld(reinterpret_cast<const Vec<uint32_t, 4>*>(p + at));
#pragma unroll
    for (int i = 0; i < 4; ++i) out[i] = v[i];
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (at + i < k) out[i / 2] |= static_cast<uint32_t>(ld(p + at + i).bits) << (i % 2 * 16);
  }
}

// acc += the products of one step of 32 k, for 8 tokens.
template <class T>
PK_DEVICE void quant_step(const uint32_t (&wr)[2][4], const uint32_t (&xr)[4], float (&acc)[4]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const uint32_t a[4] = {wr[0][2 * h], wr[1][2 * h], wr[0][2 * h + 1], wr[1][2 * h + 1]};
    mma_m16n8k16<T>(acc, a, xr + 2 * h);
  }
}

// Whether there are more than 8 tokens: not known to the compiler, as opaque().
PK_DEVICE bool second_tile(int m) {
  uint32_t tokens = static_cast<uint32_t>(m);
  forget(tokens);
  return tokens > 8;
}

// One warp's share of the sum. Codes of the next slice are loaded once this one's are used, the first 8 tokens a whole
// slice ahead: a load of L2 before each step of 32 k is what would take the time.
template <class L, class T>
PK_DEVICE void quant_sum_fast(QuantPlanes q, const T* x, int64_t x_stride, int m, int n0, int n,
                              float (&acc)[2][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  // Rows past the end: some row's weights, whose results are dropped.
  const int64_t row[2] = {min(n0 + g, n - 1), min(n0 + g + 8, n - 1)};
  constexpr int kStride = kSkinnyWarps * kSkinnySlice;
  // Scales of any type take branches: unrolled, they would make minutes of compilation.
  constexpr int kSteps = L::kNibbles ? 1 : 4;
  QuantSlice<L> slices[2];
  auto load_step = [&](int k0, int u, int j, uint32_t (&to)[4]) {
    load_tokens<true>(x + (j * 8 + g) * x_stride, k0 + 32 * u + 8 * t, q.k, j * 8 + g < m, to);
  };
  [[maybe_unused]] uint32_t ahead[4][4], second[2][4] = {};  // second: of two steps, more take too many registers
#pragma unroll
  for (int h = 0; h < 2; ++h) slices[h].load(q, row[h], warp * kSkinnySlice, t);
  grid_wait();
#pragma unroll
  for (int u = 0; u < 4 && !L::kNibbles; ++u) load_step(warp * kSkinnySlice, u, 0, ahead[u]);
#pragma unroll 1
  for (int k0 = warp * kSkinnySlice; k0 < q.k; k0 += kStride) {
    q = q.opaque();
    const bool more = second_tile(m);
    uint32_t first[4][4];
    if constexpr (!L::kNibbles) {
#pragma unroll
      for (int u = 0; u < 4; ++u)
#pragma unroll
        for (int i = 0; i < 4; ++i) first[u][i] = ahead[u][i];
#pragma unroll
      for (int u = 0; u < 4; ++u) load_step(k0 + kStride, u, 0, ahead[u]);
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) slices[h].arrange(t);
#pragma unroll kSteps
    for (int u = 0; u < 4; ++u) {
      uint32_t wr[2][4], xr[2][4];
      if (!L::kNibbles && more && u % 2 == 0) {
        load_step(k0, u, 1, second[0]);
        load_step(k0, u + 1, 1, second[1]);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) slices[h].template step<T>(q, row[h], u, k0 + 32 * u + 8 * t, wr[h]);
      if constexpr (L::kNibbles) {  // u is no constant
        load_step(k0, u, 0, xr[0]);
        if (more) load_step(k0, u, 1, xr[1]);
        quant_step<T>(wr, xr[0], acc[0]);
        if (more) quant_step<T>(wr, xr[1], acc[1]);
      } else {
        quant_step<T>(wr, first[u], acc[0]);
        if (more) quant_step<T>(wr, second[u % 2], acc[1]);
      }
    }
#pragma unroll
    for (int h = 0; h < 2; ++h) slices[h].load(q, row[h], k0 + kStride, t);
  }
}

// Any alignment, k and group: weight by weight.
template <class L, class T>
PK_DEVICE void quant_sum_slow(QuantPlanes q, const T* x, int64_t x_stride, int m, int n0, int n,
                              float (&acc)[2][4]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
  grid_wait();
#pragma unroll 1
  for (int k0 = warp * kSkinnySlice; k0 < q.k; k0 += kSkinnyWarps * kSkinnySlice) {
#pragma unroll 1
    for (int u = 0; u < 4; ++u) {
      const int at = k0 + 32 * u + 8 * t;
      uint32_t wr[2][4] = {};
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = n0 + g + 8 * h;
        // One place that decodes, not eight: the weights are shifted into the fragment from the top.
#pragma unroll 1
        for (int i = 0; i < 8; ++i) {
          q = q.opaque();
          const float w = row < n && at + i < q.k ? L::one(q, row, at + i) : 0.f;
          wr[h][0] = wr[h][0] >> 16 | wr[h][1] << 16;
          wr[h][1] = wr[h][1] >> 16 | wr[h][2] << 16;
          wr[h][2] = wr[h][2] >> 16 | wr[h][3] << 16;
          wr[h][3] = wr[h][3] >> 16 | pack2<T>(w, 0.f) << 16;
        }
      }
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        if (j == 1 && !second_tile(m)) break;
        uint32_t xr[4];
        load_tokens<false>(x + (j * 8 + g) * x_stride, at, q.k, j * 8 + g < m, xr);
        quant_step<T>(wr, xr, acc[j]);
      }
    }
  }
}

// Two blocks an SM: 128 registers a thread, for the slices in flight.
template <class T, class L>
__global__ void __launch_bounds__(kSkinnyWarps * 32, 2)
    quant_linear_mma(const T* __restrict__ x, const uint8_t* __restrict__ codes, const void* __restrict__ scales,
                     const void* __restrict__ offsets, const T* __restrict__ bias, const T* residual, T* y, int m,
                     int n, int k, int group, int groups, int tags, int64_t x_stride, int64_t residual_stride,
                     int activation, int x_aligned) {
  using Smem = WarpSums<1, 2>;
  PK_SMEM(Smem, sums);
  const QuantPlanes q{codes, scales, offsets, k, group, groups, tags};
  const int n0 = static_cast<int>(blockIdx.x) * 16;
  float acc[1][2][4] = {};
  if (q.fast() && x_aligned)
    quant_sum_fast<L>(q, x, x_stride, m, n0, n, acc[0]);
  else
    quant_sum_slow<L>(q, x, x_stride, m, n0, n, acc[0]);
  grid_launch_dependents();
  const LinearEpilogue<T, T, 1> out(bias, residual, y, residual_stride, n, m, n, activation);
  sums.store<false>(acc, out, n0);
}

// ----------------------------------------------------------------------------------------------------
// float32 x, few tokens. A block owns 32 rows of w and 8 tokens: its 4 warps decode tiles of 32 x 128 weights into
// shared memory, the codes of the next two in flight meanwhile; lane l of a warp then walks row l in order of k for the
// warp's 2 tokens, acc = fmaf(x, w, acc), the chain of linear_f32_skinny. Four cycles a product in this chain are what
// bounds few tokens, so a tile is deep: its barriers and the decoding between two chains cost the same.

constexpr int kQuantF32Warps = 4, kQuantF32Tokens = 2 * kQuantF32Warps, kQuantF32Depth = 128;
constexpr int kQuantF32Ahead = 2;  // tiles whose codes are in registers or on their way

struct QuantLinearF32Smem {
  float w[2][32][kQuantF32Depth + 4];  // + 4: lanes on 8 neighbouring rows read 16 bytes from different banks
  float x[2][kQuantF32Tokens][kQuantF32Depth];
};

// kFast: as QuantPlanes::fast(); else weights are loaded and decoded one by one.
template <class L, bool kFast>
struct QuantF32Sum {
  static constexpr int kThreads = kQuantF32Warps * 32, kDepth = kQuantF32Depth;
  static constexpr int kPieces = 32 * kDepth / 8 / kThreads;  // pieces of 8 weights a thread decodes per tile
  static constexpr int kRowStep = kThreads / (kDepth / 8);
  static constexpr int kTokenStep = kThreads / kDepth, kPerThread = kQuantF32Tokens / kTokenStep;
  using Raw = QuantAhead<L>[kPieces];

  QuantLinearF32Smem& s;
  const QuantPlanes& q;
  const float* x;
  int64_t x_stride;
  int m, n, n0;
  float x_ahead[kPerThread];

  // Neighbouring threads take neighbouring pieces of a row, and one k of every token.
  PK_DEVICE static int piece_row() { return threadIdx.x / (kDepth / 8); }
  PK_DEVICE static int piece_k() { return threadIdx.x % (kDepth / 8) * 8; }
  PK_DEVICE static int x_token() { return threadIdx.x / kDepth; }
  PK_DEVICE static int x_k() { return threadIdx.x % kDepth; }
  // Up to where tiles are filled, past k with zeros.
  PK_DEVICE int padded_k() const { return (q.k + 31) / 32 * 32; }

  PK_DEVICE void load(int k0, Raw& raw) const {
    const int at = k0 + piece_k();
    if (!kFast || at >= q.k) return;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) raw[p].load(q, min(n0 + piece_row() + p * kRowStep, n - 1), at);
  }
  PK_DEVICE void decode(int k0, const Raw& raw, int buf) {
    const int at = k0 + piece_k();
    if (at >= padded_k()) return;
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      const int r = piece_row() + p * kRowStep;
      float* to = &s.w[buf][r][piece_k()];
      if constexpr (kFast) {
        Vec<float, 8> w;
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = 0.f;
        if (at < q.k) w = L::decode(q, raw[p].get(), at);
#pragma unroll
        for (int i = 0; i < 8; i += 4) st_vec<float, 4>(to + i, Vec<float, 4>{{w[i], w[i + 1], w[i + 2], w[i + 3]}});
      } else {
#pragma unroll 1
        for (int i = 0; i < 8; ++i) st(to + i, n0 + r < n && at + i < q.k ? L::one(q, n0 + r, at + i) : 0.f);
      }
    }
  }
  PK_DEVICE void load_x(int k0) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) {
      const int t = x_token() + i * kTokenStep;
      x_ahead[i] = t < m && k0 + x_k() < q.k ? ld(x + t * x_stride + k0 + x_k()) : 0.f;
    }
  }
  PK_DEVICE void store_x(int buf) {
#pragma unroll
    for (int i = 0; i < kPerThread; ++i) st(&s.x[buf][x_token() + i * kTokenStep][x_k()], x_ahead[i]);
  }

  // acc[i] = sum of token 2 warp + i and row n0 + lane.
  PK_DEVICE void sum(float (&acc)[2]) {
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 2;
    Raw raw[kQuantF32Ahead];
#pragma unroll
    for (int i = 0; i < kQuantF32Ahead; ++i) load(i * kDepth, raw[i]);
    grid_wait();
    load_x(0);
#pragma unroll 1
    for (int base = 0; base < q.k; base += kQuantF32Ahead * kDepth) {
#pragma unroll
      for (int i = 0; i < kQuantF32Ahead; ++i) {
        const int k0 = base + i * kDepth, buf = i % 2;
        if (k0 >= q.k) break;
        decode(k0, raw[i], buf);
        store_x(buf);
        load(k0 + kQuantF32Ahead * kDepth, raw[i]);
        load_x(k0 + kDepth);
        __syncthreads();  // this tile is whole; and everyone is done with the other buffer, filled next
        if (first >= m) continue;
        const int depth = min(kDepth, padded_k() - k0);
#pragma unroll 1
        for (int k32 = 0; k32 < depth; k32 += 32) {
#pragma unroll
          for (int kk = k32; kk < k32 + 32; kk += 4) {
            const Vec<float, 4> wv = ld_vec<float, 4>(&s.w[buf][lane][kk]);
            const Vec<float, 4> x0 = ld_vec<float, 4>(&s.x[buf][first][kk]);
#pragma unroll
            for (int j = 0; j < 4; ++j) acc[0] = fmaf(x0[j], wv[j], acc[0]);
            if (first + 1 < m) {
              const Vec<float, 4> x1 = ld_vec<float, 4>(&s.x[buf][first + 1][kk]);
#pragma unroll
              for (int j = 0; j < 4; ++j) acc[1] = fmaf(x1[j], wv[j], acc[1]);
            }
          }
        }
      }
    }
  }
};

template <class L>
__global__ void __launch_bounds__(kQuantF32Warps * 32, 2)
    quant_linear_f32(const float* __restrict__ x, const uint8_t* __restrict__ codes, const void* __restrict__ scales,
                     const void* __restrict__ offsets, const float* __restrict__ bias, const float* residual, float* y,
                     int m, int n, int k, int group, int groups, int tags, int64_t x_stride, int64_t residual_stride,
                     int activation) {
  PK_SMEM(QuantLinearF32Smem, s);
  const QuantPlanes q{codes, scales, offsets, k, group, groups, tags};
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 2, n0 = static_cast<int>(blockIdx.x) * 32;
  float acc[2] = {0.f, 0.f};
  if (q.fast())
    QuantF32Sum<L, true>{s, q, x, x_stride, m, n, n0, {}}.sum(acc);
  else
    QuantF32Sum<L, false>{s, q, x, x_stride, m, n, n0, {}}.sum(acc);
  grid_launch_dependents();
  const LinearEpilogue<float, float, 1> out(bias, residual, y, residual_stride, n, m, n, activation);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float sum[1] = {acc[i]};
    out.store(first + i, n0 + lane, sum);
  }
}

}  // namespace pk
