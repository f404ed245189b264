"""From a file to kernels, and from a kernel to the question that the occupancy rule answers.

Reads by content, not by name: a cubin, a fat binary, a host object, executable or shared library with device
code, PTX, and the text of ``ptxas -v``. What a source does not say (registers in PTX, the block size of a kernel
without launch bounds) is filled from the caller's numbers or assumed, and every assumption is written down.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pykern.analysis import _files
from pykern.analysis.kernel import KernelFacts
from pykern.analysis.occupancy import Config, arch, parse_cc
from pykern.errors import ArgumentError

if TYPE_CHECKING:
    from pykern.analysis.fatbin import Image

SOURCE_SUFFIXES = (".cu", ".cuh")
DEFAULT_THREADS = 256
READABLE = "a cubin, a fat binary, a host object or library with device code, PTX, ptxas -v text, or .cu/.cuh source"


@dataclass
class Reading:
    """The kernels of one input, and remarks on what could not be read."""

    kernels: list[KernelFacts]
    remarks: list[str] = field(default_factory=list)


def read_file(path: str) -> Reading:
    """The kernels of a binary or text file. Raises ArgumentError for what holds none, OSError for what is not there."""
    return read_bytes(_files.read_bytes(path), path)


def read_bytes(data: bytes, source: str) -> Reading:
    """The kernels in ``data``; ``source`` names it in errors."""
    from pykern.analysis import fatbin, ptxas
    from pykern.analysis.cubin import read_cubin
    from pykern.analysis.elf import EM_CUDA, MAGIC, Elf

    if not data:
        raise ArgumentError(source, "an empty file", READABLE)
    if fatbin.is_container(data):
        return _read_images(fatbin.images(data, source), source)
    if data[:4] == MAGIC:
        elf = Elf(data, source)
        if elf.machine == EM_CUDA:
            return _some(Reading(read_cubin(data, source)), source)
        return _read_images(fatbin.from_host_object(elf), source)
    text = data.decode("utf-8", "replace")
    if ptxas.is_ptx(text):
        return Reading(ptxas.read_ptx(text, source))
    if ptxas.is_ptxas_log(text):
        return Reading(ptxas.read_ptxas_log(text, source))
    raise ArgumentError(source, f"a file that starts with {data[:16]!r}", READABLE)


def _read_images(images: Iterable[Image], source: str) -> Reading:
    from pykern.analysis.cubin import read_cubin
    from pykern.analysis.ptxas import read_ptx

    found = Reading([])
    ptx: list[KernelFacts] = []
    for image in images:
        if image.problem:
            found.remarks.append(f"{source}: {image.problem}")
        elif image.kind == "cubin":
            found.kernels += read_cubin(image.data, source)
        else:
            text = image.data.decode("utf-8", "replace")
            if ".entry" in text:
                ptx += read_ptx(text, source)
    compiled = {kernel.name for kernel in found.kernels}
    found.kernels += [kernel for kernel in ptx if kernel.name not in compiled]
    return _some(found, source)


def loadable_image(path: str, cc: str) -> bytes:
    """What a driver can load from ``path``: the file itself, or the cubin for ``cc`` inside a host object."""
    from pykern.analysis import fatbin
    from pykern.analysis.elf import EM_CUDA, MAGIC, Elf

    data = _files.read_bytes(path)
    if data[:4] != MAGIC:
        return data
    elf = Elf(data, path)
    if elf.machine == EM_CUDA:
        return data
    for image in fatbin.from_host_object(elf):
        if image.kind == "cubin" and image.cc == cc and image.data:
            return image.data
    raise ArgumentError(path, "no cubin that can be read", f"a host object with code for {cc}")


def _some(reading: Reading, source: str) -> Reading:
    if not reading.kernels:
        why = f" ({'; '.join(reading.remarks)})" if reading.remarks else ""
        raise ArgumentError(f"{source}: no kernel found{why}")
    return reading


def select(kernels: list[KernelFacts], wanted: str | None, ccs: list[str] | None) -> list[KernelFacts]:
    """The kernels whose name contains ``wanted`` and whose cc is one of ``ccs``; an error lists what there is."""
    named = [kernel for kernel in kernels if wanted is None or wanted in kernel.name]
    if not named:
        names = sorted({kernel.name for kernel in kernels})
        raise ArgumentError("--kernel", wanted, "part of " + ", ".join(names[:20]) + (" ..." if names[20:] else ""))
    found = [kernel for kernel in named if ccs is None or kernel.cc is None or kernel.cc in ccs]
    if not found:
        have = sorted({str(kernel.cc) for kernel in named})
        allowed = f"code for {', '.join(have)} is all this file has (registers of one chip say nothing of another)"
        raise ArgumentError("--cc", ",".join(ccs or []), allowed)
    return found


@dataclass(frozen=True)
class Given:
    """Numbers of the caller that a source may lack; None means not given."""

    threads: int | None = None
    regs: int | None = None
    static_smem: int | None = None
    dyn_smem: int | None = None
    barriers: int | None = None
    carveout_pct: int = -1


@dataclass(frozen=True)
class Case:
    """One kernel on one chip: the question, and what was assumed to ask it. ``achieved``: the measured share of
    warps of a launch that was profiled."""

    name: str
    cc: str
    config: Config
    facts: KernelFacts | None = None
    assumed: tuple[str, ...] = ()
    grid: int | None = None
    cluster: int | None = None
    achieved: float | None = None

    @property
    def most_threads(self) -> int | None:
        """The largest block the kernel may be launched with, when its launch bounds say."""
        return self.facts.max_threads if self.facts else None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values of the question."""
        config = self.config
        return {
            "kernel": self.name,
            "cc": self.cc,
            "threads": config.threads,
            "regs": config.regs,
            "static_smem": config.static_smem,
            "dyn_smem": config.dyn_smem,
            "barriers": config.barriers,
            "carveout_pct": config.carveout_pct,
            "assumed": list(self.assumed),
            "facts": self.facts.to_dict() if self.facts else None,
        }


def case_of(facts: KernelFacts, given: Given, *, cc: str | None = None) -> Case:
    """The question for a kernel: its facts, overridden by what the caller gives. Raises ArgumentError when
    registers are unknown or the block breaks the kernel's launch bounds."""
    target = parse_cc(cc or facts.cc, "cc")
    assumed = list(facts.notes)
    regs = given.regs if given.regs is not None else facts.regs
    if regs is None:
        allowed = "--regs N, or ptxas on PATH to assemble it (registers are decided by ptxas, not in PTX)"
        raise ArgumentError(f"registers of {facts.name} in {facts.origin}", "nothing", allowed)
    threads = given.threads if given.threads is not None else facts.required_threads or facts.max_threads
    if threads is None:
        threads = min(DEFAULT_THREADS, arch(target).max_threads_per_block)
        assumed.append(f"no --threads and no launch bounds: {threads} threads a block assumed")
    elif given.threads is None and facts.required_threads is None:
        assumed.append(f"no --threads: the launch bound of {threads} threads a block taken")
    if facts.max_threads is not None and threads > facts.max_threads:
        raise ArgumentError("threads", threads, f"at most {facts.max_threads}, the launch bound of {facts.name}")
    if facts.required_threads is not None and threads != facts.required_threads:
        raise ArgumentError("threads", threads, f"{facts.required_threads}, the fixed block size of {facts.name}")
    barriers = given.barriers if given.barriers is not None else facts.barriers
    if barriers is None:
        barriers = 1
        assumed.append("the source does not say how many barriers are used: 1 assumed")
    dynamic = given.dyn_smem
    if dynamic is None:
        dynamic = 0
        assumed.append("no --dyn-smem: no dynamic shared memory assumed")
    static = given.static_smem if given.static_smem is not None else facts.static_smem or 0
    config = Config(threads, regs, static, dynamic, barriers, given.carveout_pct)
    cluster = None
    if facts.cluster:
        cluster = facts.cluster[0] * facts.cluster[1] * facts.cluster[2]
    return Case(facts.name, target, config, facts, tuple(assumed), cluster=cluster)


def case_of_numbers(cc: str, given: Given) -> Case:
    """The question asked with numbers alone; threads and regs are needed."""
    if given.threads is None or given.regs is None:
        missing = " and ".join(n for n, v in (("--threads", given.threads), ("--regs", given.regs)) if v is None)
        raise ArgumentError(missing, "nothing", "a number, when no file or op is named")
    barriers = 1 if given.barriers is None else given.barriers
    config = Config(
        given.threads, given.regs, given.static_smem or 0, given.dyn_smem or 0, barriers, given.carveout_pct
    )
    return Case(f"{given.threads} threads, {given.regs} registers", parse_cc(cc, "--cc"), config)
