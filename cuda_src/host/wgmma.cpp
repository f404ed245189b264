// wgmma. A thread's issue only leaves its accumulators' address; the product is computed once all 128 threads
// of the warpgroup have issued it: at once (eager), when a thread waits for it and nothing else can run
// (lazy), or either.
#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {
namespace {

void execute(Fiber* f, WgmmaTask& t) {
  Block* b = f->block;
  require_operands(b, t);
  t.op(t.acc, b->smem, t.desc_a, t.desc_b, t.n, t.scale_d);
  t.done = true;
  ++b->worker->progress;
}

// In order: each reads the accumulators that the one before has written.
void execute_through(Fiber* f, Warpgroup& group, uint32_t end) {
  for (auto& t : group.ops) {
    if (t->index >= end || t->arrived < 128) break;
    if (!t->done) execute(f, *t);
  }
  while (!group.ops.empty() && group.ops.front()->done) {
    group.ops.erase(group.ops.begin());
    ++group.base;
  }
}

Warpgroup& group_of(Fiber* f) { return f->block->warpgroups[f->linear / 128]; }

}  // namespace

// Called when the checker looks at the issue, else when the product is computed, by whichever thread that is.
void require_operands(const Block* b, const WgmmaTask& t) {
  const char* problem = wgmma_desc_problem(t.desc_a, 64, b->smem_used);
  if (problem != nullptr) pkh_fail(t.file, t.line, "wgmma, operand A: %s", problem);
  problem = wgmma_desc_problem(t.desc_b, t.n, b->smem_used);
  if (problem != nullptr) pkh_fail(t.file, t.line, "wgmma, operand B: %s", problem);
}

}  // namespace pk::host

using namespace pk::host;

void pkh_wgmma(float* acc, uint64_t desc_a, uint64_t desc_b, int n, int scale_d, WgmmaOp op, const char* file,
               int line) {
  Fiber* f = current();
  Worker* w = f->block->worker;
  if (f->linear / 128 * 128 + 128 > static_cast<uint32_t>(f->block->threads)) {
    pkh_fail(file, line, "wgmma needs a whole warpgroup of 128 threads; the block has %d threads",
             f->block->threads);
  }
  Warpgroup& group = group_of(f);
  const uint32_t index = f->wgmma_issued++;
  if (index - group.base == group.ops.size()) {
    auto t = std::make_unique<WgmmaTask>();
    t->desc_a = desc_a;
    t->desc_b = desc_b;
    t->n = n;
    t->scale_d = scale_d;
    t->op = op;
    t->pc = PKH_PC;
    t->file = file;
    t->line = line;
    t->index = index;
    t->late = w->async_order == PK_ASYNC_LAZY || (w->async_order == PK_ASYNC_RANDOM && w->draw() % 2);
    group.ops.push_back(std::move(t));
  }
  WgmmaTask& t = *group.ops[index - group.base];
  if (t.desc_a != desc_a || t.desc_b != desc_b || t.scale_d != scale_d || t.n != n || t.line != line) {
    pkh_fail(file, line,
             "wgmma: descriptors, scale or place differ between the threads of a warpgroup (others at %s:%d)",
             base_name(t.file), t.line);
  }
  t.acc[f->linear % 128] = acc;
  if (w->check) check_wgmma_issue(f, t, acc);
  if (++t.arrived < 128) return;
  if (t.late && group.waiting.count == 0) return;
  execute_through(f, group, index + 1);
  w->wake_all(group.waiting);
}

void pkh_wgmma_fence(void) {
  Fiber* f = current();
  if (f->block->worker->check) check_wgmma_fence(f);
}

void pkh_wgmma_commit(void) {
  Fiber* f = current();
  f->wgmma_groups.push_back(f->wgmma_issued);
}

void pkh_wgmma_wait(int pending, const char* file, int line) {
  Fiber* f = current();
  Warpgroup& group = group_of(f);
  const auto keep = static_cast<size_t>(pending);
  if (f->wgmma_groups.size() <= keep) return;
  const uint32_t end = f->wgmma_groups[f->wgmma_groups.size() - keep - 1];
  f->wgmma_groups.erase(f->wgmma_groups.begin(), f->wgmma_groups.end() - static_cast<ptrdiff_t>(keep));
  bool yielded = false;
  while (group.base < end) {
    const size_t last = end - 1 - group.base;
    if (last >= group.ops.size() || group.ops[last]->arrived < 128) {
      group.waiting.push(f);
      fiber_suspend(f, "wgmma_wait", file, line);
    } else if (group.ops[last]->late && !yielded) {
      yielded = true;  // whoever may touch the operands by now does so first
      poll(f, &group, group.base, "wgmma_wait", file, line);
    } else {
      execute_through(f, group, end);
    }
  }
  if (f->block->worker->check) check_wgmma_done(f, end);
}
