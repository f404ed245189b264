"""Roofline: what a piece of work can reach on a chip, which ceiling binds, and how far a measurement is from it.

    floor time = max(FLOPs / peak, bytes / bandwidth)      ridge = peak / bandwidth (FLOPs a byte)

Bytes are compulsory traffic: each input and output once. A measurement above the roof means that bytes or FLOPs are
counted wrong, or that the data sat in a cache.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from pykern.analysis.roofline_gpus import Roof
from pykern.errors import require

#: Within this of each other the two ceilings are called balanced.
BALANCED = 0.05


@dataclass(frozen=True)
class Work:
    """FLOPs and bytes of one call, and its time in microseconds where it was measured. ``count``: calls a step."""

    name: str
    flops: float
    bytes: float
    time_us: float | None = None
    count: int = 1

    def __post_init__(self) -> None:
        for key in ("flops", "bytes"):
            value = getattr(self, key)
            good = isinstance(value, (int, float)) and not isinstance(value, bool)
            require(
                good and 0 <= value < 1e30,  # which NaN and infinity are not; an int may be too large for a float
                f"{self.name}: {key}",
                repr(value)[:60],
                "0 or more",
            )
        require(
            self.flops > 0 or self.bytes > 0,
            f"{self.name}: flops and bytes",
            "0 and 0",
            "one of them above 0",
        )
        if self.time_us is not None:
            good = isinstance(self.time_us, (int, float)) and not isinstance(self.time_us, bool)
            require(good and 0 < self.time_us < 1e30, f"{self.name}: time", repr(self.time_us)[:60],
                    "more than 0 microseconds")  # fmt: skip
        require(self.count >= 1, f"{self.name}: count", self.count, "1 or more")

    @property
    def intensity(self) -> float | None:
        """FLOPs a byte; ``None`` where nothing is moved."""
        return self.flops / self.bytes if self.bytes else None


@dataclass(frozen=True)
class Placed:
    """One piece of work under one roof."""

    work: Work
    roof: Roof

    @property
    def memory_us(self) -> float:
        return self.work.bytes / self.roof.gbps / 1e3

    @property
    def compute_us(self) -> float | None:
        """``None`` where the chip's peak is not on record."""
        return None if self.roof.tflops is None else self.work.flops / self.roof.tflops / 1e6

    @property
    def floor_us(self) -> float:
        return max(self.memory_us, self.compute_us or 0.0)

    @property
    def bound(self) -> str:
        """``memory``, ``compute``, ``balanced`` (within 5%), or ``memory (no compute peak known)``."""
        if self.compute_us is None:
            return "memory (no compute peak known)"
        low, high = sorted((self.memory_us, self.compute_us))
        if low >= (1 - BALANCED) * high:
            return "balanced"
        return "memory" if self.memory_us > self.compute_us else "compute"

    @property
    def attainable_tflops(self) -> float:
        """TFLOP/s at the floor time."""
        return self.work.flops / self.floor_us / 1e6

    @property
    def attainable_gbps(self) -> float:
        return self.work.bytes / self.floor_us / 1e3

    @property
    def roof_share(self) -> float | None:
        """Floor time over measured time, 1 at the roof; ``None`` without a measurement."""
        return None if self.work.time_us is None else self.floor_us / self.work.time_us

    @property
    def headroom(self) -> float | None:
        """How many times faster the roof is than the measurement."""
        return None if self.work.time_us is None else self.work.time_us / self.floor_us

    @property
    def note(self) -> str:
        """What to make of the measurement."""
        share = self.roof_share
        if share is None:
            return ""
        if share > 1.005:
            return f"{100 * share:.4g}% of the roof: bytes or FLOPs are miscounted, or a cache held the data"
        return f"{100 * share:.4g}% of the {self.bound.split(' ')[0]} roof, {self.headroom:.3g}x headroom"

    def to_json(self) -> dict[str, Any]:
        w = self.work
        out: dict[str, Any] = {
            "name": w.name, "flops": w.flops, "bytes": w.bytes, "intensity": w.intensity, "ridge": self.roof.ridge,
            "bound": self.bound, "memory_us": self.memory_us, "compute_us": self.compute_us, "floor_us": self.floor_us,
            "attainable_tflops": self.attainable_tflops, "attainable_gbps": self.attainable_gbps,
        }  # fmt: skip
        if w.count > 1:
            out["count"] = w.count
        if w.time_us is not None:
            out |= {"time_us": w.time_us, "achieved_tflops": w.flops / w.time_us / 1e6,
                    "achieved_gbps": w.bytes / w.time_us / 1e3, "roof_share": self.roof_share,
                    "headroom": self.headroom, "note": self.note}  # fmt: skip
        return out


def place(works: list[Work], roof: Roof) -> list[Placed]:
    """Every piece of work under the roof."""
    require(math.isfinite(roof.gbps) and roof.gbps > 0, "peak-gbps", roof.gbps, "more than 0 GB/s")
    if roof.tflops is not None:
        require(
            math.isfinite(roof.tflops) and roof.tflops > 0, "peak-tflops", roof.tflops, "more than 0 TFLOP/s"
        )
    return [Placed(w, roof) for w in works]
