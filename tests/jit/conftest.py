"""A small stand-in for ``cuda_src``, so that the JIT is tested apart from the kernels and compiles in a moment."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from pykern.jit import build, cache, sources

REPO = Path(__file__).resolve().parents[2]

EXPORT = """
#pragma once
#include "core/number.cuh"
#ifdef __CUDACC__
#define PK_VARIANT(...) extern "C" __attribute__((visibility("default"))) \\
  const void* pk_entry() { return (const void*)&__VA_ARGS__; }
#else
#define PK_VARIANT(...) static int pk_run_() { return __VA_ARGS__(); } \\
  extern "C" __attribute__((visibility("default"))) const void* pk_entry() { return (const void*)&pk_run_; }
#endif
"""
# a function-local static in an inline template: with default flags STB_GNU_UNIQUE merges it across variants
KERNEL = """
#pragma once
#include "core/number.cuh"
#ifdef __CUDACC__
template <typename T, int N> __global__ void scale(const T* x, T* y, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] * T(N * kNumber);
}
#else
#include <string>
extern "C" int pkh_version();
template <typename T> inline int* where() { static int place; return &place; }
template <int N> inline int answer() {
  static std::string* text = nullptr;  // drags in libstdc++
  if (text == nullptr) text = new std::string(std::to_string(N * kNumber));
  return *where<int>() + std::stoi(*text) + 0 * pkh_version();
}
template <int N> inline void mark() { *where<int>() = N; }
template <int N> int marked() { mark<N>(); return *where<int>(); }
#endif
"""


@pytest.fixture
def fake_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source root with one op and a host runtime, in use by this process and by :func:`run_python`'s."""
    root = tmp_path / "cuda_src"
    for name, text in {
        "core/export.cuh": EXPORT,
        "core/number.cuh": "#pragma once\nconstexpr int kNumber = 1;\n",
        "ops/k.cuh": KERNEL,
        "host/runtime.cpp": 'extern "C" int pkh_version() { return 7; }\n',
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    settle(root)
    monkeypatch.setattr(sources, "root", lambda: root)
    monkeypatch.setenv("PYKERN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PK_TEST_ROOT", str(root))
    monkeypatch.setattr(build, "_singles", {})
    monkeypatch.setattr(build, "_memo", {})
    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(cache, "_chosen", {})
    return root


def settle(root: Path, age: float = 100.0) -> None:
    """Make files look old, as they are in real use: very young ones are read again each time."""
    for path in root.rglob("*"):
        info = path.stat()
        os.utime(path, (info.st_atime - age, info.st_mtime - age))


PREAMBLE = """
import os, sys, threading, time
from pathlib import Path
from pykern.jit import build, cache, extension, sources
if "PK_TEST_ROOT" in os.environ:
    sources.root = lambda: Path(os.environ["PK_TEST_ROOT"])
import ctypes
def call(variant): return ctypes.CFUNCTYPE(ctypes.c_int)(variant.entry)()
"""


def python_command(code: str) -> list[str]:
    return [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)]


def python_env(**env: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPO), **env}


def run_python(code: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Run ``code`` in a new process with the JIT imported."""
    return subprocess.run(
        python_command(code), capture_output=True, text=True, timeout=timeout, env=python_env(**env), cwd=REPO
    )
