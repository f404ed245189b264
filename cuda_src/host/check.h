// What the runtime tells the checker. Called only where Worker::check is set.
#pragma once
#include "host/runtime.h"

#pragma GCC visibility push(hidden)
namespace pk::host {

void check_block_begin(Block* b);
void check_block_end(Block* b);
void check_barrier(Block* b, int id, const Barrier& bar, Fiber* last);
void check_named_arrive(Fiber* f, int id);
uint32_t check_copy_issue(Fiber* f, const CopyOp& op, const char* file, int line);
void check_copy_commit(Fiber* f);
void check_copy_done(Fiber* f, const CopyOp& op);
void check_warp(Warp* w, CollectiveKind kind, uint32_t lanes);

void check_load_issue(Fiber* f, LoadOp& op);
void check_store_issue(Fiber* f, StoreOp& op);
void check_store_done(Fiber* f, StoreOp& op);
void check_store_left(Fiber* f, StoreOp& op);  // its thread returns without waiting for it
void check_mbarrier_init(Fiber* f, Block* b, Mbarrier* m, const void* pc);
void check_mbarrier_arrive(Fiber* f, Block* b, Mbarrier* m);
void check_mbarrier_phase(Block* b, Mbarrier* m);
void check_mbarrier_wait(Fiber* f, Block* b, Mbarrier* m);
void check_wgmma_fence(Fiber* f);
void check_wgmma_issue(Fiber* f, WgmmaTask& t, float* acc);
void check_wgmma_done(Fiber* f, uint32_t end);  // those of this thread before `end`
void check_cluster_arrive(Fiber* f);
void check_cluster_phase(Cluster* c);
void check_cluster_wait(Fiber* f);
void check_proxy_fence(Fiber* f);
void check_matrix(Warp* w, const Collective& c);
void check_grid_barrier(Worker* w, Grid* g);
void check_fence(Fiber* f, int scope);
void check_atomic(Fiber* f, const void* p, uint32_t bytes, int writes, int release, int acquire,
                  const void* pc, const char* file, int line);

}  // namespace pk::host
#pragma GCC visibility pop
