// Shared memory, accesses of a stated width, cp.async, and flags between blocks.
#pragma once
#include "host/collectives.h"

// One struct per kernel, laid over the start of the block's arena, which is filled with 0xff (NaN) when claimed.
#define PK_SMEM(T, name) T& name = *reinterpret_cast<T*>(::pk::host::claim_smem(sizeof(T)))
#define PK_DYN_SMEM(T, name) T& name = *reinterpret_cast<T*>(::pk::host::dynamic_smem(sizeof(T)))

extern "C" {
void pkh_dynamic_smem(uint32_t bytes, const char* file, int line) __attribute__((noreturn));
void pkh_access(const void* p, uint32_t bytes, int write);  // before a load or store, under the checker
void pkh_cp_async(void* dst, const void* src, int bytes, int source_bytes, const char* file, int line);
void pkh_cp_async_commit(void);
void pkh_cp_async_wait(int pending);
void pkh_flag_load(const uint32_t* p, uint32_t value, const char* file, int line);  // after an acquire load
void pkh_flag_access(const uint32_t* p, int release, int acquire, const char* file, int line);
void pkh_spin_until_ge(const uint32_t* p, uint32_t value, const char* file, int line);
void pkh_grid_barrier(uint32_t* counter, const char* file, int line);
}

namespace pk {
namespace host {

PK_DEVICE unsigned char* dynamic_smem(size_t bytes, PK_HERE) {
  const BlockView* b = self()->view;
  if (__builtin_expect(bytes > b->smem_used, 0)) pkh_dynamic_smem(static_cast<uint32_t>(bytes), PK_AT);
  return b->smem;
}

// The type that moves kBytes in one instruction, whatever the address (a misaligned one is the checker's
// business, not a fault of the host's processor). g++ reports such an access of 16 bytes as one __tsan_read_range or
// __tsan_write_range, clang as __tsan_unaligned_read16 or write16.
template <int kBytes>
struct Raw;
template <>
struct Raw<1> {
  using type = uint8_t;
};
template <>
struct Raw<2> {
  typedef uint16_t type __attribute__((aligned(1), may_alias));
};
template <>
struct Raw<4> {
  typedef uint32_t type __attribute__((aligned(1), may_alias));
};
template <>
struct Raw<8> {
  typedef uint64_t type __attribute__((aligned(1), may_alias));
};
template <>
struct Raw<16> {
  typedef uint32_t type __attribute__((vector_size(16), aligned(1), may_alias));
};

template <class V>
struct RawAccess {
  static_assert(sizeof(V) == 1 || sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16,
                "pk::ld and pk::st move 1, 2, 4, 8 or 16 bytes");
  static_assert(alignof(V) == sizeof(V),
                "pk::ld and pk::st need a type aligned to its size, such as pk::Vec");
  using type = typename Raw<sizeof(V)>::type;
};

}  // namespace host

// A shared-memory address as PTX has it: the offset into this block's memory, blocks of a cluster 256 KB
// apart.
PK_DEVICE uint32_t smem_u32(const void* p) {
  return static_cast<uint32_t>(static_cast<const unsigned char*>(p) - host::self()->view->smem);
}

#ifdef PK_CHECK
// The checker is told of the whole access here; left to the instrumentation, a compiler may narrow it first.
namespace host {
template <class R>
PK_NOSAN R raw_load(const R* p) {
  return *p;
}
template <class R>
PK_NOSAN void raw_store(R* p, R raw) {
  *p = raw;
}
}  // namespace host
#endif

template <class V>
PK_DEVICE V ld(const V* p) {
  using R = typename host::RawAccess<V>::type;
#ifdef PK_CHECK
  pkh_access(p, sizeof(V), 0);
  const R raw = host::raw_load(reinterpret_cast<const R*>(p));
#else
  const R raw = *reinterpret_cast<const R*>(p);
#endif
  V v;
  __builtin_memcpy(&v, &raw, sizeof(V));
  return v;
}
template <class V>
PK_DEVICE void st(V* p, V v) {
  using R = typename host::RawAccess<V>::type;
  R raw;
  __builtin_memcpy(&raw, &v, sizeof(V));
#ifdef PK_CHECK
  pkh_access(p, sizeof(V), 1);
  host::raw_store(reinterpret_cast<R*>(p), raw);
#else
  *reinterpret_cast<R*>(p) = raw;
#endif
}
// Cache hints change nothing here.
template <class V>
PK_DEVICE V ld_nc(const V* p) {
  return ld(p);
}
template <class V>
PK_DEVICE V ld_stream(const V* p) {
  return ld(p);
}
template <class V>
PK_DEVICE void st_stream(V* p, V v) {
  st(p, v);
}

// ---- cp.async: takes effect between the issue and the wait, as early or late as the launch's options say
template <int kBytes>
PK_DEVICE void cp_async(void* smem, const void* gmem, bool pred = true, PK_HERE) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async moves 4, 8 or 16 bytes");
#if !defined(PK_CHECK)
  // A call per copy would cost more than the arithmetic on what it brings. Anything odd takes the slow path's
  // errors.
  const host::BlockView* b = host::self()->view;
  const uintptr_t address =
      reinterpret_cast<uintptr_t>(smem) | (pred ? reinterpret_cast<uintptr_t>(gmem) : 0);
  const size_t offset = static_cast<size_t>(static_cast<unsigned char*>(smem) - b->smem);
  if (__builtin_expect(b->copies_now && address % kBytes == 0 && offset + kBytes <= b->smem_used, 1)) {
    using R = typename host::Raw<kBytes>::type;
    *static_cast<R*>(smem) = pred ? *static_cast<const R*>(gmem) : R{};
    return;
  }
#endif
  pkh_cp_async(smem, gmem, kBytes, pred ? kBytes : 0, PK_AT);
}
PK_DEVICE void cp_async_commit() { pkh_cp_async_commit(); }
template <int kPending>
PK_DEVICE void cp_async_wait() {
  pkh_cp_async_wait(kPending);
}

// ---- flags between blocks
namespace host {
PK_NOSAN inline uint32_t load_acquire(const uint32_t* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
PK_NOSAN inline void store_release(uint32_t* p, uint32_t v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
PK_NOSAN inline uint32_t fetch_add(uint32_t* p, uint32_t v) {
  return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL);
}
}  // namespace host

// A loop around ld_acquire lets other threads run.
PK_DEVICE uint32_t ld_acquire(const uint32_t* p, PK_HERE) {
  pkh_flag_access(p, 0, 1, PK_AT);
  const uint32_t v = host::load_acquire(p);
  pkh_flag_load(p, v, PK_AT);
  return v;
}
PK_DEVICE void st_release(uint32_t* p, uint32_t v, PK_HERE) {
  pkh_flag_access(p, 1, 0, PK_AT);
  host::store_release(p, v);
}
PK_DEVICE void atomic_add_release(uint32_t* p, uint32_t v, PK_HERE) {
  pkh_flag_access(p, 1, 0, PK_AT);
  host::fetch_add(p, v);
}
PK_DEVICE uint32_t atomic_add_acq_rel(uint32_t* p, uint32_t v, PK_HERE) {
  pkh_flag_access(p, 1, 1, PK_AT);
  return host::fetch_add(p, v);
}
PK_DEVICE void spin_until_ge(const uint32_t* p, uint32_t v, PK_HERE) { pkh_spin_until_ge(p, v, PK_AT); }
// Every thread of every block of a cooperative launch. The counter is only looked at: it stays as it was.
PK_DEVICE void grid_barrier(uint32_t* counter, PK_HERE) { pkh_grid_barrier(counter, PK_AT); }

// ---- bit tricks
PK_DEVICE void forget(float&) {}
PK_DEVICE void forget(uint32_t&) {}  // on a GPU: do not keep what was computed from the argument in registers

template <int kTable>
PK_DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(kTable >= 0 && kTable < 256, "a truth table of 8 bits");
  uint32_t r = 0;
  if constexpr ((kTable & 0x01) != 0) r |= ~a & ~b & ~c;
  if constexpr ((kTable & 0x02) != 0) r |= ~a & ~b & c;
  if constexpr ((kTable & 0x04) != 0) r |= ~a & b & ~c;
  if constexpr ((kTable & 0x08) != 0) r |= ~a & b & c;
  if constexpr ((kTable & 0x10) != 0) r |= a & ~b & ~c;
  if constexpr ((kTable & 0x20) != 0) r |= a & ~b & c;
  if constexpr ((kTable & 0x40) != 0) r |= a & b & ~c;
  if constexpr ((kTable & 0x80) != 0) r |= a & b & c;
  return r;
}
PK_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) { return __byte_perm(a, b, selector); }

}  // namespace pk
