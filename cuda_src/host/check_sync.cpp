// What barriers, collectives, mbarriers, flags and fences tell the checker: who knows what from now on.
#include <algorithm>

#include "host/checker.h"

namespace pk::host {
namespace {

// What some thread learnt about other blocks, everybody in the block knows after a full barrier.
void new_era(Block* b) {
  BlockCheck* c = check_of(b);
  const uint32_t uid = c->uid;
  for (ThreadCheck& t : c->threads) {
    for (Knowledge::Entry& e : t.know.entries) {
      if (e.block == uid) continue;
      Knowledge one;
      one.entries.push_back(std::move(e));
      c->shared.join(one);
    }
    t.know.clear();
  }
  if (c->proxy_fenced) c->proxy_cover = c->era;
  c->proxy_fenced = false;
  ++c->era;
}

// A wait of one thread of the block for the grid before it holds for all after a full barrier.
void share_grid_wait(Block* b) {
  bool any = false;
  for (int i = 0; i < b->threads; ++i) any = any || b->fibers[static_cast<size_t>(i)].waited;
  for (int i = 0; any && i < b->threads; ++i) b->fibers[static_cast<size_t>(i)].waited = true;
}

void flush_all(Block* b) {
  for (int i = 0; i < (b->threads + 31) / 32; ++i) b->worker->check->flush(b, i);
}

template <class F>
void each(const FiberList& list, F f) {
  for (Fiber* at = list.head; at != nullptr; at = at->next) f(at);
}

}  // namespace

void check_block_begin(Block* b) {
  Check* c = b->worker->check;
  if (b->check == nullptr) b->check = new BlockCheck;
  BlockCheck& k = *b->check;
  k.uid = static_cast<uint32_t>(c->block_names.size());
  c->block_names.push_back(BlockName{b->index, b->block_dim});
  if (b->cluster->know == nullptr) b->cluster->know = new ClusterCheck;
  if (b->rank == 0) *b->cluster->know = ClusterCheck{};
  k.era = 0;
  k.shared.clear();
  k.proxy_cover = 0;
  k.proxy_fenced = false;
  k.smem.assign((b->smem_used + 3) / 4, Cell{0, 0});
  k.threads.assign(static_cast<size_t>(b->threads), ThreadCheck{});
  k.mbarriers.clear();
  for (Knowledge& n : k.barrier) n.clear();
  for (auto& l : k.log) l.clear();
}

void check_block_end(Block* b) {
  Check* c = b->worker->check;
  flush_all(b);
  for (Cell& cell : b->check->smem) {
    if (cell.head != 0) c->drop_nodes(cell);
  }
  LaunchTotals& total = c->totals[static_cast<size_t>(b->grid->index)];
  total.smem = std::max(total.smem, b->smem_used);
}

void check_barrier(Block* b, int id, const Barrier& bar, Fiber* last) {
  const int members = bar.waiting.count + (last != nullptr);
  if (id == 0 || members == b->live) {
    share_grid_wait(b);
    new_era(b);
    flush_all(b);
    return;
  }
  Knowledge all;
  std::swap(all, check_of(b)->barrier[id]);
  each(bar.waiting, [&](Fiber* f) { release_into(&all, f); });
  if (last) release_into(&all, last);
  each(bar.waiting, [&](Fiber* f) { check_of(f).know.join(all); });
  if (last) check_of(last).know.join(all);
  uint32_t whole[32] = {};  // lanes per warp that take part
  each(bar.waiting, [&](Fiber* f) { whole[f->linear / 32] |= 1u << f->lane; });
  if (last) whole[last->linear / 32] |= 1u << last->lane;
  for (int i = 0; i < (b->threads + 31) / 32; ++i) {
    if (whole[i] != 0 && whole[i] == b->warps[i].live) b->worker->check->flush(b, i);
  }
}

void check_named_arrive(Fiber* f, int id) { release_into(&check_of(f->block)->barrier[id], f); }

void check_warp(Warp* w, CollectiveKind kind, uint32_t lanes) {
  if (kind == kSyncwarp) {
    Knowledge all;
    for (uint32_t m = lanes; m != 0; m &= m - 1) release_into(&all, w->lane[__builtin_ctz(m)]);
    for (uint32_t m = lanes; m != 0; m &= m - 1) check_of(w->lane[__builtin_ctz(m)]).know.join(all);
  }
  if (lanes == w->live) w->block->worker->check->flush(w->block, w->index);
}

// ---- mbarriers
void check_mbarrier_init(Fiber* f, Block* b, Mbarrier* m, const void* pc) {
  BlockCheck* c = check_of(b);
  m->check = static_cast<uint32_t>(c->mbarriers.size());
  c->mbarriers.emplace_back();
  check_for(f)->touch(Access{f, reinterpret_cast<uintptr_t>(m->address), 8, kWrite, pc});
}

void check_mbarrier_arrive(Fiber* f, Block* b, Mbarrier* m) {
  release_into(&check_of(b)->mbarriers[m->check].arriving, f);
}

void check_mbarrier_phase(Block* b, Mbarrier* m) {
  MbarrierCheck& c = check_of(b)->mbarriers[m->check];
  c.released = c.arriving;
  c.acquired_era.resize(m->phase, UINT32_MAX);
}

void check_mbarrier_wait(Fiber* f, Block* b, Mbarrier* m) {
  BlockCheck* home = check_of(b);
  MbarrierCheck& c = home->mbarriers[m->check];
  ThreadCheck& t = check_of(f);
  t.know.join(c.released);
  const uint32_t index = static_cast<uint32_t>(home->threads.size()) + m->check;
  t.know.set(home->uid, home->era, index, m->phase);
  for (uint32_t& era : c.acquired_era) {
    if (era == UINT32_MAX) era = home->era;
  }
}

// ---- clusters: both halves are exact, so work between them stays unordered
void check_cluster_arrive(Fiber* f) { release_into(&f->block->cluster->know->arriving, f); }

void check_cluster_phase(Cluster* c) { c->know->released = c->know->arriving; }

void check_cluster_wait(Fiber* f) { check_of(f).know.join(f->block->cluster->know->released); }

// ---- flags, fences, grids
void check_fence(Fiber* f, int scope) {
  (void)scope;
  ThreadCheck& t = check_of(f);
  t.know.join(t.to_acquire);
  t.to_acquire.clear();
  t.fence.clear();
  release_into(&t.fence, f);
  t.fenced = true;
}

void check_atomic(Fiber* f, const void* p, uint32_t bytes, int writes, int release, int acquire,
                  const void* pc, const char* file, int line) {
  Check* c = check_for(f);
  Access a{f, reinterpret_cast<uintptr_t>(p), bytes, static_cast<uint8_t>(kAtomic | (writes ? kWrite : 0)),
           pc};
  a.file = file;
  a.line = line;
  c->log(a, block_of(f->block->worker, p) != nullptr, kLogAtomic);
  c->touch(a);
  ThreadCheck& t = check_of(f);
  Knowledge& flag = c->flags[a.address];
  (acquire ? t.know : t.to_acquire).join(flag);
  if (release) {
    release_into(&flag, f);
  } else if (writes && t.fenced) {
    flag.join(t.fence);
  }
}

void check_grid_barrier(Worker* w, Grid* g) {
  ++w->check->grid_era[static_cast<size_t>(g->index)];
  for (auto& c : w->clusters) {
    if (!c->busy || c->grid != g) continue;
    for (auto& b : c->blocks) {
      share_grid_wait(b.get());
      new_era(b.get());
      flush_all(b.get());
    }
  }
}

void check_proxy_fence(Fiber* f) {
  ThreadCheck& t = check_of(f);
  BlockCheck* b = check_of(f->block);
  ++t.proxy_fences;
  t.proxy_era = b->era;
  t.proxy_know = t.know;
  t.proxy_know.join(b->shared);
  b->proxy_fenced = true;
}

}  // namespace pk::host
