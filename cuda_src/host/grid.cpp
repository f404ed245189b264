// Between blocks: flags, grid barriers and programmatic dependent launch.
#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {
namespace {

// The grid's blocks and those of every grid before it have returned, and what they wrote is visible.
void try_complete(Worker* w, Grid* g) {
  if (g->complete || g->finished < g->blocks || (g->previous && !g->previous->complete)) return;
  g->complete = true;
  w->wake_all(g->waiting);
}

void trigger(Fiber* f) {
  if (f->triggered) return;
  f->triggered = true;
  if (--f->block->untriggered == 0) ++f->block->grid->triggered;
}

}  // namespace

void grid_thread_exit(Fiber* f) {
  Grid* g = f->block->grid;
  if (g->interleaved) trigger(f);
  if (g->barrier_arrived > 0) {
    const Fiber* waits = g->barrier_waiting.head;
    fail_worker(f->block->worker,
                "a thread returned while " + std::to_string(g->barrier_arrived) +
                    " threads wait in this grid_barrier",
                f, waits->file, waits->line);
  }
}

void grid_block_exit(Block* b) {
  Grid* g = b->grid;
  if (!g->interleaved) return;
  ++g->finished;
  --g->triggered;  // it now counts as finished
  try_complete(b->worker, g);
  if (g->next) try_complete(b->worker, g->next);
}

}  // namespace pk::host

using namespace pk::host;

void pkh_grid_wait(const char* file, int line) {
  Fiber* f = current();
  Grid* g = f->block->grid;
  if (g->previous && !g->previous->complete) {
    g->previous->waiting.push(f);
    fiber_suspend(f, "grid_wait", file, line);
  }
  f->waited = true;
}

void pkh_launch_dependents(void) {
  Fiber* f = current();
  if (!f->block->grid->interleaved) return;
  trigger(f);
  if (!f->block->worker->pauses) return;
  f->block->worker->wake(f);  // a place for dependents to start before this thread goes on
  fiber_suspend(f, "grid_launch_dependents", "", 0);
}

void pkh_threadfence(int scope) {
  Fiber* f = current();
  if (f->block->worker->check) check_fence(f, scope);
}

void pkh_fence_proxy_async(void) {
  Fiber* f = current();
  for (auto& m : f->block->mbarriers) {
    if (m->initialiser == f) m->fenced = true;
  }
  if (f->block->worker->check) check_proxy_fence(f);
}

namespace {
void flag_access(Fiber* f, const uint32_t* p, int writes, int release, int acquire, const void* pc,
                 const char* file, int line) {
  if (reinterpret_cast<uintptr_t>(p) % 4 != 0)
    pkh_fail(file, line, "a flag at %p, which is not aligned", (const void*)p);
  if (writes) ++f->block->worker->progress;
  if (f->block->worker->check) check_atomic(f, p, 4, writes, release, acquire, pc, file, line);
}
}  // namespace

void pkh_flag_access(const uint32_t* p, int release, int acquire, const char* file, int line) {
  flag_access(current(), p, release, release, acquire, PKH_PC, file, line);
}

void pkh_atomic(const void* p, uint32_t bytes, const char* file, int line) {
  Fiber* f = current();
  if (f->block->worker->check) check_atomic(f, p, bytes, 1, 0, 0, PKH_PC, file, line);
}

// The second load of an unchanged flag is taken for a loop that waits.
void pkh_flag_load(const uint32_t* p, uint32_t value, const char* file, int line) {
  Fiber* f = current();
  if (f->spin_address == p && f->spin_value == value) {
    poll(f, p, value, "a loop around ld_acquire", file, line);
  } else {
    f->spin_address = p;
    f->spin_value = value;
  }
}

void pkh_spin_until_ge(const uint32_t* p, uint32_t value, const char* file, int line) {
  Fiber* f = current();
  const void* pc = PKH_PC;
  for (;;) {
    flag_access(f, p, 0, 0, 1, pc, file, line);
    const uint32_t seen = __atomic_load_n(p, __ATOMIC_ACQUIRE);
    if (seen >= value) return;
    poll(f, p, seen, "spin_until_ge", file, line);
  }
}

void pkh_grid_barrier(uint32_t* counter, const char* file, int line) {
  Fiber* f = current();
  Grid* g = f->block->grid;
  f->pc = PKH_PC;
  if (!g->cooperative) pkh_fail(file, line, "grid_barrier needs a cooperative launch");
  if (f->block->worker->check) check_atomic(f, counter, 4, 1, 1, 1, PKH_PC, file, line);
  if (g->barrier_arrived == 0) {
    g->barrier_counter = counter;
  } else if (g->barrier_counter != counter) {
    pkh_fail(file, line, "grid_barrier: this thread passes another counter than those that wait");
  }
  if (*counter != 0 && *counter != 0x80000000u) {
    pkh_fail(file, line,
             "grid_barrier: the counter is %#x; it must be zero before its first use and nobody else's",
             *counter);
  }
  if (++g->barrier_arrived < g->blocks * g->threads) {
    g->barrier_waiting.push(f);
    fiber_suspend(f, "grid_barrier", file, line);
    return;
  }
  g->barrier_arrived = 0;
  Worker* w = f->block->worker;
  if (w->check) check_grid_barrier(w, g);
  w->wake_all(g->barrier_waiting);
}
