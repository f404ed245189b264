"""What silu_and_mul and gelu_and_mul share: all but the activation, its choices and how they are documented."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pykern.errors import require
from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.ops._rows import whole
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, ceil_div, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem

SOURCE = "ops/gated_act.cuh"
THREADS, PER = 256, 2  # 2 chunks of each half in flight a thread: 64 bytes, 32 KiB a block of 256


def check(p: Problem) -> None:
    require(p["x"].shape[-1] % 2 == 0, "x.shape[-1]", p["x"].shape[-1], "an even number: two halves side by side")


def make_plan(p: Problem, act: str) -> Plan:
    x = p["x"]
    rows, stride = x.rows("x")
    n = x.shape[-1] // 2
    fast = whole(n, x.itemsize) and p.rows_aligned("x", "y")
    chunks = rows * ceil_div(n, 16 // x.itemsize)
    kernel = template("gated_act", x.dtype, f"Act::{act}", PER)
    args = (In("x"), OutPtr("y"), I64(rows), I64(stride), I32(n), I32(int(fast)))
    why = f"{chunks} chunks of 16 bytes, {PER} a thread"
    why += "" if fast else "; rows not 16-byte aligned: element access"
    launch = Launch(kernel, ceil_div(chunks, THREADS * PER), THREADS, args)
    return Plan((launch,), numerics=x.dtype, variant="gated_act", why=(why,))


def tolerance(dtype: str) -> Tolerance:
    return {
        "float32": Tolerance(5e-6, 1e-6, "ex2.approx and a fast division in the activation"),
        "float16": Tolerance(1.5e-3, 1e-6, "one rounding to 11 bits"),
        "bfloat16": Tolerance(8e-3, 1e-6, "one rounding to 8 bits"),
    }[dtype]


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield {"x": Spec(dtype, (3, 512))}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    dtype = draw.one_of(FLOATS)
    chunk = 16 // ITEMSIZE[dtype]
    n = draw(sizes(1, 700, around=[chunk, 512 * chunk // 4]))
    return {"x": draw(tensor_spec(dtype, (draw(sizes(0, 6)), 2 * n)))}


def torch_gated(name: str) -> Callable[..., Any]:
    """The same in torch: an activation and a product."""

    def call(x: Any, approximate: str = "none") -> Any:
        import torch.nn.functional as F

        a, b = x.chunk(2, -1)
        return F.silu(a) * b if name == "silu" else F.gelu(a, approximate=approximate) * b

    return call


def gated(activation: str, **own: Any) -> Op:
    """``activation``_and_mul: ``own`` is what the other does not share."""
    return Op(
        name=f"{activation}_and_mul",
        source=SOURCE,
        outputs=(Out("y", lambda p: (*p["x"].shape[:-1], p["x"].shape[-1] // 2)),),
        tolerance=tolerance,
        check=check,
        nbytes=lambda p: p["x"].nbytes * 3 // 2,
        flops=lambda p: 3 * p["x"].numel,
        rowwise=(("x", 0),),
        mutants=(
            ("activate<kAct>(g[i]) * u[i]", "activate<kAct>(u[i]) * g[i]"),
            ("x + row[k] * stride + n, at[k]", "x + row[k] * stride, at[k]"),
            ("y + row[k] * n, at[k], n", "y + row[k] * n, at[k], n - 1"),
        ),
        peers={"torch": torch_gated(activation)},
        benches=({"x": Spec("bfloat16", (8192, 2 * 14336))},),
        **own,
    )
