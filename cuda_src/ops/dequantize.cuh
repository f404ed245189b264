// y[r, k] = the weights of row r, or with ids of row ids[r], of a packed matrix [n, k]; one pass.
// A thread owns 4 pieces of 8 weights, a block's width apart, all loaded before the first is decoded: a warp
// reads 128 bytes of 4-bit codes and writes 512 bytes of 16-bit results at a time.
#pragma once
#include "ops/quant_formats.cuh"

namespace pk {

constexpr int kDequantizeThreads = 256;
constexpr int kDequantizePieces = 4;  // 4 loads of 4 bytes and as many scales in flight: 32 registers

enum QuantIds : int { kQuantNoIds = 0, kQuantIds32 = 1, kQuantIds64 = 2 };

template <class T>
PK_DEVICE void store_eight(void* y, int64_t at, const Vec<float, 8>& w) {
  constexpr int kStep = 16 / static_cast<int>(sizeof(T));
  T* out = static_cast<T*>(y) + at;
#pragma unroll
  for (int i = 0; i < 8; i += kStep) {
    Vec<float, kStep> part;
#pragma unroll
    for (int j = 0; j < kStep; ++j) part[j] = w[i + j];
    st_vec<T, kStep>(out + i, from_float<T>(part));
  }
}
PK_DEVICE void store_eight(void* y, int64_t at, const Vec<float, 8>& w, int type) {
  if (type == kQuantF32) store_eight<float>(y, at, w);
  if (type == kQuantF16) store_eight<half>(y, at, w);
  if (type == kQuantBf16) store_eight<bf16>(y, at, w);
}
PK_DEVICE void store_one(void* y, int64_t at, float w, int type) {
  if (type == kQuantF32) st(static_cast<float*>(y) + at, w);
  if (type == kQuantF16) st(static_cast<half*>(y) + at, from_float<half>(w));
  if (type == kQuantBf16) st(static_cast<bf16*>(y) + at, from_float<bf16>(w));
}

// The matrix row of output row r: -1 where an id is out of range.
PK_DEVICE int64_t matrix_row(const void* ids, int id_type, uint32_t r, int n) {
  if (id_type == kQuantNoIds) return r;
  const int64_t id = id_type == kQuantIds32 ? ld(static_cast<const int32_t*>(ids) + r)
                                            : ld(static_cast<const int64_t*>(ids) + r);
  return id >= 0 && id < n ? id : -1;
}

// pieces: 8 weights each, of all rows of y; n: rows of the matrix (at least 1). wide: y's rows are 16-byte aligned.
template <class L>
__global__ void __launch_bounds__(kDequantizeThreads)
    dequantize(const uint8_t* __restrict__ codes, const void* __restrict__ scales, const void* __restrict__ offsets,
               const void* __restrict__ ids, void* __restrict__ y, uint32_t pieces, int n, int k, int group, int groups,
               int tags, int out_type, int id_type, int wide) {
  const QuantPlanes q{codes, scales, offsets, k, group, groups, tags};
  const uint32_t per_row = (static_cast<uint32_t>(k) + 7) / 8;
  const uint32_t first = blockIdx.x * (kDequantizeThreads * kDequantizePieces) + threadIdx.x;
  if (id_type != kQuantNoIds) grid_wait();  // ids are written by kernels before; the planes are weights

  int64_t row[kDequantizePieces], to[kDequantizePieces];
  int at[kDequantizePieces];
#pragma unroll
  for (int p = 0; p < kDequantizePieces; ++p) {
    // Past the end the last piece is loaded again, without a branch around the load.
    const uint32_t piece = min(first + p * kDequantizeThreads, pieces - 1);
    const uint32_t r = piece / per_row;
    at[p] = static_cast<int>(piece - r * per_row) * 8;
    uint32_t kind = static_cast<uint32_t>(id_type);
    forget(kind);
    row[p] = matrix_row(ids, static_cast<int>(kind), r, n);
    to[p] = static_cast<int64_t>(r) * k + at[p];
  }
  if (q.fast() && wide) {
    typename L::Raw raw[kDequantizePieces];
#pragma unroll
    for (int p = 0; p < kDequantizePieces; ++p) raw[p] = L::load(q.opaque(), row[p] < 0 ? 0 : row[p], at[p]);
    grid_wait();
    grid_launch_dependents();
#pragma unroll
    for (int p = 0; p < kDequantizePieces; ++p) {
      if (first + p * kDequantizeThreads >= pieces) break;
      Vec<float, 8> w = L::decode(q.opaque(), raw[p], at[p]);
      if (row[p] < 0) {
#pragma unroll
        for (int i = 0; i < 8; ++i) w[i] = NAN;
      }
      // Else the compiler makes a copy of all these loops for every type, which takes it minutes for emulated fp8.
      uint32_t type = static_cast<uint32_t>(out_type);
      forget(type);
      store_eight(y, to[p], w, static_cast<int>(type));
    }
  } else {
    grid_wait();
    grid_launch_dependents();
#pragma unroll
    for (int p = 0; p < kDequantizePieces; ++p) {
      if (first + p * kDequantizeThreads >= pieces) break;
#pragma unroll 1
      for (int i = 0; i < 8 && at[p] + i < k; ++i) {
        uint32_t type = static_cast<uint32_t>(out_type);
        forget(type);
        const float w = row[p] < 0 ? NAN : L::one(q.opaque(), row[p], at[p] + i);
        store_one(y, to[p] + i, w, static_cast<int>(type));
      }
    }
  }
}

}  // namespace pk
