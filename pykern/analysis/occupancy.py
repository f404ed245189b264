"""Occupancy: how many blocks of a kernel one SM holds at a time, and which resource says so.

    blocks = min over resources of floor(what the SM has / what a block takes)
    occupancy = blocks * warps per block / warps an SM can hold

What a block takes is rounded to the hardware's allocation units, which is where simple calculators go wrong:

- registers are allocated per warp, in units of 256, out of the four sub-partitions' own 16384, so an SM has
  ``4 * floor(16384 / round_up(32 * regs, 256))`` warps' worth of them and not ``65536 / ...``;
- shared memory is static + dynamic + the 1 KiB the system reserves per block from cc 8.0 on, rounded up to
  128 bytes (256 on 7.x), out of a carve-out of the unified L1 that comes in fixed steps;
- named barriers come out of a pool of the SM that limits blocks from cc 9.0 on.

Method: NVIDIA's ``cuda_occupancy.h`` (CUDA 13.5), whose answers the golden rows of the tests record for 12
compute capabilities, and ``cuOccupancyMaxActiveBlocksPerMultiprocessor`` of an H200. Where the header reports
stale limiter bits, every limit equal to the minimum is named here. The numbers of each chip and where each
comes from are in ``data/compute_capabilities.json``.
"""

from __future__ import annotations

import functools
import json
import math
import re
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pykern.errors import ArgumentError, require

WARP = 32
RESOURCES = ("registers", "shared_memory", "warps", "blocks", "barriers")
CARVEOUT_DEFAULT, CARVEOUT_MAX = -1, 100


@dataclass(frozen=True)
class Arch:
    """What one SM of a compute capability has. Bytes unless a name says KiB; registers are 32-bit."""

    cc: str
    names: str
    max_warps: int
    max_blocks: int
    max_threads_per_block: int
    regs_per_sm: int
    regs_per_block: int
    regs_per_thread: int
    reg_alloc_unit: int
    sub_partitions: int
    smem_per_sm: int
    smem_per_block: int
    smem_per_block_default: int
    smem_reserved: int
    smem_alloc_unit: int
    carveout_kib: tuple[int, ...]
    barriers: int
    barriers_bind: bool
    cluster_portable: int | None
    cluster_max: int | None

    @property
    def max_threads(self) -> int:
        """Resident threads of one SM."""
        return self.max_warps * WARP

    @property
    def sm(self) -> str:
        """The compiler's name, e.g. ``sm_90``."""
        return "sm_" + self.cc.replace(".", "")


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    path = Path(__file__).with_name("data") / "compute_capabilities.json"
    return json.loads(path.read_text(encoding="utf-8"))["cc"]


def known_ccs() -> list[str]:
    """Every compute capability in the table, oldest first."""
    return sorted(_table(), key=lambda cc: tuple(map(int, cc.split("."))))


def parse_cc(text: object, name: str = "cc") -> str:
    """``"9.0"`` from ``9.0``, ``"90"``, ``"sm_90a"`` or ``"compute_90"``; an unknown one is an error."""
    match = re.fullmatch(r"(?:sm_|compute_|SM)?(?:(\d+)\.(\d)|(\d+)(\d))[af]?", str(text).strip())
    cc = f"{match[1] or match[3]}.{match[2] or match[4]}" if match else ""
    if cc not in _table():
        raise ArgumentError(name, text, f"one of {', '.join(known_ccs())} (also as sm_90, sm_90a)")
    return cc


@functools.cache
def _arch(cc: str) -> Arch:
    row = _table()[cc]
    return Arch(
        cc=cc,
        names=row["name_examples"],
        max_warps=row["max_warps_per_sm"],
        max_blocks=row["max_blocks_per_sm"],
        max_threads_per_block=row["max_threads_per_block"],
        regs_per_sm=row["regs_per_sm"],
        regs_per_block=row["regs_per_block_max"],
        regs_per_thread=row["regs_per_thread_max"],
        reg_alloc_unit=row["reg_alloc_unit"],
        sub_partitions=row["sub_partitions"],
        smem_per_sm=row["smem_per_sm"],
        smem_per_block=row["smem_per_block_optin"],
        smem_per_block_default=row["smem_per_block_default"],
        smem_reserved=row["reserved_smem_per_block"],
        smem_alloc_unit=row["smem_alloc_unit"],
        carveout_kib=tuple(row["smem_carveout_kib"]),
        barriers=row["barriers_per_sm"],
        barriers_bind=row["barrier_limit_applied"],
        cluster_portable=row["cluster"]["max_portable"],
        cluster_max=row["cluster"]["max_nonportable"] or row["cluster"]["max_portable"],
    )


def arch(cc: object) -> Arch:
    """The :class:`Arch` of a compute capability in any spelling of :func:`parse_cc`."""
    return cc if isinstance(cc, Arch) else _arch(parse_cc(cc))


@dataclass(frozen=True)
class Config:
    """What one block of a kernel takes. ``static_smem``, ``dyn_smem``: bytes without the reserved 1 KiB.

    ``regs`` is registers a thread as the compiler reports it; ``barriers`` the named barriers it reports (16
    when an id is a run-time value); ``carveout_pct`` the hint set with
    ``cudaFuncAttributePreferredSharedMemoryCarveout``, -1 for the default, which takes the largest carve-out.
    """

    threads: int
    regs: int
    static_smem: int = 0
    dyn_smem: int = 0
    barriers: int = 1
    carveout_pct: int = CARVEOUT_DEFAULT

    def __post_init__(self) -> None:
        for name in ("threads", "regs", "static_smem", "dyn_smem", "barriers", "carveout_pct"):
            value = getattr(self, name)
            require(type(value) is int, name, repr(value), "a whole number")
        require(1 <= self.threads <= 1024, "threads", self.threads, "1 to 1024 threads a block")
        require(0 <= self.regs <= 255, "regs", self.regs, "0 to 255 registers a thread")
        require(self.static_smem >= 0, "static_smem", self.static_smem, "0 bytes or more")
        require(self.dyn_smem >= 0, "dyn_smem", self.dyn_smem, "0 bytes or more")
        require(0 <= self.barriers <= 16, "barriers", self.barriers, "0 to 16 named barriers a block")
        require(-1 <= self.carveout_pct <= 100, "carveout_pct", self.carveout_pct, "-1 (default) or 0 to 100")

    @property
    def warps(self) -> int:
        """Warps of a block; a part-filled warp takes a whole slot."""
        return math.ceil(self.threads / WARP)

    @property
    def smem(self) -> int:
        """Bytes the kernel asks for: static + dynamic."""
        return self.static_smem + self.dyn_smem

    def but(self, **changes: int) -> Config:
        """A copy with some fields changed."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Occupancy:
    """The answer for one block shape on one chip. A limit of None: the block takes none of that resource."""

    cc: str
    blocks: int
    warps: int
    occupancy: float
    limiters: tuple[str, ...]
    limits: dict[str, int | None] = field(hash=False)
    alloc_regs_per_block: int = 0
    alloc_smem_per_block: int = 0
    smem_carveout: int = 0

    def to_expect(self) -> dict[str, Any]:
        """The fields of the golden file, occupancy rounded to six places."""
        return {
            "blocks": self.blocks,
            "warps": self.warps,
            "occupancy": round(self.occupancy, 6),
            "limiters": list(self.limiters),
            "limit_regs": self.limits["registers"],
            "limit_smem": self.limits["shared_memory"],
            "limit_warps": self.limits["warps"],
            "limit_blocks": self.limits["blocks"],
            "limit_barriers": self.limits["barriers"],
            "alloc_regs_per_block": self.alloc_regs_per_block,
            "alloc_smem_per_block": self.alloc_smem_per_block,
        }


def round_up(value: int, unit: int) -> int:
    """``value`` rounded up to a multiple of ``unit``."""
    return -(-value // unit) * unit


def regs_per_warp(chip: Arch, regs: int) -> int:
    """Registers allocated to one warp of a kernel of ``regs`` registers a thread."""
    return round_up(regs * WARP, chip.reg_alloc_unit)


def allocated_smem(chip: Arch, config: Config) -> int:
    """Bytes of shared memory one block occupies: static + dynamic + reserved, in allocation units."""
    return round_up(config.smem + chip.smem_reserved, chip.smem_alloc_unit)


def carveout(chip: Arch, config: Config) -> int:
    """Bytes of shared memory the SM is set to: the smallest step that meets the hint and holds a block."""
    if config.carveout_pct == CARVEOUT_DEFAULT:
        return chip.smem_per_sm
    wanted = max(chip.smem_per_sm * config.carveout_pct / 100, config.smem + chip.smem_reserved)
    return next((kib * 1024 for kib in chip.carveout_kib if kib * 1024 >= wanted), chip.smem_per_sm)


def _limit_registers(chip: Arch, config: Config) -> int | None:
    per_warp = regs_per_warp(chip, config.regs)
    if per_warp == 0:
        return None
    if per_warp * config.warps > chip.regs_per_block:
        return 0
    per_partition = chip.regs_per_sm // chip.sub_partitions
    return chip.sub_partitions * (per_partition // per_warp) // config.warps


def _limit_smem(chip: Arch, config: Config) -> int | None:
    allocated = allocated_smem(chip, config)
    if allocated == 0:
        return None
    if config.smem > chip.smem_per_block:
        return 0
    return carveout(chip, config) // allocated


def occupancy(cc: object, config: Config) -> Occupancy:
    """Blocks of ``config`` one SM of ``cc`` holds, with every limit and every resource that binds.

    A block the chip cannot run at all (too many registers or too much shared memory) gives 0 blocks and the
    resource responsible. Raises ArgumentError for an unknown ``cc``.
    """
    chip = arch(cc)
    barriers_bind = chip.barriers_bind and config.barriers > 0
    limits: dict[str, int | None] = {
        "registers": _limit_registers(chip, config),
        "shared_memory": _limit_smem(chip, config),
        "warps": chip.max_warps // config.warps,
        "blocks": chip.max_blocks,
        "barriers": chip.barriers // config.barriers if barriers_bind else None,
    }
    blocks = min(limit for limit in limits.values() if limit is not None)
    warps = blocks * config.warps
    return Occupancy(
        cc=chip.cc,
        blocks=blocks,
        warps=warps,
        occupancy=warps / chip.max_warps,
        limiters=tuple(name for name in RESOURCES if limits[name] == blocks),
        limits=limits,
        alloc_regs_per_block=regs_per_warp(chip, config.regs) * config.warps,
        alloc_smem_per_block=allocated_smem(chip, config),
        smem_carveout=carveout(chip, config),
    )


def check_fits(cc: object, config: Config) -> None:
    """Raise ArgumentError when the block asks for more shared memory than the chip gives a block."""
    chip = arch(cc)
    if config.smem > chip.smem_per_block:
        allowed = (
            f"static + dynamic up to {chip.smem_per_block} on {chip.cc} ({chip.smem_per_block // 1024} KiB"
            f" a block with the opt-in, {chip.smem_per_sm // 1024} KiB an SM)"
        )
        raise ArgumentError("shared memory", f"{config.smem} bytes", allowed)


def from_fields(row: dict[str, Any]) -> tuple[str, Config]:
    """``(cc, Config)`` from a batch line; the names are the golden file's and the command's options."""
    known = {"threads", "regs", "static_smem", "dyn_smem", "barriers", "carveout_pct"}
    for name in ("cc", "threads", "regs"):
        require(name in row, name, "nothing", "a value; it is required")
    return parse_cc(row["cc"]), Config(**{name: row[name] for name in row if name in known})


def to_dict(result: Occupancy) -> dict[str, Any]:
    """Everything of an answer as plain JSON values."""
    return asdict(result) | {"limiters": list(result.limiters)}
