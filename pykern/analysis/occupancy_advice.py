"""What to change: the next step, headroom, launch bounds, block sizes, waves of a grid.

Every claim is the difference of two answers of :func:`pykern.analysis.occupancy.occupancy`: a step is found by
arithmetic or search and then recomputed, never predicted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pykern.analysis.occupancy import Config, Occupancy, arch, occupancy
from pykern.errors import require

REG_STEP = 8  # 256 registers a warp is 8 a thread: between multiples of 8 nothing changes
FIXED = {"warps", "blocks"}  # what an SM can hold at all: only another block size helps


@dataclass(frozen=True)
class Step:
    """A change and the answers before and after it. ``changes`` maps a field of Config to its new value."""

    changes: dict[str, int]
    text: str
    before: Occupancy
    after: Occupancy

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "changes": self.changes,
            "text": self.text,
            "blocks": [self.before.blocks, self.after.blocks],
            "occupancy": [round(self.before.occupancy, 6), round(self.after.occupancy, 6)],
        }


# --- the most a resource may be for a number of blocks -----------------------------------------------------


def max_regs(cc: object, config: Config, blocks: int) -> int:
    """The most registers a thread may use for ``blocks`` blocks to fit by registers alone; 0 when none do."""
    chip = arch(cc)
    for regs in (chip.regs_per_thread, *range(chip.regs_per_thread // REG_STEP * REG_STEP, 0, -REG_STEP)):
        limit = occupancy(chip, config.but(regs=regs)).limits["registers"]
        if limit is not None and limit >= blocks:
            return regs
    return 0


def max_smem(cc: object, config: Config, blocks: int) -> int:
    """The most bytes of static + dynamic shared memory for ``blocks`` blocks; -1 when even 0 do not fit."""
    chip = arch(cc)
    whole = chip.smem_per_sm // blocks // chip.smem_alloc_unit * chip.smem_alloc_unit - chip.smem_reserved
    for smem in range(min(whole, chip.smem_per_block), -1, -chip.smem_alloc_unit):
        limit = occupancy(chip, _with_smem(config, smem)).limits["shared_memory"]
        if limit is None or limit >= blocks:
            return smem
    return -1


def max_barriers(cc: object, config: Config, blocks: int) -> int:
    """The most named barriers a block may use for ``blocks`` blocks to fit."""
    chip = arch(cc)
    return min(16, chip.barriers // blocks) if chip.barriers_bind else 16


def _with_smem(config: Config, smem: int) -> Config:
    """``config`` with ``smem`` bytes in all; the dynamic part changes first, then the static one."""
    static = min(config.static_smem, smem)
    return config.but(static_smem=static, dyn_smem=smem - static)


# --- next steps --------------------------------------------------------------------------------------------


def next_steps(cc: object, config: Config, *, most_threads: int | None = None) -> list[Step]:
    """The smallest changes that raise occupancy, each recomputed.

    First the least reduction of what binds that lets one more block in: of one resource, or of several together
    when they bind together. Then the nearest block size that holds more warps with everything else as it is, at
    most ``most_threads``. Empty when nothing helps.
    """
    chip = arch(cc)
    now = occupancy(chip, config)
    steps = []
    if not FIXED & set(now.limiters):
        changed = _reduced(chip, config, now.limiters, now.blocks + 1)
        if changed is not None:
            after = occupancy(chip, changed)
            if after.blocks > now.blocks:
                steps.append(_step(config, changed, now, after))
    better = [row for row in block_sizes(chip, config, most=most_threads) if row.result.warps > now.warps]
    if better:
        near = min(better, key=lambda row: (abs(row.threads - config.threads), -row.result.warps))
        text = f"{near.threads} threads a block for {config.threads}: {gain(now, near.result)}"
        steps.append(Step({"threads": near.threads}, text, now, near.result))
    return steps


def _reduced(cc: object, config: Config, resources: tuple[str, ...], blocks: int) -> Config | None:
    """``config`` with just so much less of ``resources`` that ``blocks`` blocks fit; None when they cannot."""
    for resource in resources:
        if resource == "registers":
            regs = min(config.regs, max_regs(cc, config, blocks))
            if regs == 0:
                return None
            config = config.but(regs=regs)
        elif resource == "shared_memory":
            smem = min(config.smem, max_smem(cc, config, blocks))
            if smem < 0:
                return None
            config = _with_smem(config, smem)
        elif resource == "barriers":
            barriers = min(config.barriers, max_barriers(cc, config, blocks))
            if barriers == 0:
                return None
            config = config.but(barriers=barriers)
    return config


def _step(old: Config, new: Config, before: Occupancy, after: Occupancy) -> Step:
    changes: dict[str, int] = {}
    parts = []
    if new.regs < old.regs:
        changes["regs"] = new.regs
        parts.append(f"{count(old.regs - new.regs, 'fewer register')} a thread ({old.regs} -> {new.regs})")
    if new.smem < old.smem:
        changes |= {"static_smem": new.static_smem, "dyn_smem": new.dyn_smem}
        parts.append(f"{old.smem - new.smem:,} B less shared memory a block ({old.smem:,} -> {new.smem:,} B)")
    if new.barriers < old.barriers:
        changes["barriers"] = new.barriers
        parts.append(f"{count(old.barriers - new.barriers, 'fewer barrier')} ({old.barriers} -> {new.barriers})")
    return Step(changes, " and ".join(parts) + ": " + gain(before, after), before, after)


def gain(before: Occupancy, after: Occupancy) -> str:
    """``5 -> 6 blocks, 62.5% -> 75%``."""
    shares = f"{percent(before.occupancy)} -> {percent(after.occupancy)}"
    return f"{before.blocks} -> {count(after.blocks, 'block')}, {shares}"


def percent(share: float) -> str:
    """``62.5%``, ``75%``: as many of two decimals as are needed."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def count(number: int, noun: str) -> str:
    """``1 block``, ``1024 blocks``, ``65,536 blocks``."""
    shown = f"{number:,}" if number >= 10_000 else str(number)
    return f"{shown} {noun}" + ("" if number == 1 else "s")


@dataclass(frozen=True)
class Headroom:
    """How much more a block may take with no loss: registers a thread, bytes of shared memory, barriers."""

    regs: int
    smem: int
    barriers: int


def headroom(cc: object, config: Config) -> Headroom | None:
    """What the current number of blocks leaves free; None when the block does not fit at all."""
    blocks = occupancy(cc, config).blocks
    if blocks == 0:
        return None
    return Headroom(
        regs=max(max_regs(cc, config, blocks) - config.regs, 0),
        smem=max(max_smem(cc, config, blocks) - config.smem, 0),
        barriers=max(max_barriers(cc, config, blocks) - config.barriers, 0),
    )


# --- launch bounds -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """One row of the launch-bounds table: what a block may take for ``blocks`` blocks an SM."""

    blocks: int
    occupancy: float
    max_regs: int
    max_smem: int
    launch_bounds: str
    fits_now: bool


def launch_bounds(cc: object, config: Config) -> list[Bound]:
    """For each number of blocks an SM could hold at this block size: the ``__launch_bounds__`` to ask for, the
    registers (``maxnreg``) and the shared memory that allow it."""
    chip = arch(cc)
    now = occupancy(chip, config)
    most = min(chip.max_warps // config.warps, chip.max_blocks)
    rows = []
    for blocks in range(1, most + 1):
        regs, smem = max_regs(chip, config, blocks), max_smem(chip, config, blocks)
        if regs and smem >= 0:
            text = f"__launch_bounds__({config.threads}, {blocks})"
            share = blocks * config.warps / chip.max_warps
            rows.append(Bound(blocks, share, regs, smem, text, blocks <= now.blocks))
    return rows


# --- block sizes -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockSize:
    """One candidate block size and its answer."""

    threads: int
    result: Occupancy


def block_sizes(
    cc: object, config: Config, *, smem_per_thread: float = 0.0, most: int | None = None
) -> list[BlockSize]:
    """Every block size of whole warps, best first: by occupancy, then sizes of 128 and up, then the smaller.

    Registers and static shared memory stay as they are. Dynamic shared memory stays too, plus
    ``smem_per_thread`` bytes for each thread more or less than now. ``most`` caps the size (launch bounds).
    """
    chip = arch(cc)
    rows = []
    for threads in range(32, min(chip.max_threads_per_block, most or 1024) + 1, 32):
        dynamic = config.dyn_smem + round(smem_per_thread * (threads - config.threads))
        if dynamic >= 0:
            rows.append(BlockSize(threads, occupancy(chip, config.but(threads=threads, dyn_smem=dynamic))))
    return sorted(rows, key=lambda row: (-row.result.occupancy, row.threads < 128, row.threads))


# --- waves -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Waves:
    """How a grid fills the machine. ``efficiency``: share of block slots, over all waves, that hold a block."""

    grid: int
    sms: int
    slots: int
    waves: int
    tail_blocks: int
    busy_sms_in_tail: int
    efficiency: float

    def text(self) -> str:
        """One sentence for people."""
        if self.waves == 1:
            return (
                f"{count(self.grid, 'block')} on {self.slots:,} slots: one wave"
                f" ({min(self.grid, self.sms)} of {count(self.sms, 'SM')} with work)"
            )
        if self.tail_blocks == self.slots:
            return f"{self.waves:,} full waves of {count(self.slots, 'block')}: no tail"
        return (
            f"{self.grid / self.slots:.2f} waves of {count(self.slots, 'block')}: the last holds"
            f" {count(self.tail_blocks, 'block')} ({percent(self.tail_blocks / self.slots)}),"
            f" {percent(1 - self.efficiency)} of all slots stay empty"
        )


def waves(result: Occupancy, grid: int, sms: int) -> Waves | None:
    """Waves of ``grid`` blocks on ``sms`` SMs, if blocks take the same time; None when no block fits."""
    require(1 <= grid < 2**63, "grid", grid, "1 block or more")
    require(1 <= sms <= 10_000, "sms", sms, "1 to 10000 SMs")
    slots = result.blocks * sms
    if slots == 0:
        return None
    number = math.ceil(grid / slots)
    tail = grid - (number - 1) * slots
    return Waves(grid, sms, slots, number, tail, min(tail, sms), grid / (number * slots))
