// Which shared memory a block has claimed, and where an address in it belongs.
#include "host/check.h"
#include "host/runtime.h"

namespace pk::host {

Block* block_of(Worker* w, const void* address) {
  const auto offset = static_cast<size_t>(static_cast<const unsigned char*>(address) - w->arenas);
  return offset < kArenaBytes * kMaxResidentBlocks ? w->arena_block[offset / kArenaBytes] : nullptr;
}

// The block of this thread's cluster that owns [address, address + bytes), and where in it; fails otherwise.
Block* claimed_block(Fiber* f, const void* address, size_t bytes, const char* what, const char* file,
                     int line) {
  Block* b = block_of(f->block->worker, address);
  if (b == nullptr || b->cluster != f->block->cluster) {
    pkh_fail(file, line, "%s is not in the shared memory of this block's cluster", what);
  }
  const auto offset = static_cast<size_t>(static_cast<const unsigned char*>(address) - b->smem);
  if (offset + bytes > b->smem_used) {
    pkh_fail(file, line, "%s reaches from byte %zu to %zu of shared memory; the block has %u bytes", what,
             offset, offset + bytes, b->smem_used);
  }
  return b;
}

}  // namespace pk::host

using namespace pk::host;

// Static shared memory is there from the start in every block of a cluster, whoever comes to its declaration
// first.
void pkh_claim_smem(uint32_t bytes, const char* file, int line) {
  Fiber* f = current();
  if (bytes > f->block->smem_limit) {
    pkh_fail(file, line, "%u bytes of static shared memory; at most %zu are allowed", bytes, kStaticSmem);
  }
  for (auto& b : f->block->cluster->blocks) {
    if (bytes <= b->smem_used) continue;
    memset(b->smem + b->smem_used, 0xff, bytes - b->smem_used);  // NaN in every floating-point format
    b->smem_used = bytes;
  }
}

void pkh_dynamic_smem(uint32_t bytes, const char* file, int line) {
  pkh_fail(file, line, "the kernel needs %u bytes of dynamic shared memory, the launch gives %u", bytes,
           current()->view->smem_used);
}
