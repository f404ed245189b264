"""One kernel's whole answer, as values: what ``pykern occupancy`` prints as text or as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykern.analysis import occupancy_advice as advice
from pykern.analysis import occupancy_cluster as cluster
from pykern.analysis.kernel import KernelFacts
from pykern.analysis.occupancy import Occupancy, arch, check_fits, occupancy
from pykern.analysis.occupancy_sources import Case

LIMIT_NAMES = {
    "registers": "registers",
    "shared_memory": "shared memory",
    "warps": "warps an SM",
    "blocks": "blocks an SM",
    "barriers": "barriers",
}


@dataclass(frozen=True)
class Answer:
    """Everything about one case; ``flags`` are the things a person should not overlook."""

    case: Case
    result: Occupancy
    steps: list[advice.Step]
    headroom: advice.Headroom | None
    bounds: list[advice.Bound]
    sizes: list[advice.BlockSize]
    waves: advice.Waves | None
    clusters: cluster.Clusters | None
    flags: list[str]

    @property
    def launchable(self) -> bool:
        """Whether one block fits."""
        return self.result.blocks > 0

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        room = self.headroom
        return {
            **self.case.to_dict(),
            **self.result.to_expect(),
            "smem_carveout": self.result.smem_carveout,
            "flags": self.flags,
            "next_steps": [step.to_dict() for step in self.steps],
            "headroom": vars(room) if room else None,
            "launch_bounds": [vars(row) for row in self.bounds],
            "block_sizes": [
                {"threads": row.threads, "blocks": row.result.blocks, "occupancy": round(row.result.occupancy, 6)}
                for row in self.sizes
            ],
            "waves": vars(self.waves) if self.waves else None,
            "clusters": self.clusters.to_dict() if self.clusters else None,
        }


def answer(
    case: Case,
    *,
    grid: int | None = None,
    sms: int | None = None,
    cluster_size: int | None = None,
    gpcs: Sequence[int] | None = None,
    smem_per_thread: float = 0.0,
) -> Answer:
    """Answer a case. Raises ArgumentError for a block that asks for more shared memory than the chip gives."""
    check_fits(case.cc, case.config)
    result = occupancy(case.cc, case.config)
    most = case.most_threads
    size = case.cluster if cluster_size is None else cluster_size
    clusters = None
    if size is not None and size != 1 and sms is not None:
        clusters = cluster.clusters(case.cc, case.config, size, sms, gpcs)
    blocks = case.grid if grid is None else grid
    return Answer(
        case=case,
        result=result,
        steps=advice.next_steps(case.cc, case.config, most_threads=most),
        headroom=advice.headroom(case.cc, case.config),
        bounds=advice.launch_bounds(case.cc, case.config),
        sizes=advice.block_sizes(case.cc, case.config, smem_per_thread=smem_per_thread, most=most),
        waves=advice.waves(result, blocks, sms) if blocks is not None and sms is not None else None,
        clusters=clusters,
        flags=_flags(case, result),
    )


def _flags(case: Case, result: Occupancy) -> list[str]:
    chip, config, facts = arch(case.cc), case.config, case.facts
    flags = []
    if result.blocks == 0:
        names = " and ".join(LIMIT_NAMES[name] for name in result.limiters)
        flags.append(f"cannot be launched: not one block fits, because of {names}")
    if config.threads % 32:
        idle = -config.threads % 32
        filled = f"{advice.count(config.threads, 'thread')} in {advice.count(config.warps, 'warp')}"
        flags.append(f"{filled}: {advice.count(idle, 'lane')} of the last idle")
    if config.smem > chip.smem_per_block_default:
        flags.append(
            f"more than {chip.smem_per_block_default // 1024} KiB of shared memory: needs"
            " cudaFuncAttributeMaxDynamicSharedMemorySize"
        )
    if config.barriers == 16 and facts is not None:
        flags.append("16 barriers: a barrier id computed at run time makes the compiler reserve all of them")
    if facts is not None:
        flags += _memory_flags(facts)
    return flags


def _memory_flags(facts: KernelFacts) -> list[str]:
    flags = []
    spilled = facts.spills or 0
    if spilled:
        stores, loads = facts.spill_stores or 0, facts.spill_loads or 0
        flags.append(f"spills: {stores:,} B of stores and {loads:,} B of loads to local memory in the code")
    other = (facts.local_stores or 0) + (facts.local_loads or 0) - spilled
    if other > 0:
        cause = "an array indexed at run time, or registers saved across a call"
        if facts.spills is None:
            cause = "spills, " + cause
        flags.append(f"local memory: {other:,} B of accesses in the code ({cause})")
    if facts.frame:
        flags.append(f"stack frame of {facts.frame:,} B a thread")
    return flags
