// What a kernel may see of the thread it runs as, and how it reaches the runtime. Kernel code uses it through
// the CUDA names in builtins.h only.
#pragma once
#include <stddef.h>
#include <stdint.h>

#include "host/abi.h"

#ifndef PK_DEVICE
#define PK_DEVICE inline __attribute__((always_inline))
#endif

// For code that must not be instrumented: what it touches belongs to the runtime, not to the kernel.
#if defined(__clang__)
#define PK_NOSAN \
  __attribute__((noinline, disable_sanitizer_instrumentation))  // no_sanitize spares no atomics there
#else
#define PK_NOSAN __attribute__((noinline, no_sanitize("thread")))
#endif

// Call sites, for messages: the line in the kernel that waits or fails.
#define PK_HERE const char *file_ = __builtin_FILE(), int line_ = __builtin_LINE()

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

namespace pk::host {

struct BlockView {
  uint3 index;
  dim3 block_dim, grid_dim;
  unsigned char* smem;       // this block's shared memory
  uint32_t smem_used;        // bytes of it the kernel has claimed so far
  uint32_t smem_limit;       // bytes of it the kernel may claim
  uint32_t rank, cluster_n;  // place in the cluster, blocks in it
  uint32_t copies_now;       // cp.async may copy at once and leave no trace: eager order, no checker
};

struct ThreadView {
  uint3 index;
  BlockView* view;
  uint32_t lane;      // linear index % 32
  uint32_t linear;    // x fastest
  uint32_t failures;  // atomic operations in a row that did not do what the thread may be waiting for
};

}  // namespace pk::host

extern "C" {
// The running thread. A fiber never moves to another OS thread, and this is the only word of static TLS that
// kernels touch, so the initial-exec model works even for a library that is loaded late.
extern __thread pk::host::ThreadView* pkh_current __attribute__((tls_model("initial-exec")));

void pkh_fail(const char* file, int line, const char* format, ...)
    __attribute__((noreturn, format(printf, 3, 4)));
void pkh_claim_smem(uint32_t bytes, const char* file, int line);
void* pkh_relocate(const void* p);  // where the checker keeps its copy of what p points into
int pkh_run(const PkLaunch* launch, void (*thunk)(const void*), const void* closure, size_t bytes, int nargs,
            int checked);
}

namespace pk::host {

// Within one kernel call the answer never changes. On x86-64 the compiler is told so (the asm has no side
// effects), which also keeps the checker's instrumentation away from it.
PK_DEVICE ThreadView* self() {
#if defined(__x86_64__)
  ThreadView* t;
  asm("movq pkh_current@gottpoff(%%rip), %0\n\tmovq %%fs:(%0), %0" : "=r"(t));
  return t;
#else
  return pkh_current;
#endif
}

PK_DEVICE unsigned char* claim_smem(size_t bytes, PK_HERE) {
  BlockView* b = self()->view;
  if (__builtin_expect(bytes > b->smem_used, 0)) pkh_claim_smem(static_cast<uint32_t>(bytes), file_, line_);
  return b->smem;
}

}  // namespace pk::host
