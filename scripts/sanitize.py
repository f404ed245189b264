"""Run shipped kernels under compute-sanitizer: ``python scripts/sanitize.py [memcheck racecheck initcheck synccheck]``.

The tools slow a kernel 10 to 50 times, so by default each runs the smallest declared case of every kernel template of
every op in every type, once as it is and once in rows that do not start on 16 bytes, and compares with the reference.
``--full`` runs the GPU tests instead (hours). Prints a table; exits with 1 when a tool found something.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND = 9  # the tool's exit code when it has something to report


def find_sanitizer() -> str | None:
    homes = [os.environ.get("CUDA_HOME"), "/usr/local/cuda"]
    beside = [str(Path(home) / "bin" / "compute-sanitizer") for home in homes if home]
    return next((p for p in [shutil.which("compute-sanitizer"), *beside] if p and Path(p).exists()), None)


# ---- what is run


def volume(case: dict[str, Any]) -> int:
    """Elements of the case's tensors."""
    from math import prod

    from pykern.op import Spec

    listed = [s for v in case.values() for s in (v if isinstance(v, list) else [v])]
    return sum(prod(s.shape) for s in listed if isinstance(s, Spec))


def misaligned(case: dict[str, Any]) -> dict[str, Any]:
    """The case with its activations three elements off."""
    from pykern.op import Spec

    def moved(v: Any) -> bool:
        return isinstance(v, Spec) and "float" in v.dtype and v.layout == "contiguous"

    return {k: replace(v, layout="offset") if moved(v) else v for k, v in case.items()}


def smallest_cases(target: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    """(op, case): for every op, kernel template and first type argument the smallest case, then the same misaligned."""
    from pykern import op as registry
    from pykern.errors import ArgumentError

    for op in map(registry.get, registry.names()):  # what is shipped
        best: dict[tuple[str, ...], dict[str, Any]] = {}
        for case in op.cases():
            plan = op.planned(op.problem_of(case), target)
            kernels = tuple(re.sub(r"^([^<]*<[^,>]*).*", r"\1", launch.kernel) for launch in plan.launches)
            if kernels not in best or volume(case) < volume(best[kernels]):
                best[kernels] = case
        for case in best.values():
            yield op, case
            try:
                shifted = misaligned(case)
                op.planned(op.problem_of(shifted), target)
            except ArgumentError:
                continue  # refused by name
            if shifted != case:
                yield op, shifted


def drive(only_compile: bool, part: tuple[int, int]) -> int:
    """Run the cases (what the sanitizer watches); with ``only_compile`` build their kernels, many at once. ``part`` =
    (i, n): of every n cases the i-th."""
    import torch

    from pykern.errors import ArgumentError
    from pykern.jit import build, limits
    from pykern.jit.target import default_target
    from pykern.testing.data import make_args
    from pykern.testing.laws import clone, compare, describe, expected, outputs_of

    target = default_target("cuda")
    cases = list(smallest_cases(target))[part[0] - 1 :: part[1]]
    if only_compile:
        from concurrent.futures import ThreadPoolExecutor

        build.launcher(True)
        wanted = set()
        for op, case in cases:
            plan = op.planned(op.problem_of(case), target)
            wanted |= {(launch.source or op.source, launch.kernel) for launch in plan.launches}
        with ThreadPoolExecutor(limits.jobs(True)) as pool:
            list(pool.map(lambda w: build.variant(*w, backend="cuda", arch=target.arch), sorted(wanted)))
        return 0
    wrong = 0
    for number, (op, case) in enumerate(cases, start=1):
        print(f"case {number} of {len(cases)}: {op.name}", flush=True)
        args = make_args(op, case, 0)
        want = expected(op, clone(args))
        on_gpu = make_args(op, case, 0, "cuda")
        try:
            got = outputs_of(op, on_gpu, op(**on_gpu))
            torch.cuda.synchronize()
        except ArgumentError:
            continue
        problem = compare(op, tuple(y.cpu() for y in got), want)
        if problem:
            wrong += 1
            print(f"{op.name}: {describe(case)}: {problem}", file=sys.stderr)
    print(f"CASES {len(cases)}")
    return 1 if wrong else 0


# ---- the tools


@dataclass
class Outcome:
    tool: str
    cases: str
    seconds: float
    errors: str  # a number, or what went wrong
    ok: bool


def judge(tool: str, rc: int, output: str, seconds: float) -> Outcome:
    """What a run of the tool says: its summary counts, and the driver must have come to its end."""
    counts = re.findall(r"(?:ERROR SUMMARY: (\d+) error|RACECHECK SUMMARY: (\d+) hazard)", output)
    cases = re.search(r"^CASES (\d+)$", output, re.M)
    errors = sum(int(a or b) for a, b in counts)
    if not counts:
        return Outcome(tool, cases[1] if cases else "?", seconds, f"no summary (exit {rc})", False)
    if rc not in (0, FOUND) and errors == 0:
        return Outcome(tool, cases[1] if cases else "?", seconds, f"driver failed (exit {rc})", False)
    return Outcome(tool, cases[1] if cases else "?", seconds, str(errors), errors == 0 and rc == 0 and bool(cases))


def stopped(tool: str, output: str, seconds: float) -> Outcome:
    """What is known of a run that was stopped: how far it came, and the errors that it had reported."""
    cases = re.findall(r"^case (\d+ of \d+): (\S+)$", output, re.M)
    where = f"in case {cases[-1][0]} ({cases[-1][1]})" if cases else "before the first case"
    reports = len(re.findall(r"^========= (?:Invalid|Race|Uninitialized|Barrier|Error|Warning)", output, re.M))
    errors = f"over {seconds:.0f} s, {where}, {reports} reports"
    return Outcome(tool, cases[-1][0].split()[0] if cases else "?", seconds, errors, False)


def part_of(text: str) -> tuple[int, int]:
    """``i/n`` as numbers."""
    match = re.fullmatch(r"([1-9]\d*)/([1-9]\d*)", text)
    if not match or int(match[1]) > int(match[2]):
        raise argparse.ArgumentTypeError(f"{text!r}: I/N with 1 <= I <= N")
    return int(match[1]), int(match[2])


def table(outcomes: list[Outcome]) -> str:
    rows = [("tool", "cases", "seconds", "errors")]
    rows += [(o.tool, o.cases, f"{o.seconds:.0f}", o.errors) for o in outcomes]
    return "\n".join(f"{a:12}{b:>8}{c:>10}  {d}" for a, b, c, d in rows)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=", ".join(TOOLS))
    parser.add_argument("--full", action="store_true", help="the GPU tests instead of the smallest cases")
    parser.add_argument("--timeout", type=int, default=0, help="seconds a tool may take (0: no limit)")
    parser.add_argument("--part", type=part_of, default=(1, 1), metavar="I/N", help="the I-th of every N cases")
    parser.add_argument("--drive", choices=("compile", "run"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.drive:
        sys.path.insert(0, str(ROOT))
        return drive(options.drive == "compile", options.part)
    unknown = [tool for tool in options.tools if tool not in TOOLS]
    if unknown:
        print(f"unknown tool {unknown[0]!r}: {', '.join(TOOLS)}", file=sys.stderr)
        return 2
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print("compute-sanitizer is not on PATH, nor under CUDA_HOME or /usr/local/cuda", file=sys.stderr)
        return 2
    # torch's allocator hands out parts of one block, which hides overruns from memcheck and initcheck.
    env = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    part = f"--part={options.part[0]}/{options.part[1]}"
    driver = [sys.executable, str(Path(__file__).resolve()), part, "--drive"]
    if options.full:
        # One test process, so that no kernel escapes.
        watched = [sys.executable, "-m", "pytest", "-m", "gpu and not slow", "-n", "0", "-x"]
    else:
        watched = [*driver, "run"]
        # First, as the tool would slow the compilers too.
        if subprocess.run([*driver, "compile"], cwd=ROOT).returncode:
            return 1
    outcomes = []
    for tool in options.tools or TOOLS:
        print(f"== compute-sanitizer --tool {tool}", flush=True)
        watch = [sanitizer, "--tool", tool, "--error-exitcode", str(FOUND), "--launch-timeout", "0"]
        watch += ["--print-limit", "20"]
        if not options.full:
            watch += ["--target-processes", "application-only"]
        started = time.monotonic()
        try:
            done = subprocess.run(
                watch + watched,
                env=env,
                cwd=ROOT,
                text=True,
                timeout=options.timeout or None,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        except subprocess.TimeoutExpired as late:
            said = late.stdout or ""
            said = said.decode(errors="replace") if isinstance(said, bytes) else said
            outcomes.append(stopped(tool, said, options.timeout))
            print(said[-8000:])
            continue
        output = done.stdout + ("\nCASES 0" if options.full else "")
        outcomes.append(judge(tool, done.returncode, output, time.monotonic() - started))
        if not outcomes[-1].ok:
            print(done.stdout[-8000:])
    print(table(outcomes))
    return 0 if all(o.ok for o in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
