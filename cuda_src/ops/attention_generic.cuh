// Attention in fp32 arithmetic for any dtype, any head_dim up to kDim and any alignment: the only path of float32,
// and of 16-bit heads that the tensor-core kernels do not take.
//
// A block owns kWarps * 8 rows of one kv head (a warp 8) and goes once over the keys they see, in tiles of kKeys kept
// in shared memory as float. Four lanes share a row: each takes every fourth key of the scores, then every fourth
// 16-byte chunk of the output, so a row's maximum costs two shuffles.
//
// Keys are cut into splits of `split` tokens at absolute positions. Every split starts an empty softmax state that is
// merged into the row's in order, whether one block walks them all (gridDim.z = 1) or gridDim.z blocks take them in
// turn and the last to finish merges them from the workspace. So a row gets the same bits as a decode step, in any
// chunk, alone or in any batch, on any grid.
#pragma once
#include "ops/attention_common.cuh"

namespace pk {
namespace attention {

constexpr int64_t kAbsent = -1;   // no such key: reads as zeros, and its score is masked
constexpr int64_t kBadPage = -2;  // reads as NaN

template <int kDim, int kWarps>
struct GenericSmem {
  static constexpr int kRows = kWarps * 8;
  static constexpr int kKeys = kDim > 128 ? 16 : 32;
  static constexpr int kPitch = kDim + 4;    // 16 bytes more: rows of one column fall into different banks
  static constexpr int kPPitch = kKeys + 4;
  alignas(16) float q[kRows * kPitch];
  alignas(16) float k[kKeys * kPitch];
  alignas(16) float v[kKeys * kPitch];
  alignas(16) float p[kRows * kPPitch];
  int64_t k_at[2][kKeys], v_at[2][kKeys];  // of this tile and the next
  uint32_t arrived;
};

// Four elements at p as floats, of which `valid` (1 to 4) exist.
template <class T>
PK_DEVICE Vec<float, 4> load4(const T* p, int valid, bool aligned) {
  if (aligned && valid >= 4) return to_float(ld_vec_nc<T, 4>(p));
  Vec<float, 4> x;
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = i < valid ? to_float(ld_nc(p + i)) : 0.f;
  return x;
}

template <class T>
PK_DEVICE Vec<float, 4> load_key4(const T* base, int64_t at, int column, int d, bool aligned) {
  if (at >= 0 && column < d) return load4(base + at + column, d - column, aligned);
  const float fill = at == kBadPage ? NAN : 0.f;
  Vec<float, 4> x;
#pragma unroll
  for (int i = 0; i < 4; ++i) x[i] = fill;
  return x;
}

template <class T>
PK_DEVICE void store4(T* p, Vec<float, 4> x, int valid, bool aligned) {
  if (aligned && valid >= 4) {
    st_vec(p, from_float<T>(x));
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (i < valid) st(p + i, from_float<T>(x[i]));
  }
}

}  // namespace attention

// partial_acc [tokens * heads, max_splits, kDim] and partial_ml [tokens * heads, max_splits] hold the states of the
// splits where gridDim.z > 1; arrivals [tiles, kv_heads] are zero at rest. in4 and out4: pointers and strides allow
// accesses of four elements.
template <class T, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps * 32, 2)
    attention_generic(PK_ATTENTION_PARAMS(T), float* __restrict__ partial_acc,
                      Vec<float, 2>* __restrict__ partial_ml, uint32_t* __restrict__ arrivals, int split,
                      int max_splits, int in4, int out4) {
  using namespace attention;
  using Smem = GenericSmem<kDim, kWarps>;
  using Float4 = Vec<float, 4>;
  constexpr int kRows = Smem::kRows, kKeys = Smem::kKeys, kPitch = Smem::kPitch, kPPitch = Smem::kPPitch;
  constexpr int kThreads = kWarps * 32, kChunks = kDim / 4, kLaneKeys = kKeys / 4, kLaneChunks = kChunks / 4;
  PK_DYN_SMEM(Smem, smem);
  grid_wait();

  const Problem<T> p{PK_ATTENTION_ARGS};
  const RowTile<kRows, T> tile(p);
  if (tile.piece.s < 0) return;
  const Sequence seq = tile.piece.seq;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = blockIdx.y;
  const int first_row = tile.first(), rows_here = tile.count();

  // What the block, the warp and this lane's row see. Ranges only grow with the token.
  const int sub = lane % 4, my_row = warp * 8 + lane / 4;
  const int token = (first_row + my_row) / p.group, member = (first_row + my_row) % p.group;
  const bool row_exists = my_row < rows_here;
  const Range mine = row_exists ? visible(p, seq, token) : Range{0, 0};
  const int block_lo = visible(p, seq, first_row / p.group).lo;
  const int block_hi = visible(p, seq, (first_row + rows_here - 1) / p.group).hi;
  const bool warp_exists = warp * 8 < rows_here;
  const int warp_lo = visible(p, seq, (first_row + warp * 8) / p.group).lo;
  const int warp_hi = visible(p, seq, (first_row + min(warp * 8 + 7, rows_here - 1)) / p.group).hi;

  const int first_split = block_lo / split;
  const int splits = max(1, ceil_div(block_hi, split) - first_split);
  const int turns = min(static_cast<int>(gridDim.z), splits);  // blocks that share these rows
  const int turn = blockIdx.z;
  if (turn >= turns) return;
  const int begin = max(block_lo / kKeys * kKeys, (first_split + turn) * split), end = block_hi;
  auto ends_split = [&](int key0) { return key0 + kKeys >= end || (key0 + kKeys) % split == 0; };
  auto tile_after = [&](int key0) { return key0 + kKeys + (ends_split(key0) ? (turns - 1) * split : 0); };

  const T* q_head = p.q + static_cast<int64_t>(head) * p.group * p.q_head_stride;
  for (int i = tid; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, column = i % kChunks * 4;
    Float4 x{};
    if (row < rows_here && column < p.d) {
      const int t = (first_row + row) / p.group, g = (first_row + row) % p.group;
      x = load4(q_head + (seq.q_begin + t) * p.q_stride + g * p.q_head_stride + column, p.d - column, in4);
    }
    st_vec(&smem.q[row * kPitch + column], x);
  }

  const T* k_head = p.k + static_cast<int64_t>(head) * p.k_head_stride;
  const T* v_head = p.v + static_cast<int64_t>(head) * p.v_head_stride;
  auto look_up = [&](int key0, int buffer) {
    if (tid >= kKeys) return;
    const int key = key0 + tid;
    int64_t k_at = kAbsent, v_at = kAbsent;
    if (key >= block_lo && key < end) {
      const Slot slot = find_slot(p, tile.piece.s, seq, key);
      k_at = slot.ok ? slot.page * p.k_page_stride + slot.row * p.k_stride : kBadPage;
      v_at = slot.ok ? slot.page * p.v_page_stride + slot.row * p.v_stride : kBadPage;
    }
    smem.k_at[buffer][tid] = k_at;
    smem.v_at[buffer][tid] = v_at;
  };

  const ScoreScale scale_of(p);
  const int64_t out_row = static_cast<int64_t>(seq.q_begin + token) * p.heads() + head * p.group + member;
  float row_max = -INFINITY, row_sum = 0.f;  // over the splits that are done, if this block does them all
  Float4 row_acc[kLaneChunks] = {};
  float m = -INFINITY, l = 0.f;  // of the current split; l is this lane's share
  Float4 acc[kLaneChunks] = {};

  look_up(begin, 0);
  int buffer = 0;
  for (int key0 = begin; key0 < end; key0 = tile_after(key0), buffer ^= 1) {
    __syncthreads();  // the look-ups are there, and nobody reads the last tile any more
#pragma unroll 4
    for (int i = tid; i < kKeys * kChunks; i += kThreads) {
      const int key = i / kChunks, column = i % kChunks * 4;
      const Float4 k4 = load_key4(k_head, smem.k_at[buffer][key], column, p.d, in4);
      const Float4 v4 = load_key4(v_head, smem.v_at[buffer][key], column, p.d, in4);
      st_vec(&smem.k[key * kPitch + column], k4);
      st_vec(&smem.v[key * kPitch + column], v4);
    }
    look_up(tile_after(key0), buffer ^ 1);
    __syncthreads();

    if (warp_exists && key0 < warp_hi && key0 + kKeys > warp_lo) {
      Float4 dot[kLaneKeys] = {};
#pragma unroll 4
      for (int c = 0; c < kChunks; ++c) {
        const Float4 q4 = ld_vec<float, 4>(&smem.q[my_row * kPitch + c * 4]);
#pragma unroll
        for (int i = 0; i < kLaneKeys; ++i) {
          const Float4 k4 = ld_vec<float, 4>(&smem.k[(sub + 4 * i) * kPitch + c * 4]);
#pragma unroll
          for (int e = 0; e < 4; ++e) dot[i][e] = fmaf(q4[e], k4[e], dot[i][e]);
        }
      }
      float score[kLaneKeys];
      float top = m;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        const int key = key0 + sub + 4 * i;
        float s = ((dot[i][0] + dot[i][1]) + (dot[i][2] + dot[i][3])) * scale_of.inner;
        if (scale_of.capped) s = tanhf(s) * scale_of.outer;
        score[i] = key >= mine.lo && key < mine.hi ? s : -INFINITY;
        top = fmaxf(top, score[i]);
      }
      top = warp_max<4>(top);
      const float base = finite_base(top);
      const float keep = exp2f(m - base);
      m = top;
      l *= keep;
#pragma unroll
      for (int i = 0; i < kLaneKeys; ++i) {
        const float weight = exp2f(score[i] - base);
        l += weight;
        smem.p[my_row * kPPitch + sub + 4 * i] = weight;
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][e] *= keep;
      }
      // Only keys that the row sees: a masked key's NaN must not come in as 0 * NaN.
      const int stop = min(mine.hi - key0, kKeys);
      for (int key = max(mine.lo - key0, 0); key < stop; ++key) {
        const float weight = smem.p[my_row * kPPitch + key];
#pragma unroll
        for (int i = 0; i < kLaneChunks; ++i) {
          const Float4 v4 = ld_vec<float, 4>(&smem.v[key * kPitch + (sub + 4 * i) * 4]);
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[i][e] = fmaf(weight, v4[e], acc[i][e]);
        }
      }
    }
    if (!ends_split(key0)) continue;
    const Merge merge(row_max, row_sum, m, warp_sum<4>(l));
    m = -INFINITY;
    l = 0.f;
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        row_acc[i][e] = fmaf(row_acc[i][e], merge.keep, acc[i][e] * merge.add);
        acc[i][e] = 0.f;
      }
    }
    if (turns == 1) continue;
    // Other blocks have other splits of these rows: leave this one's state.
    if (row_exists) {
      const int64_t at = out_row * max_splits + key0 / split - first_split;
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i)  // by the streaming form: nvcc takes a plain store here apart, word by word
        st_vec_stream(&partial_acc[at * kDim + (sub + 4 * i) * 4], row_acc[i]);
      if (sub == 0) {
        Vec<float, 2> ml;
        ml[0] = row_max;
        ml[1] = row_sum;
        st(&partial_ml[at], ml);
      }
    }
    row_max = -INFINITY;
    row_sum = 0.f;
#pragma unroll
    for (int i = 0; i < kLaneChunks; ++i) row_acc[i] = Float4{};
  }

  if (turns > 1) {
    // The block that finishes last reads all states back, in order.
    if (!arrive_last(&arrivals[tile.index * p.kv_heads + head], 1u, static_cast<uint32_t>(turns), smem.arrived)) return;
    if (!row_exists) return;
    for (int s = 0; s < splits; ++s) {
      const int64_t at = out_row * max_splits + s;
      const Vec<float, 2> ml = ld(&partial_ml[at]);
      const Merge merge(row_max, row_sum, ml[0], ml[1]);
#pragma unroll
      for (int i = 0; i < kLaneChunks; ++i) {
        const Float4 part = ld_vec<float, 4>(&partial_acc[at * kDim + (sub + 4 * i) * 4]);
#pragma unroll
        for (int e = 0; e < 4; ++e) row_acc[i][e] = fmaf(row_acc[i][e], merge.keep, part[e] * merge.add);
      }
    }
  }
  grid_launch_dependents();
  if (!row_exists) return;
  const float share = inverse(row_sum);
#pragma unroll
  for (int i = 0; i < kLaneChunks; ++i) {
    const int column = (sub + 4 * i) * 4;
    if (column >= p.d) continue;
#pragma unroll
    for (int e = 0; e < 4; ++e) row_acc[i][e] *= share;
    store4(p.out + out_row * p.d + column, row_acc[i], p.d - column, out4);
  }
  if (p.lse != nullptr && sub == 0) st(&p.lse[out_row], natural_lse(row_max, row_sum));
}

}  // namespace pk
