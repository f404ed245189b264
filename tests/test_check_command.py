"""``pykern check``: planted bugs in a .cuh file and in an op's file, its table, its JSON, its exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pykern.cli import main

pytestmark = pytest.mark.usefixtures("own_registry")

# One kernel with every bug, chosen at run time, so that it is compiled once. `// BUG n` marks the line to be named.
KERNEL = """#pragma once
#include "core/vec.cuh"

struct BugSmem {
  float v[64];
};

__global__ void buggy(const float* x, float* y, int n, int bug) {
  PK_SMEM(BugSmem, smem);
  pk::grid_wait();
  const int t = threadIdx.x;
  if (bug != 3) smem.v[t] = t < n ? x[t] : 0.0f;
  if (bug != 1) __syncthreads();
  float v = smem.v[63 - t];  // BUG 1 BUG 3
  if (bug == 2 && t == 0) v += x[n];  // BUG 2
  if (bug == 4 && t == 0) v += pk::ld_vec<float, 4>(x + 1)[0];  // BUG 4
  if (t < n) y[t] = v;
}
"""
OP = '''
from pathlib import Path

import torch

from pykern.op import Op, Spec, Tolerance
from pykern.plan import I32, In, Launch, OutPtr, Plan, Run
from pykern.schema import Out, Scalar, Tensor


def plan(p, target):
    args = (In("x"), OutPtr("y"), I32(p.n), Run("bug", "i32"))
    return Plan((Launch("::buggy", 1, 64, args),), numerics="one", variant="buggy")


op = Op(
    name="buggy_NUMBER",
    source=str(Path(__file__).with_name("buggy.cuh")),
    inputs=(Tensor("x", "n", ("float32",)), Scalar("bug", "int", 0)),
    outputs=(Out("y", "n"),),
    plan=plan,
    reference=lambda x, bug=0: torch.cat([torch.zeros(64 - len(x)), x]).flip(0)[: len(x)].double(),
    tolerance=lambda dtype: Tolerance(0, 0),
    cases=lambda: [{"x": Spec("float32", (64,))}, {"x": Spec("float32", (60,))}],
    draw=lambda draw: {"x": Spec("float32", (60,))},
    nbytes=lambda p: 8 * p.n,
    flops=lambda p: 0,
)
'''
KINDS = {1: "shared_race", 2: "out_of_bounds", 3: "uninitialised_shared", 4: "misaligned"}


def line_of(bug: int) -> int:
    return next(n for n, text in enumerate(KERNEL.splitlines(), 1) if f"BUG {bug}" in text)


def run(*args: str) -> Any:
    done = CliRunner().invoke(main, ["check", *args])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


@pytest.fixture(scope="module")
def cuh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("buggy") / "buggy.cuh"
    path.write_text(KERNEL)
    return path


@pytest.fixture(scope="module")
def op_file(cuh: Path) -> Path:
    path = cuh.with_name("buggy_op.py")
    path.write_text(OP.replace("NUMBER", str(abs(hash(str(path))) % 10**8)))
    return path


def arguments(source: Path, bug: int) -> list[str]:
    if source.suffix == ".py":
        return [str(source), "--shape", "60", "--set", f"bug={bug}"]
    args = [f"--arg={value}" for value in ("f32[60]", "f32[60]", 60, bug)]
    return [str(source), "--block", "64", *args]


@pytest.fixture(params=["cuh", "op_file"])
def source(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("bug", KINDS)
def test_a_planted_bug_is_found_where_it_is(bug: int, source: Path) -> None:
    text = run(*arguments(source, bug), "--seeds", "4")
    assert text.exit_code == 1
    first = text.output.splitlines()[0]
    assert KINDS[bug] in text.output and f"buggy.cuh:{line_of(bug)}" in text.output and "(seed " in first, text.output
    assert "nothing found" not in text.output
    report = run(*arguments(source, bug), "--seeds", "4", "--json")
    assert report.exit_code == 1
    found = json.loads(report.stdout)["findings"]
    match = [f for f in found if f["kind"] == KINDS[bug]]
    assert match, found
    assert any(f["line"] == line_of(bug) and f["file"] == "buggy.cuh" and 0 <= f["seed"] < 4 for f in match), match
    keys = [(f["kind"], f["kernel"], f["file"], f["line"]) for f in found]
    assert len(set(keys)) == len(keys), "a finding is told once, whatever the number of seeds"


def test_the_right_kernel_is_clean(source: Path) -> None:
    done = run(*arguments(source, 0))
    assert done.exit_code == 0 and f"{source}: nothing found in 3 schedules" in done.output
    assert "1 schedule\n" in run(*arguments(source, 0), "--seeds", "1").output
    report = json.loads(run(*arguments(source, 0), "--json").stdout)
    assert report["findings"] == [] and report["target"] == str(source)
    (launch,) = report["launches"]
    assert launch["kernel"].endswith("buggy") and (launch["blocks"], launch["threads"]) == (1, 64)
    assert [(t["name"], t["unique_bytes_read"], t["unique_bytes_written"]) for t in launch["tensors"]] == [
        ("x", 240, 0),
        ("y", 0, 240),
    ]


def test_the_table_counts(source: Path) -> None:
    """60 floats by two warps: 8 sectors each of x and y; shared memory one wavefront a request."""
    lines = json.loads(run(*arguments(source, 0), "--json").stdout)["lines"]
    rows = {(r["line"], r["space"], r["op"]): r for r in lines}
    load = KERNEL.splitlines().index("  if (bug != 3) smem.v[t] = t < n ? x[t] : 0.0f;") + 1
    store = KERNEL.splitlines().index("  if (t < n) y[t] = v;") + 1
    for key in ((load, "global", "load"), (store, "global", "store")):
        row = rows[key]
        assert (row["requests"], row["sectors"], row["ideal_sectors"], row["unique_bytes"]) == (2, 8, 8, 240), row
    shared = rows[line_of(1), "shared", "load"]
    assert (shared["requests"], shared["wavefronts"], shared["ideal_wavefronts"]) == (2, 2, 2)
    assert (rows[load, "shared", "store"]["requests"], len(rows)) == (2, 4)


def test_the_table_is_readable_in_a_pipe(source: Path) -> None:
    output = run(*arguments(source, 0)).output
    assert max(map(len, output.splitlines()[1:])) <= 110
    header, *rows = output.splitlines()[1:6]
    assert header.split() == "line access requests sect/req ideal wf/req ideal unique bytes".split()
    assert len(rows) == 4 and all(row.startswith("buggy.cuh:") for row in rows)


def test_the_json_is_what_coalescing_reads(source: Path) -> None:
    report = run(*arguments(source, 0), "--json").stdout
    done = CliRunner().invoke(main, ["coalescing", "--table", "-", "--json"], input=report)
    assert done.exit_code == 0, done.output
    ranked = json.loads(done.stdout)["lines"]
    mine = json.loads(report)["lines"]
    key = ("file", "line", "space", "op", "bytes", "requests", "sectors", "wavefronts")
    assert sorted([tuple(r[k] for k in key) for r in ranked]) == sorted([tuple(r[k] for k in key) for r in mine])
    text = CliRunner().invoke(main, ["coalescing", "--table", "-"], input=report)
    assert text.exit_code == 0 and "buggy.cuh" in text.output


def test_an_op_of_the_package_with_scalars() -> None:
    done = run("softmax", "--shape", "3x70", "--set", "log=true", "--seeds", "2", "--json")
    report = json.loads(done.stdout)
    assert done.exit_code == 0 and report["findings"] == []
    assert [t["bytes"] for t in report["launches"][0]["tensors"]] == [3 * 70 * 4] * 2


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["no_such_op"], "op: got 'no_such_op'"),
        (["nowhere.py"], "no such file"),
        (["nowhere.cuh"], "source: got 'nowhere.cuh'"),
        (["softmax", "--seeds", "0"], "--seeds: got 0"),
        (["softmax", "--shape", "3y"], "--shape: got '3y'"),
        (["softmax", "--shape", "3x4,5"], "at most 1 shapes"),
        (["softmax", "--shape", "w=3x4"], "--shape: got 'w'"),
        (["softmax", "--set", "log=maybe"], "--set log: got 'maybe'"),
        (["softmax", "--set", "nothing=1"], "--set: got 'nothing'"),
        (["softmax", "--dtype", "fp3"], "dtype: got 'fp3'"),
        (["softmax", "--arch", "99"], "arch: got '99'"),
        (["softmax", "--arg", "3"], "--arg: got 3, allowed: none for an op"),
        (["rms_norm", "--shape", "x=4x64,weight=65"], "weight.shape[0]: got 65"),
        (["CUH", "--kernel", "other"], "kernel: got 'other'"),
        (["CUH", "--grid", "1y"], "--grid: got '1y'"),
        (["CUH", "--block=2000", "--arg=f32[4]", "--arg=f32[4]", "--arg=4", "--arg=0"], "block.x: got 2000"),
        (["CUH", "--arg", "f33[4]"], "dtype: got 'f33'"),
        (["CUH", "--arg", "many"], "--arg: got 'many'"),
        (["CUH"], "arguments: got 0, allowed: 4"),
        (["CUH", "--arg=i32[4]", "--arg=f32[4]", "--arg=4", "--arg=0"], "x: "),
    ],
)
def test_bad_input_is_named_and_exits_with_2(args: list[str], says: str, cuh: Path) -> None:
    done = run(*[str(cuh) if a == "CUH" else a for a in args])
    assert done.exit_code == 2, done.output
    assert done.stderr.startswith("error: ") and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_a_file_of_several_kernels_asks_which(tmp_path: Path) -> None:
    path = tmp_path / "two.cuh"
    path.write_text("__global__ void a(int n) {}\n__global__ void b(int n) {}\n")
    done = run(str(path), "--arg", "1")
    assert done.exit_code == 2 and "--kernel: got None, allowed: one of a, b" in done.stderr


def test_a_kernel_that_does_not_compile_exits_with_2(tmp_path: Path) -> None:
    path = tmp_path / "broken.cuh"
    path.write_text("__global__ void broken(int n) {\n  int x = nothing;\n}\n")
    done = run(str(path), "--arg", "1")
    assert done.exit_code == 2 and "broken.cuh:2" in done.stderr and "nothing" in done.stderr


@pytest.mark.parametrize("folder", ["plain", "host", "core"])
def test_findings_name_the_users_file(folder: str, tmp_path: Path) -> None:
    """Not the generated one, which binutils name where a line table begins; nor are folders of ours yours."""
    path = tmp_path / folder / "mine.cuh"
    path.parent.mkdir()
    path.write_text(
        "template <class T>\n"
        "__device__ void put(T* y, int n) {\n"
        "  y[n] = T(1);  // the first code of the file that is not inlined\n"
        "}\n"
        "__global__ void outside(float* y, int n) { put(y, n); }\n"
    )
    done = run(str(path), "--block", "1", "--arg", "f32[32]", "--arg", "32", "--json", "--seeds", "1")
    (finding,) = json.loads(done.stdout)["findings"]
    assert done.exit_code == 1 and (finding["file"], finding["line"]) == ("mine.cuh", 3), finding
