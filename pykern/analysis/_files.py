"""Reading what a user names: files, pipes and stdin, with an end to every read.

A device such as ``/dev/zero`` and a pipe never end; reading them whole would take the machine's memory. Regular
files are read whole.
"""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from typing import IO, Any

from pykern.errors import ArgumentError

STDIN = "-"
MAX_TEXT = 256 << 20  # bytes of a text input, of a pipe, and of stdin
MAX_DEVICE = 1 << 20  # bytes of a character device
MAX_LINE = 16 << 20  # characters of one line of a batch file


def read_bytes(path: str) -> bytes:
    """All bytes of ``path``. Raises OSError for what cannot be read, ArgumentError for what does not end."""
    with open(path, "rb") as file:
        mode = os.fstat(file.fileno()).st_mode
        return file.read() if stat.S_ISREG(mode) else _bounded(file, path, _most(mode))


def read_text(path: str) -> str:
    """All text of ``path``, or of stdin for ``-``; UTF-8 with or without a byte-order mark, else marked with U+FFFD."""
    if path == STDIN:
        data = _bounded(stdin().buffer, "stdin", MAX_TEXT)
    else:
        with open(path, "rb") as file:
            data = _bounded(file, path, _most(os.fstat(file.fileno()).st_mode))
    return data.decode("utf-8-sig", "replace")


def read_lines(path: str) -> Iterator[tuple[int, str]]:
    """(number from 1, line) of ``path``, or of stdin for ``-``, as they come."""
    if path == STDIN:
        yield from _lines(stdin(), "stdin")
    else:
        with open(path, encoding="utf-8-sig", errors="replace") as file:
            yield from _lines(file, path)


def stdin() -> Any:
    """stdin; ArgumentError where it is closed."""
    if sys.stdin is None:
        raise ArgumentError("-", "a closed stdin", "an open one, or the name of a file")
    return sys.stdin


def _lines(file: IO[str], path: str) -> Iterator[tuple[int, str]]:
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        if len(line) > MAX_LINE:
            raise ArgumentError(f"{path}:{number}", "a line without an end", f"lines of at most {MAX_LINE} characters")
        yield number, line


def _most(mode: int) -> int:
    return MAX_DEVICE if stat.S_ISCHR(mode) else MAX_TEXT


def _bounded(file: IO[bytes], path: str, most: int) -> bytes:
    data = file.read(most + 1)
    if len(data) > most:
        raise ArgumentError(path, f"more than {most} bytes", "an input that ends sooner")
    return data
