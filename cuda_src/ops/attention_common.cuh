// What the attention kernels share: the problem as the launch gives it, who owns which queries, which keys a query
// sees, where a key lies in memory, and how partial softmax states are merged.
//
// All batches are one rule. The queries of sequence s are the last q_len of its kv_len tokens, so query t sits at
// position kv_len - q_len + t: prefill (q_len = kv_len), a chunk, decode (q_len = 1) and any mix of them. Lengths
// live on the device, so a captured graph replays with new ones: grids follow capacities, and blocks beyond a
// length leave early.
//
// A tile's rows are (token, head of the group) pairs, token-major: one read of K and V serves the whole group,
// whatever its size. Scores are kept in units of log2 (exp2 is one instruction); lse leaves as natural log.
#pragma once
#include "core/target.cuh"
#include "core/mma.cuh"
#include "core/vec.cuh"
#include "core/warp.cuh"

// One list for every kernel: pykern/ops/attention.py fills it in this order. Strides in elements. `rows` counts
// pages (paged) or tokens (contiguous) of k and v; page_size is 0 when contiguous. Lengths beyond a capacity and
// decreasing cu_* are clamped, so that bad metadata reads nothing out of bounds. min_q is at least 1.
#define PK_ATTENTION_PARAMS(T)                                                                                      \
  const T *__restrict__ q, const T *__restrict__ k, const T *__restrict__ v, T *__restrict__ out,                   \
      float *__restrict__ lse, const int32_t *__restrict__ cu_q, const int32_t *__restrict__ cu_kv,                 \
      const int32_t *__restrict__ kv_lens, const int32_t *__restrict__ page_table, int tokens, int sequences,       \
      int kv_heads, int group, int d, int rows, int page_size, int max_pages, int64_t table_stride,                 \
      int64_t q_stride, int64_t q_head_stride, int64_t k_page_stride, int64_t k_stride, int64_t k_head_stride,      \
      int64_t v_page_stride, int64_t v_stride, int64_t v_head_stride, int causal, int window, float softcap,        \
      float scale, int min_q, int max_q
#define PK_ATTENTION_ARGS                                                                                           \
  q, k, v, out, lse, cu_q, cu_kv, kv_lens, page_table, tokens, sequences, kv_heads, group, d, rows, page_size,      \
      max_pages, table_stride, q_stride, q_head_stride, k_page_stride, k_stride, k_head_stride, v_page_stride,      \
      v_stride, v_head_stride, causal, window, softcap, scale, min_q, max_q

namespace pk {
namespace attention {

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

template <class T>
struct Problem {
  const T *q, *k, *v;
  T* out;
  float* lse;  // null: not asked for
  const int32_t *cu_q, *cu_kv, *kv_lens, *page_table;
  int tokens, sequences, kv_heads, group, d, rows, page_size, max_pages;
  int64_t table_stride, q_stride, q_head_stride;
  int64_t k_page_stride, k_stride, k_head_stride, v_page_stride, v_stride, v_head_stride;
  int causal, window;
  float softcap, scale;
  int min_q, max_q;  // sequences with other numbers of queries belong to another launch

  PK_DEVICE int heads() const { return kv_heads * group; }
  // Tokens after cu_q's last entry belong to nobody: a last sequence without keys writes their zeros.
  PK_DEVICE int sequences_and_tail() const { return cu_q == nullptr ? sequences : sequences + 1; }
};

// N elements to p.out + at, a multiple of N. An out that starts anywhere is written element by element: another kernel
// for it would give other bits.
template <int N, class T>
PK_DEVICE void store_out(const Problem<T>& p, int64_t at, const Vec<T, N>& v) {
  if (reinterpret_cast<uintptr_t>(p.out) % (N * sizeof(T)) == 0) {
    st_vec(p.out + at, v);
  } else {
#pragma unroll
    for (int i = 0; i < N; ++i) st(p.out + at + i, v[i]);
  }
}

PK_DEVICE int clamp(int x, int low, int high) { return x < low ? low : (x > high ? high : x); }
PK_DEVICE int ceil_div(int a, int b) { return (a + b - 1) / b; }

struct Sequence {
  int q_begin, q_len, kv_begin, kv_len;
};

template <class T>
PK_DEVICE Sequence load_sequence(const Problem<T>& p, int s) {
  Sequence seq;
  if (p.cu_q == nullptr) {
    seq.q_len = p.tokens / p.sequences;
    seq.q_begin = s * seq.q_len;
  } else {
    seq.q_begin = clamp(ld(p.cu_q + s), 0, p.tokens);
    const int end = s < p.sequences ? clamp(ld(p.cu_q + s + 1), seq.q_begin, p.tokens) : p.tokens;
    seq.q_len = end - seq.q_begin;
  }
  seq.kv_begin = 0;
  seq.kv_len = 0;
  if (s == p.sequences) return seq;  // the tail
  if (p.page_table != nullptr) {
    seq.kv_len = p.max_pages * p.page_size;
  } else if (p.cu_kv != nullptr) {
    seq.kv_begin = clamp(ld(p.cu_kv + s), 0, p.rows);
    seq.kv_len = clamp(ld(p.cu_kv + s + 1), seq.kv_begin, p.rows) - seq.kv_begin;
  } else {
    seq.kv_len = p.rows;
  }
  if (p.kv_lens != nullptr) seq.kv_len = clamp(ld(p.kv_lens + s), 0, seq.kv_len);
  return seq;
}

// Keys [lo, hi) are visible to token t of the sequence: causal hides what comes after the query's own position,
// a window of W leaves the last W up to it.
struct alignas(8) Range {
  int lo, hi;
};

template <class T>
PK_DEVICE Range visible(const Problem<T>& p, const Sequence& seq, int t) {
  const int own = seq.kv_len - seq.q_len + t;
  Range range;
  range.hi = p.causal ? clamp(own + 1, 0, seq.kv_len) : seq.kv_len;
  range.lo = p.window > 0 ? clamp(own - p.window + 1, 0, range.hi) : 0;
  return range;
}

// One of the pieces that the batch is cut into: piece `local` of sequence `s`, -1 past the last piece.
struct Piece {
  int s, local;
  Sequence seq;
};

// How many pieces a sequence has: count(seq), none where it has no queries, or a number of them that another launch
// takes.
template <class T, class Count>
PK_DEVICE int pieces_of(const Problem<T>& p, const Sequence& seq, Count count) {
  return seq.q_len >= p.min_q && seq.q_len <= p.max_q ? count(seq) : 0;
}

// How many pieces the batch has. For all 32 lanes of a warp together.
template <class T, class Count>
PK_DEVICE int count_pieces(const Problem<T>& p, Count count) {
  if (p.sequences == 1 && p.cu_q == nullptr) return pieces_of(p, load_sequence(p, 0), count);
  int sum = 0;
  for (int s = threadIdx.x % 32; s < p.sequences_and_tail(); s += 32) sum += pieces_of(p, load_sequence(p, s), count);
  return warp_sum(sum);
}

// Piece `index` of the batch. For all 32 lanes together: each counts one sequence, a prefix sum finds the owner.
template <class T, class Count>
PK_DEVICE Piece find_piece(const Problem<T>& p, int index, Count count) {
  Piece piece;
  if (p.sequences == 1 && p.cu_q == nullptr) {  // the common case of one sequence: nothing to search
    piece.seq = load_sequence(p, 0);
    piece.local = index;
    piece.s = index < pieces_of(p, piece.seq, count) ? 0 : -1;
    return piece;
  }
  const int lane = threadIdx.x % 32;
  const int all = p.sequences_and_tail();
  for (int first = 0; first < all; first += 32) {
    const int mine = first + lane;
    const int n = mine < all ? pieces_of(p, load_sequence(p, mine), count) : 0;
    int sum = n;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(0xffffffffu, sum, step);
      if (lane >= step) sum += before;
    }
    const unsigned reached = __ballot_sync(0xffffffffu, index < sum);
    if (reached != 0) {
      const int owner = __ffs(reached) - 1;
      piece.s = first + owner;
      piece.local = index - __shfl_sync(0xffffffffu, sum - n, owner);
      piece.seq = load_sequence(p, piece.s);
      return piece;
    }
    index -= __shfl_sync(0xffffffffu, sum, 31);
  }
  piece.s = -1;
  piece.local = 0;
  piece.seq = Sequence{0, 0, 0, 0};
  return piece;
}

// The rows a block owns where blocks tile the queries, kRows at a time: row r of a sequence is head r % group of token
// r / group.
template <int kRows, class T>
struct RowTile {
  const Problem<T>& p;
  int index;    // among all tiles
  Piece piece;  // its s is -1 past the last tile

  PK_DEVICE explicit RowTile(const Problem<T>& p)
      : p(p),
        // Under a causal mask the last tiles are the longest: they go first.
        index(p.causal ? gridDim.x - 1 - blockIdx.x : blockIdx.x),
        piece(find_piece(p, index, [&](const Sequence& seq) { return ceil_div(seq.q_len * p.group, kRows); })) {}
  PK_DEVICE int first() const { return piece.local * kRows; }
  PK_DEVICE int count() const { return min(kRows, piece.seq.q_len * p.group - first()); }
};

// Where key `key` of sequence s lies: a page of the cache and a slot in it, or page 0 and a row of k. A page id out
// of range is never followed: ok is false, and the caller answers NaN.
struct Slot {
  int page, row;
  bool ok;
};

template <class T>
PK_DEVICE Slot find_slot(const Problem<T>& p, int s, const Sequence& seq, int key) {
  if (p.page_table == nullptr) return Slot{0, seq.kv_begin + key, true};
  const int entry = key / p.page_size;
  const int page = ld(p.page_table + s * p.table_stride + entry);
  return Slot{page, key - entry * p.page_size, page >= 0 && page < p.rows};
}

// A dot product as a score in log2 units. Off, the soft-cap costs one multiplication: cap * tanh(x / cap) -> x.
struct ScoreScale {
  float inner, outer;
  bool capped;

  template <class T>
  PK_DEVICE explicit ScoreScale(const Problem<T>& p)
      : inner(p.softcap > 0.f ? p.scale / p.softcap : p.scale * kLog2e),
        outer(p.softcap * kLog2e),
        capped(p.softcap > 0.f) {}
};

// A row's running softmax: the largest score, the sum of exp2(score - max). An empty state is (-inf, 0). exp2 of
// (-inf) - (-inf) never happens: an empty maximum is replaced by 0, and then every weight is exactly 0.
PK_DEVICE float finite_base(float max) { return max == -INFINITY ? 0.f : max; }

// Adds the state (m, l) to the state (max, sum); `keep` and `add` are the weights of the two accumulators. Merging
// an empty state changes no bit, and merging into an empty state copies: so results do not depend on how many
// empty pieces a grid happens to have.
struct Merge {
  float keep, add;
  PK_DEVICE Merge(float& max, float& sum, float m, float l) {
    const float top = fmaxf(max, m);
    const float base = finite_base(top);
    keep = exp2f(max - base);
    add = exp2f(m - base);
    sum = fmaf(sum, keep, l * add);
    max = top;
  }
};

// Where blocks share rows: whether this one brings the last `mine` of `all` states, whose memory it then sees, all of
// it. For the whole block together; `counter` is zero at rest, `seen` in shared memory.
PK_DEVICE bool arrive_last(uint32_t* counter, uint32_t mine, uint32_t all, uint32_t& seen) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) seen = atomic_add_acq_rel(counter, mine);
  __syncthreads();
  if (seen + mine != all) return false;
  __threadfence();
  if (threadIdx.x == 0) st(counter, 0u);  // at rest again
  return true;
}

// 1 / sum; a row without any key gives weight 0, so its output is 0.
PK_DEVICE float inverse(float sum) { return sum == 0.f ? 0.f : 1.f / sum; }
PK_DEVICE float natural_lse(float max, float sum) { return sum == 0.f ? -INFINITY : (max + log2f(sum)) * kLn2; }

}  // namespace attention
}  // namespace pk
