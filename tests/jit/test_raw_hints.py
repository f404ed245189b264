"""Plain CUDA on CPU tensors: it works, or the first error says what to write instead, in the words of its author."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import pykern
from pykern.errors import ArgumentError, BuildError, CheckError, KernelError
from pykern.jit import diagnose, hints, raw_cuda

from .conftest import python_env

torch = pytest.importorskip("torch")

SHARED = """__global__ void k(float* x) {
  __shared__ float a[32];
  __shared__ __align__(16) int b[4], c;
  a[threadIdx.x] = x[threadIdx.x];
}
"""
# name -> (text, instance, where the first error is, what the hint holds)
ERRORS: dict[str, tuple[str, str, str, str]] = {
    "shared": (
        SHARED,
        "k",
        "k.cuh:2: ",
        "`struct Smem { float a[32]; int b[4], c; };` before the kernel, `PK_SMEM(Smem",
    ),
    "extern": (
        "extern __shared__ float a[];\n__global__ void k(float* x) { x[0] = a[0]; }",
        "k",
        "k.cuh:1: ",
        "`struct Dynamic { float a[N]; };` before the kernel, `PK_DYN_SMEM(Dynamic, s);` in it, "
        "`s.a` for `a` (and give the launch smem=",
    ),
    "asm": (
        '__global__ void k(int* x) {\n asm("mov.u32 %0, %%laneid;" : "=r"(x[0])); }',
        "k",
        "k.cuh:2: ",
        "PTX is for",
    ),
    "asm float": (
        '__global__ void k(float* x) {\n asm("ex2 %0;" : "=f"(x[0])); }',
        "k",
        "k.cuh:2: ",
        "PTX is for GPUs",
    ),
    "launch": ("__global__ void j() {}\n__global__ void k() {\n j<<<1, 1>>>();\n}", "k", "k.cuh:3: ", "k[grid, block]"),
    "host code": ("__global__ void k() {}\nvoid f(void** p) { cudaMalloc(p, 4); }", "k", "k.cuh:2: ", "k[grid, block]"),
    "torch": ("#include <torch/extension.h>\n__global__ void k() {}", "k", "", "k[grid, block]"),
    "half": ("__global__ void k(pk::half* x) { x[0] = x[0] + x[1]; }", "k", "k.cuh:1: ", "pk::to_float"),
    "fp16": ("#include <cuda_fp16.h>\n__global__ void k(__half* x) {}", "k", "k.cuh:1: ", "pk::half"),
    "groups": ("#include <cooperative_groups.h>\n__global__ void k() {}", "k", "k.cuh:1: ", "pk::cluster_sync"),
    "no pk": (
        "__global__ void k(float* x) { x[0] = warp_sum(x[0]); }",
        "k",
        "k.cuh:1: ",
        '`pk::warp_sum`, of `#include "core/',
    ),
    "old shuffle": ("__global__ void k(int* x) { x[0] = __shfl_down(x[0], 1); }", "k", "k.cuh:1: ", "__shfl_down_sync"),
    "no body": (
        "__device__ int f();\n__global__ void k(int* x) { x[0] = f(); }",
        "k",
        "undefined symbol",
        "declared, but",
    ),
    "instance": ("template <class T> __global__ void k(T* x) {}", "k<flaot>", "'flaot'", "template arguments"),
    "brace": (
        "__global__ void k(float* x) {\n if (x) {\n x[0] = 1;\n}\n\n",
        "k",
        "k.cuh:4: the file ends where a } is",
        "line 1",
    ),
    "namespace": (
        "\nnamespace a {\n__global__ void k() {}\n",
        "a::k",
        "k.cuh:3: the file ends where a } is missing",
        "line 2",
    ),
    "brace between": (
        "__global__ void j() { if (1) {\n}\n__global__ void k() {}\n",
        "k",
        "k.cuh:3: ",
        "line 1 has the outermost",
    ),
    "no semicolon": (
        "__global__ void k() {}\ntemplate <class T>\n",
        "k",
        "k.cuh:2: the file ends in the middle of a declaration",
        "",
    ),
    "not void": ("__global__ int k(int* x) { return 1; }", "k", "pykern read k(int* x)", "let it return void"),
}


def quotes(text: str) -> str:
    return text.replace("‘", "'").replace("’", "'")


@pytest.mark.parametrize("name", ERRORS)
def test_the_first_error_and_its_hint(name: str) -> None:
    text, instance, where, hint = ERRORS[name]
    kernel = pykern.compile(text, name="k.cuh").kernel(instance)
    with pytest.raises(BuildError) as caught:
        kernel.build()
    said, _, advice = quotes(str(caught.value)).partition("\n  hint: ")
    assert said.startswith(f"{instance}: ") and where in said, said
    assert hint in said + advice, advice
    assert "did you mean '__" not in said and ".raw" not in said


def test_the_hints_are_right(tmp_path: Path) -> None:
    """What the hint for SHARED says to write compiles and works."""
    text = """struct Smem { float a[32]; int b[4], c; };
struct Dynamic { float v[32]; };
__global__ void k(float* x) {
  PK_SMEM(Smem, s);
  s.a[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s.a[31 - threadIdx.x];
}
__global__ void d(float* x) {
  PK_DYN_SMEM(Dynamic, s);
  s.v[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = s.v[31 - threadIdx.x];
}"""
    source, x = pykern.compile(text), torch.arange(32.0)
    source.kernel("k").launch(1, 32, x, check=True)
    source.kernel("d").launch(1, 32, x, smem=128, check=True)
    assert torch.equal(x, torch.arange(32.0))
    with pytest.raises(KernelError, match=r"^d: k.*needs 128 bytes of dynamic shared memory, the launch gives 64"):
        pykern.compile(text, name="k.cuh").kernel("d").launch(1, 32, x, smem=64)


WORKS = {
    "assert": "__global__ void k(float* x) { assert(x[0] == 0); x[0] = 1; }",
    "cassert": "#include <cassert>\n__global__ void k(float* x) { assert(x[0] == 0); x[0] = 1; }",
    "macro named as ours": "#define T float\n__global__ void k(T* x) { x[0] = T(1); }",
    "alias": "namespace q { using real = float; __global__ void k(real* x) { x[0] = 1; } }",
}


@pytest.mark.parametrize("name", WORKS)
def test_plain_cuda_that_works(name: str) -> None:
    x = torch.zeros(32)
    pykern.compile(WORKS[name]).kernel("k")[1, 1](x)
    assert x[0] == 1


@pytest.mark.parametrize("check", [False, True])
@pytest.mark.parametrize("header", ["", "#include <assert.h>\n"], ids=["plain", "assert.h"])
def test_a_failed_assertion_ends_the_launch_not_the_process(header: str, check: bool) -> None:
    text = f"{header}__global__ void k(float* x) {{ if (threadIdx.x == 3) assert(x[0] == 1); }}"
    line = text.count("\n") + 1
    with pytest.raises(CheckError if check else KernelError) as caught:
        pykern.compile(text, name="k.cuh").kernel("k").launch(1, 32, torch.zeros(4), check=check)
    assert f"k.cuh:{line}: assertion `x[0] == 1` failed" in str(caught.value)
    assert "thread (3,0,0)" in str(caught.value)


def test_printf_comes_in_order(tmp_path: Path) -> None:
    """Also where stdout is a pipe, and C's buffer is not Python's."""
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, pykern\n"
        "k = pykern.compile('__global__ void k(int n) { printf(\"%d\\\\n\", n); }').kernel('k')\n"
        "for n in range(3):\n    print('before', n)\n    k[1, 1](n)\nprint('end')\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=python_env(), cwd=tmp_path
    )
    assert done.stdout.split() == ["before", "0", "0", "before", "1", "1", "before", "2", "2", "end"], done.stderr


MISREAD = {
    "a macro of a header": (
        '#include "m.cuh"\n__global__ void k(float* x OPTIONAL) { x[0] = 1; }',
        "#define OPTIONAL , int n\n",
    ),
    "a switch of a header": (
        '#include "m.cuh"\n__global__ void k(float* x\n#ifdef N\n, int n\n#endif\n) { x[0] = 1; }',
        "// no N\n",
    ),
    "a type of another size": (
        '#include "m.cuh"\n__global__ void k(half* x) { x[0] = 1; }',
        "#define half float\n",
    ),
}


@pytest.mark.parametrize("name", MISREAD)
def test_a_parameter_list_that_was_misread_is_an_error(name: str, tmp_path: Path) -> None:
    """What a header makes of the text is not followed; the compiler's view is held against what was read."""
    text, header = MISREAD[name]
    (tmp_path / "k.cuh").write_text(text)
    (tmp_path / "m.cuh").write_text(header)
    kernel = pykern.load(tmp_path / "k.cuh").kernel("k")
    with pytest.raises(BuildError, match=r"^k: .*pykern read k\(") as caught:
        kernel.build()
    assert "hint: the compiler sees another kernel" in str(caught.value)


@pytest.mark.parametrize(
    ("parameter", "value", "says"),
    [
        ("S s", 1, "`S s` cannot be passed from Python. Let the kernel take its members one by one, or `const S* s`"),
        ("float4 v", (1, 2, 3, 4), "`const float4* v` with a float32 tensor"),
        ("long double d", 1.0, "Let the kernel take `double`"),
        ("float** p", torch.zeros(4), "int64 or uint64, of addresses, for `float** p`"),
        ("S* s", torch.zeros(4), "uint8 or int8 (S: no dtype) for `S* s`"),
    ],
)
def test_values_that_cannot_be_passed(parameter: str, value: Any, says: str) -> None:
    kernel = pykern.compile(f"struct S {{ int a; }};\n__global__ void k({parameter}) {{}}").kernel("k")
    with pytest.raises(ArgumentError) as caught:
        kernel[1, 1](value)
    assert says in str(caught.value)


def test_values_are_shown_in_one_short_line() -> None:
    import numpy as np

    kernel = pykern.compile("__global__ void k(float* x, int n, float a, bool b) {}").kernel("k")
    x, big = torch.zeros(4), np.zeros((100, 100), np.float32)
    for index in range(4):
        for value in (big, "y" * 10_000, [0.0] * 10_000, object(), 10**5000, np.zeros(3), {}):
            args: list[Any] = [x, 1, 1.0, True]
            args[index] = value
            with pytest.raises(ArgumentError) as caught:
                kernel[1, 1](*args)
            text = str(caught.value)
            assert len(text) < 300 and "\n" not in text and "allowed: " in text, text
    with pytest.raises(ArgumentError, match=r"^x: got a numpy ndarray of float32 \(100, 100\), allowed: a torch te"):
        kernel[1, 1](big, 1, 1.0, True)
    kernel[1, 1](x, np.int64(1), np.float32(1), np.bool_(True))


def test_a_text_survives_its_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``pykern cache clear`` in another shell deletes the file of a text that a running process holds."""
    monkeypatch.setenv("PYKERN_CACHE", str(tmp_path / "cache"))
    text = "__global__ void k(float* x) { x[0] += 1; }\r\n"
    source, x = pykern.compile(text), torch.zeros(1)
    kernel = source.kernel("k")
    kernel[1, 1](x)
    for again in (kernel, source.kernel("k"), pykern.compile(text).kernel("k"), kernel):
        shutil.rmtree(tmp_path / "cache")
        again[1, 1](x)
    assert x.item() == 5
    before = os.stat(source.path)
    pykern.compile(text)
    assert os.stat(source.path) == before  # the same text is not written again


def test_a_text_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from pykern.jit import cache

    (tmp_path / "file").write_text("")
    monkeypatch.setattr(cache, "store", lambda: tmp_path / "file")
    with pytest.raises(BuildError, match=r"^k.cuh: the text cannot be written to the cache, .*Not a directory"):
        pykern.compile("__global__ void k() {}", name="k.cuh")


CLANG = "k.cuh:2:3: error: unknown type name '__shared__'\n  __shared__ float a[32];\n  ^\n"
NVRTC = 'k.cuh(2): error: no operator "+" matches these operands\n            operand types are: pk::half + pk::half\n'
EXTERN = "ptxas fatal   : Unresolved extern function '_Z1gf'"
NVCC_END = 'v.cu(4): error: expected a ";"\n'


def test_other_compilers_words() -> None:
    assert "struct Smem { float a[32]; };" in diagnose.diagnose(CLANG).hint
    assert "pk::to_float" in diagnose.diagnose(NVRTC).hint
    assert "declared, but" in diagnose.diagnose(EXTERN).hint
    found = diagnose.of_sources(NVCC_END, {"dir/k.cuh": "int a\n"}, after=4)
    assert found.where == "dir/k.cuh:1" and "in the middle of a declaration" in found.text
    assert diagnose.of_sources(NVCC_END, {"dir/k.cuh": "int a\n"}, after=3).where == ""


def test_a_hint_is_of_the_first_error() -> None:
    """A consequence further down must not explain the cause."""
    later = "k.cuh:1:1: error: expected ';' before '}' token\n    1 | x\n      | ^\n" + "note\n" * 4
    assert diagnose.diagnose(later + "k.cuh:9:1: error: '__shared__' was not declared\n").hint == ""
    assert hints.for_kernel("k.cuh 'nowhere' was not declared in this scope") == ""


@pytest.mark.parametrize(
    "name", ["shared", "asm", "brace", "namespace", "no semicolon", "half", "no pk", "old shuffle"]
)
def test_nvrtc_says_the_same_or_takes_it(name: str) -> None:
    if not raw_cuda.has_nvrtc():
        pytest.skip("cuda.core with its libnvrtc is not installed")
    text, instance, where, hint = ERRORS[name]
    kernel = pykern.compile(text, name="k.cuh").kernel(instance)
    if name in ("shared", "asm"):  # plain CUDA
        assert raw_cuda.compile_nvrtc(kernel, "90a")[0][:4] == b"\x7fELF"
        return
    with pytest.raises(BuildError) as caught:
        raw_cuda.compile_nvrtc(kernel, "90a")
    assert where in str(caught.value) and hint in str(caught.value)
