"""The parameter list of a ``__global__`` function, read from its source, and the check of arguments against it.

Not a C++ parser: it knows the shapes that kernel signatures have (templates over types and numbers, pointers,
scalars, qualifiers) and refuses the rest by name.
"""

from __future__ import annotations

import ctypes
import math
import operator
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pykern.errors import ArgumentError, brief
from pykern.jit.declarations import TYPE_WORDS, Declaration, expand, split_arguments, substitute

# C++ type -> torch dtype name, of a pointer's elements
_ELEMENTS = {
    "float": "float32", "double": "float64", "bool": "bool",
    "half": "float16", "__half": "float16", "pk::half": "float16",
    "bf16": "bfloat16", "pk::bf16": "bfloat16", "__nv_bfloat16": "bfloat16", "nv_bfloat16": "bfloat16",
    "fp8e4m3": "float8_e4m3fn", "pk::fp8e4m3": "float8_e4m3fn", "__nv_fp8_e4m3": "float8_e4m3fn",
    "fp8e5m2": "float8_e5m2", "pk::fp8e5m2": "float8_e5m2", "__nv_fp8_e5m2": "float8_e5m2",
    "char": "int8", "signed char": "int8", "int8_t": "int8", "unsigned char": "uint8", "uint8_t": "uint8",
    "short": "int16", "int16_t": "int16", "unsigned short": "uint16", "uint16_t": "uint16",
    "int": "int32", "int32_t": "int32", "unsigned": "uint32", "unsigned int": "uint32", "uint32_t": "uint32",
    "long": "int64", "long long": "int64", "int64_t": "int64", "ptrdiff_t": "int64",
    "unsigned long": "uint64", "unsigned long long": "uint64", "uint64_t": "uint64", "size_t": "uint64",
}  # fmt: skip
_SIZES = {"bool": 1, "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# torch has no arithmetic on the wider unsigned types, so their signed twins, of the same bits, are taken too
_TWINS = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}
_VECTOR = re.compile(r"^(float|double|int|uint|char|uchar|short|ushort|longlong)([234])$")
_VECTOR_BASE = {"uint": "unsigned", "uchar": "unsigned char", "ushort": "unsigned short", "longlong": "long long"}
_PK_VECTOR = re.compile(r"^(?:pk::)?Vec<(.+),\s*(\d+)>$")
_PAIRS = {"half2": "half", "__half2": "half", "nv_bfloat162": "bf16", "__nv_bfloat162": "bf16"}
_INTS: dict[str, Any] = {
    "int8": ctypes.c_int8, "uint8": ctypes.c_uint8, "int16": ctypes.c_int16, "uint16": ctypes.c_uint16,
    "int32": ctypes.c_int32, "uint32": ctypes.c_uint32, "int64": ctypes.c_int64, "uint64": ctypes.c_uint64,
}  # fmt: skip
_SKIP = {"const", "volatile", "__restrict__", "__restrict", "restrict", "__grid_constant__", "struct", "typename"}


def element_size(dtype: str) -> int:
    """Bytes of one element of a torch dtype name."""
    return _SIZES.get(dtype) or int(re.sub(r"\D", "", dtype)) // 8


@dataclass(frozen=True)
class Parameter:
    """One kernel parameter, template arguments put in: ``type`` without qualifiers, ``pointer`` if it is ``type*``."""

    name: str
    type: str
    pointer: bool
    const: bool

    @property
    def dtype(self) -> str | None:
        """torch dtype name of a pointer's elements or a scalar; None for ``void`` and types of the kernel's own."""
        return _element(self.type)[0]

    @property
    def checked(self) -> str:
        """The type of ``core/raw.cuh`` that says what pykern takes this parameter for."""
        dtype, count = _element(self.type)
        if self.pointer:
            return f"Pointer<{element_size(dtype) * count}>" if dtype and count in (1, 2, 4, 8, 16) else "AnyPointer"
        if dtype is None or count != 1:
            return "Anything"
        kind = "Bool" if dtype == "bool" else "Float" if dtype in ("float32", "float64") else "Bits"
        return f"{kind}<{element_size(dtype)}>"

    @property
    def alignment(self) -> int:
        """Bytes that a pointer must be aligned to."""
        dtype, count = _element(self.type)
        return element_size(dtype) * (count if count in (1, 2, 4, 8, 16) else 1) if dtype else 1

    def __str__(self) -> str:
        return f"{'const ' if self.const else ''}{self.type}{'*' if self.pointer else ''} {self.name}".strip()


def _element(type_: str) -> tuple[str | None, int]:
    """(torch dtype name, how many of it) of a C++ type; (None, 1) of others."""
    type_ = _plain(type_.removeprefix("std::"))
    if type_ in _ELEMENTS:
        return _ELEMENTS[type_], 1
    if type_ in _PAIRS:
        return _ELEMENTS[_PAIRS[type_]], 2
    if found := _VECTOR.match(type_):
        return _ELEMENTS[_VECTOR_BASE.get(found[1], found[1])], int(found[2])
    if found := _PK_VECTOR.match(type_):
        return _ELEMENTS.get(found[1].strip()), int(found[2])
    return None, 1


def _plain(type_: str) -> str:
    """``unsigned long`` for ``long unsigned int``: one spelling of each integer type."""
    words = type_.split()
    if not words or not TYPE_WORDS.issuperset(words) or {"float", "double", "bool"} & set(words):
        return type_
    base = next((word for word in ("char", "short") if word in words), "long" if "long" in words else "int")
    sign = "unsigned " if "unsigned" in words else "signed " if base == "char" and "signed" in words else ""
    return sign + base


def parse_instance(instance: str) -> tuple[str, list[str]]:
    """``"k<float, 4>"`` -> (``"k"``, ``["float", "4"]``)."""
    match = re.fullmatch(r"\s*([A-Za-z_][\w:]*)\s*(?:<(.*)>)?\s*", instance, re.DOTALL)
    if match is None:
        raise ArgumentError("kernel", repr(instance), "a kernel name with its template arguments, like 'k<float, 4>'")
    return match[1], split_arguments(match[2] or "")


def parameters_of(declared: Declaration, arguments: list[str]) -> tuple[Parameter, ...]:
    """The parameters of an instance. Raises ArgumentError when template arguments are missing or too many."""
    names = declared.template
    if packs := [name for name, _ in names if name.endswith("...")]:
        raise ArgumentError(f"{declared.name}: template", f"`{packs[0]}`", "a fixed list: a pack has no names to check")
    required = sum(default is None for _, default in names)
    if not required <= len(arguments) <= len(names):
        wanted = ", ".join(name for name, _ in names) or "none"
        raise ArgumentError(f"{declared.name}: template arguments", f"<{', '.join(arguments)}>", wanted)
    values: dict[str, str] = {}
    for index, (name, default) in enumerate(names):
        text = arguments[index] if index < len(arguments) else default or ""
        values[name] = substitute(text, values)
    aliases = dict(declared.aliases)
    texts = [expand(substitute(raw, values), aliases) for raw in declared.parameters]
    return tuple(_parameter(text, index, declared.name) for index, text in enumerate(texts))


def _parameter(raw: str, index: int, instance: str) -> Parameter:
    text = raw.partition("=")[0].strip()
    shown = bare = " ".join(text.split())
    while (less := re.sub(r"<[^<>]*>", "", bare)) != bare:
        bare = less
    for pattern, allowed in _ODD:
        if re.search(pattern, bare):
            raise ArgumentError(f"{instance}: parameter {index + 1}", f"`{shown}`", allowed)
    const = bool(re.search(r"\bconst\b", text.partition("*")[0]))
    plain = re.sub(r"(?:\[[^\[\]]*\]\s*)+$", "", text)
    stars = plain.count("*") + (plain != text)
    words = re.findall(r"[A-Za-z_][\w:]*(?:\s*<[^*]*>)?|\*|&", plain)
    named = [word for word in words if word not in _SKIP and word not in "*&"]
    name = named.pop() if len(named) > 1 and named[-1] not in TYPE_WORDS else f"argument {index}"
    type_ = re.sub(r"\s+", " ", " ".join(named)) + "*" * max(0, stars - 1)
    return Parameter(name, type_, stars > 0, const)


# Parameters that no launch can pass, and what to write instead.
_ODD = (
    (r"\.\.\.", "a fixed list of parameters: a pack has no names to check arguments against"),
    (r"&", "a value or a pointer: a launch copies its arguments, so a kernel takes no references"),
    (r"\(|\]\s*\[", "a number or a pointer to numbers (`T* x` for an array of arrays: the kernel works the index out)"),
    (r"\bauto\b", "a named type, or a parameter of `template <typename T>`"),
)


# ---------------------------------------------------------------- scalars


def _integer(parameter: Parameter, value: Any, dtype: str) -> Any:
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(parameter.name, brief(value), f"an int for `{parameter}`") from None
    bits, signed = element_size(dtype) * 8, not dtype.startswith("u")
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    if not low <= number <= high:
        raise ArgumentError(parameter.name, number, f"{low} to {high} for `{parameter}`")
    return _INTS[dtype](number)


def bfloat16_bits(value: float) -> int:
    """The bfloat16 nearest to ``value`` (ties to even), through float32 as a C++ conversion does."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    if math.isnan(value):
        return 0x7FC0
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF


def _floating(parameter: Parameter, value: Any, dtype: str) -> Any:
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__") or getattr(value, "shape", None):
        raise ArgumentError(parameter.name, brief(value), f"a number for `{parameter}`")
    try:
        number = float(value)
        if dtype == "float64":
            return ctypes.c_double(number)
        if dtype == "float32":
            struct.pack("<f", number)
            return ctypes.c_float(number)
        if dtype == "float16":
            return ctypes.c_uint16(struct.unpack("<H", struct.pack("<e", number))[0])
        return ctypes.c_uint16(bfloat16_bits(number))
    except OverflowError:
        allowed = f"a value within {dtype}'s range for `{parameter}`"
        raise ArgumentError(parameter.name, brief(value), allowed) from None


def scalar(parameter: Parameter, value: Any) -> Any:
    """A ctypes value of the parameter's type. Raises ArgumentError with the name, the value and what is allowed."""
    if hasattr(value, "data_ptr"):
        raise ArgumentError(parameter.name, "a tensor", f"a number for `{parameter}`")
    dtype, count = _element(parameter.type)
    if dtype == "bool":
        whole = isinstance(value, int) or type(value).__name__ in ("bool", "bool_")  # of numpy, whichever release
        if not whole or value not in (0, 1):
            raise ArgumentError(parameter.name, brief(value), f"True or False for `{parameter}`")
        return ctypes.c_bool(bool(value))
    makers: dict[str, Callable[[Parameter, Any, str], Any]] = dict.fromkeys(_INTS, _integer)
    makers |= dict.fromkeys(("float32", "float64", "float16", "bfloat16"), _floating)
    if dtype in makers and count == 1:
        return makers[dtype](parameter, value, dtype)
    with_it = f"a {dtype} tensor" if dtype else "a uint8 tensor of its bytes"
    instead = f"its members one by one, or `const {parameter.type}* {parameter.name}` with {with_it}"
    if parameter.type == "long double":
        instead = "`double`, since a GPU has no long double"
    allowed = f"no value: `{parameter}` cannot be passed from Python. Let the kernel take {instead}"
    raise ArgumentError(parameter.name, brief(value), allowed)


def check_pointee(parameter: Parameter, dtype: str, address: int) -> None:
    """Refuse a tensor whose dtype or alignment does not fit a pointer parameter."""
    wanted = parameter.dtype
    if wanted is None and parameter.type == "void":
        allowed: tuple[str, ...] = ()
    elif parameter.type.endswith("*"):
        allowed = ("int64", "uint64")  # addresses
    elif wanted is None:
        allowed = ("uint8", "int8")  # a struct of the kernel's own: raw bytes
    else:
        allowed = (wanted, _TWINS[wanted]) if wanted in _TWINS else (wanted,)
    if allowed and dtype not in allowed:
        what = ", of addresses," if parameter.type.endswith("*") else "" if wanted else f" ({parameter.type}: no dtype)"
        raise ArgumentError(parameter.name, f"a {dtype} tensor", f"{' or '.join(allowed)}{what} for `{parameter}`")
    if address % parameter.alignment:
        raise ArgumentError(
            parameter.name,
            f"data at {address:#x}",
            f"a pointer aligned to {parameter.alignment} bytes for `{parameter}`",
        )
