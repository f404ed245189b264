"""What to write instead: advice for the errors that plain CUDA code meets on the host backend, and for their kin.

These are held against the first error and the lines that the compiler shows below it. Causes that lie outside the
kernel (memory, disk, toolkit) are in ``diagnose.py`` and are looked for in the whole output.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pykern.jit import declarations, sources

_DECLARED = re.compile(
    r"(?P<extern>\bextern\s+)?\b(?:static\s+)?__shared__\s+"
    r"(?P<what>(?:[^;={}()|#]|(?:__align__|alignas)\s*\([^()]*\))+?)\s*[;=]"
)
NO_TORCH = "kernels do not include torch: tensors and launches are Python's, as in k[grid, block](x, y, n)"
_LAUNCHED = "a file of kernels holds no host code: tensors and launches are Python's, as in k[grid, block](x, y, n)"
_PTX = (
    "PTX is for GPUs only. The dialect has a name for most instructions that runs on both (docs/dialect.md): "
    "pk::lane_id(), lop3, prmt, ld_nc, cp_async, ldmatrix, mma_m16n8k16, ld_acquire, exp2_approx ..."
)
_NARROW = (
    "pk::half, pk::bf16 and the fp8 types hold bits only: compute in float, between pk::to_float and pk::from_float<T>"
)


def shared(text: str) -> str:
    """For the ``__shared__`` declarations of a text: the structs to put in their place, with what they declare."""
    kinds: dict[bool, list[str]] = {False: [], True: []}  # static, dynamic
    for found in _DECLARED.finditer(declarations.strip_comments(text)):
        what = re.sub(r"\b(?:volatile|(?:__align__|alignas)\s*\([^()]*\))", "", found["what"])
        kinds[bool(found["extern"])].append(re.sub(r"\[\s*\]", "[N]", " ".join(what.split())))
    if not any(kinds.values()):
        kinds[False].append("float v[32]")
    said = []
    for dynamic, members in kinds.items():
        if not members:
            continue
        name = re.search(r"([A-Za-z_]\w*)\s*(?:\[[^\]]*\]\s*)*$", members[0].split(",")[0])
        called, struct = name[1] if name else "v", "Dynamic" if dynamic else "Smem"
        where = "and give the launch smem=<its bytes>" if dynamic else "one for a kernel, up to 48 KB"
        macro = "PK_DYN_SMEM" if dynamic else "PK_SMEM"
        said.append(
            f"`struct {struct} {{ {'; '.join(dict.fromkeys(members))}; }};` before the kernel, "
            f"`{macro}({struct}, s);` in it, `s.{called}` for `{called}` ({where})"
        )
    return "shared memory that is to run on the CPU is a struct: " + "; ".join(said)


def _named(text: str) -> str:
    """For a name of the dialect without ``pk::`` or its header."""
    found = re.search(r"(?:[‘'`\"]|identifier \")(?:pk::)?([a-z]\w+)[’'\"]", text)
    if found is None:
        return ""
    folder = sources.root() / "core"
    defined = re.compile(rf"^(?:PK_DEVICE|__device__|constexpr|inline)\b[^;=]*\b{found[1]}\(", re.MULTILINE)
    for path in [*sorted(folder.glob("*.cuh")), *sorted(folder.glob("gpu/*.cuh"))]:
        if defined.search(path.read_text(encoding="utf-8")):
            header = "" if path.parent.name == "gpu" else f', of `#include "core/{path.name}"`'
            return f"the dialect has `pk::{found[1]}`{header}"
    return ""


_Hint = str | Callable[[str], str]
UNKNOWN_SHARED = r"[‘'\"]__shared__[’'\"]"  # as an unknown word; nvcc's and NVRTC's own messages name it, too
_MISSING = r"(?:No such file or directory|file not found|could not open source file|cannot open source file)"

# (pattern in the first error and the lines below it, advice). The first that matches and has something to say is taken.
_FIRST: tuple[tuple[str, _Hint], ...] = (
    (UNKNOWN_SHARED, shared),
    (
        r"\A[^\n]*static(?: assertion|_assert) failed[^\n]*pykern read",
        "the compiler sees another kernel than pykern read from the text: write its parameters out, without #if or "
        "macros among them, and let it return void",
    ),
    (
        r"overloaded function|no matches converting function|cannot determine which instance",
        "a name stands for one kernel: rename the others, and give all template arguments",
    ),
    (
        r"no such instruction|invalid 'asm'|(?:impossible|inconsistent operand) constraint|invalid (?:\w+ )?constraint|"
        r"constraint \d+ must specify|"
        r"bad register name|operands? (?:size |type )?mismatch|invalid % escape|unknown use of instruction mnemonic|"
        r"\basm\b.*(?:error|expected)",
        _PTX,
    ),
    (r"<<<", _LAUNCHED),
    (r"[‘'\"]cuda[A-Z]\w*[’'\"]|\bat::|\btorch::|PYBIND11", _LAUNCHED),
    (r"[‘'\"]printf[’'\"] (?:was not|is undefined)|identifier 'printf'", "the CPU wants `#include <cstdio>` for it"),
    (r"[‘'\"]assert[’'\"] (?:was not|is undefined)|identifier 'assert'", "the CPU wants `#include <cassert>` for it"),
    (
        rf"c?(?:stdio|assert)(?:\.h)?\W.*{_MISSING}|{_MISSING}.*\bc?(?:stdio|assert)\b",
        "printf and assert of a raw kernel need no header",
    ),
    (
        rf'{_MISSING} "(?:c(?:math|stdint|stddef|float|limits|string)|(?:std\w+|math)\.h|limits|type_traits|utility)"',
        "NVRTC has no C++ library: int32_t and its kin, the maths, printf and assert are there without a header",
    ),
    (
        r"without (?:execution|memory) space annotations",
        "what a kernel calls is PK_DEVICE (`__device__ __forceinline__`), what it reads is `constexpr` or __device__",
    ),
    (
        r"cooperative_groups|cooperative groups",
        "the dialect has what groups do: __syncwarp, __shfl_xor_sync, pk::cluster_sync, pk::grid_barrier, "
        "pk::named_barrier_sync",
    ),
    (
        rf"cuda_(?:fp16|bf16|fp8)\.h\W.*{_MISSING}|{_MISSING}.*cuda_(?:fp16|bf16|fp8)\.h",
        "the CPU has no such header: pk::half, pk::bf16 and pk::fp8e4m3 are there without one, on both backends (where "
        "a GPU build lacks it, the toolkit at CUDA_HOME is incomplete)",
    ),
    (rf"\bmma\.h\W.*{_MISSING}|\bwmma::|nvcuda::", "the dialect has pk::mma_m16n8k16 and pk::ldmatrix (core/mma.cuh)"),
    (
        rf"(?:curand\w*\.h|cub/\S+|thrust/\S+|cuda/\S+|cuda_pipeline\.h)\W.*{_MISSING}",
        "that library is for GPUs only: on the CPU a kernel has the dialect (docs/dialect.md) and the C++ library",
    ),
    (
        r"operator[\s\S]*pk::(?:half|bf16|fp8e4m3|fp8e5m2)|convert [‘'\"]pk::(?:half|bf16|fp8)|"
        r"convert.* to [‘'\"]pk::(?:half|bf16|fp8)|(?:half|bf16|fp8e4m3|fp8e5m2)[’'\"].* to [‘'\"](?:float|double|int)",
        _NARROW,
    ),
    (
        r"[‘'\"]__(?:shfl(?:_up|_down|_xor)?|any|all|ballot)[’'\"]",
        "the form with a mask: `__shfl_down_sync(0xffffffffu, v, 1)`",
    ),
    (r"not declared|not been declared|is not a member of|undeclared identifier|is undefined|no member named", _named),
)


def for_kernel(text: str) -> str:
    """Advice for the first error of a kernel, ``text``: its words and the lines that the compiler shows below."""
    for pattern, hint in _FIRST:
        if re.search(pattern, text):
            said = hint if isinstance(hint, str) else hint(text)
            if said:
                return said
    return ""
