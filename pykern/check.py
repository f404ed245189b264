"""The checker's front end: collects what the host runtime found, turns addresses into file:line, raises CheckError."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pykern.errors import CheckError

_local = threading.local()


@contextmanager
def recording() -> Iterator[list[dict[str, Any]]]:
    """Collect the report of every checked or traced call made on this thread inside ``with``.

    Each report is ``{"op", "findings", "lines", "launches"}``; addresses are resolved to ``file`` and ``line``.
    """
    before = getattr(_local, "reports", None)
    reports: list[dict[str, Any]] = []
    _local.reports = reports
    try:
        yield reports
    finally:
        _local.reports = before


def collect(op: str, failed: bool, runtime: Any, raising: bool = True) -> None:
    """Called after every checked run on this thread; raises CheckError on findings if ``raising``."""
    reports = getattr(_local, "reports", None)
    if not failed and reports is None:
        return
    function = runtime.pkh_check_report
    function.restype = ctypes.c_char_p
    text = function()
    report = json.loads(text.decode(errors="replace")) if text else {}
    findings = [resolve(f) for f in report.get("findings", [])]
    if reports is not None:
        lines = [resolve(row) for row in report.get("lines", [])]
        reports.append({"op": op, "findings": findings, "lines": lines, "launches": report.get("launches", [])})
    if findings and raising:
        first = findings[0]
        more = f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""
        raise CheckError(f"{op}: {sentence(first)}{more}", findings)


def sentence(finding: dict[str, Any]) -> str:
    """One line: kind, kernel, file:line, thread, tensor, what happened."""
    at = f"{finding.get('file', '?')}:{finding.get('line', '?')}"
    other = finding.get("other_line")
    against = f" (against {finding.get('other_file', '?')}:{other})" if other else ""
    return f"{finding.get('kind')} in {finding.get('kernel')} at {at}{against}: {finding.get('message', '')}"


def resolve(row: dict[str, Any]) -> dict[str, Any]:
    """``row`` with ``file`` and ``line`` filled in from its program counters."""
    out = dict(row)
    for pc_key, file_key, line_key in (("pc", "file", "line"), ("other_pc", "other_file", "other_line")):
        pc = out.get(pc_key)
        if pc and not out.get(line_key):
            found = source_line(int(pc))
            if found:
                out[file_key], out[line_key] = found
    return out


def _maps() -> list[tuple[int, int, int, str]]:
    rows = []
    for text in Path("/proc/self/maps").read_text().splitlines():
        parts = text.split(maxsplit=5)
        if len(parts) == 6 and parts[5].startswith("/"):
            low, high = (int(v, 16) for v in parts[0].split("-"))
            rows.append((low, high, int(parts[2], 16), parts[5]))
    return rows


def source_line(pc: int) -> tuple[str, int] | None:
    """(file name, line) of the kernel code at ``pc``: the innermost inlined frame outside core/ and host/."""
    for low, high, offset, path in _maps():
        if low <= pc < high:
            return _symbol(path, pc - low + offset - 1)
    return None


@functools.lru_cache(maxsize=4096)
def _symbol(path: str, address: int) -> tuple[str, int] | None:
    tool = shutil.which("addr2line") or shutil.which("llvm-addr2line")
    if tool is None:
        return None
    done = subprocess.run([tool, "-i", "-e", path, hex(address)], capture_output=True, text=True, timeout=30)
    frames = []
    for text in done.stdout.splitlines():
        name, _, line = text.split(" (discriminator")[0].rpartition(":")
        if line.isdigit() and int(line) > 0:
            frames.append((_first_file(path) or name if Path(name).name == GENERATED else name, int(line)))
    own = [f for f in frames if Path(f[0]).parent.parts[-2:] not in (("cuda_src", "core"), ("cuda_src", "host"))]
    found = (own or frames)[:1]
    return (Path(found[0][0]).name, found[0][1]) if found else None


GENERATED = "v.cpp"  # the file of a variant: no line of it touches memory


@functools.lru_cache(maxsize=256)
def _first_file(path: str) -> str | None:
    """File 1 of the line table of ``path``, which lines belong to until the table names another.

    binutils up to 2.40 takes file 0 there when it reads DWARF 5: the generated file, in place of the kernel's.
    """
    tool = shutil.which("readelf") or shutil.which("llvm-readelf")
    if tool is None:
        return None
    command = [tool, "--debug-dump=line", path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, env={**os.environ, "LC_ALL": "C"})
    folders: dict[str, str] = {}
    files = False
    for text in done.stdout.splitlines():
        files = files or "The File Name Table" in text
        entry, *columns = text.strip().split("\t")
        if not entry.isdigit() or not columns:
            continue
        name = columns[-1].rpartition("): ")[2]  # "(indirect line string, offset: 0x42): name"
        if files and entry == "1":
            return f"{folders.get(columns[0], '')}/{name}"
        if not files:
            folders[entry] = name
    return None


def table(reports: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The memory instructions of some reports, one row per (file, line, space, op, width), most sectors first.

    ``sectors`` of 32 bytes and ``wavefronts`` are what the hardware would count, the ideal ones what the bytes need.
    """
    sums = ("requests", "lanes", "sectors", "ideal_sectors", "wavefronts", "ideal_wavefronts", "unique_bytes")
    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for report in reports:
        for row in report["lines"]:
            key = tuple(row.get(k) for k in ("file", "line", "space", "op", "bytes"))
            into = rows.setdefault(key, dict(zip(("file", "line", "space", "op", "bytes"), key, strict=True)))
            for name in sums:
                into[name] = into.get(name, 0) + row.get(name, 0)
    return sorted(rows.values(), key=lambda r: (-r["sectors"], -r["wavefronts"], str(r["file"]), r["line"] or 0))
