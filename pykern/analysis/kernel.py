"""What a binary, a compiler log or a driver says about one kernel: the facts an occupancy answer starts from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class KernelFacts:
    """Facts of one kernel; None means that the source does not say.

    Sizes are bytes. ``static_smem`` never includes the 1 KiB the system reserves. ``max_threads`` is the product
    of the launch bounds, ``required_threads`` that of a fixed block shape. ``frame`` is a thread's stack frame;
    ``spill_stores``/``spill_loads`` bytes of spill instructions in the code, ``local_stores``/``local_loads``
    those of all local-memory instructions (spills, arrays indexed at run time, saved registers). ``target`` is
    what the compiler was asked for (``sm_90a``), ``cc`` the compute capability it is.
    """

    name: str
    origin: str
    cc: str | None = None
    target: str | None = None
    regs: int | None = None
    static_smem: int | None = None
    barriers: int | None = None
    max_threads: int | None = None
    required_threads: int | None = None
    min_blocks: int | None = None
    max_regs: int | None = None
    frame: int | None = None
    spill_stores: int | None = None
    spill_loads: int | None = None
    local_stores: int | None = None
    local_loads: int | None = None
    cluster: tuple[int, int, int] | None = None
    notes: tuple[str, ...] = ()

    @property
    def spills(self) -> int | None:
        """Bytes of spill stores and loads together, None when the source does not say."""
        if self.spill_stores is None and self.spill_loads is None:
            return None
        return (self.spill_stores or 0) + (self.spill_loads or 0)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return asdict(self) | {"spills": self.spills, "notes": list(self.notes)}
