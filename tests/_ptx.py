"""Access widths of a kernel as nvcc emits them (PTX) and as the host build performs them, per source line.

nvcc merges neighbouring scalar accesses into vectors and g++ does not, so a kernel that relies on that shows other
traffic in the host checker than on the GPU. ``mismatches`` names the lines where it does.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from _native import ARCH_FLAGS, CUDA_SRC, nvcc, run_compiler

Position = tuple[int, int, int]  # file number, line, column
Frame = tuple[str, int]  # file as the compiler wrote it, line


@dataclass
class Widths:
    """Widths in bytes seen on one line, loads and stores."""

    load: set[int] = field(default_factory=set)
    store: set[int] = field(default_factory=set)


Lines = dict[Frame, Widths]


def _element(kind: str) -> int:
    return int(re.sub(r"\D", "", kind)) // 8


_ACCESS = re.compile(r"\b(ld|st)((?:\.\w+(?:::\w+)*)+)\s")
_LOC = re.compile(
    r"\.loc\s+(\d+)\s+(\d+)\s+(\d+)(?:,\s*function_name\s+([^,]+),\s*inlined_at\s+(\d+)\s+(\d+)\s+(\d+))?"
)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]+)"')


def ptx_widths(ptx: str, own: Iterable[str]) -> Lines:
    """Loads and stores of global and shared memory, by the innermost line that lies in one of the files ``own``.

    ``own`` are endings of paths. Local memory, parameters, cp.async, ldmatrix and atomics are left out.
    """
    files = {int(number): path for number, path in _FILE.findall(ptx)}
    # nvcc writes the callers' .loc lines before a .loc the first time only; after that the function's (mangled) name
    # tells which chain is meant.
    known: dict[tuple[Position, str, Position], list[Position]] = {}
    latest: dict[Position, list[Position]] = {}
    chain: list[Position] = []
    lines: Lines = defaultdict(Widths)
    endings = tuple(own)
    for text in ptx.splitlines():
        loc = _LOC.search(text)
        if loc:
            here = (int(loc[1]), int(loc[2]), int(loc[3]))
            if not loc[4]:
                chain = [here]
            else:
                at = (int(loc[5]), int(loc[6]), int(loc[7]))
                key = (here, loc[4], at)
                if chain and chain[0] == at:
                    known[key] = [here, *chain]
                elif key not in known:
                    known[key] = [here, *latest.get(at, [at])]
                chain = known[key]
            latest[here] = chain
            continue
        access = _ACCESS.search(text)
        if not access:
            continue
        parts = access[2].strip(".").split(".")
        if {"param", "local", "const"} & {p.split("::")[0] for p in parts}:
            continue
        vector = next((int(p[1:]) for p in parts if re.fullmatch(r"v[248]", p)), 1)
        width = vector * _element(parts[-1])
        for number, line, _ in chain:
            if files.get(number, "").endswith(endings):
                seen = lines[(files[number], line)]
                (seen.load if access[1] == "ld" else seen.store).add(width)
                break
    return lines


_STATED = re.compile(r"^\s*([0-9a-f]+):.*\bcall.*<pkh_access\b")
_THIRD = re.compile(r"(?:mov\s+\$0x([0-9a-f]+)|xor\s+%edx),%edx")
_CALL = re.compile(r"^\s*([0-9a-f]+):.*\bcall.*<__tsan_(unaligned_)?(read|write)(\d+|_range)\b")
_FROM_STACK = re.compile(r"\blea\s+-?(?:0x[0-9a-f]+)?\(%rsp[,)].*,%(r\w+)$|\bmov\s+%rsp,%(r\w+)$")
_COPY = re.compile(r"\b(?:mov|lea)\s+(?:-?0x[0-9a-f]+\()?%(r\w+)\)?,%(r\w+)$")
_WRITE = re.compile(r",%(r\w+)$")
_RANGE = re.compile(r"mov\s+\$0x([0-9a-f]+),%esi")
# Frames that are the runtime's own: where it keeps blockIdx and the start of shared memory.
_RUNTIME = ("host/thread.h", "host/builtins.h", "host/collectives.h", "host/hopper.h", "host/tensor.h")


def host_widths(library: Path, own: Iterable[str]) -> Lines:
    """The same of an instrumented host build: what it hands to __tsan_* (except for the stack) and to pkh_access."""
    listing = run_compiler(["objdump", "-d", "--no-show-raw-insn", str(library)])
    calls: list[tuple[str, str, int]] = []
    stack_registers: set[str] = (
        set()
    )  # registers that hold an address in the stack frame, followed in a straight line
    range_bytes, third = 16, 0
    for text in listing.splitlines():
        call, stated = _CALL.match(text), _STATED.match(text)
        if stated:  # pk::ld and pk::st say themselves what they access
            calls.append((stated[1], "write" if third else "read", range_bytes))
            continue
        if call:
            if "rdi" not in stack_registers:
                calls.append((call[1], call[3], range_bytes if call[4] == "_range" else int(call[4])))
            continue
        text = text.split("#")[0].rstrip()  # the listing notes symbols after a #
        stack, copy, write = _FROM_STACK.search(text), _COPY.search(text), _WRITE.search(text)
        size = _RANGE.search(text)
        if text.endswith(">:"):
            stack_registers.clear()
        elif stack:
            stack_registers.add(stack[1] or stack[2])
        elif copy and copy[1] in stack_registers:
            stack_registers.add(copy[2])
        elif write:
            stack_registers.discard(write[1])
        if size:
            range_bytes = int(size[1], 16)
        if third_is := _THIRD.search(text):
            third = int(third_is[1] or "0", 16)
    lines: Lines = defaultdict(Widths)
    if not calls:
        return lines
    done = subprocess.run(
        ["addr2line", "-a", "-i", "-e", str(library), *[c[0] for c in calls]],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    frames: list[list[Frame]] = []
    for text in done.stdout.splitlines():
        if re.fullmatch(r"0x[0-9a-f]+", text):
            frames.append([])
        else:
            path, _, rest = text.partition(":")
            frames[-1].append((path, int(rest.split()[0]) if rest[:1].isdigit() else 0))
    endings = tuple(own)
    for (_, kind, width), callers in zip(calls, frames, strict=True):
        if callers and callers[0][0].endswith(_RUNTIME):
            continue
        for path, line in callers:
            if path.endswith(endings):
                seen = lines[(path, line)]
                (seen.load if kind == "read" else seen.store).add(width)
                break
    return lines


def build_host(source: str, directory: Path, name: str = "kernel") -> Path:
    """An instrumented shared library of a generated TU, with line tables; what the checker would run."""
    cpp, obj, library = (directory / f"{name}{s}" for s in (".cpp", ".o", ".so"))
    cpp.write_text(source)
    compiler = shutil.which("g++") or "c++"
    flags = ["-O1", "-g", "-std=c++17", "-fPIC", "-fsanitize=thread", "-DPK_CHECK=1", "-Wno-unknown-pragmas"]
    flags += ["-Wno-psabi", "--param", "tsan-instrument-func-entry-exit=0", *ARCH_FLAGS["native"]]
    run_compiler([compiler, *flags, f"-I{CUDA_SRC}", "-c", str(cpp), "-o", str(obj)])
    run_compiler([compiler, "-shared", str(obj), "-o", str(library)])
    return library


@dataclass(frozen=True)
class Mismatch:
    file: str
    line: int
    kind: str  # load or store
    nvcc: tuple[int, ...]
    host: tuple[int, ...]

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}: {self.kind}s"
        return f"{where} of {self.nvcc} bytes with nvcc, {self.host} with the host compiler"


def compare(ptx: Lines, host: Lines) -> list[Mismatch]:
    """Lines whose widest access differs: nvcc merged what g++ did not, or split what g++ did not.

    A line that only one compiler has an access on is no evidence: instructions move between lines. Where nvcc's is
    the narrower one only 16 bytes count, as the host build also reads its own words of up to 8 bytes.
    """
    found = []
    for (path, line), emitted in sorted(ptx.items()):
        name = Path(path).name
        performed = next((w for (p, at), w in host.items() if at == line and Path(p).name == name), None)
        if performed is None:
            continue
        for kind in ("load", "store"):
            wide, narrow = getattr(emitted, kind), getattr(performed, kind)
            if not wide or not narrow:
                continue
            if max(wide) > max(narrow) or (max(narrow) == 16 and max(wide) < 16):
                found.append(Mismatch(name, line, kind, tuple(sorted(wide)), tuple(sorted(narrow))))
    return found


def mismatches(
    source: str, directory: Path, own: Iterable[str], arch: str = "sm_90a", name: str = "kernel"
) -> list[Mismatch]:
    """Compile the TU ``source`` both ways and compare the lines of the files ``own`` (endings of their paths)."""
    own = tuple(own)
    ptx = nvcc(source, f"-arch={arch}", "-lineinfo", "-ptx", suffix=".ptx").read_text()
    return compare(ptx_widths(ptx, own), host_widths(build_host(source, directory, name), own))
