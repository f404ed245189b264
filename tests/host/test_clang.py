"""The host backend built with clang (>= 14): runtime, launcher, plain and checked variants give g++'s results."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def clang() -> str | None:
    """A clang++ of 14 or later: PK_TEST_CLANG, clang++, or the newest clang++-N on PATH."""
    names = [os.environ.get("PK_TEST_CLANG", ""), "clang++", *(f"clang++-{n}" for n in range(24, 13, -1))]
    for path in filter(None, map(shutil.which, filter(None, names))):
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
        version = re.search(r"clang version (\d+)", said)
        if version and int(version[1]) >= 14:
            return path
    return None


CLANG = clang()
pytestmark = pytest.mark.skipif(CLANG is None, reason="clang-only: no clang++ >= 14 here (apt-get install clang-14)")

PROGRAM = """
import ctypes, json, sys, torch, pykern
from pykern.errors import CheckError
from pykern.jit import build, toolchain

assert toolchain.cxx().kind == "clang", toolchain.cxx()
out = {}
torch.manual_seed(0)
x, w = torch.randn(5, 300), torch.randn(48, 64).bfloat16()
z = torch.randn(3, 64).bfloat16()
y = pykern.softmax(x)
assert (y.double() - torch.softmax(x.double(), -1)).abs().max() < 1e-6
p = pykern.linear(z, w)
right = z.double() @ w.double().T
assert ((p.double() - right).abs() <= 4e-3 * right.abs() + 1e-3).all(), (p.double() - right).abs().max()
for seed, order in ((0, "eager"), (3, "random")):
    with pykern.host(check=True, seed=seed, async_order=order):
        assert torch.equal(pykern.softmax(x), y) and torch.equal(pykern.linear(z, w), p)

source = pykern.compile('''
struct S { float v[64]; };
__global__ void buggy(const float* x, float* y, int n, int bug) {
  PK_SMEM(S, s);
  s.v[threadIdx.x] = threadIdx.x < n ? x[threadIdx.x] : 0.0f;
  if (bug != 1) __syncthreads();
  y[threadIdx.x] = s.v[63 - threadIdx.x] + __shfl_xor_sync(0xffffffffu, 1.0f, 1);
  if (bug == 2 && threadIdx.x == 0) y[0] = x[n];
}''')
kernel = source.kernel("buggy")
a, b = torch.rand(60), torch.empty(64)
kernel.launch(1, 64, a, b, 60, 0, check=True)
assert torch.equal(b, torch.cat([a, torch.zeros(4)]).flip(0) + 1)
found = {}
for bug in (1, 2):
    try:
        kernel.launch(1, 64, a, b, 60, bug, check=True)
    except CheckError as error:
        found[bug] = [(r["kind"], r.get("line")) for r in error.reports]
print(json.dumps(found))
"""


def test_the_host_backend_with_clang() -> None:
    """Everything through the JIT, as a user with CXX=clang++ gets it; the checker names the same lines."""
    env = {**os.environ, "CXX": str(CLANG), "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert ["shared_race", 7] in found["1"] or ["uninitialised_shared", 7] in found["1"], found
    assert found["2"] == [["out_of_bounds", 8]], found


def test_every_header_of_the_dialect_compiles_without_a_warning(tmp_path: Path) -> None:
    """core/ and host/ under clang's own warnings."""
    names = sorted(p.name for p in (ROOT / "cuda_src" / "core").glob("*.cuh") if p.name != "export.cuh")
    path = tmp_path / "all.cpp"
    path.write_text("".join(f'#include "core/{name}"\n' for name in names) + "int main() { return 0; }\n")
    allowed = ["-Wno-unknown-pragmas", "-Wno-unused-value", "-Wno-unused-parameter"]
    command = [str(CLANG), "-std=c++17", "-fsyntax-only", "-Wall", "-Wextra", *allowed, "-I", str(ROOT / "cuda_src")]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and "warning" not in done.stderr, done.stderr[:4000]
