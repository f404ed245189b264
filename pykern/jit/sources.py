"""Where the kernel sources lie, and everything a source includes.

A cache key holds contents, not paths (a moved checkout must hit), so the closure of a file maps *relative*
names to bytes. A long-running process asks for the same closure again and again; a file is read again only
when its (mtime, size, inode) changed, which is how an edited header is noticed.
"""

from __future__ import annotations

import os
import re
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from pykern.errors import ArgumentError

# an include line, or a macro that names a header (core/target.cuh picks PK_EXPORT_HEADER so)
_INCLUDE = re.compile(
    rb'^[ \t]*#[ \t]*(?:include[ \t]*(?:"([^"\n]+)"|<([^>\n]+)>)|define[ \t]+\w+[ \t]+"([^"\n]+\.(?:h|hpp|cuh))")'
)
_CUDA_ONLY = re.compile(rb"^[ \t]*#[ \t]*(?:if[ \t]+defined\(__CUDACC__\)|ifdef[ \t]+__CUDACC__)[ \t]*(?://.*)?$")
_HOST_ONLY = re.compile(rb"^[ \t]*#[ \t]*(?:if[ \t]+!defined\(__CUDACC__\)|ifndef[ \t]+__CUDACC__)[ \t]*(?://.*)?$")
_IF, _ELSE, _ENDIF = (re.compile(rb"^[ \t]*#[ \t]*" + word) for word in (rb"if", rb"else", rb"endif"))
# A file changed this recently may change again within the clock tick of its mtime: its contents are not
# remembered.
_SETTLED_NS = 2_000_000_000

Stat = tuple[int, int, int]


@dataclass(frozen=True)
class _Known:
    stat: Stat
    data: bytes
    includes: tuple[tuple[str, bool, str], ...]  # (name, quoted, the backend it is for or "")


_known: dict[str, _Known] = {}
_lock = threading.Lock()


def root() -> Path:
    """The folder that holds ``core/``, ``host/`` and ``ops/``.

    In the package of a wheel, else in the checkout.
    """
    package = Path(__file__).resolve().parent.parent
    for place in (package / "cuda_src", package.parent / "cuda_src"):
        if (place / "core").is_dir():
            return place
    raise FileNotFoundError(f"pykern's kernel sources are missing: no cuda_src beside {package} or in it")


def launcher_sources() -> tuple[Path, Path]:
    """The launcher's two C++ files, which compile side by side: ``pykern/launcher/launcher.cpp`` and ``plan.cpp``."""
    folder = Path(__file__).resolve().parent.parent / "launcher"
    return folder / "launcher.cpp", folder / "plan.cpp"


def locate(source: str | os.PathLike[str]) -> Path:
    """The file that ``source`` names.

    Relative to :func:`root`, else to the working directory, else absolute.
    """
    path = Path(source)
    for place in (path,) if path.is_absolute() else (root() / path, Path.cwd() / path):
        try:
            if place.is_file():
                return place
        except (OSError, ValueError):  # a name that is too long, or holds a NUL
            break
    raise ArgumentError("source", repr(str(source))[:300], f"a file below {root()} or an existing path")


def stat_of(path: str | os.PathLike[str]) -> Stat | None:
    """(mtime in ns, size, inode) of a file, None where there is none."""
    try:
        st = os.stat(path)
    except OSError:
        return None
    return (st.st_mtime_ns, st.st_size, st.st_ino)


def _includes(data: bytes) -> tuple[tuple[str, bool, str], ...]:
    """The include lines of a file, each with the backend whose side of an ``#ifdef __CUDACC__`` it stands on."""
    found: list[tuple[str, bool, str]] = []
    sides: list[str] = []  # of each open #if
    for line in data.splitlines():
        if b"#" not in line:
            continue
        if _CUDA_ONLY.match(line):
            sides.append("cuda")
        elif _HOST_ONLY.match(line):
            sides.append("host")
        elif _IF.match(line):
            sides.append("")
        elif _ELSE.match(line) and sides:
            sides[-1] = {"cuda": "host", "host": "cuda"}.get(sides[-1], "")
        elif _ENDIF.match(line) and sides:
            sides.pop()
        elif match := _INCLUDE.match(line):
            quoted, angled, macro = match.groups()
            side = next((side for side in reversed(sides) if side), "")
            found.append((os.fsdecode(quoted or angled or macro), angled is None, side))
    return tuple(found)


def _read(path: str, stat: Stat) -> _Known:
    known = _known.get(path)
    if known is not None and known.stat == stat:
        return known
    with open(path, "rb") as file:
        data = file.read()
    known = _Known(stat, data, _includes(data))
    if time.time_ns() - stat[0] > _SETTLED_NS and stat_of(path) == stat:
        with _lock:
            _known[path] = known
    return known


def _candidates(name: str, quoted: bool, including: str, base: str) -> list[str]:
    places = [os.path.join(os.path.dirname(including), name)] if quoted else []
    places.append(os.path.join(base, name))
    return [os.path.normpath(place) for place in places]


def walk(path: str | os.PathLike[str], backend: str = "") -> tuple[dict[str, bytes], dict[str, Stat | None]]:
    """Closure of ``path`` and the stat of every file that was looked at (None: looked for, not there).

    With a ``backend``, what only the other one includes is left out: host headers stay out of CUDA keys.

    A file that appears later in a place searched earlier changes the closure, hence the Nones.
    """
    base, start = os.path.normpath(root()), os.path.normpath(os.path.abspath(path))
    home = os.path.dirname(start)
    contents: dict[str, bytes] = {}
    stats: dict[str, Stat | None] = {}
    queue, seen = [start], {start}
    while queue:
        file = queue.pop()
        stat = stats.setdefault(file, stat_of(file))
        if stat is None:
            raise FileNotFoundError(file)
        known = _read(file, stat)
        inside = file.startswith(base + os.sep)
        # "./" keeps a caller's own core/x.cuh apart from ours
        name = os.path.relpath(file, base) if inside else "./" + os.path.relpath(file, home)
        contents[name] = known.data
        for include, quoted, side in known.includes:
            if side and backend and side != backend:
                continue
            for place in _candidates(include, quoted, file, base):
                if place not in stats:
                    stats[place] = stat_of(place) if os.path.isfile(place) else None
                if stats[place] is not None:
                    if place not in seen:
                        seen.add(place)
                        queue.append(place)
                    break
    return contents, stats


def closure(path: str | os.PathLike[str], backend: str = "") -> dict[str, bytes]:
    """``path`` and all it includes, transitively: relative name -> contents.

    Includes are looked for beside the including file (quoted ones) and below :func:`root`; those found in
    neither place are the compiler's own headers and are covered by the compiler's version in a key.
    """
    return walk(path, backend)[0]


def unchanged(stats: dict[str, Stat | None]) -> bool:
    """Whether every file of :func:`walk` still is as it was; costs one ``stat`` a file.

    False as well while a file is so young that an edit could hide within its mtime's clock tick.
    """
    now = time.time_ns()
    return all(stat_of(file) == old and (old is None or now - old[0] > _SETTLED_NS) for file, old in stats.items())
