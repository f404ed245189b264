"""A reader of 64-bit little-endian ELF files: sections and symbols, every offset checked against the file."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from pykern.errors import ArgumentError

MAGIC = b"\x7fELF"
EM_CUDA = 190
SHT_SYMTAB, SHT_NOBITS = 2, 8
STT_FUNC = 2

_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")


@dataclass(frozen=True)
class Section:
    """One section: ``size`` is its size in memory, ``data`` its bytes in the file (none for NOBITS)."""

    name: str
    type: int
    flags: int
    size: int
    link: int
    data: bytes


@dataclass(frozen=True)
class Symbol:
    """One symbol of ``.symtab``; ``section`` is the index of the section that defines it."""

    name: str
    type: int
    section: int
    value: int
    size: int


class Elf:
    """Sections and symbols of an ELF image. Raises ArgumentError, naming ``source``, for anything malformed."""

    def __init__(self, data: bytes, source: str = "file") -> None:
        self.source = source
        if data[:4] != MAGIC:
            raise ArgumentError(source, repr(data[:4]), "an ELF file (it starts with \\x7fELF)")
        if len(data) < _HEADER.size or data[4] != 2 or data[5] != 1:
            raise ArgumentError(source, "another kind of ELF", "a complete 64-bit little-endian ELF file")
        fields = _HEADER.unpack_from(data)
        self.abi_version = data[8]
        self.type, self.machine, self.flags = fields[1], fields[2], fields[7]
        offset, entry_size, count, names = fields[6], fields[11], fields[12], fields[13]
        if count and (entry_size != _SECTION.size or offset + count * entry_size > len(data)):
            raise ArgumentError(f"{source}: truncated ELF file (the section table is not in its {len(data)} bytes)")
        rows = [_SECTION.unpack_from(data, offset + i * entry_size) for i in range(count)]
        table = self._bytes(data, rows[names]) if names < count else b""
        self.sections = [
            Section(_string(table, row[0]), row[1], row[2], row[5], row[6], self._bytes(data, row)) for row in rows
        ]
        self.symbols = self._read_symbols()

    def _bytes(self, data: bytes, row: tuple[int, ...]) -> bytes:
        kind, offset, size = row[1], row[4], row[5]
        if kind in (0, SHT_NOBITS):
            return b""
        if offset + size > len(data):
            raise ArgumentError(f"{self.source}: truncated ELF file (a section is not in its {len(data)} bytes)")
        return data[offset : offset + size]

    def _read_symbols(self) -> list[Symbol]:
        for section in self.sections:
            if section.type == SHT_SYMTAB:
                names = self.sections[section.link].data if section.link < len(self.sections) else b""
                usable = len(section.data) // _SYMBOL.size * _SYMBOL.size
                return [
                    Symbol(_string(names, name), info & 15, index, value, size)
                    for name, info, _, index, value, size in _SYMBOL.iter_unpack(section.data[:usable])
                ]
        return []

    def named(self, name: str) -> list[Section]:
        """Every section called ``name``."""
        return [section for section in self.sections if section.name == name]


def _string(table: bytes, offset: int) -> str:
    end = table.find(b"\0", offset)
    return table[offset : end if end >= 0 else len(table)].decode("utf-8", "replace")
