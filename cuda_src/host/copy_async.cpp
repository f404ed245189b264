// cp.async. Eager copies when it is issued, lazy when a wait (or the thread's exit) forces it, random either
// way: a missing wait shows up as NaN or as data that changed too early.
#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {
namespace {

void copy(const CopyOp& op) {
  memcpy(op.dst, op.src, static_cast<size_t>(op.source_bytes));
  memset(static_cast<char*>(op.dst) + op.source_bytes, 0, static_cast<size_t>(op.bytes - op.source_bytes));
}

}  // namespace

void copies_thread_exit(Fiber* f) {
  if (!f->async) return;
  for (const CopyOp& op : f->async->copies.ops) {
    if (op.dst != nullptr) copy(op);
  }
  f->async->copies.clear();
}

}  // namespace pk::host

void pkh_cp_async(void* dst, const void* src, int bytes, int source_bytes, const char* file, int line) {
  using namespace pk::host;
  Fiber* f = current();
  Worker* w = f->block->worker;
  const auto offset = static_cast<size_t>(static_cast<unsigned char*>(dst) - f->block->smem);
  if (offset + static_cast<size_t>(bytes) > f->block->smem_used) {
    pkh_fail(file, line, "cp.async: the destination is not in the %u bytes of this block's shared memory",
             f->block->smem_used);
  }
  const uintptr_t misaligned =
      (reinterpret_cast<uintptr_t>(dst) | (source_bytes ? reinterpret_cast<uintptr_t>(src) : 0)) %
      static_cast<uintptr_t>(bytes);
  if (misaligned != 0)
    pkh_fail(file, line, "cp.async of %d bytes: both addresses must be aligned to that", bytes);
  CopyOp op{dst, src, bytes, source_bytes, PKH_PC, 0};
  if (w->check) op.id = check_copy_issue(f, op, file, line);
  const bool now = w->async_order == PK_ASYNC_EAGER || (w->async_order == PK_ASYNC_RANDOM && w->draw() % 2);
  if (now) {
    copy(op);
    op.dst = nullptr;  // done; its place in the group stays
  }
  f->queues().copies.ops.push_back(op);
}

void pkh_cp_async_commit(void) {
  using namespace pk::host;
  Fiber* f = current();
  f->queues().copies.commit();
  if (f->block->worker->check) check_copy_commit(f);
}

void pkh_cp_async_wait(int pending) {
  using namespace pk::host;
  Fiber* f = current();
  if (!f->async) return;
  OpQueue<CopyOp>& queue = f->async->copies;
  const auto keep = static_cast<size_t>(pending);
  const size_t due = queue.due(keep);
  for (size_t i = 0; i < due; ++i) {
    if (queue.ops[i].dst != nullptr) copy(queue.ops[i]);
    if (f->block->worker->check) check_copy_done(f, queue.ops[i]);
  }
  queue.retire(due, keep);
}
