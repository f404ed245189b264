// The address of the host stub is what cudaLaunchKernelExC wants. Not compiled by NVRTC, which has no host side.
#pragma once

#define PK_VARIANT(...)                                                      \
  extern "C" __attribute__((visibility("default"))) const void* pk_entry() { \
    return reinterpret_cast<const void*>(&__VA_ARGS__);                      \
  }
