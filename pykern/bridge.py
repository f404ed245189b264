"""The bridge to torch: registration, the launcher's callbacks, and the functions users call. Needs torch."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pykern.errors import ArgumentError, GradientError, KernelError, typed
from pykern.op import ASYNC_ORDERS, HostOptions, Op, host_options, tensor_info
from pykern.plan import Launch, Target
from pykern.schema import DTYPE_CODES, ITEMSIZE, Scalar, Tensor, output_info


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
            op, _, name = message.partition("\n")
            raise GradientError(
                f"pykern.{op}: a gradient was asked of an inference-only op "
                f"({name} requires grad); call it under torch.no_grad() or detach {name}"
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
        if found.op is not op:  # type: ignore[attr-defined]
            raise ArgumentError("op.name", repr(op.name), "a name that no other op of this process has")
        return found

    def _register(self, op: Op) -> None:
        torch = self.torch
        for out_form in (False, True):
            if out_form and (op.mutated or not op.outputs):
                continue
            schema = schema_text(op, out_form)
            name = f"{op.name}.out" if out_form else op.name
            args: tuple[Tensor | Scalar, ...] = op.inputs
            called = [a.name for a in op.inputs]
            if out_form:
                called += [op.given_as(o) for o in op.outputs]
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
                ",".join(called).encode(),
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
        given = [kwargs[o.name] for o in op.outputs if o.name in kwargs]
        for o, t in zip(op.outputs, given, strict=False):
            if like is not None and t.device != like.device:
                raise ArgumentError(f"{op.given_as(o)}.device", t.device, str(like.device))
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


def parameters(op: Op) -> list[str]:
    """The parameters of ``pykern.<op>`` as they are written: by keyword only what follows ``*``."""
    params: list[str] = []
    for a in op.inputs:
        if a.name == op.keyword_only:
            params.append("*")
        if isinstance(a, Scalar):
            params.append(a.name if a.required else f"{a.name}={a.default!r}")
        else:
            params.append(f"{a.name}=None" if a.optional else a.name)
    if op.outputs and not op.mutated:
        params += ["out=None"] if "*" in params else ["*", "out=None"]
    return params


def make_public(op: Op, torch: Any) -> Callable[..., Any]:
    """``pykern.<op>(...)`` with the schema's signature; checks argument kinds only when torch refused them."""
    packet = getattr(torch.ops.pykern, op.name)
    default = packet.default
    out_overload = packet.out if "out" in packet.overloads() else None
    single = len(op.outputs) == 1
    names_ = [a.name for a in op.inputs]
    call = ", ".join(names_)
    lines = [f"def {op.name}({', '.join(parameters(op))}):"]
    # Of an eager call's microseconds, torch's own wrapper of the operator is half of one.
    lines.append("    _eager = not _compiling()")
    lines.append("    if _eager and _functorch() is not None:")
    lines.append("        _no_gradient()")
    lines.append("    try:")
    for a in op.inputs:
        if not isinstance(a, Scalar):
            continue
        # torch would take 2.5 for a bool, a float for an int, and wait for a tensor's value.
        fits = f"type({a.name}) is {a.type}" if a.type != "bool" else f"{a.name} is True or {a.name} is False"
        lines.append(f"        if not ({fits}):")
        lines.append(f"            {a.name} = _scalar({a.name!r}, {a.type!r}, {a.name})")
        if a.low is not None or a.high is not None:
            low = f"{a.low!r} <= " if a.low is not None else ""
            high = f" <= {a.high!r}" if a.high is not None else ""
            lines.append(f"        if not ({low}{a.name}{high}):")
            lines.append(f"            raise _ArgumentError({a.name!r}, {a.name}, {a.allowed!r})")
    if out_overload is not None:
        lines.append("        if out is not None:")
        if single:
            lines.append("            if not (_eager and type(out) is _Tensor) or out.is_neg() or out.is_conj():")
            lines.append("                _outs(out)")
            lines.append(f"            (_out_now if _eager else _out)({call}, {op.outputs[0].name}=out)")
            lines.append("            return out")
        else:
            lines.append("            _outs(out)")
            if op.unpack:
                lines.append("            if isinstance(out, _Tensor):  # the optional outputs were not asked for")
                lines.append("                _all = (out, *(out.new_empty(0, dtype=d or out.dtype) for d in _rest))")
                outs = ", ".join(f"{o.name}=_all[{i}]" for i, o in enumerate(op.outputs))
                lines.append(f"                _out({call}, {outs})")
                lines.append("                return out")
            outs = ", ".join(f"{o.name}=out[{i}]" for i, o in enumerate(op.outputs))
            lines.append(f"            _out({call}, {outs})")
            lines.append(f"            return {'_unpack(out, locals())' if op.unpack else 'out'}")
    result = f"(_now if _eager else _default)({call})"
    if op.unpack:
        lines.append(f"        _r = {result}")
        lines.append(f"        return _unpack(_r, dict({', '.join(f'{n}={n}' for n in names_)}))")
    else:
        lines.append(f"        return {result}")
    lines.append("    except (TypeError, RuntimeError) as error:")
    named = [*names_, "out"] if out_overload is not None else names_
    lines.append(f"        _explain(error, dict({', '.join(f'{n}={n}' for n in named)}))")
    lines.append("        raise")
    space: dict[str, Any] = {
        "_ArgumentError": ArgumentError,
        "_Tensor": torch.Tensor,
        "_scalar": scalar_argument,
        "_compiling": torch.compiler.is_compiling,
        "_functorch": torch._C._functorch.peek_interpreter_stack,
        "_no_gradient": lambda: refuse_transforms(op, torch),
        "_outs": lambda out: check_outs(op, out, torch),
        "_rest": [getattr(torch, o.dtype, None) if isinstance(o.dtype, str) else None for o in op.outputs[1:]],
        "_default": default, "_out": out_overload, "_unpack": op.unpack,
        "_now": getattr(default, "_op", default), "_out_now": getattr(out_overload, "_op", out_overload),
        "_explain": lambda error, values: explain_types(op, error, values, torch),
    }  # fmt: skip
    exec(compile("\n".join(lines), f"<pykern.{op.name}>", "exec"), space)
    function = space[op.name]
    function.__doc__ = op.doc or None
    function.__module__ = "pykern"
    function.__qualname__ = op.name
    function.op = op
    return function


def refuse_transforms(op: Op, torch: Any) -> None:
    """Raise GradientError inside torch.func.grad, vjp, jvp and the like, which would get zeros; vmap is fine."""
    functorch = torch._C._functorch
    for level in functorch.get_interpreter_stack() or ():
        if level.key() in (functorch.TransformType.Grad, functorch.TransformType.Jvp):
            raise GradientError(f"pykern.{op.name}: torch.func asked an inference-only op for a derivative")


def check_outs(op: Op, out: Any, torch: Any) -> None:
    """Refuse an ``out`` that is not a tensor, not as many as there are results, or that no kernel can write."""
    count = len(op.outputs)
    alone = isinstance(out, torch.Tensor)
    many = isinstance(out, (tuple, list)) and all(isinstance(t, torch.Tensor) for t in out)
    if not (alone and (count == 1 or op.unpack is not None)) and (count == 1 or not many or len(out) != count):
        names = ", ".join(o.name for o in op.outputs)
        shown = f"{type(out).__name__} of {len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        raise ArgumentError("out", shown, "a tensor" if count == 1 else f"{count} tensors: ({names})")
    if torch.compiler.is_compiling():  # a trace has no such views, and cannot ask
        return
    for t in (out,) if alone else out:
        if t.is_neg() or t.is_conj():
            raise ArgumentError("out", "a lazily negated or conjugated view", "a tensor with plain memory")


def scalar_argument(name: str, kind: str, value: Any) -> Any:
    """``value`` as a ``kind`` (bool, int, float, str) where nothing is lost by it; else ArgumentError.

    Called for what is not of that very type: numpy's numbers and torch's symbolic ones pass, tensors do not.
    """
    import numbers

    symbolic = type(value).__name__ in ("SymInt", "SymFloat", "SymBool")
    if symbolic and type(value).__name__ == {"bool": "SymBool", "int": "SymInt"}.get(kind, type(value).__name__):
        return value
    truth = isinstance(value, bool) or type(value).__name__ in ("bool_", "bool")
    if kind == "str" and isinstance(value, str):
        return str.__str__(value)
    if kind == "bool" and truth:
        return bool(value)
    if kind == "int" and isinstance(value, numbers.Integral) and not truth:
        return int(value)
    if kind == "float" and isinstance(value, numbers.Real) and not truth:
        try:
            return float(value)
        except OverflowError:
            pass
    want = {"bool": "True or False", "int": "an int", "float": "a float", "str": "a str"}[kind]
    raise ArgumentError(name, typed(value), want)


def explain_types(op: Op, error: Exception, values: Mapping[str, Any], torch: Any) -> None:
    """Turn torch's refusal of an argument into an ArgumentError that names it; returns where it cannot."""
    from pykern.errors import PykernError

    if isinstance(error, PykernError):
        return
    for a in op.inputs:
        v = values.get(a.name)
        if isinstance(a, Scalar):
            if a.type == "int" and isinstance(v, int) and not -(2**63) <= v < 2**63:
                raise ArgumentError(a.name, v, "a 64-bit int") from error
            continue
        ok = (v is None and a.optional) or (
            isinstance(v, (list, tuple)) and all(isinstance(t, torch.Tensor) for t in v)
            if a.many
            else isinstance(v, torch.Tensor)
        )
        if not ok:
            want = "a list of tensors" if a.many else "a tensor" + (" or None" if a.optional else "")
            if type(v).__module__.partition(".")[0] == "numpy":
                want += "; torch.from_numpy makes one of an array"
            shown = typed(v)
            if a.many and isinstance(v, (list, tuple)):
                shown = f"{type(v).__name__} of {', '.join(type(t).__name__ for t in v)}"[:100]
            raise ArgumentError(a.name, shown, want) from error
        if a.many and not v and isinstance(error, NotImplementedError):
            raise ArgumentError(a.name, "an empty list", "a list of tensors") from error
    given: list[tuple[str, Any, Tensor | None]] = []
    for spec in (*(a for a in op.inputs if isinstance(a, Tensor)), None):
        v = values.get(spec.name if spec else "out")
        name = spec.name if spec else "out"
        if isinstance(v, (list, tuple)):
            given += [(f"{name}[{i}]", t, spec) for i, t in enumerate(v)]
        elif v is not None:
            given.append((name, v, spec))
    for name, t, spec in given:
        explain_tensor(name, t, spec, error, torch)
    if "aoti_torch_empty_strided" in str(error):
        refuse_allocation(op, error, values, torch)


def explain_tensor(name: str, t: Any, spec: Tensor | None, error: Exception, torch: Any) -> None:
    """ArgumentError when ``t`` is of a kind that torch does not dispatch to the ops."""
    if t.is_nested:
        raise ArgumentError(name, "a nested tensor", "a plain tensor; pass its values and offsets") from error
    if t.layout != torch.strided:
        raise ArgumentError(f"{name}.layout", t.layout, "torch.strided; call .to_dense()") from error
    if t.is_quantized:
        allowed = "a plain tensor; call .dequantize(), or see pykern.quantize"
        raise ArgumentError(f"{name}.dtype", f"{t.dtype}, torch's quantised", allowed) from error
    if spec is not None and spec.role == "mutated" and (t.is_neg() or t.is_conj()):
        raise ArgumentError(name, "a lazily negated or conjugated view", "a tensor with plain memory") from error
    if "__torch_dispatch__" in str(error) and type(t) not in (torch.Tensor, torch.nn.Parameter):
        allowed = "a plain torch.Tensor, or a subclass whose __torch_dispatch__ knows the op"
        raise ArgumentError(name, f"a {type(t).__name__}", allowed) from error
    if t.device.type not in ("cpu", "cuda", "meta"):
        raise ArgumentError(f"{name}.device", t.device, "cpu, cuda") from error


def refuse_allocation(op: Op, error: Exception, values: Mapping[str, Any], torch: Any) -> None:
    """Raise torch.OutOfMemoryError with the outputs' sizes: the launcher's own words are those of a C function."""
    problem = op.problem_of_args({a.name: values.get(a.name) for a in op.inputs})
    parts, total = [], 0
    for spec in op.outputs:
        dtype, shape = output_info(problem, spec)
        nbytes = math.prod(shape) * ITEMSIZE[dtype]
        total += nbytes
        parts.append(f"{spec.name} {tuple(shape)} {dtype}")
    raise torch.OutOfMemoryError(
        f"pykern.{op.name}: no memory on {problem.device} for {', '.join(parts)} ({total:,} bytes) or a workspace"
    ) from error
