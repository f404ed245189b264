"""scripts/tune.py: which candidates it would time, and how it chooses. The timing needs a GPU."""

from __future__ import annotations

import json

import pytest
from _scripts import load_script

from pykern import op as registry
from pykern.plan import TARGETS, Tuning

script = load_script("tune")

KNOBS = {"a": (1, 2), "b": (8, 4, 16)}
DEFAULT = (("a", 1), ("b", 8))


def knobs(a: int, b: int) -> tuple[tuple[str, int], ...]:
    return (("a", a), ("b", b))


def test_every_choice_once_the_defaults_first() -> None:
    found = script.combinations(KNOBS)
    assert found[0] == DEFAULT
    assert len(found) == len(set(found)) == 6
    assert knobs(2, 16) in found


def test_choices_of_one_plan_are_one_candidate() -> None:
    groups = script.distinct(script.combinations(KNOBS), lambda choice: dict(choice)["b"])
    assert [len(g) for g in groups] == [2, 2, 2]
    assert groups[0][0] == DEFAULT
    assert script.label(groups[0], DEFAULT) == "default"
    assert script.label(groups[1], DEFAULT) == "b=4"  # a does not matter, so it is not told
    assert script.label([knobs(2, 16)], DEFAULT) == "a=2, b=16"


def test_the_best_is_best_over_all_problems() -> None:
    one = {DEFAULT: 10.0, knobs(1, 4): 8.0, knobs(2, 8): 9.0}
    two = {DEFAULT: 10.0, knobs(1, 4): 13.0, knobs(2, 8): 9.5}
    assert script.choose([one], DEFAULT, 0.01) == knobs(1, 4)
    assert script.choose([one, two], DEFAULT, 0.01) == knobs(2, 8)  # sqrt(0.8 * 1.3) > 1


def test_relative_times_count_not_the_longest_problem() -> None:
    short = {DEFAULT: 1.0, knobs(1, 4): 0.8}
    long = {DEFAULT: 1000.0, knobs(1, 4): 1050.0}
    assert script.choose([short, long], DEFAULT, 0.01) == knobs(1, 4)


def test_the_default_stays_within_the_margin_and_a_failed_candidate_is_out() -> None:
    assert script.choose([{DEFAULT: 10.0, knobs(1, 4): 9.95}], DEFAULT, 0.01) == DEFAULT
    assert script.choose([{DEFAULT: 10.0, knobs(1, 4): 9.85}], DEFAULT, 0.01) == knobs(1, 4)
    assert script.choose([{DEFAULT: 10.0, knobs(1, 4): 1.0}, {DEFAULT: 10.0}], DEFAULT, 0.01) == DEFAULT


def test_the_file_holds_what_differs_and_loads() -> None:
    made = script.tuning_file("90a", {"one": (knobs(2, 8), DEFAULT), "two": (DEFAULT, DEFAULT)})
    assert made == {"90a": {"one": {"a": 2}}}
    assert Tuning.load(json.dumps(made)).get("90a", "one", "a", 1) == 2


def test_the_table_marks_the_fastest() -> None:
    lines = script.table([("default", 10.0, 9.0, 11.0, 3.0), ("b=4", 8.0, 7.5, 9.0, 3.75)]).splitlines()
    assert "1.000x" in lines[0] and "fastest" not in lines[0]
    assert "1.250x" in lines[1] and "fastest" in lines[1]


def test_knobs_of_an_op_change_its_plans_and_leave_no_tuning_behind() -> None:
    (tunable,) = script.tunables(["quant_linear"])
    text, case = script.problems(tunable, "4096x7168, x 1x14336 bf16, layout=int4")[0]
    from pykern.testing import make_args

    problem = tunable.op.problem_of_args(make_args(tunable.op, case, 1, "meta"))
    before = tunable.op.plan(problem, TARGETS["90a"])
    groups = tunable.groups(problem, TARGETS["90a"])
    names = [script.label(g, tunable.choices[0]) for g in groups]
    assert names[0] == "default" and len(set(names)) == len(names) == 4
    assert all("16" not in name for name in names), f"knobs for two tiles of tokens do nothing for one: {names}"
    assert tunable.op.plan(problem, TARGETS["90a"]) == before, text


def test_declared_knobs_are_known_to_plans() -> None:
    for tunable in script.tunables([]):
        for name, values in tunable.tuning.items():
            assert len(set(values)) == len(values) > 1, f"{tunable.op.name}.{name}"
        found = [p for p in script.problems(tunable, "") if len(p) == 2]
        assert found, f"{tunable.op.name} has knobs and no bench problem to time them on"


def test_listing_and_refusals(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    assert script.main(["quant_linear", "--case", "layout=int4", "--list"]) == 0
    assert "row_tiles_8=2" in capsys.readouterr().out
    assert script.main(["softmax", "--list"]) == 2
    assert "TUNING" in capsys.readouterr().err
    assert script.main(["--list", "--arch", "7"]) == 2
    assert "--arch" in capsys.readouterr().err
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script.main(["quant_linear"]) == 2
    assert "CUDA GPU" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stop:
        script.main(["--repeats", "0"])
    assert stop.value.code == 2


@pytest.mark.gpu
def test_a_run_on_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(["quant_linear", "--case", "28672x2048", "--repeats", "2"]) == 0
    out = capsys.readouterr().out
    assert "fastest" in out and "WRONG" not in out
    assert registry.get("quant_linear") is not None
