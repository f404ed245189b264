"""Op = schema + reference + plan. The registry, the public functions, and the bridge to torch.library.

An op is one module ``pykern/ops/<name>.py`` that binds ``op = Op(...)``; modules are discovered, not listed. Nothing
here imports torch until an op is called.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from pykern import plan as plans
from pykern.errors import ArgumentError, CaptureError, GradientError, KernelError
from pykern.plan import Launch, Plan, Target, check_plan, host_target
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


@dataclass(frozen=True)
class Spec:
    """A tensor to make up: dtype, shape, and how it lies in memory.

    ``layout``: ``contiguous``; ``rows`` (padding between rows); ``offset`` (starts inside its storage, misaligned);
    ``expanded`` (first axis stride 0); ``transposed`` (last two axes swapped in memory).
    ``fill``: what values it gets (``normal``, ``spiky``, or an op's own word handled by its ``make``).
    """

    dtype: str
    shape: tuple[int, ...]
    layout: str = "contiguous"
    fill: str = "normal"


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

    @property
    def mutated(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.inputs if isinstance(a, Tensor) and a.role == "mutated")

    def problem(self, values: Mapping[str, Any], outs: Mapping[str, TensorInfo] | None = None) -> Problem:
        """Checked :class:`Problem` of ``values`` (TensorInfo, scalar or None by argument name)."""
        problem = build_problem(self.inputs, values, outs)
        if self.check is not None:
            self.check(problem)
        for spec, (dtype, shape) in zip(self.outputs, (output_info(problem, o) for o in self.outputs), strict=True):
            given = problem.outs.get(spec.name)
            if given is None:
                continue
            if given.dtype != dtype:
                raise ArgumentError(f"{spec.name}.dtype", given.dtype, dtype)
            if given.shape != tuple(shape):
                raise ArgumentError(f"{spec.name}.shape", given.shape, str(tuple(shape)))
            if not given.contiguous:
                raise ArgumentError(f"{spec.name}.stride()", given.strides, f"contiguous {contiguous_strides(shape)}")
            if overlaps_itself(given.shape, given.strides):
                raise ArgumentError(f"{spec.name}.stride()", given.strides, "elements that do not overlap")
            if (given.device, given.index) != (problem.device, problem.index):
                raise ArgumentError(f"{spec.name}.device", given.device, problem.device)
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
    found = _registry.get(name)
    if found is not None:
        return found
    if name.endswith(".py"):
        return load(name)
    if name not in names():
        raise ArgumentError("op", repr(name), ", ".join(sorted({*names(), *_registry})))
    module = importlib.import_module(f"pykern.ops.{name}")
    with _registry_lock:
        return _registry.setdefault(name, module.op)


def all_ops() -> list[Op]:
    """Every op of the package, and those added by :func:`register`."""
    return [get(n) for n in sorted({*names(), *_registry})]


def register(op: Op) -> Op:
    """Add an op that does not live in the package (its ``source`` may be an absolute path to a .cuh file)."""
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
    if not 0 <= new.seed < 2**63:
        raise ArgumentError("seed", new.seed, "0..2**63-1")
    if new.threads < 0 or new.sms < 1:
        raise ArgumentError("threads, sms", (new.threads, new.sms), "threads >= 0, sms >= 1")
    new.target()
    _set_host(new)
    try:
        yield new
    finally:
        _set_host(before)


def _set_host(options: HostOptions) -> None:
    _local.options = options
    live = _runtime
    if live is not None:
        live.apply_host(options)


# ---- the bridge to torch


@dataclass
class _Slot:
    op: Op
    out_form: bool
    spec: str = ""
    args: tuple[Tensor | Scalar, ...] = field(default=())


class Runtime:
    """Everything that needs torch: registration, the planner callback, public functions. One per process."""

    def __init__(self) -> None:
        import torch

        from pykern.jit import build, watch

        self.torch = torch
        self.cuda = torch.cuda.is_available()
        self.library = torch.library.Library("pykern", "FRAGMENT")
        self.host_runtime: Any = None  # on a GPU machine the first CPU call brings it: its build takes seconds
        if self.cuda:
            self.launcher = build.launcher(True)
        else:
            self.launcher, self.host_runtime = build.prepare(False)
        self.slots: list[_Slot] = []
        self.functions: dict[str, Callable[..., Any]] = {}
        self.lock = threading.RLock()
        self.plan_locks: dict[tuple[int, bytes], threading.Lock] = {}
        self.targets: dict[int, Target] = {}
        self._words: dict[tuple[Any, ...], int] = {}
        self._bind()
        watch.start(self.forget_plans, self._outside)

    def _bind(self) -> None:
        import ctypes

        lib = self.launcher
        lib.pkl_misses.restype = ctypes.c_int64
        lib.pkl_memo_size.restype = ctypes.c_int64
        lib.pkl_host_options.argtypes = [ctypes.c_int] * 3 + [
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int64,
        ]
        lib.pkl_init.argtypes = [ctypes.py_object] * 3 + [ctypes.c_void_p] * 3

        def address(name: str) -> int | None:
            function = getattr(self.host_runtime, name, None)
            return None if function is None else ctypes.cast(function, ctypes.c_void_p).value

        lib.pkl_init(
            self.planner,
            self.raiser,
            self.on_checked,
            address("pkh_run_sequence"),
            address("pkh_error"),
            address("pkh_tensor_map"),
        )
        self.apply_host(host_options())

    def _need_host(self) -> None:
        """Before the first plan for CPU tensors: load the host runtime and tell the launcher."""
        if self.host_runtime is None:
            from pykern.jit import build

            runtime = build.host_runtime()
            with self.lock:
                if self.host_runtime is None:
                    self.host_runtime = runtime
                    self._bind()

    # -- callbacks of the launcher

    def raiser(self, kind: str, message: str) -> None:
        if kind == "gradient":
            raise GradientError(
                f"pykern.{message}: a gradient was asked of an inference-only op "
                "(an input requires grad); call it under torch.no_grad() or detach the input"
            )
        raise {"argument": ArgumentError, "kernel": KernelError}.get(kind, KernelError)(message)

    def on_checked(self, slot: int, failed: int) -> None:
        from pykern import check

        check.collect(self.slots[slot].op.name, bool(failed), self.host_runtime, host_options().check)

    def planner(self, slot: int, key: bytes) -> bytes:
        """Plan one call: on a memo miss, with the GIL; one thread plans a key, others wait without the GIL."""
        with self.lock:
            lock = self.plan_locks.setdefault((slot, key), threading.Lock())
        try:
            with lock:
                return self._plan(self.slots[slot], key)
        finally:
            with self.lock:
                self.plan_locks.pop((slot, key), None)

    def _plan(self, slot: _Slot, key: bytes) -> bytes:
        from pykern.jit import build
        from pykern.launcher.record import pack, unpack_key

        op = slot.op
        values, flat = unpack_key(key, slot.args)
        outs = {o.name: values.pop(o.name) for o in op.outputs} if slot.out_form else {}
        problem = op.problem(values, outs)
        if problem.device not in ("cpu", "cuda"):
            raise ArgumentError(f"{op.name}: device", problem.device, "cpu, cuda")
        options = host_options()
        checked = problem.device == "cpu" and (options.check or options.trace)
        target = options.target() if problem.device == "cpu" else self.target(problem.index)
        if problem.device == "cpu":
            self._need_host()
        made = op.planned(problem, target)
        backend = "host" if problem.device == "cpu" else "cuda"

        def entry(launch: Launch) -> int:
            return build.variant(launch.source, launch.kernel, backend=backend, arch=target.arch, check=checked).entry

        roles = {a.name: a.role for a in op.inputs if isinstance(a, Tensor)}
        named = [(n, "output" if n in outs else roles[n.split("[")[0]]) for n, _ in flat]
        given = {n: i for i, (n, _) in enumerate(flat) if n in outs}
        written = [*given.values(), *(i for i, (_, role) in enumerate(named) if role == "mutated")]
        overlaps = []
        for i in written:
            for j, (other, _) in enumerate(named):
                if i != j and flat[i][1] is not None and flat[j][1] is not None and not (j in written and j < i):
                    overlaps.append((i, j, other.split("[")[0] in op.inplace and i in given.values()))
        allocated = []
        if not slot.out_form:
            for o in op.outputs:
                dtype, shape = output_info(problem, o)
                allocated.append((o.name, dtype, tuple(shape)))
        scalars = [a.name for a in slot.args if isinstance(a, Scalar)]
        return pack(made, allocated, named, given, scalars, overlaps, entry)

    def target(self, index: int) -> Target:
        """Limits of CUDA device ``index``, read once."""
        found = self.targets.get(index)
        if found is None:
            from pykern.jit.target import default_target

            found = self.targets[index] = default_target(index)
        return found

    def _outside(self) -> list[str]:
        """Sources of ops that do not live in the package."""
        return [slot.op.source for slot in list(self.slots) if slot.op.source.startswith("/")]

    def apply_host(self, options: HostOptions) -> None:
        word = (options.arch, options.check, options.trace, options.sms)
        with self.lock:
            number = self._words.setdefault(word, len(self._words) + 1)
        self.launcher.pkl_host_options(
            int(options.check),
            int(options.trace),
            options.threads,
            options.seed,
            ASYNC_ORDERS.index(options.async_order),
            options.sms,
            number,
        )

    def forget_plans(self) -> None:
        """Plan again at the next call: a tuning file changed."""
        self.launcher.pkl_bump_epoch()

    # -- registration

    def public(self, op: Op) -> Callable[..., Any]:
        found = self.functions.get(op.name)
        if found is None:
            with self.lock:
                if op.name not in self.functions:
                    self._register(op)
                    self.functions[op.name] = make_public(op, self.torch)
                found = self.functions[op.name]
        return found

    def _register(self, op: Op) -> None:
        torch = self.torch
        for out_form in (False, True):
            if out_form and (op.mutated or not op.outputs):
                continue
            schema = schema_text(op, out_form)
            name = f"{op.name}.out" if out_form else op.name
            args: tuple[Tensor | Scalar, ...] = op.inputs
            if out_form:
                args += tuple(Tensor(o.name, "", tuple(DTYPE_CODES), strides="any") for o in op.outputs)
            slot = _Slot(op, out_form, argument_spec(args), args)
            self.library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
            rets = [] if out_form else [-1] * len(op.outputs)
            number = len(self.slots)
            self.slots.append(slot)
            import ctypes

            code = self.launcher.pkl_register(
                number,
                name.encode(),
                slot.spec.encode(),
                ",".join(a.name for a in args).encode(),
                (ctypes.c_int * max(1, len(rets)))(*rets),
                len(rets),
                int(self.cuda),
            )
            if code:
                raise KernelError(f"{name}: the launcher could not register it (code {code})")
            torch.library.register_fake(f"pykern::{name}", make_fake(op, out_form, torch), lib=self.library)


_runtime: Runtime | None = None
_runtime_lock = threading.Lock()


def runtime() -> Runtime:
    """The process's :class:`Runtime`, made at first use (builds or loads the launcher)."""
    global _runtime
    if _runtime is None:
        with _runtime_lock:
            if _runtime is None:
                _runtime = Runtime()
    return _runtime


TYPES = {"float": "float", "int": "int", "bool": "bool", "str": "str"}


def schema_text(op: Op, out_form: bool) -> str:
    """The torch.library schema of ``op``, e.g. ``softmax(Tensor x, float scale=1.0) -> Tensor``."""
    parts = []
    alias = ord("a")
    for a in op.inputs:
        if isinstance(a, Scalar):
            default = "" if a.required else f"={_literal(a)}"
            parts.append(f"{TYPES[a.type]} {a.name}{default}")
        elif a.role == "mutated":
            parts.append(f"Tensor({chr(alias)}!) {a.name}")
            alias += 1
        elif a.many:
            parts.append(f"Tensor[] {a.name}")
        else:
            parts.append(f"Tensor? {a.name}=None" if a.optional else f"Tensor {a.name}")
    if out_form:
        parts.append("*")
        for o in op.outputs:
            parts.append(f"Tensor({chr(alias)}!) {o.name}")
            alias += 1
        # No Tag.out and no returns: Inductor then passes defaulted scalars twice (see docs/internals.md).
        return f"{op.name}.out({', '.join(parts)}) -> ()"
    returns = ", ".join(["Tensor"] * len(op.outputs))
    returns = returns if len(op.outputs) == 1 else f"({returns})"
    return f"{op.name}({', '.join(parts)}) -> {returns}"


def _literal(a: Scalar) -> str:
    if a.type == "str":
        return f"'{a.default}'"
    return str(a.default)


def argument_spec(args: Sequence[Tensor | Scalar]) -> str:
    """One letter per argument for the launcher; capital scalars are part of the plan's key."""
    out = ""
    for a in args:
        if isinstance(a, Tensor):
            out += "L" if a.many else "O" if a.optional else "T"
        else:
            letter = {"float": "f", "int": "i", "bool": "b", "str": "S"}[a.type]
            out += letter.upper() if a.key else letter
    return out


def tensor_info(t: Any, torch: Any) -> TensorInfo:
    """TensorInfo of a torch tensor (sizes may be SymInts)."""
    name = str(t.dtype).removeprefix("torch.")
    align = 256
    if type(t) is torch.Tensor:  # a traced tensor has no address
        address = t.data_ptr() | 256
        align = address & -address
    return TensorInfo(name, tuple(t.shape), tuple(t.stride()), align, t.device.type, t.device.index or 0)


def make_fake(op: Op, out_form: bool, torch: Any) -> Callable[..., Any]:
    """Shapes and dtypes for tracing: the schema's own checks run, nothing is launched."""

    def fake(*args: Any, **kwargs: Any) -> Any:
        values: dict[str, Any] = {}
        like = None
        for spec, v in zip(op.inputs, args, strict=False):
            values[spec.name] = v
        values.update(kwargs)
        for o in op.outputs:
            values.pop(o.name, None)
        for spec in op.inputs:
            v = values.get(spec.name)
            if isinstance(spec, Tensor) and v is not None:
                if spec.many:
                    values[spec.name] = [tensor_info(t, torch) for t in v]
                    like = like if like is not None else (v[0] if v else None)
                else:
                    values[spec.name] = tensor_info(v, torch)
                    like = like if like is not None else v
        problem = op.problem(values)
        if out_form:
            return None
        device = like.device if like is not None else "cpu"
        made = []
        for o in op.outputs:
            dtype, shape = output_info(problem, o)
            made.append(torch.empty(shape, dtype=getattr(torch, dtype), device=device))
        return made[0] if len(made) == 1 else tuple(made) if made else None

    return fake


def make_public(op: Op, torch: Any) -> Callable[..., Any]:
    """``pykern.<op>(...)`` with the schema's signature; checks argument kinds only when torch refused them."""
    packet = getattr(torch.ops.pykern, op.name)
    default = packet.default
    out_overload = packet.out if "out" in packet.overloads() else None
    single = len(op.outputs) == 1
    params, names_ = [], []
    star = False
    for a in op.inputs:
        if a.name == op.keyword_only and not star:
            params.append("*")
            star = True
        names_.append(a.name)
        if isinstance(a, Scalar):
            params.append(a.name if a.required else f"{a.name}={a.default!r}")
        else:
            params.append(f"{a.name}=None" if a.optional else a.name)
    if not star:
        params.append("*")
    if out_overload is not None:
        params.append("out=None")
    call = ", ".join(names_)
    lines = [
        f"def {op.name}({', '.join(params)}):" if params[-1] != "*" else f"def {op.name}({', '.join(params[:-1])}):"
    ]
    lines.append("    try:")
    for a in op.inputs:
        if isinstance(a, Scalar) and (a.low is not None or a.high is not None):
            low = f"{a.low!r} <= " if a.low is not None else ""
            high = f" <= {a.high!r}" if a.high is not None else ""
            lines.append(f"        if not ({low}{a.name}{high}):")
            lines.append(f"            raise _ArgumentError({a.name!r}, {a.name}, {a.allowed!r})")
    if out_overload is not None:
        lines.append("        if out is not None:")
        if single:
            lines.append(f"            _out({call}, {op.outputs[0].name}=out)")
            lines.append("            return out")
        else:
            if op.unpack:
                lines.append("            if isinstance(out, _Tensor):  # the optional outputs were not asked for")
                lines.append("                _all = (out, *(out.new_empty(0, dtype=d or out.dtype) for d in _rest))")
                outs = ", ".join(f"{o.name}=_all[{i}]" for i, o in enumerate(op.outputs))
                lines.append(f"                _out({call}, {outs})")
                lines.append("                return out")
            outs = ", ".join(f"{o.name}=out[{i}]" for i, o in enumerate(op.outputs))
            lines.append(f"            _out({call}, {outs})")
            lines.append(f"            return {'_unpack(out, locals())' if op.unpack else 'out'}")
    result = f"_default({call})"
    if op.unpack:
        lines.append(f"        _r = {result}")
        lines.append(f"        return _unpack(_r, dict({', '.join(f'{n}={n}' for n in names_)}))")
    else:
        lines.append(f"        return {result}")
    lines.append("    except (TypeError, RuntimeError) as error:")
    lines.append(f"        _explain(error, dict({', '.join(f'{n}={n}' for n in names_)}))")
    lines.append("        raise")
    space: dict[str, Any] = {
        "_ArgumentError": ArgumentError,
        "_Tensor": torch.Tensor,
        "_rest": [getattr(torch, o.dtype, None) if isinstance(o.dtype, str) else None for o in op.outputs[1:]],
        "_default": default, "_out": out_overload, "_unpack": op.unpack,
        "_explain": lambda error, values: explain_types(op, error, values, torch),
    }  # fmt: skip
    exec(compile("\n".join(lines), f"<pykern.{op.name}>", "exec"), space)
    function = space[op.name]
    function.__doc__ = op.doc or None
    function.__module__ = "pykern"
    function.__qualname__ = op.name
    function.op = op
    return function


def explain_types(op: Op, error: Exception, values: Mapping[str, Any], torch: Any) -> None:
    """Turn torch's refusal of an argument's Python type into an ArgumentError that names it."""
    from pykern.errors import PykernError

    if isinstance(error, PykernError):
        return
    for a in op.inputs:
        v = values.get(a.name)
        if isinstance(a, Tensor):
            ok = (v is None and a.optional) or (
                isinstance(v, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in v)
                if a.many
                else isinstance(v, torch.Tensor)
            )
            if not ok:
                want = "a list of tensors" if a.many else "a tensor" + (" or None" if a.optional else "")
                raise ArgumentError(a.name, f"{type(v).__name__} {v!r}"[:80], want) from error
        else:
            kinds = {"float": (int, float), "int": (int,), "bool": (bool,), "str": (str,)}[a.type]
            if not isinstance(v, kinds) or (isinstance(v, bool) and a.type != "bool"):
                raise ArgumentError(a.name, f"{type(v).__name__} {v!r}"[:80], f"a {a.type}") from error
    if isinstance(error, NotImplementedError) or "Could not run" in str(error):
        devices = {n: str(v.device) for n, v in values.items() if isinstance(v, torch.Tensor)}
        raise ArgumentError(f"{op.name}: devices", devices, "all tensors on cpu, or all on one CUDA device") from error


def use_tuning(text: str | None) -> None:
    """Put a tuning file (JSON text; None: none) into force; plans are made anew."""
    plans.tuning = plans.Tuning.load(text) if text else plans.Tuning()
    if _runtime is not None:
        _runtime.forget_plans()


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
