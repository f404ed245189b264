// PK_VARIANT(kernel<args>): the one exported symbol of a variant library, pk_entry(). What it returns is the
// backend's business: the kernel's host stub for cudaLaunchKernelExC, or the host backend's entry function.
#pragma once
#include "core/target.cuh"

#include PK_EXPORT_HEADER
