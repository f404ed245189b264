// Fibers: stacks, the context switch, and the failure that abandons them all.
#include <sys/mman.h>

#include "host/runtime.h"

// Under AddressSanitizer (runtime and kernels built with -fsanitize=address) every switch of stacks is
// announced.
#if defined(__SANITIZE_ADDRESS__)
#define PKH_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define PKH_ASAN 1
#endif
#endif
#ifdef PKH_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

extern "C" {
__thread pk::host::ThreadView* pkh_current __attribute__((tls_model("initial-exec")));
// Saves the callee-saved registers on the stack and the stack pointer in *save, then continues at `to`.
void pkh_switch(void** save, void* to);
}

#if defined(__x86_64__)
asm(R"(
.text
.p2align 4
.globl pkh_switch
.hidden pkh_switch
.type pkh_switch,@function
pkh_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size pkh_switch,.-pkh_switch
)");
#elif defined(__aarch64__)
asm(R"(
.text
.p2align 4
.globl pkh_switch
.hidden pkh_switch
.type pkh_switch,%function
pkh_switch:
  sub sp,sp,#160
  stp x19,x20,[sp]
  stp x21,x22,[sp,#16]
  stp x23,x24,[sp,#32]
  stp x25,x26,[sp,#48]
  stp x27,x28,[sp,#64]
  stp x29,x30,[sp,#80]
  stp d8,d9,[sp,#96]
  stp d10,d11,[sp,#112]
  stp d12,d13,[sp,#128]
  stp d14,d15,[sp,#144]
  mov x9,sp
  str x9,[x0]
  mov sp,x1
  ldp x19,x20,[sp]
  ldp x21,x22,[sp,#16]
  ldp x23,x24,[sp,#32]
  ldp x25,x26,[sp,#48]
  ldp x27,x28,[sp,#64]
  ldp x29,x30,[sp,#80]
  ldp d8,d9,[sp,#96]
  ldp d10,d11,[sp,#112]
  ldp d12,d13,[sp,#128]
  ldp d14,d15,[sp,#144]
  add sp,sp,#160
  ret
.size pkh_switch,.-pkh_switch
)");
#else
#error "the host backend has context switches for x86-64 and aarch64"
#endif

namespace pk::host {
namespace {

constexpr size_t kStackBytes = 64 * 1024;
constexpr size_t kMappingBytes = 2 << 20;  // a huge page: a thousand stacks in small pages thrash the TLB
constexpr size_t kHugeStacks = 2048;  // beyond it small pages, as most of each huge one lies idle
constexpr uint64_t kCanary = 0x70796b65726e2121u;  // at the low end of every stack

void add_stacks(Worker* w) {
  void* p = mmap(nullptr, 2 * kMappingBytes, PROT_READ | PROT_WRITE,
                 MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) {
    fprintf(stderr, "pykern host backend: no memory for fiber stacks\n");
    abort();
  }
  const uintptr_t start = reinterpret_cast<uintptr_t>(p),
                  aligned = (start + kMappingBytes - 1) & ~(kMappingBytes - 1);
  if (aligned > start) munmap(p, aligned - start);
  if (start + kMappingBytes > aligned)
    munmap(reinterpret_cast<void*>(aligned + kMappingBytes), start + kMappingBytes - aligned);
  char* base = reinterpret_cast<char*>(aligned);
  madvise(base, kMappingBytes, w->all_stacks.size() < kHugeStacks ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
  constexpr size_t kCount = kMappingBytes / kStackBytes;
  for (size_t i = 0; i < kCount; ++i) {
    char* low = base + i * kStackBytes;
    // Without an offset the hot line of every stack maps to the same set of the first-level cache.
    char* top = low + kStackBytes - 64 - (w->all_stacks.size() % 31) * 128;
    w->all_stacks.push_back(std::make_unique<Stack>(Stack{low, kStackBytes, top}));
  }
  // Popped from the back: lowest address first.
  for (size_t i = 0; i < kCount; ++i) w->stacks.push_back(w->all_stacks[w->all_stacks.size() - 1 - i].get());
}

void fiber_main();

void* fresh_stack_pointer(char* top) {
  void** sp = reinterpret_cast<void**>(reinterpret_cast<uintptr_t>(top) & ~uintptr_t{63});
#if defined(__x86_64__)
  *--sp = nullptr;  // a return address that ends backtraces, and keeps rsp % 16 == 8 at entry
  *--sp = reinterpret_cast<void*>(&fiber_main);
  for (int i = 0; i < 6; ++i) *--sp = nullptr;
#else
  sp -= 20;
  memset(sp, 0, 160);
  sp[11] = reinterpret_cast<void*>(&fiber_main);  // x30
#endif
  return sp;
}

inline Fiber* pop(Worker* w) {
  if (w->ready.empty()) return nullptr;
  return w->random ? w->ready.pop_random(w->draw()) : w->ready.pop();
}

// Where grids may overlap, the worker's loop gets a turn now and then to start more blocks.
inline bool pause_now(Worker* w) { return w->pauses && w->draw() % 8 == 0; }

// The one place where stacks change: continues `to`, or the worker's loop when it is null. `save` receives
// where the caller can be continued; null if it never will be.
inline void jump(Worker* w, void** save, Fiber* to) {
  void* dropped;
#ifdef PKH_ASAN
  void* fake_stack = nullptr;
  const void* low = to ? to->stack->low : w->main_low;
  __sanitizer_start_switch_fiber(save ? &fake_stack : nullptr, low, to ? to->stack->bytes : w->main_bytes);
#endif
  pkh_switch(save ? save : &dropped, to ? to->sp : w->main_sp);
#ifdef PKH_ASAN
  __sanitizer_finish_switch_fiber(fake_stack, nullptr, nullptr);
#endif
}

inline void switch_to(Worker* w, void** save, Fiber* to) {
  if (to != nullptr && to->sp == nullptr) {
    if (w->stacks.empty()) add_stacks(w);
    to->stack = w->stacks.back();
    w->stacks.pop_back();
#ifdef PKH_ASAN
    __asan_unpoison_memory_region(to->stack->low, to->stack->bytes);  // red zones of who had it before
#endif
    to->sp = fresh_stack_pointer(to->stack->top);
    memcpy(to->stack->low, &kCanary, sizeof kCanary);
  }
  if (to != nullptr) pkh_current = to;
  jump(w, save, to);
}

// A thread that has returned hands its stack straight to the next one that has not started: a kernel without
// barriers runs on a single warm stack.
__attribute__((noinline)) void fiber_main() {
#ifdef PKH_ASAN
  const void* low;
  size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &low, &bytes);
  Worker* worker = current()->block->worker;
  if (worker->main_low == nullptr)
    worker->main_low = low, worker->main_bytes = bytes;  // the first comes from there
#endif
  for (;;) {
    Fiber* f = current();
    Worker* w = f->block->worker;
    f->block->grid->thunk(f->block->grid->closure);
    if (memcmp(f->stack->low, &kCanary, sizeof kCanary) != 0) {
      fail_worker(w, "a thread needs more than 64 KB of stack for its local variables", f);
    }
    thread_finished(f);
    Fiber* next = w->failed || pause_now(w) ? nullptr : pop(w);
    Stack* stack = f->stack;
    f->stack = nullptr;
    f->sp = nullptr;
    if (next != nullptr && next->sp == nullptr) {
      next->stack = stack;
      next->sp = stack->top;  // any non-null value; the real one is saved when it first suspends
      pkh_current = next;
      continue;
    }
    w->stacks.push_back(stack);
    switch_to(w, nullptr, next);
  }
}

}  // namespace

void fiber_suspend(Fiber* f, const char* what, const char* file, int line) {
  Worker* w = f->block->worker;
  f->waiting = what;
  f->file = file;
  f->line = line;
  if (w->async_order == PK_ASYNC_RANDOM && !w->loads.empty() && w->draw() % 4 == 0) retire_load(w);
  if (pause_now(w)) {
    switch_to(w, &f->sp, nullptr);
    return;
  }
  Fiber* next = pop(w);
  if (next == f) return;  // what it waited for came about just now
  switch_to(w, &f->sp, next);
}

void run_fibers(Worker* w) {
  while (!w->failed) {
    Fiber* f = pop(w);
    if (f == nullptr) return;
    switch_to(w, &w->main_sp, f);
    if (w->pauses) return;
  }
}

void fiber_abandon(Fiber* f) {
  jump(f->block->worker, nullptr, nullptr);
  __builtin_unreachable();
}

}  // namespace pk::host

// The run ends here: every fiber is left where it is, and the caller gets the text.
void pkh_fail(const char* file, int line, const char* format, ...) {
  using namespace pk::host;
  char text[1024];
  va_list list;
  va_start(list, format);
  vsnprintf(text, sizeof text, format, list);
  va_end(list);
  Fiber* f = current();
  fail_worker(f->block->worker, text, f, file, line);
  fiber_abandon(f);
}
