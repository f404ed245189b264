"""What an op accepts: tensors with named dimensions, scalars, roles; and the check that names what is wrong.

A dimension string such as ``"*b m n"`` binds one name per axis. ``*b`` (first only) takes any number of leading
axes and binds their product; integers are literal; in outputs a token may be an expression in the names
(``"m n//2"``). The same name in two tensors must have the same size.
"""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from pykern.errors import ArgumentError

# torch's ScalarType numbers, so that plans and analyses need no torch import.
DTYPE_CODES = {
    "uint8": 0, "int8": 1, "int16": 2, "int32": 3, "int64": 4, "float16": 5, "float32": 6, "float64": 7,
    "bool": 11, "bfloat16": 15, "float8_e5m2": 23, "float8_e4m3fn": 24,
}  # fmt: skip
DTYPE_NAMES = {code: name for name, code in DTYPE_CODES.items()}
# Names of dtypes that no op takes, for messages.
OTHER_DTYPES = {
    8: "complex32", 9: "complex64", 10: "complex128", 12: "qint8", 13: "quint8", 14: "qint32", 16: "quint4x2",
    17: "quint2x4", 25: "float8_e5m2fnuz", 26: "float8_e4m3fnuz", 27: "uint16", 28: "uint32", 29: "uint64",
    44: "float8_e8m0fnu", 45: "float4_e2m1fn_x2",
}  # fmt: skip
ITEMSIZE = {
    "uint8": 1, "int8": 1, "int16": 2, "int32": 4, "int64": 8, "float16": 2, "float32": 4, "float64": 8,
    "bool": 1, "bfloat16": 2, "float8_e5m2": 1, "float8_e4m3fn": 1,
}  # fmt: skip
# The C++ name of each dtype in kernels.
CTYPE = {
    "uint8": "uint8_t", "int8": "int8_t", "int16": "int16_t", "int32": "int32_t", "int64": "int64_t",
    "float32": "float", "float16": "pk::half", "bfloat16": "pk::bf16",
    "float8_e4m3fn": "pk::fp8e4m3", "float8_e5m2": "pk::fp8e5m2",
}  # fmt: skip
SHORT_DTYPES = {
    "fp32": "float32", "f32": "float32", "fp16": "float16", "f16": "float16", "half": "float16", "bf16": "bfloat16",
    "fp8": "float8_e4m3fn", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "i8": "int8", "i32": "int32",
    "i64": "int64", "u8": "uint8",
}  # fmt: skip
FLOATS = ("float32", "float16", "bfloat16")
FP8 = ("float8_e4m3fn", "float8_e5m2")

Role = Literal["input", "weight", "mutated"]
Strides = Literal["last", "contiguous", "any"]


def dtype_name(text: str) -> str:
    """The full dtype name of ``text`` (``bf16`` -> ``bfloat16``); ArgumentError when unknown."""
    name = SHORT_DTYPES.get(text.lower(), text.lower())
    if name not in DTYPE_CODES:
        raise ArgumentError("dtype", repr(text), ", ".join([*FLOATS, *SHORT_DTYPES]))
    return name


@dataclass(frozen=True)
class Tensor:
    """One tensor argument.

    ``dtypes``: allowed names, or ``"like x"`` for the dtype of argument ``x``. ``strides``: ``last`` needs unit
    stride on the last axis (other strides are free, 0 included), ``contiguous`` needs row-major, ``any`` allows all.
    ``role``: ``weight`` is never written while a kernel is in flight; ``mutated`` is read and written in place.
    """

    name: str
    dims: str
    dtypes: tuple[str, ...] | str = FLOATS
    role: Role = "input"
    optional: bool = False
    strides: Strides = "last"
    many: bool = False  # Tensor[]: dims and dtypes are then checked by the op's own ``check``
    doc: str = ""


@dataclass(frozen=True)
class Scalar:
    """One scalar argument. ``key=True`` puts its value into the plan (needed when the plan depends on it).

    ``low`` and ``high``: inclusive bounds, checked at every call of the public function (NaN is out of bounds).
    """

    name: str
    type: Literal["float", "int", "bool", "str"]
    default: float | int | bool | str | None = None
    key: bool = False
    choices: tuple[Any, ...] = ()
    required: bool = False
    doc: str = ""
    low: float | None = None
    high: float | None = None

    @property
    def allowed(self) -> str:
        """The bounds in words."""
        low, high = (format(v, "g") if v is not None else "" for v in (self.low, self.high))
        return f"{low}..{high}" if low and high else f">= {low}" if low else f"<= {high}"


@dataclass(frozen=True)
class Out:
    """One output. ``dtype`` is a name, ``"like x"``, or a callable of the :class:`Problem`.

    ``dims`` is a dimension string or a callable of the problem giving the shape (shape ``(0,)`` for an output that
    was not asked for).
    """

    name: str
    dims: str | Callable[[Problem], Sequence[Any]]
    dtype: str | Callable[[Problem], str] = "like x"
    doc: str = ""


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of one tensor: sizes and strides in elements, ``align`` = largest power of two (<= 256) that
    divides its address."""

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    align: int = 256
    device: str = "cpu"
    index: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return ITEMSIZE[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def contiguous(self) -> bool:
        return self.numel == 0 or strides_match(self.shape, self.strides, contiguous_strides(self.shape))

    def rows(self, name: str, keep: int = 1) -> tuple[int, int]:
        """Leading axes seen as one: ``(rows, row stride in elements)``; the last ``keep`` axes are left.

        Raises ArgumentError when no single stride walks the leading axes.
        """
        lead = [(n, s) for n, s in zip(self.shape[:-keep], self.strides[:-keep], strict=True) if n != 1]
        rows = math.prod(n for n, _ in lead)
        if rows == 0 or not lead:
            return rows, math.prod(self.shape[-keep:])
        for (_, outer), (n, inner) in pairwise(lead):
            if outer != n * inner:
                raise ArgumentError(
                    f"{name}.stride()", self.strides, f"leading axes of {self.shape} that collapse into one stride"
                )
        return rows, lead[-1][1]

    def rows_aligned(self, nbytes: int = 16) -> bool:
        """Whether every row along the last axis starts on a multiple of ``nbytes``, a power of two up to 256."""
        steps = [s for n, s in zip(self.shape[:-1], self.strides[:-1], strict=True) if n > 1]
        return self.align >= nbytes and all(s * self.itemsize % nbytes == 0 for s in steps)

    def vector(self, *strides: int, widest: int = 16) -> int:
        """Widest access in elements (1, 2, 4 ...; at most ``widest`` bytes) that pointer and row strides allow."""
        size = self.itemsize
        width = min(widest, self.align)
        for s in strides:
            if s:
                width = min(width, (s * size) & -(s * size))
        return max(1, width // size)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides of ``shape``, in elements."""
    out: list[int] = []
    step = 1
    for n in reversed(shape):
        out.append(step)
        step *= max(n, 1)
    return tuple(reversed(out))


def strides_match(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    """Whether two stride tuples address the same elements (axes of size 1 do not count)."""
    return all(n == 1 or x == y for n, x, y in zip(shape, a, b, strict=True))


def overlaps_itself(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether two indices may share an address (exact for the nested layouts that views produce)."""
    axes = sorted((s, n) for n, s in zip(shape, strides, strict=True) if n > 1)
    if math.prod(shape) == 0:
        return False
    reach = 0
    for s, n in axes:
        if s <= reach:
            return True
        reach += s * (n - 1)
    return False


@dataclass
class Problem:
    """One call, as metadata: what ``plan`` sees. ``problem["x"]`` is a TensorInfo (None if absent), ``problem.m`` a
    dimension, ``problem.scalars["eps"]`` a scalar (only those with ``key=True`` are reliable in a plan)."""

    tensors: dict[str, Any]
    dims: dict[str, int]
    scalars: dict[str, Any]
    device: str = "cpu"
    index: int = 0
    outs: dict[str, TensorInfo] = field(default_factory=dict)  # given ``.out`` tensors

    def __getitem__(self, name: str) -> Any:
        return self.tensors[name]

    def __getattr__(self, name: str) -> Any:
        for table in ("dims", "scalars"):
            found = self.__dict__.get(table, {})
            if name in found:
                return found[name]
        raise AttributeError(name)

    def has(self, name: str) -> bool:
        return self.tensors.get(name) is not None

    def rows_aligned(self, *names: str, nbytes: int = 16) -> bool:
        """Whether every row of the named inputs and outputs starts on a multiple of ``nbytes``. An absent input does,
        and an output that is not given: it is allocated."""
        found = (self.tensors.get(name) or self.outs.get(name) for name in names)
        return all(info.rows_aligned(nbytes) for info in found if info is not None)


_OPS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}  # fmt: skip


def evaluate(token: str, dims: Mapping[str, Any]) -> Any:
    """Value of a dimension token: a name, an integer, or an expression of them (works on torch SymInts)."""

    def walk(node: ast.AST) -> Any:
        if isinstance(node, ast.Expression):
            return walk(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name):
            return dims[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in _OPS:
            return _OPS[type(node.op)](walk(node.left), walk(node.right))
        raise ValueError(f"not a dimension expression: {token!r}")

    return walk(ast.parse(token, mode="eval"))


def bind_dims(
    name: str, dims: str, shape: Sequence[Any], bound: dict[str, Any], starred: dict[str, tuple[Any, ...]]
) -> None:
    """Match ``shape`` against ``dims``, adding to ``bound`` and (for a leading ``*b``) to ``starred``."""
    tokens = dims.split()
    star = bool(tokens) and tokens[0].startswith("*")
    fixed = tokens[1:] if star else tokens
    if len(shape) < len(fixed) or (not star and len(shape) != len(fixed)):
        raise ArgumentError(
            f"{name}.dim()", len(shape), f"{'at least ' if star else ''}{len(fixed)} for shape [{dims}]"
        )
    lead = tuple(shape[: len(shape) - len(fixed)])
    if star:
        key = tokens[0][1:]
        if starred.setdefault(key, lead) != lead:
            raise ArgumentError(f"{name}.shape", tuple(shape), f"leading axes {starred[key]}, as in [{dims}]")
        product: Any = 1
        for n in lead:
            product = product * n
        bound[key] = product
    for axis, (token, size) in enumerate(zip(fixed, shape[len(lead) :], strict=True), start=len(lead)):
        if token == "_":
            continue
        if token.isidentifier() and token not in bound:
            bound[token] = size
            continue
        want = evaluate(token, bound)
        if want != size:
            raise ArgumentError(f"{name}.shape[{axis}]", size, f"{want} ({token}) for shape [{dims}]")


def check_tensor(spec: Tensor, info: TensorInfo, tensors: Mapping[str, Any]) -> None:
    """dtype and strides of one tensor against its declaration."""
    allowed = spec.dtypes
    if isinstance(allowed, str):
        other = tensors.get(allowed.removeprefix("like "))
        allowed = (other.dtype,) if other is not None else FLOATS
    if info.dtype not in allowed:
        raise ArgumentError(f"{spec.name}.dtype", info.dtype, ", ".join(allowed))
    if info.numel and any(s < 0 for s in info.strides):
        raise ArgumentError(f"{spec.name}.stride()", info.strides, "non-negative strides")
    if spec.strides == "contiguous" and not info.contiguous:
        raise ArgumentError(
            f"{spec.name}.stride()", info.strides, f"contiguous {contiguous_strides(info.shape)}; call .contiguous()"
        )
    if spec.strides == "last" and info.shape and info.numel and info.shape[-1] > 1 and info.strides[-1] != 1:
        raise ArgumentError(f"{spec.name}.stride(-1)", info.strides[-1], "1; call .contiguous()")
    if spec.role == "mutated" and overlaps_itself(info.shape, info.strides):
        raise ArgumentError(f"{spec.name}.stride()", info.strides, "a tensor whose elements do not overlap")


def build_problem(
    inputs: Sequence[Tensor | Scalar], values: Mapping[str, Any], outs: Mapping[str, TensorInfo] | None = None
) -> Problem:
    """Check ``values`` (TensorInfo, scalar, or None per argument) against the declaration and bind dimensions."""
    tensors: dict[str, Any] = {}
    scalars: dict[str, Any] = {}
    dims: dict[str, Any] = {}
    starred: dict[str, tuple[Any, ...]] = {}
    device: tuple[str, int] | None = None
    first = ""
    for spec in inputs:
        value = values.get(spec.name)
        if isinstance(spec, Scalar):
            scalars[spec.name] = spec.default if value is None else value
            if spec.key and spec.choices and scalars[spec.name] not in spec.choices:
                raise ArgumentError(spec.name, repr(scalars[spec.name]), ", ".join(map(repr, spec.choices)))
            continue
        if value is None:
            if not spec.optional:
                raise ArgumentError(spec.name, None, f"a tensor of shape [{spec.dims}]")
            tensors[spec.name] = None
            continue
        tensors[spec.name] = tuple(value) if spec.many else value
        for info in value if spec.many else (value,):
            if device is None:
                device, first = (info.device, info.index), spec.name
            elif (info.device, info.index) != device:
                raise ArgumentError(
                    f"{spec.name}.device", _place(info.device, info.index), f"{_place(*device)}, as {first}"
                )
        if spec.many:
            continue
        bind_dims(spec.name, spec.dims, value.shape, dims, starred)
        check_tensor(spec, value, tensors)
    where = device or ("cpu", 0)
    problem = Problem(tensors, dims, scalars, where[0], where[1], dict(outs or {}))
    problem.__dict__["starred"] = starred
    return problem


def _place(device: str, index: int) -> str:
    return f"{device}:{index}" if device == "cuda" else device


def output_info(problem: Problem, out: Out) -> tuple[str, tuple[Any, ...]]:
    """(dtype, shape) of an output for ``problem``; shapes may hold SymInts."""
    dtype = out.dtype(problem) if callable(out.dtype) else out.dtype
    if dtype.startswith("like "):
        dtype = problem.tensors[dtype.removeprefix("like ")].dtype
    if callable(out.dims):
        return dtype, tuple(out.dims(problem))
    shape: list[Any] = []
    starred = problem.__dict__.get("starred", {})
    for token in out.dims.split():
        if token.startswith("*"):
            shape.extend(starred[token[1:]])
        else:
            shape.append(evaluate(token, problem.dims))
    return dtype, tuple(shape)
