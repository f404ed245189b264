// Attention of few queries over long caches on the tensor cores (fp16, bf16): split-KV, bound by the read of K and V.
//
// Work is cut into items: a tile of up to 16 rows (tokens times the heads of a group, so that a group shares one read
// of K and V) times a split of `split` keys at an absolute position. Blocks walk over the items with the grid's stride.
// The warps of a block take tiles of 16 keys in turn, each through a ring of its own filled by cp.async, so the main
// loop has no block barrier; they merge in order at the end. Where the keys fill several splits, the block that arrives
// last at a tile merges the states of all splits, in order, in the same launch.
//
// Which warp reads which key depends on its position alone: a row gets the same bits alone and in any batch.
#pragma once
#include "ops/attention_mma.cuh"

namespace pk {
namespace attention {

template <class T, int kDim, int kWarps, int kStages>
struct DecodeSmem {
  static constexpr int kAccPitch = kDim + 8;  // floats; 32 bytes more: four rows of a fragment fill the banks once
  struct Ring {
    T k[kStages][16 * kDim], v[kStages][16 * kDim];
  };
  union {
    alignas(16) Ring ring[kWarps];
    float acc[kWarps][16 * kAccPitch];  // once the ring is drained
  };
  alignas(16) T q[16 * kDim];
  KeyRow rows[kWarps][16];
  float max[kWarps][16], sum[kWarps][16];
  uint32_t arrived;
};

// How a sequence is cut into items: `tiles` tiles of rows, each `splits` splits from `first_split` on.
struct Cut {
  int tile_tokens, slices, row_tokens, tiles, first_split, splits;

  template <class T>
  PK_DEVICE Cut(const Problem<T>& p, const Sequence& seq, int split) {
    slices = ceil_div(p.group, 16);      // a group of more than 16 heads takes several tiles per token
    row_tokens = min(p.group, 16);       // rows of a tile that belong to one token
    tile_tokens = slices > 1 ? 1 : 16 / p.group;
    tiles = ceil_div(seq.q_len, tile_tokens) * slices;
    first_split = visible(p, seq, 0).lo / split;
    splits = max(1, ceil_div(visible(p, seq, seq.q_len - 1).hi, split) - first_split);
  }
};

}  // namespace attention

// partial_acc [slots, heads, max_splits, kDim] and partial_ml [slots, heads, max_splits]: states of the splits; arrivals
// [slots, slices, kv_heads] are zero at rest. A token's slot is its index, or its index among the slot_tokens of its
// sequence where other launches take the long sequences.
template <class T, int kDim, int kWarps, int kStages>
__global__ void __launch_bounds__(kWarps * 32)
    attention_decode(PK_ATTENTION_PARAMS(T), float* __restrict__ partial_acc, Vec<float, 2>* __restrict__ partial_ml,
                     uint32_t* __restrict__ arrivals, int split, int max_splits, int slot_tokens) {
  using namespace attention;
  using Smem = DecodeSmem<T, kDim, kWarps, kStages>;
  using Float4 = Vec<float, 4>;
  constexpr int kThreads = kWarps * 32, kChunks = kDim / 8, kQuads = kDim / 4;
  PK_DYN_SMEM(Smem, smem);
  grid_wait();

  const Problem<T> p{PK_ATTENTION_ARGS};
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = blockIdx.y;
  const T* q_head = p.q + static_cast<int64_t>(head) * p.group * p.q_head_stride;
  const T* k_head = p.k + static_cast<int64_t>(head) * p.k_head_stride;
  const T* v_head = p.v + static_cast<int64_t>(head) * p.v_head_stride;
  typename Smem::Ring& ring = smem.ring[warp];
  const int k_lane = tile_at<kDim>(ldm_b_row(lane), ldm_b_col(lane) / 8);
  const int v_lane = tile_at<kDim>(ldm_bt_row(lane), ldm_bt_col(lane) / 8);
  const ScoreScale scale_of(p);
  const float fold = scale_of.capped ? 1.f : scale_of.inner;  // uncapped, exp2's argument takes the scale in

  for (int item = blockIdx.x;; item += gridDim.x) {
    const Piece piece = find_piece(p, item, [&](const Sequence& seq) {
      const Cut cut(p, seq, split);
      return cut.tiles * cut.splits;
    });
    if (piece.s < 0) break;
    const Sequence seq = piece.seq;
    const Cut cut(p, seq, split);
    const int tile = piece.local / cut.splits, nth_split = piece.local % cut.splits;
    const int first_token = tile / cut.slices * cut.tile_tokens, slice = tile % cut.slices;
    const int rows_here = cut.slices > 1 ? min(16, p.group - slice * 16)
                                         : min(cut.tile_tokens, seq.q_len - first_token) * p.group;
    // Row r is head `slice * 16 + r % row_tokens` of the group, of token `first_token + r / row_tokens`.
    auto out_row = [&](int r) {
      return static_cast<int64_t>(seq.q_begin + first_token + r / cut.row_tokens) * p.heads() + head * p.group +
             slice * 16 + r % cut.row_tokens;
    };

    const int first_slot = (slot_tokens > 0 ? piece.s * slot_tokens : seq.q_begin) + first_token;
    auto partial_row = [&](int r) {
      return (static_cast<int64_t>(first_slot + r / cut.row_tokens) * p.heads() + head * p.group + slice * 16 +
              r % cut.row_tokens) * max_splits;
    };

    const Range first = visible(p, seq, first_token);
    const Range last = visible(p, seq, first_token + (rows_here - 1) / cut.row_tokens);
    const int split_begin = (cut.first_split + nth_split) * split;
    constexpr int kStep = kWarps * 16;  // keys of one step of all warps
    const int begin = max(split_begin, first.lo / kStep * kStep), end = min(split_begin + split, last.hi);
    const int steps = end > begin ? ceil_div(end - begin, kStep) : 0;
    Range see[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      see[h] = visible(p, seq, first_token + min(lane / 4 + 8 * h, rows_here - 1) / cut.row_tokens);
    }

    __syncthreads();  // the last item is out of shared memory
    for (int i = tid; i < 16 * kChunks; i += kThreads) {
      const int row = i / kChunks, c = i % kChunks;
      const bool there = row < rows_here && c * 8 < p.d;
      const int t = first_token + row / cut.row_tokens, member = slice * 16 + row % cut.row_tokens;
      cp_async<16>(&smem.q[tile_at<kDim>(row, c)],
                   there ? q_head + (seq.q_begin + t) * p.q_stride + member * p.q_head_stride + c * 8 : q_head, there);
    }
    cp_async_commit();

    auto look_up = [&](int step) {
      return lane < 16 ? find_key_row(p, piece.s, seq, begin + step * kStep + warp * 16 + lane, end)
                       : KeyRow{kNoKey, kNoKey};
    };
    KeyRow next = look_up(0);  // of the step that is copied next, so that the page table's latency is hidden
    auto issue = [&](int step) {
      __syncwarp();
      if (lane < 16) st(&smem.rows[warp][lane], next);
      __syncwarp();
      if (step < steps) {
        const int stage = step % kStages;
#pragma unroll
        for (int i = lane; i < 16 * kChunks; i += 32) {
          const int key = i / kChunks, c = i % kChunks;
          const KeyRow row = ld(&smem.rows[warp][key]);
          copy_key_chunk(&ring.k[stage][tile_at<kDim>(key, c)], k_head, row.k, c, p.d);
          copy_key_chunk(&ring.v[stage][tile_at<kDim>(key, c)], v_head, row.v, c, p.d);
        }
      }
      cp_async_commit();
      next = look_up(step + 1);
    };
#pragma unroll
    for (int step = 0; step < kStages - 1; ++step) issue(step);

    cp_async_wait<kStages - 1>();  // q
    __syncthreads();
    // q's fragments stay in registers where they fit.
    constexpr bool kKeepQ = kDim <= 128;
    const int q_lane = tile_at<kDim>(ldm_a_row(lane), ldm_a_col(lane) / 8);
    uint32_t q_frag[kKeepQ ? kDim / 16 : 1][4];
    if constexpr (kKeepQ) {
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) ldmatrix<4>(q_frag[i], &smem.q[tile_step<kDim>(q_lane, i)]);
    }

    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f};  // l: this lane's share
    float acc[kDim / 8][4] = {};
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<kStages - 2>();
      issue(step + kStages - 1);  // its barrier also makes this step's copies of all lanes visible
      const int stage = step % kStages;
      const int key0 = begin + step * kStep + warp * 16;

      float s[2][4] = {};
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        uint32_t(&a)[4] = q_frag[kKeepQ ? i : 0];
        if constexpr (!kKeepQ) ldmatrix<4>(a, &smem.q[tile_step<kDim>(q_lane, i)]);
        score_step<T, kDim, 16>(s, a, ring.k[stage], k_lane, i);
      }
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int key = key0 + j * 8 + mma_col(lane, e);
          if (scale_of.capped) s[j][e] = capped_score(scale_of, s[j][e]);
          if (key < see[e / 2].lo || key >= min(see[e / 2].hi, end)) s[j][e] = -INFINITY;
          top[e / 2] = fmaxf(top[e / 2], s[j][e]);
        }
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float now = fmaxf(m[h], warp_max<4>(top[h]) * fold);
        const float base = finite_base(now), keep = exp2f(m[h] - base);
        m[h] = now;
        l[h] *= keep;
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            s[j][e] = exp2f(fmaf(s[j][e], fold, -base));
            l[h] += s[j][e];
          }
        }
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          acc[j][2 * h] *= keep;
          acc[j][2 * h + 1] *= keep;
        }
      }
      uint32_t a[4];
      weights_fragment<T, 2>(a, s, 0);
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
        uint32_t b[4];
        ldmatrix<4, true>(b, &ring.v[stage][tile_step<kDim>(v_lane, c)]);
        mma_m16n8k16<T>(acc[2 * c], a, b);
        mma_m16n8k16<T>(acc[2 * c + 1], a, b + 2);
      }
    }

    // The warps' states, merged in order.
    cp_async_wait<0>();
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = lane / 4 + 8 * h;
      const float sum = warp_sum<4>(l[h]);
      if (row < rows_here) {
        if (lane % 4 == 0) {
          smem.max[warp][row] = m[h];
          smem.sum[warp][row] = sum;
        }
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          Vec<float, 2> two;
          two[0] = acc[j][2 * h];
          two[1] = acc[j][2 * h + 1];
          st(reinterpret_cast<Vec<float, 2>*>(&smem.acc[warp][row * Smem::kAccPitch + j * 8 + mma_col(lane, 0)]), two);
        }
      }
    }
    __syncthreads();
    auto finish = [&](int row, int column, float max, float sum, Float4 x) {
      const float share = inverse(sum);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= share;
      st_vec(p.out + out_row(row) * p.d + column, from_float<T>(x));
      if (p.lse != nullptr && column == 0) st(&p.lse[out_row(row)], natural_lse(max, sum));
    };
    for (int i = tid; i < rows_here * kQuads; i += kThreads) {
      const int row = i / kQuads, column = i % kQuads * 4;
      if (column >= p.d) continue;
      float max = -INFINITY, sum = 0.f;
      Float4 x{};
#pragma unroll
      for (int w = 0; w < kWarps; ++w) {
        const Merge merge(max, sum, smem.max[w][row], smem.sum[w][row]);
        const Float4 part = ld_vec<float, 4>(&smem.acc[w][row * Smem::kAccPitch + column]);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = fmaf(x[e], merge.keep, part[e] * merge.add);
      }
      if (cut.splits == 1) {
        finish(row, column, max, sum, x);
        continue;
      }
      const int64_t at = partial_row(row) + nth_split;
      st_vec(&partial_acc[at * kDim + column], x);
      if (column == 0) {
        Vec<float, 2> ml;
        ml[0] = max;
        ml[1] = sum;
        st(&partial_ml[at], ml);
      }
    }
    if (cut.splits == 1) continue;

    uint32_t* arrival = &arrivals[(static_cast<int64_t>(first_slot) * cut.slices + slice) * p.kv_heads + head];
    __threadfence();
    __syncthreads();
    if (tid == 0) smem.arrived = atomic_add_acq_rel(arrival, 1u);
    __syncthreads();
    if (smem.arrived != static_cast<uint32_t>(cut.splits - 1)) continue;
    __threadfence();
    if (tid == 0) *arrival = 0;  // at rest again
    for (int i = tid; i < rows_here * kQuads; i += kThreads) {
      const int row = i / kQuads, column = i % kQuads * 4;
      if (column >= p.d) continue;
      float max = -INFINITY, sum = 0.f;
      Float4 x{};
      const int64_t at = partial_row(row);
#pragma unroll 4
      for (int n = 0; n < cut.splits; ++n) {
        const Vec<float, 2> ml = ld(&partial_ml[at + n]);
        const Float4 part = ld_vec<float, 4>(&partial_acc[(at + n) * kDim + column]);
        const Merge merge(max, sum, ml[0], ml[1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = fmaf(x[e], merge.keep, part[e] * merge.add);
      }
      finish(row, column, max, sum, x);
    }
  }
  grid_launch_dependents();
}

}  // namespace pk
