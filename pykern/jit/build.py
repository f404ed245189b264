"""Variants, the host runtime and the launcher: what the rest of pykern asks the JIT for.

A variant is one kernel instance in one library with one exported symbol, ``pk_entry()``. On CUDA that returns
the host stub for ``cudaLaunchKernelExC``, on the host backend a function ``int (const PkLaunch*, void**
args)``.
"""

from __future__ import annotations

import ctypes
import os
import re
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykern.errors import ArgumentError, require
from pykern.jit import extension, flags, resources, sources, toolchain
from pykern.jit.cache import Entry
from pykern.jit.extension import Recipe, capturing
from pykern.jit.resources import Usage

__all__ = [
    "CompileResult",
    "Variant",
    "capturing",
    "compile_only",
    "host_runtime",
    "launcher",
    "library",
    "prepare",
    "variant",
]

_ARCH = re.compile(r"^\d{2,3}[af]?$")


@dataclass(frozen=True)
class Variant:
    """A loaded kernel instance.

    ``entry`` is the address that ``pk_entry()`` returned; ``seconds`` is this call's time.
    """

    path: Path
    entry: int
    key: str
    seconds: float
    cached: bool
    kernel: str


@dataclass(frozen=True)
class CompileResult:
    """What ptxas says of a CUDA variant: registers a thread; spills and local memory in bytes.

    Shared in bytes a block.
    """

    path: Path
    registers: int
    spills: int
    local_bytes: int
    smem: int
    seconds: float
    cached: bool


def library(
    label: str,
    filename: str,
    text: str,
    *,
    roots: Sequence[str | os.PathLike[str]] = (),
    cflags: Sequence[str] = (),
    cuda_cflags: Sequence[str] = (),
    ldflags: Sequence[str] = (),
    with_cuda: bool = False,
    abi: str = "",
) -> Path:
    """Path of the library built from ``text``; from the cache when the same contents were built before.

    ``roots`` are the files whose transitive includes belong to the key; ``abi`` is given by what links to
    torch. Raises BuildError with the first compiler error, ToolchainError, CaptureError.
    """
    contents: dict[str, bytes] = {}
    for place in roots:
        contents.update(sources.closure(sources.locate(place)))
    recipe = Recipe(_label(label), filename, text, contents, cflags, cuda_cflags, ldflags, with_cuda, abi)
    return extension.obtain(recipe, lambda entry, cached: entry.path)


def _label(kernel: str) -> str:
    """A short file name for a kernel instance; the key makes it unique."""
    return re.sub(r"\W+", "_", kernel).strip("_")[:60] or "kernel"


# ---------------------------------------------------------------- variants
_memo_lock = threading.Lock()


def _after_fork() -> None:
    global _memo_lock
    _memo_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
_memo: dict[tuple[Any, ...], tuple[dict[str, sources.Stat | None], Variant]] = {}
_loaded: dict[str, tuple[ctypes.CDLL, int]] = {}  # key -> library; never unloaded, a launch may be in flight


def _variant_recipe(
    source: str,
    instance: str,
    backend: str,
    arch: str,
    check: bool,
    extra_flags: Sequence[str],
    prelude: Sequence[str] = (),
    epilogue: str = "",
) -> tuple[Recipe, dict[str, sources.Stat | None]]:
    require(backend in ("cuda", "host"), "backend", repr(backend), "'cuda', 'host'")
    require(
        bool(instance.strip()) and "\n" not in instance,
        "instance",
        repr(instance),
        "one kernel, e.g. 'k<float, 4>'",
    )
    require(
        not (check and backend == "cuda"),
        "check",
        check,
        "False on the cuda backend (use compute-sanitizer there)",
    )
    if backend == "cuda":
        require(bool(_ARCH.match(arch)), "arch", repr(arch), "an architecture such as '80', '90a', '120'")
    path = sources.locate(source)
    contents, stats = sources.walk(path, backend)
    for header in (*prelude, "core/export.cuh"):
        more, more_stats = sources.walk(sources.root() / header, backend)
        contents, stats = {**more, **contents}, {**more_stats, **stats}
    inside = path.is_relative_to(sources.root())
    name = path.relative_to(sources.root()).as_posix() if inside else path.as_posix()
    # Inside the namespace, so that an instance may name kernels and types of pk with or without it; but a raw
    # kernel (they have a prelude) is named as seen from outside, as NVRTC must name it too.
    first, exported = "".join(f'#include "{header}"\n' for header in prelude), f"PK_VARIANT({instance})"
    rest = f'"\n#include "core/export.cuh"\nnamespace pk {{ {exported} }}\n'
    if prelude:
        rest = f'"\n{extension.MARK}\n#include "core/export.cuh"\n{epilogue}\n{exported}\n'
    text = f'{first}#include "{name}{rest}'
    identity = None if inside else f'{first}#include "{path.name}{rest}'
    ldflags = list(flags.LINK)
    if backend == "cuda":
        files: tuple[str, list[str], list[str], bool] = ("v.cu", [], [*flags.nvcc(arch), *extra_flags], True)
    else:
        mine = flags.extra()
        files = ("v.cpp", [*flags.host(toolchain.cxx(), check), *extra_flags, *mine], [], False)
        ldflags += mine
    filename, cflags, cuda_cflags, with_cuda = files
    recipe = Recipe(
        _label(instance),
        filename,
        text,
        contents,
        cflags,
        cuda_cflags,
        ldflags,
        with_cuda,
        "",
        identity,
        instance,
        folder=str(path.parent),
    )
    return recipe, stats


def variant(
    source: str,
    instance: str,
    *,
    backend: str,
    arch: str = "",
    check: bool = False,
    extra_flags: Sequence[str] = (),
    prelude: Sequence[str] = (),
    epilogue: str = "",
) -> Variant:
    """The kernel ``instance`` (``"softmax_warp<float, 4>"``) of ``source`` (``"ops/softmax.cuh"``), built and loaded.

    ``backend`` is ``"cuda"`` (``arch`` such as ``"90a"``) or ``"host"``; ``check`` instruments a host variant
    for the checker; ``prelude`` are headers to include first, ``epilogue`` is text that follows the source. Safe from
    many threads and processes at once: one of them builds. A header edited since the last call is noticed. Raises
    BuildError, ToolchainError, CaptureError (a compile would be needed during graph capture).
    """
    settings = tuple(os.environ.get(name) for name in ("PYKERN_CACHE", "PYKERN_HOST_FLAGS"))
    wanted = (source, instance, backend, arch, check, tuple(extra_flags), tuple(prelude), epilogue, settings)
    known = _memo.get(wanted)
    if known is not None and sources.unchanged(known[0]):
        return known[1]
    started = time.monotonic()
    if backend == "host":
        host_runtime()
    recipe, stats = _variant_recipe(source, instance, backend, arch, check, extra_flags, prelude, epilogue)
    key = recipe.key()

    def load(entry: Entry, cached: bool) -> Variant:
        with _memo_lock:
            have = _loaded.get(key)
        if have is None:
            have = _open(entry.path)
            with _memo_lock:
                have = _loaded.setdefault(key, have)
        return Variant(entry.path, have[1], key, time.monotonic() - started, cached, instance)

    result: Variant = extension.obtain(recipe, load, key)
    with _memo_lock:
        _memo[wanted] = (stats, result)
    return result


def _open(path: Path) -> tuple[ctypes.CDLL, int]:
    handle = ctypes.CDLL(str(path))
    handle.pk_entry.restype = ctypes.c_void_p
    handle.pk_entry.argtypes = []
    return handle, int(handle.pk_entry())


def compile_only(source: str, instance: str, arch: str, extra_flags: Sequence[str] = ()) -> CompileResult:
    """Build a CUDA variant, through the path a GPU machine takes, and report its resources. Needs no GPU."""
    started = time.monotonic()
    recipe, _ = _variant_recipe(source, instance, "cuda", arch, False, extra_flags)

    def read(entry: Entry, cached: bool) -> CompileResult:
        usage: Usage = resources.parse(entry.record.get("log", "")).of(instance)
        seconds = time.monotonic() - started
        return CompileResult(entry.path, usage.registers, usage.spills, usage.local_bytes, usage.smem, seconds, cached)

    result: CompileResult = extension.obtain(recipe, read)
    return result


# ---------------------------------------------------------------- the two libraries that are not variants
_singles: dict[str, Any] = {}


def _runtime_files(text: str) -> tuple[str, dict[str, str]]:
    """The runtime in two halves that compile at once: what runs kernels (whole, so that it inlines), the checker.

    ``runtime.cpp`` lists its parts by ``#include``; where it holds anything else it stays one file.
    """
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("//")]
    parts = [re.fullmatch(r'#include "host/(\w+)\.cpp"', line.strip()) for line in lines]
    names = [part[1] for part in parts if part]
    halves = [[name for name in names if name.startswith("check") == checks] for checks in (False, True)]
    if len(names) < len(lines) or not all(halves):
        return '#include "host/runtime.cpp"\n', {}
    run, check = ("".join(f'#include "host/{name}.cpp"\n' for name in half) for half in halves)
    return run, {"checker.cpp": check}


def host_runtime() -> ctypes.CDLL:
    """The host backend's runtime, loaded once with its symbols global.

    Variants and the launcher resolve to it.
    """
    if "host" in _singles:
        return _singles["host"]
    file = sources.root() / "host" / "runtime.cpp"
    if not file.is_file():
        raise ArgumentError("source", repr(str(file)), "the host backend's runtime")
    first, more = _runtime_files(file.read_text())
    recipe = Recipe(
        "host_runtime", "runtime.cpp", first, sources.closure(file), flags.host_runtime(toolchain.cxx()), (),
        [*flags.LINK_RUNTIME, *flags.sanitizers()], False, kernel="host runtime", more=more,
    )  # fmt: skip
    found = extension.obtain(recipe, lambda entry, _: ctypes.CDLL(str(entry.path), ctypes.RTLD_GLOBAL))
    return _singles.setdefault("host", found)


def torch_abi() -> str:
    """What a library linked to torch depends on: version, CUDA, and the C++ string ABI."""
    import torch

    return f"torch {torch.__version__} cuda {torch.version.cuda} abi {int(torch._C._GLIBCXX_USE_CXX11_ABI)}"


def launcher(cuda: bool) -> ctypes.PyDLL:
    """The launcher, the one library that links to torch, loaded once. ``cuda`` builds it with the CUDA runtime.

    A ``PyDLL``: calls keep the GIL and may pass Python objects.
    """
    name = f"launcher-{'cuda' if cuda else 'host'}"
    if name in _singles:
        return _singles[name]
    first, second = sources.launcher_sources()
    # an arch must be named or cpp_extension asks the GPU for one; the launcher has no device code
    cuda_cflags = flags.nvcc("80") if cuda else ()
    recipe = Recipe(
        name, first.name, f'#include "{first.as_posix()}"\n', sources.closure(first) | sources.closure(second),
        flags.launcher(toolchain.cxx(), cuda), cuda_cflags, flags.LINK, cuda, torch_abi(),
        identity="launcher", kernel="launcher", more={second.name: f'#include "{second.as_posix()}"\n'},
    )  # fmt: skip
    found = extension.obtain(recipe, lambda entry, _: ctypes.PyDLL(str(entry.path)))
    return _singles.setdefault(name, found)


def prepare(cuda: bool) -> tuple[ctypes.PyDLL, ctypes.CDLL]:
    """(launcher, host runtime): what every op call needs, compiled side by side when both are cold."""
    with ThreadPoolExecutor(1, "pykern-build") as pool:
        runtime = pool.submit(host_runtime)
        return launcher(cuda), runtime.result()
