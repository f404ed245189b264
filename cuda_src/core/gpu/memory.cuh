// Memory accesses of a stated width, cp.async, and flags between blocks.
#pragma once

namespace pk {
namespace detail {

// The register type that moves kBytes in one instruction.
template <int kBytes>
struct raw;
template <>
struct raw<1> {
  using type = unsigned char;
};
template <>
struct raw<2> {
  using type = unsigned short;
};
template <>
struct raw<4> {
  using type = unsigned int;
};
template <>
struct raw<8> {
  using type = uint2;
};
template <>
struct raw<16> {
  using type = uint4;
};

template <class V>
struct access {
  static_assert(sizeof(V) == 1 || sizeof(V) == 2 || sizeof(V) == 4 || sizeof(V) == 8 || sizeof(V) == 16,
                "pk::ld and pk::st move 1, 2, 4, 8 or 16 bytes");
  static_assert(alignof(V) == sizeof(V),
                "pk::ld and pk::st need a type aligned to its size, such as pk::Vec");
  using type = typename raw<sizeof(V)>::type;
};

// Through a union: nvcc turns a memcpy from a dereferenced pointer into single bytes.
template <class To, class From>
PK_DEVICE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  union Both {
    From from;
    To to;
    PK_DEVICE Both() {}
  } both;
  both.from = from;
  return both.to;
}

}  // namespace detail

template <class V>
PK_DEVICE V ld(const V* p) {
  using R = typename detail::access<V>::type;
  return detail::bits_as<V>(*reinterpret_cast<const R*>(p));
}
template <class V>
PK_DEVICE void st(V* p, V v) {
  using R = typename detail::access<V>::type;
  *reinterpret_cast<R*>(p) = detail::bits_as<R>(v);
}
// Through the read-only path: global memory that nothing writes while the kernel runs.
template <class V>
PK_DEVICE V ld_nc(const V* p) {
  using R = typename detail::access<V>::type;
  return detail::bits_as<V>(__ldg(reinterpret_cast<const R*>(p)));
}
// Global memory that is touched once: evicted first, so that it does not push out what will be read again.
template <class V>
PK_DEVICE V ld_stream(const V* p) {
  using R = typename detail::access<V>::type;
  return detail::bits_as<V>(__ldcs(reinterpret_cast<const R*>(p)));
}
template <class V>
PK_DEVICE void st_stream(V* p, V v) {
  using R = typename detail::access<V>::type;
  __stcs(reinterpret_cast<R*>(p), detail::bits_as<R>(v));
}

// ---- cp.async: global to shared without registers. !pred writes zeros and reads nothing.
template <int kBytes>
PK_DEVICE void cp_async(void* smem, const void* gmem, bool pred = true) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "cp.async copies 4, 8 or 16 bytes");
  const int source_bytes = pred ? kBytes : 0;
  if constexpr (kBytes == 16) {  // .cg skips L1, which a copy to shared memory would only fill
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem_u32(smem)), "l"(gmem),
                 "r"(source_bytes)
                 : "memory");
  } else {
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;" ::"r"(smem_u32(smem)), "l"(gmem),
                 "n"(kBytes), "r"(source_bytes)
                 : "memory");
  }
}
PK_DEVICE void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's latest groups are in flight.
template <int kPending>
PK_DEVICE void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// ---- flags between blocks
PK_DEVICE uint32_t ld_acquire(const uint32_t* p) {
  uint32_t v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
PK_DEVICE void st_release(uint32_t* p, uint32_t v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
PK_DEVICE void atomic_add_release(uint32_t* p, uint32_t v) {
  asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
PK_DEVICE uint32_t atomic_add_acq_rel(uint32_t* p, uint32_t v) {
  uint32_t old;
  asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], %2;" : "=r"(old) : "l"(p), "r"(v) : "memory");
  return old;
}
PK_DEVICE void spin_until_ge(const uint32_t* p, uint32_t v) {
  while (ld_acquire(p) < v) {
  }
}

}  // namespace pk
