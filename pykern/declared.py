"""What a new op's author may get wrong: the declaration, and the plan that it gives, checked before a launch."""

from __future__ import annotations

import ast
import keyword
import operator
import re
from collections.abc import Callable, Sequence
from typing import Any, get_args

from pykern.errors import ArgumentError, require
from pykern.plan import F32, I32, I64, In, Launch, OutPtr, Plan, Run, TensorMap, Workspace, Ws
from pykern.schema import DTYPE_CODES, ITEMSIZE, Out, Problem, Role, Scalar, Strides, Tensor

# The launcher's: of a call, of a plan and of a launch (pykern/launcher/launcher.cpp).
MOST = {"tensors": 48, "scalars": 32, "outputs": 8, "arguments": 64, "launches": 8, "workspaces": 8, "maps": 4}
TYPES: dict[str, type | tuple[type, ...]] = {"float": (float, int), "int": int, "bool": bool, "str": str}
RUN_TYPES = ("f32", "i32", "i64")


# ---- the declaration


def check_declaration(op: Any) -> None:
    """ArgumentError for an :class:`pykern.op.Op` that no call could be made of."""
    where = f"op {op.name!r}"
    require(
        isinstance(op.name, str) and re.fullmatch(r"[a-z][a-z0-9_]{0,59}", op.name) is not None
        and not keyword.iskeyword(op.name),
        "op.name", repr(op.name), "lower-case letters, digits and _, no keyword of Python",
    )  # fmt: skip
    for name, kinds in (("inputs", (Tensor, Scalar)), ("outputs", (Out,))):
        made = getattr(op, name)
        if not isinstance(made, tuple) or not all(isinstance(a, kinds) for a in made):
            raise ArgumentError(
                f"{where}: {name}", repr(made)[:120], f"a tuple of {' and '.join(k.__name__ for k in kinds)}"
            )
    for name in ("plan", "reference", "tolerance", "cases", "draw", "nbytes", "flops"):
        require(callable(getattr(op, name)), f"{where}: {name}", repr(getattr(op, name)), "a function")
    tensors = [a for a in op.inputs if isinstance(a, Tensor)]
    counts = {"tensors": len(tensors), "scalars": len(op.inputs) - len(tensors), "outputs": len(op.outputs)}
    for what, count in counts.items():
        require(count <= MOST[what], f"{where}: {what}", count, f"at most {MOST[what]}")
    require(
        len(op.inputs) + len(op.outputs) <= MOST["arguments"], f"{where}: arguments",
        len(op.inputs) + len(op.outputs), f"at most {MOST['arguments']}",
    )  # fmt: skip
    seen: set[str] = set()
    for a in (*op.inputs, *op.outputs):
        good = isinstance(a.name, str) and a.name.isidentifier() and not keyword.iskeyword(a.name)
        if not good or (a.name == "out" and a in op.inputs) or a.name.startswith("_") or a.name in seen:
            raise ArgumentError(f"{where}: argument", repr(a.name), "names of Python, each once, not 'out', no first _")
        seen.add(a.name)
    bound: set[str] = set()
    for t in tensors:
        _tensor(where, t, [other.name for other in tensors], bound)
    for s in op.inputs:
        if isinstance(s, Scalar):
            _scalar(where, s)
    for o in op.outputs:
        _output(where, o, [t.name for t in tensors], bound)
    inputs = {a.name for a in op.inputs}
    for what, names in (("inplace", op.inplace), ("rowwise", [n for n, _ in op.rowwise])):
        for name in names:
            require(name in inputs, f"{where}: {what}", repr(name), ", ".join(sorted(inputs)))
    if op.keyword_only:
        require(op.keyword_only in inputs, f"{where}: keyword_only", repr(op.keyword_only), ", ".join(sorted(inputs)))


def _tensor(where: str, t: Tensor, names: Sequence[str], bound: set[str]) -> None:
    at = f"{where}: {t.name}"
    require(t.role in get_args(Role), f"{at}.role", repr(t.role), ", ".join(get_args(Role)))
    require(t.strides in get_args(Strides), f"{at}.strides", repr(t.strides), ", ".join(get_args(Strides)))
    if isinstance(t.dtypes, str):
        like = t.dtypes.removeprefix("like ")
        good = t.dtypes.startswith("like ") and like in names
        require(good, f"{at}.dtypes", repr(t.dtypes), "a tuple of names, or 'like <a tensor>'")
    else:
        for dtype in t.dtypes:
            require(dtype in DTYPE_CODES, f"{at}.dtypes", repr(dtype), ", ".join(DTYPE_CODES))
    if not t.many:
        bound |= _dims(f"{at}.dims", t.dims, bound, binds=True)


def _scalar(where: str, s: Scalar) -> None:
    at = f"{where}: {s.name}"
    require(s.type in TYPES, f"{at}.type", repr(s.type), ", ".join(TYPES))
    if not s.required:
        fits = isinstance(s.default, TYPES[s.type]) and (s.type == "bool") == isinstance(s.default, bool)
        require(fits, f"{at}.default", repr(s.default), f"a {s.type}, or required=True")
        require(not s.choices or s.default in s.choices, f"{at}.default", repr(s.default), f"one of {s.choices}")


def _output(where: str, o: Out, tensors: Sequence[str], bound: set[str]) -> None:
    at = f"{where}: {o.name}"
    if isinstance(o.dims, str):
        _dims(f"{at}.dims", o.dims, bound, binds=False)
    if isinstance(o.dtype, str):
        like = o.dtype.removeprefix("like ")
        good = like in tensors if o.dtype.startswith("like ") else o.dtype in DTYPE_CODES
        require(good, f"{at}.dtype", repr(o.dtype), f"'like <a tensor>', or one of {', '.join(DTYPE_CODES)}")


def _dims(at: str, dims: Any, bound: set[str], binds: bool) -> set[str]:
    """The names of a dimension string; those that an expression needs must be bound."""
    require(isinstance(dims, str), at, repr(dims), "names and numbers apart by spaces, such as '*b m n'")
    found: set[str] = set()
    for n, token in enumerate(dims.split()):
        plain = token[1:] if token.startswith("*") and n == 0 else token
        try:
            names = {node.id for node in ast.walk(ast.parse(plain, mode="eval")) if isinstance(node, ast.Name)}
        except SyntaxError:
            raise ArgumentError(
                at, repr(token), "a name (* before the first only), a number or an expression"
            ) from None
        free = binds and plain.isidentifier()
        missing = set() if free else names - bound - found - {"_"}
        if missing:
            raise ArgumentError(at, repr(token), f"names bound by an input before: {', '.join(sorted(bound | found))}")
        found |= names
    return found


# ---- the plan


def check_arguments(op: Any, problem: Problem, plan: Any) -> None:
    """ArgumentError for a plan that points at what the op does not have, or holds more than a call may."""
    where = f"{op.name}: plan"
    require(isinstance(plan, Plan), where, type(plan).__name__, "a pykern.plan.Plan")
    for name, kind in (("launches", Launch), ("workspaces", Workspace)):
        made = getattr(plan, name)
        if not isinstance(made, (tuple, list)) or not all(isinstance(v, kind) for v in made):
            raise ArgumentError(f"{where}.{name}", repr(made)[:120], f"a tuple of {kind.__name__}")
        require(len(made) <= MOST[name], f"{where}.{name}", len(made), f"at most {MOST[name]}")
    for i, w in enumerate(plan.workspaces):
        _integer(f"{where}.workspaces[{i}].nbytes", w.nbytes, 0, 1 << 62)
    for n, launch in enumerate(plan.launches):
        at = f"{op.name}: launch {n} ({launch.kernel})"
        for name in ("grid", "block", "cluster"):
            v = getattr(launch, name)
            parts = v if isinstance(v, tuple) else (v,)
            good = len(parts) in (1, 3) and (len(parts) == 3) == isinstance(v, tuple)
            if not good or any(isinstance(p, bool) or not isinstance(p, int) for p in parts):
                raise ArgumentError(f"{at} {name}", repr(v), "an int, or three of them")
        _integer(f"{at} smem", launch.smem, -1, 1 << 62)
        require(len(launch.args) <= MOST["arguments"], f"{at} args", len(launch.args), f"at most {MOST['arguments']}")
        maps = sum(isinstance(a, TensorMap) for a in launch.args)
        require(maps <= MOST["maps"], f"{at} tensor maps", maps, f"at most {MOST['maps']}")
        for i, a in enumerate(launch.args):
            _argument(f"{at} args[{i}]", a, op, problem, plan)


_POINTS: dict[type, Callable[[Any, Any], Sequence[str]]] = {
    In: lambda op, problem: [a.name for a in op.inputs if isinstance(a, Tensor)],
    OutPtr: lambda op, problem: [o.name for o in op.outputs],
    Run: lambda op, problem: [a.name for a in op.inputs if isinstance(a, Scalar)],
}


def _argument(at: str, a: Any, op: Any, problem: Problem, plan: Plan) -> None:
    if isinstance(a, TensorMap):
        require(isinstance(a.tensor, (In, OutPtr, Ws)), at, repr(a.tensor), "In, OutPtr, Ws")
        require(a.dtype in ITEMSIZE, f"{at}.dtype", repr(a.dtype), ", ".join(ITEMSIZE))
        _argument(at, a.tensor, op, problem, plan)
    elif isinstance(a, (In, OutPtr, Run)):
        names = _POINTS[type(a)](op, problem)
        require(a.name in names, at, repr(a), f"{type(a).__name__} of {', '.join(names) or 'nothing: there is none'}")
        if isinstance(a, In):
            given = problem.tensors.get(a.name)
            count = len(given) if isinstance(given, tuple) else 1
            require(0 <= a.item < count, at, repr(a), f"items 0..{count - 1}")
        if isinstance(a, Run):
            require(a.type in RUN_TYPES, at, repr(a), ", ".join(RUN_TYPES))
    elif isinstance(a, Ws):
        count = len(plan.workspaces)
        require(0 <= a.index < count, at, repr(a), f"one of the plan's {count} workspaces")
    elif isinstance(a, (I32, I64)):
        bits = 32 if isinstance(a, I32) else 64
        _integer(at, a.value, -(1 << (bits - 1)), (1 << (bits - 1)) - 1)
    elif isinstance(a, F32):
        good = isinstance(a.value, (int, float)) and not 3.4028236e38 <= abs(a.value) < float("inf")
        require(good, at, repr(a), "a float within float32's range")
    else:
        raise ArgumentError(at, f"{type(a).__name__} {a!r}"[:80], "In, OutPtr, Ws, I32, I64, F32, Run, TensorMap")


def _integer(at: str, value: Any, low: int, high: int) -> None:
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(at, repr(value), "an int") from None
    require(low <= number <= high, at, value, f"{low}..{high}")
