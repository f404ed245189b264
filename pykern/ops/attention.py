"""Attention: out[t, h] = sum_j w[t, h, j] v[j, g(h)], w = softmax_j(mask(cap(scale * q[t, h] . k[j, g(h)]))).

One rule for every batch: the queries of a sequence are the last q_len of its kv_len tokens, so query t sits at position
kv_len - q_len + t. That is prefill (q_len = kv_len), a chunk, decode (q_len = 1), and any mix of them.
Method: online softmax over tiles of keys (Milakov & Gimelshein, 2018; FlashAttention-2, Dao, 2023), split-KV decode.
"""

from __future__ import annotations

import math
from typing import Any

from pykern.errors import require
from pykern.op import Op, Tolerance
from pykern.ops import _attention_data as data
from pykern.plan import (
    F32,
    I32,
    I64,
    Arg,
    In,
    Launch,
    OutPtr,
    Plan,
    Target,
    Workspace,
    Ws,
    ceil_div,
    first_fit,
    template,
)
from pykern.schema import Out, Problem, Scalar, Tensor, TensorInfo

GENERIC_DIMS = (16, 32, 64, 128, 256)  # head_dim is padded up to one of these in shared memory
# head_dim padded for the tensor cores -> warps, 16-row tiles a warp, keys a tile of the prefill kernel. What fits: a
# warp's accumulators (rows x head_dim floats) and scores in 255 registers, and a block in the 99 KB of sm_120.
# At 128, tiles of 64 keys fit sm_90's compiler (7% faster on an H200) but spill for sm_80 and sm_120.
PREFILL = {32: (4, 2, 64), 64: (4, 2, 64), 96: (4, 2, 32), 128: (4, 2, 32), 192: (4, 1, 32), 256: (4, 1, 32)}
DECODE_WARPS = {32: 4, 64: 4, 96: 4, 128: 4, 192: 2, 256: 2}
# Sequences of up to this many queries take the decode kernel: half a tile of 16 rows for groups of 2 and more.
DECODE_TOKENS = 8
MIXED_WORKSPACE = 256 << 20  # a mixed batch lends each sequence DECODE_TOKENS slots only within this many bytes
SPLIT = 256  # keys of a split: a block's share of a long sequence, of which one sequence of 8k fills 132 SMs
GENERIC_SPLIT = 64  # two tiles: fp32 decode is bound by a block's time, not by the merge
GENERIC_WORKSPACE = 64 << 20
ALL = 2**31 - 1


def head_strides(x: TensorInfo) -> tuple[int, int, int]:
    """(page, token, head) strides of k or v in elements; the page stride of contiguous keys is 0."""
    return (x.strides[0], x.strides[1], x.strides[2]) if len(x.shape) == 4 else (0, x.strides[0], x.strides[1])


def sequences(p: Problem) -> int:
    if p.has("cu_q"):
        return p["cu_q"].shape[0] - 1
    return p["kv_lens"].shape[0] if p.has("kv_lens") else 1


def capacity(p: Problem) -> int:
    """The most keys a sequence can have."""
    k = p["k"]
    return p["page_table"].shape[1] * k.shape[1] if p.has("page_table") else k.shape[0]


def check(p: Problem) -> None:
    q, k = p["q"], p["k"]
    paged = p.has("page_table")
    require(1 <= p.d <= 256, "q.shape[2]", p.d, "a head_dim of 1..256")
    require(p.kh >= 1 and p.h % p.kh == 0, "q.shape[1]", p.h, f"a multiple of the {p.kh} kv heads of k")
    rank, shape = (4, "[pages, page_size, kv_heads, d]") if paged else (3, "[tokens, kv_heads, d]")
    require(len(k.shape) == rank, "k.shape", k.shape, f"{shape} {'with' if paged else 'without'} page_table")
    require(not paged or k.shape[1] >= 1, "k.shape[1]", k.shape[1] if paged else 0, "a page_size of at least 1")
    require(not paged or p.has("kv_lens"), "kv_lens", None, "int32 [b] with page_table")
    require(not paged or not p.has("cu_kv"), "cu_kv", "a tensor", "None with page_table (kv_lens has the lengths)")
    require(p.has("cu_q") or not p.has("cu_kv"), "cu_q", None, "int32 [b + 1] with cu_kv")
    require(paged or not p.has("cu_q") or p.has("cu_kv"), "cu_kv", None, "int32 [b + 1] with cu_q and no page_table")
    require(not p.has("cu_q") or p["cu_q"].shape[0] >= 1, "cu_q.shape[0]", 0, "b + 1, at least 1")
    b = sequences(p)
    for name, extra in (("cu_kv", 1), ("kv_lens", 0), ("page_table", 0)):
        if p.has(name):
            n = p[name].shape[0]
            require(n == b + extra, f"{name}.shape[0]", n, f"{b + extra} for {b} sequences")
    if not p.has("cu_q"):
        require(b >= 1 or q.shape[0] == 0, "kv_lens.shape[0]", b, "at least 1 without cu_q")
        require(b < 2 or paged, "page_table", None, f"int32 [{b}, max_pages] for {b} sequences without cu_q")
        require(b < 1 or p.t % b == 0, "q.shape[0]", p.t, f"a multiple of {b} sequences without cu_q")
    require(p.window >= 0, "window", p.window, "0 (none) or the number of keys")
    require(p.window < 2**31 and (not p.window or p.causal), "window", p.window, "0, or below 2^31 with causal=True")
    require(0 <= p.softcap < math.inf, "softcap", p.softcap, "0 (off) or a finite positive number")
    require(0 <= p.scale < math.inf, "scale", p.scale, "0 (1 / sqrt(head_dim)) or a finite positive number")
    for name, n in (("tokens * heads", p.t * p.h), ("pages", k.shape[0]), ("max_pages * page_size", capacity(p))):
        require(n < 2**31 - 2**23, name, n, "below 2^31 - 2^23")


def obstacles(p: Problem, elements: int) -> list[str]:
    """What keeps q, k and v from accesses of ``elements``; nothing when they are possible."""
    bad = [] if p.d % elements == 0 else [f"head_dim {p.d} is not a multiple of {elements}"]
    nbytes = elements * p["q"].itemsize
    for name in ("q", "k", "v"):
        if not p.rows_aligned(name, nbytes=nbytes):
            bad.append(f"rows of {name} are not {nbytes}-byte aligned (strides {p[name].strides})")
    return bad


def common(p: Problem, min_q: int = 1, max_q: int = ALL) -> tuple[Arg, ...]:
    """Arguments of every kernel: PK_ATTENTION_PARAMS of attention_common.cuh, in its order."""
    q, k = p["q"], p["k"]
    paged = p.has("page_table")
    strides = (q.strides[0], q.strides[1], *head_strides(k), *head_strides(p["v"]))
    return (
        In("q"), In("k"), In("v"), OutPtr("out"), OutPtr("lse") if p.return_lse else I64(0),
        In("cu_q"), In("cu_kv"), In("kv_lens"), In("page_table"),
        I32(p.t), I32(sequences(p)), I32(p.kh), I32(p.h // p.kh), I32(p.d), I32(k.shape[0]),
        I32(k.shape[1] if paged else 0), I32(p["page_table"].shape[1] if paged else 0),
        I64(p["page_table"].strides[0] if paged else 0), *(I64(s) for s in strides),
        I32(int(p.causal)), I32(p.window), F32(p.softcap), F32(p.scale or p.d**-0.5), I32(min_q), I32(max_q),
    )  # fmt: skip


def row_tiles(p: Problem, rows: int, least: int = 1) -> int:
    """Most tiles of ``rows`` (token, head of the group) rows that sequences of at least ``least`` queries can fill."""
    group, b = p.h // p.kh, sequences(p)
    if not p.has("cu_q"):
        return b * ceil_div(p.t // b * group, rows)
    return p.t * group // rows + min(b + 1, p.t // least)


def most_splits(p: Problem, split: int, queries: int) -> int:
    """Most splits the keys of one tile's queries can touch."""
    keys = capacity(p)
    if p.window and p.window + queries < keys:
        return min(ceil_div(keys, split), ceil_div(p.window + queries, split) + 1)
    return max(1, ceil_div(keys, split))


def plan_generic(p: Problem, target: Target, why: tuple[str, ...]) -> Plan:
    dim = first_fit(GENERIC_DIMS, p.d) or 0
    group = p.h // p.kh
    warps = 1 if p.t * group <= 16 * max(1, sequences(p)) else 4  # a warp takes 8 rows; decode needs no more
    tiles, splits = row_tiles(p, 8 * warps), most_splits(p, GENERIC_SPLIT, p.t)
    partials = p.t * p.h * splits * (dim + 2) * 4
    # Blocks share a tile's splits until the card is full; the bits are the same either way.
    turns = 1 if partials > GENERIC_WORKSPACE else max(1, min(splits, 4 * target.sms // (tiles * p.kh), 65535))
    workspaces: tuple[Workspace, ...] = ()
    if turns > 1:
        rows = p.t * p.h * splits
        workspaces = (Workspace(rows * dim * 4), Workspace(rows * 8), Workspace(tiles * p.kh * 4, counter=True))
    keys = 16 if dim > 128 else 32
    smem = 4 * ((8 * warps + 2 * keys) * (dim + 4) + 8 * warps * (keys + 4)) + 4 * keys * 8 + 16
    out4 = p.d % 4 == 0 and p.rows_aligned("out", nbytes=4 * p["q"].itemsize)
    flags = (I32(int(not obstacles(p, 4))), I32(int(out4)))
    launch = Launch(
        template("attention_generic", p["q"].dtype, dim, warps),
        (tiles, p.kh, turns),
        32 * warps,
        (*common(p), *scratch(workspaces), I32(GENERIC_SPLIT), I32(splits), *flags),
        smem=smem,
        source="ops/attention_generic.cuh",
    )
    note = f"{tiles} tiles of {8 * warps} rows x {p.kh} kv heads, {turns} blocks to each, splits of {GENERIC_SPLIT}"
    return Plan((launch,), workspaces, f"{p['q'].dtype} generic", "generic", (*why, note))


def scratch(workspaces: tuple[Workspace, ...], first: int = 0) -> tuple[Arg, ...]:
    """The three workspace pointers of a split-KV kernel, null when it needs none."""
    return tuple(Ws(first + i) for i in range(3)) if workspaces else (I64(0), I64(0), I64(0))


def launch_prefill(p: Problem, target: Target, dim: int, min_q: int) -> Launch:
    warps, tiles, keys = (4, 2, 64) if dim == 128 and target.hopper else PREFILL[dim]  # tiles of 16 rows, a warp
    rows = warps * tiles * 16
    return Launch(
        template("attention_prefill", p["q"].dtype, dim, warps, tiles, keys),
        (row_tiles(p, rows, min_q), p.kh, 1),
        32 * warps,
        common(p, min_q),
        smem=(rows + 4 * keys) * dim * 2 + 2 * keys * 8 + rows * 8,
        source="ops/attention_prefill.cuh",
    )


def decode_split(p: Problem) -> int:
    """Keys of a split. By capacity, which a cache fixes once: longer splits keep the partial states small."""
    keys = capacity(p)
    return SPLIT if keys <= 1 << 15 else 1024


def launch_decode(p: Problem, target: Target, dim: int, max_q: int, slots: int) -> tuple[Launch, tuple[Workspace, ...]]:
    warps, group, split = DECODE_WARPS[dim], p.h // p.kh, decode_split(p)
    slices, splits = ceil_div(group, 16), most_splits(p, decode_split(p), min(p.t, max_q))

    def smem(stages: int) -> int:
        per_warp = stages * 2 * 16 * dim * 2 + 4 * (dim + 8) * 4 + 16 * 8 + (stages + 1) * 64 + 2 * 16 * 4
        return warps * per_warp + (16 if dim <= 128 else 16 * dim * 2) + 16

    stages = 3 if smem(3) <= target.smem_optin else 2
    workspaces: tuple[Workspace, ...] = ()
    if splits > 1:
        rows, counters = slots * p.h * splits, slots * slices * p.kh
        workspaces = (Workspace(rows * dim * 4), Workspace(rows * 8), Workspace(counters * 4, counter=True))
    tile_tokens = 16 // group if slices == 1 else 1
    tiles = (p.t // tile_tokens + sequences(p) + 1) * slices
    launch = Launch(
        template("attention_decode", p["q"].dtype, dim, warps, stages),
        (min(tiles * splits, max(1, 2 * target.sms // p.kh)), p.kh, 1),  # as many blocks as are resident
        32 * warps,
        (*common(p, 1, max_q), *scratch(workspaces), I32(split), I32(splits), I32(0 if max_q == ALL else max_q)),
        smem=smem(stages),
        source="ops/attention_decode.cuh",
    )
    return launch, workspaces


def plan(p: Problem, target: Target) -> Plan:
    dtype, k = p["q"].dtype, p["k"]
    if dtype == "float32":
        return plan_generic(p, target, ("float32: fp32 arithmetic, the same bits however queries are grouped",))
    bad = obstacles(p, 8)
    if any(n * s >= 1 << 34 for x in (k, p["v"]) for n, s in zip(x.shape, x.strides, strict=True)):
        bad.append("k or v spans more than 32 GiB")
    if bad:
        return plan_generic(p, target, tuple(f"no tensor cores: {reason}" for reason in bad))
    dim = first_fit(tuple(PREFILL), p.d) or 0
    b = sequences(p)
    uniform = 0 if p.has("cu_q") else p.t // b
    if p.t <= DECODE_TOKENS or 0 < uniform <= DECODE_TOKENS or (not uniform and p.t <= b):
        launch, workspaces = launch_decode(p, target, dim, ALL, p.t)
        why = f"{p.t} queries in {b} sequences: split-KV by {decode_split(p)} keys"
        return Plan((launch,), workspaces, f"{dtype} decode {decode_split(p)}", "decode", (why,))
    if uniform:
        why = f"{uniform} queries a sequence, more than {DECODE_TOKENS}: prefill"
        return Plan((launch_prefill(p, target, dim, 1),), (), f"{dtype} prefill", "prefill", (why,))
    # Lengths live on the device: one launch takes the sequences with few queries, the other the rest.
    most = DECODE_TOKENS
    launch, workspaces = launch_decode(p, target, dim, most, min(b * most, 1 << 31))
    if sum(w.nbytes for w in workspaces) > MIXED_WORKSPACE:
        most = 1
        launch, workspaces = launch_decode(p, target, dim, most, b)
    why = f"mixed: sequences of up to {most} queries by split-KV of {decode_split(p)} keys, longer ones by prefill"
    numerics = f"{dtype} mixed {most} {decode_split(p)}"
    return Plan((launch_prefill(p, target, dim, most + 1), launch), workspaces, numerics, "mixed", (why,))


def tolerance(dtype: str) -> Tolerance:
    # Convex combinations of v, so errors scale with |v|, about 1 in tests, not with the result.
    return {
        "float32": Tolerance(2e-5, 1e-5, "scores are sums of up to 256 products, 2^-23 each, before exp"),
        "float16": Tolerance(1e-3, 1e-3, "weights and the result are rounded to 11 bits"),
        "bfloat16": Tolerance(8e-3, 6e-3, "weights and the result are rounded to 8 bits"),
    }[dtype]


def nbytes(p: Problem) -> int:
    """q, out, and the keys: all that k and v hold, or as much as page tables can name."""
    held = p["k"].nbytes
    if p.has("page_table"):
        held = min(held, sequences(p) * capacity(p) * p.kh * p.d * p["k"].itemsize)
    return 2 * p["q"].nbytes + 2 * held


def flops(p: Problem) -> int:
    """Two products of 2 * d per query, head and key; of a causal prefill half. An upper bound for ragged batches."""
    b = max(1, sequences(p))
    keys = capacity(p) if p.has("page_table") else ceil_div(p["k"].shape[0], b)
    full = 4 * p.t * p.h * p.d * (min(keys, p.window) if p.window else keys)
    return full // 2 if p.causal and not p.window and p.t // b == keys else full


def unpack(result: Any, args: Any) -> Any:
    return tuple(result) if args["return_lse"] else result[0]


def _lse_shape(p: Problem) -> tuple[int, ...]:
    return (p.t, p.h) if p.return_lse else (0,)


def torch_attention(q: Any, k: Any, v: Any, cu_q: Any = None, causal: bool = False, **rest: Any) -> Any:
    """torch's attention with cuDNN, for sequences of one length with contiguous keys; it has no paged form."""
    import torch.nn.functional as F
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if rest.get("page_table") is not None:
        return NotImplemented
    b = 1 if cu_q is None else cu_q.numel() - 1
    x, y, z = (t.view(b, -1, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION]):
        return F.scaled_dot_product_attention(x, y, z, is_causal=causal, enable_gqa=x.shape[1] != y.shape[1])


op = Op(
    name="attention",
    source="ops/attention_generic.cuh",
    inputs=(
        Tensor("q", "t h d"),
        Tensor("k", "*kt kh d", "like q"),
        Tensor("v", "*kt kh d", "like q"),
        Tensor("cu_q", "b1", ("int32",), optional=True, strides="contiguous"),
        Tensor("cu_kv", "b2", ("int32",), optional=True, strides="contiguous"),
        Tensor("kv_lens", "b3", ("int32",), optional=True, strides="contiguous"),
        Tensor("page_table", "b4 mp", ("int32",), optional=True),
        Scalar("causal", "bool", False, key=True),
        Scalar("window", "int", 0, key=True),
        Scalar("softcap", "float", 0.0, key=True),
        Scalar("scale", "float", 0.0, key=True),
        Scalar("return_lse", "bool", False, key=True),
    ),
    outputs=(Out("out", "t h d", "like q"), Out("lse", _lse_shape, "float32")),
    plan=plan,
    reference=data.reference,
    tolerance=tolerance,
    cases=data.cases,
    draw=data.draw,
    make=data.make,
    check=check,
    nbytes=nbytes,
    flops=flops,
    unpack=unpack,
    keyword_only="cu_q",
    doc="""Scaled dot-product attention for prefill, chunks, decode and mixed batches, contiguous or paged.

    The queries of sequence b are the last q_len of its kv_len tokens: query t sits at position kv_len - q_len + t
    (bottom-right alignment). A query without visible keys gives output 0 and lse -inf; so do tokens after cu_q's end.
    Rows before cu_q's start are not written: of a cu_q that begins above 0, the first rows of out and lse hold whatever
    their memory held.

    Args:
        q: ``[tokens, heads, d]``, float32, float16 or bfloat16; last stride 1, others free (a view of a fused QKV
            buffer is fine). d is 1..256; multiples of 8 with 16-byte aligned rows use tensor cores in 16-bit types.
        k, v: of q's dtype, ``[kv_tokens, kv_heads, d]`` or paged ``[pages, page_size, kv_heads, d]``; heads is any
            multiple of kv_heads.
        cu_q: int32 ``[b + 1]``, query offsets of the sequences, from 0 and never decreasing: rows before ``cu_q[0]``
            are not written, and sequences that share queries race (a finding of the checker). None: tokens are
            divided evenly over the sequences of kv_lens (one sequence without it).
        cu_kv: int32 ``[b + 1]``, key offsets; with cu_q and contiguous keys.
        kv_lens: int32 ``[b]``, key lengths; with page_table, or to use less than what contiguous keys hold. They and
            the offsets are clamped to what the tensors hold: nothing is read or written out of bounds.
        page_table: int32 ``[b, max_pages]``, page ids in order; entries past a length are never used. A page id out of
            range (negative, or not below pages) makes the queries that see it NaN (in 16-bit types also others of
            their tile), with and without the checker.
        causal: hide keys after the query's own position.
        window: with causal, the number of keys a query sees, its own included; 0: all.
        softcap: cap the scores, ``cap * tanh(score / cap)``, before the mask; 0: off.
        scale: of the scores; 0: ``1 / sqrt(d)``.
        return_lse: also return lse.
        out: optional ``(out, lse)`` to write, lse of shape (0,) unless asked for.

    Returns:
        ``[tokens, heads, d]`` of q's dtype; with return_lse also float32 ``[tokens, heads]``, the natural log of the
        sum of exp(score). Lengths are read on the device: graphs captured at a capacity replay with any lengths
        within it. float32 results have the same bits alone, in any batch and any chunk. In the 16-bit types a NaN or
        infinity in v at a masked key can reach queries of the same tile that do not see it.

    Raises:
        ArgumentError: shapes, dtypes, strides or scalars that are not as above.
    """,
    mutants=(
        ("key >= mine.lo && key < mine.hi ? s : -INFINITY", "key >= mine.lo ? s : -INFINITY"),
        ("const float keep = exp2f(m - base);", "const float keep = 1.f;"),
        ("row_acc[i][e] = fmaf(row_acc[i][e], merge.keep, acc[i][e] * merge.add);", "row_acc[i][e] += acc[i][e];"),
        ("tanhf(s) * scale_of.outer", "s * scale_of.outer"),
        ("(first_row + my_row) % p.group", "0"),
    ),
    peers={"cuDNN": torch_attention},
    benches=data.benches(),
)
