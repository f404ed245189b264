"""Every part of a plan, exercised by a small kernel: on the host backend, under its checker, and on a GPU."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import pykern
from pykern import op as registry
from pykern.errors import ArgumentError, CheckError, KernelError
from pykern.op import Op, Tolerance, host
from pykern.plan import I32, TARGETS, In, Launch, OutPtr, Plan, TensorMap, Tuning, Workspace, Ws, check_plan, tuned
from pykern.schema import Out, Problem, Scalar, Tensor

SOURCE = str(Path(__file__).parent / "kernels" / "contract.cuh")
HOST = [("cpu", seed) for seed in range(4)]
GPU = [pytest.param("cuda", 0, marks=pytest.mark.gpu)]


def make_op(name: str, inputs: tuple[Any, ...], outputs: tuple[Out, ...], plan: Callable[..., Plan]) -> Op:
    """An op of this file: only what a call needs."""
    return registry.register(
        Op(
            name=f"contract_{name}", source=SOURCE, inputs=inputs, outputs=outputs, plan=plan,
            reference=lambda **_: None, tolerance=lambda _: Tolerance(0, 0), cases=lambda: [], draw=lambda _: {},
            nbytes=lambda _: 0, flops=lambda _: 0,
        )
    )  # fmt: skip


def tile_plan(p: Problem, target: Any) -> Plan:
    x = p["x"]
    box = (8, 32)
    maps = [TensorMap(t, "float32", p.m, p.n, s, box, 0) for t, s in ((In("x"), x.strides[0]), (OutPtr("y"), p.n))]
    grid = (-(-p.n // 32), -(-p.m // 8), 1)
    return Plan((Launch("tile_copy", grid, 32, tuple(maps)),), numerics="copy", variant="tile_copy")


def chain_plan(p: Problem, target: Any) -> Plan:
    first = Launch("squares", -(-p.m * p.n // 64), 64, (In("x"), Ws(0), I32(p.m * p.n)))
    then = Launch("running", -(-p.m // 32), 32, (Ws(0), In("scale"), OutPtr("y"), I32(p.m), I32(p.n)))
    return Plan((first, then), (Workspace(p.m * p.n * 4),), numerics="chain", variant="chain")


def sum_plan(kernel: str, cooperative: bool) -> Callable[..., Plan]:
    def plan(p: Problem, target: Any) -> Plan:
        blocks = tuned(target, f"contract_{kernel}", "blocks", 3)
        args = (In("x"), Ws(0), Ws(1), OutPtr("y"), I32(p.n))
        launch = Launch(kernel, blocks, 128, args, cooperative=cooperative, pdl=not cooperative)
        workspaces = (Workspace(blocks * 4), Workspace(4, counter=True))
        return Plan((launch,), workspaces, numerics=f"{blocks}", variant=kernel, why=(f"{blocks} blocks",))

    return plan


def pair_plan(p: Problem, target: Any) -> Plan:
    launch = Launch("pair_swap", p.n, 32, (In("x"), OutPtr("y")), cluster=2)
    return Plan((launch,), numerics="copy", variant="pair_swap")


X2, X1 = Tensor("x", "m n", ("float32",)), Tensor("x", "n", ("float32",), strides="contiguous")
TILE = make_op("tile", (X2,), (Out("y", "m n"),), tile_plan)
SCALE = Tensor("scale", "1", ("float32",), role="weight")
WHOLE = Tensor("x", "m n", ("float32",), strides="contiguous")
CHAIN = make_op("chain", (WHOLE, SCALE), (Out("y", "m n"),), chain_plan)
LAST = make_op("last_block_sum", (X1,), (Out("y", "1"),), sum_plan("last_block_sum", False))
GRID = make_op("grid_sum", (X1,), (Out("y", lambda p: (3,)),), sum_plan("grid_sum", True))
PAIR = make_op("pair", (X1,), (Out("y", "n"),), pair_plan)


@contextmanager
def on(device: str, seed: int) -> Iterator[None]:
    """CPU calls run under the checker with a random schedule and order of asynchronous copies."""
    if device == "cuda":
        yield
    else:
        with host(check=True, seed=seed, async_order=("eager", "lazy", "random")[seed % 3]):
            yield


@pytest.mark.parametrize(("device", "seed"), HOST + GPU)
@pytest.mark.parametrize(("m", "n"), [(8, 32), (20, 100), (3, 4)])
def test_tensor_maps(device: str, seed: int, m: int, n: int) -> None:
    x = torch.randn(m, 2 * n, device=device)[:, :n]  # rows with a gap between
    with on(device, seed):
        assert torch.equal(TILE(x), x)


def test_an_impossible_tensor_map_is_refused() -> None:
    with pytest.raises(KernelError, match="tensor map"):
        TILE(torch.randn(4, 5)[:, :4])  # rows are 20 bytes apart: not a multiple of 16


@pytest.mark.parametrize(("device", "seed"), HOST + GPU)
def test_dependent_launches_and_workspaces(device: str, seed: int) -> None:
    x, scale = torch.randint(-4, 5, (5, 40), device=device).float(), torch.tensor([2.0], device=device)
    with on(device, seed):
        for _ in range(3):
            assert torch.equal(CHAIN(x, scale), 2 * (x * x).cumsum(-1))


def test_a_dependent_launch_that_reads_before_the_wait_is_caught(tmp_path: Path) -> None:
    text = Path(SOURCE).read_text()
    planted = text.replace("  const float s = ld(scale);  // a weight: may be read before the wait\n", "").replace(
        "int row = blockIdx.x * blockDim.x + threadIdx.x;\n  grid_wait();",
        "int row = blockIdx.x * blockDim.x + threadIdx.x;\n  const float s = ld(scale) + 0 * ld(work);\n  grid_wait();",
    )
    assert planted != text
    path = tmp_path / "early.cuh"
    path.write_text(planted)

    def plan(p: Problem, target: Any) -> Plan:
        made = chain_plan(p, target)
        return Plan(tuple(Launch(**{**vars(la), "source": str(path)}) for la in made.launches), made.workspaces)

    early = make_op("early", CHAIN.inputs, CHAIN.outputs, plan)
    with pytest.raises(CheckError, match="wait"), host(check=True, seed=1):
        early(torch.ones(5, 40), torch.ones(1))


@pytest.mark.parametrize(("device", "seed"), HOST + GPU)
def test_counters_reset_themselves(device: str, seed: int) -> None:
    x = torch.randint(-9, 10, (1000,), device=device).float()
    with on(device, seed):
        for _ in range(4):
            assert LAST(x).item() == x.sum().item()


@pytest.mark.parametrize(("device", "seed"), HOST + GPU)
def test_cooperative_launches(device: str, seed: int) -> None:
    x = torch.randint(-9, 10, (1000,), device=device).float()
    with on(device, seed):
        for _ in range(3):
            assert GRID(x).tolist() == [x.sum().item()] * 3


@pytest.mark.parametrize(("device", "seed"), HOST + GPU)
def test_clusters(device: str, seed: int) -> None:
    x = torch.arange(8.0, device=device)
    with on(device, seed):
        assert torch.equal(PAIR(x), x.view(-1, 2).flip(1).reshape(-1))


def test_a_plan_no_gpu_could_launch_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a multiple of the cluster"):
        PAIR(torch.zeros(3))
    with pytest.raises(ArgumentError, match=r"cluster.*sm_80"), host(arch="80"):
        PAIR(torch.zeros(4))
    for wrong, name in (
        (Launch("k", 1, 2048, ()), "block"),
        (Launch("k", (1, 70000, 1), 32, ()), "grid"),
        (Launch("k", 1, 32, (), smem=300_000), "shared memory"),
    ):
        with pytest.raises(ArgumentError, match=name):
            check_plan(Plan((wrong,)), TARGETS["90a"], "op")


def test_a_tuning_file_takes_effect_at_once() -> None:
    x = torch.ones(1000)
    misses = registry.runtime().launcher.pkl_misses
    assert LAST(x).item() == 1000
    before = misses()
    LAST(x)
    assert misses() == before, "a second call plans again"
    try:
        registry.use_tuning('{"90a": {"contract_last_block_sum": {"blocks": 7}}}')
        assert LAST(x).item() == 1000 and misses() == before + 1
        plan = LAST.planned(LAST.problem_of_args({"x": x}), host_target())
        assert plan.launches[0].grid == 7
    finally:
        registry.use_tuning(None)
    for wrong in ("[]", "{", '{"90a": 3}'):
        with pytest.raises(ArgumentError, match="tuning file"):
            Tuning.load(wrong)
    registry.use_tuning('{"90a": {"contract_last_block_sum": {"blocks": "many"}}}')
    try:
        with pytest.raises(ArgumentError, match="blocks: got many, allowed: an integer"):
            LAST(x)
    finally:
        registry.use_tuning(None)


def host_target() -> Any:
    with host() as options:
        return options.target()


def test_the_memo_is_bounded_and_threads_share_it() -> None:
    launcher = registry.runtime().launcher
    wrong: list[str] = []

    def work(start: int) -> None:
        for n in range(start, start + 60):
            x = torch.ones(n)
            if LAST(x).item() != n:
                wrong.append(f"n = {n}")
            if n % 20 == 0:
                launcher.pkl_bump_epoch()

    threads = [threading.Thread(target=work, args=(1 + 7 * i,)) for i in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert 0 <= launcher.pkl_memo_size() <= 1 << 15


def test_arguments_by_kind_reach_the_plan() -> None:
    seen: list[Problem] = []

    def plan(p: Problem, target: Any) -> Plan:
        seen.append(p)
        return Plan()

    inputs = (
        Tensor("x", "n", strides="any"), Tensor("many", "", many=True), Tensor("maybe", "n", optional=True),
        Scalar("f", "float", 0.5, key=True), Scalar("i", "int", 3, key=True), Scalar("b", "bool", True, key=True),
        Scalar("s", "str", "plain", key=True), Scalar("free", "float", 1.0),
    )  # fmt: skip
    kinds = make_op("kinds", inputs, (Out("y", "n"),), plan)
    x = torch.zeros(4, dtype=torch.bfloat16)
    many = [x, torch.zeros(2, 3, dtype=torch.int32)]
    text = "a longer text than eight bytes"
    y = kinds(x[::2], many, None, -1.5, -7, False, text, 9.0)
    p = seen[-1]
    assert y.shape == (2,) and p["x"].strides == (2,) and p["maybe"] is None
    assert [t.shape for t in p["many"]] == [(4,), (2, 3)] and p["many"][1].dtype == "int32"
    assert (p.f, p.i, p.b, p.s) == (-1.5, -7, False, text)
    count = len(seen)
    kinds(x[::2], many, None, -1.5, -7, False, text, 4.0)
    assert len(seen) == count, "a scalar that is not part of the plan made a new one"


def test_planner_errors_keep_their_type_and_trace() -> None:
    class Odd(Exception):
        pass

    def plan(p: Problem, target: Any) -> Plan:
        raise Odd("custom", 7)

    odd = make_op("odd", (X1,), (Out("y", "n"),), plan)
    with pytest.raises(Odd) as caught:
        odd(torch.zeros(3))
    assert caught.value.args == ("custom", 7)
    assert any(entry.name == "plan" for entry in caught.traceback)


def test_torch_compile_keeps_ops_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return pykern.softmax(pykern.rms_norm(x * 2, w, 1e-5)) + 1

    x, w = torch.randn(4, 64), torch.randn(64)
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x, w), f(x, w), atol=1e-6)
    into = torch.compile(lambda x: pykern.softmax(x, out=torch.empty_like(x)), fullgraph=True, backend="aot_eager")
    assert torch.equal(into(x), pykern.softmax(x))


@pytest.mark.gpu
def test_graphs_streams_and_devices() -> None:
    x = torch.randn(64, 1000, device="cuda")
    pykern.softmax(x), LAST(x.flatten())  # built before the capture, which refuses to
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y, total = pykern.softmax(x), LAST(x.flatten())
    for _ in range(3):
        x.copy_(torch.randint(-3, 4, x.shape, device="cuda").float())
        graph.replay()
        assert torch.allclose(y, torch.softmax(x, -1), atol=1e-6) and total.item() == x.sum().item()
        assert LAST(x.flatten()).item() == x.sum().item()
    side = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        late.copy_(x)
        z = pykern.softmax(late)
    side.synchronize()
    assert torch.allclose(z, torch.softmax(x, -1), atol=1e-6)
    if torch.cuda.device_count() > 1:
        there = torch.randn(4, 40, device="cuda:1")
        assert pykern.softmax(there).device == there.device and torch.cuda.current_device() == 0


@pytest.mark.gpu
def test_torch_compile_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")

    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return pykern.softmax(pykern.rms_norm(x * 2, w, 1e-5)) + 1

    x, w = torch.randn(64, 256, device="cuda"), torch.randn(256, device="cuda")
    for mode in ("default", "reduce-overhead"):
        compiled = torch.compile(f, fullgraph=True, mode=mode)
        for _ in range(3):
            assert torch.allclose(compiled(x, w), f(x, w), atol=1e-6)
