"""From a compiler's output to one error that says what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass

_ERROR = re.compile(
    r"^(?P<file>[^\s:()][^:()\n]*?)(?::(?P<line>\d+)(?::\d+)?|\((?P<nvline>\d+)\)): (?:fatal )?error:? ?(?P<text>.*)$"
)
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
        "use CUDA >= 12.8 and `pip install pykern[cuda]` for parts that match",
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
        r"fatal error: .*: No such file or directory|could not open source file",
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
    (r"undefined symbol", "a symbol that neither the kernel nor the host runtime defines"),
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
    for line in lines:
        found = _ERROR.match(line.strip())
        if found:
            number = found["line"] or found["nvline"]
            return Diagnosis(f"{found['file']}:{number}", found["text"].strip(), hint_for(output))
    for pattern in _OTHER:
        for line in lines:
            found = pattern.match(line.strip())
            if found:
                return Diagnosis("", found["text"].strip(), hint_for(output))
    tail = [line.strip() for line in lines if line.strip()]
    return Diagnosis("", tail[-1] if tail else "the build failed without a word", hint_for(output))


def _echo(line: str) -> bool:
    return (
        line.startswith(("FAILED:", "ninja:", "Error building extension", "[")) or " -c " in line or " -shared " in line
    )
