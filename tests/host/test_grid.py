"""Work that crosses blocks: grid barriers, flags, programmatic dependent launch, and their deadlocks."""

from __future__ import annotations

import numpy as np
import pytest

from . import harness as h

GRID = """
// Each round every block adds its neighbour's value of the round before.
__global__ void rounds(int* a, uint32_t* counter, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x, all = gridDim.x * blockDim.x;
  for (int r = 0; r < n; ++r) {
    a[(r + 1) * all + i] = a[r * all + i] + a[r * all + (i + blockDim.x) % all];
    pk::grid_barrier(counter);
  }
}
// Block b waits for its turn; Up: after block b - 1, else after block b + 1.
template <bool Up, bool Loop>
__global__ void turns(uint32_t* flag, int* order, int* data) {
  const uint32_t turn = Up ? blockIdx.x : gridDim.x - 1 - blockIdx.x;
  if (threadIdx.x == 0) {
    if (Loop) { while (pk::ld_acquire(flag) != turn) {} } else pk::spin_until_ge(flag, turn);
    order[turn] = blockIdx.x;
    data[turn + 1] = data[turn] * 2 + 1;
    pk::st_release(flag, turn + 1);
  }
  __syncthreads();
}
// The last block to finish adds up what all of them wrote.
__global__ void last_block(const float* x, float* part, uint32_t* count, float* y, int n) {
  float a = 0;
  for (int i = blockIdx.x * 32 + threadIdx.x; i < n; i += 32 * gridDim.x) a += x[i];
  a = pk::warp_sum(a);
  bool last = false;
  if (threadIdx.x == 0) {
    part[blockIdx.x] = a;
    last = pk::atomic_add_acq_rel(count, 1) == gridDim.x - 1;
  }
  if (__shfl_sync(~0u, last, 0) && threadIdx.x == 0) {
    float t = 0;
    for (int i = 0; i < (int)gridDim.x; ++i) t += part[i];
    *y = t;
    *count = 0;
  }
}
__global__ void never(uint32_t* flag) {
  if (threadIdx.x == 3) pk::spin_until_ge(flag, 7);
  __syncthreads();
}
__global__ void never_loop(uint32_t* flag) { while (pk::ld_acquire(flag) < 7) {} }
__global__ void skips(uint32_t* counter) { if (blockIdx.x != 2) pk::grid_barrier(counter); }
"""


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_grid_barriers(seed: int) -> None:
    kernel = h.Kernel(GRID, "rounds")
    blocks, threads, n = 12, 64, 5
    a = h.aligned((n + 1, blocks * threads), np.int32, fill=0)
    a[0] = np.arange(a.shape[1])
    counter = h.aligned(1, np.uint32, fill=0)
    want = a.copy()
    for r in range(n):
        want[r + 1] = want[r] + np.roll(want[r], -threads)
    h.launch(kernel, blocks, threads, h.Arg(a, h.MUTATED), h.Arg(counter, h.MUTATED), n, flags=h.COOPERATIVE,
             options=h.Options(seed=seed))  # fmt: skip
    assert (a == want).all() and counter[0] == 0


@pytest.mark.parametrize("up, loop", [("true", "false"), ("true", "true"), ("false", "false"), ("false", "true")])
@pytest.mark.parametrize("flags, threads", [(h.COOPERATIVE, 0), (0, 1), (0, 2)])
@pytest.mark.parametrize("seed", [0, 9])
def test_flags_between_blocks(up: str, loop: str, flags: int, threads: int, seed: int) -> None:
    n = 20
    flag, order, data = (h.aligned(n + 1, d, fill=0) for d in (np.uint32, np.int32, np.int32))
    h.launch(h.Kernel(GRID, f"turns<{up}, {loop}>"), n, 64, *[h.Arg(v, h.MUTATED) for v in (flag, order, data)],
             flags=flags, options=h.Options(seed=seed, threads=threads))  # fmt: skip
    blocks = np.arange(n)
    assert (order[:n] == (blocks if up == "true" else blocks[::-1])).all()
    assert data[n] == 2**n - 1


@pytest.mark.parametrize("seed", [0, 4])
def test_the_last_block_reduces(seed: int) -> None:
    x = h.copy_of(np.arange(1000) % 7, np.float32)
    part, count, y = h.aligned(30), h.aligned(1, np.uint32, fill=0), h.aligned(1)
    for _ in range(3):
        h.launch(h.Kernel(GRID, "last_block"), 30, 32, x, h.Arg(part, h.WORKSPACE), h.Arg(count, h.MUTATED),
                 h.out(y), 1000, options=h.Options(seed=seed, threads=2))  # fmt: skip
        assert y[0] == x.sum() and count[0] == 0


@pytest.mark.parametrize("name, place, flags", [
    ("never", "pk::spin_until_ge(flag, 7)", 0), ("never", "pk::spin_until_ge(flag, 7)", h.COOPERATIVE),
    ("never_loop", "while (pk::ld_acquire(flag) < 7)", 0),
])  # fmt: skip
@pytest.mark.parametrize("threads", [1, 2])
def test_a_flag_nobody_sets(name: str, place: str, flags: int, threads: int) -> None:
    flag = h.aligned(1, np.uint32, fill=0)
    with pytest.raises(h.HostError, match="deadlock in " + name) as error:
        h.launch(h.Kernel(GRID, name), 6, 64, h.Arg(flag, h.MUTATED), flags=flags, options=h.Options(threads=threads))
    assert h.line_of(GRID, place) in str(error.value)


def test_a_block_that_skips_the_grid_barrier() -> None:
    flag = h.aligned(1, np.uint32, fill=0)
    kernel = h.Kernel(GRID, "skips")
    for seed in range(3):
        with pytest.raises(h.HostError, match="grid_barrier"):
            h.launch(kernel, 4, 32, h.Arg(flag, h.MUTATED), flags=h.COOPERATIVE, options=h.Options(seed=seed))
    with pytest.raises(h.HostError, match="needs a cooperative launch"):
        h.launch(kernel, 4, 32, h.Arg(flag, h.MUTATED))


PDL = """
// y = x + 1; the blocks of every second launch go backwards. Wait: as the rules want it.
template <bool Wait, bool Early>
__global__ void step(const int* x, int* y, int n, int backwards) {
  if (Early) pk::grid_launch_dependents();
  if (Wait) pk::grid_wait();
  const int i = (backwards ? gridDim.x - 1 - blockIdx.x : blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + 1;
  if (!Early) pk::grid_launch_dependents();
}
"""


def chain(kernels: list[h.Kernel], options: h.Options, n: int = 300) -> bool:
    buffers = [h.aligned(n, np.int32, fill=-99) for _ in range(len(kernels) + 1)]
    buffers[0][:] = np.arange(n)
    prepared = [
        h.prepare(k, 10, 32, [buffers[i], h.out(buffers[i + 1]), n, i % 2], flags=h.PDL if i else 0, options=options)
        for i, k in enumerate(kernels)
    ]
    h.run_sequence(kernels, prepared)
    return bool((buffers[-1] == np.arange(n) + len(kernels)).all())


def test_dependent_launches_overlap_and_wait() -> None:
    good = [h.Kernel(PDL, "step<true, true>"), h.Kernel(PDL, "step<true, false>"), h.Kernel(PDL, "step<true, true>")]
    bad = [good[0], h.Kernel(PDL, "step<false, true>"), good[2]]
    assert all(chain(good, h.Options(seed=seed)) for seed in range(12))
    assert chain(bad, h.Options(seed=0))  # in order, nothing shows
    assert not all(chain(bad, h.Options(seed=seed)) for seed in range(1, 12))
