"""The checker: every planted bug is found at its line whatever the schedule, and right kernels are left in peace."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pykern import check

from . import harness as h
from . import kernels_hopper as hopper
from .planted import PLANTS, Plant, x_out
from .test_grid import GRID, PDL
from .test_runtime import GEMM, REDUCE, TRANSPOSE, WARP, to_bf16

SEEDS = range(20)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    """Everything this module runs, in one compilation."""
    wanted = [(p.source, f"k<{bug}>") for p in PLANTS for bug in ("true", "false")]
    wanted += [(REDUCE, "row_sum<256>"), (TRANSPOSE, "transpose"), (WARP, "warp"), (GEMM, "gemm<true>")]
    wanted += [(hopper.GEMM, "gemm<2, 24, pk::bf16>"), (hopper.RINGS, "named"), (hopper.TMA, "bulk<96>")]
    wanted += [(hopper.RINGS, f"ring<3, {poll}>") for poll in ("false", "true")]
    wanted += [(hopper.CLUSTER, "cluster_sum<2>"), (hopper.CLUSTER, "multicast<2>")]
    wanted += [(GRID, k) for k in ("rounds", "turns<true, true>", "turns<false, false>", "last_block")]
    wanted += [(PDL, f"step<{k}>") for k in ("true, true", "true, false", "false, true")]
    wanted += [(ALIAS, "in_place"), (SPLIT, "split"), (PAST, "past"), (TRIPS, "trips")]
    for space, case in ((p.values[0], p.values[1]) for p in measured_cases()):
        wanted.append((ACCESS, access_instance(space, case)))
    h.build([(source, instance, True) for source, instance in wanted])


def findings() -> list[dict[str, Any]]:
    return [check.resolve(f) for f in h.report()["findings"]]


def test_the_table_is_long_and_varied() -> None:
    assert len(PLANTS) >= 24 and len({k for p in PLANTS for k in p.kinds}) >= 14


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.name.replace(" ", "-"))
def test_planted_bugs_are_found_at_their_line(plant: Plant) -> None:
    if "clang" in h.CXX and plant.name == "accumulators used early":
        pytest.skip("clang instruments no access to a local array")
    for seed in SEEDS:
        order = (h.EAGER, h.LAZY, h.RANDOM)[seed % 3]
        assert plant.run(True, seed, order) != 0, f"seed {seed}: nothing found"
        found = findings()
        places = [(f["kind"], f"{f.get('file')}:{f.get('line')}") for f in found]
        hits = [f for f, (kind, place) in zip(found, places) if kind in plant.kinds and place in plant.lines()]
        assert hits, (seed, places, plant.lines(), found[0]["message"])
        # One bug may show in two ways (read too early: unordered, and nothing there yet), but nowhere else.
        wrong = [p for p in places if p[0] not in plant.kinds and p[1] not in plant.lines()]
        assert not wrong, (seed, wrong)
        assert hits[0]["kernel"].startswith("k<true>") and len(hits[0]["thread"]) == 3 and hits[0]["message"]
        assert found[0]["kind"] in h.runtime().pkh_error().decode()


@pytest.mark.parametrize("plant", PLANTS, ids=lambda p: p.name.replace(" ", "-"))
def test_the_same_kernel_without_the_bug_is_clean(plant: Plant) -> None:
    for seed in range(6):
        rc = plant.run(False, seed, (h.EAGER, h.LAZY, h.RANDOM)[seed % 3])
        assert rc == 0 and not findings(), (seed, h.runtime().pkh_error())


def silent(kernel: h.Kernel, grid: Any, block: Any, *args: Any, seeds: int = 3, **kw: Any) -> None:
    for order, seed in product((h.EAGER, h.LAZY, h.RANDOM), range(seeds)):
        h.launch(kernel, grid, block, *args, options=h.Options(check=1, seed=seed, async_order=order), **kw)
        assert not findings()


def test_right_kernels_are_left_in_peace() -> None:
    rng = np.random.default_rng(2)
    x, y = h.copy_of(rng.integers(-9, 9, (7, 1000)), np.float32), h.aligned(7)
    silent(h.Kernel(REDUCE, "row_sum<256>", True), 7, 256, x, h.out(y), 1000)
    assert (y == x.sum(1)).all()
    x, y = h.copy_of(rng.standard_normal((70, 50)), np.float32), h.aligned((50, 70))
    silent(h.Kernel(TRANSPOSE, "transpose", True), (2, 3), (32, 8), x, h.out(y), 70, 50)
    assert (y == x.T).all()
    silent(h.Kernel(WARP, "warp", True), 1, 32, h.out(h.aligned(26 * 32, np.int32)), h.out(h.aligned(32)),
           h.out(h.aligned(32, np.float64)))  # fmt: skip
    a, c = to_bf16(rng.standard_normal((70, 40))), h.aligned((70, 70))
    silent(h.Kernel(GEMM, "gemm<true>", True), (2, 2), 128, a, a, h.out(c), 70, 70, 40)


def test_right_hopper_kernels_are_left_in_peace() -> None:
    rng = np.random.default_rng(3)
    a, b, c = to_bf16(rng.standard_normal((70, 200))), to_bf16(rng.standard_normal((24, 200))), h.aligned((70, 24))
    silent(h.Kernel(hopper.GEMM, "gemm<2, 24, pk::bf16>", True), (1, 2), 256, h.tensor_map(a, (64, 64)),
           h.tensor_map(b, (64, 24)), h.out(c), 70, 24, 200, smem=2 * (64 + 24) * 128 + 1024)  # fmt: skip
    x = h.copy_of(rng.integers(-9, 9, (10, 32)), np.int32)
    for poll in ("false", "true"):
        silent(h.Kernel(hopper.RINGS, f"ring<3, {poll}>", True), 1, 128, x, h.out(h.aligned(96, np.int32)), 10)
    silent(h.Kernel(hopper.RINGS, "named", True), 1, 64, x, h.out(h.aligned(32, np.int32)), 10)
    f = h.copy_of(rng.integers(-9, 9, 777), np.float32)
    silent(h.Kernel(hopper.CLUSTER, "cluster_sum<2>", True), 4, 32, f, h.out(h.aligned(2)), 777, cluster=2)
    tile = h.tensor_map(h.copy_of(rng.integers(-9, 9, (40, 32)), np.float32), (32, 8), 0)
    silent(h.Kernel(hopper.CLUSTER, "multicast<2>", True), 4, 32, tile, h.out(h.aligned((2, 2, 32))), 5, cluster=2)
    silent(h.Kernel(hopper.TMA, "bulk<96>", True), 3, 64, h.aligned(288, fill=1), h.out(h.aligned(288)))


def test_right_grids_are_left_in_peace() -> None:
    def state(n: int, dtype: Any = np.int32) -> h.Arg:
        return h.Arg(h.aligned(n, dtype, fill=0), h.MUTATED)

    silent(h.Kernel(GRID, "rounds", True), 6, 64, state(6 * 6 * 64), state(1, np.uint32), 5, flags=h.COOPERATIVE)
    for instance in ("turns<true, true>", "turns<false, false>"):
        kernel = h.Kernel(GRID, instance, True)
        for seed in range(3):  # a flag counts up, so each run needs a fresh one
            h.launch(kernel, 7, 64, state(1, np.uint32), state(8), state(8), options=h.Options(check=1, seed=seed))
            assert not findings()
    silent(h.Kernel(GRID, "last_block", True), 9, 32, h.aligned(500, fill=1), h.Arg(h.aligned(9), h.WORKSPACE),
           state(1, np.uint32), h.out(h.aligned(1)), 500)  # fmt: skip


def pdl_chain(instances: list[str], seed: int) -> int:
    kernels = [h.Kernel(PDL, i, True) for i in instances]
    buffers = [h.aligned(300, np.int32, fill=0) for _ in range(len(kernels) + 1)]
    options = h.Options(check=1, seed=seed)
    prepared = [
        h.prepare(k, 10, 32, [buffers[i], h.out(buffers[i + 1]), 300, i % 2], flags=h.PDL if i else 0, options=options)
        for i, k in enumerate(kernels)
    ]
    rc = h.run_sequence(kernels, prepared, check=False)
    assert rc or (buffers[-1] == len(kernels)).all()
    return rc


def test_sequences_share_tensors() -> None:
    for seed in range(6):
        assert pdl_chain(["step<true, true>", "step<true, false>", "step<true, true>"], seed) == 0
        assert pdl_chain(["step<true, true>", "step<false, true>", "step<true, true>"], seed) != 0
        assert {f["kind"] for f in findings()} == {"pdl_read_before_wait", "pdl_write_before_wait"}
        assert len(h.report()["launches"]) == 3


SPLIT = """
__global__ void split(const float* q, float* k) {
  const int at = threadIdx.x / 8 * 24 + threadIdx.x % 8;
  k[at] = q[at] + 1;
}
"""
PAST = "__global__ void past(float* y) { y[threadIdx.x] = 5; __syncthreads(); y[threadIdx.x + 64] = 5; }"
TRIPS = """
__global__ void trips(const float* x, float* y) {
  float a = 0;
  for (int i = 0; i <= (int)threadIdx.x; ++i) a += x[i * 32 + threadIdx.x];
  y[threadIdx.x] = a;
}
"""
ALIAS = """
__global__ void in_place(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x] + 1; }
"""


def test_tensors_that_share_memory() -> None:
    v = h.aligned(64, fill=1)
    silent(h.Kernel(ALIAS, "in_place", True), 1, 64, v, h.Arg(v, h.OUTPUT), seeds=1)
    assert (v == 4).all()  # three runs, in place
    qkv = h.aligned((8, 24), fill=1)  # three interleaved views of one tensor
    silent(h.Kernel(SPLIT, "split", True), 1, 64, qkv[:, :8], h.Arg(qkv[:, 8:16], h.OUTPUT))
    assert (qkv[:, :8] == 1).all() and (qkv[:, 8:16] == 2).all() and (qkv[:, 16:] == 1).all()


def test_nothing_is_written_back_after_an_access_out_of_bounds() -> None:
    y = h.aligned(64, fill=1)
    with pytest.raises(h.HostError, match="out_of_bounds in past.*256 bytes"):
        h.launch(h.Kernel(PAST, "past", True), 1, 64, h.out(y, "y"))
    finding = findings()[0]
    assert finding["tensor"] == "y" and finding["offset"] >= 256
    assert finding["address"] == y.ctypes.data + finding["offset"]
    assert (y == 1).all()


def test_a_variant_without_instrumentation_is_refused() -> None:
    with pytest.raises(h.HostError, match="not compiled for the checker"):
        h.launch(h.Kernel(ALIAS, "in_place"), 1, 64, *x_out(), options=h.Options(check=1))


MEASURED = json.loads((Path(__file__).resolve().parents[1] / "data" / "coalescing_measured.json").read_text())
ACCESS = """
struct S { alignas(1024) unsigned char bytes[16384]; };
template <int W, bool Shared, bool Store>
__global__ void access(const int* where, unsigned char* memory, int* sink) {
  PK_SMEM(S, s);
  using V = pk::Vec<unsigned char, W>;
  const int at = where[threadIdx.x];
  if (at >= 0) {
    V* p = reinterpret_cast<V*>((Shared ? s.bytes : memory) + at);
    V v = {};
    if (Store) pk::st(p, v); else v = pk::ld(p);
    if (v[0] == 77) sink[threadIdx.x] = 1;
  }
}
"""


def access_instance(space: str, case: dict[str, Any]) -> str:
    store = case.get("op") == "store"
    return f"access<{case['width']}, {str(space == 'shared').lower()}, {str(store).lower()}>"


def measured_cases() -> list[Any]:
    cases = []
    for space in ("global", "shared", "shared_flagged"):
        for case in MEASURED[space]:
            cases.append(pytest.param("global" if space == "global" else "shared", case, id=case["id"]))
    return cases


@pytest.mark.parametrize("space, case", measured_cases())
def test_traffic_counts_are_those_of_nsight_compute(space: str, case: dict[str, Any]) -> None:
    kernel = h.Kernel(ACCESS, access_instance(space, case), True)
    addresses = (case["addrs"] + [None] * 32)[:32]
    where = h.copy_of([-1 if a is None else a for a in addresses], np.int32)
    memory = h.Arg(h.aligned(1 << 18, np.uint8, fill=0), h.MUTATED)
    options = h.Options(check=1, trace=1)
    h.launch(kernel, 1, 32, where, memory, h.out(h.aligned(32, np.int32)), options=options, raises=False)
    assert {f["kind"] for f in findings()} <= {"uninitialised_shared"}
    wide = [check.resolve(r) for r in h.report()["lines"]]
    rows = [r for r in wide if h.line_of(ACCESS, "pk::ld(p)").endswith(f":{r['line']}") and r["space"] == space]
    want = case["expect"]
    if want.get("requests", 1) == 0:
        assert not rows
        return
    (row,) = rows
    assert row["requests"] == 1 and row["bytes"] == case["width"]
    for key in ("sectors", "ideal_sectors", "wavefronts", "ideal_wavefronts"):
        assert key not in want or row[key] == want[key], key


def test_wavefronts_beside_inactive_lanes_are_those_of_nsight_compute() -> None:
    data = Path(__file__).resolve().parents[1] / "data" / "coalescing_pairs.jsonl"
    wrong = []
    for case in map(json.loads, data.read_text().splitlines()):
        where = h.copy_of([-1 if a is None else a for a in case["addrs"]], np.int32)
        kernel = h.Kernel(ACCESS, access_instance("shared", case), True)
        memory = h.Arg(h.aligned(64, np.uint8, fill=0), h.MUTATED)
        options = h.Options(check=1, trace=1)
        h.launch(kernel, 1, 32, where, memory, h.out(h.aligned(32, np.int32)), options=options, raises=False)
        rows = map(check.resolve, h.report()["lines"])
        (row,) = [r for r in rows if r["space"] == "shared" and r["op"] == case["op"]]
        if row["wavefronts"] != case["expect"]["wavefronts"]:
            wrong.append((case, row["wavefronts"]))
    assert not wrong, wrong[:3]


def test_counts_of_a_loop_with_lane_dependent_trips() -> None:
    for seed in range(3):
        h.launch(h.Kernel(TRIPS, "trips", True), 1, 32, h.aligned(1024, fill=1), h.out(h.aligned(32)),
                 options=h.Options(check=1, trace=1, seed=seed))  # fmt: skip
        rows = {(r["op"], r["line"]): r for r in map(check.resolve, h.report()["lines"])}
        loads = rows["load", 4]
        assert (loads["requests"], loads["lanes"], loads["unique_bytes"]) == (32, 528, 528 * 4)
        (launch,) = h.report()["launches"]
        assert launch["unique_bytes_read"] == 528 * 4 and launch["unique_bytes_written"] == 128
