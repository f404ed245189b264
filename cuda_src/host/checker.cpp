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
void check_load_issue(Fiber*, LoadOp&) {}
void check_load_done(Worker*, LoadOp&, size_t) {}
void check_store_issue(Fiber*, StoreOp&) {}
void check_store_done(Fiber*, StoreOp&, bool) {}
void check_store_left(Fiber*, StoreOp&) {}
void check_mbarrier_init(Fiber*, Block*, Mbarrier*, const void*) {}
void check_mbarrier_arrive(Fiber*, Mbarrier*) {}
void check_mbarrier_phase(Mbarrier*) {}
void check_mbarrier_wait(Fiber*, Mbarrier*) {}
void check_wgmma_fence(Fiber*) {}
void check_wgmma_issue(Fiber*, WgmmaTask&, float*) {}
void check_wgmma_execute(Fiber*, WgmmaTask&) {}
void check_wgmma_done(Fiber*, uint32_t) {}
void check_cluster_arrive(Fiber*) {}
void check_cluster_phase(Cluster*) {}
void check_cluster_wait(Fiber*) {}
void check_proxy_fence(Fiber*) {}
void check_matrix(Warp*, const Collective&) {}
void check_grid_barrier(Worker*, Grid*) {}
void check_fence(Fiber*, int) {}
void check_atomic(Fiber*, const void*, uint32_t, int, int, const void*, const char*, int) {}
}  // namespace pk::host

void pkh_relocate_map(void*) {}
