"""Next steps, headroom, launch bounds, block sizes, waves and clusters: every claim recomputed."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.analysis import occupancy_advice as advice
from pykern.analysis import occupancy_cluster as cluster
from pykern.analysis.occupancy import Config, arch, known_ccs, occupancy
from pykern.errors import ArgumentError

configs = st.builds(
    Config,
    threads=st.integers(1, 1024),
    regs=st.integers(1, 255),
    static_smem=st.integers(0, 20_000),
    dyn_smem=st.one_of(st.just(0), st.integers(0, 200_000)),
    barriers=st.integers(0, 16),
    carveout_pct=st.one_of(st.just(-1), st.integers(0, 100)),
)
ccs = st.sampled_from(known_ccs())


@given(ccs, configs)
def test_a_next_step_holds_and_is_the_least(cc: str, config: Config) -> None:
    for step in advice.next_steps(cc, config):
        changed = config.but(**step.changes)
        assert step.before == occupancy(cc, config)
        assert step.after == occupancy(cc, changed)
        assert step.after.warps > step.before.warps
        if "threads" in step.changes:
            continue
        assert step.after.blocks > step.before.blocks
        # one unit more of any resource that was reduced loses the step again
        if "regs" in step.changes:
            assert (
                occupancy(cc, changed.but(regs=changed.regs + 1)).blocks < step.after.blocks
                or changed.regs == config.regs
            )
        if "dyn_smem" in step.changes:
            back = changed.but(dyn_smem=changed.dyn_smem + arch(cc).smem_alloc_unit)
            assert back.smem > config.smem or occupancy(cc, back).blocks < step.after.blocks
        if "barriers" in step.changes:
            assert occupancy(cc, changed.but(barriers=changed.barriers + 1)).blocks < step.after.blocks


@given(ccs, configs)
def test_where_something_binds_there_is_a_step(cc: str, config: Config) -> None:
    result = occupancy(cc, config)
    if set(result.limiters) & {"warps", "blocks"}:
        return
    steps = [step for step in advice.next_steps(cc, config) if "threads" not in step.changes]
    if not steps:  # only when even the least of a resource lets no further block in
        least = config.but(regs=1, static_smem=0, dyn_smem=0, barriers=min(config.barriers, 1))
        assert occupancy(cc, least).blocks <= result.blocks or config.carveout_pct >= 0


@given(ccs, configs)
def test_headroom_is_free_and_one_more_is_not(cc: str, config: Config) -> None:
    room = advice.headroom(cc, config)
    result = occupancy(cc, config)
    if room is None:
        assert result.blocks == 0
        return
    regs = config.but(regs=config.regs + room.regs)
    assert occupancy(cc, regs).blocks == result.blocks
    assert regs.regs == 255 or occupancy(cc, regs.but(regs=regs.regs + 1)).blocks < result.blocks
    smem = config.but(dyn_smem=config.dyn_smem + room.smem)
    assert occupancy(cc, smem).blocks == result.blocks
    more = smem.but(dyn_smem=smem.dyn_smem + arch(cc).smem_alloc_unit)
    assert occupancy(cc, more).blocks < result.blocks or config.carveout_pct >= 0


@given(ccs, configs)
def test_launch_bounds_hold(cc: str, config: Config) -> None:
    for row in advice.launch_bounds(cc, config):
        limits = occupancy(cc, config.but(regs=row.max_regs, static_smem=0, dyn_smem=row.max_smem)).limits
        assert limits["registers"] is None or limits["registers"] >= row.blocks
        assert limits["shared_memory"] is None or limits["shared_memory"] >= row.blocks
        assert row.launch_bounds == f"__launch_bounds__({config.threads}, {row.blocks})"
        if row.max_regs < 255:
            above = occupancy(cc, config.but(regs=row.max_regs + 1)).limits["registers"]
            assert above is not None and above < row.blocks


@given(ccs, configs, st.integers(32, 1024))
def test_block_sizes_are_ranked_and_complete(cc: str, config: Config, most: int) -> None:
    rows = advice.block_sizes(cc, config, most=most)
    assert sorted(row.threads for row in rows) == list(range(32, most + 1, 32))
    shares = [row.result.occupancy for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert all(row.result == occupancy(cc, config.but(threads=row.threads)) for row in rows)


def test_issue_examples() -> None:
    (step, *_) = advice.next_steps("9.0", Config(256, 44))
    assert step.text == "4 fewer registers a thread (44 -> 40): 5 -> 6 blocks, 62.5% -> 75%"
    (step, *_) = advice.next_steps("9.0", Config(128, 32, 0, 39_936))
    assert step.text.startswith("2,048 B less shared memory a block (39,936 -> 37,888 B): 5 -> 6 blocks")


def test_dynamic_memory_that_grows_with_threads() -> None:
    rows = {
        row.threads: row.result for row in advice.block_sizes("9.0", Config(128, 32, 0, 65_536), smem_per_thread=512)
    }
    assert rows[256] == occupancy("9.0", Config(256, 32, 0, 131_072))
    assert rows[32] == occupancy("9.0", Config(32, 32, 0, 16_384))


@given(st.integers(1, 10**7), st.integers(1, 300), st.integers(1, 1024), st.integers(1, 255))
def test_waves_add_up(grid: int, sms: int, threads: int, regs: int) -> None:
    result = occupancy("9.0", Config(threads, regs))
    waves = advice.waves(result, grid, sms)
    if result.blocks == 0:
        assert waves is None
        return
    assert waves is not None
    assert (waves.waves - 1) * waves.slots + waves.tail_blocks == grid
    assert 1 <= waves.tail_blocks <= waves.slots
    assert waves.efficiency == pytest.approx(grid / (waves.waves * waves.slots))
    assert waves.text()


# --- clusters ---------------------------------------------------------------------------------------------------


def _cluster_rows() -> list[dict[str, int]]:
    with open(Path(__file__).parents[1] / "data" / "clusters_h200.csv", newline="") as file:
        return [{key: int(value) for key, value in row.items()} for row in csv.DictReader(file)]


def test_clusters_of_an_h200() -> None:
    """The upper bound holds for every row; the list fitted to these rows reproduces them; an even split does not."""
    rows = _cluster_rows()
    exact = {"fitted": 0, "even": 0}
    for row in rows:
        config = Config(row["threads"], row["regs"], row["static_smem"], row["dynamic_smem"])
        seen = row["max_active_clusters"]
        size = row["cluster_size"]
        fitted = cluster.clusters("9.0", config, size, 132, cluster.H200)
        even = cluster.clusters("9.0", config, size, 132, [17, 17, 17, 17, 16, 16, 16, 16])
        assert seen <= fitted.upper <= max(seen * 1.2, 0)  # at most 17.9% too high here
        exact["fitted"] += fitted.estimate == seen
        exact["even"] += even.estimate == seen
    assert len(rows) == exact["fitted"] == 1200
    assert exact["even"] < 600


def test_clusters_refuse_what_cannot_be() -> None:
    config = Config(128, 32)
    for args, message in (
        (("8.0", config, 2, 108), "clusters need compute capability 9.0"),
        (("9.0", config, 17, 132), "cluster: got 17, allowed: 1 to 16"),
        (("9.0", config, 0, 132), "cluster: got 0"),
        (("12.0", config, 16, 170), "cluster: got 16, allowed: 1 to 8"),
        (("9.0", config, 2, 132, [66, 65]), "gpcs: got 66,65, allowed: positive SM counts that add up to 132"),
        (("9.0", config, 2, 0), "sms: got 0"),
    ):
        with pytest.raises(ArgumentError) as caught:
            cluster.clusters(*args)  # type: ignore[arg-type]
        assert message in str(caught.value)
