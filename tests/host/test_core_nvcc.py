"""What of cuda_src/core needs nvcc to be seen: it compiles for every card, and accesses keep their width."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from _native import ARCH_FLAGS, CUDA_SRC, compile_host, nvcc, run_compiler

VOCABULARY = (Path(__file__).parent / "vocabulary.cuh").read_text()
HEADERS = sorted(p.relative_to(CUDA_SRC).as_posix() for p in (CUDA_SRC / "core").glob("*.cuh"))
# Parts of a backend, included after the definitions they need; every other header stands alone.
PARTS = ("core/scalar.cuh", "core/fp8_bits.cuh")


def vocabulary(card: int, n: int = 256) -> str:
    return f"#define PK_TEST_CARD {card}\n#define PK_TEST_N {n}\n{VOCABULARY}"


@pytest.mark.nvcc
@pytest.mark.parametrize("arch,card", [("sm_80", 80), ("sm_89", 80), ("sm_90a", 901), ("sm_120", 90)])
def test_the_whole_vocabulary_compiles(arch: str, card: int) -> None:
    assert nvcc(vocabulary(card), "-O1", f"-arch={arch}", "-cubin", suffix=".cubin").stat().st_size > 0


@pytest.mark.nvcc
@pytest.mark.parametrize("header", [h for h in HEADERS if h not in PARTS])
def test_each_header_stands_alone(header: str) -> None:
    """With nvcc for the oldest card, and with g++."""
    source = f'#include "{header}"\n'
    nvcc(source, "-arch=sm_80", "-ptx", suffix=".ptx")
    compile_host(source)


@pytest.mark.nvcc
def test_every_n_of_wgmma_compiles() -> None:
    """All 32 sizes: the operand lists are written out, and a slip in one would be silent until it is used."""
    cases = "\n".join(
        f"template __global__ void multiply<{n}, pk::{t}>(float*, uint64_t, uint64_t);"
        for n in range(8, 257, 8)
        for t in ("half", "bf16")
    )
    source = f"""
#include "core/target.cuh"
template <int N, class T> __global__ void multiply(float* out, uint64_t a, uint64_t b) {{
  float d[N / 2];
  pk::wgmma<N, T>(d, a, b, 0);
  for (int i = 0; i < N / 2; ++i) out[i] = d[i];
}}
{cases}
"""
    ptx = nvcc(source, "-arch=sm_90a", "-ptx", suffix=".ptx").read_text()
    for n in range(8, 257, 8):
        for name in ("f16", "bf16"):
            found = re.findall(
                rf"m64n{n}k16\.f32\.{name}\.{name}\s*\{{([^}}]*)\}},\s*(%rd\d+),\s*(%rd\d+),\s*p", ptx
            )
            assert len(found) == 1, (n, name)
            registers = [r.strip() for r in found[0][0].split(",")]
            assert len(registers) == n // 2 == len(set(registers))
            assert found[0][1] != found[0][2]


@pytest.mark.nvcc
def test_vector_accesses_are_one_instruction() -> None:
    """16 bytes from global and shared memory, every way in, in PTX; and one 16-byte access under g++."""
    source = """
#include "core/vec.cuh"
#include "core/export.cuh"
using V = pk::Vec<pk::bf16, 8>;
struct Smem { V v[32]; };
__global__ void plain(const V* x, V* y) {
  PK_SMEM(Smem, s);
  pk::st(&s.v[threadIdx.x], pk::ld(x + threadIdx.x));
  __syncthreads();
  pk::st(y + threadIdx.x, pk::ld(&s.v[31 - threadIdx.x]));
}
PK_VARIANT(plain)
__global__ void hinted(const V* x, V* y) { pk::st_stream(y + threadIdx.x, pk::ld_stream(x + threadIdx.x)); }
__global__ void read_only(const V* x, V* y) { pk::st(y + threadIdx.x, pk::ld_nc(x + threadIdx.x)); }
"""
    ptx = nvcc(source, "-arch=sm_90a", "-ptx", suffix=".ptx").read_text()
    accesses = re.findall(r"\b((?:ld|st)\.(?:global|shared)\S*)", ptx)
    widths = {a for a in accesses if not re.search(r"v4\.[a-z]*32|v2\.[a-z]*64|b128", a)}
    assert not widths, widths
    for kind in (
        "ld.global.v",
        "st.global.v",
        "ld.shared.v",
        "st.shared.v",
        "ld.global.cs.v",
        "st.global.cs.v",
    ):
        assert any(a.startswith(kind) for a in accesses), kind
    assert any(a.startswith("ld.global.nc.v") for a in accesses)

    compiler = shutil.which("g++") or "c++"
    flags = [
        "-O1",
        "-std=c++17",
        "-fsanitize=thread",
        *ARCH_FLAGS["native"],
        "-S",
        "-x",
        "c++",
        "-",
        "-o",
        "-",
    ]
    done = subprocess.run(
        [compiler, *flags, f"-I{CUDA_SRC}"], input=source, capture_output=True, text=True, check=True
    )
    kernel = re.search(r"^_Z5plain\S*:\n(.*?)^\s*\.cfi_endproc", done.stdout, re.S | re.M)
    assert kernel
    # A misaligned vector is one "range" (16 bytes) to g++. The other reads are the runtime's own words, where shared
    # memory begins; nothing else is written.
    calls = re.findall(r"__tsan_(?:unaligned_)?(read|write)_?(range|16)", kernel[1])
    assert sorted(kind for kind, _ in calls) == ["read", "read", "write", "write"]
    assert len(re.findall(r"__tsan_\w*write", kernel[1])) == 2


@pytest.mark.nvcc
def test_conversions_are_single_instructions() -> None:
    """Pairs of 16-bit conversions are packed; the lop3 and prmt tricks reach the PTX."""
    source = """
#include "core/quant.cuh"
__global__ void k(const uint32_t* w, pk::bf16* y, uint32_t* z) {
  pk::st_vec(y, pk::from_float<pk::bf16>(pk::unpack_u4(w[0])));
  pk::unpack_u4_pairs<pk::half, 8>(w[1], z);
  pk::unpack_s8_pairs<pk::half>(w[2], z + 4);
}
"""
    ptx = nvcc(source, "-arch=sm_80", "-ptx", suffix=".ptx").read_text()
    assert ptx.count("cvt.rn.bf16x2.f32") == 4 and "cvt.rn.bf16.f32" not in ptx
    assert ptx.count("lop3.b32") == 8 + 4 and ptx.count("prmt.b32") == 2
    assert ptx.count("fma.rn.f16x2") == 2 and ptx.count("add.rn.f16x2") == 4


@pytest.mark.nvcc
def test_an_absent_feature_is_named() -> None:
    """wgmma on a card without it fails in ptxas, with the feature's name."""
    with pytest.raises(AssertionError, match="wgmma"):
        nvcc(vocabulary(901, 64), "-O1", "-arch=sm_80", "-cubin", suffix=".cubin")


def test_only_target_knows_the_compiler() -> None:
    """Kernels and the portable headers have no branch by backend or card."""
    switch = re.compile(r"__CUDACC__|__CUDA_ARCH|PK_CHECK|__SANITIZE|__GNUC__|__clang__")
    files = [*(CUDA_SRC / "core").glob("*.cuh"), *(CUDA_SRC / "ops").rglob("*.cuh")]
    assert [p.name for p in files if switch.search(p.read_text())] == ["target.cuh"]


def test_the_whole_vocabulary_compiles_with_the_host_compiler(tmp_path: Path) -> None:
    """The same source, plain and instrumented: a name that one backend lacks shows here or above."""
    source = tmp_path / "vocabulary.cpp"
    source.write_text(vocabulary(901))
    compiler = shutil.which("g++") or "c++"
    base = [compiler, "-std=c++17", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-Wno-psabi", f"-I{CUDA_SRC}"]
    for flags in (["-O2"], ["-O1", "-fsanitize=thread", "-DPK_CHECK=1"]):
        messages = run_compiler(
            [*base, *flags, *ARCH_FLAGS["native"], "-c", str(source), "-o", str(tmp_path / "v.o")]
        )
        assert "warning" not in messages, messages
