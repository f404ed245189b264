// Checked kernels are compiled with -fsanitize=thread for its instrumentation only: every access calls one of
// these first. Accesses to registers (a fiber's stack), built-in variables, launch arguments and constants
// are not memory traffic; anything else must be a tensor or shared memory.
#include <link.h>

#include <algorithm>

#include "host/checker.h"

namespace pk::host {
namespace {

bool within(uintptr_t a, const void* low, size_t bytes) {
  return a - reinterpret_cast<uintptr_t>(low) < bytes;
}

// In the library that the accessing instruction is in: a kernel's constant tables, the literals of messages, and to
// write its own global variables. Other libraries are hundreds of megabytes for a wild address to fall into.
bool in_own_image(const Access& a) {
  return dl_iterate_phdr(
             [](dl_phdr_info* info, size_t, void* p) {
               const Access& access = *static_cast<const Access*>(p);
               auto holds = [&](uintptr_t at, uint32_t flags) {
                 for (int i = 0; i < info->dlpi_phnum; ++i) {
                   const auto& h = info->dlpi_phdr[i];
                   if (h.p_type == PT_LOAD && at - (info->dlpi_addr + h.p_vaddr) < h.p_memsz)
                     return (h.p_flags & flags) == flags;
                 }
                 return false;
               };
               const bool write = (access.flags & kWrite) != 0;
               return int{holds(reinterpret_cast<uintptr_t>(access.pc), PF_X) &&
                          holds(access.address, write ? PF_W : PF_R)};
             },
             const_cast<Access*>(&a)) != 0;
}

bool private_memory(const Fiber* f, uintptr_t a) {
  const Block* b = f->block;
  if (within(a, b, sizeof(Block)) ||
      within(a, b->fibers.get(), sizeof(Fiber) * static_cast<size_t>(b->threads)))
    return true;
  return within(a, b->grid->closure, b->grid->closure_bytes) ||
         a == reinterpret_cast<uintptr_t>(&pkh_current);
}

// Registers that a wgmma in flight will write, and the fence it needs after they were written by other
// means.
void accumulators(const Access& a, ThreadCheck& t) {
  for (const Accumulator& r : t.accumulators) {
    if (a.address + a.bytes <= r.low || a.address >= r.high) continue;
    if (r.index >= t.wgmma_done) {
      a.f->block->worker->check->report("missing_wait", a, "registers", 0,
                                        "accumulators of a wgmma are used before wgmma_wait");
    } else if (a.flags & kWrite) {
      t.wgmma_ready = false;
    }
    return;
  }
}

__attribute__((noinline)) void constant_or_wild(Check* c, const Access& a) {
  if (in_own_image(a)) return;
  for (auto& s : c->worker->all_stacks) {
    if (within(a.address, s->low, s->bytes))
      c->fatal("out_of_bounds", a, "", 0, "access to another thread's local variables");
  }
  char text[96];
  snprintf(text, sizeof text, "%s of %u bytes at %#lx, which is in no tensor",
           a.flags & kWrite ? "write" : "read", a.bytes, static_cast<unsigned long>(a.address));
  c->fatal("out_of_bounds", a, "", 0, text);
}

inline void entry(const void* p, uint32_t bytes, bool write, const void* pc) {
  Fiber* f = current();
  if (f == nullptr) return;
  Check* c = f->block->worker->check;
  if (c == nullptr) return;
  Access a{f, reinterpret_cast<uintptr_t>(p), bytes, static_cast<uint8_t>(write ? kWrite : 0), pc};
  if (within(a.address, f->stack->low, f->stack->bytes)) {
    ThreadCheck& t = check_of(f);
    if (!t.accumulators.empty()) accumulators(a, t);
    return;
  }
  if (private_memory(f, a.address)) return;
  const bool smem = block_of(c->worker, p) != nullptr;
  if (!smem && !within(a.address, c->area, c->area_bytes)) {
    constant_or_wild(c, a);
    return;
  }
  if (smem && write) a.flags |= kGeneric;
  c->log(a, smem, write ? kLogStore : kLogLoad);
  c->touch(a);
}

// An access of any size: one instruction if there is one of that width, else what a compiler would split it
// into.
void range(const void* p, size_t bytes, bool write, const void* pc) {
  const size_t step = bytes <= 16 && (bytes & (bytes - 1)) == 0            ? bytes
                      : (bytes | reinterpret_cast<uintptr_t>(p)) % 16 == 0 ? 16
                      : (bytes | reinterpret_cast<uintptr_t>(p)) % 4 == 0  ? 4
                                                                           : 1;
  for (size_t i = 0; i < bytes; i += step)
    entry(static_cast<const char*>(p) + i, static_cast<uint32_t>(step), write, pc);
}

}  // namespace
}  // namespace pk::host

void pkh_access(const void* p, uint32_t bytes, int write) { pk::host::entry(p, bytes, write != 0, PKH_PC); }

extern "C" {
#define PK_TSAN(bytes)                                                                              \
  void __tsan_read##bytes(void* p) { pk::host::entry(p, bytes, false, PKH_PC); }                    \
  void __tsan_write##bytes(void* p) { pk::host::entry(p, bytes, true, PKH_PC); }                    \
  void __tsan_unaligned_read##bytes(void* p) { pk::host::entry(p, bytes, false, PKH_PC); }          \
  void __tsan_unaligned_write##bytes(void* p) { pk::host::entry(p, bytes, true, PKH_PC); }          \
  void __tsan_volatile_read##bytes(void* p) { pk::host::entry(p, bytes, false, PKH_PC); }           \
  void __tsan_volatile_write##bytes(void* p) { pk::host::entry(p, bytes, true, PKH_PC); }           \
  void __tsan_unaligned_volatile_read##bytes(void* p) { pk::host::entry(p, bytes, false, PKH_PC); } \
  void __tsan_unaligned_volatile_write##bytes(void* p) { pk::host::entry(p, bytes, true, PKH_PC); } \
  void __tsan_read_write##bytes(void* p) {                                                          \
    pk::host::entry(p, bytes, false, PKH_PC);                                                       \
    pk::host::entry(p, bytes, true, PKH_PC);                                                        \
  }
PK_TSAN(1)
PK_TSAN(2)
PK_TSAN(4)
PK_TSAN(8)
PK_TSAN(16)
#undef PK_TSAN
void __tsan_read_range(void* p, unsigned long bytes) { pk::host::range(p, bytes, false, PKH_PC); }
void __tsan_write_range(void* p, unsigned long bytes) { pk::host::range(p, bytes, true, PKH_PC); }
void* __tsan_memcpy(void* to, const void* from, unsigned long bytes) {
  pk::host::range(from, bytes, false, PKH_PC);
  pk::host::range(to, bytes, true, PKH_PC);
  return memcpy(to, from, bytes);
}
void* __tsan_memmove(void* to, const void* from, unsigned long bytes) {
  pk::host::range(from, bytes, false, PKH_PC);
  pk::host::range(to, bytes, true, PKH_PC);
  return memmove(to, from, bytes);
}
void* __tsan_memset(void* to, int value, unsigned long bytes) {
  pk::host::range(to, bytes, true, PKH_PC);
  return memset(to, value, bytes);
}
void __tsan_init(void) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
void __tsan_vptr_update(void**, void*) {}
void __tsan_vptr_read(void**) {}
}
