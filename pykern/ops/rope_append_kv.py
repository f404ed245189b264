"""Rotate q and k by their tokens' positions and write k and v to their cache slots, in one launch.

q'[t, h] = rope(q[t, h]); cache_k[slot[t]] = rope(k[t]); cache_v[slot[t]] = v[t].
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykern.errors import require
from pykern.op import Case, Draw, Op, Spec
from pykern.ops import _rope
from pykern.plan import I32, I64, Arg, In, Launch, OutPtr, Plan, Target, ceil_div, template
from pykern.schema import FLOATS, Out, Problem, Scalar, Tensor


def check(p: Problem) -> None:
    _rope.check(p)
    require(p.page_size * p.pages < 2**62, "k_cache.shape", p["k_cache"].shape, "fewer than 2^62 slots")


def plan(p: Problem, target: Target) -> Plan:
    q = p["q"]
    fast = _rope.fast(p, "q", "k", "v", "k_cache", "v_cache", "q_out")
    threads = p.t * (p.h + 2 * p.kh) * _rope.pieces(p, fast, q.itemsize)
    if threads == 0:
        return Plan(numerics=q.dtype, variant="rope_append", why=("no tokens",))
    strides: list[Arg] = [I64(s) for name in ("q", "k", "v") for s in p[name].strides[:2]]
    strides += [I64(s) for name in ("k_cache", "v_cache") for s in p[name].strides[:3]]
    args: tuple[Arg, ...] = (
        In("q"), In("k"), In("v"), In("positions"), In("cos_sin"), In("slots"), OutPtr("q_out"), In("k_cache"),
        In("v_cache"), I64(p.t), I32(p.h), I32(p.kh), I32(p.d), I32(p.r), I64(p.rows), I32(p.page_size), I64(p.pages),
        *strides, I32(int(p.interleaved)), I32(int(fast)),
    )  # fmt: skip
    launch = Launch(template("rope_append", q.dtype), ceil_div(threads, _rope.THREADS), _rope.THREADS, args)
    return Plan(
        (launch,),
        numerics=q.dtype,
        variant="rope_append",
        why=("a thread owns 16 bytes of pairs" if fast else "a thread owns one pair",),
    )


def reference(
    q: Any,
    k: Any,
    v: Any,
    positions: Any,
    cos_sin: Any,
    k_cache: Any,
    v_cache: Any,
    slots: Any,
    interleaved: bool = False,
) -> Any:
    k_new, v_new = k_cache.double().clone(), v_cache.double().clone()
    rotated = _rope.rotate(k, positions, cos_sin, interleaved)
    size = k_cache.shape[1]
    for token, slot in enumerate(slots.tolist()):
        if 0 <= slot < k_cache.shape[0] * size:
            k_new[slot // size, slot % size] = rotated[token]
            v_new[slot // size, slot % size] = v[token].double()
    return _rope.rotate(q, positions, cos_sin, interleaved), k_new, v_new


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield _case(dtype, 3, 4, 2, 64, 64, 4, 3)


def _case(
    dtype: str, t: int, h: int, kh: int, d: int, r: int, pages: int, page_size: int, layout: str = "contiguous"
) -> Case:
    return {
        "q": Spec(dtype, (t, h, d), layout),
        "k": Spec(dtype, (t, kh, d), layout),
        "v": Spec(dtype, (t, kh, d), layout),
        "positions": Spec("int64", (t,)),
        "cos_sin": Spec("float32", (64, r)),
        "k_cache": Spec(dtype, (pages, page_size, kh, d)),
        "v_cache": Spec(dtype, (pages, page_size, kh, d)),
        "slots": Spec("int64", (t,)),
    }


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes

    d = draw(sizes(2, 24, around=[8, 16]))
    r = 2 * draw(sizes(1, d // 2, around=[d // 2]))
    kh = draw(sizes(1, 3))
    layout = draw.one_of(("contiguous", "rows", "offset"))
    case = _case(
        draw.one_of(FLOATS),
        draw(sizes(0, 6)),
        kh * draw(sizes(1, 3)),
        kh,
        d,
        r,
        draw(sizes(2, 4)),
        draw(sizes(3, 5)),
        layout,
    )
    return case | {"interleaved": draw.one_of((False, True))}


def make(case: Case, rng: Any) -> dict[str, Any]:
    """Distinct slots; one in six is -1 (not stored)."""
    import torch

    from pykern.testing import make_tensor

    made: dict[str, Any] = {n: make_tensor(case[n], rng) for n in ("q", "k", "v", "k_cache", "v_cache")}
    t, (pages, size) = case["q"].shape[0], case["k_cache"].shape[:2]
    slots = torch.randperm(pages * size, generator=rng)[:t]
    slots = torch.where(torch.randint(0, 6, (t,), generator=rng) == 0, -1, slots)
    rows, r = case["cos_sin"].shape
    return made | {
        "positions": torch.randint(0, rows, (t,), generator=rng),
        "cos_sin": _rope.angles(rows, r, rng),
        "slots": slots,
        "interleaved": case.get("interleaved", False),
    }


op = Op(
    name="rope_append_kv",
    source="ops/rope.cuh",
    inputs=(
        Tensor("q", "t h d", FLOATS),
        Tensor("k", "t kh d", "like q"),
        Tensor("v", "t kh d", "like q"),
        Tensor("positions", "t", ("int64",), strides="contiguous"),
        Tensor("cos_sin", "rows r", ("float32",), role="weight", strides="contiguous"),
        Tensor("k_cache", "pages page_size kh d", "like q", role="mutated"),
        Tensor("v_cache", "pages page_size kh d", "like q", role="mutated"),
        Tensor("slots", "t", ("int64",), strides="contiguous"),
        Scalar("interleaved", "bool", False, key=True),
    ),
    outputs=(Out("q_out", "t h d", "like q"),),
    plan=plan,
    reference=reference,
    tolerance=_rope.tolerance,
    cases=cases,
    draw=draw,
    make=make,
    check=check,
    nbytes=lambda p: 2 * (p["q"].nbytes + p["k"].nbytes + p["v"].nbytes) + p.t * (16 + 4 * p.r),
    flops=lambda p: 3 * p.t * (p.h + p.kh) * p.r,
    keyword_only="interleaved",
    doc="""Rotate q and k, and append k and v to a paged cache.

    Args:
        q: ``[tokens, heads, head_dim]``, float32, float16 or bfloat16; last stride 1, others free (views of a fused QKV
            buffer are fine). k, v: ``[tokens, kv_heads, head_dim]`` likewise.
        positions, cos_sin, interleaved: as in :func:`pykern.rope` (r even, 2..head_dim).
        k_cache, v_cache: ``[pages, page_size, kv_heads, head_dim]``, written in place.
        slots: int64 ``[tokens]``: page * page_size + row. Negative: the token is not stored. Slots outside the cache
            are not stored either; two tokens must not have the same slot.

    Returns:
        The rotated q, ``[tokens, heads, head_dim]``, contiguous.

    Raises:
        ArgumentError: a dtype, shape or stride that is not as above.
    """,
    mutants=(
        ("a.k_cache + page * a.kc_p + row * a.kc_s", "a.k_cache + page * a.kc_p + (row + 1) % a.page_size * a.kc_s"),
        (
            "if (slot < 0 || slot >= a.pages * a.page_size) return;",
            "if (slot <= 0 || slot >= a.pages * a.page_size) return;",
        ),
        ("a.v + token * a.v_t + head * a.v_h", "a.v + token * a.v_t"),
    ),
)
