"""Notices edited kernel sources in a running process, so that plans made before the edit are made anew."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from pykern.jit import sources

SECONDS = 0.25  # between two looks: some 80 stat calls, 0.2 ms
SUFFIXES = (".cuh", ".h", ".cpp")
Stats = dict[Path, tuple[int, int]]


def wanted() -> bool:
    """Whether sources can change under this process: a checkout that may be written, unless PYKERN_WATCH=0."""
    return os.environ.get("PYKERN_WATCH", "1") != "0" and os.access(sources.root(), os.W_OK)


def look(extra: Iterable[str] = ()) -> Stats:
    """(time of change, size) of every kernel source, and of those beside the files ``extra``."""
    found: Stats = {}
    files = {p for p in sources.root().rglob("*") if p.suffix in SUFFIXES}
    for folder in {Path(file).parent for file in extra}:
        files |= {p for p in folder.glob("*") if p.suffix in SUFFIXES}
    for path in files:
        try:
            stat = path.stat()
        except OSError:
            continue
        found[path] = (stat.st_mtime_ns, stat.st_size)
    return found


def start(changed: Callable[[], None], extra: Callable[[], Iterable[str]]) -> threading.Thread | None:
    """Call ``changed`` after every edit, from a daemon thread; None where sources cannot change."""
    if not wanted():
        return None

    def run() -> None:
        seen = look(extra())
        pause = threading.Event()
        while True:
            pause.wait(SECONDS)
            now = look(extra())
            if any(seen.get(path, stat) != stat for path, stat in now.items()):
                changed()
            seen = now

    thread = threading.Thread(target=run, name="pykern-sources", daemon=True)
    thread.start()
    return thread
