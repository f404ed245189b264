"""Merge partial attention states: out = (wa a + wb b) / (wa + wb), lse = log(wa + wb), w = exp(lse), natural log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykern.errors import require
from pykern.op import Case, Op, Spec, Tolerance
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, ceil_div, template
from pykern.schema import FLOATS, ITEMSIZE, Out, Problem, Tensor

THREADS = 256
EMPTY = "lse"  # fill of an lse: normal values, about a third of them -inf


def check(p: Problem) -> None:
    require(p.d >= 1, "out_a.shape[2]", p.d, "a head_dim of at least 1")
    require(p.d < 2**31 and p.h < 2**31, "out_a.shape", p["out_a"].shape, "heads and head_dim below 2^31")


def plan(p: Problem, target: Target) -> Plan:
    a, b, out = p["out_a"], p["out_b"], p.outs.get("out")
    strides = [s for x in (a, b) for s, n in zip(x.strides[:2], x.shape[:2], strict=True) if n > 1]
    widest = min(a.vector(*strides, p.d), b.vector(*strides, p.d), out.vector(p.d) if out else 16 // a.itemsize)
    vec = widest if widest == 16 // a.itemsize else 1
    launch = Launch(
        template("merge_states", a.dtype, vec),
        ceil_div(p.t * p.h * (p.d // vec), THREADS),
        THREADS,
        (
            In("out_a"), In("lse_a"), In("out_b"), In("lse_b"), OutPtr("out"), OutPtr("lse"),
            I64(p.t), I32(p.h), I32(p.d), I64(a.strides[0]), I64(a.strides[1]), I64(b.strides[0]), I64(b.strides[1]),
            I64(p["lse_a"].strides[0]), I64(p["lse_b"].strides[0]),
        ),
    )  # fmt: skip
    why = f"{vec} elements an access" + ("" if vec > 1 else ": rows are not 16-byte aligned")
    return Plan((launch,), numerics=a.dtype, variant="merge_states", why=(why,))


def reference(out_a: Any, lse_a: Any, out_b: Any, lse_b: Any) -> tuple[Any, Any]:
    import torch

    la, lb = lse_a.double()[..., None], lse_b.double()[..., None]
    top = torch.maximum(la, lb)
    none = top == -torch.inf
    wa, wb = (torch.where(none, 0.0, torch.exp(x - torch.where(none, 0.0, top))) for x in (la, lb))
    # An empty state's out does not matter, even NaN.
    a, b = (torch.where(x == -torch.inf, 0.0, y.double()) for x, y in ((la, out_a), (lb, out_b)))
    total = torch.where(none, 1.0, wa + wb)
    return (wa * a + wb * b) / total, torch.where(none, -torch.inf, top + torch.log(total))[..., 0]


def tolerance(dtype: str) -> Tolerance:
    return {
        "float32": Tolerance(2e-6, 1e-6, "two products and a division"),
        "float16": Tolerance(1e-3, 1e-6, "one rounding to 11 bits"),
        "bfloat16": Tolerance(8e-3, 1e-6, "one rounding to 8 bits"),
    }[dtype]


def batch(dtype: str, t: int, h: int, d: int, layouts: tuple[str, str] = ("contiguous", "contiguous")) -> Case:
    return {
        "out_a": Spec(dtype, (t, h, d), layouts[0]),
        "lse_a": Spec("float32", (t, h), fill=EMPTY),
        "out_b": Spec(dtype, (t, h, d), layouts[1]),
        "lse_b": Spec("float32", (t, h), fill=EMPTY),
    }


def make(case: Case, rng: Any) -> dict[str, Any]:
    """Random states; about a third of each side is empty, with NaN in its out."""
    import torch

    from pykern.testing import make_tensor

    args = {name: make_tensor(case[name], rng) for name in ("out_a", "lse_a", "out_b", "lse_b")}
    for side in "ab":
        lse, out = args[f"lse_{side}"], args[f"out_{side}"]
        lse *= 4
        empty = torch.rand(lse.shape, generator=rng) < 0.33
        lse[empty] = -torch.inf
        if case[f"out_{side}"].layout != "expanded":
            out[empty] = torch.nan
    return args


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield batch(dtype, 3, 2, 16)
        yield batch(dtype, 3, 2, 3)


def draw(draw: Any) -> Case:
    from pykern.testing import sizes

    dtype, layouts = draw.one_of(FLOATS), ("contiguous", "contiguous", "rows", "offset", "expanded")
    d = draw.one_of((1, 3, 16 // ITEMSIZE[dtype], 64, 80))
    return batch(dtype, draw(sizes(0, 9)), draw.one_of((1, 2, 7)), d, (draw.one_of(layouts), draw.one_of(layouts)))


def nbytes(p: Problem) -> int:
    return 3 * p["out_a"].nbytes + 3 * p["lse_a"].nbytes


def flops(p: Problem) -> int:
    return 4 * p["out_a"].numel


op = Op(
    name="merge_states",
    source="ops/merge_states.cuh",
    inputs=(
        Tensor("out_a", "t h d"),
        Tensor("lse_a", "t h", ("float32",)),
        Tensor("out_b", "t h d", "like out_a"),
        Tensor("lse_b", "t h", ("float32",)),
    ),
    outputs=(Out("out", "t h d", "like out_a"), Out("lse", "t h", "float32")),
    plan=plan,
    reference=reference,
    tolerance=tolerance,
    cases=cases,
    draw=draw,
    make=make,
    check=check,
    nbytes=nbytes,
    flops=flops,
    inplace=("out_a", "out_b"),
    rowwise=(("out_a", 0), ("lse_a", 0), ("out_b", 0), ("lse_b", 0)),
    doc="""Merge attention over two disjoint sets of keys into attention over both.

    Args:
        out_a, out_b: ``[tokens, heads, d]``, float32, float16 or bfloat16, as ``attention`` returns; last stride 1.
        lse_a, lse_b: float32 ``[tokens, heads]``, natural log (other libraries use base 2: multiply theirs by ln 2).
        out: optional ``(out, lse)`` to write; out may be out_a or out_b itself.

    Returns:
        ``(out, lse)``, lse natural log again. A state with lse -inf is empty: merging it gives the other one bit for
        bit; two empty ones give (0, -inf).

    Raises:
        ArgumentError: shapes, dtypes or strides that are not as above.
    """,
    mutants=(
        ("} else if (lb == -INFINITY) {", "} else if (lb == INFINITY) {"),
        ("fmaf(fa[i], wa, fb[i] * wb) * share", "fmaf(fa[i], wa, fb[i] * wb)"),
        ("expf(lb - top)", "exp2f(lb - top)"),
    ),
    benches=(batch("bfloat16", 8192, 32, 128),),
)
