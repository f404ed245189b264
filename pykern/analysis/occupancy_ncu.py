"""Theoretical against achieved occupancy, from the CSV of Nsight Compute.

Reads both forms of ``ncu --csv``: one metric a line (``--page details``, the default) and one kernel a line
(``--page raw``). Needed are the sections LaunchStats and Occupancy (``--set basic`` has both, or
``--section LaunchStats --section Occupancy``). The theoretical figure is computed here from the launch and held
against the one in the report, so that a difference is seen rather than hidden.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pykern.analysis._files import read_text
from pykern.analysis.occupancy import Config, Occupancy, arch, occupancy, parse_cc
from pykern.analysis.occupancy_sources import Case
from pykern.errors import ArgumentError

_UNITS = {"byte": 1, "kbyte": 1000, "mbyte": 1_000_000, "kibyte": 1024, "mibyte": 1024 * 1024}
_FIELDS = {
    "threads": ("Block Size", "launch__block_size"),
    "grid": ("Grid Size", "launch__grid_size"),
    "regs": ("Registers Per Thread", "launch__registers_per_thread"),
    "static_smem": ("Static Shared Memory Per Block", "launch__shared_mem_per_block_static"),
    "dyn_smem": ("Dynamic Shared Memory Per Block", "launch__shared_mem_per_block_dynamic"),
    "theoretical": ("Theoretical Occupancy", "sm__maximum_warps_per_active_cycle_pct"),
    "achieved": ("Achieved Occupancy", "sm__warps_active.avg.pct_of_peak_sustained_active"),
    "barriers": ("Number of Barriers", "launch__barrier_count"),
    "limit_smem": ("Block Limit Shared Mem", "launch__occupancy_limit_shared_mem"),
    "limit_regs": ("Block Limit Registers", "launch__occupancy_limit_registers"),
    "limit_warps": ("Block Limit Warps", "launch__occupancy_limit_warps"),
    "limit_blocks": ("Block Limit SM", "launch__occupancy_limit_blocks"),
    "limit_barriers": ("Block Limit Barriers", "launch__occupancy_limit_barriers"),
    "carveout": ("Shared Memory Configuration Size", "launch__shared_mem_config_size"),
}
_BY_METRIC = {metric: name for name, metrics in _FIELDS.items() for metric in metrics}
_NEEDED = ("threads", "regs", "achieved")


@dataclass(frozen=True)
class Launch:
    """One launch of the report: percentages as shares 0 to 1, sizes in bytes; ``result`` is our own answer."""

    kernel: str
    cc: str
    config: Config
    grid: int | None
    achieved: float
    reported: float | None
    reported_limits: dict[str, int]
    result: Occupancy

    @property
    def agrees(self) -> bool | None:
        """Whether the report's theoretical occupancy is ours to 0.01%; None when it has none."""
        return None if self.reported is None else abs(self.reported - self.result.occupancy) < 1e-4

    def case(self) -> Case:
        """The launch as a question of the occupancy rule, for ``--gate``."""
        return Case(self.kernel, self.cc, self.config, grid=self.grid, achieved=self.achieved)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "kernel": self.kernel,
            "cc": self.cc,
            "threads": self.config.threads,
            "regs": self.config.regs,
            "grid": self.grid,
            "achieved": round(self.achieved, 6),
            "theoretical": round(self.result.occupancy, 6),
            "theoretical_in_report": self.reported,
            "agrees": self.agrees,
            "limiters": list(self.result.limiters),
            "limits_in_report": self.reported_limits,
        }


def read_ncu_csv(path: str) -> list[Launch]:
    """The launches of an ``ncu --csv`` file, in its order. Raises ArgumentError when it is none."""
    lines = [line for line in read_text(path).splitlines(keepends=True) if not line.startswith("==") and line.strip()]
    start = next((i for i, line in enumerate(lines) if "Kernel Name" in line), None)
    if start is None:
        raise ArgumentError(path, "text without a 'Kernel Name' column", "the output of ncu --csv")
    try:
        rows = list(csv.DictReader(lines[start:]))
    except csv.Error as error:
        raise ArgumentError(path, f"text that is no CSV ({error})", "the output of ncu --csv") from None
    records = _details(rows) if rows and "Metric Name" in rows[0] else _raw(rows)
    launches = [_launch(record, path) for record in records]
    if not launches:
        raise ArgumentError(path, "no launch", "the output of ncu --csv with at least one kernel")
    return launches


_Record = dict[str, Any]


def _details(rows: list[dict[str, str]]) -> Iterator[_Record]:
    record: _Record = {}
    for row in rows:
        identity = row.get("ID") or ""
        if record and identity != record["id"]:
            yield record
            record = {}
        record.setdefault("id", identity)
        record.setdefault("kernel", row.get("Kernel Name") or "")
        record.setdefault("cc", row.get("CC") or "")
        _put(record, row.get("Metric Name") or "", row.get("Metric Value") or "", row.get("Metric Unit") or "")
        if row.get("Block Size"):
            record.setdefault("threads", _product(row["Block Size"]))
        if row.get("Grid Size"):
            record.setdefault("grid", _product(row["Grid Size"]))
    if record:
        yield record


def _raw(rows: list[dict[str, str]]) -> Iterator[_Record]:
    if not rows:
        return
    units = rows[0] if not rows[0].get("Kernel Name") else {}
    for row in rows[1:] if units else rows:
        record: _Record = {"kernel": row.get("Kernel Name") or "", "cc": row.get("CC") or ""}
        for metric, value in row.items():
            if isinstance(metric, str) and isinstance(value, str):
                _put(record, metric, value, units.get(metric) or "")
        yield record


def _put(record: _Record, metric: str, value: str, unit: str) -> None:
    name = _BY_METRIC.get(metric)
    if name is None:
        return
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        return
    if not 0 <= number < 1e15:  # nor NaN; no metric read here is negative
        return
    scale = _UNITS.get(unit.lower().removesuffix("/block"), 1)
    record[name] = number if scale == 1 else _roundest(number * scale, scale / 200)


def _roundest(value: float, error: float) -> int:
    """The number of bytes that ``value``, printed to two decimals of a larger unit, most likely was.

    ``--print-units base`` avoids the question.
    """
    for step in (1024, 128, 16, 4):
        near = round(value / step) * step
        if abs(near - value) <= error:
            return near
    return round(value)


def _product(text: str) -> int | None:
    """``(256, 1, 1)`` or ``256, 1, 1`` as 256."""
    try:
        numbers = [int(part) for part in text.strip("() ").split(",")]
    except ValueError:
        return None
    product = 1
    for number in numbers:
        product *= number
    return product


def _launch(record: _Record, path: str) -> Launch:
    missing = [name for name in _NEEDED if record.get(name) is None]
    if missing:
        names = ", ".join(repr(_FIELDS[name][0]) for name in missing)
        allowed = f"a report with {names} (run ncu with --section LaunchStats --section Occupancy)"
        raise ArgumentError(f"{path}: kernel {record['kernel'][:60]}", "too few metrics", allowed)
    cc = parse_cc(record.get("cc") or "", "CC")
    if record.get("barriers") is None:  # the details page has only the limit they make
        limit = record.get("limit_barriers")
        record["barriers"] = arch(cc).barriers // limit if limit and limit < arch(cc).max_blocks else 0
    config = Config(
        threads=int(record["threads"]),
        regs=int(record["regs"]),
        static_smem=int(record.get("static_smem") or 0),
        dyn_smem=int(record.get("dyn_smem") or 0),
        barriers=int(record.get("barriers") or 0),
        carveout_pct=_carveout(cc, record.get("carveout")),
    )
    grid = record.get("grid")
    reported = record.get("theoretical")
    return Launch(
        kernel=record["kernel"],
        cc=cc,
        config=config,
        grid=int(grid) if grid else None,
        achieved=record["achieved"] / 100,
        reported=None if reported is None else round(reported / 100, 6),
        reported_limits={n: int(v) for n, v in record.items() if n.startswith("limit_")},
        result=occupancy(cc, config),
    )


def _carveout(cc: str, size: float | None) -> int:
    """The configured shared memory as a percentage of the SM's: what the limit was computed with."""
    chip = arch(cc)
    if not size or size >= chip.smem_per_sm:
        return -1
    return min(int(100 * size / chip.smem_per_sm), 100)
