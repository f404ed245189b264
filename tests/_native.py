"""Compiling small pieces of cuda_src for tests: plain C functions that call pure device functions, without a launch."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

CUDA_SRC = Path(__file__).resolve().parents[1] / "cuda_src"
HOST_FLAGS = (
    "-O2",
    "-std=c++17",
    "-fPIC",
    "-shared",
    "-Wall",
    "-Wextra",
    "-Wno-unknown-pragmas",
    "-Wno-psabi",
)
# The instruction sets a host build may have: with F16C and AVX2 as pykern builds on x86-64, and the compiler's least.
ARCH_FLAGS = {"native": ("-march=x86-64-v3",), "baseline": ()}


@functools.cache
def _directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="pykern-native-"))


def run_compiler(command: list[str]) -> str:
    """Run a compiler; its messages, or an AssertionError that holds them."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@functools.cache
def compile_host(source: str, extra: tuple[str, ...] = ARCH_FLAGS["native"]) -> ctypes.CDLL:
    """A shared library of `source` (C++ that may include core/ and host/ headers), loaded."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or "c++"
    name = hashlib.sha256("\0".join((source, *extra)).encode()).hexdigest()[:16]
    cpp, library = _directory() / f"{name}.cpp", _directory() / f"{name}.so"
    cpp.write_text(source)
    messages = run_compiler([compiler, *HOST_FLAGS, *extra, f"-I{CUDA_SRC}", str(cpp), "-o", str(library)])
    assert "warning" not in messages, messages
    return ctypes.CDLL(str(library))


def nvcc(source: str, *flags: str, suffix: str = "") -> Path:
    """The file that nvcc makes of `source` with `flags` (-ptx, -cubin, ...); '' makes a program."""
    name = hashlib.sha256("\0".join((source, *flags)).encode()).hexdigest()[:16]
    cu, out = _directory() / f"{name}.cu", _directory() / f"{name}.out{suffix}"
    cu.write_text(source)
    compiler = shutil.which("nvcc") or "nvcc"
    run_compiler([compiler, "-std=c++17", *flags, f"-I{CUDA_SRC}", str(cu), "-o", str(out)])
    return out


def address(array: np.ndarray) -> ctypes.c_void_p:
    """The address of an array's first element, which must be contiguous to be walked from C."""
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)


def convert(library: ctypes.CDLL, name: str, values: np.ndarray, out: type) -> np.ndarray:
    """`name(in, out, n)` of the library over all `values`, as an array of type `out`."""
    values = np.ascontiguousarray(values)
    result: np.ndarray = np.empty(values.shape, out)
    getattr(library, name)(address(values), address(result), ctypes.c_int64(values.size))
    return result
