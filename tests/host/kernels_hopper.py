"""Kernels of the Hopper tests: rings of mbarriers, TMA and wgmma, clusters. Shared by the plain and checked tests."""

GEMM = """
template <int Stages, int N> struct GemmSmem {
  alignas(1024) pk::bf16 a[Stages][64 * 64];
  alignas(1024) pk::bf16 b[Stages][N * 64];
  uint64_t full[Stages], empty[Stages];
};
// c[m, n] = a[m, k] b[n, k]^T; a producer warpgroup loads 64 x N x 64 stages by TMA, a consumer multiplies.
// Bug: 1 never releases a stage, 2 releases before wgmma_wait, 3 expects 16 bytes too many, 4 no wgmma_fence,
// 5 reads the accumulators without waiting, 6 does not wait for the load, 7 no fence after mbar_init.
template <int Stages, int N, class T, int Bug = 0>
__global__ void __launch_bounds__(256) gemm(
    const __grid_constant__ pk::TensorMap ta, const __grid_constant__ pk::TensorMap tb, float* c, int m, int n, int k) {
  using Smem = GemmSmem<Stages, N>;
  PK_DYN_SMEM(Smem, s);
  const int m0 = blockIdx.y * 64, n0 = blockIdx.x * N, steps = (k + 63) / 64;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Stages; ++i) { pk::mbar_init(&s.full[i], 1); pk::mbar_init(&s.empty[i], 128); }
    if (Bug != 7) pk::mbar_fence_init();
  }
  __syncthreads();
  pk::PipelineState<Stages> p;
  if (threadIdx.x < 128) {
    pk::setmaxnreg_dec<40>();
    if (threadIdx.x == 0) {
      for (int i = 0; i < steps; ++i, p.advance()) {
        pk::mbar_wait(&s.empty[p.stage], p.parity ^ 1);
        pk::mbar_arrive_expect_tx(&s.full[p.stage], (64 + N) * 64 * 2 + (Bug == 3 ? 16 : 0));
        pk::tma_load_2d(s.a[p.stage], &ta, i * 64, m0, &s.full[p.stage]);
        pk::tma_load_2d(s.b[p.stage], &tb, i * 64, n0, &s.full[p.stage]);
      }
    }
  } else {
    pk::setmaxnreg_inc<232>();
    float d[N / 2];
    for (int i = 0; i < N / 2; ++i) d[i] = 0.f;
    for (int i = 0; i < steps; ++i, p.advance()) {
      if (Bug != 6) pk::mbar_wait(&s.full[p.stage], p.parity);
      if (Bug != 4) pk::wgmma_fence();
      for (int kk = 0; kk < 4; ++kk)
        pk::wgmma<N, T>(d, pk::wgmma_desc_sw128(s.a[p.stage] + kk * 16),
                        pk::wgmma_desc_sw128(s.b[p.stage] + kk * 16), 1);
      pk::wgmma_commit();
      if (Bug == 2) pk::mbar_arrive(&s.empty[p.stage]);
      if (Bug != 5) pk::wgmma_wait<0>();
      if (Bug != 1 && Bug != 2) pk::mbar_arrive(&s.empty[p.stage]);
    }
    const int t = threadIdx.x - 128;
    for (int i = 0; i < N / 2; ++i) {
      const int r = m0 + pk::wgmma_row(t, i), col = n0 + pk::wgmma_col(t, i);
      if (r < m && col < n) c[(size_t)r * n + col] = d[i];
    }
  }
}
"""

RINGS = """
template <int Stages> struct RingSmem { int buffer[Stages][32]; uint64_t full[Stages], empty[Stages]; };
// Warp 0 writes squares into a ring, the other warps sum them. TryWait polls instead of waiting.
template <int Stages, bool TryWait>
__global__ void ring(const int* x, int* y, int n) {
  using Smem = RingSmem<Stages>;
  PK_SMEM(Smem, s);
  const int w = threadIdx.x / 32, l = threadIdx.x % 32;
  if (threadIdx.x == 0) {
    for (int i = 0; i < Stages; ++i) { pk::mbar_init(&s.full[i], 32); pk::mbar_init(&s.empty[i], blockDim.x - 32); }
    pk::mbar_fence_init();
  }
  __syncthreads();
  auto wait = [](uint64_t* b, uint32_t parity) {
    if (TryWait) { while (!pk::mbar_try_wait(b, parity)) {} } else pk::mbar_wait(b, parity);
  };
  pk::PipelineState<Stages> p;
  if (w == 0) {
    for (int i = 0; i < n; ++i, p.advance()) {
      wait(&s.empty[p.stage], p.parity ^ 1);
      int v = x[i * 32 + l];
      s.buffer[p.stage][l] = v * v;
      pk::mbar_arrive(&s.full[p.stage]);
    }
  } else {
    int sum = 0;
    for (int i = 0; i < n; ++i, p.advance()) {
      wait(&s.full[p.stage], p.parity);
      sum += s.buffer[p.stage][31 - l];
      pk::mbar_arrive(&s.empty[p.stage]);
    }
    y[threadIdx.x - 32] = sum;
  }
}
struct NamedSmem { int buffer[32]; };
// Two named barriers as full and empty flags of one buffer: producer warps arrive on one and wait for the other.
__global__ void named(const int* x, int* y, int n) {
  PK_SMEM(NamedSmem, s);
  const int w = threadIdx.x / 32, l = threadIdx.x % 32;
  int sum = 0;
  for (int i = 0; i < n; ++i) {
    if (w == 0) {
      if (i > 0) pk::named_barrier_sync(2, 64);
      s.buffer[l] = x[i * 32 + l];
      pk::named_barrier_arrive(1, 64);
    } else {
      pk::named_barrier_sync(1, 64);
      sum += s.buffer[31 - l];
      if (i + 1 < n) pk::named_barrier_arrive(2, 64);
    }
  }
  if (w == 1) y[l] = sum;
}
"""

TMA = """
template <int Bytes> struct BoxSmem { alignas(1024) unsigned char box[Bytes]; uint64_t bar; };
// One box in, as it lies in shared memory out to raw; then stored back through the second map.
template <int Bytes, bool Fence = true, bool Wait = true>
__global__ void box(
    const __grid_constant__ pk::TensorMap in, const __grid_constant__ pk::TensorMap back, unsigned char* raw, int x,
    int y) {
  using Smem = BoxSmem<Bytes>;
  PK_SMEM(Smem, s);
  if (threadIdx.x == 0) { pk::mbar_init(&s.bar, 1); pk::mbar_fence_init(); }
  __syncthreads();
  if (threadIdx.x == 0) { pk::mbar_arrive_expect_tx(&s.bar, Bytes); pk::tma_load_2d(s.box, &in, x, y, &s.bar); }
  pk::mbar_wait(&s.bar, 0);
  for (int i = threadIdx.x; i < Bytes; i += blockDim.x) { raw[i] = s.box[i]; s.box[i] = s.box[i] ^ 1; }
  if (Fence) pk::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    pk::tma_store_2d(&back, s.box, x, y);
    pk::tma_store_commit();
    if (Wait) pk::tma_store_wait<0>();
  }
}
template <int N> struct BulkSmem { alignas(16) float v[N]; uint64_t bar; };
template <int N>
__global__ void bulk(const float* x, float* y) {
  using Smem = BulkSmem<N>;
  PK_SMEM(Smem, s);
  if (threadIdx.x == 0) { pk::mbar_init(&s.bar, 1); pk::mbar_fence_init(); }
  __syncthreads();
  if (threadIdx.x == 0) {
    pk::mbar_arrive_expect_tx(&s.bar, N * 4);
    pk::bulk_load(s.v, x + blockIdx.x * N, N * 4, &s.bar);
  }
  pk::mbar_wait(&s.bar, 0);
  for (int i = threadIdx.x; i < N; i += blockDim.x) y[blockIdx.x * N + i] = s.v[N - 1 - i];
}
"""

CLUSTER = """
struct PartSmem { float part; };
// Each block of a cluster sums its share; block 0 adds what lies in the others' shared memory.
template <int Size>
__global__ void cluster_sum(const float* x, float* y, int n) {
  PK_SMEM(PartSmem, s);
  const int rank = pk::cluster_ctarank();
  float a = 0;
  for (int i = rank * 32 + threadIdx.x; i < n; i += 32 * Size) a += x[i];
  a = pk::warp_sum(a);
  if (threadIdx.x == 0) s.part = a;
  pk::cluster_sync();
  if (rank == 0 && threadIdx.x == 0) {
    float t = 0;
    for (int i = 0; i < (int)pk::cluster_nctarank(); ++i) t += *pk::map_shared_rank(&s.part, i);
    y[blockIdx.x / Size] = t;
  }
  pk::cluster_sync();
}
struct CastSmem { alignas(1024) float tile[8 * 32]; uint64_t full, empty; };
// Block 0 loads every tile once for the whole cluster; each block sums it and tells block 0 by a remote arrive.
template <int Size>
__global__ void multicast(const __grid_constant__ pk::TensorMap in, float* y, int tiles) {
  PK_SMEM(CastSmem, s);
  const int rank = pk::cluster_ctarank();
  if (threadIdx.x == 0) { pk::mbar_init(&s.full, 1); pk::mbar_init(&s.empty, Size); pk::mbar_fence_init(); }
  pk::cluster_sync();
  float a = 0;
  for (int i = 0; i < tiles; ++i) {
    if (threadIdx.x == 0) {
      pk::mbar_arrive_expect_tx(&s.full, sizeof(s.tile));
      if (rank == 0) {
        if (i > 0) pk::mbar_wait(&s.empty, (i - 1) & 1);
        pk::tma_load_2d_multicast(s.tile, &in, 0, i * 8, &s.full, (1 << Size) - 1);
      }
    }
    pk::mbar_wait(&s.full, i & 1);
    for (int r = 0; r < 8; ++r) a += s.tile[r * 32 + threadIdx.x] * (rank + 1);
    __syncthreads();
    if (threadIdx.x == 0 && i + 1 < tiles) pk::mbar_arrive_remote(&s.empty, 0);
  }
  y[blockIdx.x * 32 + threadIdx.x] = a;
  pk::cluster_sync();
}
"""
