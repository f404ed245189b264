// y[r, k] = the weights of row r, or with ids of row ids[r], of a packed matrix [n, k]; one pass.
// A thread owns 4 pieces of 8 weights, a block's width apart, all loaded before the first is decoded: a warp
// reads 128 bytes of 4-bit codes and writes 512 bytes of 16-bit results at a time.
#pragma once
#include "core/divide.cuh"
#include "ops/quant_formats.cuh"

namespace pk {

constexpr int kDequantizeThreads = 256;
constexpr int kDequantizePieces = 4;  // 4 loads of 4 bytes and as many scales in flight: 32 registers

enum QuantIds : int { kQuantNoIds = 0, kQuantIds32 = 1, kQuantIds64 = 2 };

// How a thread goes about its pieces: weight by weight, where they are not whole or not aligned; by 8; or by 8 in pairs
// of T, where T's own arithmetic gives the bits that float32's gives (4-bit codes whose scales are of type T and whose
// zeros, if any, are bytes) and no group is cut by the end of a row, so that a piece's number alone tells its group.
enum DequantizeMode : int { kDequantizeOnes = 0, kDequantizeEights = 1, kDequantizePairs = 2 };

template <class T>
PK_DEVICE void store_eight(T* out, const Vec<float, 8>& w) {
  constexpr int kStep = 16 / static_cast<int>(sizeof(T));
#pragma unroll
  for (int i = 0; i < 8; i += kStep) {
    Vec<float, kStep> part;
#pragma unroll
    for (int j = 0; j < kStep; ++j) part[j] = w[i + j];
    st_vec_stream<T, kStep>(out + i, from_float<T>(part));
  }
}

// The matrix row of output row r: -1 where an id is out of range.
PK_DEVICE int64_t matrix_row(const void* ids, int id_type, uint32_t r, int n) {
  if (id_type == kQuantNoIds) return r;
  const int64_t id = id_type == kQuantIds32 ? ld(static_cast<const int32_t*>(ids) + r)
                                            : ld(static_cast<const int64_t*>(ids) + r);
  return id >= 0 && id < n ? id : -1;
}

// A thread's pieces: where in the matrix, and where in y.
struct DequantizePieces {
  int64_t row[kDequantizePieces], to[kDequantizePieces];
  int at[kDequantizePieces];
  uint32_t first, count;  // pieces in all
  PK_DEVICE bool in(int p) const { return first + p * kDequantizeThreads < count; }
  PK_DEVICE int64_t source(int p) const { return row[p] < 0 ? 0 : row[p]; }
};

template <class L, class T>
PK_DEVICE void dequantize_pairs(const QuantPlanes& q, uint32_t first, uint32_t pieces, Divider per_group, T* y) {
  uint32_t words[kDequantizePieces], scales[kDequantizePieces], zeros[kDequantizePieces];
#pragma unroll
  for (int p = 0; p < kDequantizePieces; ++p) {
    const uint32_t piece = min(first + p * kDequantizeThreads, pieces - 1), g = per_group(piece);
    words[p] = ld_nc(reinterpret_cast<const uint32_t*>(q.codes) + L::place(piece));
    scales[p] = ld_nc(static_cast<const uint16_t*>(q.scales) + g);
    zeros[p] = q.has_offsets() ? ld_nc(static_cast<const uint8_t*>(q.offsets) + g) : 8u;
  }
  grid_wait();
  grid_launch_dependents();
  Vec<uint32_t, 4>* out = reinterpret_cast<Vec<uint32_t, 4>*>(y) + first;
#pragma unroll
  for (int p = 0; p < kDequantizePieces; ++p) {
    if (first + p * kDequantizeThreads >= pieces) break;
    Vec<uint32_t, 4> w;
    L::template pairs<T>(words[p], scales[p], zeros[p], w.data);
    st_stream(out + p * kDequantizeThreads, w);
  }
}

template <class L, class T>
PK_DEVICE void dequantize_eights(const QuantPlanes& q, const DequantizePieces& d, T* y) {
  typename L::Raw raw[kDequantizePieces];
#pragma unroll
  for (int p = 0; p < kDequantizePieces; ++p) raw[p] = L::load(q.opaque(), d.source(p), d.at[p]);
  grid_wait();
  grid_launch_dependents();
#pragma unroll
  for (int p = 0; p < kDequantizePieces; ++p) {
    if (!d.in(p)) break;
    Vec<float, 8> w = L::decode(q.opaque(), raw[p], d.at[p]);
    if (d.row[p] < 0) {
#pragma unroll
      for (int i = 0; i < 8; ++i) w[i] = NAN;
    }
    store_eight(y + d.to[p], w);
  }
}

template <class L, class T>
PK_DEVICE void dequantize_ones(const QuantPlanes& q, const DequantizePieces& d, T* y) {
  grid_wait();
  grid_launch_dependents();
#pragma unroll
  for (int p = 0; p < kDequantizePieces; ++p) {
    if (!d.in(p)) break;
#pragma unroll 1
    for (int i = 0; i < 8 && d.at[p] + i < q.k; ++i) {
      const float w = d.row[p] < 0 ? NAN : L::one(q.opaque(), d.row[p], d.at[p] + i);
      st(y + d.to[p] + i, from_float<T>(w));
    }
  }
}

// pieces: 8 weights each, of all rows of y; magic, shift: the Divider of the pieces of a row, or in pairs of a group;
// n: rows of the matrix (at least 1). mode: a DequantizeMode; for all but the first y's rows are 16-byte aligned.
template <class L, class T>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize(const uint8_t* __restrict__ codes, const void* __restrict__ scales, const void* __restrict__ offsets,
               const void* __restrict__ ids, T* __restrict__ y, uint32_t pieces, uint32_t magic, int shift, int n,
               int k, int group, int groups, int tags, int id_type, int mode) {
  const QuantPlanes q{codes, scales, offsets, k, group, groups, tags};
  const uint32_t first = blockIdx.x * (kDequantizeThreads * kDequantizePieces) + threadIdx.x;
  const Divider divide{magic, shift};
  if constexpr (L::kNibbles && sizeof(T) == 2) {
    if (mode == kDequantizePairs) return dequantize_pairs<L>(q, first, pieces, divide, y);
  }
  if (id_type != kQuantNoIds) grid_wait();  // ids are written by kernels before; the planes are weights
  const uint32_t per_row = (static_cast<uint32_t>(k) + 7) / 8;
  DequantizePieces d;
  d.first = first;
  d.count = pieces;
#pragma unroll
  for (int p = 0; p < kDequantizePieces; ++p) {
    // Past the end the last piece is loaded again, without a branch around the load.
    const uint32_t piece = min(first + p * kDequantizeThreads, pieces - 1);
    const uint32_t r = divide(piece);
    d.at[p] = static_cast<int>(piece - r * per_row) * 8;
    d.to[p] = static_cast<int64_t>(r) * k + d.at[p];
    d.row[p] = matrix_row(ids, id_type, r, n);
  }
  if (mode != kDequantizeOnes)
    dequantize_eights<L>(q, d, y);
  else
    dequantize_ones<L>(q, d, y);
}

}  // namespace pk
