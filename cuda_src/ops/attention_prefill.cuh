// Attention of many queries on the tensor cores (fp16, bf16), after FlashAttention-2 (Dao, 2023).
//
// A block owns kWarps * kRowTiles * 16 rows of one kv head, a warp kRowTiles * 16 of them, and goes once over the keys
// they see in tiles of kKeys: K and V stream through two stages of shared memory with cp.async (the next tile loads
// while this one is computed), scores and weights stay in registers, the running maximum and sum as well.
//
// Tiles of keys lie at absolute positions and a tile without a visible key changes no bit of a row, so a row's bits do
// not depend on the chunk or the batch it comes in. Limit: a NaN or infinity in V at a key that is masked for a row
// still reaches it when another row of the block sees the key (0 * NaN).
#pragma once
#include "ops/attention_mma.cuh"

namespace pk {
namespace attention {

template <class T, int kDim, int kWarps, int kRowTiles, int kKeys>
struct PrefillSmem {
  static constexpr int kRows = kWarps * kRowTiles * 16;
  alignas(16) T q[kRows * kDim];  // then the output, on its way out
  alignas(16) T k[2][kKeys * kDim];
  alignas(16) T v[2][kKeys * kDim];
  KeyRow rows[2][kKeys];
  Range see[kRows];  // the keys each row sees: needed for the few tiles that are partly masked
};

}  // namespace attention

template <class T, int kDim, int kWarps, int kRowTiles, int kKeys>
__global__ void __launch_bounds__(kWarps * 32) attention_prefill(PK_ATTENTION_PARAMS(T)) {
  using namespace attention;
  using Smem = PrefillSmem<T, kDim, kWarps, kRowTiles, kKeys>;
  constexpr int kRows = Smem::kRows, kThreads = kWarps * 32, kChunks = kDim / 8;
  static_assert(kKeys <= kThreads, "a thread looks up one key of a tile");
  PK_DYN_SMEM(Smem, smem);
  grid_wait();

  const Problem<T> p{PK_ATTENTION_ARGS};
  const RowTile<kRows, T> tile(p);
  if (tile.piece.s < 0) return;
  const Sequence seq = tile.piece.seq;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, head = blockIdx.y;
  const int first_row = tile.first(), rows_here = tile.count();

  // [lo, hi): some row sees the key. [all_lo, all_hi): every row does, no mask needed.
  const Range first = visible(p, seq, first_row / p.group);
  const Range last = visible(p, seq, (first_row + rows_here - 1) / p.group);
  const int begin = first.lo / kKeys * kKeys, end = last.hi, all_lo = last.lo, all_hi = first.hi;

  const T* q_head = p.q + static_cast<int64_t>(head) * p.group * p.q_head_stride;
  for (int i = tid; i < kRows * kChunks; i += kThreads) {
    const int row = i / kChunks, c = i % kChunks;
    const bool there = row < rows_here && c * 8 < p.d;
    const int t = (first_row + row) / p.group, g = (first_row + row) % p.group;
    cp_async<16>(&smem.q[tile_at<kDim>(row, c)],
                     there ? q_head + (seq.q_begin + t) * p.q_stride + g * p.q_head_stride + c * 8 : q_head, there);
  }

  for (int row = tid; row < kRows; row += kThreads) {
    st(&smem.see[row], visible(p, seq, (first_row + min(row, rows_here - 1)) / p.group));
  }

  const T* k_head = p.k + static_cast<int64_t>(head) * p.k_head_stride;
  const T* v_head = p.v + static_cast<int64_t>(head) * p.v_head_stride;
  auto load_tile = [&](int stage) {
    copy_keys<T, kDim, kKeys, kThreads>(smem.k[stage], smem.v[stage], k_head, v_head, smem.rows[stage], tid, p.d);
    cp_async_commit();
  };
  // The rows of a tile are looked up one tile before its copy starts, so that the page table's latency is hidden.
  bool bad_page = false;
  auto look_up = [&](int key0) {
    return tid < kKeys && key0 < end ? find_key_row(p, tile.piece.s, seq, key0 + tid, end, bad_page) : KeyRow{0, 0};
  };
  auto publish = [&](int stage, KeyRow row) {
    if (tid < kKeys) st(&smem.rows[stage][tid], row);
  };

  // This lane's places in the first fragment of each operand.
  const int q_lane = tile_at<kDim>(warp * kRowTiles * 16 + ldm_a_row(lane), ldm_a_col(lane) / 8);
  const int k_lane = tile_at<kDim>(ldm_b_row(lane), ldm_b_col(lane) / 8);
  const int v_lane = tile_at<kDim>(ldm_bt_row(lane), ldm_bt_col(lane) / 8);

  const ScoreScale scale_of(p);
  // Uncapped, the scale is folded into exp2's argument; capped, scores are scaled already.
  const float fold = scale_of.capped ? 1.f : scale_of.inner;
  float m[kRowTiles][2], l[kRowTiles][2];  // l: this lane's share
  float acc[kRowTiles][kDim / 8][4];
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    m[i][0] = m[i][1] = -INFINITY;
    l[i][0] = l[i][1] = 0.f;
#pragma unroll
    for (int j = 0; j < kDim / 8; ++j) acc[i][j][0] = acc[i][j][1] = acc[i][j][2] = acc[i][j][3] = 0.f;
  }

  zero_padding<T, kDim, kThreads>(smem.k[0], 2 * kKeys, tid, p.d);
  zero_padding<T, kDim, kThreads>(smem.v[0], 2 * kKeys, tid, p.d);
  publish(0, look_up(begin));
  __syncthreads();
  if (begin < end) load_tile(0);
  KeyRow next = look_up(begin + kKeys);
  int stage = 0;
  for (int key0 = begin; key0 < end; key0 += kKeys, stage ^= 1) {
    publish(stage ^ 1, next);
    cp_async_wait<0>();
    __syncthreads();  // this tile is there; nobody reads the stage of the last one any more
    if (key0 + kKeys < end) load_tile(stage ^ 1);
    next = look_up(key0 + 2 * kKeys);

    float s[kRowTiles][kKeys / 8][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
        uint32_t a[4];
        ldmatrix<4>(a, &smem.q[tile_step<kDim>(q_lane, step) + i * 16 * kDim]);
        score_step<T, kDim, kKeys>(s[i], a, smem.k[stage], k_lane, step);
      }
    }

    const bool masked = key0 < all_lo || key0 + kKeys > all_hi;
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      if (scale_of.capped) {
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
          for (int e = 0; e < 4; ++e) s[i][j][e] = capped_score(scale_of, s[i][j][e]);
        }
      }
      if (masked) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const int row = (warp * kRowTiles + i) * 16 + h * 8 + lane / 4;
          const Range see = ld(&smem.see[row]);
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
            for (int e = 2 * h; e < 2 * h + 2; ++e) {
              const int key = key0 + j * 8 + mma_col(lane, e);
              if (key < see.lo || key >= see.hi) s[i][j][e] = -INFINITY;
            }
          }
        }
      }
      float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) top[e / 2] = fmaxf(top[e / 2], s[i][j][e]);
      }
      float base[2], keep[2];
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const float now = fmaxf(m[i][h], warp_max<4>(top[h]) * fold);
        base[h] = finite_base(now);
        keep[h] = exp2_approx(m[i][h] - base[h]);
        m[i][h] = now;
        l[i][h] *= keep[h];
      }
#pragma unroll
      for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          s[i][j][e] = exp2_approx(fmaf(s[i][j][e], fold, -base[e / 2]));
          l[i][e / 2] += s[i][j][e];
        }
      }
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
#pragma unroll
        for (int e = 0; e < 4; ++e) acc[i][j][e] *= keep[e / 2];
      }
    }

#pragma unroll
    for (int j = 0; j < kKeys / 16; ++j) {
      uint32_t a[kRowTiles][4];
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) weights_fragment<T, kKeys / 8>(a[i], s[i], j);
#pragma unroll
      for (int c = 0; c < kDim / 16; ++c) {
        uint32_t b[4];
        ldmatrix<4, true>(b, &smem.v[stage][tile_step<kDim>(v_lane, c) + j * 16 * kDim]);
#pragma unroll
        for (int i = 0; i < kRowTiles; ++i) {
          mma_m16n8k16<T>(acc[i][2 * c], a[i], b);
          mma_m16n8k16<T>(acc[i][2 * c + 1], a[i], b + 2);
        }
      }
    }
  }
  cp_async_commit();  // a block without keys has q's copy in flight still, which no tile's commit took along
  cp_async_wait<0>();
  const float poison = __syncthreads_or(bad_page) ? NAN : 0.f;
  grid_launch_dependents();

  // The output goes through the warp's own rows of q, so that it leaves in 16-byte pieces.
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = (warp * kRowTiles + i) * 16 + h * 8 + lane / 4;
      const float sum = warp_sum<4>(l[i][h]) + poison;
      const float share = inverse(sum);
#pragma unroll
      for (int j = 0; j < kDim / 8; ++j) {
        const uint32_t two = pack2<T>(acc[i][j][2 * h] * share, acc[i][j][2 * h + 1] * share);
        st(reinterpret_cast<uint32_t*>(&smem.q[tile_at<kDim>(row, j) + mma_col(lane, 0)]), two);
      }
      if (p.lse != nullptr && lane % 4 == 0 && row < rows_here) {
        const int t = (first_row + row) / p.group, g = (first_row + row) % p.group;
        st(&p.lse[static_cast<int64_t>(seq.q_begin + t) * p.heads() + head * p.group + g],
               natural_lse(m[i][h], sum));
      }
    }
  }
  __syncwarp();
  constexpr int kWarpRows = kRowTiles * 16;
  for (int i = lane; i < kWarpRows * kChunks; i += 32) {
    const int row = warp * kWarpRows + i / kChunks, c = i % kChunks;
    if (row >= rows_here || c * 8 >= p.d) continue;
    const int t = (first_row + row) / p.group, g = (first_row + row) % p.group;
    const int64_t out_row = static_cast<int64_t>(seq.q_begin + t) * p.heads() + head * p.group + g;
    store_out<8>(p, out_row * p.d + c * 8, ld_vec<T, 8>(&smem.q[tile_at<kDim>(row, c)]));
  }
}

}  // namespace pk
