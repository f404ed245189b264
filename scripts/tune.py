"""Which of an op's candidates is fastest here: its bench problems, timed under every tuning that changes their plan.

    python scripts/tune.py [OPS ...] [--case TEXT] [--repeats N] [--margin X] [--out FILE]    on a GPU
    python scripts/tune.py [OPS ...] [--case TEXT] --list [--arch ARCH]                     anywhere: what it would time

An op takes part when its module (pykern/ops/NAME.py) has TUNING = {knob: (default, other, ...)}, integers that its plan
looks up with `pykern.plan.tuned`. Each candidate's result is compared with the reference before it is timed; a wrong
one is reported and left out. Candidates are captured in CUDA graphs over rotated buffers and replayed in turn. The
best tuning of an op is the one of least geometric mean over its problems, and the default if no other is better by
more than the margin. Printed last: a file for `pykern.use_tuning`.

Exit codes: 0 done, 1 a candidate was wrong or failed, 2 no GPU or bad input.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Knobs = tuple[tuple[str, int], ...]  # a value for every knob of an op


# ---- pure


def combinations(tuning: Mapping[str, Sequence[int]]) -> list[Knobs]:
    """Every choice of one value a knob, the defaults first."""
    return [tuple(zip(tuning, values, strict=True)) for values in itertools.product(*tuning.values())]


def distinct(choices: Sequence[Knobs], plan_of: Callable[[Knobs], Any]) -> list[list[Knobs]]:
    """Choices in groups of one plan each, in order of their first; plans are compared by ``==``."""
    groups: list[tuple[Any, list[Knobs]]] = []
    for knobs in choices:
        plan = plan_of(knobs)
        for known, members in groups:
            if known == plan:
                members.append(knobs)
                break
        else:
            groups.append((plan, [knobs]))
    return [members for _, members in groups]


def label(members: Sequence[Knobs], default: Knobs) -> str:
    """What tells a group of choices from the default: the knobs that all of them set alike, where it does not."""
    common = [(k, v) for k, v in members[0] if all(dict(m)[k] == v for m in members)]
    return ", ".join(f"{k}={v}" for k, v in common if dict(default)[k] != v) or "default"


def choose(times: Sequence[Mapping[Knobs, float]], default: Knobs, margin: float) -> Knobs:
    """The choice of least geometric mean over problems, each relative to its default's time.

    ``times``: for each problem its time under every choice; one that is missing (it failed) is out. The default stays
    unless another is faster by more than the share ``margin``.
    """
    best, best_score = default, math.log1p(-margin)
    for knobs in dict.fromkeys(k for problem in times for k in problem):
        if any(knobs not in problem for problem in times):
            continue
        score = sum(math.log(problem[knobs] / problem[default]) for problem in times) / len(times)
        if score < best_score - 1e-12:
            best, best_score = knobs, score
    return best


def tuning_file(arch: str, chosen: Mapping[str, tuple[Knobs, Knobs]]) -> dict[str, dict[str, dict[str, int]]]:
    """What `pykern.use_tuning` takes: of each op's ``(best, default)`` the knobs that differ."""
    ops = {op: {k: v for k, v in best if dict(default)[k] != v} for op, (best, default) in chosen.items()}
    return {arch: {op: knobs for op, knobs in ops.items() if knobs}}


def table(rows: Sequence[tuple[str, float, float, float, float]]) -> str:
    """Lines of ``(candidate, us, lowest, highest, TB/s)``, the first being the default; fastest marked."""
    fastest = min((us for _, us, *_ in rows), default=0.0)
    lines = []
    for name, us, low, high, tbs in rows:
        mark = "  fastest" if us == fastest else ""
        spread, ratio = f"({low:.2f}-{high:.2f})", rows[0][1] / us
        lines.append(f"  {name:<34} {us:>9.2f} us {spread} {tbs:>6.2f} TB/s {ratio:>6.3f}x{mark}")
    return "\n".join(lines)


# ---- ops and their problems


@dataclass(frozen=True)
class Tunable:
    """An op with knobs."""

    op: Any
    tuning: Mapping[str, Sequence[int]]

    @property
    def choices(self) -> list[Knobs]:
        return combinations(self.tuning)

    def under(self, arch: str, knobs: Knobs) -> str:
        """The tuning file that puts ``knobs`` into force."""
        return json.dumps({arch: {self.op.name: dict(knobs)}})

    def groups(self, problem: Any, target: Any) -> list[list[Knobs]]:
        """Choices of one plan each for ``problem``."""
        from pykern import op as registry

        def plan_of(knobs: Knobs) -> Any:
            registry.use_tuning(self.under(target.arch, knobs))
            try:
                return self.op.plan(problem, target).launches
            finally:
                registry.use_tuning(None)

        return distinct(self.choices, plan_of)


def tunables(names: Sequence[str]) -> list[Tunable]:
    """The ops of ``names`` (default: all) that have knobs. ArgumentError for an unknown one, or one without."""
    from pykern import op as registry
    from pykern.errors import ArgumentError

    found = []
    for name in names or registry.names():
        op = registry.get(name)
        tuning = getattr(importlib.import_module(f"pykern.ops.{name}"), "TUNING", {})
        if tuning:
            found.append(Tunable(op, tuning))
        elif names:
            raise ArgumentError("OPS", name, "ops whose module has TUNING")
    return found


def problems(tunable: Tunable, only: str) -> list[tuple[str, dict[str, Any]]]:
    """(description, case) of the op's bench problems whose description contains ``only``."""
    from pykern.commands.bench import describe

    named = [(describe_planes(case) + describe(case), case) for case in tunable.op.benches]
    return [(text, case) for text, case in named if only in text]


def describe_planes(case: dict[str, Any]) -> str:
    """The shape of the first of each list of tensors."""
    lists = {k: v for k, v in case.items() if isinstance(v, (list, tuple)) and v}
    return "".join(f"{k} {'x'.join(map(str, v[0].shape))}, " for k, v in lists.items())


# ---- on a GPU


def time_problem(tunable: Tunable, case: dict[str, Any], target: Any, repeats: int) -> tuple[dict[Knobs, float], bool]:
    """Prints the table of one problem; the time under every choice, and whether all candidates were right."""
    import torch

    from pykern import op as registry
    from pykern.jit import build, limits
    from pykern.testing import make_args
    from pykern.testing.data import clone
    from pykern.testing.laws import as_tuple, compare, expected
    from pykern.timing import alternate, capture, rotation

    op = tunable.op
    first = make_args(op, case, 1, "cuda")
    problem = op.problem_of_args(first)
    groups = tunable.groups(problem, target)
    if len(groups) == 1:
        print("  one plan whatever the tuning")
        return {}, True
    launches = set()
    for members in groups:
        registry.use_tuning(tunable.under(target.arch, members[0]))
        launches |= {(launch.source or op.source, launch.kernel) for launch in op.plan(problem, target).launches}
    registry.use_tuning(None)
    with ThreadPoolExecutor(limits.jobs(True)) as pool:  # side by side; a failure is told when it is called
        list(pool.map(lambda v: _quietly(build.variant, *v, backend="cuda", arch=target.arch), launches))
    nbytes = op.nbytes(problem)
    sets = [first, *(clone(first) for _ in range(rotation(nbytes, target.l2_bytes) - 1))]
    calls = max(len(sets), min(48, max(4, int(4e9 // max(nbytes, 1)))))
    want, default = expected(op, first), tunable.choices[0]
    arms, kept, right = [], [], True
    for members in groups:
        name = label(members, default)
        registry.use_tuning(tunable.under(target.arch, members[0]))
        try:
            wrong = compare(op, as_tuple(op(**first)), want)
            if wrong is None:
                arms.append((capture(lambda i: op(**sets[i % len(sets)]), calls), calls))
                kept.append((name, members))
        except Exception as error:
            wrong = f"{type(error).__name__}: {error}"[:300]
        finally:
            registry.use_tuning(None)
        if wrong is not None:
            print(f"  {name:<34} WRONG: {wrong}")
            right = False
    timings = alternate(arms, repeats)
    rows = [
        (name, t.median, t.low, t.high, nbytes / t.median / 1e6) for (name, _), t in zip(kept, timings, strict=True)
    ]
    print(table(rows))
    torch.cuda.empty_cache()
    times = {knobs: t.median for (_, members), t in zip(kept, timings, strict=True) for knobs in members}
    return (times if default in times else {}), right


def _quietly(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    from pykern.errors import PykernError

    try:
        call(*args, **kwargs)
    except PykernError:
        pass


def tune(names: Sequence[str], only: str, repeats: int, margin: float, out: str) -> int:
    from pykern.op import runtime

    target, chosen, right = runtime().target(0), {}, True
    for tunable in tunables(names):
        all_times = []
        for text, case in problems(tunable, only):
            print(f"{tunable.op.name}: {text}", flush=True)
            times, good = time_problem(tunable, case, target, repeats)
            right = right and good
            all_times += [times] if times else []
        default = tunable.choices[0]
        if all_times:
            chosen[tunable.op.name] = (choose(all_times, default, margin), default)
            print(f"{tunable.op.name}: best over these {label([chosen[tunable.op.name][0]], default)}")
    text = json.dumps(tuning_file(target.arch, chosen), indent=2)
    print(text)
    if out:
        Path(out).write_text(text + "\n")
    return 0 if right else 1


def show(names: Sequence[str], only: str, arch: str) -> int:
    """What `tune` would time, on plans alone."""
    from pykern.errors import ArgumentError
    from pykern.plan import TARGETS
    from pykern.testing import make_args

    if arch not in TARGETS:
        raise ArgumentError("--arch", repr(arch), ", ".join(TARGETS))
    for tunable in tunables(names):
        for text, case in problems(tunable, only):
            problem = tunable.op.problem_of_args(make_args(tunable.op, case, 1, "meta"))
            groups = tunable.groups(problem, TARGETS[arch])
            print(f"{tunable.op.name}: {text}: {len(groups)} plans")
            for members in groups if len(groups) > 1 else ():
                print(f"  {label(members, tunable.choices[0])}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ops", nargs="*", metavar="OPS")
    parser.add_argument("--case", default="", help="only bench problems whose description contains this")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--margin", type=float, default=0.01, help="share by which another must beat the default")
    parser.add_argument("--out", default="", help="write the tuning file here, too")
    parser.add_argument("--list", action="store_true", help="print what would be timed; needs no GPU")
    parser.add_argument("--arch", default="90a", help="with --list")
    args = parser.parse_args(argv)
    if args.repeats < 1 or not 0 <= args.margin < 1:
        parser.error("--repeats is at least 1, --margin from 0 to below 1")

    import torch

    from pykern.errors import ArgumentError

    try:
        if args.list:
            return show(args.ops, args.case, args.arch)
        if not torch.cuda.is_available():
            print("tune.py times candidates on a CUDA GPU, and torch sees none; --list works without", file=sys.stderr)
            return 2
        return tune(args.ops, args.case, args.repeats, args.margin, args.out)
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    sys.exit(main())
