// Single instructions of the special function unit that CUDA's own names do not reach.
#pragma once

namespace pk {

// 2^x to about 2 ulp, denormal results as 0: one instruction, where exp2f takes four to keep denormals.
PK_DEVICE float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace pk
