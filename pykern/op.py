"""Op = schema + reference + plan. The registry, the public functions, and the bridge to torch.library.

An op is one module ``pykern/ops/<name>.py`` that binds ``op = Op(...)``; modules are discovered, not listed. Nothing
here imports torch until an op is called.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pykern import plan as plans
from pykern.declared import check_arguments, check_declaration
from pykern.errors import ArgumentError, CaptureError, brief
from pykern.plan import Plan, Target, check_plan, host_target
from pykern.schema import (
    DTYPE_CODES,
    DTYPE_NAMES,
    Out,
    Problem,
    Scalar,
    Tensor,
    TensorInfo,
    build_problem,
    contiguous_strides,
    output_info,
    overlaps_itself,
)

Case = dict[str, Any]  # argument name -> Spec | list[Spec] | scalar | None


class Draw(Protocol):
    """What an op's ``draw`` gets: calls draw from a Hypothesis strategy, ``one_of`` picks one of some values."""

    def __call__(self, strategy: Any) -> Any: ...

    def one_of(self, values: Sequence[Any]) -> Any: ...


SPEC_LAYOUTS = ("contiguous", "rows", "offset", "expanded", "transposed")


@dataclass(frozen=True)
class Spec:
    """A tensor to make up: dtype, shape, and how it lies in memory.

    ``layout``: ``contiguous``; ``rows`` (padding between rows); ``offset`` (starts inside its storage, misaligned);
    ``expanded`` (first axis stride 0); ``transposed`` (last two axes swapped in memory).
    ``fill``: what values it gets (``normal``, ``spiky``, ``uniform``, ``zeros``, ``ties``, or an op's own word handled
    by its ``make``).
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = "contiguous"
    fill: str = "normal"

    def __post_init__(self) -> None:
        if self.layout not in SPEC_LAYOUTS:  # a misspelt one would be a contiguous tensor, and test nothing
            raise ArgumentError("layout", repr(self.layout), ", ".join(SPEC_LAYOUTS))
        if self.dtype not in DTYPE_CODES:
            raise ArgumentError("dtype", repr(self.dtype), ", ".join(DTYPE_CODES))


@dataclass(frozen=True)
class Tolerance:
    """Allowed error against the float64 reference: ``|y - ref| <= atol + rtol * |ref|``, and why that much."""

    rtol: float
    atol: float
    reason: str = ""


@dataclass(frozen=True)
class Op:
    """One op. See ``pykern/ops/softmax.py`` for the pattern and docs/add_a_kernel.md for the walk-through.

    ``plan(problem, target)`` is pure. ``reference(**args)`` takes and returns torch tensors (float64 maths).
    ``tolerance(dtype)`` by the dtype of the first output. ``cases()`` yields argument sets that together reach every
    variant the plan can choose (used by ``make compile``, warmup, and the finite-variants law). ``draw(draw)`` draws
    one Case for Hypothesis, with sizes around plan boundaries, small enough for the host backend. ``make(case, rng)``
    returns torch arguments for cases that are not just random floats. ``check(problem)`` raises ArgumentError for what
    the schema cannot say. ``nbytes``/``flops``: compulsory traffic and arithmetic of a problem. ``unpack(result,
    args)`` turns the raw tuple into what the user gets. ``inplace``: inputs that ``out`` may be the same view as.
    ``benches``: problems to time; ``peers``: functions of the same arguments to time beside them.
    ``rowwise``: (input, axis) pairs that hold independent rows; outputs have rows on axis 0 (batch-invariance law).
    """

    name: str
    source: str
    inputs: tuple[Tensor | Scalar, ...]
    outputs: tuple[Out, ...]
    plan: Callable[[Problem, Target], Plan]
    reference: Callable[..., Any]
    tolerance: Callable[[str], Tolerance]
    cases: Callable[[], Iterable[Case]]
    draw: Callable[[Draw], Case]
    nbytes: Callable[[Problem], int]
    flops: Callable[[Problem], int]
    doc: str = ""
    make: Callable[[Case, Any], dict[str, Any]] | None = None
    check: Callable[[Problem], None] | None = None
    unpack: Callable[[Any, Mapping[str, Any]], Any] | None = None
    inplace: tuple[str, ...] = ()
    rowwise: tuple[tuple[str, int], ...] = ()
    keyword_only: str = ""  # first argument that is keyword-only in the public function
    declares_local: tuple[str, ...] = ()  # kernel name prefixes that may use local memory, with a reason in the source
    benches: tuple[Case, ...] = ()
    peers: Mapping[str, Callable[..., Any]] = field(default_factory=dict)  # name -> same call in another library
    mutants: tuple[tuple[str, str], ...] = ()  # (text in the source, wrong text): planted errors the laws must catch
    no_mutants: str = ""  # why there are none, where there are none

    def __post_init__(self) -> None:
        check_declaration(self)

    @property
    def mutated(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.inputs if isinstance(a, Tensor) and a.role == "mutated")

    def given_as(self, output: Out) -> str:
        """What a caller knows ``output`` as: an op's only one is ``out``."""
        return "out" if len(self.outputs) == 1 else output.name

    def problem(self, values: Mapping[str, Any], outs: Mapping[str, TensorInfo] | None = None) -> Problem:
        """Checked :class:`Problem` of ``values`` (TensorInfo, scalar or None by argument name)."""
        problem = build_problem(self.inputs, values, outs)
        if self.check is not None:
            self.check(problem)
        for spec, (dtype, shape) in zip(self.outputs, (output_info(problem, o) for o in self.outputs), strict=True):
            given = problem.outs.get(spec.name)
            if given is None:
                continue
            name = self.given_as(spec)
            if given.dtype != dtype:
                raise ArgumentError(f"{name}.dtype", given.dtype, dtype)
            if given.shape != tuple(shape):
                raise ArgumentError(f"{name}.shape", given.shape, str(tuple(shape)))
            if not given.contiguous:
                raise ArgumentError(f"{name}.stride()", given.strides, f"contiguous {contiguous_strides(shape)}")
            if overlaps_itself(given.shape, given.strides):
                raise ArgumentError(f"{name}.stride()", given.strides, "elements that do not overlap")
            if (given.device, given.index) != (problem.device, problem.index):
                raise ArgumentError(f"{name}.device", given.device, problem.device)
        return problem

    def problem_of(self, case: Case) -> Problem:
        """The problem of a :data:`Case`, without making tensors."""
        values: dict[str, Any] = {}
        for key, v in case.items():
            values[key] = (
                tuple(map(spec_info, v)) if isinstance(v, list) else spec_info(v) if isinstance(v, Spec) else v
            )
        return self.problem(values)

    def problem_of_args(self, args: Mapping[str, Any]) -> Problem:
        """The problem of torch arguments given by name."""
        import torch

        def info(v: Any) -> Any:
            if isinstance(v, torch.Tensor):
                return tensor_info(v, torch)
            return tuple(map(info, v)) if isinstance(v, (list, tuple)) else v

        return self.problem({k: info(v) for k, v in args.items()})

    def planned(self, problem: Problem, target: Target) -> Plan:
        """``plan``, checked against the limits of ``target``; nothing to do when every output is empty."""
        if not self.mutated and all(0 in output_info(problem, o)[1] for o in self.outputs):
            return Plan(variant="empty", numerics="empty", why=("nothing to compute: every output is empty",))
        made = self.plan(problem, target)
        check_arguments(self, problem, made)
        made = replace(made, launches=tuple(replace(la, source=la.source or self.source) for la in made.launches))
        check_plan(made, target, self.name)
        return made

    @property
    def public(self) -> Callable[..., Any]:
        """The function users call: ``pykern.<name>``."""
        return runtime().public(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.public(*args, **kwargs)


def spec_info(spec: Spec) -> TensorInfo:
    """TensorInfo of a tensor made from ``spec`` by :func:`pykern.testing.make_tensor`."""
    shape, item = spec.shape, _itemsize(spec.dtype)
    strides, align = contiguous_strides(shape), 256
    if spec.layout == "rows" and len(shape) >= 2:
        pad = shape[-1] + row_pad(spec.dtype)
        strides = (*(s * pad for s in contiguous_strides(shape[:-1])), 1)
    elif spec.layout == "offset":
        align = (item * 3) & -(item * 3)
    elif spec.layout == "expanded" and shape:
        strides = (0, *contiguous_strides(shape)[1:])
    elif spec.layout == "transposed" and len(shape) >= 2:
        swapped = contiguous_strides((*shape[:-2], shape[-1], shape[-2]))
        strides = (*swapped[:-2], swapped[-1], swapped[-2])
    return TensorInfo(spec.dtype, shape, strides, align)


def row_pad(dtype: str) -> int:
    """Elements between the rows of a ``rows`` layout: an odd number for 1-byte types, else 8 bytes' worth."""
    return max(1, 8 // _itemsize(dtype)) if _itemsize(dtype) > 1 else 3


def _itemsize(dtype: str) -> int:
    from pykern.schema import ITEMSIZE

    return ITEMSIZE[dtype]


# ---- the registry


_registry: dict[str, Op] = {}
_registry_lock = threading.Lock()
_files: dict[str, Op] = {}  # ops loaded by path


def names() -> list[str]:
    """Names of the ops of the package, sorted (from file names; imports nothing)."""
    ops = importlib.import_module("pykern.ops")
    return sorted(m.name for m in pkgutil.iter_modules(ops.__path__) if not m.name.startswith("_"))


def get(name: str) -> Op:
    """The op called ``name``, or the one a ``.py`` file binds (:func:`load`); ArgumentError lists what there is."""
    if not isinstance(name, str):
        raise ArgumentError("op", repr(name)[:80], "an op's name or the path of a .py file")
    found = _registry.get(name)
    if found is not None:
        return found
    if name.endswith(".py"):
        return load(name)
    if name not in names():
        raise ArgumentError("op", brief(name), _instead_of(name))
    module = importlib.import_module(f"pykern.ops.{name}")
    with _registry_lock:
        return _registry.setdefault(name, module.op)


def _instead_of(name: str) -> str:
    """What to give in place of a name that no op has."""
    if os.sep in name or name.endswith((".cuh", ".cu", ".h")):
        file = f"ops/{os.path.basename(name)}"
        of = [op.name for op in all_ops() if not os.path.isabs(op.source) and file in _closure(op.source)]
        if of:
            return f"an op's name; this file belongs to {', '.join(of)}"
        return (
            "an op's name, or the .py file that binds one (`pykern check` and `pykern occupancy` take a kernel's .cuh "
            "file, too)"
        )
    known = sorted({*names(), *_registry})
    near = difflib.get_close_matches(name.lower().rpartition(".")[2], known, 3)
    return ", ".join([*near, *(other for other in known if other not in near)])  # the likely ones first


def _closure(source: str) -> Iterable[str]:
    from pykern.jit import sources

    try:
        return sources.closure(sources.locate(source))
    except (ArgumentError, OSError):
        return ()


def all_ops() -> list[Op]:
    """Every op of the package, and those added by :func:`register`."""
    return [get(n) for n in sorted({*names(), *_registry})]


def register(op: Op) -> Op:
    """Add an op that does not live in the package (its ``source`` may be an absolute path to a .cuh file)."""
    if not isinstance(op, Op):
        raise ArgumentError("op", f"{type(op).__name__} {op!r}"[:80], "a pykern.op.Op")
    with _registry_lock:
        if op.name in _registry and _registry[op.name] is not op:
            raise ArgumentError("op.name", repr(op.name), "a name that is not taken")
        _registry[op.name] = op
    return op


def load(path: str) -> Op:
    """The op that a file outside the package binds as ``op = Op(...)``, registered: what commands take as ``OP``."""
    import importlib.util
    import sys

    allowed = "a .py file that binds op = pykern.op.Op(...)"
    if not os.path.isfile(path):
        raise ArgumentError("op", repr(path), f"{allowed} (no such file)")
    real = os.path.realpath(path)
    if real in _files:
        return _files[real]
    for module in list(sys.modules.values()):  # imported already, by a test or a script
        if os.path.realpath(getattr(module, "__file__", None) or "") == real and isinstance(vars(module).get("op"), Op):
            return register(module.op)
    name = os.path.splitext(os.path.basename(path))[0]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    folder = os.path.dirname(os.path.abspath(path))
    sys.path.insert(0, folder)  # as for a script: the file may import its neighbours
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == path]
        line = getattr(error, "lineno", None) or (frames[-1].lineno if frames else "?")
        raise ArgumentError("op", repr(path), f"{allowed} (line {line}: {type(error).__name__}: {error})") from error
    finally:
        sys.path.remove(folder)
    found = getattr(module, "op", None)
    if not isinstance(found, Op):
        raise ArgumentError("op", repr(path), f"{allowed} (it binds {type(found).__name__})")
    _files[real] = register(found)
    return found


def sample_plans(target: Target, only: Sequence[str] = ()) -> Iterator[tuple[Op, Problem, Plan]]:
    """Every op's declared cases, planned for ``target``: together they reach every variant."""
    for op in all_ops():
        if only and op.name not in only:
            continue
        for case in op.cases():
            problem = op.problem_of(case)
            yield op, problem, op.planned(problem, target)


# ---- host options (per thread)


@dataclass(frozen=True)
class HostOptions:
    """How CPU calls of this thread run. ``check``: under the checker. ``trace``: count memory traffic per line, no
    findings raised. ``seed``: the schedule (0: in order). ``async_order``: when deferred copies land."""

    arch: str = "90a"
    check: bool = False
    trace: bool = False
    seed: int = 0
    async_order: str = "eager"
    threads: int = 0
    sms: int = 4

    def target(self) -> Target:
        return host_target(self.arch, self.sms)


ASYNC_ORDERS = ("eager", "lazy", "random")
_local = threading.local()


def host_options() -> HostOptions:
    """The options in force on this thread."""
    return getattr(_local, "options", None) or HostOptions()


@contextmanager
def host(
    *,
    arch: str | None = None,
    check: bool | None = None,
    trace: bool | None = None,
    seed: int | None = None,
    async_order: str | None = None,
    threads: int | None = None,
    sms: int | None = None,
) -> Iterator[HostOptions]:
    """Vary how CPU tensors run, on this thread, inside ``with``: see :class:`HostOptions`. Settings nest."""
    before = host_options()
    given: dict[str, Any] = {"arch": arch, "check": check, "trace": trace, "seed": seed, "async_order": async_order}
    given |= {"threads": threads, "sms": sms}
    new = replace(before, **{k: v for k, v in given.items() if v is not None})
    if new.async_order not in ASYNC_ORDERS:
        raise ArgumentError("async_order", repr(new.async_order), ", ".join(ASYNC_ORDERS))
    for name in ("check", "trace"):
        if not isinstance(getattr(new, name), bool):
            raise ArgumentError(name, repr(getattr(new, name)), "True or False")
    for name, low, high in (("seed", 0, 2**63 - 1), ("threads", 0, 1024), ("sms", 1, 1024)):
        value = getattr(new, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ArgumentError(name, repr(value), f"an int in {low}..{high}")
    if not isinstance(new.arch, str):
        raise ArgumentError("arch", repr(new.arch), "a str such as '90a'")
    new.target()
    _set_host(new)
    try:
        yield new
    finally:
        _set_host(before)


def _set_host(options: HostOptions) -> None:
    _local.options = options
    live = _live()
    if live is not None:
        live.apply_host(options)


# ---- torch


def runtime() -> Any:
    """The process's :class:`pykern.bridge.Runtime`, made at first use (builds or loads the launcher)."""
    from pykern import bridge

    return bridge.runtime()


def tensor_info(t: Any, torch: Any) -> TensorInfo:
    """TensorInfo of a torch tensor (sizes may be SymInts)."""
    name = str(t.dtype).removeprefix("torch.")
    align = 256
    if type(t) is torch.Tensor:  # a traced tensor has no address
        address = t.data_ptr() | 256
        align = address & -address
    return TensorInfo(name, tuple(t.shape), tuple(t.stride()), align, t.device.type, t.device.index or 0)


def _live() -> Any:
    """The Runtime, if there is one yet."""
    bridge = sys.modules.get("pykern.bridge")
    return None if bridge is None else bridge._runtime


def register_all() -> None:
    """Register every op with torch, so that ``torch.ops.pykern.<name>`` is there before ``pykern.<name>`` is used."""
    for op in all_ops():
        op.public  # noqa: B018


def use_tuning(tuning: str | os.PathLike[str] | None) -> None:
    """Put a tuning file into force (its path, or its JSON text; None: none); plans are made anew.

    ``{"90a": {"softmax": {"key": value}}}``: by architecture and op. ArgumentError for anything else, and for an
    architecture or op that does not exist (one of your own: register it first).
    """
    plans.tuning = _tuning(tuning)
    if (live := _live()) is not None:
        live.forget_plans()


def _tuning(given: str | os.PathLike[str] | None) -> plans.Tuning:
    if given is None:
        return plans.Tuning()
    what = "a JSON file {arch: {op: {key: value}}}, or its text"
    if not isinstance(given, (str, os.PathLike)):
        raise ArgumentError("tuning", f"{type(given).__name__} {given!r}"[:80], f"{what}, or None")
    text = os.fspath(given)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ArgumentError("tuning", repr(text)[:80], f"{what}, or None")
    if isinstance(given, os.PathLike) or text.lstrip()[0] not in "{[":
        if not os.path.isfile(text):
            why = "a folder" if os.path.isdir(text) else "not a plain file" if os.path.exists(text) else "no such file"
            raise ArgumentError("tuning", repr(text)[:200], f"{what} ({why})")
        try:
            with open(text, encoding="utf-8") as file:
                text = file.read()
        except (OSError, UnicodeError) as error:
            raise ArgumentError("tuning", repr(text)[:200], f"{what} ({error})") from error
    found = plans.Tuning.load(text)
    known = {*names(), *_registry}
    for arch, ops in found.table.items():
        if arch not in plans.TARGETS:
            raise ArgumentError("tuning file", f"architecture {arch!r}", ", ".join(plans.TARGETS))
        for op in ops:
            if op not in known:
                raise ArgumentError("tuning file", f"op {op!r}", ", ".join(sorted(known)))
    return found


def refuse_capture(what: str) -> None:
    """Raise CaptureError when a CUDA graph is being captured on the current stream."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise CaptureError(
            f"{what} would have to be compiled during CUDA graph capture; run `pykern warmup` or one call first"
        )


__all__ = [
    "DTYPE_NAMES", "Case", "HostOptions", "Op", "Spec", "Tolerance", "all_ops", "get", "host", "host_options", "names",
    "register", "runtime", "sample_plans", "use_tuning",
]  # fmt: skip
