"""The host checker's per-line table (``pykern check OP --json``), ranked by what each line wastes.

Sectors and wavefronts are not the same currency. They are compared as time on one chip: a sector is 32 bytes at
its memory bandwidth, a wavefront 128 bytes at one a clock an SM. Both assume that nothing hits a cache or overlaps,
so the figure ranks lines and bounds what fixing one can save; it does not predict a run time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pykern.analysis.banks import WAVEFRONT_BYTES
from pykern.analysis.coalescing import SECTOR
from pykern.errors import ArgumentError, require

_COUNTS = ("requests", "sectors", "ideal_sectors", "wavefronts", "ideal_wavefronts", "unique_bytes")


@dataclass(frozen=True)
class TableLine:
    """One source line's traffic: counts over the whole run; ``bytes`` is the width of one lane's access."""

    file: str
    line: int
    space: str
    op: str
    bytes: int
    requests: int
    sectors: int
    ideal_sectors: int
    wavefronts: int
    ideal_wavefronts: int
    unique_bytes: int

    @property
    def actual(self) -> int:
        return self.wavefronts if self.space == "shared" else self.sectors

    @property
    def ideal(self) -> int:
        return self.ideal_wavefronts if self.space == "shared" else self.ideal_sectors

    @property
    def wasted(self) -> int:
        """Sectors (global) or wavefronts (shared) beyond the ideal."""
        return max(0, self.actual - self.ideal)

    @property
    def efficiency(self) -> float | None:
        return self.ideal / self.actual if self.actual else None

    def wasted_us(self, dram_gbps: float, shared_gbps: float) -> float:
        """Microseconds the waste takes at the given bandwidths (GB/s, whole chip)."""
        if self.space == "shared":
            return self.wasted * WAVEFRONT_BYTES / shared_gbps / 1e3
        return self.wasted * SECTOR / dram_gbps / 1e3

    def advice(self) -> str:
        """The usual cause of what this line shows, by its ratio."""
        if not self.wasted:
            return "nothing to gain"
        per = self.actual / self.requests if self.requests else 0.0
        ratio = self.actual / self.ideal if self.ideal else float("inf")
        if self.space == "shared":
            ideal = self.ideal / max(1, self.requests)
            return f"{per:.3g} wavefronts a request, ideal {ideal:.3g}: pad or swizzle the rows"
        if ratio <= 1.3:
            return "rows start inside a sector: align the base or the pitch to 32 B"
        if self.bytes < 16 and per >= 31:
            return "a sector for every lane: lanes walk a column, put them along the row"
        return (
            f"{ratio:.3g}x the sectors needed: read neighbouring elements, or whole structures as one vector"
        )

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file,
            "line": self.line,
            "space": self.space,
            "op": self.op,
            "bytes": self.bytes,
            **{name: getattr(self, name) for name in _COUNTS},
            "wasted": self.wasted,
            "efficiency": self.efficiency,
            "advice": self.advice(),
        }


def _rows(value: Any, depth: int = 0) -> Iterator[Any]:
    """Every entry of every ``lines`` list in the document, wherever the checker's report nests it."""
    if depth > 8:
        return
    if isinstance(value, dict):
        for key, item in value.items():
            if key == "lines" and isinstance(item, list):
                yield from item
            else:
                yield from _rows(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            yield from _rows(item, depth + 1)


def _line(number: int, row: Any) -> TableLine:
    name = f"lines[{number}]"
    require(
        isinstance(row, dict), name, repr(row)[:60], "an object with file, line, space, op and the counts"
    )
    for key in ("space", "op"):
        require(isinstance(row.get(key), str), f"{name}.{key}", repr(row.get(key))[:60], "text")
    file = row.get("file", "?")  # the checker cannot name a line where there is no addr2line
    require(isinstance(file, str), f"{name}.file", repr(file)[:60], "text")
    require(row["space"] in ("global", "shared"), f"{name}.space", repr(row["space"]), "global or shared")
    counts: dict[str, int] = {}
    for key in ("line", "bytes", *_COUNTS):
        value = row.get(key, 0)
        require(
            type(value) is int and 0 <= value < 2**63,
            f"{name}.{key}",
            repr(value)[:60],
            "a whole number, 0 or more",
        )
        counts[key] = value
    return TableLine(file=file, space=row["space"], op=row["op"], **counts)


def merged(lines: list[TableLine]) -> list[TableLine]:
    """One entry for each line, access and width: a template or an unrolled loop has several of one line."""
    out: dict[tuple[str, int, str, str, int], TableLine] = {}
    for line in lines:
        key = (line.file, line.line, line.space, line.op, line.bytes)
        before = out.get(key)
        if before is None:
            out[key] = line
        else:
            out[key] = replace(
                line, **{name: getattr(before, name) + getattr(line, name) for name in _COUNTS}
            )
    return list(out.values())


def read_table(text: str, source: str = "table") -> list[TableLine]:
    """The lines of a checker report. Raises ArgumentError when it is no such report."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError(
            source, repr(text.strip()[:60]), f"the JSON of pykern check OP --json ({error})"
        ) from None
    found = merged([_line(n, row) for n, row in enumerate(_rows(document))])
    require(
        bool(found) or _has_lines(document), source, 'no "lines" list', "the JSON of pykern check OP --json"
    )
    return found


def _has_lines(value: Any, depth: int = 0) -> bool:
    if depth > 8:
        return False
    if isinstance(value, dict):
        return any(
            (k == "lines" and isinstance(v, list)) or _has_lines(v, depth + 1) for k, v in value.items()
        )
    return isinstance(value, list) and any(_has_lines(v, depth + 1) for v in value)


def rank(lines: list[TableLine], dram_gbps: float, shared_gbps: float) -> list[tuple[TableLine, float]]:
    """Lines with the microseconds they waste, the worst first; ties in source order."""
    scored = [(line, line.wasted_us(dram_gbps, shared_gbps)) for line in lines]
    return sorted(scored, key=lambda pair: (-pair[1], pair[0].file, pair[0].line))
