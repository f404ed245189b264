"""What to change about an access pattern, each suggestion proven by counting the changed pattern again.

Shared memory: padding (a row pitch that spreads rows over the banks) and XOR swizzles (bits of the row index
folded into the chunk index), found by search. Global memory: alignment, wider vectors, structure of arrays, and
lanes along the contiguous axis. A swizzle is an involution on addresses, so no two elements meet in one place;
the proof recounts the pattern itself and every companion access of the same buffer (by default the row-wise one).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pykern.analysis.banks import WARP
from pykern.analysis.coalescing import LINE, SECTOR, Pattern, total
from pykern.errors import require


@dataclass(frozen=True)
class Fix:
    """A change, its cost before and after (sectors or wavefronts, summed), and how it would be written."""

    kind: str
    text: str
    code: str
    before: int
    after: int
    ideal: int
    patterns: tuple[Pattern, ...]
    extra: dict[str, Any]

    def to_json(self) -> dict[str, Any]:
        return {
            "kind": self.kind,
            "text": self.text,
            "code": self.code,
            "before": self.before,
            "after": self.after,
            "ideal": self.ideal,
            **self.extra,
        }


@dataclass(frozen=True)
class Swizzle:
    """``addr ^ ((addr >> shift) & mask)`` with ``mask = (2**bits - 1) << base``; needs ``shift >= bits``.

    The bits taken (from ``base + shift``) and the bits changed (from ``base``) never meet, so applying it twice
    gives the address back: it moves elements and never merges two.
    """

    bits: int
    base: int
    shift: int

    def __post_init__(self) -> None:
        require(
            0 < self.bits <= self.shift,
            "swizzle",
            f"bits {self.bits}, shift {self.shift}",
            "0 < bits <= shift",
        )

    @property
    def mask(self) -> int:
        return ((1 << self.bits) - 1) << self.base

    def __call__(self, addr: int) -> int:
        return addr ^ ((addr >> self.shift) & self.mask)

    @property
    def code(self) -> str:
        return f"addr ^ ((addr >> {self.shift}) & {self.mask:#x})"


def _mapped(patterns: Sequence[Pattern], move: Callable[[int], int]) -> tuple[Pattern, ...]:
    return tuple(p.moved(None if a is None else move(a) for a in p.addrs) for p in patterns)


def widest(patterns: Sequence[Pattern]) -> int:
    """The widest access of several, in bytes."""
    return max(p.width for p in patterns)


def infer_pitch(patterns: Sequence[Pattern]) -> int | None:
    """The row pitch in bytes where lanes walk down a column: the step beyond the width that most lanes take."""
    steps = Counter(
        abs(b - a) for p in patterns for a, b in zip(p.addrs, p.addrs[1:]) if a is not None and b is not None
    )
    if not steps:
        return None
    step, times = steps.most_common(1)[0]
    return step if step > widest(patterns) and 2 * times >= steps.total() else None


def row_companion(pattern: Pattern, pitch: int) -> list[Pattern]:
    """Row-wise accesses of the same tile: 32 lanes along a row of ``pitch`` bytes, and on into the next rows."""
    start = min((a for a in pattern.addrs if a is not None), default=0) // pitch * pitch
    return (
        [
            Pattern(
                pattern.space,
                pattern.op,
                pattern.width,
                tuple(start + r * pitch + n * pattern.width for n in range(WARP)),
            )
            for r in range(min(4, max(1, LINE * 4 // pitch)))
        ]
        if pitch % pattern.width == 0
        else []
    )


def swizzles(
    patterns: Sequence[Pattern], companions: Sequence[Pattern] = ()
) -> list[tuple[Swizzle, int, int]]:
    """Every XOR swizzle with its wavefronts (patterns, companions), the best first, then the fewest bits.

    Swizzled bits stay at or above the vector width, so no access is torn or loses its alignment.
    """
    low = max(widest(patterns), widest(companions) if companions else 1, 4).bit_length() - 1
    top = max((a for p in (*patterns, *companions) for a in p.addrs if a is not None), default=0)
    found = []
    for base in range(low, 7):  # the bank index is address bits 2 to 6: only those change a bank
        for bits in range(1, 7 - base + 1):
            for shift in range(bits, max(bits + 1, top.bit_length() - base + 1)):
                swizzle = Swizzle(bits, base, shift)
                own = total(_mapped(patterns, swizzle)).actual
                other = total(_mapped(companions, swizzle)).actual if companions else 0
                found.append((swizzle, own, other))
    return sorted(found, key=lambda f: (f[1] + f[2], f[1], f[0].bits, f[0].shift))


def paddings(
    patterns: Sequence[Pattern], pitch: int, companions: Sequence[Pattern] = ()
) -> list[tuple[int, int, int]]:
    """Every padding of a row (bytes, up to one line) with its wavefronts (patterns, companions), the best first."""
    width = widest((*patterns, *companions))
    found = []
    for pad in range(width, LINE + 1, width):

        def move(addr: int, pad: int = pad) -> int:
            return addr // pitch * (pitch + pad) + addr % pitch

        if (pitch + pad) % width:
            continue
        own = total(_mapped(patterns, move)).actual
        other = total(_mapped(companions, move)).actual if companions else 0
        found.append((pad, own, other))
    return sorted(found, key=lambda f: (f[1] + f[2], f[1], f[0]))


def shared_fixes(
    patterns: Sequence[Pattern], pitch: int | None = None, companions: Sequence[Pattern] | None = None
) -> list[Fix]:
    """Fixes for bank conflicts, the most effective first; empty when there is none or nothing helps.

    ``pitch``: bytes from one row of the buffer to the next (inferred for a plain column walk). ``companions``: the
    other accesses of the buffer, which must not get worse; ``None`` takes the row-wise access of the same tile.
    """
    before = total(patterns)
    if before.actual == before.ideal:
        return []
    pitch = pitch or infer_pitch(patterns)
    if companions is None:
        companions = row_companion(patterns[0], pitch) if pitch else []
    width = widest(patterns)
    other_before = total(companions).actual if companions else 0
    fixes = []

    def proof(own: int, other: int) -> dict[str, Any]:
        return {"companion_before": other_before, "companion_after": other, "companions": len(companions)}

    if pitch and pitch % width == 0:
        best = paddings(patterns, pitch, companions)
        if best and best[0][1] < before.actual and best[0][2] <= other_before:
            pad, own, other = best[0]
            moved = _mapped(patterns, lambda a: a // pitch * (pitch + pad) + a % pitch)
            fixes.append(
                Fix(
                    "padding",
                    f"pad each row of {pitch} B by {pad} B: {before.actual} -> {own} wavefronts, "
                    f"{100 * pad / pitch:.3g}% more shared memory",
                    f"row * {pitch + pad} + column_bytes",
                    before.actual,
                    own,
                    before.ideal,
                    moved,
                    {"pitch": pitch, "pad": pad, **proof(own, other)},
                )
            )
    for swizzle, own, other in swizzles(patterns, companions):
        if own < before.actual and other <= other_before:
            moved = _mapped(patterns, swizzle)
            fixes.append(
                Fix(
                    "swizzle",
                    f"swizzle {swizzle.bits} bit{'s' * (swizzle.bits > 1)}: {before.actual} -> {own} "
                    "wavefronts, no extra shared memory",
                    swizzle.code,
                    before.actual,
                    own,
                    before.ideal,
                    moved,
                    {"bits": swizzle.bits, "base": swizzle.base, "shift": swizzle.shift, **proof(own, other)},
                )
            )
            break
    fixes += _side_by_side(patterns, before.actual)
    return sorted(fixes, key=lambda f: f.after)


def _side_by_side(patterns: Sequence[Pattern], before: int) -> list[Fix]:
    """Neighbouring lanes on neighbouring vectors: the layout that never conflicts."""
    packed = _packed(patterns)
    after = total(packed)
    if after.actual >= before:
        return []
    width = widest(patterns)
    return [
        Fix(
            "layout",
            f"store what the lanes read side by side (lane n at n x {width} B): {before} -> {after.actual} "
            "wavefronts",
            f"lane * {width}",
            before,
            after.actual,
            after.ideal,
            packed,
            {},
        )
    ]


def _packed(patterns: Sequence[Pattern]) -> tuple[Pattern, ...]:
    """Each instruction's distinct elements side by side, in the order of the lanes, from address 0."""
    out = []
    for p in patterns:
        rank: dict[int, int] = {}
        for a in p.addrs:
            if a is not None:
                rank.setdefault(a, len(rank))
        out.append(p.moved(None if a is None else rank[a] * p.width for a in p.addrs))
    return tuple(out)


def global_fixes(patterns: Sequence[Pattern]) -> list[Fix]:
    """Fixes for uncoalesced global accesses, the most effective first; empty when every byte moved is used."""
    before = total(patterns)
    if before.actual == before.ideal:
        return []
    fixes: list[Fix] = []
    width = widest(patterns)
    starts = {min((a for a in p.addrs if a is not None), default=0) % SECTOR for p in patterns}
    if starts != {0}:
        moved = tuple(
            p.moved(
                None if a is None else a - min(x for x in p.addrs if x is not None) % SECTOR for a in p.addrs
            )
            for p in patterns
        )
        after = total(moved).actual
        if after < before.actual:
            where = (
                f"start on a 32-byte boundary (now at byte {starts.pop()} of a sector)"
                if len(starts) == 1
                else "start every row on a 32-byte boundary (pad the pitch to a multiple of 32 B)"
            )
            fixes.append(
                Fix(
                    "alignment",
                    f"{where}: {before.actual} -> {after} sectors",
                    "align the base and the pitch, or peel the first elements",
                    before.actual,
                    after,
                    before.ideal,
                    moved,
                    {},
                )
            )
    stride = _stride(patterns)
    if stride and width < stride <= 16 and stride in (2, 4, 8, 16):
        wide = tuple(
            p.moved((None if a is None else a // stride * stride for a in p.addrs), stride) for p in patterns
        )
        cost = total(wide)
        if cost.actual <= before.actual and cost.actual == cost.ideal:
            fixes.append(
                Fix(
                    "vector",
                    f"if the other fields are wanted too, load the whole {stride}-byte structure as one "
                    f"vector: {cost.actual} sectors, all of them used (now {stride // width} instructions would "
                    f"move {before.actual * (stride // width)})",
                    f"Vec<{stride} bytes> at lane * {stride}",
                    before.actual,
                    cost.actual,
                    cost.ideal,
                    wide,
                    {"width": stride},
                )
            )
    packed = _packed(patterns)
    after = total(packed).actual
    if after < min([before.actual, *(f.after for f in fixes if f.kind == "alignment")]):
        if stride and stride >= LINE:
            text = (
                f"a column walk ({stride} B from lane to lane): put lanes along the row, or go through a shared tile "
                f"and transpose: {before.actual} -> {after} sectors"
            )
        elif stride:
            text = (
                f"every {stride} B only {width} are used: keep the field in its own array (structure of arrays): "
                f"{before.actual} -> {after} sectors"
            )
        else:
            text = f"put what one warp reads side by side: {before.actual} -> {after} sectors"
        fixes.append(
            Fix("layout", text, f"base + lane * {width}", before.actual, after, before.ideal, packed, {})
        )
    return sorted(fixes, key=lambda f: (f.kind == "vector", f.after))


def _stride(patterns: Sequence[Pattern]) -> int | None:
    steps = {b - a for p in patterns for a, b in zip(p.addrs, p.addrs[1:]) if a is not None and b is not None}
    return abs(steps.pop()) if len(steps) == 1 else None


def hint(patterns: Sequence[Pattern]) -> str:
    """What else to try where nothing is wasted: wider vectors for narrow unit-stride accesses; '' otherwise."""
    before, width = total(patterns), widest(patterns)
    if before.actual != before.ideal or width >= 16 or not before.actual or _stride(patterns) != width:
        return ""
    if any(p.active < WARP or min(a for a in p.addrs if a is not None) % 16 for p in patterns):
        return ""
    return (
        f"nothing is wasted; 16-byte vectors would move the same bytes with 1/{16 // width} of the instructions "
        "and keep more bytes in flight"
    )


def fixes(
    patterns: Sequence[Pattern], pitch: int | None = None, companions: Sequence[Pattern] | None = None
) -> list[Fix]:
    """Fixes for one access, by its space. See :func:`global_fixes` and :func:`shared_fixes`."""
    require(pitch is None or pitch > 0, "pitch", pitch, "a positive number of bytes")
    if patterns[0].space == "global":
        return global_fixes(patterns)
    return shared_fixes(patterns, pitch, companions)
