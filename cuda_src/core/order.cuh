// A float and where it stands as one 64-bit word, so that the largest word is the largest value and ties go to the
// lowest index: the value's bits made monotone above, the index's complement below. Words of a row are all different,
// so a maximum over them, or a threshold on them, does not depend on the order of the comparisons.
#pragma once
#include "core/target.cuh"

namespace pk {

// Larger floats give larger keys; -0 and 0 are equal; NaN alone gives 0, below -inf.
PK_DEVICE uint32_t order_key(float x) {
  if (x != x) return 0;
  const uint32_t u = __float_as_uint(x == 0.0f ? 0.0f : x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
PK_DEVICE uint64_t order_word(float x, uint32_t index) { return static_cast<uint64_t>(order_key(x)) << 32 | ~index; }

// The index in a word; 0 where there is no number, as in a row of nothing but NaN.
PK_DEVICE int64_t order_index(uint64_t word) { return word >> 32 ? ~static_cast<uint32_t>(word) : 0u; }

}  // namespace pk
