// Barriers, warp collectives and atomics. Each is one call into the runtime, which suspends the calling fiber
// until the others have come; arguments carry the call site for messages.
#pragma once
#include <type_traits>

#include "host/builtins.h"

namespace pk::host {
enum VoteKind : int { kBallot, kAny, kAll, kMatchAny, kMatchAll };
enum ReduceKind : int { kAdd, kMin, kMax, kAnd, kOr, kXor };
enum BarrierKind : int { kPlain, kCountTrue, kAllTrue, kAnyTrue };
// Done once for the whole warp, by the last lane to arrive; slots[lane] is what that lane passed.
using WarpOp = void (*)(void** slots);
}  // namespace pk::host

extern "C" {
int pkh_syncthreads(int kind, int predicate, const char* file, int line);
void pkh_named_barrier(int id, int threads, int wait, const char* file, int line);
void pkh_syncwarp(uint32_t mask, const char* file, int line);
uint64_t pkh_shuffle(uint32_t mask, uint64_t value, int source, const char* file, int line);
uint32_t pkh_vote(uint32_t mask, int kind, uint64_t value, int* predicate, const char* file, int line);
uint32_t pkh_reduce(uint32_t mask, int kind, int is_signed, uint32_t value, const char* file, int line);
void pkh_warp(const char* name, void* slot, pk::host::WarpOp op, const char* file, int line);
// ldmatrix and stmatrix: a slot starts with the row's address.
void pkh_warp_matrix(const char* name, void* slot, pk::host::WarpOp op, int matrices, int store,
                     const char* file, int line);
uint32_t pkh_activemask(void);
void pkh_atomic(const void* p, uint32_t bytes, const char* file, int line);  // before one, under the checker
void pkh_spin(const void* p, uint64_t seen, const char* file, int line);  // found p unchanged: let others run
void pkh_threadfence(int scope);
}

#define PK_AT file_, line_
PK_DEVICE void __syncthreads(PK_HERE) { pkh_syncthreads(pk::host::kPlain, 0, PK_AT); }
PK_DEVICE int __syncthreads_count(int p, PK_HERE) {
  return pkh_syncthreads(pk::host::kCountTrue, p != 0, PK_AT);
}
PK_DEVICE int __syncthreads_and(int p, PK_HERE) { return pkh_syncthreads(pk::host::kAllTrue, p != 0, PK_AT); }
PK_DEVICE int __syncthreads_or(int p, PK_HERE) { return pkh_syncthreads(pk::host::kAnyTrue, p != 0, PK_AT); }
PK_DEVICE void __syncwarp(unsigned mask = 0xffffffffu, PK_HERE) { pkh_syncwarp(mask, PK_AT); }
PK_DEVICE unsigned __activemask() { return pkh_activemask(); }
PK_DEVICE void __threadfence_block() { pkh_threadfence(0); }
PK_DEVICE void __threadfence() { pkh_threadfence(1); }
PK_DEVICE void __threadfence_system() { pkh_threadfence(2); }
PK_DEVICE void __trap(PK_HERE) { pkh_fail(PK_AT, "__trap()"); }

// ---- shuffles: T of up to 8 bytes; width a power of two up to 32
namespace pk::host {
template <class T>
PK_DEVICE T shuffle(unsigned mask, T value, int source, const char* file_, int line_) {
  static_assert(sizeof(T) <= 8, "shuffles move up to 8 bytes");
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &value, sizeof(T));
  bits = pkh_shuffle(mask, bits, source, PK_AT);
  __builtin_memcpy(&value, &bits, sizeof(T));
  return value;
}
PK_DEVICE int lane() { return static_cast<int>(self()->lane); }
}  // namespace pk::host

template <class T>
PK_DEVICE T __shfl_sync(unsigned mask, T v, int source, int width = 32, PK_HERE) {
  const int base = pk::host::lane() & ~(width - 1);
  return pk::host::shuffle(mask, v, base | (source & (width - 1)), PK_AT);
}
template <class T>
PK_DEVICE T __shfl_xor_sync(unsigned mask, T v, int lanes, int width = 32, PK_HERE) {
  const int me = pk::host::lane(), source = me ^ lanes, end = (me & ~(width - 1)) + width;
  return pk::host::shuffle(mask, v, source < end ? source : me, PK_AT);
}
template <class T>
PK_DEVICE T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32, PK_HERE) {
  const int me = pk::host::lane(), source = me + static_cast<int>(delta), end = (me & ~(width - 1)) + width;
  return pk::host::shuffle(mask, v, source < end ? source : me, PK_AT);
}
template <class T>
PK_DEVICE T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32, PK_HERE) {
  const int me = pk::host::lane(), source = me - static_cast<int>(delta), begin = me & ~(width - 1);
  return pk::host::shuffle(mask, v, source >= begin ? source : me, PK_AT);
}

// ---- for core/warp.cuh: combine(own, partner's) over partners W / 2, ..., 2, 1 lanes apart. One meeting of
// the lanes instead of one for each step: the last to come does all the steps for all, in the same order.
namespace pk::host {
template <class T, class Combine>
struct ButterflyLane {
  T value;
  Combine combine;
};
template <int W, class T, class Combine>
PK_NOSAN void butterfly_warp(void** slots) {
  ButterflyLane<T, Combine>* lanes[32];
  T value[32], next[32];
  for (int l = 0; l < 32; ++l) {
    lanes[l] = static_cast<ButterflyLane<T, Combine>*>(slots[l]);
    value[l] = lanes[l]->value;
  }
  for (int offset = W / 2; offset > 0; offset /= 2) {
    for (int l = 0; l < 32; ++l) next[l] = lanes[0]->combine(value[l], value[l ^ offset]);
    for (int l = 0; l < 32; ++l) value[l] = next[l];
  }
  for (int l = 0; l < 32; ++l) lanes[l]->value = value[l];
}
}  // namespace pk::host
namespace pk::detail {
template <int W, class T, class Combine>
PK_DEVICE T butterfly(T v, Combine combine, PK_HERE) {
  if constexpr (W == 1) return v;
  host::ButterflyLane<T, Combine> mine{v, combine};
  pkh_warp("a warp reduction", &mine, host::butterfly_warp<W, T, Combine>, PK_AT);
  return mine.value;
}
}  // namespace pk::detail

// ---- votes, match, reduce
PK_DEVICE unsigned __ballot_sync(unsigned mask, int p, PK_HERE) {
  return pkh_vote(mask, pk::host::kBallot, p != 0, nullptr, PK_AT);
}
PK_DEVICE int __any_sync(unsigned mask, int p, PK_HERE) {
  return static_cast<int>(pkh_vote(mask, pk::host::kAny, p != 0, nullptr, PK_AT));
}
PK_DEVICE int __all_sync(unsigned mask, int p, PK_HERE) {
  return static_cast<int>(pkh_vote(mask, pk::host::kAll, p != 0, nullptr, PK_AT));
}
template <class T>
PK_DEVICE unsigned __match_any_sync(unsigned mask, T v, PK_HERE) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &v, sizeof(T));
  return pkh_vote(mask, pk::host::kMatchAny, bits, nullptr, PK_AT);
}
template <class T>
PK_DEVICE unsigned __match_all_sync(unsigned mask, T v, int* predicate, PK_HERE) {
  uint64_t bits = 0;
  __builtin_memcpy(&bits, &v, sizeof(T));
  return pkh_vote(mask, pk::host::kMatchAll, bits, predicate, PK_AT);
}
#define PK_WARP_REDUCE(name, kind)                                                \
  PK_DEVICE unsigned __reduce_##name##_sync(unsigned mask, unsigned v, PK_HERE) { \
    return pkh_reduce(mask, pk::host::kind, 0, v, PK_AT);                         \
  }
PK_WARP_REDUCE(add, kAdd)
PK_WARP_REDUCE(min, kMin)
PK_WARP_REDUCE(max, kMax)
PK_WARP_REDUCE(and, kAnd)
PK_WARP_REDUCE(or, kOr)
PK_WARP_REDUCE(xor, kXor)
#undef PK_WARP_REDUCE
PK_DEVICE int __reduce_add_sync(unsigned mask, int v, PK_HERE) {
  return static_cast<int>(pkh_reduce(mask, pk::host::kAdd, 1, static_cast<uint32_t>(v), PK_AT));
}
PK_DEVICE int __reduce_min_sync(unsigned mask, int v, PK_HERE) {
  return static_cast<int>(pkh_reduce(mask, pk::host::kMin, 1, static_cast<uint32_t>(v), PK_AT));
}
PK_DEVICE int __reduce_max_sync(unsigned mask, int v, PK_HERE) {
  return static_cast<int>(pkh_reduce(mask, pk::host::kMax, 1, static_cast<uint32_t>(v), PK_AT));
}

// ---- atomics: relaxed, as on the device; other OS threads may run other blocks
namespace pk::host {

template <size_t kBytes>
struct AtomicWord {
  static_assert(kBytes == 4 || kBytes == 8, "atomics work on 4 or 8 bytes");
  using type = uint32_t;
};
template <>
struct AtomicWord<8> {
  using type = uint64_t;
};

// Replaces *p by f(*p); returns what was there.
template <class T, class F>
PK_NOSAN T atomic_apply(T* p, F f) {
  using W = typename AtomicWord<sizeof(T)>::type;
  W* word = reinterpret_cast<W*>(p);
  W old = __atomic_load_n(word, __ATOMIC_RELAXED);
  for (;;) {
    const W next = bits_as<W>(f(bits_as<T>(old)));
    if (__atomic_compare_exchange_n(word, &old, next, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
      return bits_as<T>(old);
    }
  }
}

// An atomic that finds the same value again and again may be a thread waiting for another: let that one run.
template <class T>
PK_DEVICE T atomic_seen(const T* p, T old, bool changed, const char* file_, int line_) {
  ThreadView* me = self();
  if (changed) {
    me->failures = 0;
  } else if (++me->failures > 4) {
    pkh_spin(p, bits_as<typename AtomicWord<sizeof(T)>::type>(old), PK_AT);
  }
  return old;
}

PK_DEVICE void atomic_begin(const void* p, size_t bytes, const char* file_, int line_) {
#ifdef PK_CHECK
  pkh_atomic(p, static_cast<uint32_t>(bytes), PK_AT);
#else
  if (__builtin_expect(reinterpret_cast<uintptr_t>(p) % bytes != 0, 0)) {
    pkh_fail(PK_AT, "atomic on %zu bytes at %p, which is not aligned", bytes, p);
  }
#endif
}

}  // namespace pk::host

#define PK_ATOMIC(name, expression)                                                   \
  template <class T>                                                                  \
  PK_DEVICE T name(T* p, std::common_type_t<T> v, PK_HERE) {                          \
    pk::host::atomic_begin(p, sizeof(T), PK_AT);                                      \
    const T old = pk::host::atomic_apply(p, [v](T old) -> T { return expression; });  \
    const T next = [v](T old) -> T { return expression; }(old);                       \
    return pk::host::atomic_seen(p, old, memcmp(&next, &old, sizeof(T)) != 0, PK_AT); \
  }
PK_ATOMIC(atomicAdd, static_cast<T>(old + v))
PK_ATOMIC(atomicSub, static_cast<T>(old - v))
PK_ATOMIC(atomicMax, old < v ? v : old)
PK_ATOMIC(atomicMin, v < old ? v : old)
PK_ATOMIC(atomicOr, old | v)
PK_ATOMIC(atomicAnd, old& v)
PK_ATOMIC(atomicXor, old ^ v)
PK_ATOMIC(atomicExch, v)
PK_ATOMIC(atomicInc, old >= v ? T(0) : T(old + 1))
PK_ATOMIC(atomicDec, old == T(0) || old > v ? v : T(old - 1))
#undef PK_ATOMIC
template <class T>
PK_DEVICE T atomicCAS(T* p, std::common_type_t<T> compare, std::common_type_t<T> v, PK_HERE) {
  pk::host::atomic_begin(p, sizeof(T), PK_AT);
  const T old = pk::host::atomic_apply(
      p, [compare, v](T old) -> T { return memcmp(&old, &compare, sizeof(T)) == 0 ? v : old; });
  return pk::host::atomic_seen(p, old, memcmp(&old, &compare, sizeof(T)) == 0, PK_AT);
}
