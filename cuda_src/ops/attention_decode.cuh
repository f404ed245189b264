// Attention of few queries over long caches on the tensor cores (fp16, bf16): split-KV, bound by the read of K and V.
//
// Work is cut into items: a tile of up to 16 rows (tokens times the heads of a group, so that a group shares one read
// of K and V) times a split of `split` keys at an absolute position. A block walks over a run of consecutive items. Its
// warps take tiles of 16 keys in turn, each through a ring of its own filled by cp.async that runs ahead across items;
// at the end of an item the warps merge in order and leave the split's state. Where the keys fill several splits, the
// block that arrives last at a tile merges the states of all its splits, in order, in the same launch.
//
// Which warp reads which key depends on its position alone: a row gets the same bits alone and in any batch.
#pragma once
#include "ops/attention_mma.cuh"

namespace pk {
namespace attention {

// One item, as the walk hands it from the side that copies keys to the side that computes.
struct alignas(16) DecodeItem {
  Sequence seq;
  int first_token, slice, rows, first_slot;  // of its tile; a token's slot is its place in the workspace
  int split, splits;                         // which of how many of its tile
  int begin, end, steps;                     // keys [begin, end), in steps of all warps
  int all_lo, all_hi;                        // keys that every row sees
  int bad_page;
};

template <class T, int kDim, int kWarps, int kStages>
struct DecodeSmem {
  static constexpr int kMergeRows = 4;          // rows the warps merge at a time: one round for groups of up to 4
  static constexpr int kAccPitch = kDim + 8;    // floats; 32 bytes more: four rows of a fragment fill the banks once
  static constexpr bool kKeepQ = kDim <= 128;   // q's fragments fit into registers
  static constexpr int kItems = kStages + 1;    // one step ahead of the ring, each of which may be an item of its own
  struct Ring {
    T k[kStages][16 * kDim], v[kStages][16 * kDim];
  };
  alignas(16) Ring ring[kWarps];
  alignas(16) float acc[kWarps][kMergeRows * kAccPitch];
  alignas(16) T q[kKeepQ ? 8 : 16 * kDim];
  KeyRow rows[kWarps][16];
  DecodeItem items[kWarps][kItems];
  float max[kWarps][16], sum[kWarps][16];
  uint32_t arrived;
};

// How a group's rows lie in tiles: a group of more than 16 heads takes several tiles (slices) per token.
struct TileShape {
  int slices, row_tokens, tile_tokens;

  PK_DEVICE explicit TileShape(int group)
      : slices(ceil_div(group, 16)), row_tokens(min(group, 16)), tile_tokens(group > 16 ? 1 : 16 / group) {}
};

// The splits that the keys of a sequence's queries touch.
struct SplitRange {
  int first, count;

  template <class T>
  PK_DEVICE SplitRange(const Problem<T>& p, const Sequence& seq, int split)
      : first(visible(p, seq, 0).lo / split),
        count(max(1, ceil_div(visible(p, seq, seq.q_len - 1).hi, split) - first)) {}
};

// The copying side of a warp's walk over its block's run of items. All lanes hold the same.
template <class T, int kWarps>
struct DecodeWalk {
  static constexpr int kStep = kWarps * 16;  // keys of one step of all warps
  const Problem<T>& p;
  const TileShape& shape;
  DecodeItem* items;
  int split_keys, slot_tokens, count_items;
  int s, tile, tiles, nth, left, index, step;
  SplitRange splits;
  Sequence seq;
  int begin, end, steps;

  PK_DEVICE DecodeWalk(const Problem<T>& p, const TileShape& shape, DecodeItem* items, int count_items, int split_keys,
                       int slot_tokens, const Piece& piece, int left)
      : p(p), shape(shape), items(items), split_keys(split_keys), slot_tokens(slot_tokens), count_items(count_items),
        s(piece.s), left(left), index(0), splits(p, piece.seq, split_keys), seq(piece.seq) {
    tiles = ceil_div(seq.q_len, shape.tile_tokens) * shape.slices;
    tile = piece.local / splits.count;
    nth = piece.local - tile * splits.count;
    enter();
  }

  PK_DEVICE bool done() const { return left == 0; }

  PK_DEVICE void enter() {
    const int first_token = tile / shape.slices * shape.tile_tokens, slice = tile % shape.slices;
    const int tokens = min(shape.tile_tokens, seq.q_len - first_token);
    const int rows = shape.slices > 1 ? min(16, p.group - slice * 16) : tokens * p.group;
    const int split_begin = (splits.first + nth) * split_keys;
    const Range first = visible(p, seq, first_token), last = visible(p, seq, first_token + tokens - 1);
    begin = max(split_begin, first.lo / kStep * kStep);
    end = min(split_begin + split_keys, last.hi);
    steps = max(1, ceil_div(end - begin, kStep));  // without keys, one step of nothing: an item has a step
    step = 0;
    if (threadIdx.x % 32 == 0) {
      const int first_slot = (slot_tokens > 0 ? s * slot_tokens : seq.q_begin) + first_token;
      items[index % count_items] =
          DecodeItem{seq,   first_token, slice, rows,    first_slot, nth, splits.count,
                     begin, end,         steps, last.lo, first.hi,   0};
    }
    __syncwarp();
  }

  PK_DEVICE void advance() {
    if (done() || ++step < steps) return;
    if (--left == 0) return;
    ++index;
    if (++nth == splits.count) {
      nth = 0;
      if (++tile == tiles) {
        tile = 0;
        do {
          seq = load_sequence(p, ++s);
        } while (seq.q_len < p.min_q || seq.q_len > p.max_q);
        splits = SplitRange(p, seq, split_keys);
        tiles = ceil_div(seq.q_len, shape.tile_tokens) * shape.slices;
      }
    }
    enter();
  }

  // Whether the current step has keys to copy.
  PK_DEVICE bool live() const { return left > 0 && end > begin; }

  // The row of this lane's key of the current step, where lanes 0 to 15 stand for a warp's 16 keys.
  PK_DEVICE KeyRow look_up(int warp, int lane) const {
    if (lane >= 16 || !live()) return KeyRow{0, 0};
    bool bad = false;
    const KeyRow row = find_key_row(p, s, seq, begin + step * kStep + warp * 16 + lane, end, bad);
    if (bad) atomicOr(&items[index % count_items].bad_page, 1);
    return row;
  }
};

}  // namespace attention

// partial_acc [slots, heads, max_splits, kDim] and partial_ml [slots, heads, max_splits]: states of the splits;
// arrivals [slots, slices, kv_heads] are zero at rest. A token's slot is its index, or its index among the slot_tokens
// of its sequence where other launches take the long sequences.
template <class T, int kDim, int kWarps, int kStages>
__global__ void __launch_bounds__(kWarps * 32, 2)
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
  const TileShape shape(p.group);
  auto items_of = [&](const Sequence& seq) {
    return ceil_div(seq.q_len, shape.tile_tokens) * shape.slices * SplitRange(p, seq, split).count;
  };
  const int64_t all = count_pieces(p, items_of);
  const int first_item = static_cast<int>(all * blockIdx.x / gridDim.x);
  const int run = static_cast<int>(all * (blockIdx.x + 1) / gridDim.x) - first_item;
  if (run == 0) return;
  DecodeWalk<T, kWarps> walk(p, shape, smem.items[warp], Smem::kItems, split, slot_tokens,
                             find_piece(p, first_item, items_of), run);

  const T* k_head = p.k + static_cast<int64_t>(head) * p.k_head_stride;
  const T* v_head = p.v + static_cast<int64_t>(head) * p.v_head_stride;
  typename Smem::Ring& ring = smem.ring[warp];
  KeyRow next = walk.look_up(warp, lane);  // one step before its copy, so that the page table's latency is hidden
  int fill = 0;                            // the stage to fill next
  auto issue = [&] {
    __syncwarp();
    if (lane < 16) st(&smem.rows[warp][lane], next);
    __syncwarp();
    if (walk.live()) {
      copy_keys<T, kDim, 16, 32>(ring.k[fill], ring.v[fill], k_head, v_head, smem.rows[warp], lane, p.d);
    }
    cp_async_commit();
    fill = fill + 1 == kStages ? 0 : fill + 1;
    walk.advance();
    next = walk.look_up(warp, lane);
  };
  zero_padding<T, kDim, 32>(ring.k[0], kStages * 16, lane, p.d);
  zero_padding<T, kDim, 32>(ring.v[0], kStages * 16, lane, p.d);
#pragma unroll
  for (int i = 0; i < kStages - 1; ++i) issue();

  const int k_lane = tile_at<kDim>(ldm_b_row(lane), ldm_b_col(lane) / 8);
  const int v_lane = tile_at<kDim>(ldm_bt_row(lane), ldm_bt_col(lane) / 8);
  const ScoreScale scale_of(p);
  const float fold = scale_of.capped ? 1.f : scale_of.inner;  // uncapped, exp2's argument takes the scale in
  const int q_lane = tile_at<kDim>(ldm_a_row(lane), ldm_a_col(lane) / 8);
  uint32_t q_frag[Smem::kKeepQ ? kDim / 16 : 1][4];
  int next_stage = 0, tile_splits = 0;  // tile_splits: splits of the current tile that this block has done

  for (int n = 0; n < run; ++n) {
    const DecodeItem& item = smem.items[warp][n % Smem::kItems];
    const Sequence& seq = item.seq;
    const int begin = item.begin, end = item.end, rows_here = item.rows, steps = item.steps;
    // Row r of the tile is head `slice * 16 + r % row_tokens` of the group, of token `first_token + r / row_tokens`.
    const int first_token = item.first_token, first_member = item.slice * 16;
    auto head_of = [&](int r) { return head * p.group + first_member + r % shape.row_tokens; };
    auto token_of = [&](int r) { return first_token + min(r, rows_here - 1) / shape.row_tokens; };
    auto q_row = [&](int r) {
      return p.q + (seq.q_begin + token_of(r)) * p.q_stride + head_of(min(r, rows_here - 1)) * p.q_head_stride;
    };
    if (tile_splits > 0) {
      // q is that of the last item
    } else if constexpr (Smem::kKeepQ) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = lane / 4 + 8 * h;
        const T* from = q_row(row);
#pragma unroll
        for (int i = 0; i < kDim / 8; ++i) {
          const int column = i * 8 + lane % 4 * 2;
          const bool there = row < rows_here && column < p.d;
          q_frag[i / 2][h + i % 2 * 2] = there ? ld_nc(reinterpret_cast<const uint32_t*>(from + column)) : 0u;
        }
      }
    } else {
      for (int i = tid; i < 16 * kChunks; i += kThreads) {
        const int row = i / kChunks, c = i % kChunks;
        const bool there = row < rows_here && c * 8 < p.d;
        st_vec(&smem.q[tile_at<kDim>(row, c)], there ? ld_vec_nc<T, 8>(q_row(row) + c * 8) : Vec<T, 8>{});
      }
      __syncthreads();
    }

    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f};  // l: this lane's share
    float acc[kDim / 8][4] = {};
    for (int step = 0; step < steps; ++step) {
      cp_async_wait<kStages - 2>();
      issue();  // its barrier also makes this step's copies of all lanes visible
      const int stage = next_stage, key0 = begin + step * walk.kStep + warp * 16;
      next_stage = stage + 1 == kStages ? 0 : stage + 1;
      if (end <= begin) break;  // the one step of an item without keys
      float s[2][4] = {};
#pragma unroll
      for (int i = 0; i < kDim / 16; ++i) {
        uint32_t(&a)[4] = q_frag[Smem::kKeepQ ? i : 0];
        if constexpr (!Smem::kKeepQ) ldmatrix<4>(a, &smem.q[tile_step<kDim>(q_lane, i)]);
        score_step<T, kDim, 16>(s, a, ring.k[stage], k_lane, i);
      }
      if (scale_of.capped) {
#pragma unroll
        for (int i = 0; i < 8; ++i) s[i / 4][i % 4] = capped_score(scale_of, s[i / 4][i % 4]);
      }
      if (key0 < item.all_lo || key0 + 16 > min(item.all_hi, end)) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const Range see = visible(p, item.seq, token_of(lane / 4 + 8 * h));
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int key = key0 + i / 2 * 8 + mma_col(lane, i % 2);
            if (key < see.lo || key >= min(see.hi, end)) s[i / 2][2 * h + i % 2] = -INFINITY;
          }
        }
      }
      float keep[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float top = fmaxf(fmaxf(s[0][2 * h], s[0][2 * h + 1]), fmaxf(s[1][2 * h], s[1][2 * h + 1]));
        const float now = fmaxf(m[h], warp_max<4>(top) * fold);
        const float base = finite_base(now);
        keep[h] = exp2_approx(m[h] - base);
        m[h] = now;
        l[h] *= keep[h];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
#pragma unroll
          for (int e = 2 * h; e < 2 * h + 2; ++e) {
            s[j][e] = exp2_approx(fmaf(s[j][e], fold, -base));
            l[h] += s[j][e];
          }
        }
      }
      // Most steps leave every maximum as it was, and multiplying by 1 changes no bit.
      if (__any_sync(kFullMask, !(keep[0] == 1.f && keep[1] == 1.f))) {
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) acc[j][e] *= keep[e / 2];
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

    // Merge the warps' states in order, a few rows at a time, while the ring fills for the next item.
    const int first_slot = item.first_slot, nth = item.split, splits = item.splits;
    auto out_row = [&](int r) {
      return static_cast<int64_t>(seq.q_begin + first_token + r / shape.row_tokens) * p.heads() + head_of(r);
    };
    auto partial_row = [&](int r) {
      return (static_cast<int64_t>(first_slot + r / shape.row_tokens) * p.heads() + head_of(r)) * max_splits;
    };
    auto finish = [&](int row, int column, float max, float sum, Float4 x) {
      const float share = inverse(sum);
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] *= share;
      store_out<4>(p, out_row(row) * p.d + column, from_float<T>(x));
      if (p.lse != nullptr && column == 0) st(&p.lse[out_row(row)], natural_lse(max, sum));
    };
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const float sum = warp_sum<4>(l[h]) + (item.bad_page ? NAN : 0.f);
      if (lane % 4 == 0) {
        smem.max[warp][lane / 4 + 8 * h] = m[h];
        smem.sum[warp][lane / 4 + 8 * h] = sum;
      }
    }
    for (int row0 = 0; row0 < rows_here; row0 += Smem::kMergeRows) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const int row = lane / 4 + 8 * h - row0;
        if (row < 0 || row >= Smem::kMergeRows) continue;
#pragma unroll
        for (int j = 0; j < kDim / 8; ++j) {
          Vec<float, 2> two;
          two[0] = acc[j][2 * h];
          two[1] = acc[j][2 * h + 1];
          st(reinterpret_cast<Vec<float, 2>*>(&smem.acc[warp][row * Smem::kAccPitch + j * 8 + mma_col(lane, 0)]), two);
        }
      }
      __syncthreads();
      for (int i = tid; i < Smem::kMergeRows * kQuads; i += kThreads) {
        const int row = row0 + i / kQuads, column = i % kQuads * 4;
        if (row >= rows_here || column >= p.d) continue;
        float max = -INFINITY, sum = 0.f;
        Float4 x{};
#pragma unroll
        for (int w = 0; w < kWarps; ++w) {
          const Merge merge(max, sum, smem.max[w][row], smem.sum[w][row]);
          const Float4 part = ld_vec<float, 4>(&smem.acc[w][(row - row0) * Smem::kAccPitch + column]);
#pragma unroll
          for (int e = 0; e < 4; ++e) x[e] = fmaf(x[e], merge.keep, part[e] * merge.add);
        }
        if (splits == 1) {
          finish(row, column, max, sum, x);
          continue;
        }
        const int64_t at = partial_row(row) + nth;
        st_vec(&partial_acc[at * kDim + column], x);
        if (column == 0) {
          Vec<float, 2> ml;
          ml[0] = max;
          ml[1] = sum;
          st(&partial_ml[at], ml);
        }
      }
      __syncthreads();
    }

    ++tile_splits;
    if (nth + 1 < splits && n + 1 < run) continue;  // the next item is this tile's next split
    const uint32_t mine = static_cast<uint32_t>(tile_splits);
    tile_splits = 0;
    if (splits == 1) continue;
    uint32_t* arrival = &arrivals[(static_cast<int64_t>(first_slot) * shape.slices + item.slice) * p.kv_heads + head];
    if (!arrive_last(arrival, mine, static_cast<uint32_t>(splits), smem.arrived)) continue;
    for (int i = tid; i < rows_here * kQuads; i += kThreads) {
      const int row = i / kQuads, column = i % kQuads * 4;
      if (column >= p.d) continue;
      float max = -INFINITY, sum = 0.f;
      Float4 x{};
      const int64_t at = partial_row(row);
#pragma unroll 4
      for (int k = 0; k < splits; ++k) {
        const Vec<float, 2> ml = ld(&partial_ml[at + k]);
        const Float4 part = ld_vec<float, 4>(&partial_acc[(at + k) * kDim + column]);
        const Merge merge(max, sum, ml[0], ml[1]);
#pragma unroll
        for (int e = 0; e < 4; ++e) x[e] = fmaf(x[e], merge.keep, part[e] * merge.add);
      }
      finish(row, column, max, sum, x);
    }
  }
  cp_async_wait<0>();
  grid_launch_dependents();
}

}  // namespace pk
