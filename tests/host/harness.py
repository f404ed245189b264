"""Compile a kernel with g++, and launch it on the host runtime through ctypes: the runtime's tests need no more.

Tensors are numpy arrays aligned to 256 bytes, as cudaMalloc gives them (`aligned`).
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "cuda_src"
CACHE = Path(tempfile.gettempdir()) / f"pykern-host-tests-{os.getuid()}"
FLAGS = ["-std=c++17", "-march=x86-64-v3", "-fPIC", "-shared", "-fvisibility=hidden", "-Wno-unknown-pragmas"]
PLAIN = ["-O2"]
RUNTIME_FLAGS = ["-O2", "-g", "-std=c++17", "-fPIC", "-shared", "-lpthread"]
CHECKED = ["-O1", "-g", "-fsanitize=thread", "-DPK_CHECK=1"]
CXX = os.environ.get("PK_TEST_CXX", "g++")
if "clang" not in CXX:
    FLAGS.append("-fno-gnu-unique")
    CHECKED += ["--param", "tsan-instrument-func-entry-exit=0"]
else:
    # clang leaves out the read of a read-modify-write, turns loops into memcpy, takes a null pointer for unreachable
    CHECKED += ["-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm", "-tsan-instrument-read-before-write=1"]
    CHECKED += ["-fno-delete-null-pointer-checks", "-mllvm", "-disable-loop-idiom-all"]

PDL, COOPERATIVE = 1, 2
INPUT, WEIGHT, OUTPUT, MUTATED, WORKSPACE = range(5)
EAGER, LAZY, RANDOM = range(3)
INITIALISED = 1


class Region(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p), ("bytes", ctypes.c_int64), ("name", ctypes.c_char_p), ("role", ctypes.c_int32),
        ("elem_bytes", ctypes.c_int32), ("ndim", ctypes.c_int32), ("size", ctypes.POINTER(ctypes.c_int64)),
        ("stride", ctypes.POINTER(ctypes.c_int64)), ("flags", ctypes.c_int32),
    ]  # fmt: skip


class Options(ctypes.Structure):
    _fields_ = [
        ("check", ctypes.c_int32), ("threads", ctypes.c_int32), ("seed", ctypes.c_uint64),
        ("async_order", ctypes.c_int32), ("trace", ctypes.c_int32), ("sms", ctypes.c_int32),
    ]  # fmt: skip


class Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("cluster", ctypes.c_uint32 * 3),
        ("flags", ctypes.c_uint32), ("smem", ctypes.c_uint64), ("kernel", ctypes.c_char_p), ("nargs", ctypes.c_int32),
        ("nregions", ctypes.c_int32), ("arg_region", ctypes.POINTER(ctypes.c_int32)),
        ("regions", ctypes.POINTER(Region)), ("options", ctypes.POINTER(Options)),
    ]  # fmt: skip


class HostError(RuntimeError):
    """The runtime refused or failed a launch; the text is pkh_error()'s."""


def _newest(paths: Sequence[Path]) -> bytes:
    digest = hashlib.sha256()
    for path in sorted(paths):
        digest.update(path.read_bytes())
    return digest.digest()


def _build(name: str, source: str, flags: Sequence[str]) -> Path:
    headers = [p for d in ("host", "core") for p in (INCLUDE / d).rglob("*") if p.suffix in (".h", ".cuh", ".cpp")]
    key = hashlib.sha256(_newest(headers) + repr((source, flags, CXX)).encode()).hexdigest()[:20]
    CACHE.mkdir(parents=True, exist_ok=True)
    library = CACHE / f"{name}-{key}.so"
    if not library.exists():
        text = CACHE / f"{name}-{key}.cpp"
        text.write_text(source)
        partial = CACHE / f"{name}-{key}.{os.getpid()}.part"
        if "-fsanitize=thread" in flags:  # instrumentation only: the runtime supplies __tsan_*
            compile_flags = [f for f in flags if f != "-shared"]
            object_file = partial.with_suffix(".o")
            steps = [
                [CXX, *compile_flags, f"-I{INCLUDE}", "-c", str(text), "-o", str(object_file)],
                [CXX, "-shared", str(object_file), "-o", str(partial)],
            ]
        else:
            steps = [[CXX, *flags, f"-I{INCLUDE}", str(text), "-o", str(partial)]]
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True)
            if done.returncode:
                raise RuntimeError(done.stderr[:4000])
        partial.replace(library)
    return library


_runtime: ctypes.CDLL | None = None


def runtime() -> ctypes.CDLL:
    """The host runtime, loaded once and globally: kernels find its symbols there.

    It is the JIT's own: a process that ran ops before has it loaded, and a second copy would take only some of the
    first one's symbols. Only another compiler's (PK_TEST_CXX, in a process of its own) is built here.
    """
    global _runtime
    if _runtime is None:
        if CXX == "g++":
            from pykern.jit import build as jit

            _runtime = jit.host_runtime()
        else:
            path = _build("runtime", '#include "host/runtime.cpp"\n', RUNTIME_FLAGS)
            _runtime = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        _runtime.pkh_error.restype = ctypes.c_char_p
        _runtime.pkh_check_report.restype = ctypes.c_char_p
    return _runtime


INCLUDES = "".join(f'#include "core/{n}.cuh"\n' for n in ("export", "vec", "block", "mma", "async"))
_entries: dict[tuple[str, str, bool], tuple[Path, int]] = {}
_libraries: list[ctypes.CDLL] = []


def build(kernels: Sequence[tuple[str, str, bool]]) -> None:
    """Compile (source, instance, check) kernels, all of one kind in one translation unit: it is what takes the time."""
    runtime()
    for check in (False, True):
        todo = [k for k in dict.fromkeys(kernels) if k[2] == check and k not in _entries]
        if not todo:
            continue
        text = INCLUDES
        spaces: dict[str, str] = {}
        for source, _, _ in todo:
            if source not in spaces:
                spaces[source] = f"k{len(spaces)}"
                lines = source.splitlines()
                text += "\n".join(line for line in lines if line.startswith("#include")) + "\n"
                body = "\n".join("" if line.startswith("#include") else line for line in lines)
                text += f'namespace {spaces[source]} {{\n#line 1 "kernel.cuh"\n{body}\n}}\n'
        for i, (source, instance, _) in enumerate(todo):
            for name in ("pk_variant_run_", "pk_entry"):
                text += f"#undef {name}\n#define {name} {name}_{i}\n"
            text += f"namespace {spaces[source]} {{ PK_VARIANT({instance}) }}\n"
        path = _build("kernels", text, FLAGS + (CHECKED if check else PLAIN))
        library = ctypes.CDLL(str(path))
        _libraries.append(library)
        for i, kernel in enumerate(todo):
            entry = library[f"pk_entry_{i}"]
            entry.restype = ctypes.c_void_p
            _entries[kernel] = (path, entry())


class Kernel:
    """One kernel instance, compiled plain or for the checker."""

    def __init__(self, source: str, instance: str, check: bool = False) -> None:
        build([(source, instance, check)])
        self.name, self.check = instance, check
        self.path, self.entry = _entries[source, instance, check]


def aligned(shape: int | Sequence[int], dtype: Any = np.float32, fill: float | None = None) -> np.ndarray:
    """An array aligned to 256 bytes, filled with `fill` or with 0xff bytes."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.full(count + 256, 0xFF, np.uint8)
    offset = -raw.ctypes.data % 256
    out = raw[offset : offset + count].view(dtype).reshape(shape)
    if fill is not None:
        out[...] = fill
    return out


def copy_of(array: Any, dtype: Any = None) -> np.ndarray:
    array = np.asarray(array, dtype)
    out = aligned(array.shape, array.dtype)
    out[...] = array
    return out


def line_of(source: str, text: str) -> str:
    """Where `text` first stands in a kernel's source, as messages name it."""
    index = source.index(text)
    return f"kernel.cuh:{source[:index].count(chr(10)) + 1}"


class Arg:
    """A tensor argument with its role; a bare array is an input."""

    def __init__(self, array: np.ndarray, role: int = INPUT, name: str = "", flags: int = 0) -> None:
        self.array, self.role, self.name, self.flags = array, role, name, flags


def out(array: np.ndarray, name: str = "out") -> Arg:
    return Arg(array, OUTPUT, name)


class TensorMap(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_uint8 * 128)]


def tensor_map(array: np.ndarray, box: Sequence[int], swizzle: int = 3) -> Arg:
    """A 2-D map over `array` [rows, columns]; box = (columns, rows)."""
    arg = Arg(array)
    arg.map = TensorMap()  # type: ignore[attr-defined]
    dims = (ctypes.c_uint64 * 2)(array.shape[1], array.shape[0])
    extent = (ctypes.c_uint32 * 2)(*box)
    rc = runtime().pkh_tensor_map(
        ctypes.byref(arg.map), ctypes.c_void_p(array.ctypes.data), array.itemsize, dims,  # type: ignore[attr-defined]
        ctypes.c_uint64(array.strides[0]), extent, swizzle,
    )  # fmt: skip
    if rc:
        raise HostError(runtime().pkh_error().decode())
    return arg


def prepare(
    kernel: Kernel, grid: Any, block: Any, args: Sequence[Any], *, smem: int = 0, cluster: Any = 1, flags: int = 0,
    options: Options | None = None,
) -> tuple[Launch, Any, list[Any]]:  # fmt: skip
    """(launch, packed arguments, what must stay alive)."""

    def triple(v: Any) -> Any:
        v = (v,) if isinstance(v, int) else tuple(v)
        return (ctypes.c_uint32 * 3)(*(*v, 1, 1, 1)[:3])

    keep: list[Any] = []
    values: list[Any] = []
    regions: list[Region] = []
    which: list[int] = []
    for i, arg in enumerate(args):
        if isinstance(arg, np.ndarray):
            arg = Arg(arg)
        if isinstance(arg, Arg):
            a = arg.array
            size = (ctypes.c_int64 * a.ndim)(*a.shape)
            stride = (ctypes.c_int64 * a.ndim)(*[s // a.itemsize for s in a.strides])
            extent = sum((n - 1) * s for n, s in zip(a.shape, a.strides, strict=True)) + a.itemsize if a.size else 0
            name = (arg.name or f"arg{i}").encode()
            keep += [a, size, stride, name]
            regions.append(Region(a.ctypes.data, extent, name, arg.role, a.itemsize, a.ndim, size, stride, arg.flags))
            which.append(len(regions) - 1)
            values.append(arg.map if hasattr(arg, "map") else ctypes.c_void_p(a.ctypes.data))
        else:
            which.append(-1)
            scalar = {float: ctypes.c_float, int: ctypes.c_int}.get(type(arg))
            values.append(scalar(arg) if scalar else arg)
    packed = (ctypes.c_void_p * len(values))(*[ctypes.addressof(v) for v in values])
    region_array = (Region * max(len(regions), 1))(*regions)
    which_array = (ctypes.c_int32 * max(len(which), 1))(*which)
    name = kernel.name.encode()
    options = options or Options()
    if kernel.check:
        options.check = 1
    keep += [values, region_array, which_array, name, options]
    launch = Launch(
        triple(grid), triple(block), triple(cluster), flags, smem, name, len(values), len(regions), which_array,
        region_array, ctypes.pointer(options),
    )  # fmt: skip
    return launch, packed, keep


def run_sequence(kernels: Sequence[Kernel], prepared: Sequence[Any], check: bool = True) -> int:
    n = len(kernels)
    launches = (Launch * n)(*[p[0] for p in prepared])
    entries = (ctypes.c_void_p * n)(*[k.entry for k in kernels])
    args = (ctypes.c_void_p * n)(*[ctypes.addressof(p[1]) for p in prepared])
    rc = runtime().pkh_run_sequence(launches, entries, args, n)
    if rc and check:
        raise HostError(runtime().pkh_error().decode())
    return int(rc)


def launch(kernel: Kernel, grid: Any, block: Any, *args: Any, raises: bool = True, **kw: Any) -> int:
    return run_sequence([kernel], [prepare(kernel, grid, block, args, **kw)], raises)


def report() -> dict[str, Any]:
    """The checker's report on the last launch."""
    return json.loads(runtime().pkh_check_report().decode())
