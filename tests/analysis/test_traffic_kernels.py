"""What fusing costs by pykern's own kernels: the chain read as ops, their figures, and the estimate as the fallback."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from pykern.analysis.traffic_chains import NAMED, named_chain, parse_chain
from pykern.commands._traffic_kernels import groups
from pykern.commands.traffic import command
from pykern.errors import ToolchainError


def read(text: str, batch: int = 8) -> list[tuple[str, str | None, list[str]]]:
    chain = named_chain(text) if "->" not in text else parse_chain(text)
    return [
        (" + ".join(g.steps), g.fused[0] if g.fused else None, [op for op, _ in g.apart])
        for g in groups(chain, batch)
    ]


def test_chains_are_read_as_the_ops_that_do_most_of_them() -> None:
    assert read("gate-up") == [("linear 28672 + silu_mul", "gated_linear", ["linear", "silu_and_mul"])]
    assert read("mlp") == [("linear 14336 + bias + gelu", "linear", ["linear"]), ("linear 4096", "linear", ["linear"])]
    assert read("residual-norm") == [("add + norm", "rms_norm", ["rms_norm"])]
    assert read("attention") == [("scores + softmax + values", "attention", [])]
    assert [op for _, op, _ in read("qkv")] == ["rms_norm", "linear", None]
    # a kept result is wanted on its own: nothing is fused over it
    assert [s for s, _, _ in read("64 -> linear 64 keep -> bias -> gelu")] == ["linear 64", "bias", "gelu"]
    assert read("64 -> linear 64 -> bias -> silu -> add -> norm")[0][0] == "linear 64 + bias + silu + add"
    assert read("64 -> layernorm")[0][1] == "layer_norm"


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("queries", [1, 100])
def test_every_op_takes_the_problem_it_is_given(name: str, queries: int) -> None:
    """The shapes bind, the plan exists, and the fused kernels write what the chain writes."""
    from pykern import op as registry
    from pykern.commands._occupancy_build import problem_values
    from pykern.plan import TARGETS

    chain = named_chain(name, queries=queries)
    for group in groups(chain, 3):
        for op, shape in [*([group.fused] if group.fused else []), *group.apart]:
            found = registry.get(op)
            assert found.planned(found.problem(problem_values(found, shape, "bfloat16")), TARGETS["90a"]).launches


def ask(*args: str) -> Any:
    result = CliRunner().invoke(command, [*args, "--json"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_figures_are_those_of_the_compiler() -> None:
    """The same numbers that the occupancy program gives for the ops. Needs nvcc."""
    from pykern.commands.occupancy import command as occupancy
    from pykern.jit import toolchain

    try:
        toolchain.find_cuda()
    except ToolchainError as error:
        pytest.skip(f"nothing can be compiled here: {error}")
    row = ask("residual-norm", "--batch", "8", "--kernels")["shipped"]["groups"][0]
    for key, shape in (("before", "x=8x4096"), ("after", "x=8x4096,residual=8x4096")):
        run = CliRunner().invoke(occupancy, ["rms_norm", "--shape", shape, "--arch", "90a", "--json"])
        kernels = json.loads(run.stdout)["kernels"]
        assert [(k["regs"], k["threads"], k["occupancy"]) for k in row[key]] == [
            (k["regs"], k["threads"], k["occupancy"]) for k in kernels
        ]
        assert all(k["spills"] == 0 and 0 < k["regs"] <= 255 for k in row[key])


def test_without_a_compiler_the_estimate_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> None:
        raise ToolchainError("no nvcc here")

    monkeypatch.setattr("pykern.commands._traffic_kernels._kernels", none)
    document = ask("mlp", "--batch", "8", "--kernels")
    assert document["cost"]["estimate"] is True
    assert document["shipped"]["groups"] is None and "no nvcc here" in document["shipped"]["why"]
    shown = CliRunner().invoke(command, ["mlp", "--batch", "8", "--kernels"])
    assert shown.exit_code == 0 and "no nvcc here" in shown.stdout and "estimate" in shown.stdout


def test_what_the_ops_do_not_take_is_refused() -> None:
    for args in (["--weights", "int4"], ["--dtype", "fp8"], ["--cc", "7.0"]):
        result = CliRunner().invoke(command, ["mlp", "--kernels", *args])
        assert result.exit_code == 2 and "error: --" in result.stderr
