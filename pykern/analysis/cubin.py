"""Facts of the kernels in a cubin, read from the ELF file alone: no CUDA tool is needed.

A kernel is a ``.text.<name>`` section with a ``.nv.info.<name>`` beside it. The attributes of ``.nv.info``
have a format byte, an id byte and two bytes that are the value or, for format 4, the length of what follows.
They are not documented; the ids below were matched with the output of ``ptxas -v`` over cubins of CUDA 12 and
13. CUDA 13 (ELF ABI 8) keeps the number of barriers in an attribute and marks every spill instruction; CUDA 12
(ABI 7) keeps barriers in the flags of the code section and marks nothing.

The trap: from sm_90 on ``.nv.shared.<name>`` includes the 1024 bytes the system reserves, which ``ptxas -v``
leaves out and the occupancy rule adds itself. They are subtracted here, once.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from pykern.analysis.elf import EM_CUDA, STT_FUNC, Elf, Section
from pykern.analysis.kernel import KernelFacts
from pykern.errors import ArgumentError

RESERVED_SMEM = 1024

# .nv.info attribute ids
_MAX_THREADS = 0x05
_REQUIRED_THREADS = 0x10
_FRAME_SIZE = 0x11
_MIN_STACK_SIZE = 0x12
_MAX_REGS = 0x1B
_REG_COUNT = 0x2F
_CLUSTER_SHAPE = 0x3D
_NUM_BARRIERS = 0x4C
_ANNOTATIONS = 0x55
_ANNOTATION_SPILL = 1
_UNKNOWN_STACK = 0xFFFFFFFF  # recursion or indirect calls
_ABI_CUDA13 = 8
_CUDA12_ACCELERATED = 0x800

# SASS of cc 7.x to 12.x: 16 bytes an instruction, opcode in bits 0-11, access size in bits 73-75.
_INSTRUCTION = 16
_LOADS, _STORES = (0x983,), (0x387, 0x987)  # LDL; STL, and STL with a uniform register in its address
_ACCESS_BYTES = (1, 1, 2, 2, 4, 8, 16, 16)


def read_cubin(data: bytes, source: str) -> list[KernelFacts]:
    """The kernels of a cubin, in the order of its sections. Raises ArgumentError for what is no cubin."""
    elf = Elf(data, source)
    if elf.machine != EM_CUDA:
        raise ArgumentError(source, f"an ELF file for machine {elf.machine}", "a cubin (machine 190, NVIDIA CUDA)")
    sm = elf.flags >> 8 & 0xFF if elf.abi_version >= _ABI_CUDA13 else elf.flags & 0xFF
    if not 70 <= sm <= 129:
        raise ArgumentError(source, f"a cubin for sm_{sm}", "compute capability 7.0 to 12.x")
    sections = {section.name: section for section in elf.sections}
    target = _target(sections, sm, elf.abi_version < _ABI_CUDA13 and bool(elf.flags & _CUDA12_ACCELERATED))
    by_symbol = _per_symbol(elf)
    names = [name.removeprefix(".text.") for name in sections if name.startswith(".text.")]
    names = [name for name in names if f".nv.info.{name}" in sections]
    return [_kernel(name, elf, sm, target, sections, by_symbol.get(name, {})) for name in names]


def _kernel(
    name: str, elf: Elf, sm: int, target: str, sections: dict[str, Section], counts: dict[int, int]
) -> KernelFacts:
    info = {id_: value for id_, value in _attributes(sections[f".nv.info.{name}"], elf.source)}
    shared, text = sections.get(f".nv.shared.{name}"), sections[f".text.{name}"]
    static = shared.size if shared else 0
    if sm >= 90 and static >= RESERVED_SMEM:
        static -= RESERVED_SMEM
    if elf.abi_version >= _ABI_CUDA13:
        barriers = info[_NUM_BARRIERS][0] if info.get(_NUM_BARRIERS) else 0
    else:
        barriers = text.flags >> 20 & 0x7F
    frame, stack = counts.get(_FRAME_SIZE, 0), counts.get(_MIN_STACK_SIZE, 0)
    local = _local_bytes(text.data, range(0, len(text.data), _INSTRUCTION))
    spills: tuple[int | None, int | None] = (0, 0)
    notes = []
    if _ANNOTATIONS in info:
        spills = _spill_bytes(text.data, info[_ANNOTATIONS])
    elif elf.abi_version < _ABI_CUDA13 and frame and any(local):
        spills = (None, None)
        notes.append("a CUDA 12 cubin does not mark spills: its local memory is spills, arrays, or both")
    if stack == _UNKNOWN_STACK:
        notes.append("recursion or indirect calls: the stack a thread needs is not known at compile time")
        stack = 0
    return KernelFacts(
        name=name,
        origin=elf.source,
        cc=f"{sm // 10}.{sm % 10}",
        target=target,
        regs=counts.get(_REG_COUNT),
        static_smem=static,
        barriers=barriers,
        max_threads=_threads(info.get(_MAX_THREADS)),
        required_threads=_threads(info.get(_REQUIRED_THREADS)),
        max_regs=int.from_bytes(info[_MAX_REGS], "little") if _MAX_REGS in info else None,
        frame=max(frame, stack),
        spill_stores=spills[0],
        spill_loads=spills[1],
        local_stores=local[0],
        local_loads=local[1],
        cluster=_shape(info.get(_CLUSTER_SHAPE)),
        notes=tuple(notes),
    )


def _target(sections: dict[str, Section], sm: int, accelerated: bool) -> str:
    """What ptxas was asked for. CUDA 13 tells ``sm_90a`` from ``sm_90`` only in the tool's note, CUDA 12 by a flag."""
    note = sections.get(".note.nv.tkinfo")
    match = re.search(rb"-arch[ =](sm_\d+[af]?)", note.data) if note else None
    return match[1].decode() if match else f"sm_{sm}" + ("a" if accelerated else "")


def _attributes(section: Section, source: str) -> Iterator[tuple[int, bytes]]:
    """``(id, value)`` of each attribute of a .nv.info section."""
    data, position = section.data, 0
    while position + 4 <= len(data):
        form, id_, value = data[position], data[position + 1], data[position + 2 : position + 4]
        position += 4
        if form == 4:
            length = int.from_bytes(value, "little")
            value = data[position : position + length]
            if len(value) < length:
                raise ArgumentError(f"{source}: {section.name} ends inside attribute {id_:#x}")
            position += length
        yield id_, value


def _per_symbol(elf: Elf) -> dict[str, dict[int, int]]:
    """Registers, frame and stack of each function: ``.nv.info`` names them by symbol index."""
    found: dict[str, dict[int, int]] = {}
    for section in elf.named(".nv.info"):
        for id_, value in _attributes(section, elf.source):
            if id_ in (_REG_COUNT, _FRAME_SIZE, _MIN_STACK_SIZE) and len(value) >= 8:
                index, amount = struct.unpack_from("<II", value)
                if index < len(elf.symbols) and elf.symbols[index].type == STT_FUNC:
                    found.setdefault(elf.symbols[index].name, {})[id_] = amount
    return found


def _threads(value: bytes | None) -> int | None:
    shape = _shape(value)
    return shape[0] * shape[1] * shape[2] if shape else None


def _shape(value: bytes | None) -> tuple[int, int, int] | None:
    if value is None or len(value) < 12:
        return None
    x, y, z = struct.unpack_from("<III", value)
    return (x, max(y, 1), max(z, 1))


def _spill_bytes(code: bytes, annotations: bytes) -> tuple[int, int]:
    """Bytes of the stores and loads that the compiler marked as spills: pairs of (kind, offset in the code)."""
    words = [word for (word,) in struct.iter_unpack("<I", annotations[: len(annotations) // 4 * 4])]
    offsets = [offset for kind, offset in zip(words[::2], words[1::2]) if kind == _ANNOTATION_SPILL]
    return _local_bytes(code, offsets)


def _local_bytes(code: bytes, offsets: range | list[int]) -> tuple[int, int]:
    """Bytes a thread moves by the (stores, loads) to local memory at ``offsets``, each counted once."""
    stores = loads = 0
    for offset in offsets:
        if offset + _INSTRUCTION > len(code):
            continue
        low, high = struct.unpack_from("<QQ", code, offset)
        opcode = low & 0xFFF
        if opcode in _STORES:
            stores += _ACCESS_BYTES[high >> 9 & 7]
        elif opcode in _LOADS:
            loads += _ACCESS_BYTES[high >> 9 & 7]
    return stores, loads
