"""Registers, spills, local and shared memory from ``ptxas -v``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_FUNCTION = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for (\S+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SMEM = re.compile(r"(\d+)(?:\+\d+)? bytes smem")
_LMEM = re.compile(r"(\d+)(?:\+\d+)? bytes lmem")
_BARRIERS = re.compile(r"used (\d+) barriers")


@dataclass(frozen=True)
class Usage:
    """One kernel.

    Registers a thread, spill bytes (stores + loads), local bytes a thread, static shared bytes a block.
    """

    function: str = ""
    registers: int = 0
    spills: int = 0
    local_bytes: int = 0
    smem: int = 0
    barriers: int = 0


_IDENTIFIER = re.compile(r"L?(\d+)")  # L: of internal linkage


def base_name(function: str) -> str:
    """The kernel's own name: ``k`` of ``_ZN2pk1kIfLi4EEEvPKT_`` (``pk::k<float, 4>``); that of an ``extern "C"``."""
    if not function.startswith("_Z"):
        return function
    nested = function.startswith("_ZN")
    name, at = "", 3 if nested else 2
    while found := _IDENTIFIER.match(function, at):
        at = found.end() + int(found[1])
        name = function[found.end() : at]
        if not nested:  # what follows are the parameters
            break
    return name


def own_name(instance: str) -> str:
    """``k`` of a kernel instance such as ``pk::k<float, 4>``."""
    return re.sub(r"<.*", "", instance, flags=re.DOTALL).split("::")[-1].strip()


class Report(dict[str, Usage]):
    """Function name (mangled) -> usage."""

    def of(self, instance: str) -> Usage:
        """The usage of the kernel ``instance`` (``pk::k<float, 4>``).

        A source's plain kernels are compiled into every variant of it, so a report has others, too. Of several
        instances of one template the largest of each figure.
        """
        name = own_name(instance)
        own = {function: use for function, use in self.items() if base_name(function) == name}
        return Report(own or self).most()

    def most(self) -> Usage:
        """The largest of each figure."""
        uses = list(self.values())
        if not uses:
            return Usage()
        names = ("registers", "spills", "local_bytes", "smem", "barriers")
        return Usage(uses[0].function, *(max(getattr(use, name) for use in uses) for name in names))


def parse(log: str) -> Report:
    """Usage of every entry function in a ``ptxas -v`` log, in order."""
    report = Report()
    entry, stack = "", (0, 0, 0)
    for line in log.splitlines():
        if found := _FUNCTION.search(line):
            entry, stack = found[1], (0, 0, 0)
            continue
        if found := _PROPERTIES.search(line):
            continue
        if found := _STACK.search(line):
            frame, stores, loads = (int(number) for number in found.groups())
            stack = (max(stack[0], frame), stack[1] + stores, stack[2] + loads)
        elif entry and (found := _USED.search(line)):
            smem, lmem, barriers = _SMEM.search(line), _LMEM.search(line), _BARRIERS.search(line)
            local = max(stack[0], int(lmem[1]) if lmem else 0)
            report[entry] = Usage(
                entry,
                int(found[1]),
                stack[1] + stack[2],
                local,
                int(smem[1]) if smem else 0,
                int(barriers[1]) if barriers else 0,
            )
    return report
