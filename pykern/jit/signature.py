"""The parameter list of a ``__global__`` function, read from its source, and the check of arguments against it.

Not a C++ parser: it knows the shapes that kernel signatures have (templates over types and numbers, pointers,
scalars, qualifiers) and refuses the rest by name.
"""

from __future__ import annotations

import ctypes
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pykern.errors import ArgumentError

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
    "long": "int64", "long long": "int64", "int64_t": "int64",
    "unsigned long": "uint64", "unsigned long long": "uint64", "uint64_t": "uint64", "size_t": "uint64",
}  # fmt: skip
_SIZES = {"bool": 1, "float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}
# torch has no arithmetic on the wider unsigned types, so their signed twins, of the same bits, are taken too
_TWINS = {"uint16": "int16", "uint32": "int32", "uint64": "int64"}
_VECTOR = re.compile(r"^(float|double|int|uint|char|uchar|short|ushort|longlong)([234])$")
_VECTOR_BASE = {"uint": "unsigned", "uchar": "unsigned char", "ushort": "unsigned short", "longlong": "long long"}
_PK_VECTOR = re.compile(r"^(?:pk::)?Vec<(.+),\s*(\d+)>$")
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
    def alignment(self) -> int:
        """Bytes that a pointer must be aligned to."""
        dtype, count = _element(self.type)
        return element_size(dtype) * (count if count in (1, 2, 4, 8, 16) else 1) if dtype else 1

    def __str__(self) -> str:
        return f"{'const ' if self.const else ''}{self.type}{'*' if self.pointer else ''} {self.name}".strip()


def _element(type_: str) -> tuple[str | None, int]:
    if type_ in _ELEMENTS:
        return _ELEMENTS[type_], 1
    if found := _VECTOR.match(type_):
        return _ELEMENTS[_VECTOR_BASE.get(found[1], found[1])], int(found[2])
    if found := _PK_VECTOR.match(type_):
        return _ELEMENTS.get(found[1].strip()), int(found[2])
    return None, 1


def strip_comments(source: str) -> str:
    """Source without comments and without the contents of string literals."""
    pattern = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"', re.DOTALL)
    return pattern.sub(lambda m: '""' if m[0].startswith('"') else " ", source)


def split_arguments(text: str) -> list[str]:
    """``"a, b<c, d>, (e, f)"`` at its top-level commas."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += char in "<([{"
        depth -= char in ">)]}"
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    parts.append(current.strip())
    return [part for part in parts if part]


def _balanced(text: str, start: int, pair: str = "()") -> int:
    """Index just after the bracket that closes the one at ``start``; -1 where it is never closed."""
    depth = 0
    for index in range(start, len(text)):
        depth += text[index] == pair[0]
        depth -= text[index] == pair[1]
        if depth == 0:
            return index + 1
    return -1


@dataclass(frozen=True)
class Declaration:
    """A ``__global__`` function: its template parameter names (with defaults, or None) and its raw parameters."""

    name: str
    template: tuple[tuple[str, str | None], ...]
    parameters: tuple[str, ...]


_ATTRIBUTES = {"__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__block_size__", "__attribute__", "alignas"}


def declarations(source: str) -> dict[str, Declaration]:
    """Every ``__global__`` function of ``source`` by name; a definition wins over a forward declaration."""
    text = strip_comments(source)
    found: dict[str, Declaration] = {}
    for match in re.finditer(r"\b__global__\b", text):
        index = match.end()
        name, opening = "", -1
        for token in re.compile(r"[A-Za-z_]\w*|[(;{]").finditer(text, index):
            if token.start() < index:
                continue
            if token[0] == "(":
                if name in _ATTRIBUTES:
                    index = _balanced(text, token.start())
                    name = ""
                    if index < 0:
                        break
                    continue
                opening = token.start()
                break
            if token[0] in ";{":
                break
            name = token[0]
        closing = _balanced(text, opening) if opening >= 0 else -1
        if closing < 0 or not name:
            continue
        template = _template_before(text, match.start())
        parameters = tuple(split_arguments(text[opening + 1 : closing - 1]))
        if parameters == ("void",):
            parameters = ()
        if name not in found or template:
            found[name] = Declaration(name, template, parameters)
    return found


def _template_before(text: str, position: int) -> tuple[tuple[str, str | None], ...]:
    """Template parameters of the function whose ``__global__`` stands at ``position``."""
    since = max(text.rfind(char, 0, position) for char in ";}")
    heads = list(re.finditer(r"\btemplate\s*<", text[since + 1 : position]))
    if not heads:
        return ()
    opening = since + 1 + heads[-1].end() - 1
    closing = _balanced(text, opening, "<>")
    if closing < 0:
        return ()
    result: list[tuple[str, str | None]] = []
    for part in split_arguments(text[opening + 1 : closing - 1]):
        declared, _, default = part.partition("=")
        names = re.findall(r"[A-Za-z_]\w*", declared)
        result.append((names[-1] if names else "", default.strip() or None))
    return tuple(result)


def parse_instance(instance: str) -> tuple[str, list[str]]:
    """``"k<float, 4>"`` -> (``"k"``, ``["float", "4"]``)."""
    match = re.fullmatch(r"\s*([A-Za-z_][\w:]*)\s*(?:<(.*)>)?\s*", instance, re.DOTALL)
    if match is None:
        raise ArgumentError("kernel", repr(instance), "a kernel name with its template arguments, like 'k<float, 4>'")
    return match[1], split_arguments(match[2] or "")


def parameters_of(declared: Declaration, arguments: list[str]) -> tuple[Parameter, ...]:
    """The parameters of an instance. Raises ArgumentError when template arguments are missing or too many."""
    names = declared.template
    required = sum(default is None for _, default in names)
    if not required <= len(arguments) <= len(names):
        wanted = ", ".join(name for name, _ in names) or "none"
        raise ArgumentError(f"{declared.name}: template arguments", f"<{', '.join(arguments)}>", wanted)
    values: dict[str, str] = {}
    for index, (name, default) in enumerate(names):
        text = arguments[index] if index < len(arguments) else default or ""
        values[name] = _substitute(text, values)
    return tuple(_parameter(_substitute(raw, values), index) for index, raw in enumerate(declared.parameters))


def _substitute(text: str, values: dict[str, str]) -> str:
    return re.sub(r"[A-Za-z_]\w*", lambda m: values.get(m[0], m[0]), text) if values else text


def _parameter(raw: str, index: int) -> Parameter:
    text = raw.partition("=")[0].strip()
    const = bool(re.search(r"\bconst\b", text.partition("*")[0]))
    text = re.sub(r"\[\s*\d*\s*\]\s*$", "", text) if (array := text.endswith("]")) else text
    stars = text.count("*") + array
    words = re.findall(r"[A-Za-z_][\w:]*(?:\s*<[^*]*>)?|\*|&", text)
    plain = [word for word in words if word not in _SKIP and word not in "*&"]
    name = plain.pop() if len(plain) > 1 and not _is_type_word(plain[-1]) else f"argument {index}"
    return (
        Parameter(name, re.sub(r"\s+", " ", " ".join(plain)), stars == 1, const)
        if stars < 2
        else Parameter(name, " ".join(plain) + "*", True, const)
    )


def _is_type_word(word: str) -> bool:
    return word in ("int", "long", "short", "char", "unsigned", "signed", "float", "double", "bool")


# ---------------------------------------------------------------- scalars


def _integer(parameter: Parameter, value: Any, dtype: str) -> Any:
    if not hasattr(value, "__index__"):
        raise ArgumentError(parameter.name, repr(value), f"an int for `{parameter}`")
    number = value.__index__()
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
    if isinstance(value, (bool, str, bytes)) or not hasattr(value, "__float__"):
        raise ArgumentError(parameter.name, repr(value), f"a number for `{parameter}`")
    number = float(value)
    try:
        if dtype == "float64":
            return ctypes.c_double(number)
        if dtype == "float32":
            struct.pack("<f", number)
            return ctypes.c_float(number)
        if dtype == "float16":
            return ctypes.c_uint16(struct.unpack("<H", struct.pack("<e", number))[0])
        return ctypes.c_uint16(bfloat16_bits(number))
    except OverflowError:
        raise ArgumentError(parameter.name, number, f"a value within {dtype}'s range for `{parameter}`") from None


def scalar(parameter: Parameter, value: Any) -> Any:
    """A ctypes value of the parameter's type. Raises ArgumentError with the name, the value and what is allowed."""
    if hasattr(value, "data_ptr"):
        raise ArgumentError(parameter.name, "a tensor", f"a number for `{parameter}`")
    dtype = parameter.dtype
    if dtype == "bool":
        if value not in (True, False, 0, 1) or isinstance(value, float):
            raise ArgumentError(parameter.name, repr(value), f"True or False for `{parameter}`")
        return ctypes.c_bool(bool(value))
    makers: dict[str, Callable[[Parameter, Any, str], Any]] = dict.fromkeys(_INTS, _integer)
    makers |= dict.fromkeys(("float32", "float64", "float16", "bfloat16"), _floating)
    if dtype is None or dtype not in makers or _element(parameter.type)[1] != 1:
        raise ArgumentError(
            parameter.name,
            repr(value),
            f"`{parameter}` cannot be passed from Python: use numbers and pointers to tensors",
        )
    return makers[dtype](parameter, value, dtype)


def check_pointee(parameter: Parameter, dtype: str, address: int) -> None:
    """Refuse a tensor whose dtype or alignment does not fit a pointer parameter."""
    wanted = parameter.dtype
    if wanted is None and parameter.type == "void":
        allowed: tuple[str, ...] = ()
    elif wanted is None:
        allowed = ("uint8", "int8")  # a struct of the kernel's own: raw bytes
    else:
        allowed = (wanted, _TWINS[wanted]) if wanted in _TWINS else (wanted,)
    if allowed and dtype not in allowed:
        raise ArgumentError(parameter.name, f"a {dtype} tensor", f"{' or '.join(allowed)} for `{parameter}`")
    if address % parameter.alignment:
        raise ArgumentError(
            parameter.name,
            f"data at {address:#x}",
            f"a pointer aligned to {parameter.alignment} bytes for `{parameter}`",
        )
