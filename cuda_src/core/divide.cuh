// Division by a number that only the host knows: a high product and a shift, where a division takes a dozen
// instructions. The two numbers come from pykern.plan.divider.
//
// Source: T. Granlund, P. Montgomery, Division by Invariant Integers using Multiplication (1994). With s =
// ceil(log2 d) - 1 and m = ceil(2^(32 + s) / d) the product errs by less than 2^(s + 1) n < 2^(32 + s) for n < 2^31.
#pragma once
#include "core/target.cuh"

namespace pk {

struct Divider {
  uint32_t magic;  // 0: the divisor is 1
  int shift;
  // n / d for n < 2^31.
  PK_DEVICE uint32_t operator()(uint32_t n) const { return magic == 0 ? n : __umulhi(n, magic) >> shift; }
};

}  // namespace pk
