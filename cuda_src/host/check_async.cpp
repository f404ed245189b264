// Asynchronous operations under the checker: what they touch is recorded when they are issued, as an access
// that is complete only once its thread has waited for it, or a thread has waited on the mbarrier it
// completes on.
#include <algorithm>

#include "host/checker.h"

namespace pk::host {
namespace {

uint32_t new_op(Fiber* f, const char* what) {
  Check* c = check_for(f);
  AsyncOp op;
  op.what = what;
  op.block = check_of(f->block)->uid;
  op.thread = f->linear;
  c->ops.push_back(op);
  return static_cast<uint32_t>(c->ops.size() - 1);
}

void complete(Fiber* f, uint32_t id) {
  AsyncOp& op = check_for(f)->ops[id];
  if (op.done) return;
  const ThreadCheck& t = check_of(f);
  op.done = true;
  op.era = check_of(f->block)->era;
  op.clock = t.clock;
  op.fences = t.proxy_fences;
}

Access access(Fiber* f, const void* p, uint32_t bytes, int flags, const void* pc, const char* file,
              int line) {
  Access a{f, reinterpret_cast<uintptr_t>(p), bytes, static_cast<uint8_t>(flags), pc};
  a.file = file;
  a.line = line;
  return a;
}

// mbarriers are initialised through the generic proxy and then used by the TMA unit.
void require_fenced(Fiber* f, const Mbarrier* m, const LoadOp& op) {
  if (m->fenced) return;
  Access a = access(f, m->address, 8, 0, op.pc, op.file, op.line);
  check_for(f)->report("missing_proxy_fence", a, "shared", static_cast<int64_t>(smem_u32(m->address)),
                       "a TMA load completes on an mbarrier whose thread called neither mbar_fence_init nor "
                       "fence_proxy_async after mbar_init");
}

}  // namespace

// ---- cp.async: one operation for each group of a thread
uint32_t check_copy_issue(Fiber* f, const CopyOp& op, const char* file, int line) {
  Check* c = check_for(f);
  ThreadCheck& t = check_of(f);
  if (t.copy_op == 0) t.copy_op = new_op(f, "a cp.async");
  if (op.source_bytes > 0) {
    const Access read = access(f, op.src, static_cast<uint32_t>(op.source_bytes), 0, op.pc, file, line);
    c->log(read, false, kLogCopyLoad);
    c->touch(read);
  }
  Access write =
      access(f, op.dst, static_cast<uint32_t>(op.bytes), kWrite | kOp | kGeneric, op.pc, file, line);
  write.clock = t.copy_op;
  c->log(write, true, kLogCopyStore);
  c->touch(write);
  return t.copy_op;
}

void check_copy_commit(Fiber* f) { check_of(f).copy_op = 0; }

void check_copy_done(Fiber* f, const CopyOp& op) { complete(f, op.id); }

// ---- TMA loads
void check_load_issue(Fiber* f, LoadOp& op) {
  Check* c = check_for(f);
  auto read = [&](const void* p, uint32_t bytes) {
    c->touch(access(f, p, bytes, 0, op.pc, op.file, op.line));
  };
  if (op.bulk) {
    for (uint32_t i = 0; i < op.bytes; i += 16) read(op.src + i, 16);
  } else {
    map_pieces(op.map, op.smem_offset, op.x, op.y, [&](uint32_t, char* p, uint32_t, uint32_t bytes) {
      if (bytes) read(p, bytes);
    });
  }
  for (size_t i = 0; i < op.blocks.size(); ++i) {
    require_fenced(f, op.bars[i], op);
    Block* b = op.blocks[i];
    for (uint32_t k = 0; k < op.bytes; k += 16) {
      Access write = access(f, b->smem + op.smem_offset + k, 16, kWrite | kLoad, op.pc, op.file, op.line);
      write.clock = op.bars[i]->phase;
      write.owner = op.bars[i]->check;
      c->shared(write, b);
    }
  }
}

// ---- TMA stores
void check_store_issue(Fiber* f, StoreOp& op) {
  Check* c = check_for(f);
  op.id = new_op(f, "a TMA store");
  const auto offset = static_cast<uint32_t>(op.src - f->block->smem);
  map_pieces(op.map, offset, op.x, op.y, [&](uint32_t at, char* p, uint32_t skip, uint32_t bytes) {
    if (bytes == 0) return;
    Access read = access(f, f->block->smem + at + skip, bytes, kOp, op.pc, op.file, op.line);
    read.clock = op.id;
    read.proxy = true;
    c->shared(read, f->block);
    Access write = access(f, p, bytes, kWrite | kOp, op.pc, op.file, op.line);
    write.clock = op.id;
    c->global(write);
  });
}

// Also after a wait for the reads alone, although the global bytes are still in flight then: who in the block accesses
// them after that is not found out, while other blocks are not ordered anyway.
void check_store_done(Fiber* f, StoreOp& op) { complete(f, op.id); }

void check_store_left(Fiber* f, StoreOp& op) {
  if (check_for(f)->ops[op.id].done) return;
  Access a = access(f, op.src, 16, 0, op.pc, op.file, op.line);
  check_for(f)->report(
      "missing_wait", a, "shared", op.src - f->block->smem,
      "the thread returns without tma_store_wait: the block's shared memory may be gone before the "
      "store has read it");
}

// ---- wgmma: lane 0 of each warp stands for it; its reads of A are the warp's 16 rows, its reads of B all
// of them
void check_wgmma_issue(Fiber* f, WgmmaTask& task, float* acc) {
  Check* c = check_for(f);
  ThreadCheck& t = check_of(f);
  const auto low = reinterpret_cast<uintptr_t>(acc), high = low + static_cast<uintptr_t>(task.n) * 2;
  Access a = access(f, acc, 4, 0, task.pc, task.file, task.line);
  if (!t.wgmma_ready) {
    c->report("missing_wgmma_fence", a, "registers", 0,
              "wgmma after its accumulators were written, or as the first one, without wgmma_fence");
    t.wgmma_ready = true;
  }
  auto mine =
      std::find_if(t.accumulators.begin(), t.accumulators.end(), [&](auto& r) { return r.low == low; });
  if (mine == t.accumulators.end()) mine = t.accumulators.insert(mine, Accumulator{});
  *mine = Accumulator{low, high, task.index};
  if (f->lane != 0) return;
  const uint32_t id = new_op(f, "a wgmma");
  t.wgmma_ops.push_back({task.index, id});
  auto read = [&](uint64_t desc, int first, int rows) {
    for (int r = first; r < first + rows; ++r) {
      for (int k = 0; k < 2; ++k) {
        Access chunk =
            access(f, f->block->smem + wgmma_chunk(desc, r, k), 16, kOp, task.pc, task.file, task.line);
        chunk.clock = id;
        chunk.proxy = true;
        c->shared(chunk, f->block);
      }
    }
  };
  require_operands(f->block, task);
  read(task.desc_a, static_cast<int>(f->linear / 32 % 4) * 16, 16);
  read(task.desc_b, 0, task.n);
}

void check_wgmma_done(Fiber* f, uint32_t end) {
  ThreadCheck& t = check_of(f);
  t.wgmma_done = end;
  auto& ops = t.wgmma_ops;
  for (auto& [index, id] : ops) {
    if (index < end) complete(f, id);
  }
  ops.erase(std::remove_if(ops.begin(), ops.end(), [end](auto& o) { return o.first < end; }), ops.end());
}

void check_wgmma_fence(Fiber* f) { check_of(f).wgmma_ready = true; }

// ---- ldmatrix and stmatrix: one request of the warp
void check_matrix(Warp* w, const Collective& c) {
  Check* check = w->block->worker->check;
  PcLog log;
  log.bytes = 16;
  log.shared = true;
  log.op = c.store ? kLogMatrixStore : kLogMatrixLoad;
  PcLog::Request r;
  for (int l = 0; l < 8 * c.matrices; ++l) {
    const void* row = *static_cast<const void* const*>(w->slot[l]);
    Fiber* f = w->lane[l];
    check->touch(access(f, row, 16, c.store ? kWrite | kGeneric : 0, f->pc, c.file, c.line));
    r.mask |= 1u << l;
    r.address[l] = reinterpret_cast<uintptr_t>(row) - reinterpret_cast<uintptr_t>(w->block->smem);
  }
  if (check->options.trace) check->request(log, r, w->lane[0]->pc);
}

}  // namespace pk::host
