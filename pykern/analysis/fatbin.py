"""CUDA fat binaries: the containers of ``nvcc -fatbin`` and of the ``.nv_fatbin`` section of host objects.

A container is a 16-byte header and entries; an entry is a header, then one image: PTX or a cubin, plain or
compressed. There is no public specification; the layout was worked out from files of nvcc 12 and 13.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from pykern.analysis import decompress
from pykern.analysis.elf import MAGIC, Elf
from pykern.errors import ArgumentError

CONTAINER_MAGIC = b"\x50\xed\x55\xba"
PTX, CUBIN = 1, 2
_KINDS = {PTX: "ptx", CUBIN: "cubin"}
_LZ4, _ZSTD = 0x2000, 0x8000
_OTHER_COMPRESSION = {0x1000: "the scheme of flag 0x1000", 0x4000: "the scheme of flag 0x4000"}
_HOST_SECTIONS = (".nv_fatbin", "__nv_relfatbin")

_CONTAINER = struct.Struct("<IHHQ")
_ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")


@dataclass(frozen=True)
class Image:
    """One image of a fat binary. ``problem`` says why ``data`` is empty where it could not be decoded."""

    kind: str
    cc: str
    data: bytes
    problem: str = ""


def is_container(data: bytes) -> bool:
    """Whether ``data`` starts with a fat binary container."""
    return data[:4] == CONTAINER_MAGIC


def from_host_object(elf: Elf) -> Iterator[Image]:
    """The images inside a host executable, object or shared library."""
    sections = [section for name in _HOST_SECTIONS for section in elf.named(name)]
    if not sections:
        raise ArgumentError(elf.source, "an ELF file without device code", "a cubin, or a host file with .nv_fatbin")
    for section in sections:
        yield from images(section.data, elf.source)


def images(data: bytes, source: str) -> Iterator[Image]:
    """Every image of every container in ``data``; a container may follow another after padding."""
    position = 0
    while True:
        position = data.find(CONTAINER_MAGIC, position)
        if position < 0:
            return
        if position % 8:
            position += 1
            continue
        end, entries = _container(data, position, source)
        yield from entries
        position = end


def _container(data: bytes, start: int, source: str) -> tuple[int, list[Image]]:
    if start + _CONTAINER.size > len(data):
        raise ArgumentError(f"{source}: the fat binary ends inside a container header")
    _, _, header, size = _CONTAINER.unpack_from(data, start)
    position, end = start + header, start + header + size
    if header < _CONTAINER.size or end > len(data):
        raise ArgumentError(f"{source}: truncated fat binary (a container of {size} bytes, {len(data) - start} left)")
    found = []
    while position + _ENTRY.size <= end:
        kind, _, entry_header, stored, packed, _, _, _, arch, _, _, flags, _, plain = _ENTRY.unpack_from(data, position)
        body = position + entry_header
        if entry_header < _ENTRY.size or body + stored > end:
            raise ArgumentError(f"{source}: malformed fat binary entry at byte {position}")
        if kind in _KINDS:
            payload = data[body : body + (packed or stored)]
            found.append(_image(_KINDS[kind], f"{arch // 10}.{arch % 10}", payload, flags, plain))
        position = body + stored
    return end, found


def _image(kind: str, cc: str, payload: bytes, flags: int, size: int) -> Image:
    try:
        if flags & _ZSTD:
            payload = decompress.zstd(payload, size)
        elif flags & _LZ4:
            payload = decompress.lz4_block(payload, size)
    except decompress.Corrupt as error:
        return Image(kind, cc, b"", f"the compressed {kind} for {cc} cannot be decoded: {error}")
    if kind == "cubin" and payload[:4] != MAGIC:
        scheme = next((name for bit, name in _OTHER_COMPRESSION.items() if flags & bit), f"flags {flags:#x}")
        return Image(kind, cc, b"", f"the cubin for {cc} is packed with {scheme}, which is not known here")
    return Image(kind, cc, payload)
