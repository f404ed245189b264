"""scripts/sanitize.py: what it runs under compute-sanitizer, and how it reads the answer. The runs need a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from _scripts import load_script

from pykern import op as registry
from pykern.plan import TARGETS

pytestmark = pytest.mark.usefixtures("own_registry")

script = load_script("sanitize")

MEMCHECK = "========= COMPUTE-SANITIZER\nCASES 229\n========= ERROR SUMMARY: {} errors\n"
RACECHECK = MEMCHECK.replace("ERROR SUMMARY: {} errors", "RACECHECK SUMMARY: {} hazards displayed (0 errors)")


@pytest.mark.parametrize("text", [MEMCHECK, RACECHECK])
def test_a_clean_run_and_one_with_errors(text: str) -> None:
    assert script.judge("x", 0, text.format(0), 1.0).ok
    assert script.judge("x", 0, text.format(0), 1.0).cases == "229"
    found = script.judge("x", 9, text.format(3), 1.0)
    assert not found.ok and found.errors == "3"
    # Hazards of warning level leave the exit code at 0.
    assert not script.judge("x", 0, text.format(1), 1.0).ok


def test_a_run_that_did_not_finish_is_no_success() -> None:
    assert not script.judge("x", 0, "CASES 3\n", 1.0).ok  # no summary: nothing was watched
    assert not script.judge("x", 1, MEMCHECK.format(0), 1.0).ok  # a wrong result
    assert not script.judge("x", 0, "========= ERROR SUMMARY: 0 errors\n", 1.0).ok  # the driver did not get to its end


def test_a_run_that_was_stopped_says_where_and_what_it_had_found() -> None:
    said = "case 1 of 40: linear\ncase 2 of 40: softmax\n========= Invalid __global__ read of size 4 bytes\n"
    late = script.stopped("memcheck", said, 130)
    assert not late.ok
    assert (late.cases, late.errors) == ("2", "over 130 s, in case 2 of 40 (softmax), 1 reports")
    assert "before the first case" in script.stopped("memcheck", "", 130).errors


def test_parts_cover_every_case_once() -> None:
    cases = list(range(23))
    parts = [cases[i - 1 :: n] for i, n in map(script.part_of, ("1/3", "2/3", "3/3"))]
    assert sorted(case for part in parts for case in part) == cases
    for wrong in ("0/3", "4/3", "1", "a/b", "1/0"):
        with pytest.raises(script.argparse.ArgumentTypeError, match="I/N"):
            script.part_of(wrong)


def test_the_table_names_every_tool() -> None:
    outcomes = [script.judge(tool, 0, MEMCHECK.format(0), 12.3) for tool in script.TOOLS]
    lines = script.table(outcomes).splitlines()
    assert [line.split()[0] for line in lines] == ["tool", *script.TOOLS]


def test_only_what_is_shipped_is_run() -> None:
    softmax = registry.get("softmax")
    registry.register(replace(softmax, name="softmax_of_the_sanitizer_test"))
    assert {op.name for op, _ in script.smallest_cases(TARGETS["90a"])} == set(registry.names())


def test_every_kernel_template_is_run() -> None:
    """In every type that a plan can choose it in; a misaligned case comes with most."""
    target = TARGETS["90a"]

    def templates(plan: Any) -> set[str]:
        return {launch.kernel.split(",")[0] for launch in plan.launches}

    cases = list(script.smallest_cases(target))
    run = set().union(*(templates(op.planned(op.problem_of(case), target)) for op, case in cases))
    # Other tests have registered ops of their own.
    declared = set().union(*(templates(plan) for _, _, plan in registry.sample_plans(target, registry.names())))
    assert run == declared
    assert sum("offset" in repr(case) for _, case in cases) > len(cases) // 4
