// Rotary position embedding: pair (a, b) of a head at position p becomes (a cos - b sin, b cos + a sin), with the
// angles of row p of a table [positions, R]: R / 2 cosines, then R / 2 sines. Pairs are (i, i + R / 2), or (2i, 2i + 1)
// when interleaved; elements from R on are copied.
//
// A thread owns one pair of one head of one token. rope_append also rotates the keys into their cache slots and copies
// the values: one launch for all three. A position outside the table poisons its heads with NaN; a slot outside the
// cache is skipped (a negative one means: do not store), so nothing is ever corrupted.
#pragma once
#include "core/vec.cuh"

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

// Rotates one pair from `in` to `out`; table row `angles` is null outside the table.
template <class T>
PK_DEVICE void rope_move(const T* in, T* out, int pair, int d, const float* angles, int rotary, bool interleaved) {
  const RopePair p = rope_pair(pair, d, rotary, interleaved);
  if (!p.rotated) {
    st(out + p.a, ld(in + p.a));
    if (p.b >= 0) st(out + p.b, ld(in + p.b));
    return;
  }
  const float c = angles ? ld_nc(angles + pair) : NAN, s = angles ? ld_nc(angles + rotary / 2 + pair) : NAN;
  const float a = to_float(ld(in + p.a)), b = to_float(ld(in + p.b));
  st(out + p.a, from_float<T>(a * c - b * s));
  st(out + p.b, from_float<T>(b * c + a * s));
}

template <class P>
PK_DEVICE const float* rope_row(const float* table, const P* positions, int64_t token, int64_t table_rows, int rotary) {
  const int64_t position = ld(positions + token);
  return position >= 0 && position < table_rows ? table + position * rotary : nullptr;
}

template <class T>
__global__ void __launch_bounds__(kRopeThreads)
    rope(const T* __restrict__ x, const int64_t* __restrict__ positions, const float* __restrict__ table,
         T* __restrict__ y, int64_t tokens, int heads, int d, int rotary, int64_t table_rows, int64_t stride_t,
         int64_t stride_h, int interleaved) {
  const int pairs = rotary / 2 + (d - rotary + 1) / 2;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRopeThreads + threadIdx.x;
  grid_wait();
  if (i >= tokens * heads * pairs) return;
  const int pair = static_cast<int>(i % pairs);
  const int64_t head = i / pairs % heads, token = i / pairs / heads;
  const float* angles = rope_row(table, positions, token, table_rows, rotary);
  rope_move(x + token * stride_t + head * stride_h, y + (token * heads + head) * d, pair, d, angles, rotary,
            interleaved);
  grid_launch_dependents();
}

template <class T>
__global__ void __launch_bounds__(kRopeThreads)
    rope_append(const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
                const int64_t* __restrict__ positions, const float* __restrict__ table,
                const int64_t* __restrict__ slots, T* __restrict__ q_out, T* __restrict__ k_cache,
                T* __restrict__ v_cache, int64_t tokens, int heads, int kv_heads, int d, int rotary, int64_t table_rows,
                int page_size, int64_t pages, int64_t sq_t, int64_t sq_h, int64_t sk_t, int64_t sk_h, int64_t sv_t,
                int64_t sv_h, int64_t ck_p, int64_t ck_s, int64_t ck_h, int64_t cv_p, int64_t cv_s, int64_t cv_h,
                int interleaved) {
  const int pairs = rotary / 2 + (d - rotary + 1) / 2;
  const int lanes = heads + 2 * kv_heads;  // heads of q, k and v a token has, in this order
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kRopeThreads + threadIdx.x;
  grid_wait();
  if (i >= tokens * lanes * pairs) return;
  const int pair = static_cast<int>(i % pairs);
  const int lane = static_cast<int>(i / pairs % lanes);
  const int64_t token = i / pairs / lanes;
  if (lane < heads) {
    const float* angles = rope_row(table, positions, token, table_rows, rotary);
    rope_move(q + token * sq_t + lane * sq_h, q_out + (token * heads + lane) * d, pair, d, angles, rotary, interleaved);
    return;
  }
  const int64_t slot = ld(slots + token);
  if (slot < 0 || slot >= pages * page_size) return;
  const int64_t page = slot / page_size, row = slot % page_size;
  if (lane < heads + kv_heads) {
    const int head = lane - heads;
    const float* angles = rope_row(table, positions, token, table_rows, rotary);
    rope_move(k + token * sk_t + head * sk_h, k_cache + page * ck_p + row * ck_s + head * ck_h, pair, d, angles, rotary,
              interleaved);
    return;
  }
  const int head = lane - heads - kv_heads;
  const T* in = v + token * sv_t + head * sv_h;
  T* out = v_cache + page * cv_p + row * cv_s + head * cv_h;
  const RopePair p = rope_pair(pair, d, rotary, interleaved);
  st(out + p.a, ld(in + p.a));
  if (p.b >= 0) st(out + p.b, ld(in + p.b));
}

}  // namespace pk
