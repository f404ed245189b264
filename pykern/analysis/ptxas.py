"""Facts of kernels from text: what ``ptxas -v`` (or ``nvcc -Xptxas -v``) prints, and the directives of PTX."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from pykern.analysis.kernel import KernelFacts
from pykern.errors import ArgumentError

_ENTRY = re.compile(r"Compiling entry function '([^']+)' for '(sm_\d+[af]?)'")
_PROPERTIES = re.compile(r"Function properties for '?([^\s']+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers(.*)")
_BARRIERS = re.compile(r"(?:used )?(\d+) barriers")
_SHARED = re.compile(r"(\d+)(?:\+(\d+))? bytes smem")


def is_ptxas_log(text: str) -> bool:
    """Whether ``text`` is the verbose output of ptxas."""
    return _ENTRY.search(text) is not None


def read_ptxas_log(text: str, source: str) -> list[KernelFacts]:
    """The kernels of ``ptxas -v`` text, in its order. Raises ArgumentError when there are none.

    Static shared memory is as ptxas prints it, which leaves the reserved 1 KiB out. A function that a kernel
    calls is no kernel; what it spills is added to nothing, as ptxas does.
    """
    kernels: list[KernelFacts] = []
    inside = False
    for line in text.splitlines():
        if entry := _ENTRY.search(line):
            kernels.append(_new(entry[1], entry[2], source))
            inside = True
        elif properties := _PROPERTIES.search(line):
            inside = bool(kernels) and properties[1] == kernels[-1].name
        elif inside and (stack := _STACK.search(line)):
            frame, stores, loads = (int(stack[i]) for i in (1, 2, 3))
            kernels[-1] = replace(kernels[-1], frame=frame, spill_stores=stores, spill_loads=loads)
        elif kernels and (used := _USED.search(line)):
            kernels[-1] = replace(kernels[-1], **_usage(used))
    kernels = [kernel for kernel in kernels if kernel.regs is not None]
    if not kernels:
        allowed = "the output of ptxas -v (lines 'Compiling entry function ...' and 'Used N registers ...')"
        raise ArgumentError(source, "text without a compiled kernel", allowed)
    return kernels


def _new(name: str, target: str, source: str) -> KernelFacts:
    number = target.removeprefix("sm_").rstrip("af")
    return KernelFacts(name=name, origin=source, cc=f"{number[:-1]}.{number[-1]}", target=target)


def _usage(used: re.Match[str]) -> dict[str, Any]:
    barriers, shared = _BARRIERS.search(used[2]), _SHARED.search(used[2])
    return {
        "regs": int(used[1]),
        "barriers": int(barriers[1]) if barriers else None,
        "static_smem": int(shared[1]) + int(shared[2] or 0) if shared else 0,
    }


# --- PTX ---------------------------------------------------------------------------------------------------

_TARGET = re.compile(r"^\s*\.target\s+(sm_\d+[af]?)", re.M)
_KERNEL = re.compile(r"\.entry\s+([\w$.%]+)\s*(?:\([^)]*\))?([^{;]*)\{", re.S)
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.S)
_SHARED_VARIABLE = re.compile(
    r"(\.extern\s+)?(?:\.(?:weak|visible|common)\s+)*\.shared\s+(?:\.attribute\([^)]*\)\s+)?(?:\.align\s+(\d+)\s+)?"
    r"\.([bsuf]\d+)\s+([\w$.%]+)((?:\[\d*\])*)"
)
_BARRIER = re.compile(r"\b(?:bar|barrier(?:\.cta)?)\.(?:sync|arrive|red|warp)?[\w.]*\s+([^,;]+)")
_BOUND = re.compile(r"\.(?:maxntid|minnctapersm|maxnreg)\b[\d,\s]*")
_DIRECTIVE = re.compile(r"\.(maxntid|reqntid|minnctapersm|maxnreg|reqnctapercluster|maxclusterrank)\b([\d,\s]*)")


def is_ptx(text: str) -> bool:
    """Whether ``text`` is PTX."""
    return _TARGET.search(text) is not None and ".version" in text


def read_ptx(text: str, source: str) -> list[KernelFacts]:
    """What the directives of a PTX file say of its kernels. Registers and spills are for ptxas to decide: None.

    Shared memory is that of the variables each kernel names, module-level ones included. Raises ArgumentError
    when the text holds no kernel.
    """
    text = _COMMENT.sub("", text)
    target = _TARGET.search(text)
    if not target:
        raise ArgumentError(source, "text without .target", "PTX")
    starts = list(_KERNEL.finditer(text))
    if not starts:
        raise ArgumentError(source, "PTX without a kernel", "PTX with at least one .entry")
    bodies = [text[match.end() : _closing(text, match.end())] for match in starts]
    module = text
    for body in bodies:
        module = module.replace(body, "")
    shared_variables = _shared_variables(module)
    return [
        replace(_new(match[1], target[1], source), **_directives(match[2]), **_body_facts(body, shared_variables))
        for match, body in zip(starts, bodies)
    ]


def with_launch_bounds(text: str, name: str, threads: int, blocks: int) -> str:
    """PTX in which kernel ``name`` has the directives of ``__launch_bounds__(threads, blocks)`` and no others.

    Raises ArgumentError when the text has no such kernel.
    """
    for match in _KERNEL.finditer(text):
        if match[1] == name:
            kept = _BOUND.sub("", match[2])
            size = "" if ".reqntid" in kept else f".maxntid {threads}, 1, 1\n"
            bounds = f"\n{size}.minnctapersm {blocks}\n{kept.strip()}\n"
            return text[: match.start(2)] + bounds + text[match.end(2) :]
    raise ArgumentError("kernel", name, "a kernel of the PTX")


def _closing(text: str, start: int) -> int:
    depth = 1
    for match in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if match[0] == "{" else -1
        if depth == 0:
            return match.start()
    return len(text)


def _shared_variables(text: str) -> dict[str, tuple[int, int]]:
    """``name -> (bytes, alignment)`` of the shared variables declared in ``text``; extern ones have 0 bytes."""
    found = {}
    for extern, align, kind, name, dims in _SHARED_VARIABLE.findall(text):
        size = int(kind[1:]) // 8
        for dim in re.findall(r"\[(\d*)\]", dims):
            size *= int(dim or 0)
        found[name] = (0 if extern else size, int(align or max(int(kind[1:]) // 8, 1)))
    return found


def _body_facts(body: str, module: dict[str, tuple[int, int]]) -> dict[str, Any]:
    own = _shared_variables(body)
    words = set(re.findall(r"[\w$.%]+", body))
    used = list(own.values()) + [size for name, size in module.items() if name in words]
    offset = 0
    for size, align in sorted(used, key=lambda item: -item[1]):
        offset = -(-offset // align) * align + size
    barriers = _BARRIER.findall(re.sub(r"\bbar\.warp[^;]*;", "", body))
    ids = [int(text) if text.strip().isdigit() else 15 for text in barriers]
    offset = -(-offset // 16) * 16  # ptxas rounds a block's shared memory up to 16 bytes
    return {"static_smem": offset, "barriers": max(ids) + 1 if ids else 0}


def _directives(text: str) -> dict[str, Any]:
    facts: dict[str, Any] = {}
    for name, numbers in _DIRECTIVE.findall(text):
        values = [int(number) for number in re.findall(r"\d+", numbers)]
        product = 1
        for value in values:
            product *= value
        if name == "maxntid":
            facts["max_threads"] = product
        elif name == "reqntid":
            facts["required_threads"] = facts["max_threads"] = product
        elif name == "minnctapersm" and values:
            facts["min_blocks"] = values[0]
        elif name == "maxnreg" and values:
            facts["max_regs"] = values[0]
        elif name == "reqnctapercluster":
            facts["cluster"] = tuple((*values, 1, 1)[:3])
    return facts
