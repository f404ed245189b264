"""The sector grid and the bank grid of one warp instruction, as pictures and as rows of a terminal."""

from __future__ import annotations

from pykern.analysis.banks import BANK_BYTES, BANKS, phases
from pykern.analysis.coalescing import LINE, SECTOR, Pattern, global_cost, sectors, shared_cost
from pykern.analysis.report_figures import CellGrid


def sector_grid(pattern: Pattern, note: str = "") -> CellGrid:
    """A row per touched 128-byte line; a cell per word (or per element below 4 bytes), marked with its lane.

    Blue was asked for, orange came along in the same 32-byte sector, grey was not moved.
    """
    cell = min(pattern.width, 4)
    owner: dict[int, list[int]] = {}
    for lane, addr in enumerate(pattern.addrs):
        if addr is not None:
            for byte in range(addr, addr + pattern.width, cell):
                owner.setdefault(byte // cell, []).append(lane)
    moved = set(sectors(pattern))
    lines = sorted({s * SECTOR // LINE for s in moved})
    kinds, texts, labels = [], [], []
    for line in lines:
        first = line * LINE // cell
        cells = range(first, first + LINE // cell)
        kinds.append(
            tuple(
                "used" if c in owner else "wasted" if c * cell // SECTOR in moved else "idle" for c in cells
            )
        )
        texts.append(tuple(_lanes(owner.get(c, ())) for c in cells))
        labels.append(f"line at byte {line * LINE}")
    answer = global_cost(pattern)
    share = (
        "no lane is active"
        if answer.efficiency is None
        else f"{100 * answer.efficiency:.3g}% of {answer.bytes_moved} B used"
    )
    plural = "s" * (answer.sectors != 1)
    counted = f"{answer.sectors} sector{plural} for {answer.bytes_used} B asked (ideal {answer.ideal_sectors})"
    title = f"{note + ': ' if note else ''}{counted}, {share}"
    if not lines:
        kinds, texts, labels = [("idle",) * (LINE // cell)], [("",) * (LINE // cell)], ["nothing moved"]
    return CellGrid(
        title,
        f"{cell}-byte element of the line (bold: 32-byte sectors)",
        tuple(labels),
        tuple(kinds),
        tuple(texts),
        bold_every=SECTOR // cell,
    )


def bank_grid(pattern: Pattern, note: str = "") -> CellGrid:
    """A row per wavefront; a cell per bank, marked with the lane it serves.

    Blue is the first pass of a phase, red a further one that only conflicts made, orange a bank that idles in it.
    """
    kinds, texts, labels = [], [], []
    for number, phase in enumerate(phases(pattern.op, pattern.width, pattern.addrs)):
        lanes_of: dict[int, list[int]] = {}
        for lane in phase.lanes:
            addr = pattern.addrs[lane]
            assert addr is not None
            for word in range(addr // BANK_BYTES, (addr + pattern.width - 1) // BANK_BYTES + 1):
                lanes_of.setdefault(word, []).append(lane)
        for turn in range(phase.wavefronts):
            words = [bank[turn] if turn < len(bank) else None for bank in phase.words]
            busy, free = ("used", "idle") if turn == 0 else ("conflict", "wasted")
            kinds.append(tuple(free if w is None else busy for w in words))
            texts.append(tuple("" if w is None else _lanes(lanes_of[w]) for w in words))
            labels.append(f"phase {number}" if turn == 0 else f"+{turn}")
    answer = shared_cost(pattern)
    title = (
        f"{note + ': ' if note else ''}{answer.wavefronts} wavefront{'s' * (answer.wavefronts != 1)} (ideal "
        f"{answer.ideal_wavefronts}), {answer.bank_conflicts} bank conflict{'s' * (answer.bank_conflicts != 1)}"
        + (f", {answer.worst_phase_ways}-way at worst" if answer.bank_conflicts else "")
    )
    if not kinds:
        kinds, texts, labels = [("idle",) * BANKS], [("",) * BANKS], ["nothing served"]
    return CellGrid(title, "bank (4 bytes each)", tuple(labels), tuple(kinds), tuple(texts), bold_every=8)


def _lanes(lanes: list[int] | tuple[()]) -> str:
    if not lanes:
        return ""
    return str(lanes[0]) if len(lanes) == 1 else f"{lanes[0]}+"


def grid(pattern: Pattern, note: str = "") -> CellGrid:
    """The grid of the pattern's own space."""
    return sector_grid(pattern, note) if pattern.space == "global" else bank_grid(pattern, note)
