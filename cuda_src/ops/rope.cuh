// Rotary position embedding: pair (a, b) of a head at position p becomes (a cos - b sin, b cos + a sin), with the
// angles of row p of a table [positions, R]: R / 2 cosines, then R / 2 sines. Pairs are (i, i + R / 2), or (2i, 2i + 1)
// when interleaved; elements from R on are copied.
//
// A thread owns one pair of one head of one token, or, where everything is whole and aligned (kFast), one chunk of 16
// bytes of first halves and its partner chunk. rope_append also rotates the keys into their cache slots and copies
// the values: one launch for all three. A position outside the table poisons its heads with NaN; a slot outside the
// cache is skipped (a negative one means: do not store), so nothing is ever corrupted.
#pragma once
#include "core/row.cuh"

namespace pk {

constexpr int kRopeThreads = 256;

// Where element pair `pair` of a head of d elements lies, and whether it is rotated.
struct RopePair {
  int a, b;  // b = -1: a single element, when an odd number is left over
  bool rotated;
};
PK_DEVICE RopePair rope_pair(int pair, int d, int rotary, bool interleaved) {
  const int half = rotary / 2;
  if (pair < half) return interleaved ? RopePair{2 * pair, 2 * pair + 1, true} : RopePair{pair, pair + half, true};
  const int a = rotary + 2 * (pair - half);
  return {a, a + 1 < d ? a + 1 : -1, false};
}

// Pieces of work a head of d elements is divided into.
template <class T, bool kFast>
PK_DEVICE int rope_pieces(int d, int rotary) {
  return kFast ? (rotary / 2 + d - rotary) / kChunk<T> : rotary / 2 + (d - rotary + 1) / 2;
}

// Moves one piece of a head from `in` to `out`, rotated; table row `angles` is null outside the table.
template <bool kFast, class T>
PK_DEVICE void rope_move(const T* in, T* out, int piece, int d, const float* angles, int rotary, bool interleaved) {
  const int half = rotary / 2;
  if constexpr (kFast) {
    const int at = piece * kChunk<T>;
    if (at >= half) {
      st_vec<T, kChunk<T>>(out + half + at, ld_vec<T, kChunk<T>>(in + half + at));
      return;
    }
    const Vec<float, kChunk<T>> a = to_float(ld_vec<T, kChunk<T>>(in + at));
    const Vec<float, kChunk<T>> b = to_float(ld_vec<T, kChunk<T>>(in + half + at));
    Vec<float, kChunk<T>> x, y;
#pragma unroll
    for (int i = 0; i < kChunk<T>; i += 4) {
      Vec<float, 4> c, s;
#pragma unroll
      for (int j = 0; j < 4; ++j) c[j] = s[j] = NAN;
      if (angles) {
        c = ld_vec_nc<float, 4>(angles + at + i);
        s = ld_vec_nc<float, 4>(angles + half + at + i);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        x[i + j] = a[i + j] * c[j] - b[i + j] * s[j];
        y[i + j] = b[i + j] * c[j] + a[i + j] * s[j];
      }
    }
    st_vec<T, kChunk<T>>(out + at, from_float<T>(x));
    st_vec<T, kChunk<T>>(out + half + at, from_float<T>(y));
    return;
  }
  const RopePair p = rope_pair(piece, d, rotary, interleaved);
  if (!p.rotated) {
    st(out + p.a, ld(in + p.a));
    if (p.b >= 0) st(out + p.b, ld(in + p.b));
    return;
  }
  const float c = angles ? ld_nc(angles + piece) : NAN, s = angles ? ld_nc(angles + half + piece) : NAN;
  const float a = to_float(ld(in + p.a)), b = to_float(ld(in + p.b));
  st(out + p.a, from_float<T>(a * c - b * s));
  st(out + p.b, from_float<T>(b * c + a * s));
}

// The same piece, copied.
template <bool kFast, class T>
PK_DEVICE void rope_copy(const T* in, T* out, int piece, int d, int rotary, bool interleaved) {
  if constexpr (kFast) {
    const int at = piece * kChunk<T>, half = rotary / 2;
    if (at < half) st_vec<T, kChunk<T>>(out + at, ld_vec<T, kChunk<T>>(in + at));
    st_vec<T, kChunk<T>>(out + half + at, ld_vec<T, kChunk<T>>(in + half + at));
    return;
  }
  const RopePair p = rope_pair(piece, d, rotary, interleaved);
  st(out + p.a, ld(in + p.a));
  if (p.b >= 0) st(out + p.b, ld(in + p.b));
}

// The token's row of the table; null when its position is outside.
PK_DEVICE const float* rope_row(const float* table, const int64_t* positions, int64_t token, int64_t table_rows,
                                int rotary) {
  const int64_t position = ld(positions + token);
  return position >= 0 && position < table_rows ? table + position * rotary : nullptr;
}

template <class T>
struct RopeArgs {
  const T* x;
  const int64_t* positions;
  const float* table;
  T* y;
  int64_t tokens, table_rows, stride_t, stride_h;
  int heads, d, rotary;
  bool interleaved;
};

template <bool kFast, class T>
PK_DEVICE void rope_one(const RopeArgs<T>& a) {
  const int pieces = rope_pieces<T, kFast>(a.d, a.rotary);
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRopeThreads + threadIdx.x;
  if (i >= a.tokens * a.heads * pieces) return;
  const int piece = static_cast<int>(i % pieces);
  const int64_t head = i / pieces % a.heads, token = i / pieces / a.heads;
  const float* angles = rope_row(a.table, a.positions, token, a.table_rows, a.rotary);
  rope_move<kFast>(a.x + token * a.stride_t + head * a.stride_h, a.y + (token * a.heads + head) * a.d, piece, a.d,
                   angles, a.rotary, a.interleaved);
}

template <class T>
__global__ void __launch_bounds__(kRopeThreads)
    rope(const T* __restrict__ x, const int64_t* __restrict__ positions, const float* __restrict__ table,
         T* __restrict__ y, int64_t tokens, int heads, int d, int rotary, int64_t table_rows, int64_t stride_t,
         int64_t stride_h, int interleaved, int fast) {
  const RopeArgs<T> a{x,        positions, table, y, tokens, table_rows,      stride_t,
                      stride_h, heads,     d,     rotary, interleaved != 0};
  grid_wait();
  if (fast)
    rope_one<true>(a);
  else
    rope_one<false>(a);
  grid_launch_dependents();
}

template <class T>
struct RopeAppendArgs {
  const T *q, *k, *v;
  const int64_t* positions;
  const float* table;
  const int64_t* slots;
  T *q_out, *k_cache, *v_cache;
  int64_t tokens, table_rows, pages;
  int heads, kv_heads, d, rotary, page_size;
  int64_t q_t, q_h, k_t, k_h, v_t, v_h;              // strides: token, head
  int64_t kc_p, kc_s, kc_h, vc_p, vc_s, vc_h;        // of the caches: page, slot, head
  bool interleaved;
};

template <bool kFast, class T>
PK_DEVICE void rope_append_one(const RopeAppendArgs<T>& a) {
  const int pieces = rope_pieces<T, kFast>(a.d, a.rotary);
  const int all_heads = a.heads + 2 * a.kv_heads;  // those of q, then of k, then of v
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRopeThreads + threadIdx.x;
  if (i >= a.tokens * all_heads * pieces) return;
  const int piece = static_cast<int>(i % pieces);
  const int which = static_cast<int>(i / pieces % all_heads);
  const int64_t token = i / pieces / all_heads;
  if (which < a.heads) {
    const float* angles = rope_row(a.table, a.positions, token, a.table_rows, a.rotary);
    rope_move<kFast>(a.q + token * a.q_t + which * a.q_h, a.q_out + (token * a.heads + which) * a.d, piece, a.d, angles,
                     a.rotary, a.interleaved);
    return;
  }
  const int64_t slot = ld(a.slots + token);
  if (slot < 0 || slot >= a.pages * a.page_size) return;
  const int64_t page = slot / a.page_size, row = slot % a.page_size;
  if (which < a.heads + a.kv_heads) {
    const int head = which - a.heads;
    const float* angles = rope_row(a.table, a.positions, token, a.table_rows, a.rotary);
    rope_move<kFast>(a.k + token * a.k_t + head * a.k_h, a.k_cache + page * a.kc_p + row * a.kc_s + head * a.kc_h,
                     piece, a.d, angles, a.rotary, a.interleaved);
    return;
  }
  const int head = which - a.heads - a.kv_heads;
  rope_copy<kFast>(a.v + token * a.v_t + head * a.v_h, a.v_cache + page * a.vc_p + row * a.vc_s + head * a.vc_h, piece,
                   a.d, a.rotary, a.interleaved);
}

template <class T>
__global__ void __launch_bounds__(kRopeThreads)
    rope_append(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                const int64_t* __restrict__ positions, const float* __restrict__ table,
                const int64_t* __restrict__ slots, T* __restrict__ q_out, T* __restrict__ k_cache,
                T* __restrict__ v_cache, int64_t tokens, int heads, int kv_heads, int d, int rotary, int64_t table_rows,
                int page_size, int64_t pages, int64_t q_t, int64_t q_h, int64_t k_t, int64_t k_h, int64_t v_t,
                int64_t v_h, int64_t kc_p, int64_t kc_s, int64_t kc_h, int64_t vc_p, int64_t vc_s, int64_t vc_h,
                int interleaved, int fast) {
  const RopeAppendArgs<T> a{q,     k,     v,          positions, table, slots,  q_out,     k_cache, v_cache, tokens,
                            table_rows, pages, heads, kv_heads,  d,     rotary, page_size, q_t,     q_h,     k_t,
                            k_h,   v_t,   v_h,        kc_p,      kc_s,  kc_h,   vc_p,      vc_s,    vc_h,
                            interleaved != 0};
  grid_wait();
  if (fast)
    rope_append_one<true>(a);
  else
    rope_append_one<false>(a);
  grid_launch_dependents();
}

}  // namespace pk
