// Barriers wider and narrower than a block, clusters, programmatic dependent launch, register budgets, bit tricks.
#pragma once

namespace pk {

// ---- for core/warp.cuh: combine(own, partner's) over partners W / 2, ..., 2, 1 lanes apart
namespace detail {
template <int W, class T, class Combine>
PK_DEVICE T butterfly(T v, Combine combine) {
#pragma unroll
  for (int offset = W / 2; offset > 0; offset /= 2) v = combine(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}
}  // namespace detail

// ---- named barriers: id 1 to 15 (0 is __syncthreads), threads a multiple of 32
PK_DEVICE void named_barrier_sync(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
PK_DEVICE void named_barrier_arrive(int id, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// ---- clusters. Before sm_90 every cluster is one block.
#if __CUDA_ARCH__ >= 900
PK_DEVICE uint32_t cluster_ctarank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
PK_DEVICE uint32_t cluster_nctarank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
PK_DEVICE void cluster_arrive() { asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory"); }
PK_DEVICE void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
template <class T>
PK_DEVICE T* map_shared_rank(T* p, uint32_t rank) {
  uint64_t out;
  asm("mapa.u64 %0, %1, %2;" : "=l"(out) : "l"(p), "r"(rank));
  return reinterpret_cast<T*>(out);
}
#else
PK_DEVICE uint32_t cluster_ctarank() { return 0; }
PK_DEVICE uint32_t cluster_nctarank() { return 1; }
PK_DEVICE void cluster_arrive() {}
PK_DEVICE void cluster_wait() { __syncthreads(); }
template <class T>
PK_DEVICE T* map_shared_rank(T* p, uint32_t) {
  return p;
}
#endif
PK_DEVICE void cluster_sync() {
  cluster_arrive();
  cluster_wait();
}

// ---- programmatic dependent launch; nothing happens where the launch did not ask for it, or before sm_90
PK_DEVICE void grid_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
PK_DEVICE void grid_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---- register budget of a warpgroup. A hint about speed only, so cards without it ignore it. Ignored by the
// compiler unless the kernel has __launch_bounds__(threads, 1).
template <int kRegisters>
PK_DEVICE void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256, a multiple of 8");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}
template <int kRegisters>
PK_DEVICE void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256, a multiple of 8");
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
#endif
}

// ---- the whole grid, for cooperative launches. One counter, zero before the first use; its low 31 bits are
// zero again after every barrier, and the top bit flips, so that no reset is needed between barriers or
// launches.
PK_DEVICE void grid_barrier(uint32_t* counter) {
  __syncthreads();
  if (threadIdx.x == 0 && threadIdx.y == 0 && threadIdx.z == 0) {
    const uint32_t blocks = gridDim.x * gridDim.y * gridDim.z;
    const bool first = blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0;
    const uint32_t old = atomic_add_acq_rel(counter, first ? 0x80000000u - (blocks - 1) : 1u);
    while (((ld_acquire(counter) ^ old) & 0x80000000u) == 0) {
    }
  }
  __syncthreads();
}

// ---- bits
// Makes the compiler forget what it knows of v: what was computed from v before is computed again after, and not kept
// in registers meanwhile.
PK_DEVICE void forget(uint32_t& v) { asm volatile("" : "+r"(v)); }
PK_DEVICE void forget(float& v) { asm volatile("" : "+f"(v)); }

// Any function of three bits, per bit: kTable is the function of a = 0xf0, b = 0xcc, c = 0xaa.
template <int kTable>
PK_DEVICE uint32_t lop3(uint32_t a, uint32_t b, uint32_t c) {
  static_assert(kTable >= 0 && kTable < 256, "a truth table of 8 bits");
  uint32_t d;
  asm("lop3.b32 %0, %1, %2, %3, %4;" : "=r"(d) : "r"(a), "r"(b), "r"(c), "n"(kTable));
  return d;
}
// Byte i of the result is byte (selector >> 4 i) & 7 of {b, a}.
// Not __byte_perm, which clears bit 3 of each selector: "the sign of this byte, eight times".
PK_DEVICE uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selector));
  return d;
}

}  // namespace pk
