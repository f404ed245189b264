"""Compiler and linker flags, each with its reason.

They are part of every key, so they hold no absolute paths.
"""

from __future__ import annotations

import os
import platform
import shlex
from functools import lru_cache
from pathlib import Path

from pykern.errors import ArgumentError
from pykern.jit.toolchain import Cxx

# hidden + no unique symbols: two variants of one template share symbol names, and with the defaults the
# second library would return the first one's kernel (STB_GNU_UNIQUE ignores RTLD_LOCAL)
_HIDE = ["-fvisibility=hidden", "-fvisibility-inlines-hidden"]
# as-needed drops the torch libraries that `load` always adds; libstdc++ must come before them, since libc10
# exports some of its template instances and would be kept. -Bsymbolic: a library calls its own definitions.
LINK = ["-Wl,--as-needed", "-lstdc++", "-lm", "-Wl,-Bsymbolic", "-Wl,-z,now"]
# the host runtime defines what variants leave undefined, and its own symbols may be wrapped by sanitizers
LINK_RUNTIME = ["-Wl,--as-needed", "-lstdc++", "-lm", "-lpthread", "-ldl", "-Wl,-z,now"]


@lru_cache(maxsize=1)
def _cpu_features() -> frozenset[str]:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("flags"):
                return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def march() -> list[str]:
    """x86-64-v3 (fmaf would be a slow libm call with other results below it), less where the CPU lacks AVX2."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return []
    features = _cpu_features()
    if {"avx2", "fma", "bmi2", "f16c", "movbe"} <= features:
        return ["-march=x86-64-v3"]
    return ["-march=x86-64-v2"] if {"sse4_2", "popcnt", "ssse3"} <= features else []


def extra() -> list[str]:
    """``PYKERN_HOST_FLAGS``: flags that a person adds to the compilation and the link of host variants.

    For debuggers, sanitizers and coverage (docs/debugging.md). They are part of the key.
    """
    text = os.environ.get("PYKERN_HOST_FLAGS", "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise ArgumentError("PYKERN_HOST_FLAGS", repr(text), f"compiler flags, as in a shell ({error})") from None


def sanitizers() -> list[str]:
    """Those of :func:`extra` that the host runtime gets too: AddressSanitizer must be told of its fibers."""
    return [flag for flag in extra() if flag.startswith("-fsanitize=") and "thread" not in flag]


def host(compiler: Cxx, check: bool = False) -> list[str]:
    """Flags of a host variant; ``check`` adds the instrumentation whose hooks the host runtime defines."""
    gcc = compiler.kind == "gcc"
    # -O3, not -O2: only there does g++ unroll the loops over register arrays, which keeps them out of memory (twice as
    # fast kernels for 0.3 s a compile).
    flags = ["-O1", "-g"] if check else ["-O3"]
    # Only a written fmaf is fused: an expression has the same bits in whichever kernel it is inlined.
    flags += ["-std=c++17", *march(), *_HIDE, "-Wno-unknown-pragmas", "-ffp-contract=off"]
    flags += ["-fno-gnu-unique", "-Wno-psabi", "-Wno-misleading-indentation"] if gcc else ["-Wno-unused-value"]
    if check:
        # instrumentation only: no function entry/exit hooks, and `load` links without -fsanitize, so no
        # libtsan
        entry_exit = ["--param", "tsan-instrument-func-entry-exit=0"]
        if not gcc:
            # and clang must neither drop the read of a read-modify-write, nor turn loops into memcpy (which the
            # checker does not see), nor take a null pointer for unreachable
            entry_exit = ["-mllvm", "-tsan-instrument-func-entry-exit=0", "-mllvm"]
            entry_exit += ["-tsan-instrument-read-before-write=1", "-mllvm", "-disable-loop-idiom-all"]
            entry_exit += ["-fno-delete-null-pointer-checks"]
        flags += ["-fsanitize=thread", *entry_exit, "-DPK_CHECK=1"]
    return flags


def host_runtime(compiler: Cxx) -> list[str]:
    """Flags of the host runtime, whose exported symbols stay visible."""
    flags = ["-O2", "-g1", "-std=c++17", *march(), "-Wno-unknown-pragmas", "-pthread", *sanitizers()]
    return flags + (["-fno-gnu-unique", "-Wno-psabi"] if compiler.kind == "gcc" else [])


def nvcc(arch: str) -> list[str]:
    """Flags of a CUDA variant for ``arch`` such as ``90a``.

    -gencode always (the default on an H200 is plain 9.0, where wgmma fails, and with no GPU there is none);
    no -G; -U undoes what cpp_extension forbids; ptxas reports registers and spills into the entry's log.
    """
    return [
        "-O3",
        "-std=c++17",
        f"-gencode=arch=compute_{arch},code=sm_{arch}",
        "-Xcompiler=-fvisibility=hidden",
        "-lineinfo",
        "-Xptxas=-v",
        "-U__CUDA_NO_HALF_OPERATORS__",
        "-U__CUDA_NO_HALF_CONVERSIONS__",
        "-U__CUDA_NO_HALF2_OPERATORS__",
        "-U__CUDA_NO_BFLOAT16_CONVERSIONS__",
    ]


def launcher(compiler: Cxx, cuda: bool) -> list[str]:
    """Flags of the launcher: torch's stable ABI as of 2.10.

    -O1: on an H200 machine it compiles in 2.6 s against 3.5, and a call costs the same 6.4 us.
    """
    flags = ["-O1", "-std=c++17", *_HIDE, "-DTORCH_TARGET_VERSION=0x020A000000000000"]
    flags += ["-fno-gnu-unique"] if compiler.kind == "gcc" else []
    return flags + (["-DUSE_CUDA"] if cuda else [])
