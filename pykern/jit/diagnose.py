"""From a compiler's output to one error that says what to do."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from pykern.jit import declarations, hints

_ERROR = re.compile(
    r"^(?P<file>[^\s:()][^:()\n]*?)(?::(?P<line>\d+)(?::\d+)?|\((?P<nvline>\d+)\)): "
    r"(?:fatal |catastrophic )?[Ee]rror:? ?(?P<text>.*)$"
)
AFTER = "after.cuh"  # what follows a kernel's text where that is not a file of its own
_GENERATED = ("v.cpp", "v.cu", AFTER)
_TORCH = re.compile(r"#\s*include\s*[<\"](?:torch|ATen|c10|pybind11)/")
_BELOW = 4  # lines of the compiler's below an error that belong to it
_OTHER = (
    re.compile(r"(?P<text>(?:nvcc|ptxas|cicc|cudafe\+\+|nvlink)[^\n]*\b(?:fatal|error)\b.*)"),
    re.compile(r".*?(?P<text>undefined symbol: .*)"),
    re.compile(r"(?P<text>.*\b(?:undefined reference to|cannot find -l|ld returned|ld: ).*)"),
    re.compile(r"(?P<text>.*(?:Killed|No space left on device|File size limit exceeded|Permission denied).*)"),
    re.compile(r"(?P<text>.*\berror: .*)"),
)

# (pattern anywhere in the output, hint). Order matters: causes first, their consequences after.
_HINTS = (
    (
        r"No space left on device|Disk quota exceeded",
        "the disk is full: free space, or set PYKERN_CACHE and TMPDIR",
    ),
    (r"File size limit exceeded|SIGXFSZ", "the process may not write files this large (ulimit -f)"),
    (
        r"\bKilled\b|[Cc]annot allocate memory|out of memory|virtual memory exhausted|std::bad_alloc|signal 9",
        "the compiler ran out of memory: set PYKERN_JOBS=1, or give the machine more memory",
    ),
    (
        r"unsupported GNU version|unsupported clang version|host compiler is unsupported|host_config\.h",
        "nvcc does not accept this host compiler: install an older g++ or set CXX to one",
    ),
    (
        r"Unsupported \.version|Unsupported gpu architecture|Value 'sm_\w+' is not defined|unknown gpu arch",
        "this CUDA toolkit does not know the architecture, or its parts (nvcc, nvvm, crt) are of different versions: "
        "use CUDA >= 12.8 and `pip install '.[cuda]'` in a checkout of pykern for parts that match",
    ),
    (
        r"not supported on .target|requires .target|Feature '.*' requires|Instruction '.*' cannot be compiled for",
        "the kernel uses an instruction that the architecture lacks: ask for one that has it, such as arch '90a'",
    ),
    (
        r"Python\.h: No such file",
        "Python's headers are missing: install python3-dev (or your Python's -devel package)",
    ),
    (
        r"fatal error: cuda_runtime|fatal error: crt/|cuda_fp16\.h: No such|cuda_bf16\.h: No such",
        "the CUDA headers are missing: the toolkit at CUDA_HOME is incomplete",
    ),
    (
        r"fatal error: .*: No such file or directory|(?:could not|cannot) open source file",
        "a header is missing: includes are looked for beside the including file and in cuda_src",
    ),
    (
        r"cannot find -lcudart",
        "libcudart is missing: install the CUDA runtime (pip install nvidia-cuda-runtime)",
    ),
    (
        r"PTHREAD|cannot find -lstdc\+\+|cannot find -lm\b",
        "the C++ compiler is incomplete: install g++ with its libraries",
    ),
    (
        r"failed to map segment|Operation not permitted",
        "the cache lies on a noexec mount: set PYKERN_CACHE elsewhere",
    ),
    (
        r"calling a __host__ function|identifier .* is undefined in device code",
        "a function lacks PK_DEVICE (__device__)",
    ),
    (
        r"torch/extension\.h|torch/all\.h|ATen/\w+\.h|pybind11/",
        hints.NO_TORCH,
    ),
    (
        r"undefined symbol|Unresolved extern function",
        "a function that is declared, but defined neither by the kernel's file nor by the host runtime",
    ),
    (
        r"command not found|not found\b.*\b127\b|: not found",
        "a tool of the build is missing; see `pykern doctor`",
    ),
)


@dataclass(frozen=True)
class Diagnosis:
    """The first error of a build.

    ``where`` is ``file:line`` or empty, ``hint`` empty where no cause is known.
    """

    where: str
    text: str
    hint: str

    def __str__(self) -> str:
        body = f"{self.where}: {self.text}" if self.where else self.text
        return f"{body}\n  hint: {self.hint}" if self.hint else body


def hint_for(output: str) -> str:
    """Advice for the first known cause in ``output``, else empty."""
    return next((hint for pattern, hint in _HINTS if re.search(pattern, output)), "")


def diagnose(output: str) -> Diagnosis:
    """The first compiler error in a build's output, with a hint for known causes.

    ninja echoes the whole command after ``FAILED:``; those lines are no errors though they may contain the
    word.
    """
    lines = [line for line in output.splitlines() if not _echo(line)]
    for index, line in enumerate(lines):
        found = _ERROR.match(line.strip())
        if found:
            number = found["line"] or found["nvline"]
            text = re.sub(r"; did you mean .__\w+.\?$", "", found["text"].strip())  # a name of the system's
            below = "\n".join([f"{found['file']} {text}", *lines[index + 1 : index + 1 + _BELOW]])
            return Diagnosis(f"{found['file']}:{number}", text, hints.for_kernel(below) or hint_for(output))
    for pattern in _OTHER:
        for line in lines:
            found = pattern.match(line.strip())
            if found:
                return Diagnosis("", found["text"].strip(), hint_for(output))
    tail = [line.strip() for line in lines if line.strip()]
    return Diagnosis("", tail[-1] if tail else "the build failed without a word", hint_for(output))


def of_sources(output: str, own: Mapping[str, str], after: int = 0) -> Diagnosis:
    """:func:`diagnose`, but in terms of the kernel's own files: ``own`` maps their names to their text.

    A file that ends too soon makes the compiler trip over what comes next, which is line ``after`` of the generated
    file or a header of the system's: the diagnosis then names the file and its last line.
    """
    found = diagnose(output)
    file, _, line = found.where.rpartition(":")
    generated = os.path.basename(file) in _GENERATED
    if re.search(hints.UNKNOWN_SHARED, found.text):  # all that the file declares goes into one struct
        found = Diagnosis(found.where, found.text, hints.shared("\n".join(own.values())))
    if not found.hint and any(_TORCH.search(text) for text in own.values()):
        found = Diagnosis(found.where, found.text, hints.NO_TORCH)
    mine = next((name for name in own if file and (name == file or name.endswith("/" + file))), None)
    for name in own if mine is None else (mine,):
        opened = declarations.unclosed(own[name])
        if opened is None:
            continue
        why = f"a {{ is never closed; line {opened[0]} has the outermost"
        if mine is not None and not re.search(r"at end of (?:input|file)|closing brace .* not found", found.text):
            return found if found.hint else Diagnosis(found.where, found.text, why)
        return Diagnosis(f"{name}:{opened[1]}", f"the file ends where a }} is missing: {why}", "")
    if generated and own and line == str(after):
        name = next(iter(own))
        text = f"the file ends in the middle of a declaration, perhaps without its `;` ({found.text})"
        return Diagnosis(f"{name}:{declarations.last_line(own[name])}", text, "")
    if generated and own:
        hint = found.hint or "the kernel's name and template arguments are read outside its file and its namespaces"
        return Diagnosis("", found.text, hint)
    return found


def _echo(line: str) -> bool:
    return (
        line.startswith(("FAILED:", "ninja:", "Error building extension", "[")) or " -c " in line or " -shared " in line
    )
