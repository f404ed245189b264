"""Coalescing: what one warp instruction costs in sectors (global memory) or wavefronts (shared memory).

Global memory moves in sectors of 32 bytes, four to a line of 128; a warp instruction is one request, and costs
each distinct sector its lanes touch once. Shared memory is in :mod:`pykern.analysis.banks`. Both are exact
against 600 random patterns and every named case that Nsight Compute counted on an H200.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pykern.analysis.banks import WARP, Phase, phases
from pykern.errors import ArgumentError, require

SECTOR = 32
LINE = 128
WIDTHS = (1, 2, 4, 8, 16)
SPACES = ("global", "shared")
OPS = ("load", "store")
#: Addresses above this are no device pointers; the bound keeps every sum in 64 bits.
MAX_ADDRESS = 2**57
#: More requests than this in one analysis is a mistake in ``--warps`` or ``--iters`` (0.1 ms each).
MAX_REQUESTS = 4096


@dataclass(frozen=True)
class Pattern:
    """One warp instruction: 32 byte addresses (``None`` = inactive lane), each ``width`` bytes wide.

    Raises :class:`ArgumentError` for an unknown space, op or width, an address that is negative or not a multiple
    of the width (the hardware faults on it), or more than 32 lanes. Fewer than 32 addresses leave the rest inactive.
    """

    space: str
    op: str
    width: int
    addrs: tuple[int | None, ...]

    def __post_init__(self) -> None:
        require(self.space in SPACES, "space", repr(self.space), " or ".join(SPACES))
        require(self.op in OPS, "op", repr(self.op), " or ".join(OPS))
        require(
            isinstance(self.width, int) and self.width in WIDTHS,
            "width",
            repr(self.width),
            "1, 2, 4, 8 or 16 bytes",
        )
        require(len(self.addrs) <= WARP, "addrs", f"{len(self.addrs)} lanes", "at most 32 (one warp)")
        for lane, addr in enumerate(self.addrs):
            if addr is None:
                continue
            name = f"addrs[{lane}]"
            require(
                type(addr) is int, name, repr(addr), "an integer byte address, or null for an inactive lane"
            )
            require(0 <= addr <= MAX_ADDRESS, name, addr, f"0 to {MAX_ADDRESS}")
            require(
                addr % self.width == 0,
                name,
                addr,
                f"a multiple of the width {self.width} (a misaligned access faults)",
            )
        object.__setattr__(self, "addrs", tuple(self.addrs) + (None,) * (WARP - len(self.addrs)))

    @property
    def active(self) -> int:
        """Number of active lanes."""
        return sum(a is not None for a in self.addrs)

    @property
    def unique_bytes(self) -> int:
        """Distinct bytes the lanes ask for (aligned accesses of one width overlap wholly or not at all)."""
        return len({a for a in self.addrs if a is not None}) * self.width

    def moved(self, addrs: Iterable[int | None], width: int | None = None) -> Pattern:
        """The same instruction at other addresses (and another width)."""
        return Pattern(self.space, self.op, width or self.width, tuple(addrs))

    @classmethod
    def from_json(cls, row: Any) -> Pattern:
        """From one line of a batch file: ``{"space", "op", "width", "addrs"}``; ``op`` defaults to ``load``."""
        require(
            isinstance(row, dict), "line", json.dumps(row)[:60], "an object with space, op, width and addrs"
        )
        for key in ("space", "width", "addrs"):
            if key not in row:
                raise ArgumentError(key, "nothing", "given in every line (with space, op, width, addrs)")
        require(
            isinstance(row["addrs"], list),
            "addrs",
            json.dumps(row["addrs"])[:60],
            "a list of byte addresses and nulls",
        )
        space, op = row["space"], row.get("op", "load")
        require(isinstance(space, str), "space", repr(space), " or ".join(SPACES))
        require(isinstance(op, str), "op", repr(op), " or ".join(OPS))
        require(type(row["width"]) is int, "width", repr(row["width"]), "1, 2, 4, 8 or 16 bytes")
        return cls(space, op, row["width"], tuple(row["addrs"]))


def sectors(pattern: Pattern) -> list[int]:
    """Distinct 32-byte sectors touched, ascending."""
    found: set[int] = set()
    for addr in pattern.addrs:
        if addr is not None:
            found.update(range(addr // SECTOR, (addr + pattern.width - 1) // SECTOR + 1))
    return sorted(found)


@dataclass(frozen=True)
class GlobalCost:
    """What a request costs in global memory. ``efficiency`` = bytes asked for / bytes moved (``None``: no lane)."""

    requests: int
    sectors: int
    lines: int
    bytes_used: int
    ideal_sectors: int

    @property
    def bytes_moved(self) -> int:
        return self.sectors * SECTOR

    @property
    def sectors_per_request(self) -> float:
        return self.sectors / self.requests if self.requests else 0

    @property
    def efficiency(self) -> float | None:
        return self.bytes_used / self.bytes_moved if self.sectors else None

    @property
    def actual(self) -> int:
        return self.sectors

    @property
    def ideal(self) -> int:
        return self.ideal_sectors

    def to_json(self) -> dict[str, Any]:
        per = self.sectors_per_request
        return {
            "requests": self.requests,
            "sectors": self.sectors,
            "lines": self.lines,
            "sectors_per_request": int(per) if per == int(per) else per,
            "bytes_used": self.bytes_used,
            "bytes_moved": self.bytes_moved,
            "efficiency": self.efficiency,
            "ideal_sectors": self.ideal_sectors,
        }


@dataclass(frozen=True)
class SharedCost:
    """What an instruction costs in shared memory. ``bank_conflicts`` = wavefronts beyond one a phase."""

    instructions: int
    wavefronts: int
    ideal_wavefronts: int
    worst_phase_ways: int
    phases: tuple[int, ...] = field(default=())

    @property
    def bank_conflicts(self) -> int:
        return self.wavefronts - self.ideal_wavefronts

    @property
    def efficiency(self) -> float | None:
        return self.ideal_wavefronts / self.wavefronts if self.wavefronts else None

    @property
    def actual(self) -> int:
        return self.wavefronts

    @property
    def ideal(self) -> int:
        return self.ideal_wavefronts

    def to_json(self) -> dict[str, Any]:
        return {
            "instructions": self.instructions,
            "wavefronts": self.wavefronts,
            "ideal_wavefronts": self.ideal_wavefronts,
            "bank_conflicts": self.bank_conflicts,
            "worst_phase_ways": self.worst_phase_ways,
            "phases": list(self.phases),
            "efficiency": self.efficiency,
        }


Cost = GlobalCost | SharedCost


def global_cost(pattern: Pattern) -> GlobalCost:
    """Sectors, lines and efficiency of one request (all zero when no lane is active: nothing is issued)."""
    found = sectors(pattern)
    used = pattern.unique_bytes
    return GlobalCost(
        requests=int(bool(found)),
        sectors=len(found),
        lines=len({s * SECTOR // LINE for s in found}),
        bytes_used=used,
        ideal_sectors=-(-used // SECTOR),
    )


def shared_cost(pattern: Pattern) -> SharedCost:
    """Wavefronts and bank conflicts of one instruction."""
    served: list[Phase] = phases(pattern.op, pattern.width, pattern.addrs)
    ways = tuple(p.wavefronts for p in served)
    return SharedCost(
        instructions=int(any(ways)),
        wavefronts=sum(ways),
        ideal_wavefronts=sum(w > 0 for w in ways),
        worst_phase_ways=max(ways),
        phases=ways,
    )


def cost(pattern: Pattern) -> Cost:
    """The cost of one instruction in its own space."""
    return global_cost(pattern) if pattern.space == "global" else shared_cost(pattern)


def total(patterns: Sequence[Pattern]) -> Cost:
    """The summed cost of several instructions of one space. Bytes are counted per request, as the hardware does."""
    require(bool(patterns), "patterns", "none", "at least one instruction")
    require(len({p.space for p in patterns}) == 1, "patterns", "several spaces", "one space at a time")
    if patterns[0].space == "global":
        parts = [global_cost(p) for p in patterns]
        return GlobalCost(
            sum(c.requests for c in parts),
            sum(c.sectors for c in parts),
            sum(c.lines for c in parts),
            sum(c.bytes_used for c in parts),
            sum(c.ideal_sectors for c in parts),
        )
    costs = [shared_cost(p) for p in patterns]
    return SharedCost(
        sum(c.instructions for c in costs),
        sum(c.wavefronts for c in costs),
        sum(c.ideal_wavefronts for c in costs),
        max(c.worst_phase_ways for c in costs),
        costs[0].phases if len(costs) == 1 else (),
    )


#: What Nsight Compute counts, and so what one line of a batch answers.
COUNTED = {"global": ("requests", "sectors"), "shared": ("wavefronts", "bank_conflicts")}


def batch_line(row: Any, full: bool = False) -> dict[str, Any]:
    """Answer one line of a batch file: the counters Nsight Compute has for its space.

    A line that carries its own ``expect`` is answered with those fields; ``full`` answers with all of them.
    """
    pattern = Pattern.from_json(row)
    answer = cost(pattern).to_json()
    expect = row.get("expect")
    if full:
        return answer
    keys = (
        [k for k in expect if k in answer]
        if isinstance(expect, dict) and expect
        else list(COUNTED[pattern.space])
    )
    return {k: answer[k] for k in keys}
