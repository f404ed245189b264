"""An edited kernel source is picked up by the next call with the same arguments, in the same process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from pykern import op as registry
from pykern.jit import watch
from pykern.op import Op, Tolerance
from pykern.plan import I32, In, Launch, OutPtr, Plan
from pykern.schema import Out, Problem, Tensor

KERNEL = """#include "core/vec.cuh"
#include "factor.cuh"
namespace pk {
__global__ void times(const float* x, float* y, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  grid_wait();
  if (i < n) st(y + i, kFactor * ld(x + i));
}
}  // namespace pk
"""


def factor(path: Path, value: int) -> None:
    path.write_text(f"#pragma once\nnamespace pk {{ constexpr float kFactor = {value}; }}\n")


def test_an_edited_kernel_is_used_by_the_next_call(tmp_path: Path) -> None:
    source, header = tmp_path / "times.cuh", tmp_path / "factor.cuh"
    source.write_text(KERNEL)
    factor(header, 2)

    def plan(p: Problem, target: object) -> Plan:
        return Plan((Launch("times", 1, 32, (In("x"), OutPtr("y"), I32(p.n))),), numerics="", variant="times")

    times = registry.register(
        Op(
            name="watched_times",
            source=str(source),
            inputs=(Tensor("x", "n", ("float32",)),),
            outputs=(Out("y", "n"),),
            plan=plan,
            reference=lambda x: x,
            tolerance=lambda _: Tolerance(0, 0),
            cases=lambda: [],
            draw=lambda _: {},
            nbytes=lambda _: 0,
            flops=lambda _: 0,
        )
    )
    x = torch.ones(8)
    assert times(x).tolist() == [2.0] * 8
    time.sleep(2 * watch.SECONDS)  # the file has been looked at once
    source.write_text(KERNEL.replace("kFactor * ld(x + i)", "kFactor * ld(x + i) + 1"))
    becomes(times, x, 3.0)
    factor(header, 5)
    becomes(times, x, 6.0)


def becomes(times: Op, x: torch.Tensor, value: float) -> None:
    deadline = time.monotonic() + 20
    while times(x).tolist() != [value] * 8:
        assert time.monotonic() < deadline, "the edit was not picked up"
        time.sleep(0.05)


def test_it_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKERN_WATCH", "0")
    assert watch.start(lambda: None, lambda: []) is None
