"""Work for the roofline from files: a benchmark's JSON, and Nsight Compute's CSV.

Benchmark JSON: a list of objects, an object that holds such a list (``rows``, ``results``, ``benches``), or one
object a line, as ``pykern bench --json`` prints. A row needs a name (``name``, ``op`` or ``case``, with ``problem``,
``shape`` and ``dtype`` added when there), bytes (``bytes`` or ``nbytes``) or FLOPs (``flops``), and a time
(``time_us``, ``us``, ``median_us``, ``time_ms``, ``ms`` or ``seconds``); a missing count is worked out from an
achieved rate (``tflops``, ``gbps``, ``tbps`` or ``tbs``). Rows with an ``error`` were not timed and are left out.

Nsight Compute CSV (``ncu --csv``, page raw or details) needs the metrics ``gpu__time_duration.sum`` and
``dram__bytes.sum`` (or ``dram__bytes_read.sum`` and ``dram__bytes_write.sum``), and for FLOPs
``smsp__sass_thread_inst_executed_op_*_pred_on.sum`` and ``sm__ops_path_tensor_*.sum``: an FMA counts twice, the
tensor metrics count operations themselves.
"""

from __future__ import annotations

import csv
import io
import json
import math
import re
from typing import Any

from pykern.analysis.roofline import Work
from pykern.errors import ArgumentError, require

_LISTS = ("rows", "results", "benches", "benchmarks", "cases")
_TIMES = {"time_us": 1.0, "us": 1.0, "median_us": 1.0, "time_ms": 1e3, "ms": 1e3, "median_ms": 1e3, "seconds": 1e6,
          "time_s": 1e6}  # fmt: skip
_RATES = {
    "tflops": ("flops", 1e6),
    "gflops": ("flops", 1e3),
    "gbps": ("bytes", 1e3),
    "tbps": ("bytes", 1e6),
    "tbs": ("bytes", 1e6),
}
_SCALE = {"": 1.0, "byte": 1.0, "kbyte": 1e3, "mbyte": 1e6, "gbyte": 1e9, "tbyte": 1e12, "b": 1.0, "kb": 1e3, "mb": 1e6,
          "gb": 1e9, "inst": 1.0, "second": 1e6, "s": 1e6, "msecond": 1e3, "ms": 1e3, "usecond": 1.0, "us": 1.0,
          "nsecond": 1e-3, "ns": 1e-3}  # fmt: skip
_SASS = re.compile(r"smsp?__sass_thread_inst_executed_op_([dfh])(add|mul|fma)_pred_on\.sum")
_TENSOR = re.compile(r"sm__ops_path_tensor_\w+\.sum")


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1e30 < value < 1e30:  # nor NaN
        raise ArgumentError(name, repr(value)[:60], "a finite number")
    return float(value)


def read_bench(text: str, source: str = "bench") -> list[Work]:
    """Rows of a benchmark file. Raises :class:`ArgumentError` naming the row and field that is wrong."""
    rows = _bench_rows(text, source)
    works = []
    for number, row in enumerate(rows):
        where = f"{source} row {number}"
        require(isinstance(row, dict), where, repr(row)[:60], "an object")
        if row.get("error"):
            continue
        label = next((str(row[k]) for k in ("name", "op", "case") if row.get(k) is not None), None)
        require(label is not None, where, "no name, op or case", "a name")
        extra = [str(row[k]) for k in ("problem", "shape", "dtype") if isinstance(row.get(k), (str, list))]
        time = next(
            (_number(row[k], f"{where} {k}") * s for k, s in _TIMES.items() if row.get(k) is not None), None
        )
        found: dict[str, float] = {}
        for key, names in (("bytes", ("bytes", "nbytes")), ("flops", ("flops",))):
            value = next((_number(row[n], f"{where} {n}") for n in names if row.get(n) is not None), None)
            if value is not None:
                found[key] = value
        for rate, (key, scale) in _RATES.items():
            if key not in found and time is not None and row.get(rate) is not None:
                found[key] = _number(row[rate], f"{where} {rate}") * scale * time
        require(bool(found), where, "no bytes and no flops", "bytes or flops (or a rate and a time)")
        works.append(
            Work(" ".join([str(label), *extra]), found.get("flops", 0.0), found.get("bytes", 0.0), time)
        )
    require(bool(works), source, "only rows with an error", "a row that was timed")
    return works


def _bench_rows(text: str, source: str) -> list[Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        lines = [line for line in text.splitlines() if line.strip()]
        try:
            value = [json.loads(line) for line in lines]
        except (ValueError, RecursionError):
            raise ArgumentError(
                source, repr(text.strip()[:60]), f"JSON, or one object a line ({error})"
            ) from None
    if isinstance(value, dict):
        value = next((value[k] for k in _LISTS if isinstance(value.get(k), list)), [value])
    require(
        isinstance(value, list) and bool(value),
        source,
        "no rows",
        f"a list of rows, or an object with {_LISTS[0]}",
    )
    return value


def read_ncu(text: str, source: str = "ncu") -> list[Work]:
    """Kernels of an ``ncu --csv`` file, in its order; each needs bytes or FLOPs."""
    kernels = _ncu_details(text) or _ncu_raw(text)
    require(bool(kernels), source, "no kernel rows", "the text of ncu --csv (page raw or details)")
    works = []
    for name, metrics in kernels:
        moved = metrics.get("dram__bytes.sum")
        if moved is None:
            parts = [metrics.get(f"dram__bytes_{way}.sum") for way in ("read", "write")]
            moved = sum(p for p in parts if p is not None) if any(p is not None for p in parts) else 0.0
        flops = 0.0
        for metric, value in metrics.items():
            sass = _SASS.fullmatch(metric)
            if sass:
                flops += value * (2 if sass[2] == "fma" else 1) * (2 if sass[1] == "h" else 1)
            elif _TENSOR.fullmatch(metric) and "sparsity" not in metric:
                flops += value
        if moved <= 0 and flops <= 0:
            raise ArgumentError(f"{source}: {name[:60]}", "no DRAM bytes and no FLOPs",
                                "dram__bytes.sum and the FLOP metrics among --metrics")  # fmt: skip
        time = metrics.get("gpu__time_duration.sum")
        works.append(Work(name, flops, moved, time if time and time > 0 else None))
    return works


def _table(text: str, needed: str) -> list[dict[str, str]]:
    """Rows under the header line that has column ``needed``; ncu prints other lines before it."""
    lines = text.splitlines()
    at = next(
        (n for n, line in enumerate(lines) if f'"{needed}"' in line or line.startswith(f"{needed},")), None
    )
    if at is None:
        return []
    try:
        return [row for row in csv.DictReader(io.StringIO("\n".join(lines[at:]))) if None not in row]
    except csv.Error:
        return []


def _value(text: str | None, unit: str | None) -> float | None:
    try:
        number = float((text or "").replace(",", ""))
    except ValueError:
        return None
    scale = _SCALE.get((unit or "").strip().lower())
    return number * scale if scale is not None and math.isfinite(number) else None


def _ncu_details(text: str) -> list[tuple[str, dict[str, float]]]:
    """Long form: a row a metric."""
    found: dict[str, tuple[str, dict[str, float]]] = {}
    for row in _table(text, "Metric Name"):
        name, metric = row.get("Kernel Name"), row.get("Metric Name")
        if not name or not metric:
            continue
        value = _value(row.get("Metric Value"), row.get("Metric Unit"))
        entry = found.setdefault(str(row.get("ID")) + name, (name, {}))
        if value is not None:
            entry[1][metric] = value
    return list(found.values())


def _ncu_raw(text: str) -> list[tuple[str, dict[str, float]]]:
    """Wide form: a row a kernel, units in the first row under the header."""
    rows = _table(text, "Kernel Name")
    if not rows:
        return []
    units = rows[0] if not rows[0].get("Kernel Name") else {}
    out = []
    for row in rows[1 if units else 0 :]:
        name = row.get("Kernel Name")
        if name:
            values = {k: _value(v, units.get(k)) for k, v in row.items() if "__" in k}
            out.append((name, {k: v for k, v in values.items() if v is not None}))
    return out
