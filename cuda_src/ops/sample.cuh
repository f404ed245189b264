// Sampling from logits: temperature, then top-k, top-p, min-p, then one draw. A block owns a row and reads it a few
// times, the later ones from L2; the row is never sorted.
//
// A token's weight is exp((x - max) / T), or of probabilities x / max, as a fixed-point integer with 40 fraction bits:
// sums over tokens are exact and do not depend on the order in which threads add. Tokens are ordered by their words
// (core/order.cuh): by logit, ties to the lowest index. Each filter is a threshold on that word, found by radix
// selection, one 8-bit digit a pass:
//   top-k  the k-th largest word: exactly k tokens stay
//   top-p  the last word for which the weight of all larger ones is below p * (weight of what top-k left)
//   min-p  a floor on the weight: min_p * the largest (2^40)
// The draw takes the token, in index order, where the running weight passes u * total; u is 64 bits of Philox 4x32-10
// of (seed, offset), so a request's tokens do not depend on the batch it is in.
#pragma once
#include "core/order.cuh"
#include "core/row.cuh"

namespace pk {

constexpr int kSampleThreads = 512;
constexpr int kDigits = 256;
constexpr float kWeightOne = 1099511627776.0f;  // 2^40: the 2^23 tokens allowed sum to at most 2^63

struct SampleSmem {
  uint64_t bins[kDigits];
  uint64_t scratch[kSampleThreads / kWarp];
  uint64_t prefix, before;
  uint64_t scan[kSampleThreads];
};

// A row's logits as weights.
template <class T>
struct SampleRow {
  const T* x;
  int n;
  bool probs;  // x holds probabilities: the weight is x over the largest
  float max, inv_t;

  PK_DEVICE float value(int i) const { return to_float(ld(x + i)); }
  PK_DEVICE uint64_t weight(float v) const {
    if (v != v) return 0;
    const float w = v == max ? 1.0f : probs ? v / max : __expf((v - max) * inv_t);
    return w > 0.0f ? static_cast<uint64_t>(fminf(w, 1.0f) * kWeightOne) : 0;
  }
};

// Philox 4x32-10 (Salmon et al., 2011): 64 of its 128 output bits.
PK_DEVICE uint64_t philox(uint64_t key, uint64_t counter) {
  uint32_t c0 = static_cast<uint32_t>(counter), c1 = static_cast<uint32_t>(counter >> 32), c2 = 0, c3 = 0;
  uint32_t k0 = static_cast<uint32_t>(key), k1 = static_cast<uint32_t>(key >> 32);
#pragma unroll
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = static_cast<uint64_t>(c0) * 0xD2511F53u, b = static_cast<uint64_t>(c2) * 0xCD9E8D57u;
    c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
    c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
    c1 = static_cast<uint32_t>(b);
    c3 = static_cast<uint32_t>(a);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return static_cast<uint64_t>(c0) << 32 | c1;
}

// High 64 bits of a 64 x 64-bit product.
PK_DEVICE uint64_t mul_high(uint64_t a, uint64_t b) {
  const uint64_t a0 = static_cast<uint32_t>(a), a1 = a >> 32, b0 = static_cast<uint32_t>(b), b1 = b >> 32;
  const uint64_t mid = a1 * b0 + (a0 * b0 >> 32);
  return a1 * b1 + (mid >> 32) + ((a0 * b1 + static_cast<uint32_t>(mid)) >> 32);
}

// The word of the largest value, for the lowest index.
template <class T>
PK_DEVICE uint64_t sample_top(const SampleRow<T>& row, SampleSmem& smem) {
  uint64_t best = 0;
  for (int i = threadIdx.x; i < row.n; i += kSampleThreads) {
    const uint64_t word = order_word(row.value(i), static_cast<uint32_t>(i));
    best = word > best ? word : best;
  }
  return block_max<kSampleThreads>(best, smem.scratch);
}

// The smallest word W >= floor such that measure(words > W) < limit, over tokens with word >= floor. measure sums
// `mass(value)`; limit is at least 1 and at most the whole measure.
template <class T, class Mass>
PK_DEVICE uint64_t sample_select(const SampleRow<T>& row, uint64_t floor, uint64_t limit, SampleSmem& smem, Mass mass) {
  uint64_t prefix = 0, before = 0;
  for (int shift = 56; shift >= 0; shift -= 8) {
    for (int i = threadIdx.x; i < kDigits; i += kSampleThreads) smem.bins[i] = 0;
    __syncthreads();
    const uint64_t mask = shift == 56 ? 0 : ~uint64_t(0) << (shift + 8);
    for (int i = threadIdx.x; i < row.n; i += kSampleThreads) {
      const float v = row.value(i);
      const uint64_t word = order_word(v, static_cast<uint32_t>(i));
      if (word < floor || (word & mask) != prefix) continue;
      const uint64_t m = mass(v);
      auto* bin = reinterpret_cast<unsigned long long*>(&smem.bins[word >> shift & 255]);
      if (m) atomicAdd(bin, static_cast<unsigned long long>(m));
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      uint64_t above = before;
      int digit = 255, last = 255;
      uint64_t last_above = above;
      for (; digit >= 0 && above < limit; --digit) {
        if (!smem.bins[digit]) continue;
        last = digit;
        last_above = above;
        above += smem.bins[digit];
      }
      smem.prefix = prefix | static_cast<uint64_t>(last) << shift;
      smem.before = last_above;
    }
    __syncthreads();
    prefix = smem.prefix;
    before = smem.before;
  }
  return prefix;
}

// The floor that top-p puts in place of `floor`.
template <class T>
PK_DEVICE uint64_t sample_nucleus(const SampleRow<T>& row, uint64_t floor, float p, SampleSmem& smem) {
  auto weight = [&](float v) { return row.weight(v); };
  uint64_t z = 0;
  for (int i = threadIdx.x; i < row.n; i += kSampleThreads) {
    const float v = row.value(i);
    if (order_word(v, static_cast<uint32_t>(i)) >= floor) z += row.weight(v);
  }
  z = block_sum<kSampleThreads>(z, smem.scratch);
  const double share = static_cast<double>(p > 0.0f ? p : 0.0f) * static_cast<double>(z);
  uint64_t limit = static_cast<uint64_t>(share);
  if (static_cast<double>(limit) < share) ++limit;  // weight before < p z, for whole weights: < ceil(p z)
  return sample_select(row, floor, limit ? limit : 1, smem, weight);
}

// Finds the token at which the running sum of kept(i) passes bits() / 2^64 of the total; the one thread that has it
// calls found(token). The bits are made only when they are needed: held over the sums they would spill.
template <class Bits, class Kept, class Found>
PK_DEVICE void sample_draw(int n, SampleSmem& smem, Bits bits, Kept kept, Found found) {
  // Each thread owns a run of neighbours, so that the running weight is in index order.
  const int run = (n + kSampleThreads - 1) / kSampleThreads;
  const int begin = threadIdx.x * run, end = begin + run < n ? begin + run : n;
  uint64_t mine = 0;
  for (int i = begin; i < end; ++i) mine += kept(i);
  smem.scan[threadIdx.x] = mine;
  __syncthreads();
  for (int d = 1; d < kSampleThreads; d *= 2) {
    const uint64_t add = threadIdx.x >= d ? smem.scan[threadIdx.x - d] : 0;
    __syncthreads();
    smem.scan[threadIdx.x] += add;
    __syncthreads();
  }
  const uint64_t target = mul_high(bits(), smem.scan[kSampleThreads - 1]);
  uint64_t at = smem.scan[threadIdx.x] - mine;
  if (target < at || target >= at + mine) return;
  for (int i = begin; i < end; ++i) {
    at += kept(i);
    if (target < at) {
      found(i);
      break;
    }
  }
}

// Two blocks an SM, as batches are small; asked for three, sm_120 spills.
template <class T>
__global__ void __launch_bounds__(kSampleThreads, 2)
    sample(const T* __restrict__ x, const int64_t* __restrict__ seeds, const int64_t* __restrict__ offsets,
           const float* __restrict__ temperatures, const int32_t* __restrict__ top_ks, const float* __restrict__ top_ps,
           const float* __restrict__ min_ps, int64_t* __restrict__ ids, bool* __restrict__ valid, int n, int64_t stride,
           float temperature, int32_t top_k, float top_p, float min_p, int probs) {
  PK_SMEM(SampleSmem, smem);
  const int64_t r = blockIdx.x;
  grid_wait();
  const float t = temperatures ? ld(temperatures + r) : temperature;
  const int32_t k = top_ks ? ld(top_ks + r) : top_k;
  const float p = top_ps ? ld(top_ps + r) : top_p;
  const float floor_p = min_ps ? ld(min_ps + r) : min_p;
  SampleRow<T> row{x + r * stride, n, probs != 0, 0.0f, 0.0f};

  const int64_t top = order_index(sample_top(row, smem));
  row.max = row.value(static_cast<int>(top));
  // No probability anywhere: nothing but NaN and -inf, or +inf, or a setting that means nothing.
  const bool ok = row.max == row.max && row.max > -INFINITY && row.max < INFINITY && t >= 0.0f && p == p &&
                  floor_p == floor_p && (!probs || row.max > 0.0f);
  if (!ok || t == 0.0f) {  // the whole block takes this branch
    if (threadIdx.x == 0) {
      st(ids + r, ok ? top : int64_t(0));
      st(valid + r, ok);
    }
    grid_launch_dependents();
    return;
  }
  row.inv_t = 1.0f / t;
  auto one = [](float) { return uint64_t(1); };

  uint64_t floor = 0;
  if (k > 0 && k < n) floor = sample_select(row, 0, static_cast<uint64_t>(k), smem, one);
  if (p < 1.0f) floor = sample_nucleus(row, floor, p, smem);
  const float largest = static_cast<float>(row.weight(row.max));
  const uint64_t least = floor_p > 0.0f ? static_cast<uint64_t>(fminf(floor_p, 1.0f) * largest) : 0;
  auto kept = [&](int i) {
    const float v = row.value(i);
    const uint64_t w = row.weight(v);
    return order_word(v, static_cast<uint32_t>(i)) >= floor && w >= least ? w : 0;
  };

  auto bits = [&] {
    return philox(static_cast<uint64_t>(ld(seeds + r)), offsets ? static_cast<uint64_t>(ld(offsets + r)) : 0);
  };
  sample_draw(n, smem, bits, kept, [&](int token) {
    st(ids + r, static_cast<int64_t>(token));
    st(valid + r, true);
  });
  grid_launch_dependents();
}

}  // namespace pk
