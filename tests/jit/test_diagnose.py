"""From real compiler outputs to one error and one hint."""

from __future__ import annotations

import pytest

from pykern.jit import resources
from pykern.jit.diagnose import diagnose

ECHO = (
    "Error building extension 'pk_k': [1/2] c++ -MMD -DX=error: -c /b/v.cpp -o v.o\nFAILED: [code=1] v.o \n"
    "c++ -MMD -MF v.o.d -c /b/v.cpp -o v.o\n"
)
GXX = (
    ECHO + "In file included from /b/v.cpp:1:\n/src/ops/k.cuh: In function 'int f()':\n"
    "/src/ops/k.cuh:12:34: error: 'x' was not declared in this scope\n   12 | return x;\n"
    "/src/ops/k.cuh:13:1: error: second\nninja: build stopped: subcommand failed.\n"
)
NVCC = (
    ECHO.replace("c++", "sh ./nvcc.sh") + "/src/ops/k.cuh(7): warning #177-D: variable was declared\n"
    '/src/ops/k.cuh(9): error: identifier "y" is undefined\n    y = 1;\n1 error detected in the compilation.\n'
)


@pytest.mark.parametrize(
    ("output", "where", "text", "hint"),
    [
        (GXX, "/src/ops/k.cuh:12", "'x' was not declared in this scope", ""),
        (NVCC, "/src/ops/k.cuh:9", 'identifier "y" is undefined', ""),
        (
            ECHO + "/b/v.cpp:1:10: fatal error: ops/none.cuh: No such file or directory\n",
            "/b/v.cpp:1",
            "ops/none.cuh: No such file or directory",
            "a header is missing",
        ),
        (ECHO + "/l.cpp:3:10: fatal error: Python.h: No such file or directory", "/l.cpp:3", "", "python3-dev"),
        (ECHO + "c++: fatal error: Killed signal terminated program cc1plus", "", "Killed", "PYKERN_JOBS=1"),
        (ECHO + "Killed\nninja: build stopped", "", "Killed", "out of memory"),
        (ECHO + "/tmp/cc.s: fatal error: error writing: No space left on device", "", "No space", "disk is full"),
        (
            ECHO + "/c/include/crt/host_config.h:137:2: error: #error -- unsupported GNU version!",
            "host_config.h:137",
            "unsupported GNU",
            "does not accept this host compiler",
        ),
        (ECHO + "nvcc fatal   : Unsupported gpu architecture 'compute_90a'", "", "nvcc fatal", "does not know"),
        (
            ECHO + "ptxas /tmp/x.ptx, line 9; fatal   : Unsupported .version 9.2; current version is '9.0'",
            "",
            "Unsupported .version",
            "parts that match",
        ),
        (
            ECHO + "ptxas t.ptx, line 3; error : Instruction 'wgmma.fence' cannot be compiled for architecture 'sm_90'",
            "",
            "wgmma.fence",
            "arch '90a'",
        ),
        (ECHO + "/usr/bin/ld: cannot find -lcudart\ncollect2: error: ld returned 1", "", "-lcudart", "libcudart"),
        ("/c/lib.so: failed to map segment from shared object", "", "failed to map", "noexec"),
        ("", "", "without a word", ""),
    ],
)  # fmt: skip
def test_first_error_and_hint(output: str, where: str, text: str, hint: str) -> None:
    """pains 8: a missing header and out-of-memory look different."""
    found = diagnose(output)
    assert where in found.where and text in found.text and hint in found.hint
    assert (found.hint == "") == (hint == "")
    assert "-DX=error" not in str(found)  # the echoed command is not an error


PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1kIfLi4EEvPKT_' for 'sm_90a'
ptxas info    : Function properties for _Z1kIfLi4EEvPKT_
    16 bytes stack frame, 12 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 168 registers, used 2 barriers, 16 bytes cumulative stack size, 49152 bytes smem, 400 bytes cmem[0]
ptxas info    : Compile time = 5.2 ms
"""


def test_resources() -> None:
    use = resources.parse(PTXAS).most()
    assert (use.registers, use.spills, use.local_bytes, use.smem, use.barriers) == (168, 20, 16, 49152, 2)
    assert use.function == "_Z1kIfLi4EEvPKT_"


MANY = "".join(
    f"Compiling entry function '{name}' for 'sm_80'\nptxas info : Used {regs} registers, {smem} bytes smem\n"
    for name, regs, smem in (
        ("_ZN2pk5smallEPKfPf", 8, 0), ("_ZN2pk3bigEPKfPf", 40, 4096), ("_ZN2pk1kIfLi4EEEvPKT_", 20, 16),
        ("_ZN2pk36_GLOBAL__N__274eb5bf_4_v_cu_7f4724304anonEPf", 9, 4), ("_ZL4statPf", 10, 5), ("plain", 11, 6),
        ("_Z5value4Mode", 12, 7), ("_ZN1a5smallEi4Mode", 13, 0),
    )
)  # fmt: skip


def test_each_kernel_of_a_file_has_its_own_resources() -> None:
    """A file's plain kernels are compiled into the variant of each."""
    report = resources.parse(MANY)
    found = {
        name: (report.of(name).registers, report.of(name).smem)
        for name in ("pk::big", "k<float, 4>", "pk::k<float, 4>", "anon", "stat", "::plain", "value")
    }
    assert found == {
        "pk::big": (40, 4096), "k<float, 4>": (20, 16), "pk::k<float, 4>": (20, 16), "anon": (9, 4), "stat": (10, 5),
        "::plain": (11, 6), "value": (12, 7),
    }  # fmt: skip
    assert report.of("small").registers == 13 and report.of("small").smem == 0  # two of that name: the larger figures
    assert report.of("renamed") == report.most()


def test_resources_of_old_and_empty_logs() -> None:
    assert resources.parse("").most() == resources.Usage()
    old = "Compiling entry function 'k' for 'sm_80'\nptxas info : Used 32 registers, 8 bytes lmem, 128+16 bytes smem"
    use = resources.parse(old).most()
    assert (use.registers, use.local_bytes, use.smem) == (32, 8, 128)
