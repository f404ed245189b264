"""Planted bugs: small kernels, each wrong in one way and right with Bug = false. `// BUG` marks the line to be named,
`// OTHER` the access it collides with."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from . import harness as h


@dataclass(frozen=True)
class Plant:
    name: str
    kind: str | tuple[str, ...]
    source: str
    arguments: Callable[[], list[Any]]
    grid: Any = 1
    block: Any = 64
    launch: dict[str, Any] = field(default_factory=dict)
    clean: bool = True  # the kernel with Bug = false must pass

    def kernel(self, bug: bool) -> h.Kernel:
        return h.Kernel(self.source, f"k<{'true' if bug else 'false'}>", check=True)

    def run(self, bug: bool, seed: int = 0, order: int = h.EAGER) -> int:
        options = h.Options(check=1, seed=seed, async_order=order)
        return h.launch(self.kernel(bug), self.grid, self.block, *self.arguments(), options=options, raises=False,
                        **self.launch)  # fmt: skip

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind,) if isinstance(self.kind, str) else self.kind

    def lines(self) -> list[str]:
        """Places marked BUG."""
        return [f"kernel.cuh:{i}" for i, text in enumerate(self.source.splitlines(), 1) if "// BUG" in text]


def floats(n: int = 64) -> np.ndarray:
    return h.aligned(n, np.float32, fill=1)


def x_out(n: int = 64) -> list[Any]:
    return [floats(n), h.out(h.aligned(n))]


def mutated(n: int = 64, dtype: Any = np.float32) -> h.Arg:
    return h.Arg(h.aligned(n, dtype, fill=0), h.MUTATED, "cache")


S64 = "struct S { float v[64]; float w[64]; };\n"
HEAD = "template <bool Bug> __global__ void k"


def box_maps() -> list[Any]:
    return [h.tensor_map(h.aligned((16, 32), fill=2), (32, 8), 0), store_map()]


def store_map() -> Any:
    arg = h.tensor_map(h.aligned((16, 32), fill=0), (32, 8), 0)
    arg.role = h.MUTATED
    return arg


TMA_HEAD = "struct S { alignas(1024) float box[8 * 32]; uint64_t bar; };\n" + HEAD
TMA_LOAD = """(const __grid_constant__ pk::TensorMap in, const __grid_constant__ pk::TensorMap back) {
  PK_SMEM(S, s);
  if (threadIdx.x == 0) { pk::mbar_init(&s.bar, 1); pk::mbar_fence_init(); }
  __syncthreads();
  if (threadIdx.x == 0) {
    pk::mbar_arrive_expect_tx(&s.bar, sizeof(s.box));
    pk::tma_load_2d(s.box, &in, 0, 0, &s.bar);
  }
"""

WGMMA = """struct S { alignas(1024) pk::bf16 a[64 * 64]; alignas(1024) pk::bf16 b[8 * 64]; };
template <bool Bug> __global__ void k(float* y) {
  PK_SMEM(S, s);
  float d[4] = {};
  for (int i = threadIdx.x; i < 64 * 64; i += 128) s.a[i].bits = 0x3f80;
  for (int i = threadIdx.x; i < 8 * 64; i += 128) s.b[i].bits = 0x3f80;
  %s
  __syncthreads();
  %s
  pk::wgmma<8, pk::bf16>(d, pk::wgmma_desc_sw128(s.a), pk::wgmma_desc_sw128(s.b), 1); %s
  pk::wgmma_commit();
  %s
  for (int i = 0; i < 4; ++i) y[threadIdx.x * 4 + i] = d[i]; %s
  __syncthreads();
}
"""


def wgmma(proxy: str = "pk::fence_proxy_async();", fence: str = "pk::wgmma_fence();", mark: str = "",
          wait: str = "pk::wgmma_wait<0>();", end: str = "") -> str:  # fmt: skip
    return WGMMA % (proxy, fence, mark, wait, end)


PLANTS = [
    Plant("no barrier before the read", "shared_race", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  s.v[threadIdx.x] = x[threadIdx.x]; // OTHER // BUG
  if (!Bug) __syncthreads();
  y[threadIdx.x] = s.v[63 - threadIdx.x]; // BUG
}""", x_out),
    Plant("no barrier before the next write", "shared_race", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  float a = 0;
  for (int i = 0; i < 3; ++i) {
    s.v[threadIdx.x] = x[threadIdx.x] + i; // BUG
    __syncthreads();
    a += s.v[63 - threadIdx.x]; // BUG
    if (!Bug) __syncthreads();
  }
  y[threadIdx.x] = a;
}""", x_out),
    Plant("two threads write one word", "shared_race", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  s.v[Bug ? threadIdx.x / 2 : threadIdx.x] = x[threadIdx.x]; // BUG
  __syncthreads();
  y[threadIdx.x] = s.v[threadIdx.x / 2];
}""", x_out),
    Plant("a shuffle is no barrier", "shared_race", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  s.v[threadIdx.x] = x[threadIdx.x]; // BUG
  float a = __shfl_xor_sync(~0u, x[threadIdx.x], 1);
  if (!Bug) __syncwarp();
  y[threadIdx.x] = a + s.v[threadIdx.x ^ 1]; // BUG
}""", x_out),
    Plant("a vote is no barrier", "shared_race", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  s.v[threadIdx.x] = x[threadIdx.x]; // BUG
  bool any = __any_sync(~0u, x[threadIdx.x] > 3);
  if (!Bug) __syncwarp();
  y[threadIdx.x] = any + s.v[threadIdx.x ^ 1]; // BUG
}""", x_out),
    Plant("__syncwarp does not order warps", "shared_race", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  s.v[threadIdx.x] = x[threadIdx.x]; // BUG
  if (Bug) __syncwarp(); else __syncthreads();
  y[threadIdx.x] = s.v[threadIdx.x ^ 32]; // BUG
}""", x_out),
    # Threads 0 and 63 read before the barrier pair orders them with the writer; the readers between do not.
    Plant("one of many readers", "shared_race", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  if (threadIdx.x == 0) s.v[0] = x[0];
  __syncthreads();
  float a = 0;
  if (!Bug || threadIdx.x != 20) a = s.v[0];
  __syncthreads();
  if (Bug && threadIdx.x == 20) a = s.v[0]; // BUG
  if (Bug && threadIdx.x == 5) s.w[5] = s.v[0];
  __syncwarp(threadIdx.x < 32 ? (threadIdx.x == 20 ? 1u << 20 : ~(1u << 20)) : ~0u);
  if (threadIdx.x == 0) s.v[0] = a + 1; // BUG
  y[threadIdx.x] = a;
}""", x_out),
    Plant("blocks write one element", "global_race", HEAD + """(const float* x, float* y) {
  y[Bug ? threadIdx.x : blockIdx.x * 64 + threadIdx.x] = x[threadIdx.x]; // BUG
}""", lambda: [floats(), h.out(h.aligned(128))], grid=2),
    Plant("a block reads what another writes", "global_race", HEAD + """(float* y) {
  const int i = blockIdx.x * 64 + threadIdx.x;
  y[i] = y[Bug ? (i + 64) % 256 : i] + 1; // BUG
}""", lambda: [mutated(256)], grid=4),
    Plant("no barrier around global memory", "global_race", HEAD + """(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x]; // BUG
  if (!Bug) __syncthreads();
  y[threadIdx.x + 64] = y[63 - threadIdx.x]; // BUG
}""", lambda: [floats(), h.out(h.aligned(128))]),
    Plant("a plain flag", "global_race", HEAD + """(float* data, uint32_t* flag) {
  if (threadIdx.x != 0) return;
  if (blockIdx.x == 0) {
    data[0] = 1;
    if (Bug) atomicExch(flag, 1u); else pk::st_release(flag, 1u);
  } else {
    pk::spin_until_ge(flag, 1u);
    data[1] = data[0]; // BUG
  }
}""", lambda: [mutated(2), mutated(1, np.uint32)], grid=2, launch=dict(flags=h.COOPERATIVE)),
    Plant("a counter without a fence", "global_race", HEAD + """(float* data, unsigned* count, float* y) {
  if (threadIdx.x != 0) return;
  data[blockIdx.x] = 1; // BUG
  if (!Bug) __threadfence();
  if (atomicAdd(count, 1u) == gridDim.x - 1) {
    __threadfence();
    float a = 0;
    for (int i = 0; i < (int)gridDim.x; ++i) a += data[i]; // BUG
    y[0] = a;
  }
}""", lambda: [mutated(4), mutated(1, np.uint32), h.out(h.aligned(1))], grid=4),
    Plant("an atomic and a plain write", "global_race", HEAD + """(float* y) {
  if (Bug && threadIdx.x == 40) y[0] = 5; // BUG
  else atomicAdd(y, 1.f); // BUG
}""", lambda: [mutated(1)]),
    Plant("past the end", "out_of_bounds", HEAD + """(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x + (Bug ? 1 : 0)]; // BUG
}""", x_out),
    Plant("far past the end", "out_of_bounds", HEAD + """(const float* x, float* y) {
  y[threadIdx.x + (Bug ? 100000 : 0)] = x[threadIdx.x]; // BUG
}""", x_out),
    Plant("before the start", "out_of_bounds", HEAD + """(const float* x, float* y) {
  y[threadIdx.x] = x[(int)threadIdx.x - (Bug ? 1 : 0)]; // BUG
}""", x_out),
    Plant("into the neighbour", "out_of_bounds", HEAD + """(float* a, float* b, int gap) {
  a[threadIdx.x] = 1;
  a[threadIdx.x + (Bug ? gap : 0)] = 2; // BUG
  b[threadIdx.x] = 3;
}""", lambda: (lambda v: [h.out(v[:64]), h.out(v[128:192]), 128])(h.aligned(192))),
    Plant("between the elements of a view", "out_of_bounds", HEAD + """(const float* x, float* y) {
  y[threadIdx.x] = x[threadIdx.x / 8 * 12 + threadIdx.x % 8 + (Bug ? 1 : 0)]; // BUG
}""", lambda: [h.aligned((8, 12), fill=1)[:, :8], h.out(h.aligned(64))]),
    Plant("no pointer at all", "out_of_bounds", HEAD + """(const float* x, float* y) {
  const float* p = Bug ? nullptr : x;
  y[threadIdx.x] = p[threadIdx.x]; // BUG
}""", x_out),
    Plant("past shared memory", "out_of_bounds", "struct S { float v[64]; };\n" + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  s.v[threadIdx.x + (Bug ? 1 : 0)] = x[threadIdx.x]; // BUG
  __syncthreads();
  y[threadIdx.x] = 0;
}""", x_out),
    Plant("past dynamic shared memory", "out_of_bounds", S64 + HEAD + """(const float* x, float* y) {
  PK_DYN_SMEM(S, s);
  (&s.v[0])[threadIdx.x + (Bug ? 100 : 0)] = x[threadIdx.x]; // BUG
  y[threadIdx.x] = 0;
}""", x_out, launch=dict(smem=512)),
    Plant("a misaligned vector load", "misaligned", HEAD + """(const float* x, float* y) {
  if (threadIdx.x >= 15) return;
  auto v = pk::ld_vec<float, 4>(x + threadIdx.x * 4 + (Bug ? 1 : 0)); // BUG
  pk::st_vec<float, 4>(y + threadIdx.x * 4, v);
}""", x_out),
    Plant("a misaligned shared store", "misaligned", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  pk::Vec<float, 2> v{{x[0], x[1]}};
  if (threadIdx.x < 20) pk::st_vec<float, 2>(s.v + threadIdx.x * 2 + (Bug ? 1 : 0), v); // BUG
  y[threadIdx.x] = 0;
}""", x_out),
    Plant("shared memory never written", "uninitialised_shared", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  if (!Bug || threadIdx.x < 63) s.v[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = s.v[63 - threadIdx.x]; // BUG
}""", x_out),
    Plant("an output read first", "uninitialised_global", HEAD + """(const float* x, float* y) {
  if (!Bug) y[threadIdx.x] = 0;
  y[threadIdx.x] += x[threadIdx.x]; // BUG
}""", x_out),
    Plant("a workspace never cleared", "uninitialised_global", HEAD + """(float* w, float* y) {
  if (!Bug && threadIdx.x == 0) w[0] = 0;
  __syncthreads();
  atomicAdd(w, 1.f); // BUG
  y[threadIdx.x] = 0;
}""", lambda: [h.Arg(h.aligned(1), h.WORKSPACE, "work"), h.out(h.aligned(64))]),
    Plant("an input written", "write_to_input", HEAD + """(float* x, float* y) {
  if (Bug) x[threadIdx.x] = 0; // BUG
  y[threadIdx.x] = 1;
}""", x_out),
    Plant("cp.async without a wait", "missing_wait", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  pk::cp_async<4>(&s.v[threadIdx.x], x + threadIdx.x);
  pk::cp_async_commit();
  if (!Bug) pk::cp_async_wait<0>();
  __syncthreads();
  y[threadIdx.x] = s.v[63 - threadIdx.x]; // BUG
}""", x_out),
    Plant("cp.async, one group too few", "missing_wait", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  pk::cp_async<4>(&s.v[threadIdx.x], x + threadIdx.x);
  pk::cp_async_commit();
  pk::cp_async<4>(&s.w[threadIdx.x], x + threadIdx.x);
  pk::cp_async_commit();
  pk::cp_async_wait<Bug ? 1 : 0>();
  __syncthreads();
  y[threadIdx.x] = s.v[63 - threadIdx.x] + s.w[threadIdx.x]; // BUG
}""", x_out),
    Plant("cp.async without a barrier", ("shared_race", "missing_wait", "uninitialised_shared"),
          S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  pk::cp_async<4>(&s.v[threadIdx.x], x + threadIdx.x); // BUG
  pk::cp_async_commit();
  pk::cp_async_wait<0>();
  if (!Bug) __syncthreads();
  y[threadIdx.x] = s.v[63 - threadIdx.x]; // BUG
}""", x_out),
    Plant("a TMA load not waited for", ("missing_wait", "uninitialised_shared"),
          TMA_HEAD + TMA_LOAD.replace("&s.bar);\n  }", "&s.bar); // BUG\n  }") + """
  if (!Bug) pk::mbar_wait(&s.bar, 0);
  float a = s.box[threadIdx.x]; // BUG
  if (Bug) pk::mbar_wait(&s.bar, 0);
  if (a == 77) s.box[threadIdx.x] = 1;
}""", box_maps),
    Plant("mbar_init without a fence", "missing_proxy_fence", TMA_HEAD + TMA_LOAD.replace(
        "pk::mbar_fence_init();", "if (!Bug) pk::mbar_fence_init();").replace("&s.bar);\n  }", "&s.bar); // BUG\n  }")
        + "  pk::mbar_wait(&s.bar, 0);\n}", box_maps),
    Plant("no proxy fence before a TMA store", "missing_proxy_fence", TMA_HEAD + TMA_LOAD + """
  pk::mbar_wait(&s.bar, 0);
  for (int i = threadIdx.x; i < 256; i += 64) s.box[i] += 1;
  if (!Bug) pk::fence_proxy_async();
  __syncthreads();
  if (threadIdx.x == 0) {
    pk::tma_store_2d(&back, s.box, 0, 0); // BUG
    pk::tma_store_commit();
    pk::tma_store_wait<0>();
  }
}""", box_maps),
    Plant("the source of a TMA store overwritten", "missing_wait", TMA_HEAD + TMA_LOAD + """
  pk::mbar_wait(&s.bar, 0);
  __syncthreads();
  if (threadIdx.x == 0) {
    pk::tma_store_2d(&back, s.box, 0, 0);
    pk::tma_store_commit();
    if (!Bug) pk::tma_store_wait_read<0>();
    s.box[3] = 0; // BUG
    pk::tma_store_wait<0>();
  }
}""", box_maps),
    Plant("a TMA store left behind", "missing_wait", TMA_HEAD + TMA_LOAD + """
  pk::mbar_wait(&s.bar, 0);
  __syncthreads();
  if (threadIdx.x == 0) {
    pk::tma_store_2d(&back, s.box, 0, 0); // BUG
    pk::tma_store_commit();
    if (!Bug) pk::tma_store_wait<0>();
  }
}""", box_maps),
    Plant("no proxy fence before wgmma", "missing_proxy_fence",
          wgmma("if (!Bug) pk::fence_proxy_async();", mark="// BUG"),
          lambda: [h.out(h.aligned(512))], block=128),
    Plant("no wgmma_fence", "missing_wgmma_fence", wgmma(fence="if (!Bug) pk::wgmma_fence();", mark="// BUG"),
          lambda: [h.out(h.aligned(512))], block=128),
    Plant("accumulators used early", "missing_wait", wgmma(wait="if (!Bug) pk::wgmma_wait<0>();", end="// BUG"),
          lambda: [h.out(h.aligned(512))], block=128),
    Plant("operands overwritten early", "missing_wait",
          wgmma(mark="// BUG", wait="if (Bug) s.a[threadIdx.x].bits = 0; // BUG\n  pk::wgmma_wait<0>();"),
          lambda: [h.out(h.aligned(512))], block=128),
    Plant("a dependent reads too early", "pdl_read_before_wait", HEAD + """(const float* x, const float* w, float* y) {
  float a = w[threadIdx.x];
  if (Bug) a += x[threadIdx.x]; // BUG
  pk::grid_wait();
  y[threadIdx.x] = a + x[threadIdx.x];
}""", lambda: [floats(), h.Arg(floats(), h.WEIGHT, "w"), h.out(h.aligned(64))], launch=dict(flags=h.PDL)),
    Plant("a dependent writes too early", "pdl_write_before_wait", HEAD + """(const float* w, float* y) {
  if (!Bug) pk::grid_wait();
  y[threadIdx.x] = w[threadIdx.x]; // BUG
  if (Bug) pk::grid_wait();
}""", lambda: [h.Arg(floats(), h.WEIGHT, "w"), h.out(h.aligned(64))], launch=dict(flags=h.PDL)),
    Plant("a divergent barrier", "divergence", HEAD + """(const float* x, float* y) {
  if (Bug && threadIdx.x < 32) {
    __syncthreads(); // BUG
  } else {
    __syncthreads(); // BUG
  }
  y[threadIdx.x] = x[threadIdx.x];
}""", x_out, clean=True),
    Plant("masks that do not match", "divergence", HEAD + """(const float* x, float* y) {
  y[threadIdx.x] = __shfl_xor_sync(Bug && threadIdx.x % 2 ? 0xfffffffeu : ~0u, x[threadIdx.x], 2); // BUG
}""", x_out),
    Plant("a lane that is not there", "inactive_lane", HEAD + """(const float* x, float* y) {
  float a = x[threadIdx.x];
  if (threadIdx.x < 16) a = __shfl_sync(0xffffu, a, Bug ? 20 : 10); // BUG
  y[threadIdx.x] = a;
}""", x_out, block=32),
    Plant("an arrival too few", "deadlock", "struct S { uint64_t bar; };\n" + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  if (threadIdx.x == 0) { pk::mbar_init(&s.bar, Bug ? 65 : 64); pk::mbar_fence_init(); }
  __syncthreads();
  pk::mbar_arrive(&s.bar);
  pk::mbar_wait(&s.bar, 0); // BUG
  y[threadIdx.x] = x[threadIdx.x];
}""", x_out),
    Plant("a named barrier too wide", "deadlock", HEAD + """(const float* x, float* y) {
  if (threadIdx.x < 64) pk::named_barrier_sync(1, Bug ? 96 : 64); // BUG
  y[threadIdx.x] = x[threadIdx.x];
}""", lambda: x_out(96), block=96),
    Plant("a flag nobody raises", "deadlock", HEAD + """(uint32_t* flag) {
  if (threadIdx.x == 0 && blockIdx.x == 1 && !Bug) pk::st_release(flag, 1u);
  pk::spin_until_ge(flag, 1u); // BUG
}""", lambda: [mutated(1, np.uint32)], grid=3),
    Plant("another block's shared memory, unordered", ("shared_race", "uninitialised_shared"),
          S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  s.v[threadIdx.x] = x[threadIdx.x]; // BUG
  if (!Bug) pk::cluster_sync();
  y[blockIdx.x * 64 + threadIdx.x] = *pk::map_shared_rank(&s.v[threadIdx.x], pk::cluster_ctarank() ^ 1); // BUG
  pk::cluster_sync();
}""", lambda: [floats(), h.out(h.aligned(128))], grid=2, launch=dict(cluster=2)),
    Plant("work between the halves of a cluster barrier", "shared_race", S64 + HEAD + """(const float* x, float* y) {
  PK_SMEM(S, s);
  if (!Bug) s.v[threadIdx.x] = x[threadIdx.x];
  s.w[threadIdx.x] = 0;
  pk::cluster_arrive();
  if (Bug) s.v[threadIdx.x] = x[threadIdx.x]; // BUG
  pk::cluster_wait();
  y[blockIdx.x * 64 + threadIdx.x] = *pk::map_shared_rank(&s.v[threadIdx.x], pk::cluster_ctarank() ^ 1); // BUG
  pk::cluster_sync();
}""", lambda: [floats(), h.out(h.aligned(128))], grid=2, launch=dict(cluster=2)),
]  # fmt: skip
