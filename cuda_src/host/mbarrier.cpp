// mbarriers. The barrier's state lives here; its eight bytes of shared memory only name it.
#include <algorithm>

#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {

Mbarrier* find_mbarrier(Worker* w, const void* address, Block** owner, const char* file, int line) {
  Block* b = block_of(w, address);
  if (b == nullptr) pkh_fail(file, line, "an mbarrier at %p, which is not in shared memory", address);
  for (auto& m : b->mbarriers) {
    if (m->address != address) continue;
    uint64_t word;
    memcpy(&word, address, sizeof word);
    if (word != m->word) {
      pkh_fail(file, line, "the mbarrier at smem+%zu was overwritten",
               static_cast<size_t>(static_cast<const unsigned char*>(address) - b->smem));
    }
    if (owner) *owner = b;
    return m.get();
  }
  pkh_fail(file, line, "the mbarrier at smem+%zu is used before mbar_init",
           static_cast<size_t>(static_cast<const unsigned char*>(address) - b->smem));
}

// A phase ends when all arrivals and all expected bytes have come.
void mbarrier_progress(Worker* w, Block* b, Mbarrier* m) {
  if (m->pending != 0 || m->bytes != 0) return;
  ++m->phase;
  m->pending = m->count;
  if (w->check) check_mbarrier_phase(b, m);
  w->wake_all(m->waiting);
}

namespace {

void arrive(Fiber* f, Block* b, Mbarrier* m, int64_t bytes, int arrivals, const char* file, int line) {
  if (m->pending < static_cast<uint32_t>(arrivals)) {
    pkh_fail(file, line, "mbarrier: more arrivals in a phase than its count of %u", m->count);
  }
  if (f->block->worker->check && arrivals > 0) check_mbarrier_arrive(f, b, m);
  m->bytes += bytes;
  m->pending -= static_cast<uint32_t>(arrivals);
  mbarrier_progress(f->block->worker, b, m);
}

}  // namespace
}  // namespace pk::host

using namespace pk::host;

void pkh_mbar_init(uint64_t* bar, uint32_t count, const char* file, int line) {
  Fiber* f = current();
  if (reinterpret_cast<uintptr_t>(bar) % 8 != 0)
    pkh_fail(file, line, "an mbarrier must be aligned to 8 bytes");
  if (count == 0 || count >= 1u << 20)
    pkh_fail(file, line, "mbar_init: count %u; 1 to 2^20 - 1 are allowed", count);
  Block* b = claimed_block(f, bar, 8, "the mbarrier", file, line);
  auto at =
      std::find_if(b->mbarriers.begin(), b->mbarriers.end(), [bar](auto& m) { return m->address == bar; });
  if (at == b->mbarriers.end()) at = b->mbarriers.insert(at, std::make_unique<Mbarrier>());
  Mbarrier* m = at->get();
  if (m->waiting.count > 0)
    pkh_fail(file, line, "mbar_init on an mbarrier that %d threads wait for", m->waiting.count);
  const uint32_t index = static_cast<uint32_t>(at - b->mbarriers.begin());
  *m = Mbarrier{};
  m->address = bar;
  m->count = m->pending = count;
  m->initialiser = f;
  m->word = 0x6d62617200000000u + index;  // "mbar" and its number in the block
  memcpy(bar, &m->word, 8);
  if (f->block->worker->check) check_mbarrier_init(f, b, m, PKH_PC);
}

void pkh_mbar_fence_init(void) {
  Fiber* f = current();
  for (auto& m : f->block->mbarriers) {
    if (m->initialiser == f) m->fenced = true;
  }
}

void pkh_mbar_arrive(uint64_t* bar, int64_t bytes, int arrivals, const char* file, int line) {
  Fiber* f = current();
  Block* b;
  Mbarrier* m = find_mbarrier(f->block->worker, bar, &b, file, line);
  arrive(f, b, m, bytes, arrivals, file, line);
}

void pkh_mbar_arrive_remote(uint64_t* bar, uint32_t rank, const char* file, int line) {
  Fiber* f = current();
  void* there = pkh_map_shared_rank(bar, rank, file, line);
  Block* owner;
  Mbarrier* m = find_mbarrier(f->block->worker, there, &owner, file, line);
  if (owner->live == 0)
    pkh_fail(file, line, "mbar_arrive_remote on block %u of the cluster, which has returned", rank);
  arrive(f, owner, m, 0, 1, file, line);
}

int pkh_mbar_try_wait(uint64_t* bar, uint32_t parity, const char* file, int line) {
  Fiber* f = current();
  Block* b;
  Mbarrier* m = find_mbarrier(f->block->worker, bar, &b, file, line);
  if ((m->phase & 1) == (parity & 1)) {
    poll(f, bar, m->phase, "a loop around mbar_try_wait", file, line);
    if ((m->phase & 1) == (parity & 1)) return 0;
  }
  if (f->block->worker->check) check_mbarrier_wait(f, b, m);
  return 1;
}

void pkh_mbar_wait(uint64_t* bar, uint32_t parity, const char* file, int line) {
  Fiber* f = current();
  Block* b;
  Mbarrier* m = find_mbarrier(f->block->worker, bar, &b, file, line);
  while ((m->phase & 1) == (parity & 1)) {
    m->waiting.push(f);
    fiber_suspend(f, "mbar_wait", file, line);
  }
  if (f->block->worker->check) check_mbarrier_wait(f, b, m);
}
