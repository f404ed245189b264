// Which lane holds what: the fragments of mma.sync, the rows that ldmatrix wants, and the swizzles that keep
// both free of bank conflicts.
//
// mma_m16n8k16, lane = 4 g + t (g = lane / 4, t = lane % 4), two 16-bit values per register, low half first:
//   a[0] (row g,     k 2t, 2t+1)      a[1] (row g + 8, k 2t, 2t+1)
//   a[2] (row g,     k 2t+8, 2t+9)    a[3] (row g + 8, k 2t+8, 2t+9)
//   b[0] (k 2t, 2t+1, column g)       b[1] (k 2t+8, 2t+9, column g)
//   d[0], d[1] (row g, columns 2t, 2t+1)   d[2], d[3] (row g + 8, the same columns)
// mma_m16n8k32 (8-bit): as above with four values per register, k 4t .. 4t+3, and 16 further in a[2], a[3], b[1].
// mma_m16n8k8_tf32: one value per register, k t, and 4 further in a[2], a[3], b[1].
#pragma once
#include "core/warp.cuh"

namespace pk {

// Row and column within the 16 x 8 tile of accumulator register i (0 to 3).
PK_DEVICE int mma_row(int lane, int i) { return lane / 4 + 8 * (i / 2); }
PK_DEVICE int mma_col(int lane, int i) { return 2 * (lane % 4) + i % 2; }

// Row and column within the 64 x N tile of wgmma's accumulator register i, for thread t of the warpgroup.
PK_DEVICE int wgmma_row(int t, int i) { return 16 * (t / 32) + t % 32 / 4 + 8 * (i % 4 / 2); }
PK_DEVICE int wgmma_col(int t, int i) { return 8 * (i / 4) + 2 * (t % 4) + i % 2; }

// ldmatrix<4> of a 16 x 16 tile of 16-bit values stored row by row gives the fragment a[4] when lane l passes
// the address of (row ldm_a_row(l), column ldm_a_col(l)).
PK_DEVICE int ldm_a_row(int lane) { return lane % 16; }
PK_DEVICE int ldm_a_col(int lane) { return lane / 16 * 8; }

// ldmatrix<4> of B stored [n, k] (k contiguous), 16 columns n by 16 k, gives {b of n 0..7}[2], {b of n 8..15}[2].
PK_DEVICE int ldm_b_row(int lane) { return lane / 16 * 8 + lane % 8; }
PK_DEVICE int ldm_b_col(int lane) { return lane / 8 % 2 * 8; }

// ldmatrix<4, true> of B stored [k, n] (n contiguous), 16 k by 16 columns n: the same registers as above.
PK_DEVICE int ldm_bt_row(int lane) { return lane % 16; }
PK_DEVICE int ldm_bt_col(int lane) { return lane / 16 * 8; }

// Where 16-byte chunk c of row r lies in a tile whose rows hold kChunks chunks (2, 4, 8 or a multiple of 8):
// chunks are permuted within a row so that the eight rows an ldmatrix phase touches fall into different
// banks. Returns the chunk's index in the tile; one row of 8 chunks is TMA's and wgmma's 128-byte swizzle.
template <int kChunks>
PK_DEVICE int swizzle_chunk(int r, int c) {
  static_assert(kChunks == 2 || kChunks == 4 || kChunks % 8 == 0,
                "2, 4 or a multiple of 8 chunks of 16 bytes");
  if constexpr (kChunks == 2) {
    return r * 2 + (c ^ (r >> 2 & 1));
  } else if constexpr (kChunks == 4) {
    return r * 4 + (c ^ (r >> 1 & 3));
  } else {
    return r * kChunks + (c ^ (r & 7));
  }
}

}  // namespace pk
