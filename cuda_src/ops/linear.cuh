// The kernels of linear and gated_linear. Which one runs is decided by plan() in pykern/ops/linear.py.
#pragma once
#include "ops/linear_f32.cuh"
#include "ops/linear_mma.cuh"
#include "ops/linear_skinny_mma.cuh"
