// Clusters: the cluster barrier in two halves, and addresses in another block's shared memory.
#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {
namespace {

void try_release(Worker* w, Cluster* c) {
  if (c->arrived == 0 || c->arrived < c->live_threads) return;
  c->arrived = 0;
  ++c->phase;
  if (w->check) check_cluster_phase(c);
  w->wake_all(c->waiting);
}

}  // namespace

// A thread that has returned is not waited for.
void cluster_thread_exit(Fiber* f) {
  Cluster* c = f->block->cluster;
  if (f->cluster_arrived && f->cluster_phase == c->phase) --c->arrived;
  try_release(f->block->worker, c);
}

}  // namespace pk::host

using namespace pk::host;

void pkh_cluster_arrive(const char* file, int line) {
  Fiber* f = current();
  Cluster* c = f->block->cluster;
  f->pc = PKH_PC;
  if (f->cluster_arrived) pkh_fail(file, line, "cluster_arrive twice without cluster_wait");
  f->cluster_arrived = true;
  f->cluster_phase = c->phase;
  if (f->block->worker->check) check_cluster_arrive(f);
  ++c->arrived;
  try_release(f->block->worker, c);
}

void pkh_cluster_wait(const char* file, int line) {
  Fiber* f = current();
  Cluster* c = f->block->cluster;
  if (!f->cluster_arrived) pkh_fail(file, line, "cluster_wait without cluster_arrive");
  while (c->phase == f->cluster_phase) {
    c->waiting.push(f);
    fiber_suspend(f, "cluster_wait", file, line);
  }
  f->cluster_arrived = false;
  if (f->block->worker->check) check_cluster_wait(f);
}

void* pkh_map_shared_rank(const void* p, uint32_t rank, const char* file, int line) {
  Fiber* f = current();
  Block* b = block_of(f->block->worker, p);
  if (b == nullptr || b->cluster != f->block->cluster) {
    pkh_fail(file, line, "map_shared_rank of an address that is not in shared memory");
  }
  if (rank >= f->block->cluster_n) {
    pkh_fail(file, line, "block %u of a cluster of %u", rank, f->block->cluster_n);
  }
  const ptrdiff_t blocks = static_cast<ptrdiff_t>(rank) - static_cast<ptrdiff_t>(b->rank);
  return const_cast<unsigned char*>(static_cast<const unsigned char*>(p)) +
         blocks * static_cast<ptrdiff_t>(kArenaBytes);
}
