"""One status line on a terminal while something compiles; nothing where stderr is no terminal."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

_lock = threading.Lock()
_running: dict[int, tuple[str, float]] = {}
_status: Any = None


def wanted() -> bool:
    """Whether to show anything: stderr is a terminal and ``PYKERN_PROGRESS`` is not 0."""
    if os.environ.get("PYKERN_PROGRESS") == "0":
        return False
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:  # closed
        return False


def _text() -> str:
    names = [name for name, _ in _running.values()]
    more = f" (+{len(names) - 1} more)" if len(names) > 1 else ""
    return f"pykern: compiling {names[0]}{more}" if names else "pykern"


def _show(change: str) -> None:
    """Called with the lock held."""
    global _status
    if change == "start":
        from rich.console import Console
        from rich.markup import escape

        if _status is None:
            _status = Console(stderr=True).status(escape(_text()))
            _status.start()
        else:
            _status.update(escape(_text()))
    elif _status is not None:
        if _running:
            from rich.markup import escape

            _status.update(escape(_text()))
        else:
            _status.stop()
            _status = None


@contextlib.contextmanager
def compiling(name: str) -> Iterator[None]:
    """Show ``name`` as being compiled. Trouble with the display never disturbs a build."""
    if not wanted():
        yield
        return
    token = threading.get_ident()
    with _lock, contextlib.suppress(Exception):
        _running[token] = (name, time.monotonic())
        _show("start")
    try:
        yield
    finally:
        with _lock, contextlib.suppress(Exception):
            _running.pop(token, None)
            _show("stop")
