"""Sample one token a row: id ~ softmax(logits / temperature) restricted by top-k, then top-p, then min-p.

Ties are ordered by index everywhere, exactly k tokens survive top-k, the token that crosses top-p is kept, and a row's
draw depends on its own seed and offset alone. Random bits: Philox 4x32-10 (Salmon et al., 2011).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pykern.errors import require
from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Run, Target, template
from pykern.schema import FLOATS, Out, Problem, Scalar, Tensor

THREADS = 512
ONE = 1 << 40  # weight of the likeliest token
MOST = 1 << 23  # tokens of weight 2^40 that sum below 2^63


def plan(p: Problem, target: Target) -> Plan:
    x = p["logits"]
    args = (
        In("logits"), In("seeds"), In("offsets"), In("temperatures"), In("top_ks"), In("top_ps"), In("min_ps"),
        OutPtr("ids"), OutPtr("valid"), I32(p.n), I64(x.strides[0]), Run("temperature"), Run("top_k", "i32"),
        Run("top_p"), Run("min_p"), I32(int(p.probs)),
    )  # fmt: skip
    launch = Launch(template("sample", x.dtype), p.m, THREADS, args)
    return Plan((launch,), numerics=x.dtype, variant="sample", why=("a block owns a row; radix selection, no sort",))


def check(p: Problem) -> None:
    require(1 <= p.n <= MOST, "logits.shape[1]", p.n, f"1..{MOST}")


def philox(seed: int, offset: int) -> int:
    """64 random bits of (seed, offset)."""
    c, k = [offset & 0xFFFFFFFF, offset >> 32 & 0xFFFFFFFF, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
    for _ in range(10):
        a, b = c[0] * 0xD2511F53, c[2] * 0xCD9E8D57
        c = [b >> 32 ^ c[1] ^ k[0], b & 0xFFFFFFFF, a >> 32 ^ c[3] ^ k[1], a & 0xFFFFFFFF]
        k = [(k[0] + 0x9E3779B9) & 0xFFFFFFFF, (k[1] + 0xBB67AE85) & 0xFFFFFFFF]
    return c[0] << 32 | c[1]


def sample_row(
    x: list[float], seed: int, offset: int, t: float, k: int, p: float, min_p: float, probs: bool
) -> tuple[int, bool]:
    """One row in plain Python: the definition."""
    order = sorted((i for i in range(len(x)) if not math.isnan(x[i])), key=lambda i: (-x[i], i))
    settings = t >= 0 and not math.isnan(p) and not math.isnan(min_p)
    if not order or math.isinf(x[order[0]]) or not settings or (probs and x[order[0]] <= 0):
        return 0, False
    top = x[order[0]]
    if t == 0:
        return order[0], True
    w = {
        i: int((x[i] / top if probs else math.exp((x[i] - top) / t)) * ONE) if x[i] > -math.inf else 0 for i in order
    }
    w = {i: max(v, 0) for i, v in w.items()}
    kept = order[:k] if 0 < k < len(x) else order
    if p < 1:
        nucleus: list[int] = []
        total, before = sum(w[i] for i in kept), 0
        for i in kept:
            if nucleus and before >= max(p, 0.0) * total:
                break
            nucleus.append(i)
            before += w[i]
        kept = nucleus
    if min_p > 0:
        kept = [i for i in kept if w[i] >= int(min(min_p, 1.0) * w[order[0]])]
    target = philox(seed, offset) * sum(w[i] for i in kept) >> 64
    for i in sorted(kept):
        if target < w[i]:
            return i, True
        target -= w[i]
    raise AssertionError("the draw lies past the total weight")


def reference(
    logits: Any,
    seeds: Any,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    offsets: Any = None,
    temperatures: Any = None,
    top_ks: Any = None,
    top_ps: Any = None,
    min_ps: Any = None,
    probs: bool = False,
    return_valid: bool = False,
) -> Any:
    import torch

    rows = []
    for r in range(logits.shape[0]):
        tables: Any = ((temperatures, temperature), (top_ks, top_k), (top_ps, top_p), (min_ps, min_p))
        t, k, p, q = (default if table is None else table[r].item() for table, default in tables)
        offset = 0 if offsets is None else int(offsets[r])
        rows.append(sample_row(logits[r].double().tolist(), int(seeds[r]), offset, t, int(k), p, q, probs))
    ids = torch.tensor([i for i, _ in rows], dtype=torch.int64)
    valid = torch.tensor([v for _, v in rows], dtype=torch.bool)
    return (ids, valid) if return_valid else ids


def unpack(result: Any, args: Mapping[str, Any]) -> Any:
    return tuple(result) if args.get("return_valid") else result[0]


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield {"logits": Spec(dtype, (2, 100)), "seeds": Spec("int64", (2,))}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    m, n = draw(sizes(0, 3)), draw(sizes(1, 700, around=[1, 512]))
    case: Case = {
        "logits": draw(tensor_spec(draw.one_of(FLOATS), (m, n))),
        "seeds": Spec("int64", (m,)),
        "temperature": draw.one_of((1.0, 0.7, 0.0, 2.5)),
        "top_k": draw.one_of((0, 1, 5, n, n + 1)),
        "top_p": draw.one_of((1.0, 0.9, 0.3, 1e-9, 0.0)),
        "min_p": draw.one_of((0.0, 0.05, 1.0)),
        "return_valid": True,
    }
    if draw.one_of((False, True)):
        case |= {"offsets": Spec("int64", (m,)), "temperatures": Spec("float32", (m,), fill="uniform")}
    if draw.one_of((False, True)):
        case |= {"top_ks": Spec("int32", (m,)), "top_ps": Spec("float32", (m,), fill="uniform")}
    return case


OPTIONS = ("offsets", "temperatures", "top_ks", "top_ps", "min_ps")
op = Op(
    name="sample",
    source="ops/sample.cuh",
    inputs=(
        Tensor("logits", "m n"),
        Tensor("seeds", "m", ("int64",), strides="contiguous"),
        Scalar("temperature", "float", 1.0, low=0.0),
        Scalar("top_k", "int", 0, low=0, high=2**31 - 1),
        Scalar("top_p", "float", 1.0, low=0.0, high=1.0),
        Scalar("min_p", "float", 0.0, low=0.0, high=1.0),
        Tensor("offsets", "m", ("int64",), optional=True, strides="contiguous"),
        Tensor("temperatures", "m", ("float32",), optional=True, strides="contiguous"),
        Tensor("top_ks", "m", ("int32",), optional=True, strides="contiguous"),
        Tensor("top_ps", "m", ("float32",), optional=True, strides="contiguous"),
        Tensor("min_ps", "m", ("float32",), optional=True, strides="contiguous"),
        Scalar("probs", "bool", False, key=True),
        Scalar("return_valid", "bool", False),
    ),
    outputs=(Out("ids", "m", "int64"), Out("valid", "m", "bool")),
    plan=plan,
    reference=reference,
    tolerance=lambda dtype: Tolerance(0.0, 0.0, "an index"),
    cases=cases,
    draw=draw,
    check=check,
    nbytes=lambda p: p["logits"].nbytes + 9 * p.m,
    flops=lambda p: 4 * p["logits"].numel,
    unpack=unpack,
    rowwise=(("logits", 0), ("seeds", 0), *((name, 0) for name in OPTIONS)),
    keyword_only="temperature",
    doc="""Sample a token id from each row of logits.

    Args:
        logits: ``[m, n]``, float32, float16 or bfloat16; last stride 1. n is 1..8388608.
        seeds: int64 ``[m]``, one per request. With ``offsets`` (int64 ``[m]``, e.g. the number of tokens so far) the
            draw is a function of (seed, offset) alone, whatever the batch.
        temperature: >= 0; 0 is argmax and consumes no randomness.
        top_k: keep exactly the k largest, ties to the lowest index; 0 keeps all.
        top_p: keep the smallest set of likeliest tokens with at least this share of what top_k left: a token stays
            while the share before it is below top_p.
        min_p: keep tokens at least this likely relative to the likeliest.
        temperatures, top_ks, top_ps, min_ps: the same per row, ``[m]`` float32 (top_ks int32); they replace the
            numbers. Values out of range there make the row invalid (temperature) or switch the filter off (top_k).
        probs: ``logits`` holds probabilities (not necessarily normalised); temperature only tells 0 from the rest.
        return_valid: also return bool ``[m]``.
        out: optional ``(ids, valid)``.

    Returns:
        int64 ``[m]`` in 0..n-1. A row with no valid probability (NaN or -inf only, +inf, a NaN setting) gives 0, and
        False in ``valid``. Probabilities below 2^-40 of the likeliest count as 0. Penalties are applied to logits
        before this: see :func:`pykern.apply_penalties`.

    Raises:
        ArgumentError: a setting out of range, a dtype, shape, stride or ``out`` that is not as above.
    """,
    mutants=(
        ("last_above = above;", "last_above = above + 1;"),
        ("limit ? limit : 1", "limit / 2 + 1"),
        ("return static_cast<uint64_t>(c0) << 32 | c1;", "return static_cast<uint64_t>(c1) << 32 | c0;"),
        ("static_cast<uint32_t>(i)) >= floor && w", "static_cast<uint32_t>(i)) > floor && w"),
        ("w >= least ? w : 0", "w > least ? w : 0"),
    ),
    benches=({"logits": Spec("bfloat16", (64, 128256)), "seeds": Spec("int64", (64,)), "top_p": 0.9},),
)
