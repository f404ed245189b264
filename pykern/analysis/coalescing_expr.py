"""Address patterns as text: strides, lane lists, explicit addresses and integer expressions.

Expressions are walked as a syntax tree; nothing is ever handed to ``eval``. They know the integers, the names
``lane``, ``warp``, ``i`` and ``tid`` (= 32 warp + lane), the operators of C (``/`` and ``%`` round toward zero, as
in C; ``//`` is the same as ``/``; ``&&`` and ``||`` work), comparisons, ``a if c else b`` and ``min``, ``max``,
``abs``.
"""

from __future__ import annotations

import ast
import operator
import re
import warnings
from collections.abc import Callable

from pykern.analysis.banks import WARP
from pykern.analysis.coalescing import MAX_REQUESTS, Pattern
from pykern.errors import ArgumentError, require

NAMES = ("lane", "warp", "i", "tid")
_LIMIT = 2**63
_MAX_TEXT, _MAX_NODES = 2000, 400


def _divide(a: int, b: int) -> int:
    if b == 0:
        raise ZeroDivisionError
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _shift(a: int, b: int, left: bool) -> int:
    if not 0 <= b < 64:
        raise OverflowError(f"a shift by {b}")
    return a << b if left else a >> b


_BINARY: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: _divide,
    ast.FloorDiv: _divide,
    ast.Mod: lambda a, b: a - _divide(a, b) * b,
    ast.LShift: lambda a, b: _shift(a, b, True),
    ast.RShift: lambda a, b: _shift(a, b, False),
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.BitXor: operator.xor,
}
_COMPARE: dict[type, Callable[[int, int], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_UNARY: dict[type, Callable[[int], int]] = {
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
    ast.Invert: operator.invert,
    ast.Not: lambda a: int(not a),
}
_CALLS: dict[str, Callable[..., int]] = {"min": min, "max": max, "abs": abs}
_ALLOWED = "integers, lane, warp, i, tid, + - * / % << >> & | ^ ~, comparisons, a if c else b, min, max, abs"


class Expression:
    """An integer expression in ``lane``, ``warp`` and ``i``. Raises :class:`ArgumentError` for anything else."""

    def __init__(self, text: str, name: str = "expression") -> None:
        self.text, self.name = text, name
        require(isinstance(text, str) and text.strip() != "", name, repr(text), _ALLOWED)
        require(len(text) <= _MAX_TEXT, name, f"{len(text)} characters", f"at most {_MAX_TEXT}")
        source = text.replace("&&", " and ").replace("||", " or ").strip()
        try:
            with warnings.catch_warnings():  # "1if" is a warning to Python, and noise to the caller
                warnings.simplefilter("ignore")
                self._tree = ast.parse(source, mode="eval").body
            nodes = sum(1 for _ in ast.walk(self._tree))
            require(nodes <= _MAX_NODES, name, f"{nodes} terms", f"at most {_MAX_NODES}")
            self._check(self._tree)
        except ArgumentError:
            raise
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise ArgumentError(name, f"{text[:80]!r} ({error})", _ALLOWED) from None

    def _check(self, node: ast.AST) -> None:
        """Refuse every construct the evaluator does not know, before anything is evaluated."""
        if isinstance(node, ast.Constant):
            ok = type(node.value) is int and abs(node.value) < _LIMIT
        elif isinstance(node, ast.Name):
            ok = node.id in NAMES
        elif isinstance(node, ast.BinOp):
            ok = type(node.op) in _BINARY
        elif isinstance(node, ast.UnaryOp):
            ok = type(node.op) in _UNARY
        elif isinstance(node, ast.Compare):
            ok = all(type(op) in _COMPARE for op in node.ops)
        elif isinstance(node, ast.Call):
            ok = (
                isinstance(node.func, ast.Name)
                and node.func.id in _CALLS
                and not node.keywords
                and bool(node.args)
            )
            ok = ok and (len(node.args) == 1) == (isinstance(node.func, ast.Name) and node.func.id == "abs")
        else:
            ok = isinstance(node, (ast.BoolOp, ast.IfExp))
        if not ok:
            shown = ast.unparse(node) if isinstance(node, ast.expr) else type(node).__name__
            raise ArgumentError(self.name, repr(shown[:80]), _ALLOWED)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr) and not (isinstance(node, ast.Call) and child is node.func):
                self._check(child)

    def __call__(self, lane: int = 0, warp: int = 0, i: int = 0) -> int:
        """The value at one lane, warp and step; every intermediate value must fit 64 bits."""
        names = {"lane": lane, "warp": warp, "i": i, "tid": warp * WARP + lane}
        try:
            return self._value(self._tree, names)
        except ZeroDivisionError:
            raise ArgumentError(
                self.name, f"{self.text!r} at lane={lane} warp={warp} i={i}", "no division by 0"
            ) from None
        except OverflowError as error:
            raise ArgumentError(
                self.name,
                f"{self.text!r} at lane={lane} warp={warp} i={i}: {error}",
                "64-bit values, shifts by 0 to 63",
            ) from None

    def _value(self, node: ast.AST, names: dict[str, int]) -> int:
        if isinstance(node, ast.Constant):
            return int(node.value)  # type: ignore[arg-type]
        if isinstance(node, ast.Name):
            return names[node.id]
        if isinstance(node, ast.BinOp):
            out = _BINARY[type(node.op)](self._value(node.left, names), self._value(node.right, names))
        elif isinstance(node, ast.UnaryOp):
            out = _UNARY[type(node.op)](self._value(node.operand, names))
        elif isinstance(node, ast.BoolOp):
            stop = isinstance(node.op, ast.Or)
            return int(stop if any(bool(self._value(v, names)) == stop for v in node.values) else not stop)
        elif isinstance(node, ast.Compare):
            terms = [self._value(n, names) for n in (node.left, *node.comparators)]
            return int(all(_COMPARE[type(op)](a, b) for op, a, b in zip(node.ops, terms, terms[1:])))
        elif isinstance(node, ast.IfExp):
            return self._value(node.body if self._value(node.test, names) else node.orelse, names)
        else:
            assert isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
            out = _CALLS[node.func.id](*(self._value(a, names) for a in node.args))
        if not -_LIMIT <= out < _LIMIT:
            raise OverflowError("a value beyond 64 bits")
        return out


def parse_lanes(text: str, name: str = "lanes") -> frozenset[int]:
    """Active lanes: ``all``, ``none``, a mask ``0x0000ffff``, or a list with ranges ``0-15,20,24-31:2``."""
    word = text.strip().lower()
    if word in ("all", "none"):
        return frozenset(range(WARP)) if word == "all" else frozenset()
    if re.fullmatch(r"0x[0-9a-f]{1,8}", word):
        mask = int(word, 16)
        return frozenset(lane for lane in range(WARP) if mask >> lane & 1)
    lanes: set[int] = set()
    for part in word.split(","):
        match = re.fullmatch(r"\s*(\d{1,3})(?:-(\d{1,3})(?::(\d{1,3}))?)?\s*", part)
        require(
            match is not None, name, repr(text[:80]), "all, none, a mask like 0xffff, or a list like 0-15,20"
        )
        assert match is not None
        first, step = int(match[1]), int(match[3] or 1)
        last = int(match[2]) if match[2] else first
        require(
            first <= last < WARP and step > 0, name, repr(part), "lanes 0 to 31, ascending, step 1 or more"
        )
        lanes.update(range(first, last + 1, step))
    return frozenset(lanes)


def parse_size(text: str, width: int, name: str) -> int:
    """A distance in bytes: ``3`` is three elements of ``width`` bytes, ``12B`` is twelve bytes."""
    match = re.fullmatch(r"\s*([+-]?\d{1,18})\s*(B|b|bytes)?\s*", text)
    require(match is not None, name, repr(text[:40]), "a whole number of elements (2) or of bytes (8B)")
    assert match is not None
    return int(match[1]) * (1 if match[2] else width)


def parse_addrs(text: str) -> tuple[int | None, ...]:
    """Explicit byte addresses, comma or space separated; ``-``, ``x`` or ``null`` is an inactive lane."""
    out: list[int | None] = []
    for part in re.split(r"[,\s]+", text.strip().strip("[]")):
        if part.lower() in ("-", "x", "null", "none"):
            out.append(None)
        else:
            match = re.fullmatch(r"0[xX][0-9a-fA-F]{1,16}|\d{1,19}", part)
            require(
                match is not None,
                f"addrs[{len(out)}]",
                repr(part[:40]),
                "a byte address, or - for an inactive lane",
            )
            out.append(int(part, 0) if part.lower().startswith("0x") else int(part))
        require(len(out) <= WARP, "addrs", "more than 32 lanes", "at most 32 (one warp)")
    return tuple(out)


def strided(
    space: str,
    op: str,
    width: int,
    stride: int,
    offset: int = 0,
    lanes: frozenset[int] = frozenset(range(WARP)),
) -> Pattern:
    """Lane ``n`` at byte ``offset + n * stride`` (both in bytes)."""
    return Pattern(space, op, width, tuple(offset + n * stride if n in lanes else None for n in range(WARP)))


def from_expression(
    space: str,
    op: str,
    width: int,
    address: Expression,
    *,
    elements: bool = False,
    where: Expression | None = None,
    lanes: frozenset[int] = frozenset(range(WARP)),
    warps: int = 1,
    iters: int = 1,
) -> list[Pattern]:
    """One instruction per (warp, i): byte addresses, or element indices when ``elements``."""
    for name, value in (("warps", warps), ("iters", iters)):
        require(value >= 1, name, value, "1 or more")
    require(
        warps * iters <= MAX_REQUESTS, "warps x iters", warps * iters, f"at most {MAX_REQUESTS} instructions"
    )
    scale = width if elements else 1
    return [
        Pattern(
            space,
            op,
            width,
            tuple(
                address(lane, warp, i) * scale
                if lane in lanes and (where is None or where(lane, warp, i))
                else None
                for lane in range(WARP)
            ),
        )
        for warp in range(warps)
        for i in range(iters)
    ]
