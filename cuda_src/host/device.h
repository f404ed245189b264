// What core/target.cuh includes when the compiler is not nvcc: the device dialect, run by the host runtime.
#pragma once
#include "host/hopper.h"
// Number types and the arithmetic of the tensor cores.
#include "host/types.h"
#include "host/mma.h"
// Collectives that need both.
#include "host/tensor.h"
