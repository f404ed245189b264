"""Mistakes in a new op's declaration and plan: refused by name, before anything is compiled or launched."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pykern.errors import ArgumentError
from pykern.op import Op, Tolerance, all_ops, register
from pykern.plan import F32, I32, I64, In, Launch, OutPtr, Plan, Run, TensorMap, Workspace, Ws
from pykern.schema import Out, Scalar, Tensor

SOURCE = str(Path(__file__).parent / "kernels" / "contract.cuh")
X = Tensor("x", "n", ("float32",))
number = itertools.count()


def launch(**change: Any) -> Launch:
    given: dict[str, Any] = {"kernel": "no_such_kernel", "grid": 1, "block": 32, "args": (In("x"), OutPtr("y"))}
    return Launch(**{**given, **change})


def make(plan: Callable[..., Any] = lambda p, target: Plan((launch(),)), **change: Any) -> Op:
    given: dict[str, Any] = {
        "name": f"declared_{next(number)}", "source": SOURCE, "inputs": (X,), "outputs": (Out("y", "n"),), "plan": plan,
        "reference": lambda x: x, "tolerance": lambda dtype: Tolerance(0, 0), "cases": lambda: [],
        "draw": lambda draw: {}, "nbytes": lambda p: 0, "flops": lambda p: 0,
    }  # fmt: skip
    return Op(**{**given, **change})


DECLARATIONS: list[tuple[dict[str, Any], str]] = [
    ({"name": ""}, "op.name: got ''"),
    ({"name": "new-op"}, "op.name: got 'new-op'"),
    ({"name": "lambda"}, "op.name: got 'lambda'"),
    ({"name": None}, "op.name: got None"),
    ({"inputs": X}, "inputs: got Tensor"),
    ({"inputs": (X, 3)}, "inputs: got"),
    ({"inputs": (X, X)}, "argument: got 'x'"),
    ({"inputs": (Tensor("lambda", "n"),)}, "argument: got 'lambda'"),
    ({"inputs": (Tensor("out", "n"),)}, "argument: got 'out'"),
    ({"inputs": (Tensor("x", "n+"),)}, r"x.dims: got 'n\+'"),
    ({"inputs": (Tensor("x", "n *m"),)}, r"x.dims: got '\*m'"),
    ({"inputs": (Tensor("x", "n//2 n"),)}, "x.dims: got 'n//2', allowed: names bound"),
    ({"inputs": (Tensor("x", "n", ("fp32",)),)}, "x.dtypes: got 'fp32'"),
    ({"inputs": (Tensor("x", "n", "float32"),)}, "x.dtypes: got 'float32', allowed: a tuple"),
    ({"inputs": (Tensor("x", "n", "like z"),)}, "x.dtypes: got 'like z'"),
    ({"inputs": (Tensor("x", "n", role="output"),)}, "x.role: got 'output'"),  # type: ignore[arg-type]
    ({"inputs": (Tensor("x", "n", strides="first"),)}, "x.strides: got 'first'"),  # type: ignore[arg-type]
    ({"inputs": (X, Scalar("s", "double", 1.0))}, "s.type: got 'double'"),  # type: ignore[arg-type]
    ({"inputs": (X, Scalar("s", "float"))}, "s.default: got None, allowed: a float, or required"),
    ({"inputs": (X, Scalar("s", "int", True))}, "s.default: got True"),
    ({"inputs": (X, Scalar("s", "str", "a", choices=("b", "c")))}, "s.default: got 'a', allowed: one of"),
    ({"inputs": tuple(Tensor(f"x{i}", "n") for i in range(49))}, "tensors: got 49, allowed: at most 48"),
    ({"inputs": (X, *(Scalar(f"s{i}", "int", 1) for i in range(33)))}, "scalars: got 33"),
    ({"outputs": tuple(Out(f"y{i}", "n") for i in range(9))}, "outputs: got 9, allowed: at most 8"),
    ({"outputs": (Out("x", "n"),)}, "argument: got 'x'"),
    ({"outputs": (Out("y", "z"),)}, "y.dims: got 'z', allowed: names bound by an input before: n"),
    ({"outputs": (Out("y", "n", "float3"),)}, "y.dtype: got 'float3'"),
    ({"outputs": (Out("y", "n", "like z"),)}, "y.dtype: got 'like z'"),
    ({"plan": None}, "plan: got None, allowed: a function"),
    ({"tolerance": 1e-3}, "tolerance: got 0.001"),
    ({"inplace": ("z",)}, "inplace: got 'z'"),
    ({"rowwise": (("z", 0),)}, "rowwise: got 'z'"),
    ({"keyword_only": "z"}, "keyword_only: got 'z'"),
]


@pytest.mark.parametrize(("change", "says"), DECLARATIONS, ids=[says for _, says in DECLARATIONS])
def test_a_wrong_declaration_is_named(change: dict[str, Any], says: str) -> None:
    make()
    with pytest.raises(ArgumentError, match=rf"{says}.*"):
        make(**change)


def args(*given: Any) -> Plan:
    return Plan((launch(args=given),))


PLANS: list[tuple[Any, str]] = [
    (None, "plan: got NoneType"),
    ([launch()], "plan: got list"),
    (Plan(launch()), "plan.launches: got Launch"),  # type: ignore[arg-type]
    (Plan((3,)), "plan.launches: got"),  # type: ignore[arg-type]
    (Plan((launch(),) * 9), "plan.launches: got 9, allowed: at most 8"),
    (Plan((launch(),), (Workspace(8),) * 9), "plan.workspaces: got 9, allowed: at most 8"),
    (Plan((launch(),), (Workspace(-5),)), r"workspaces\[0\].nbytes: got -5"),
    (Plan((launch(),), (Workspace(1.5),)), r"workspaces\[0\].nbytes: got 1.5"),  # type: ignore[arg-type]
    (args(In("z")), r"args\[0\]: got In\(name='z', item=0\), allowed: In of x"),
    (args(In("x", 1)), r"args\[0\]: got In\(name='x', item=1\), allowed: items 0..0"),
    (args(OutPtr("x")), "allowed: OutPtr of y"),
    (args(Ws(0)), "allowed: one of the plan's 0 workspaces"),  # it would have written anywhere
    (args(Run("n")), "allowed: Run of "),
    (args(Run("s", "f64")), "allowed: f32, i32, i64"),  # type: ignore[arg-type]
    (args(4), "got int 4, allowed: In, OutPtr"),
    (args(I32(2**31)), "got 2147483648, allowed: -2147483648..2147483647"),  # it would have wrapped
    (args(I32(4.0)), "got 4.0, allowed: an int"),  # type: ignore[arg-type]
    (args(I64(2**63)), "got 9223372036854775808"),
    (args(F32(1e39)), "a float within float32's range"),
    (args(F32("1")), "a float within float32's range"),  # type: ignore[arg-type]
    (args(*[I32(1)] * 65), "args: got 65, allowed: at most 64"),
    (args(*[TensorMap(In("x"), "float32", 4, 4, 4, (4, 4), 0)] * 5), "tensor maps: got 5, allowed: at most 4"),
    (args(TensorMap(In("z"), "float32", 4, 4, 4, (4, 4), 0)), "allowed: In of x"),
    (args(TensorMap(In("x"), "fp32", 4, 4, 4, (4, 4), 0)), "dtype: got 'fp32'"),
    (Plan((launch(grid=1.5),)), "grid: got 1.5, allowed: an int, or three"),
    (Plan((launch(grid=(1, 1, 1, 1)),)), "grid: got"),
    (Plan((launch(block=True),)), "block: got True"),
    (Plan((launch(grid=0),)), "grid: got"),
    (Plan((launch(smem=-1),)), "shared memory: got -1"),
    (Plan((launch(smem="1"),)), "smem: got '1'"),
]


@pytest.mark.parametrize(("plan", "says"), PLANS, ids=[says for _, says in PLANS])
def test_a_wrong_plan_is_named(plan: Any, says: str) -> None:
    op = make(lambda p, target: plan, inputs=(X, Scalar("s", "float", 1.0)))
    with pytest.raises(ArgumentError, match=says):
        op(torch.arange(4.0))


def test_names_are_taken_once() -> None:
    import pykern

    assert pykern.softmax(torch.zeros(1, 4)).sum() == 1
    with pytest.raises(ArgumentError, match="op.name: got 'softmax', allowed: a name that no other op"):
        make(name="softmax")(torch.arange(4.0))  # it would have been the other op
    for wrong in (None, "softmax", 3):
        with pytest.raises(ArgumentError, match="^op: got"):
            register(wrong)  # type: ignore[arg-type]


def test_every_op_of_the_package_is_declared_well() -> None:
    assert len(all_ops()) >= 19
