// mbarriers, TMA, wgmma, clusters and programmatic dependent launch.
#pragma once
#include "host/memory.h"

namespace pk {

// What the host backend's encoder (pkh_tensor_map) writes where the driver would write a CUtensorMap.
struct alignas(64) TensorMap {
  void* base;
  uint64_t dims[2];    // elements, the contiguous axis first
  uint64_t row_bytes;  // distance between rows
  uint32_t box[2];     // elements
  uint32_t elem_bytes;
  uint32_t swizzle;  // 0 none, 1: 32 bytes, 2: 64, 3: 128
  uint64_t magic;    // kMapMagic
  uint64_t reserved[8];
};
static_assert(sizeof(TensorMap) == 128, "as large as a CUtensorMap");

namespace host {
constexpr uint64_t kMapMagic = 0x706b5f746d61705fu;
// acc[t] points to the accumulators of thread t of the warpgroup; operands are read through the descriptors.
using WgmmaOp = void (*)(float* const* acc, const unsigned char* smem, uint64_t desc_a, uint64_t desc_b,
                         int n, int scale_d);
}  // namespace host
}  // namespace pk

extern "C" {
void pkh_mbar_init(uint64_t* bar, uint32_t count, const char* file, int line);
void pkh_mbar_fence_init(void);
void pkh_mbar_arrive(uint64_t* bar, int64_t bytes, int arrivals, const char* file, int line);
void pkh_mbar_arrive_remote(uint64_t* bar, uint32_t rank, const char* file, int line);
int pkh_mbar_try_wait(uint64_t* bar, uint32_t parity, const char* file, int line);
void pkh_mbar_wait(uint64_t* bar, uint32_t parity, const char* file, int line);
void pkh_tma_load(void* dst, const pk::TensorMap* map, int x, int y, uint64_t* bar, int mask,
                  const char* file, int line);
void pkh_tma_store(const pk::TensorMap* map, const void* src, int x, int y, const char* file, int line);
void pkh_tma_store_commit(void);
void pkh_tma_store_wait(int pending, int read_only, const char* file, int line);
void pkh_bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar, const char* file, int line);
void pkh_fence_proxy_async(void);
void pkh_wgmma(float* acc, uint64_t desc_a, uint64_t desc_b, int n, int scale_d, pk::host::WgmmaOp op,
               const char* file, int line);
void pkh_wgmma_fence(void);
void pkh_wgmma_commit(void);
void pkh_wgmma_wait(int pending, const char* file, int line);
void pkh_cluster_arrive(const char* file, int line);
void pkh_cluster_wait(const char* file, int line);
void* pkh_map_shared_rank(const void* p, uint32_t rank, const char* file, int line);
void pkh_grid_wait(const char* file, int line);
void pkh_launch_dependents(void);
}

namespace pk {

PK_DEVICE void mbar_init(uint64_t* bar, uint32_t count, PK_HERE) { pkh_mbar_init(bar, count, PK_AT); }
PK_DEVICE void mbar_fence_init() { pkh_mbar_fence_init(); }
PK_DEVICE void mbar_arrive(uint64_t* bar, PK_HERE) { pkh_mbar_arrive(bar, 0, 1, PK_AT); }
PK_DEVICE void mbar_arrive_expect_tx(uint64_t* bar, uint32_t bytes, PK_HERE) {
  pkh_mbar_arrive(bar, bytes, 1, PK_AT);
}
PK_DEVICE void mbar_expect_tx(uint64_t* bar, uint32_t bytes, PK_HERE) {
  pkh_mbar_arrive(bar, bytes, 0, PK_AT);
}
PK_DEVICE void mbar_arrive_remote(uint64_t* bar, uint32_t rank, PK_HERE) {
  pkh_mbar_arrive_remote(bar, rank, PK_AT);
}
PK_DEVICE bool mbar_try_wait(uint64_t* bar, uint32_t parity, PK_HERE) {
  return pkh_mbar_try_wait(bar, parity, PK_AT) != 0;
}
PK_DEVICE void mbar_wait(uint64_t* bar, uint32_t parity, PK_HERE) { pkh_mbar_wait(bar, parity, PK_AT); }

PK_DEVICE void tma_load_2d(void* dst, const TensorMap* map, int x, int y, uint64_t* bar, PK_HERE) {
  pkh_tma_load(dst, map, x, y, bar, -1, PK_AT);
}
PK_DEVICE void tma_load_2d_multicast(void* dst, const TensorMap* map, int x, int y, uint64_t* bar,
                                     uint16_t mask, PK_HERE) {
  pkh_tma_load(dst, map, x, y, bar, mask, PK_AT);
}
PK_DEVICE void tma_store_2d(const TensorMap* map, const void* src, int x, int y, PK_HERE) {
  pkh_tma_store(map, src, x, y, PK_AT);
}
PK_DEVICE void tma_store_commit() { pkh_tma_store_commit(); }
template <int kPending>
PK_DEVICE void tma_store_wait(PK_HERE) {
  pkh_tma_store_wait(kPending, 0, PK_AT);
}
template <int kPending>
PK_DEVICE void tma_store_wait_read(PK_HERE) {
  pkh_tma_store_wait(kPending, 1, PK_AT);
}
PK_DEVICE void bulk_load(void* dst, const void* src, uint32_t bytes, uint64_t* bar, PK_HERE) {
  pkh_bulk_load(dst, src, bytes, bar, PK_AT);
}
PK_DEVICE void fence_proxy_async() { pkh_fence_proxy_async(); }

PK_DEVICE void wgmma_fence() { pkh_wgmma_fence(); }
PK_DEVICE void wgmma_commit() { pkh_wgmma_commit(); }
template <int kPending>
PK_DEVICE void wgmma_wait(PK_HERE) {
  pkh_wgmma_wait(kPending, PK_AT);
}

PK_DEVICE void named_barrier_sync(int id, int threads, PK_HERE) { pkh_named_barrier(id, threads, 1, PK_AT); }
PK_DEVICE void named_barrier_arrive(int id, int threads, PK_HERE) {
  pkh_named_barrier(id, threads, 0, PK_AT);
}

PK_DEVICE uint32_t cluster_ctarank() { return host::self()->view->rank; }
PK_DEVICE uint32_t cluster_nctarank() { return host::self()->view->cluster_n; }
PK_DEVICE void cluster_arrive(PK_HERE) { pkh_cluster_arrive(PK_AT); }
PK_DEVICE void cluster_wait(PK_HERE) { pkh_cluster_wait(PK_AT); }
PK_DEVICE void cluster_sync(PK_HERE) {
  pkh_cluster_arrive(PK_AT);
  pkh_cluster_wait(PK_AT);
}
template <class T>
PK_DEVICE T* map_shared_rank(T* p, uint32_t rank, PK_HERE) {
  return static_cast<T*>(pkh_map_shared_rank(p, rank, PK_AT));
}

PK_DEVICE void grid_wait(PK_HERE) { pkh_grid_wait(PK_AT); }
PK_DEVICE void grid_launch_dependents() { pkh_launch_dependents(); }

// Register budgets are the GPU's business.
template <int kRegisters>
PK_DEVICE void setmaxnreg_inc() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256, a multiple of 8");
}
template <int kRegisters>
PK_DEVICE void setmaxnreg_dec() {
  static_assert(kRegisters >= 24 && kRegisters <= 256 && kRegisters % 8 == 0, "24 to 256, a multiple of 8");
}

}  // namespace pk
