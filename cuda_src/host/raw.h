// What raw kernels get on the host beside the dialect, since NVRTC has it built in: printf and assert.
#pragma once
#include <cassert>
#include <cstdio>

#include "host/device.h"

#ifdef __GLIBC__
// An assertion that fails ends the launch with its words, as on a GPU; the C library's would end the process. Hidden:
// it is this variant's own, whatever else the process has loaded.
extern "C" __attribute__((visibility("hidden"))) inline void __assert_fail(const char* what, const char* file,
                                                                           unsigned line, const char*) noexcept {
  pkh_fail(file, static_cast<int>(line), "assertion `%s` failed", what);
}
#endif
