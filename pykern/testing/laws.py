"""The laws: what every op must do, on every backend and architecture. ``check_laws(op)`` runs them all."""

from __future__ import annotations

import hashlib
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from pykern.errors import ArgumentError, BuildError, KernelError
from pykern.numerics import mismatch, same_bits
from pykern.op import ASYNC_ORDERS, Case, Op, Spec, host, register
from pykern.plan import TARGETS, Target, host_target
from pykern.schema import Tensor, output_info
from pykern.testing.data import DrawFn, clone, make_args

HOST_ARCHS = ("80", "90a", "120")


@dataclass(frozen=True)
class Where:
    """A backend to run on: ``Where("host", "90a")`` or ``Where("cuda", "")``."""

    backend: str
    arch: str

    def __post_init__(self) -> None:
        if self.backend not in ("host", "cuda"):
            raise ArgumentError("backend", repr(self.backend), "'host', 'cuda'")
        if self.backend == "host":
            host_target(self.arch)

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "cuda" else "cpu"

    def target(self) -> Target:
        if self.backend == "host":
            return host_target(self.arch)
        from pykern.op import runtime

        return runtime().target(0)

    def __str__(self) -> str:
        return f"{self.backend}-{self.arch}" if self.arch else self.backend


def places() -> list[Where]:
    """Every backend and architecture this machine can run."""
    found = [Where("host", arch) for arch in HOST_ARCHS]
    import torch

    if torch.cuda.is_available():
        found.append(Where("cuda", ""))
    return found


def as_tuple(result: Any) -> tuple[Any, ...]:
    if result is None:
        return ()
    return tuple(result) if isinstance(result, (tuple, list)) else (result,)


def outputs_of(op: Op, args: dict[str, Any], result: Any) -> tuple[Any, ...]:
    """What a call produced: its results, then the mutated arguments."""
    return as_tuple(result) + tuple(args[n] for n in op.mutated)


def run(op: Op, args: dict[str, Any]) -> tuple[Any, ...]:
    """One call with keyword arguments: results and mutated arguments (which are modified)."""
    return outputs_of(op, args, op(**args))


def expected(op: Op, args: dict[str, Any]) -> tuple[Any, ...]:
    """The reference on CPU copies; a reference of a mutating op returns its results, then the new contents."""
    import torch

    cpu = {k: v.cpu() if isinstance(v, torch.Tensor) else v for k, v in clone(args).items()}
    return as_tuple(op.reference(**cpu))


def compare(op: Op, got: tuple[Any, ...], want: tuple[Any, ...]) -> str | None:
    """None when every output agrees with the reference; else what is wrong."""
    if len(got) != len(want):
        return f"{len(got)} outputs, the reference has {len(want)}"
    for i, (y, ref) in enumerate(zip(got, want, strict=True)):
        tol = op.tolerance(str(y.dtype).removeprefix("torch.")) if y.dtype.is_floating_point else None
        problem = mismatch(y.cpu(), ref, tol.rtol if tol else 0.0, tol.atol if tol else 0.0)
        if problem:
            return f"output {i}: {problem}"
    return None


def describe(case: Case) -> str:
    return ", ".join(f"{k}={v}" for k, v in case.items())


def refused(op: Op, error: ArgumentError) -> bool:
    """Whether a refusal names one of the op's arguments."""
    names = [a.name for a in op.inputs] + [o.name for o in op.outputs]
    return any(str(error).startswith((n, f"{op.name}: {n}")) for n in names)


# ---- the laws: each takes (op, where, case, seed)


def agrees_with_reference(op: Op, where: Where, case: Case, seed_: int) -> None:
    """The result is the reference's within tolerance, NaN and inf included; inputs stay unchanged; layouts are right
    or refused by name."""
    args = make_args(op, case, seed_, where.device)
    before = clone(args)
    want = expected(op, args)
    try:
        got = run(op, args)
    except ArgumentError as error:
        assert any(isinstance(v, Spec) and v.layout != "contiguous" for v in case.values()), (
            f"{error} for {describe(case)}"
        )
        assert refused(op, error), f"the refusal names no argument: {error}"
        return
    problem = compare(op, got, want)
    assert problem is None, f"{op.name} on {where}: {problem} for {describe(case)}"
    for spec in op.inputs:
        if isinstance(spec, Tensor) and spec.role != "mutated" and args.get(spec.name) is not None:
            a, b = args[spec.name], before[spec.name]
            for x, y in zip(a, b, strict=True) if spec.many else ((a, b),):
                assert same_bits(x, y), f"{op.name} on {where}: input {spec.name} was changed for {describe(case)}"


def writes_every_output(op: Op, where: Where, case: Case, seed_: int) -> None:
    """``out=`` gets every element written (poisoned before), and nothing outside it (guard bands), wherever it starts;
    and the functional form's bits."""
    if op.mutated or not op.outputs:
        return
    args = make_args(op, case, seed_, where.device)
    try:
        want = as_tuple(run(op, clone(args)))
    except ArgumentError:
        return
    for guard in (64, 65):  # 65: out= starts on no vector's boundary
        _writes_all_of(op, where, case, args, want, guard)


def _writes_all_of(op: Op, where: Where, case: Case, args: dict[str, Any], want: tuple[Any, ...], guard: int) -> None:
    import torch

    problem = op.problem_of_args(args)
    outs, bands = [], []
    for spec in op.outputs:
        dtype, shape = output_info(problem, spec)
        n, t = math.prod(shape), getattr(torch, dtype)
        raw = torch.full(((n + 2 * guard) * t.itemsize,), 0xA5, dtype=torch.uint8, device=where.device)
        band = raw.view(t)
        outs.append(band[guard : guard + n].view(shape))
        bands.append((raw, guard * t.itemsize, n * t.itemsize))
    # Under the checker a plan that overlooks the alignment of out= is a finding with a line; without, a crash.
    misaligned = host(check=True) if guard % 2 and where.backend == "host" else nullcontext()
    try:
        with misaligned:
            op(**args, out=outs[0] if len(outs) == 1 else tuple(outs))
    except ArgumentError as error:
        assert guard % 2 and refused(op, error), f"{op.name} on {where}: out= is refused: {error}"
        return
    raw_outs = outs if op.unpack is None else as_tuple(op.unpack(outs if len(outs) > 1 else outs[0], args))
    for y, ref in zip(raw_outs, want, strict=True):
        assert same_bits(y, ref), f"{op.name} on {where}: out= differs from the functional form for {describe(case)}"
    for raw, start, n in bands:
        clean = bool((raw[:start] == 0xA5).all()) and bool((raw[start + n :] == 0xA5).all())
        assert clean, f"{op.name} on {where}: wrote outside out for {describe(case)}"


def same_bits_every_run(op: Op, where: Where, case: Case, seed_: int) -> None:
    """Twice the same call gives the same bits; on the host backend under other schedules too."""
    args = make_args(op, case, seed_, where.device)
    try:
        first = run(op, clone(args))
    except ArgumentError:
        return
    for n in (1, 2):
        if where.backend == "host":
            with host(seed=seed_ % 1000 + n, async_order=ASYNC_ORDERS[n]):
                again = run(op, clone(args))
        else:
            again = run(op, clone(args))
        for a, b in zip(first, again, strict=True):
            assert same_bits(a, b), f"{op.name} on {where}: run {n} gave other bits for {describe(case)}"


def row_alone_and_in_batch(op: Op, where: Where, case: Case, seed_: int) -> None:
    """A row computed alone has the bits it has inside the batch, when both plans have one numerics class; within
    tolerance otherwise."""
    if not op.rowwise:
        return
    args = make_args(op, case, seed_, where.device)
    name, axis = op.rowwise[0]
    rows = args[name].shape[axis]
    if rows < 2:
        return
    try:
        whole = run(op, clone(args))
        row = seed_ % rows
        alone = {k: v for k, v in args.items()}
        for n, ax in op.rowwise:
            if args[n] is not None:
                alone[n] = args[n].narrow(ax, row, 1)
        alone = clone(alone)
        numerics = [op.planned(op.problem_of_args(a), where.target()).numerics for a in (args, alone)]
        single = run(op, alone)
    except ArgumentError:
        return
    for y, one in zip(whole, single, strict=True):
        if y.numel() == 0:
            continue
        part = y.narrow(0, row, 1)
        if numerics[0] == numerics[1]:
            assert same_bits(part, one), f"{op.name} on {where}: row {row} alone has other bits for {describe(case)}"
        else:
            tol = op.tolerance(str(y.dtype).removeprefix("torch."))
            problem = mismatch(one, part.double(), 2 * tol.rtol, 2 * tol.atol)
            assert problem is None, f"{op.name} on {where}: row {row} alone: {problem}"


def plans_are_few(op: Op, where: Where, case: Case, seed_: int) -> None:
    """Every kernel a drawn problem is planned with is among those the op's own cases reach."""
    target = where.target()
    try:
        problem = op.problem_of(case) if op.make is None else op.problem_of_args(make_args(op, case, seed_))
        plan = op.planned(problem, target)
    except ArgumentError:
        return
    known = known_kernels(op, target)
    for launch in plan.launches:
        assert launch.kernel in known, f"{launch.kernel} is not reached by {op.name}.cases() on {target.arch}"
    assert not plan.launches or (plan.variant and plan.numerics), f"{op.name}: a plan without variant or numerics"


_known: dict[tuple[str, Target], set[str]] = {}


def known_kernels(op: Op, target: Target) -> set[str]:
    """Kernels that the op's declared cases reach on ``target``."""
    key = (op.name, target)
    if key not in _known:
        found: set[str] = set()
        for case in op.cases():
            found |= {launch.kernel for launch in op.planned(op.problem_of(case), target).launches}
        assert len(found) <= 400, f"{op.name} has {len(found)} variants on {target.arch}"
        _known[key] = found
    return _known[key]


def checker_is_silent(op: Op, where: Where, case: Case, seed_: int) -> None:
    """The host checker finds nothing: no race, no access out of bounds, no uninitialised read, no missing wait."""
    if where.backend != "host":
        return
    args = make_args(op, case, seed_)
    try:
        with host(check=True, seed=seed_ % 1000, async_order=ASYNC_ORDERS[seed_ % 3]):
            run(op, args)
    except ArgumentError:
        return


def discriminates(op: Op, where: Where, case: Case, seed_: int) -> None:
    """The data and the comparator tell a wrong result from a right one: planted errors are caught."""
    if any(isinstance(v, Spec) and v.fill == "spiky" for v in case.values()):
        return
    args = make_args(op, case, seed_, where.device)
    want = expected(op, args)
    for i, ref in enumerate(want):
        if not ref.numel() or not ref.dtype.is_floating_point or not bool(ref.abs().sum() > 0):
            continue
        name = op.outputs[i].name if i < len(op.outputs) else ""
        tol = op.tolerance(_output_dtype(op, args, name))
        flat = ref.double().reshape(-1)
        at = int(flat.abs().nan_to_num(0.0).argmax())
        wrong = flat.clone()
        step = 3 * (tol.atol + tol.rtol * float(flat[at].abs()))
        wrong[at] += step or 1e-3 * float(flat[at].abs())
        assert mismatch(wrong, flat, tol.rtol, tol.atol), f"{op.name}: an error of 3 tolerances passes"
        wrong = flat.clone()
        wrong[at] = float("nan")
        assert mismatch(wrong, flat, tol.rtol, tol.atol), f"{op.name}: a NaN passes"


def _output_dtype(op: Op, args: dict[str, Any], name: str) -> str:
    problem = op.problem_of_args(args)
    for spec in op.outputs:
        if spec.name == name:
            return output_info(problem, spec)[0]
    return next(problem[n].dtype for n in op.mutated)


DRAWN: dict[str, Callable[[Op, Where, Case, int], None]] = {
    # First: a kernel that writes out of bounds is reported here, and would bring the process down elsewhere.
    "checker_is_silent": checker_is_silent,
    "agrees_with_reference": agrees_with_reference,
    "writes_every_output": writes_every_output,
    "same_bits_every_run": same_bits_every_run,
    "row_alone_and_in_batch": row_alone_and_in_batch,
    "plans_are_few": plans_are_few,
    "discriminates": discriminates,
}


# ---- laws that draw nothing

# The largest relative tolerance of an output, some hundreds of roundings; and the largest absolute one, as a part of
# the largest value that the reference gives for any output (of data without spikes). A sum that cancels needs more of
# the latter than of the former.
MOST_RTOL = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2, "float8_e4m3fn": 0.25,
             "float8_e5m2": 0.5}  # fmt: skip
MOST_ATOL = 0.02


def can_fail(op: Op, where: Where) -> None:
    """The other laws can be broken: the op plants errors or says why not, its tolerances are those of its dtypes, its
    cases are accepted, and its reference gives values that tell right from wrong."""
    if op.mutants:
        assert not op.no_mutants, f"{op.name}: no_mutants is {op.no_mutants!r}, but there are {len(op.mutants)} mutants"
        for old, new in op.mutants:
            assert old and old != new, f"{op.name}: the mutant {old!r} -> {new!r} changes nothing"
    else:
        assert op.no_mutants.strip(), (
            f"{op.name}: got mutants=(), allowed: planted errors (text in {op.source}, wrong text), which show that "
            "the reference law sees something; or no_mutants='the reason'"
        )
    cases = [*(_small_cases(op) or list(op.cases())[:1]), *drawn_cases(op, 8)]
    assert next(iter(op.cases()), None) is not None, f"{op.name}: cases() yields none, so no kernel is ever checked"
    told: dict[int, bool] = {}
    largest: dict[tuple[str, int], float] = {}  # by dtype and output, of values without spikes
    ran = False
    for case in cases:
        args = make_args(op, case, 0, where.device)
        want = expected(op, args)
        try:
            op.problem_of_args(args)
            if not ran:
                # The first launch of all: under the checker, where a wild address is a finding and not a crash.
                with host(check=True) if where.backend == "host" else nullcontext():
                    run(op, clone(args))
                ran = True
        except ArgumentError:
            continue
        plain = not any(isinstance(v, Spec) and v.fill == "spiky" for v in case.values())
        for i, ref in enumerate(want):
            values = ref.double()[ref.double().isfinite()] if ref.numel() else ref.double()
            told[i] = told.get(i, False) or values.unique().numel() > 1
            if plain and values.numel() and ref.dtype.is_floating_point:
                dtype = _output_dtype(op, args, op.outputs[i].name if i < len(op.outputs) else "")
                if dtype in MOST_RTOL:
                    largest[dtype, i] = max(largest.get((dtype, i), 0.0), float(values.abs().max()))
    assert ran, f"{op.name} on {where}: every case is refused, so nothing is checked"
    assert not told or any(told.values()), f"{op.name}: the reference gives one value everywhere: nothing can be wrong"
    for dtype in {d for d, _ in largest}:
        sane_tolerance(op, dtype, min((v for (d, _), v in largest.items() if d == dtype and v > 0), default=1.0))


def sane_tolerance(op: Op, dtype: str, largest: float) -> None:
    """``op.tolerance(dtype)`` is one that a wrong result can break; ``largest``: value of the reference, of the output
    with the smallest."""
    tol = op.tolerance(dtype)
    at = f"{op.name}: tolerance({dtype!r})"
    for name, value, most in (("rtol", tol.rtol, MOST_RTOL[dtype]), ("atol", tol.atol, MOST_ATOL * largest)):
        of = "" if name == "rtol" else f", {MOST_ATOL:g} of the reference's largest value"
        assert 0 <= value <= most, f"{at}.{name}: got {value!r}, allowed: 0..{most:.3g} ({dtype}{of})"
    assert not (tol.rtol or tol.atol) or tol.reason.strip(), f"{at}.reason: got '', allowed: why it is above 0"


_mutants: dict[str, Op] = {}  # not in the registry: no other test should meet them


def mutants_are_caught(op: Op, where: Where) -> None:
    """Each wrong kernel the op plants (a text change in its source) is caught by the reference law."""
    if where.backend != "host" or where.arch != "90a":
        return
    from pykern.jit import sources

    text = sources.locate(op.source).read_text()
    for number, (old, new) in enumerate(op.mutants):
        assert text.count(old) >= 1, f"{op.name}: mutant {number} changes {old!r}, which is not in {op.source}"
        digest = hashlib.sha256(f"{text}{old}{new}".encode()).hexdigest()[:12]
        folder = Path(tempfile.gettempdir()) / f"pykern-mutants-{digest}"
        folder.mkdir(exist_ok=True)
        path = folder / Path(op.source).name
        path.write_text(text.replace(old, new))
        name = f"{op.name}_mutant_{digest}"
        fresh = replace(op, name=name, source=str(path), plan=_replanned(op, str(path)), mutants=())
        wrong = _mutants.setdefault(name, fresh)
        tries = ((case, seed_) for case in _grouped_cases(op, where.target()) for seed_ in range(3))
        caught = any(_differs(op, wrong, case, seed_) for case, seed_ in tries)
        assert caught, f"{op.name}: the planted error {old!r} -> {new!r} passes the reference law"


def _differs(op: Op, wrong: Op, case: Case, seed_: int) -> bool:
    """Whether the reference law tells ``wrong`` (a mutant of ``op``) from the reference on this case."""
    args = make_args(op, case, seed_)
    want = expected(op, args)
    try:
        # Traced: in guarded memory, as a planted error may index anywhere, but no finding takes the comparison's place.
        with host(trace=True):
            return compare(op, run(wrong, args), want) is not None
    except ArgumentError:
        return False
    except KernelError:
        return True
    except BuildError as error:
        raise AssertionError(f"{op.name}: the planted error of {wrong.source} does not compile: {error}") from error


def _grouped_cases(op: Op, target: Target) -> Iterator[Case]:
    """Small cases, those that run the same kernels together, so that a mutant is compiled for few of them."""
    groups: dict[tuple[str, ...], list[Case]] = {}
    for case in [*_small_cases(op), *drawn_cases(op, 24)]:
        problem = op.problem_of_args(make_args(op, case, 0))
        try:
            kernels = tuple(launch.kernel for launch in op.planned(problem, target).launches)
        except ArgumentError:
            continue
        if kernels:
            groups.setdefault(kernels, []).append(case)
    for cases in sorted(groups.values(), key=len, reverse=True):
        yield from cases


def _replanned(op: Op, path: str) -> Callable[..., Any]:
    def plan(problem: Any, target: Target) -> Any:
        made = op.plan(problem, target)
        swap = tuple(replace(la, source=path if la.source in ("", op.source) else la.source) for la in made.launches)
        return replace(made, launches=swap)

    return plan


def _small_cases(op: Op) -> list[Case]:
    def volume(case: Case) -> int:
        return sum(math.prod(v.shape) for v in case.values() if isinstance(v, Spec))

    return [c for c in op.cases() if volume(c) <= 1 << 16][:12]


def drawn_cases(op: Op, count: int) -> list[Case]:
    """``count`` cases of the op's strategy, the same every time."""
    found: list[Case] = []

    @seed(7)
    @settings(max_examples=count, database=None, deadline=None, suppress_health_check=_SLOW)
    @given(st.data())
    def collect(data: st.DataObject) -> None:
        found.append(op.draw(DrawFn(data.draw)))

    collect()
    return found


def bad_arguments_are_named(op: Op, where: Where) -> None:
    """Wrong kinds, dtypes, ranks and devices raise ArgumentError with the argument's name and what is allowed."""
    import torch

    case = next(iter(_small_cases(op) or list(op.cases())))
    good = make_args(op, case, 1, where.device)
    for spec in op.inputs:
        if not isinstance(spec, Tensor) or spec.many or good.get(spec.name) is None:
            continue
        t = good[spec.name]
        # One axis too few where any number of leading ones is fine, else far too many.
        rank = len(spec.dims.split()) - 2 if spec.dims.startswith("*") else 9
        bad: list[Any] = [3.5, "text"]
        if rank >= 0:
            bad.append(torch.zeros((1,) * rank, dtype=t.dtype, device=t.device))
        if isinstance(spec.dtypes, tuple) and "complex64" not in spec.dtypes:
            bad.append(torch.zeros(tuple(t.shape), dtype=torch.complex64, device=t.device))
        if not spec.optional:
            bad.append(None)
        for value in bad:
            try:
                op(**{**clone(good), spec.name: value})
            except ArgumentError as error:
                text = str(error)
                assert spec.name in text, f"{op.name}: {value!r} for {spec.name}: the message does not name it: {text}"
                assert "allowed" in text, f"{op.name}: {text} does not say what is allowed"
            else:
                what = f"{type(value).__name__}{tuple(value.shape) if isinstance(value, torch.Tensor) else ''}"
                raise AssertionError(f"{op.name} on {where}: {spec.name} = {what} was accepted")


def refuses_gradients(op: Op, where: Where) -> None:
    """An input that requires grad is refused by name: the ops are inference-only."""
    import torch

    from pykern.errors import GradientError
    from pykern.op import runtime

    if not runtime().launcher.pkl_has_grad_check():
        return
    case = next(iter(_small_cases(op) or list(op.cases())))
    args = make_args(op, case, 1, where.device)
    for spec in op.inputs:
        t = args.get(spec.name)
        if (
            isinstance(spec, Tensor)
            and not spec.many
            and t is not None
            and t.dtype.is_floating_point
            and spec.role != "mutated"
        ):
            wrong = clone(args)
            wrong[spec.name] = wrong[spec.name].requires_grad_()
            try:
                op(**wrong)
            except GradientError as error:
                assert op.name in str(error)
            else:
                raise AssertionError(f"{op.name}: {spec.name} requires grad and was accepted")
            with torch.no_grad():
                op(**wrong)
            return


def passes_opcheck(op: Op, where: Where) -> None:
    """torch.library.opcheck: schema, fake kernel and dispatch agree."""
    import torch

    op.public  # noqa: B018  registers
    packet = getattr(torch.ops.pykern, op.name)
    case = next(iter(_small_cases(op) or list(op.cases())))
    args = make_args(op, case, 1, where.device)
    torch.library.opcheck(packet.default, tuple(args[a.name] for a in op.inputs), test_utils=_OPCHECKS)


_OPCHECKS = ("test_schema", "test_faketensor", "test_autograd_registration")

FIXED: dict[str, Callable[[Op, Where], None]] = {
    "can_fail": can_fail,
    "mutants_are_caught": mutants_are_caught,
    "bad_arguments_are_named": bad_arguments_are_named,
    "refuses_gradients": refuses_gradients,
    "passes_opcheck": passes_opcheck,
}
LAWS = ("can_fail", *DRAWN, *(law for law in FIXED if law != "can_fail"))


_SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]


_compiled: set[tuple[str, str, Where]] = set()


def compile_first(op: Op, where: Where) -> None:
    """Build the kernels of the op's first case, so that one that does not compile says so at once, unshrunk."""
    from pykern.jit import build

    key = (op.name, op.source, where)
    case = next(iter(op.cases()), None)
    if where.backend != "host" or key in _compiled or case is None:
        return
    for launch in op.planned(op.problem_of_args(make_args(op, case, 0)), where.target()).launches:
        build.variant(launch.source, launch.kernel, backend="host", arch=where.arch)
    _compiled.add(key)


def check_law(op: Op, law: str, where: Where, examples: int | None = None) -> None:
    """Check one law of ``op`` on one backend; AssertionError says what was broken and for which arguments."""
    if not isinstance(op, Op):
        raise ArgumentError("op", f"{type(op).__name__} {op!r}"[:80], "a pykern.op.Op")
    if law not in LAWS:
        raise ArgumentError("law", repr(law), ", ".join(LAWS))
    if not isinstance(where, Where):
        raise ArgumentError("where", repr(where), "a Where, such as Where('host', '90a')")
    if examples is not None and (isinstance(examples, bool) or not isinstance(examples, int) or examples < 1):
        raise ArgumentError("examples", repr(examples), "an int, 1 or more; None: as Hypothesis is set")
    if law in FIXED:
        if where.backend == "host":
            with host(arch=where.arch):
                FIXED[law](op, where)
        else:
            FIXED[law](op, where)
        return
    test = DRAWN[law]
    compile_first(op, where)

    @given(st.data(), st.integers(0, 2**31 - 1))
    def holds(data: st.DataObject, seed_: int) -> None:
        case = op.draw(DrawFn(data.draw))
        if where.backend == "host":
            with host(arch=where.arch):
                test(op, where, case, seed_)
        else:
            test(op, where, case, seed_)

    # The first example of each kernel compiles it, which is slow under any profile.
    count = examples or settings().max_examples
    settings(deadline=None, suppress_health_check=_SLOW, max_examples=count)(holds)()


def check_laws(op: Op, where: Where | None = None, examples: int | None = None) -> None:
    """Check every law of ``op`` (an :class:`pykern.op.Op`, registered or not), everywhere this machine can run."""
    if not isinstance(op, Op):
        raise ArgumentError("op", f"{type(op).__name__} {op!r}"[:80], "a pykern.op.Op")
    register(op)
    for place in [where] if where else places():
        for law in LAWS:
            check_law(op, law, place, examples)


__all__ = ["DRAWN", "FIXED", "HOST_ARCHS", "LAWS", "TARGETS", "Where", "check_law", "check_laws", "places"]
