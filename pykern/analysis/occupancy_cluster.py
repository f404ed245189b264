"""How many clusters of thread blocks a whole GPU holds at a time (cc 9.0 and later).

All blocks of a cluster sit in one GPC, a group of SMs, so SMs that are left over in a GPC stay empty. How many
SMs each GPC of a chip has is not published and differs from chip to chip of one model, because faulty SMs are
switched off; only ``cuOccupancyMaxActiveClusters`` on that chip knows. Two answers are therefore given:

- an upper bound that knows nothing of GPCs: ``blocks an SM * SMs // cluster size``;
- an estimate from a list of SMs per GPC: a GPC takes part if it has at least as many SMs as the cluster has
  blocks, and then holds ``floor(SMs * blocks an SM / cluster size)``.

The driver counts at most 8 blocks an SM in a cluster launch (seen on an H200: 9 to 16 blocks an SM give the
answer of 8); both answers follow it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykern.analysis.occupancy import Config, arch, occupancy
from pykern.errors import ArgumentError, require

MAX_BLOCKS_PER_SM = 8

# One H200 (132 SMs), inferred from its own answers: the list that reproduces all 1200 rows of the tests'
# clusters_h200.csv, so it is a fit and no prediction.
# 8 of its SMs answer as if they were pairs of their own.
H200 = (18, 18, 16, 16, 16, 16, 16, 8, 2, 2, 2, 2)


@dataclass(frozen=True)
class Clusters:
    """Clusters of ``size`` blocks that the GPU holds: ``upper`` bound, and ``estimate`` from ``gpcs`` if given."""

    size: int
    blocks_per_sm: int
    sms: int
    upper: int
    estimate: int | None
    gpcs: tuple[int, ...] | None
    portable: bool

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "size": self.size,
            "sms": self.sms,
            "upper_bound": self.upper,
            "estimate": self.estimate,
            "estimate_from_gpcs": list(self.gpcs) if self.gpcs else None,
            "portable": self.portable,
        }


def clusters(cc: object, config: Config, size: int, sms: int, gpcs: Sequence[int] | None = None) -> Clusters:
    """Clusters of ``size`` blocks that a GPU of ``sms`` SMs holds; ``gpcs`` lists the SMs of each GPC.

    Raises ArgumentError for a size the chip cannot launch or a list that does not add up to ``sms``.
    """
    chip = arch(cc)
    if chip.cluster_max is None:
        raise ArgumentError("cluster", size, f"1 on {chip.cc}: clusters need compute capability 9.0 or later")
    allowed = f"1 to {chip.cluster_max} on {chip.cc}"
    if chip.cluster_portable and chip.cluster_portable < chip.cluster_max:
        allowed += f" (more than {chip.cluster_portable} needs the non-portable attribute)"
    require(1 <= size <= chip.cluster_max, "cluster", size, allowed)
    require(1 <= sms <= 10_000, "sms", sms, "1 to 10000 SMs")
    if gpcs is not None and (min(gpcs, default=0) < 1 or sum(gpcs) != sms):
        raise ArgumentError("gpcs", ",".join(map(str, gpcs)), f"positive SM counts that add up to {sms}")
    per_sm = min(occupancy(chip, config).blocks, MAX_BLOCKS_PER_SM)
    estimate = None
    if gpcs is not None:
        estimate = sum(count * per_sm // size for count in gpcs if count >= size)
    portable = size <= (chip.cluster_portable or 1)
    return Clusters(size, per_sm, sms, per_sm * sms // size, estimate, tuple(gpcs) if gpcs else None, portable)
