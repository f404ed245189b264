"""One library from one generated file: key, lock, ``torch.utils.cpp_extension.load``, publish.

What ``load`` gets wrong on its own is handled here. Its lock file hangs for ever when stale, so each build
has a private folder, and the lock is ours. A name loaded twice becomes ``name_v1``, so the name carries the
key. It compares neither nvcc's version nor the host compiler's, so both are checked first. With
``verbose=True`` the exception carries no compiler output, so it is quiet and the output comes from the
exception.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shlex
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pykern.errors import BuildError, CaptureError, PykernError
from pykern.jit import cache, diagnose, limits, progress, sources, toolchain
from pykern.jit.cache import Entry

NVCC_WRAPPER = "nvcc.sh"
NVCC_LOG = "nvcc.log"
MARK = "namespace pk {}"  # the line after a raw kernel's text, where a compiler trips if that ends too soon
builds = 0  # libraries compiled by this process; tests count with it


def capturing() -> bool:
    """Whether the current CUDA stream is capturing a graph.

    False, at no cost, where torch or CUDA is not in use.
    """
    # Another thread may be in the middle of importing torch: then nothing captures yet.
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is None or not hasattr(cuda, "is_current_stream_capturing"):
        return False
    return bool(cuda.is_available() and cuda.is_initialized() and cuda.is_current_stream_capturing())


def _digest(parts: Iterable[bytes]) -> str:
    total = hashlib.sha256()
    for part in parts:
        total.update(len(part).to_bytes(8, "little"))
        total.update(part)
    return total.hexdigest()[:20]


@dataclass
class Recipe:
    """Everything a library is made from.

    ``identity`` stands for ``text`` in the key where text names a path.
    """

    label: str
    filename: str
    text: str
    contents: dict[str, bytes]
    cflags: Sequence[str]
    cuda_cflags: Sequence[str]
    ldflags: Sequence[str]
    with_cuda: bool
    abi: str = ""
    identity: str | None = None
    kernel: str = ""
    more: dict[str, str] = field(default_factory=dict)  # further files, compiled beside the first one
    folder: str = ""  # where the contents named "./x" lie; for messages, not in the key

    def own(self) -> dict[str, str]:
        """The files that a kernel's author wrote, as compilers name them, and their text."""
        found = {}
        for name, data in self.contents.items():
            if name.startswith("./") or name.startswith("ops/"):
                shown = os.path.normpath(os.path.join(self.folder, name)) if name.startswith("./") else name
                found[shown] = data.decode(errors="replace")
        return found

    def key(self) -> str:
        """Digest of contents, flags and compiler versions.

        No absolute path, no time, no torch unless ``abi``.
        """
        compilers = [toolchain.cxx().version]
        if self.with_cuda:
            cuda = toolchain.find_cuda()
            compilers = [toolchain.host_compiler(cuda).version, "nvcc " + cuda.version]
        text = self.text if self.identity is None else self.identity
        parts = [
            self.filename,
            text,
            repr(list(self.cflags)),
            repr(list(self.cuda_cflags)),
            repr(list(self.ldflags)),
        ]
        parts += [*compilers, os.uname().machine, self.abi, repr(sorted(self.more.items()))]
        encoded = [part.encode() for part in parts]
        for name in sorted(self.contents):
            encoded += [name.encode(), self.contents[name]]
        return _digest(encoded)


# ---------------------------------------------------------------- the environment that `load` reads
_env_lock = threading.Lock()
_env_users = 0
_env_saved: dict[str, str | None] = {}
_home_saved: Any = None


def _set_env(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


@contextlib.contextmanager
def _environment(cpp_extension: Any, cuda: toolchain.CudaToolchain | None) -> Iterator[None]:
    """What ``load`` takes from the process: PATH with ninja, CXX, CUDA_HOME, nvcc through the wrapper.

    The environment belongs to the whole process, so concurrent builds share one setting, undone by the last.
    """
    global _env_users, _home_saved
    with _env_lock:
        if _env_users == 0:
            ninja = str(toolchain.find_ninja().parent)
            wanted: dict[str, str | None] = {
                "PATH": ninja + os.pathsep + os.environ.get("PATH", os.defpath),
                "CXX": str(toolchain.find_cxx()),
                "MAX_JOBS": str(limits.jobs(cuda is not None)),  # a library of several files
                "CC": None,  # would become a second -ccbin
                "PYTORCH_NVCC": f"sh ./{NVCC_WRAPPER}",  # relative: each build has its own, in its folder
            }
            for name, value in wanted.items():
                _env_saved[name] = os.environ.get(name)
                _set_env(name, value)
            _home_saved = cpp_extension.CUDA_HOME
        if cuda is not None:
            cpp_extension.CUDA_HOME = str(cuda.home)  # guessed wrongly when nvcc is a wrapper, or unset on a CPU torch
        _env_users += 1
    try:
        yield
    finally:
        with _env_lock:
            _env_users -= 1
            if _env_users == 0:
                for name, value in _env_saved.items():
                    _set_env(name, value)
                cpp_extension.CUDA_HOME = _home_saved


def _prepare_cuda(work: Path, cuda: toolchain.CudaToolchain, torch_cuda: str | None) -> None:
    """The nvcc wrapper and linker scripts of one build. ``-L.`` finds them: ninja runs in ``work``.

    The wrapper adds -ccbin and keeps nvcc's report, which ``load`` drops on success. Linker scripts stand in
    for the CUDA libraries of torch on a CPU build of it, and for a missing ``libcudart.so`` (NVIDIA's wheels
    have only ``libcudart.so.13``).
    """
    ccbin = toolchain.host_compiler(cuda).path
    command = f"{shlex.quote(str(cuda.nvcc))} -ccbin {shlex.quote(str(ccbin))}"
    (work / NVCC_WRAPPER).write_text(f'{command} "$@" >{NVCC_LOG} 2>&1\nstatus=$?\ncat {NVCC_LOG}\nexit $status\n')
    scripts = {}
    if torch_cuda is None:
        scripts.update({"libc10_cuda.so": "", "libtorch_cuda.so": ""})
    if cuda.libcudart is not None:
        scripts["libcudart.so"] = f'INPUT("{cuda.libcudart}")'
    for name, body in scripts.items():
        (work / name).write_text(f"/* GNU ld script */\n{body}\n")


def _compile(recipe: Recipe, key: str, work: Path) -> str:
    """Run ``load`` in ``work``; leaves ``lib.so`` there and returns nvcc's report. Raises BuildError."""
    files = {recipe.filename: recipe.text, **recipe.more}
    for name, text in files.items():
        (work / name).write_text(text)
    import torch
    from torch.utils import cpp_extension

    cuda = None
    ldflags = [*recipe.ldflags]
    if recipe.with_cuda:
        cuda = toolchain.find_cuda()
        toolchain.check_torch_cuda(cuda, torch.version.cuda)
        _prepare_cuda(work, cuda, torch.version.cuda)
        ldflags.insert(0, "-L.")
        if torch.version.cuda is None and cuda.libcudart is not None:
            ctypes.CDLL(str(cuda.libcudart))  # no torch brought it, and a wheel's lies on no loader path
    with _environment(cpp_extension, cuda):
        built = cpp_extension.load(
            name=f"pk_{recipe.label}_{key}",
            sources=[str(work / name) for name in files],
            extra_cflags=list(recipe.cflags),
            extra_cuda_cflags=list(recipe.cuda_cflags) or None,
            extra_ldflags=ldflags,
            extra_include_paths=[str(sources.root())],
            build_directory=str(work),
            with_cuda=recipe.with_cuda,
            is_python_module=False,
            verbose=False,
        )
    os.rename(built, work / cache.LIBRARY)
    log = work / NVCC_LOG
    return log.read_text(errors="replace") if log.exists() else ""


def _failure(recipe: Recipe, error: BaseException, work: Path) -> BuildError:
    causes, output = error.__cause__, str(error)
    if isinstance(causes, OSError):  # the library was built but does not load: the loader's words are in the cause
        output = str(causes).replace(str(work) + os.sep, "")
    output = output.replace(f"{sources.root()}{os.sep}", "")
    marks = [number for number, line in enumerate(recipe.text.splitlines(), 1) if line == MARK]
    found = diagnose.of_sources(output, recipe.own(), *marks[:1])
    where = found.where.replace(str(work) + os.sep, "")
    where = re.sub(r"^.*/\.raw/[0-9a-f]{16}/", "", where)  # a text of pykern.compile: by the name it was given
    shown = diagnose.Diagnosis(where, found.text, found.hint)
    name = recipe.kernel or recipe.label
    return BuildError(f"{name}: {shown}", log=output, command=recipe.filename)


def _build(recipe: Recipe, key: str, name: str, private: bool) -> Entry:
    global builds
    if capturing():
        raise CaptureError(
            f"{recipe.kernel or recipe.label} is not compiled yet and a CUDA graph is being captured: run the op once "
            "before the capture, or compile ahead with `pykern warmup`"
        )
    try:
        work = cache.work_folder(key, private)
    except OSError as error:
        raise BuildError(f"{recipe.label}: no work folder in {cache.store()}: {error}") from error
    try:
        with (
            cache.build_slot(limits.jobs(recipe.with_cuda)),
            progress.compiling(recipe.kernel or recipe.label),
        ):
            started = time.monotonic()
            log = _compile(recipe, key, work)
            seconds = round(time.monotonic() - started, 3)
        record = {"label": recipe.label, "kernel": recipe.kernel, "seconds": seconds, "log": log}
        notes = [note.name for note in work.glob("*.gcno")]  # of a library with coverage counters
        entry = cache.publish(work, name, record, keep=(recipe.filename, *recipe.more, *notes))
        builds += 1
        if notes:  # the counters are written to where the object file was: lead them to the notes
            with contextlib.suppress(OSError):
                work.symlink_to(entry.path.parent.name)
        return entry
    except PykernError:
        raise
    except (RuntimeError, OSError, ImportError) as error:
        raise _failure(recipe, error, work) from error
    finally:
        cache.remove(work)  # gone already when it was published


# ---------------------------------------------------------------- one build per key, in this process and
# beyond
_flight_lock = threading.Lock()
_flights: dict[str, Future[Any]] = {}


def _after_fork() -> None:
    """A forked child has this thread only: builds of the others, and the locks they held, are not its own."""
    global _env_lock, _flight_lock, _env_users
    _env_lock, _flight_lock = threading.Lock(), threading.Lock()
    _flights.clear()
    if _env_users:
        _env_users = 0
        for name, value in _env_saved.items():
            _set_env(name, value)
    cache._choice_lock = threading.Lock()
    sources._lock = threading.Lock()
    progress._lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def obtain(recipe: Recipe, use: Callable[[Entry, bool], Any], key: str | None = None) -> Any:
    """``use(entry, cached)`` of the recipe's library, built if need be.

    A hit takes no lock. Otherwise one thread of this process holds the key's lock over check, build and use
    (the load), and the others take its result or its exception.
    """
    key = recipe.key() if key is None else key
    name = f"{recipe.label}-{key}"
    entry = cache.find(name)
    if entry is not None:
        with contextlib.suppress(OSError):  # swept between the check and the load: look again, locked
            return use(entry, True)
    with _flight_lock:
        flight = _flights.get(name)
        mine = flight is None
        if flight is None:
            flight = _flights[name] = Future()
    if not mine:
        return flight.result()
    try:
        flight.set_result(_locked_build(recipe, key, name, use))
    except BaseException as error:
        flight.set_exception(error)
    finally:
        with _flight_lock:
            del _flights[name]
    return flight.result()


def _locked_build(recipe: Recipe, key: str, name: str, use: Callable[[Entry, bool], Any]) -> Any:
    try:
        with cache.locked(key) as held:
            entry, cached = cache.find(name), True
            if entry is None:
                if not held:
                    warnings.warn(
                        f"pykern: {recipe.kernel or recipe.label}: another process held the build lock for "
                        f"{cache.lock_timeout():g} s (PYKERN_LOCK_TIMEOUT); building privately",
                        RuntimeWarning,
                        stacklevel=2,
                    )
                entry, cached = _build(recipe, key, name, private=not held), False
            return use(entry, cached)
    except OSError as error:
        found = diagnose.Diagnosis("", str(error), diagnose.hint_for(str(error)))
        raise BuildError(f"{recipe.kernel or recipe.label}: {found}") from error
