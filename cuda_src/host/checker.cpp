// Placeholder until the checker lands: no launch runs under it.
#include "host/check.h"

namespace pk::host {
void check_block_begin(Block*) {}
void check_block_end(Block*) {}
void check_thread_exit(Fiber*) {}
void check_barrier(Block*, int, const Barrier&, Fiber*) {}
uint32_t check_copy_issue(Fiber*, const CopyOp&) { return 0; }
void check_copy_done(Fiber*, const CopyOp&) {}
void check_warp(Warp*, CollectiveKind, uint32_t) {}
void check_matrix(Warp*, const Collective&) {}
void check_grid_barrier(Worker*, Grid*) {}
void check_fence(Fiber*, int) {}
void check_atomic(Fiber*, const void*, uint32_t, int, int, const void*, const char*, int) {}
bool retire_load(Worker*) { return false; }
void stores_thread_exit(Fiber*) {}
void cluster_thread_exit(Fiber*) {}
}  // namespace pk::host

void pkh_claim_smem(uint32_t bytes, const char* file, int line) {
  using namespace pk::host;
  BlockView* b = current()->view;
  if (bytes > b->smem_limit) pkh_fail(file, line, "%u bytes of static shared memory; at most %zu are allowed", bytes, kStaticSmem);
  memset(b->smem + b->smem_used, 0xff, bytes - b->smem_used);
  b->smem_used = bytes;
}
void pkh_dynamic_smem(uint32_t bytes, const char* file, int line) {
  pkh_fail(file, line, "the kernel needs %u bytes of dynamic shared memory, the launch gives %u", bytes,
           pk::host::current()->view->smem_used);
}
void pkh_relocate_map(void*) {}
