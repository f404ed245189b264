// What the runtime tells the checker. Called only where Worker::check is set.
#pragma once
#include "host/runtime.h"

namespace pk {
namespace host __attribute__((visibility("hidden"))) {

void check_block_begin(Block* b);
void check_block_end(Block* b);
void check_thread_exit(Fiber* f);
void check_barrier(Block* b, int id, const Barrier& bar, Fiber* last);
uint32_t check_copy_issue(Fiber* f, const CopyOp& op);
void check_copy_done(Fiber* f, const CopyOp& op);
void check_warp(Warp* w, CollectiveKind kind, uint32_t lanes);

void check_matrix(Warp* w, const Collective& c);
void check_grid_barrier(Worker* w, Grid* g);
void check_fence(Fiber* f, int scope);
void check_atomic(Fiber* f, const void* p, uint32_t bytes, int release, int acquire, const void* pc, const char* file,
                  int line);

}  // namespace host
}  // namespace pk
