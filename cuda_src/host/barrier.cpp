// __syncthreads and its voting forms, and named barriers.
#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {
namespace {

const char* barrier_name(int id) { return id == 0 ? "__syncthreads" : "a named barrier"; }

bool complete(const Block* b, const Barrier& bar) {
  return bar.arrived > 0 && bar.arrived >= (bar.expected ? bar.expected : b->live);
}

// Wakes everyone who waits. `last` came last and does not sleep; null when a thread's exit or an arrival
// without a wait completed the barrier.
void release(Block* b, int id, Fiber* last) {
  Barrier& bar = b->barriers[id];
  bar.result = bar.kind == kCountTrue ? bar.trues
               : bar.kind == kAllTrue ? bar.trues == bar.arrived
                                      : bar.trues > 0;
  if (b->worker->check) check_barrier(b, id, bar, last);
  bar.arrived = bar.trues = bar.expected = 0;
  b->worker->wake_all(bar.waiting);
}

void arrive(Fiber* f, int id, int kind, int expected, const char* file, int line) {
  Barrier& bar = f->block->barriers[id];
  if (bar.arrived == 0) {
    bar.kind = kind;
    bar.file = file;
    bar.line = line;
    bar.expected = expected;
  } else if (id == 0 &&
             (bar.line != line || bar.kind != kind || (bar.file != file && strcmp(bar.file, file) != 0))) {
    pkh_fail(file, line,
             "barrier divergence: this thread is in %s here while %d of its block wait in one at %s:%d",
             barrier_name(id), bar.arrived, base_name(bar.file), bar.line);
  } else if (bar.expected != expected) {
    pkh_fail(file, line, "named barrier %d: this thread expects %d threads, those at %s:%d expect %d", id,
             expected, base_name(bar.file), bar.line, bar.expected);
  }
  ++bar.arrived;
}

}  // namespace

// Threads that have returned no longer count at __syncthreads, as on Volta and later.
void barrier_thread_exit(Fiber* f) {
  Block* b = f->block;
  if (b->live > 0 && b->barriers[0].arrived > 0 && complete(b, b->barriers[0])) release(b, 0, nullptr);
}

}  // namespace pk::host

int pkh_syncthreads(int kind, int predicate, const char* file, int line) {
  using namespace pk::host;
  Fiber* f = current();
  f->pc = PKH_PC;
  Barrier& bar = f->block->barriers[0];
  arrive(f, 0, kind, 0, file, line);
  bar.trues += predicate;
  if (complete(f->block, bar)) {
    release(f->block, 0, f);
  } else {
    bar.waiting.push(f);
    fiber_suspend(f, "__syncthreads", file, line);
  }
  return bar.result;  // nobody can complete the next one before all have read this
}

void pkh_named_barrier(int id, int threads, int wait, const char* file, int line) {
  using namespace pk::host;
  Fiber* f = current();
  f->pc = PKH_PC;
  if (id < 0 || id > 15) pkh_fail(file, line, "named barrier %d: the id is 0 to 15", id);
  if (threads <= 0 || threads % 32 != 0 || threads > ((f->block->threads + 31) & ~31)) {
    pkh_fail(file, line, "named barrier %d: %d threads; a multiple of 32 up to the block's %d is allowed", id,
             threads, f->block->threads);
  }
  Barrier& bar = f->block->barriers[id];
  arrive(f, id, kPlain, threads, file, line);
  if (!wait && f->block->worker->check) check_named_arrive(f, id);
  if (complete(f->block, bar)) {
    release(f->block, id, wait ? f : nullptr);
  } else if (wait) {
    bar.waiting.push(f);
    fiber_suspend(f, "a named barrier", file, line);
  }
}
