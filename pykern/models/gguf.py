"""GGUF files, read strictly: every count, length, offset and shape is checked against the file before it is used.

Layout (little-endian, versions 2 and 3): magic ``GGUF``, version u32, tensor count u64, entry count u64, then the
metadata entries (key, type, value), then the tensor records (name, dimensions, type, offset), then padding to
``general.alignment``, then the tensors' data. Source of the format: the specification in ggml's docs/gguf.md.
A file that breaks a rule gives a :class:`ModelError` that says what is wrong and at which byte.
"""

from __future__ import annotations

import math
import mmap
import os
import struct
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from pykern.errors import ModelError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
# Value types of metadata: struct code, by number. 8 is a string, 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
MAX_KEY = 65535  # of the specification
MAX_NAME = 64
MAX_DIMS = 4
MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True)
class BlockType:
    """A tensor type: ``block`` values take ``nbytes`` bytes."""

    name: str
    block: int
    nbytes: int


# The types pykern computes with. The rest are known by name, so that they can be refused by name.
TYPES = {
    0: BlockType("F32", 1, 4),
    1: BlockType("F16", 1, 2),
    2: BlockType("Q4_0", 32, 18),
    3: BlockType("Q4_1", 32, 20),
    8: BlockType("Q8_0", 32, 34),
    30: BlockType("BF16", 1, 2),
}
OTHER_TYPES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K",
    16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True)
class TensorEntry:
    """One tensor: ``shape`` outermost axis first (as torch has it), ``start`` the byte of the file it begins at."""

    name: str
    type: BlockType
    shape: tuple[int, ...]
    start: int
    nbytes: int


class GGUFFile:
    """An open file: ``metadata`` by key, ``tensors`` by name, and their bytes through :meth:`raw`."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        if size < 24:
            raise ModelError(
                f"{self.path.name}: got a file of {size} bytes, allowed: a GGUF header of at least 24"
            )
        with self.path.open("rb") as file:
            # Copy-on-write: torch wants writable memory, and the file must stay as it is.
            self.data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        parser = _Parser(self.data, self.path.name)
        self.metadata, self.tensors = parser.parse()

    def raw(self, name: str) -> memoryview:
        """The bytes of tensor ``name``, not copied."""
        entry = self.tensors[name]
        return memoryview(self.data)[entry.start : entry.start + entry.nbytes]

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        """Metadata value ``key``, which must be of ``kind``; ModelError if it is not there and has no default."""
        if key not in self.metadata:
            if default is ...:
                raise ModelError(f"{self.path.name}: no metadata entry {key!r}")
            return default
        value = self.metadata[key]
        kinds = kind if isinstance(kind, tuple) else (kind,)
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            names = " or ".join(k.__name__ for k in kinds)
            raise ModelError(
                f"{self.path.name}: {key}: got {_short(value)} ({type(value).__name__}), allowed: {names}"
            )
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


class _Parser:
    def __init__(self, data: mmap.mmap, name: str) -> None:
        self.data, self.name, self.at, self.size = data, name, 0, len(data)

    def fail(self, message: str, at: int | None = None) -> ModelError:
        return ModelError(f"{self.name}: {message} (at byte {self.at if at is None else at})")

    def need(self, nbytes: int, what: str) -> int:
        """Step over ``nbytes``, which must be there; the position before them."""
        if nbytes > self.size - self.at:
            raise self.fail(f"truncated: {what} needs {nbytes} bytes, {self.size - self.at} are left")
        at = self.at
        self.at += nbytes
        return at

    def number(self, code: str, what: str) -> Any:
        layout = "<" + code
        return struct.unpack_from(layout, self.data, self.need(struct.calcsize(layout), what))[0]

    def count(self, what: str, least_bytes: int) -> int:
        """A 64-bit count of things of ``least_bytes`` or more each: no more than could fit in what is left."""
        at, count = self.at, self.number("Q", what)
        if count * least_bytes > self.size - self.at:
            left = self.size - self.at
            raise self.fail(f"{what}: got {count}, but only {left} bytes are left: truncated, or wrong", at)
        return count

    def string(self, what: str, limit: int | None = None) -> str:
        at = self.at
        length = self.count(f"length of {what}", 1)
        if limit is not None and length > limit:
            raise self.fail(f"length of {what}: got {length}, allowed: at most {limit}", at)
        start = self.need(length, what)
        try:
            return self.data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}: not UTF-8 ({error.reason})", start + error.start) from error

    def parse(self) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
        magic = self.data[: len(MAGIC)]
        if magic != MAGIC:
            raise self.fail(f"not a GGUF file: it starts with {bytes(magic)!r}, not {MAGIC!r}")
        self.at = len(MAGIC)
        version = self.number("I", "version")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
            hint = "; it is big-endian" if swapped in VERSIONS else ""
            raise self.fail(f"GGUF version: got {version}, allowed: 2 or 3{hint}", 4)
        tensor_count = self.count(
            "tensor count", 32
        )  # a record has a name, a count, a dimension, a type, an offset
        metadata: dict[str, Any] = {}
        for _ in range(self.count("metadata count", 13)):
            at = self.at
            key = self.string("a metadata key", MAX_KEY)
            if not key or key in metadata:
                raise self.fail(f"metadata key {key!r} " + ("appears twice" if key else "is empty"), at)
            metadata[key] = self.value(self.number("I", f"type of {key}"), key)
        alignment = metadata.get("general.alignment", 32)
        good = (
            isinstance(alignment, int) and not isinstance(alignment, bool) and 8 <= alignment <= MAX_ALIGNMENT
        )
        if not good or alignment & (alignment - 1):
            raise self.fail(
                f"general.alignment: got {_short(alignment)}, allowed: a power of two, 8..{MAX_ALIGNMENT}"
            )
        records = [self.record() for _ in range(tensor_count)]
        return metadata, self.place(records, alignment)

    def value(self, kind: int, key: str, inside_array: bool = False) -> Any:
        if kind in SCALARS:
            return self.number(SCALARS[kind], f"value of {key}")
        if kind == STRING:
            return self.string(f"value of {key}")
        if kind == ARRAY and not inside_array:
            item = self.number("I", f"item type of {key}")
            if item in SCALARS:
                size = struct.calcsize("<" + SCALARS[item])
                length = self.count(f"length of {key}", size)
                start = self.need(length * size, f"value of {key}")
                return list(struct.unpack_from(f"<{length}{SCALARS[item]}", self.data, start))
            if item == STRING:
                what = f"an item of {key}"
                return [self.string(what) for _ in range(self.count(f"length of {key}", 8))]
            raise self.fail(
                f"item type of {key}: got {item}, allowed: a scalar or a string (nested arrays are not)"
            )
        raise self.fail(f"type of {key}: got {kind}, allowed: 0..12", self.at - 4)

    def record(self) -> tuple[str, tuple[int, ...], BlockType, int, int]:
        """(name, shape, type, offset, position of this record)."""
        at = self.at
        name = self.string("a tensor name", MAX_NAME)
        ndim = self.number("I", f"dimensions of {name}")
        if not 1 <= ndim <= MAX_DIMS:
            raise self.fail(f"dimensions of {name}: got {ndim}, allowed: 1..{MAX_DIMS}", self.at - 4)
        dims = [self.number("Q", f"a dimension of {name}") for _ in range(ndim)]
        number = self.number("I", f"type of {name}")
        if number not in TYPES:
            known = OTHER_TYPES.get(number)
            raise self.fail(
                f"type of {name}: got {known or number}{' (supported by GGUF, not by pykern)' if known else ''}, "
                f"allowed: {', '.join(t.name for t in TYPES.values())}",
                self.at - 4,
            )
        kind = TYPES[number]
        # Python's integers do not overflow: a product past the file's size is caught where the tensor is placed.
        if min(dims) < 1 or dims[0] % kind.block:
            raise self.fail(
                f"shape of {name}: got {tuple(reversed(dims))}, allowed: sizes of at least 1, "
                f"the last a multiple of {kind.block} for {kind.name}",
                at,
            )
        return name, tuple(reversed(dims)), kind, self.number("Q", f"offset of {name}"), at

    def place(
        self, records: list[tuple[str, tuple[int, ...], BlockType, int, int]], alignment: int
    ) -> dict[str, Any]:
        """Absolute positions of the tensors, which must lie within the file and apart from each other."""
        base = -(-self.at // alignment) * alignment
        tensors: dict[str, TensorEntry] = {}
        for name, shape, kind, offset, at in records:
            if name in tensors:
                raise self.fail(f"tensor {name!r} appears twice", at)
            nbytes = math.prod(shape) // kind.block * kind.nbytes
            if offset % alignment:
                raise self.fail(f"offset of {name}: got {offset}, allowed: a multiple of {alignment}", at)
            if base + offset + nbytes > self.size:
                raise self.fail(
                    f"{name} {shape} {kind.name} needs bytes {base + offset}..{base + offset + nbytes}, "
                    f"but the file ends at {self.size}: truncated, or the shape or offset is wrong",
                    at,
                )
            tensors[name] = TensorEntry(name, kind, shape, base + offset, nbytes)
        ordered = sorted(tensors.values(), key=lambda t: t.start)
        for before, after in pairwise(ordered):
            if before.start + before.nbytes > after.start:
                raise self.fail(f"tensors {before.name} and {after.name} overlap", after.start)
        return tensors
