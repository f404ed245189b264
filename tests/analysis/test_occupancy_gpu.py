"""The rule against the driver of the GPU here, for every shipped kernel at 5 block sizes and 5 shared-memory sizes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pykern.analysis import occupancy_live as live
from pykern.analysis.cubin import read_cubin
from pykern.analysis.occupancy import Config, arch, occupancy
from pykern.analysis.occupancy_cluster import clusters

pytestmark = pytest.mark.gpu

FILES = Path(__file__).parents[1] / "data" / "occupancy"
BLOCKS = (32, 96, 128, 320, 1024)
SMEM = (0, 1, 12_288, 65_536, 200_000)
CHUNK = 6  # kernels a compile: enough to share the parsing, few enough to spread over cores


@pytest.fixture(scope="module")
def driver() -> live.Driver:
    return live.Driver()


def shapes(most_threads: int, static: int, cc: str) -> list[tuple[int, int]]:
    """5 x 5 block and shared-memory sizes, those that the kernel may be launched with."""
    room = arch(cc).smem_per_block - static
    threads = sorted({min(size, most_threads) for size in BLOCKS})
    return [(size, smem) for size in threads for smem in SMEM if smem <= room]


def compare_image(driver: live.Driver, image: bytes, source: str) -> Iterator[tuple[str, live.Comparison]]:
    module = driver.load(image)
    for kernel in read_cubin(image, source):
        function = driver.function(module, kernel.name)
        said = driver.facts(function, kernel.name)
        assert (said.regs, said.static_smem) == (kernel.regs, kernel.static_smem), kernel.name
        most = kernel.required_threads or min(said.max_threads or 1024, 1024)
        base = Config(1, kernel.regs or 0, kernel.static_smem or 0, 0, kernel.barriers or 0)
        for row in live.compare(driver, function, base, shapes(most, base.static_smem, driver.cc)):
            yield kernel.name, row
    driver.unload(module)


def test_small_kernels(driver: live.Driver) -> None:
    """Barriers, launch bounds, static memory, spills: one kernel each."""
    if driver.cc != "9.0":
        pytest.skip(f"the binaries here are for 9.0, this GPU is {driver.cc}")
    rows = list(compare_image(driver, (FILES / "sm_90a.cubin").read_bytes(), "sm_90a.cubin"))
    assert len(rows) > 100
    assert not [(name, row) for name, row in rows if not row.same]
    sixteen = {row.driver for name, row in rows if name == "barriers16" and row.threads == 32 and row.dyn_smem == 0}
    assert sixteen == {4}  # 16 barriers a block out of a pool of 64


@pytest.mark.nvcc
@pytest.mark.slow
def test_every_shipped_kernel(driver: live.Driver) -> None:
    from pykern import op
    from pykern.commands._occupancy_build import Source, cubin_of_source
    from pykern.jit import sources
    from pykern.plan import TARGETS

    name = "90a" if driver.cc == "9.0" else driver.cc.replace(".", "")
    if name not in TARGETS:
        pytest.skip(f"pykern makes no plans for {driver.cc}")
    found: dict[str, set[str]] = {}
    for _, _, plan in op.sample_plans(TARGETS[name], op.names()):
        for launch in plan.launches:
            found.setdefault(launch.source, set()).add(launch.kernel)
    jobs = [
        Source(str(sources.locate(source)), name, instances=tuple(sorted(kernels)[start : start + CHUNK]))
        for source, kernels in sorted(found.items())
        for start in range(0, len(kernels), CHUNK)
    ]
    with ThreadPoolExecutor(max(1, (os.cpu_count() or 2) - 1)) as pool:
        images = list(pool.map(cubin_of_source, jobs))
    rows = [pair for job, image in zip(jobs, images) for pair in compare_image(driver, image, job.path)]
    differ = [(kernel, row) for kernel, row in rows if not row.same]
    print(f"{len({kernel for kernel, _ in rows})} kernels, {len(rows)} shapes, {len(differ)} differ from the driver")
    assert rows and not differ


def test_cluster_bound(driver: live.Driver) -> None:
    if arch(driver.cc).cluster_max is None:
        pytest.skip(f"no clusters on {driver.cc}")
    if driver.cc != "9.0":
        pytest.skip(f"the binaries here are for 9.0, this GPU is {driver.cc}")
    module = driver.load((FILES / "sm_90a.cubin").read_bytes())
    function = driver.function(module, "dynamic")
    said = driver.facts(function, "dynamic")
    for size in (1, 2, 4, 8, 16):
        for threads in (128, 512, 1024):
            for smem in (0, 24_576, 65_536, 113_664, 200_000):
                config = Config(threads, said.regs or 0, said.static_smem or 0, smem)
                assert occupancy(driver.cc, config).blocks > 0
                bound = clusters(driver.cc, config, size, driver.sms).upper
                assert 0 <= driver.clusters(function, config, size) <= bound
