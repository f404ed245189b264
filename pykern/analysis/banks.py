"""Shared-memory bank conflicts of one warp instruction.

Rules, every one counted by Nsight Compute on an H200 (tests/data/coalescing_measured.json, ``_meta``, and
coalescing_pairs.jsonl): shared memory has 32 banks of 4 bytes; lanes that touch the same word are served together. An
instruction runs in phases: 32 lanes at once up to 4 bytes a lane, 16 lanes at 8 bytes, 8 lanes at 16 bytes. A *load* of
8 or 16 bytes in which every active lane has the address of ``lane ^ 1``, or every one that of ``lane ^ 2``, takes
phases of twice the lanes; a partner that is not active counts as the same address; a store never does. A phase costs as
many wavefronts (passes) as its worst bank holds distinct words.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

WARP = 32
BANKS = 32
BANK_BYTES = 4
#: Bytes one wavefront can deliver: every bank once.
WAVEFRONT_BYTES = BANKS * BANK_BYTES
_PHASE_LANES = {1: 32, 2: 32, 4: 32, 8: 16, 16: 8}

Addresses = Sequence[int | None]


@dataclass(frozen=True)
class Phase:
    """One phase: ``lanes`` served together and, per bank, the distinct words in the order lanes ask for them."""

    lanes: tuple[int, ...]
    words: tuple[tuple[int, ...], ...]

    @property
    def wavefronts(self) -> int:
        """Passes this phase takes: the distinct words of its worst bank (0 when no lane is active)."""
        return max((len(w) for w in self.words), default=0)


def phase_lanes(op: str, width: int, addrs: Addresses) -> int:
    """Lanes served together in one phase of ``op`` (``load`` or ``store``) with ``width`` bytes a lane."""
    lanes = _PHASE_LANES[width]
    if op == "load" and width >= 8:
        for partner in (1, 2):
            if all(a is None or addrs[lane ^ partner] in (None, a) for lane, a in enumerate(addrs)):
                return lanes * 2
    return lanes


def phases(op: str, width: int, addrs: Addresses) -> list[Phase]:
    """The phases of one instruction. ``addrs``: 32 byte addresses, ``None`` for an inactive lane."""
    step = phase_lanes(op, width, addrs)
    out = []
    for first in range(0, WARP, step):
        banks: list[dict[int, None]] = [{} for _ in range(BANKS)]
        lanes = []
        for lane in range(first, first + step):
            addr = addrs[lane]
            if addr is None:
                continue
            lanes.append(lane)
            for word in range(addr // BANK_BYTES, (addr + width - 1) // BANK_BYTES + 1):
                banks[word % BANKS][word] = None
        out.append(Phase(tuple(lanes), tuple(tuple(b) for b in banks)))
    return out


def wavefronts(op: str, width: int, addrs: Addresses) -> int:
    """Passes one instruction takes."""
    return sum(p.wavefronts for p in phases(op, width, addrs))
