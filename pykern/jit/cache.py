"""The cache of built libraries: content-addressed entries, locks that die with their owner, atomic publish.

    <cache>/v1/<label>-<key>/   lib.so, the generated source, entry.json (size, sha256, seconds, compiler
    output) <cache>/v1/.locks/          flock files, one per key, and the build slots that cap parallel
    compilers <cache>/v1/.build-<key>-*/  work folders; the next owner of the key's lock sweeps what a killed
    builder left

An entry is complete or absent: it is built in a work folder and renamed into place. One whose library is
missing, of another size or of another digest is a miss and is replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
import threading
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pykern.errors import ArgumentError, PykernError, brief

FORMAT = "v1"
LIBRARY = "lib.so"
RECORD = "entry.json"
_chosen: dict[str | None, Path] = {}  # PYKERN_CACHE -> the folder in use
_wanted: dict[tuple[str | None, ...], Path] = {}  # the variables that name it -> the path when it was first asked for
_choice_lock = threading.Lock()


def wanted_dir() -> Path:
    """Where the cache should be: ``PYKERN_CACHE``, else the user's cache directory. Touches nothing.

    A relative path is taken from the working directory of the first call, and stays where it was.
    """
    override = os.environ.get("PYKERN_CACHE")
    named = (override, os.environ.get("XDG_CACHE_HOME"), os.environ.get("HOME"))
    if named not in _wanted:
        _wanted[named] = _wanted_dir(override)
    return _wanted[named]


def _wanted_dir(override: str | None) -> Path:
    if override:
        try:
            return Path(override).expanduser().absolute()
        except (RuntimeError, OSError) as error:  # ~somebody, whom nobody knows; a working directory that is gone
            raise ArgumentError("PYKERN_CACHE", brief(override), f"a folder ({error})") from None
    try:
        import platformdirs
    except ImportError:  # `pykern doctor` runs on half-installed machines, too
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").absolute() / "pykern"
    return Path(platformdirs.user_cache_dir("pykern", appauthor=False)).absolute()


def _probe(folder: Path) -> str:
    """Empty when files can be made, locked and built in ``folder``, else the reason why not."""
    odd = sorted(set(str(folder)) & set("$:\n"))
    if odd:
        return f"ninja takes no path with {' or '.join(map(repr, odd))}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=".probe-", dir=folder)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            os.close(handle)
            os.unlink(name)
    except (OSError, ValueError) as error:
        return str(error)
    return ""


def _fallback() -> Path:
    """A private folder for temporary files.

    The same one for each process of this user, if nobody else owns it.
    """
    shared = Path(tempfile.gettempdir()) / f"pykern-{os.getuid()}"
    try:
        shared.mkdir(mode=0o700, exist_ok=True)
        info = os.lstat(shared)
        if stat.S_ISDIR(info.st_mode) and info.st_uid == os.getuid() and not info.st_mode & 0o022:
            return shared
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="pykern-"))


def cache_dir() -> Path:
    """The folder in use.

    Falls back to a temporary one, with a warning that names both, where it cannot be written.
    """
    key = os.environ.get("PYKERN_CACHE")
    with _choice_lock:
        if key in _chosen:
            return _chosen[key]
        wanted = wanted_dir()
        reason = _probe(wanted)
        chosen = wanted
        if reason:
            chosen = _fallback()
            warnings.warn(
                f"pykern: the cache folder {wanted} cannot be written ({reason}); using {chosen} instead. "
                "Set PYKERN_CACHE to a writable folder to keep builds.",
                RuntimeWarning,
                stacklevel=3,
            )
        _chosen[key] = chosen
        return chosen


def store() -> Path:
    """The current format's folder within :func:`cache_dir`."""
    return cache_dir() / FORMAT


def read_stores() -> list[Path]:
    """Folders to look in.

    The one in use, and the wanted one when that is merely read-only (an image's cache).
    """
    used, wanted = store(), wanted_dir() / FORMAT
    return [used] if used == wanted else [used, wanted]


@dataclass
class Entry:
    """A published library and what is recorded beside it."""

    path: Path
    record: dict[str, Any] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        return self.path.parent


def digest_file(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _load(folder: Path) -> Entry | None:
    try:
        record = json.loads((folder / RECORD).read_text())
        library = folder / LIBRARY
        if library.stat().st_size != record["size"] or digest_file(library) != record["sha256"]:
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Entry(library, record)


def find(name: str) -> Entry | None:
    """The intact entry ``name`` (``<label>-<key>``), or None. Never raises on a corrupt one."""
    for place in read_stores():
        entry = _load(place / name)
        if entry is not None:
            return entry
    return None


def publish(work: Path, name: str, record: dict[str, Any], keep: tuple[str, ...] = ()) -> Entry:
    """Turn the work folder, which holds ``lib.so``, into the entry ``name`` by one rename.

    Files other than the library and ``keep`` are dropped. If another process published the same key
    meanwhile, its entry is used: the key is the content.
    """
    library = work / LIBRARY
    record = dict(record, size=library.stat().st_size, sha256=digest_file(library))
    for item in os.scandir(work):
        if item.name not in (LIBRARY, *keep):
            shutil.rmtree(item.path) if item.is_dir(follow_symlinks=False) else os.unlink(item.path)
    (work / RECORD).write_text(json.dumps(record, indent=1))
    work.chmod(0o755)  # mkdtemp's 0700 would hide the entry from the other users of a shared cache
    final = work.parent / name
    for _ in range(20):
        try:
            os.rename(work, final)
            return Entry(final / LIBRARY, record)
        except OSError as error:
            winner = _load(final)
            if winner is not None:
                shutil.rmtree(work, ignore_errors=True)
                return winner
            if not final.exists():
                raise
            del error
        discard(final)
    raise PykernError(f"cannot publish {final}: its place is taken and cannot be cleared")


def discard(folder: Path) -> None:
    """Move a bad entry out of the way at once, then delete it."""
    with contextlib.suppress(OSError):
        grave = tempfile.mkdtemp(prefix=".trash-", dir=folder.parent)
        with contextlib.suppress(OSError):
            os.rename(folder, os.path.join(grave, "e"))
        shutil.rmtree(grave, ignore_errors=True)


def work_folder(key: str, private: bool = False) -> Path:
    """A fresh folder to build in. Call with the key's lock held, unless ``private``.

    With the lock held nobody else builds this key, so older work folders of it belong to killed builders.
    """
    place = store()
    place.mkdir(parents=True, exist_ok=True)
    if private:
        return Path(tempfile.mkdtemp(prefix=f".private-{key}-{os.getpid()}-", dir=place))
    for old in place.glob(f".build-{key}-*"):
        shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f".build-{key}-", dir=place))


def lock_timeout() -> float:
    """Seconds to wait for another builder before building privately (``PYKERN_LOCK_TIMEOUT``, default 600).

    Raises ArgumentError where that is no number of seconds.
    """
    text = os.environ.get("PYKERN_LOCK_TIMEOUT", "").strip()
    if not text:
        return 600.0
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not seconds >= 0.0:
        raise ArgumentError("PYKERN_LOCK_TIMEOUT", brief(text), "seconds to wait for another builder, 0 or more")
    return seconds


def _try_flock(path: Path) -> int | None:
    """A locked file descriptor, or None when somebody else holds the lock (or swept the file meanwhile)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        on_disk = os.stat(path)
        if os.fstat(handle).st_ino == on_disk.st_ino:
            return handle
    except OSError:
        pass
    os.close(handle)
    return None


def _release(handle: int) -> None:
    # unlocked explicitly: a child forked meanwhile shares the open file and would keep the lock alive
    with contextlib.suppress(OSError):
        fcntl.flock(handle, fcntl.LOCK_UN)
    os.close(handle)


@contextlib.contextmanager
def locked(key: str, timeout: float | None = None) -> Iterator[bool]:
    """Hold the key's lock. Yields False when it could not be had within ``timeout`` seconds.

    The kernel drops an ``flock`` when its process dies, so a lock file left behind means nothing.
    """
    deadline = time.monotonic() + (lock_timeout() if timeout is None else timeout)
    path, pause = store() / ".locks" / f"{key}.lock", 0.005
    handle = _try_flock(path)
    while handle is None and time.monotonic() < deadline:
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause = min(pause * 1.5, 0.1)
        handle = _try_flock(path)
    try:
        yield handle is not None
    finally:
        if handle is not None:
            _release(handle)


@contextlib.contextmanager
def build_slot(slots: int) -> Iterator[None]:
    """Wait for one of ``slots`` places among the compilers of all processes that share this cache.

    A cap on memory, not a lock: after the lock time-out it goes ahead regardless.
    """
    deadline, handle, pause = time.monotonic() + lock_timeout(), None, 0.01
    while True:
        for index in range(max(1, slots)):
            handle = _try_flock(store() / ".locks" / f"slot-{index}.lock")
            if handle is not None:
                break
        if handle is not None or time.monotonic() >= deadline:
            break
        time.sleep(pause)
        pause = min(pause * 1.5, 0.1)
    try:
        yield
    finally:
        if handle is not None:
            _release(handle)


_ENTRY = re.compile(r"^(?P<label>.+)-(?P<key>[0-9a-f]{20})$")


def _bytes(folder: Path) -> int:
    total = 0
    for place, _, files in os.walk(folder):  # which steps over folders that a builder deletes meanwhile
        for name in files:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(place, name)).st_size
    return total


def size() -> int:
    """Bytes that all entries take."""
    return _bytes(store()) if store().is_dir() else 0


def show() -> dict[str, Any]:
    """What is in the cache.

    Folder, bytes, and per entry its label, key, kernel, size, build seconds and state.
    """
    entries = []
    for folder in sorted(store().glob("*-*")) if store().is_dir() else []:
        match = _ENTRY.match(folder.name)
        if match is None or not folder.is_dir():
            continue
        entry = _load(folder)
        record = entry.record if entry else {}
        entries.append(
            {
                "label": match["label"],
                "key": match["key"],
                "kernel": record.get("kernel", ""),
                "bytes": _bytes(folder),
                "seconds": record.get("seconds"),
                "state": "ok" if entry else "corrupt",
            }
        )
    return {"folder": str(cache_dir()), "wanted": str(wanted_dir()), "bytes": size(), "entries": entries}


def clear() -> tuple[int, int]:
    """Delete every entry and leftover. Returns (entries, bytes).

    Libraries in use keep working in their processes.
    """
    place = store()
    if not place.is_dir():
        return (0, 0)
    held = size()
    count = sum(1 for folder in place.glob("*-*") if _ENTRY.match(folder.name))
    for item in list(place.iterdir()):
        # a lock file weighs nothing, and deleting a held one would let a second builder in
        if item.name == ".locks" or _busy(item.name):
            continue
        folder = item.is_dir() and not item.is_symlink()
        shutil.rmtree(item, ignore_errors=True) if folder else item.unlink(missing_ok=True)
    return (count, held)


def _busy(name: str) -> bool:
    """Whether a work folder belongs to a builder that is alive."""
    if name.startswith(".build-"):
        handle = _try_flock(store() / ".locks" / f"{name.split('-')[1]}.lock")
        if handle is not None:
            _release(handle)
        return handle is None
    if name.startswith(".private-"):
        return Path("/proc", name.split("-")[2]).exists()
    return False


def remove(folder: Path) -> None:
    """Delete a work folder if it is still there.

    Never raises: a full disk must not hide the build's own error.
    """
    shutil.rmtree(folder, ignore_errors=True)
