"""Attention's reference, and the batches it is tested on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from pykern.op import Case, Spec
from pykern.plan import ceil_div
from pykern.schema import FLOATS

UNUSED_PAGE = 1 << 30  # fills page-table entries past a sequence's length: reading through it would be far outside


def keys_of(
    s: int, k: Any, v: Any, cu_kv: Any, kv_lens: Any, page_table: Any
) -> tuple[Any, Any]:
    """Keys and values of sequence ``s``, ``[kv_len, kv_heads, d]``."""
    if page_table is not None:
        size, n = k.shape[1], int(kv_lens[s])
        pages = page_table[s, : ceil_div(n, size)].long()
        return tuple(x[pages].reshape(-1, *x.shape[2:])[:n] for x in (k, v))  # type: ignore[return-value]
    begin, end = (0, k.shape[0]) if cu_kv is None else (int(cu_kv[s]), int(cu_kv[s + 1]))
    if kv_lens is not None:
        end = min(end, begin + int(kv_lens[s]))
    return k[begin:end], v[begin:end]


def reference(
    q: Any,
    k: Any,
    v: Any,
    cu_q: Any = None,
    cu_kv: Any = None,
    kv_lens: Any = None,
    page_table: Any = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    scale: float = 0.0,
    return_lse: bool = False,
) -> Any:
    """Attention in float64, one sequence after the other."""
    import torch

    tokens, heads, d = q.shape
    group = heads // k.shape[-2]
    if cu_q is None:
        count = 1 if kv_lens is None else kv_lens.shape[0]
        bounds = [s * (tokens // count) for s in range(count + 1)]
    else:
        bounds = [int(x) for x in cu_q]
    out = torch.zeros(tokens, heads, d, dtype=torch.float64)
    lse = torch.full((tokens, heads), -math.inf, dtype=torch.float64)
    for s, (begin, end) in enumerate(pairwise(bounds)):
        ks, vs = (x.double().repeat_interleave(group, 1) for x in keys_of(s, k, v, cu_kv, kv_lens, page_table))
        q_len, kv_len = end - begin, ks.shape[0]
        if q_len == 0 or kv_len == 0:
            continue
        scores = torch.einsum("qhd,khd->hqk", q[begin:end].double(), ks) * (scale or d**-0.5)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        own = torch.arange(q_len)[:, None] + (kv_len - q_len)
        key = torch.arange(kv_len)[None, :]
        hidden = torch.zeros(q_len, kv_len, dtype=torch.bool)
        if causal:
            hidden |= key > own
        if window:
            hidden |= key <= own - window
        scores = scores.masked_fill(hidden, -math.inf)
        row_lse = torch.logsumexp(scores, -1)
        weights = torch.exp(scores - torch.where(row_lse == -math.inf, 0.0, row_lse)[..., None])
        out[begin:end] = torch.einsum("hqk,khd->qhd", weights, vs)
        lse[begin:end] = row_lse.T
    return (out, lse) if return_lse else out


def batch(
    dtype: str,
    lens: Sequence[tuple[int, int]],
    *,
    d: int = 64,
    kv_heads: int = 1,
    group: int = 1,
    page_size: int = 0,
    spare_pages: int = 1,
    uniform: bool = False,
    tail: int = 0,
    layout: str = "contiguous",
    **scalars: Any,
) -> Case:
    """A case: ``lens`` are (q_len, kv_len) pairs, ``page_size`` 0 means contiguous keys, ``uniform`` leaves cu_q out,
    ``tail`` adds tokens that belong to no sequence. ``lens`` stays in the case for :func:`make`."""
    tokens, count = sum(q for q, _ in lens) + tail, len(lens)
    case: Case = {"lens": tuple(lens), "q": Spec(dtype, (tokens, kv_heads * group, d), layout)}
    if page_size:
        pages = [ceil_div(n, page_size) for _, n in lens]
        shape: tuple[int, ...] = (sum(pages) + spare_pages, page_size, kv_heads, d)
        case["page_table"] = Spec("int32", (count, max(pages, default=0) + 1))
        case["kv_lens"] = Spec("int32", (count,))
    else:
        shape = (sum(n for _, n in lens), kv_heads, d)
        if not uniform:
            case["cu_kv"] = Spec("int32", (count + 1,))
    case["k"] = case["v"] = Spec(dtype, shape, layout)
    if not uniform:
        case["cu_q"] = Spec("int32", (count + 1,))
    return case | scalars


def make(case: Case, rng: Any) -> dict[str, Any]:
    """Torch arguments of a :func:`batch`. Pages are handed out in random order, what lies past a length is NaN, and
    unused page-table entries point far outside."""
    import torch

    from pykern.testing import make_tensor

    lens = case["lens"]
    args: dict[str, Any] = {n: make_tensor(case[n], rng) for n in ("q", "k", "v")}

    def ints(values: Sequence[int]) -> Any:
        return torch.tensor(list(values), dtype=torch.int32)

    def sums(values: Sequence[int]) -> Any:
        return ints([sum(values[:i]) for i in range(len(values) + 1)])

    if "cu_q" in case:
        args["cu_q"] = sums([q for q, _ in lens])
    if "cu_kv" in case:
        args["cu_kv"] = sums([n for _, n in lens])
    if "page_table" in case:
        pages, size = case["k"].shape[:2]
        order = torch.randperm(pages, generator=rng).tolist()
        table = torch.full(case["page_table"].shape, UNUSED_PAGE, dtype=torch.int32)
        used = torch.zeros(pages, size, dtype=torch.bool)
        for s, (_, n) in enumerate(lens):
            for i in range(ceil_div(n, size)):
                table[s, i] = page = order.pop()
                used[page, : n - i * size] = True
        if case["k"].layout != "expanded":
            args["k"][~used] = math.nan
            args["v"][~used] = math.nan
        args["kv_lens"], args["page_table"] = ints([n for _, n in lens]), table
    names = ("cu_q", "cu_kv", "kv_lens", "page_table")
    defaults = {"causal": False, "window": 0, "softcap": 0.0, "scale": 0.0, "return_lse": False}
    return {**dict.fromkeys(names), **args, **{n: case.get(n, v) for n, v in defaults.items()}}


HEAD_DIMS = (16, 32, 64, 96, 128, 192, 256)  # one of every kernel's padded size


def cases() -> Iterator[Case]:
    """Together these reach every kernel of the plan. The first two have many tiles and splits, masks and a cap at once,
    and on a small card the splits of a tile to several blocks, or all of them to one."""
    for kv_heads in (1, 3):
        yield batch("float32", [(40, 200)], d=16, kv_heads=kv_heads, group=2, uniform=True, causal=True, softcap=1.0)
    for dtype in FLOATS:
        for d in HEAD_DIMS:
            yield batch(dtype, [(1, 40)], d=d, group=2, uniform=True, causal=True)
            yield batch(dtype, [(40, 40)], d=d, group=2, uniform=True, causal=True)
            # Misaligned rows: the kernel that takes anything.
            yield batch(dtype, [(1, 40)], d=d, uniform=True, layout="rows", causal=True)
            yield batch(dtype, [(40, 40)], d=d, uniform=True, layout="rows", causal=True)


def draw(draw: Any) -> Case:
    """Small batches of every kind: prefill, chunks, decode and mixed, paged and contiguous."""
    from hypothesis import strategies as st

    from pykern.testing import sizes

    # The tensor cores' first: a draw's simplest examples are its first values. Few sizes, as each is a compile; others
    # have tests of their own.
    dtype = draw.one_of(("bfloat16", "float16", "float32"))
    d = draw.one_of((32, 64, 80, 3, 33))
    kv_heads, group = draw.one_of(((1, 1), (1, 3), (2, 2), (1, 5), (1, 7), (2, 1), (1, 8), (1, 20)))
    kind = draw.one_of(("prefill", "decode", "mixed", "any"))
    lens = []
    for _ in range(draw(st.integers(1, 3))):
        n = draw(sizes(0, 90, around=[16, 32, 64]))
        q = {"prefill": n, "decode": 1, "mixed": draw.one_of((0, 1, 7, min(n, 20))), "any": draw(st.integers(0, 12))}
        lens.append((q[kind], n))
    page_size = draw.one_of((0, 0, 1, 3, 16))
    uniform = len({q for q, _ in lens}) == 1 and (page_size > 0 or len(lens) == 1) and draw(st.booleans())
    causal = draw(st.booleans())
    return batch(
        dtype,
        lens,
        d=d,
        kv_heads=kv_heads,
        group=group,
        page_size=page_size,
        uniform=uniform,
        tail=0 if uniform else draw.one_of((0, 0, 2)),
        layout=draw.one_of(("contiguous", "contiguous", "rows", "offset", "expanded")),
        causal=causal,
        window=draw.one_of((0, 1, 5, 40)) if causal else 0,
        softcap=draw.one_of((0.0, 0.0, 2.0)),
        scale=draw.one_of((0.0, 0.3)),
        return_lse=draw(st.booleans()),
    )


def benches() -> tuple[Case, ...]:
    """Decode over a paged cache (GQA 32/8, pages of 16), and prefill: full, causal, short, long, small heads."""
    out = []
    for b, t in ((64, 4096), (16, 8192), (128, 1024), (1, 8192)):
        out.append(batch("bfloat16", [(1, t)] * b, d=128, kv_heads=8, group=4, page_size=16, causal=True))
    for b, kv_heads, group, t, d, causal in (
        (4, 32, 1, 4096, 128, True),
        (4, 32, 1, 4096, 128, False),
        (1, 8, 4, 16384, 128, True),
        (1, 8, 4, 1024, 128, True),
        (4, 32, 1, 4096, 64, True),
    ):
        out.append(batch("bfloat16", [(t, t)] * b, d=d, kv_heads=kv_heads, group=group, causal=causal))
    return tuple(out)
