"""Attention's algebra: masks, chunks, pages, groups, and the values that public bug reports got wrong."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pykern
from pykern.errors import ArgumentError, CheckError
from pykern.jit import sources
from pykern.numerics import mismatch, same_bits
from pykern.op import host, register
from pykern.ops import _attention_data as data
from pykern.ops.attention import op
from pykern.plan import TARGETS, host_target
from pykern.testing.data import make_args

pytestmark = pytest.mark.usefixtures("own_registry")

INF, NAN = math.inf, math.nan
DTYPES = ("float32", "float16", "bfloat16")


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def args_of(dtype, lens, seed=0, **kw):
    return make_args(op, data.batch(dtype, lens, **kw), seed)


def column(*values):
    """One head of head_dim 1."""
    return torch.tensor(values, dtype=torch.float32).reshape(-1, 1, 1)


def check(args, scale=1.0):
    """Compare with the float64 reference; returns what the kernel gave."""
    got, want = op(**args), op.reference(**args)
    pairs = zip(got, want, strict=True) if args["return_lse"] else [(got, want)]
    for y, ref in pairs:
        tol = op.tolerance(str(y.dtype).removeprefix("torch."))
        assert mismatch(y, ref, scale * tol.rtol, scale * tol.atol) is None, mismatch(y, ref, tol.rtol, tol.atol)
    return got


# ---- values from public bug reports


def test_causal_is_bottom_right_and_rows_without_keys_are_zero():
    # flash-attention#1778, #443, pytorch#131060
    q, k = torch.zeros(5, 1, 1), torch.zeros(2, 1, 1)
    out, lse = op(q, k, column(1, 3), causal=True, scale=1.0, return_lse=True)
    assert out.flatten().tolist() == [0, 0, 0, 1, 2]
    assert lse.flatten().tolist() == pytest.approx([-INF, -INF, -INF, 0, 0.6931472], abs=1e-6)
    q, k = torch.zeros(2, 1, 1), torch.zeros(5, 1, 1)
    out, lse = op(q, k, column(0, 2, 4, 6, 8), causal=True, scale=1.0, return_lse=True)
    assert out.flatten().tolist() == pytest.approx([3, 4], abs=1e-6)
    assert lse.flatten().tolist() == pytest.approx([1.3862944, 1.6094379], abs=1e-6)


def test_softcap_comes_before_the_mask():
    # flash-attention#1025
    q, k, v = column(0.3, 2.0), column(1, 2), column(0, 100)
    out, lse = op(q, k, v, causal=True, softcap=1.0, scale=1.0, return_lse=True)
    assert out[0].item() == 0.0
    assert out[1].item() == pytest.approx(50.8824514, abs=2e-4)
    assert lse.flatten().tolist() == pytest.approx([0.2913126, 1.6749814], abs=1e-6)
    out, lse = op(q, k, v, causal=True, softcap=0.0, scale=1.0, return_lse=True)
    assert out[0].item() == 0.0
    assert out[1].item() == pytest.approx(88.0797078, abs=2e-4)
    assert lse.flatten().tolist() == pytest.approx([0.3, 4.1269280], abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_default_scale_is_that_of_the_true_head_dim(dtype):
    # flash-attention#1347, transformers#35984
    q = torch.ones(1, 1, 3, dtype=dtype)
    k = torch.tensor([[[1.0, 1, 1]], [[0, 0, 0]]], dtype=dtype)
    out = op(q, k, k.clone())
    assert out.shape == (1, 1, 3)
    assert out.flatten().tolist() == pytest.approx([0.8496746] * 3, abs=1e-6 if dtype == torch.float32 else 1e-3)


@pytest.mark.parametrize("d", [72, 80, 96, 100])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_odd_head_dims_read_nothing_past_the_row(dtype, d):
    dense = args_of(dtype, [(9, 20)], d=d, kv_heads=2, group=2, uniform=True, causal=True, return_lse=True)
    out, lse = check(dense)
    for pad in (8, 3):  # NaN after every row: once with 16-byte aligned rows, once without
        poisoned = dict(dense)
        for name in ("q", "k", "v"):
            x = dense[name]
            wide = torch.full((*x.shape[:2], d + pad), NAN, dtype=x.dtype)
            wide[..., :d] = x
            poisoned[name] = wide[..., :d]
        again, again_lse = check(poisoned)
        if dtype == "float32" or (pad == 8 and d % 8 == 0):
            assert same_bits(out, again) and same_bits(lse, again_lse)


@pytest.mark.parametrize("d", [32, 136])
@pytest.mark.parametrize("lens", [[(1, 70)], [(40, 40)], [(1, 9), (40, 70)]], ids=["decode", "prefill", "mixed"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_where_out_starts_changes_no_bit(dtype, lens, d):
    """An out off the vectors' boundaries was given to another kernel, of other bits."""
    args = args_of(dtype, lens, d=d, kv_heads=1, group=2, page_size=16, causal=True)
    want = check(args)
    band = torch.full((want.numel() + 2,), NAN, dtype=want.dtype)
    out = band[1:-1].view(want.shape)
    with host(check=True):
        op(**args, out=out)
    assert same_bits(out, want) and band[[0, -1]].isnan().all()


# ---- masks, groups, ragged batches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (3, 3), (2, 5), (1, 7), (2, 8), (1, 20)])
def test_groups_of_any_size(dtype, kv_heads, group):
    lens = [(1, 70), (5, 5), (9, 40), (1, 0)]
    check(args_of(dtype, lens, d=32, kv_heads=kv_heads, group=group, page_size=16, causal=True, return_lse=True))


@pytest.mark.parametrize("d", [128, 192, 256])
def test_large_heads(d):
    """One decode and one prefill sequence on the tensor cores, with every column in use."""
    check(args_of("bfloat16", [(1, 150), (20, 70)], d=d, group=2, page_size=16, causal=True, return_lse=True))


batches = st.tuples(
    st.sampled_from(DTYPES),
    st.lists(st.tuples(st.integers(0, 24), st.integers(0, 100)), min_size=1, max_size=4),
    st.sampled_from([0, 1, 5, 16]),
    st.booleans(),
    st.sampled_from([0, 1, 7, 33]),
    st.sampled_from([0.0, 1.5]),
    st.integers(0, 2),
    st.integers(0, 1000),
)


@given(batches)
def test_agrees_with_float64(batch):
    dtype, lens, page_size, causal, window, softcap, tail, seed = batch
    kw = dict(page_size=page_size, causal=causal, window=window if causal else 0, softcap=softcap, tail=tail)
    args = args_of(dtype, lens, seed, d=32, kv_heads=2, group=3, return_lse=True, **kw)
    out, lse = check(args)
    if tail:
        assert bool((out[-tail:] == 0).all()) and bool((lse[-tail:] == -INF).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_long_cache_fills_many_splits(dtype):
    lens = [(1, 1500), (1, 256), (1, 257), (3, 800), (1, 1)]
    args = args_of(dtype, lens, d=32, kv_heads=2, group=2, page_size=16, causal=True, return_lse=True)
    check(args)
    check(args | {"window": 300})
    check(args | {"softcap": 0.7})


def test_lse_is_the_natural_log_of_the_sum():
    args = args_of("float32", [(1, 37)], d=8, uniform=True, return_lse=True)
    out, lse = op(**args)
    scores = (args["k"][:, 0].double() @ args["q"][0, 0].double()) / math.sqrt(8)
    assert lse.item() == pytest.approx(float(torch.log(torch.exp(scores).sum())), abs=1e-5)
    assert out.shape == (1, 1, 8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_are_convex_combinations_of_v(dtype):
    args = args_of(dtype, [(20, 60), (1, 300)], d=64, kv_heads=2, group=2, page_size=16, causal=True)
    slack = {"float32": 1e-6, "float16": 2e-3, "bfloat16": 1.6e-2}[dtype]
    out = op(**args).double()
    begin = 0
    for s, (q_len, _) in enumerate([(20, 60), (1, 300)]):
        _, v = data.keys_of(s, args["k"], args["v"], None, args["kv_lens"], args["page_table"])
        v = v.double().repeat_interleave(2, 1)
        part = out[begin : begin + q_len]
        assert bool((part <= v.amax(0) + slack).all()) and bool((part >= v.amin(0) - slack).all())
        begin += q_len


def test_a_constant_added_to_all_scores_changes_only_lse():
    args = args_of("float32", [(6, 50)], d=16, kv_heads=2, group=2, uniform=True, causal=True, return_lse=True)
    shift = torch.randn(1, 2, 16, generator=torch.Generator().manual_seed(3))
    out, lse = op(**args)
    moved, moved_lse = op(**(args | {"k": args["k"] + shift}))
    per_row = (args["q"].double() * shift.double().repeat_interleave(2, 1)).sum(-1) / 4
    assert mismatch(moved, out.double(), 1e-4, 1e-4) is None
    assert mismatch(moved_lse, lse.double() + per_row, 1e-5, 1e-4) is None


def test_a_scale_is_a_scale():
    args = args_of("float32", [(4, 30)], d=16, uniform=True)
    assert mismatch(op(**(args | {"scale": 0.5})), op(**(args | {"q": args["q"] * 2})).double(), 1e-5, 1e-5) is None


# ---- same bits


@pytest.mark.parametrize("page_size", [0, 16])
def test_float32_chunks_have_the_bits_of_a_whole_prefill(page_size):
    n, kv_heads, group = 75, 3, 3
    args = args_of("float32", [(n, n)], d=64, kv_heads=kv_heads, group=group, page_size=page_size, causal=True,
                   return_lse=True)  # fmt: skip
    for window in (0, 20):
        whole = check(args | {"window": window})
        for size in (1, 7, 40):
            for start in range(0, n, size) if size > 1 else (0, 31, 32, 74):
                stop = min(n, start + size)
                part = dict(args, q=args["q"][start:stop], cu_q=ints(0, stop - start), window=window)
                if page_size:
                    part["kv_lens"] = ints(stop)
                else:
                    part |= {"k": args["k"][:stop], "v": args["v"][:stop], "cu_kv": ints(0, stop)}
                for a, b in zip(op(**part), whole, strict=True):
                    assert same_bits(a, b[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_alone_has_its_bits_in_any_batch(dtype):
    lens = [(1, 300), (1, 17), (1, 0), (1, 513), (1, 64), (30, 60), (9, 9)]
    if dtype != "float32":
        lens = lens[:5]  # 16-bit decode is a numerics class of its own
    args = args_of(dtype, lens, d=32, kv_heads=2, group=3, page_size=16, causal=True, return_lse=True)
    whole = check(args)
    starts = args["cu_q"].tolist()
    numerics = op.planned(op.problem_of_args(args), host_target()).numerics
    for s, (q_len, _) in enumerate(lens):
        rows = slice(starts[s], starts[s] + q_len)
        alone = dict(args, q=args["q"][rows], cu_q=ints(0, q_len), kv_lens=args["kv_lens"][s : s + 1],
                     page_table=args["page_table"][s : s + 1])  # fmt: skip
        assert op.planned(op.problem_of_args(alone), host_target()).numerics == numerics
        for a, b in zip(op(**alone), whole, strict=True):
            assert same_bits(a, b[rows])


def test_mixed_batches_give_decode_and_prefill_their_own_bits():
    lens = [(1, 300), (40, 90), (8, 50), (9, 20)]
    args = args_of("bfloat16", lens, d=32, kv_heads=2, group=2, page_size=16, causal=True, return_lse=True)
    assert op.planned(op.problem_of_args(args), host_target()).variant == "mixed"
    whole, begin = check(args), 0
    for s, (q_len, _) in enumerate(lens):
        alone = dict(args, q=args["q"][begin : begin + q_len], cu_q=None, kv_lens=args["kv_lens"][s : s + 1],
                     page_table=args["page_table"][s : s + 1])  # fmt: skip
        variant = op.planned(op.problem_of_args(alone), host_target()).variant
        assert variant == ("decode" if q_len <= 8 else "prefill")
        for a, b in zip(op(**alone), whole, strict=True):
            assert same_bits(a, b[begin : begin + q_len])
        begin += q_len


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_the_grid_changes_no_bit(dtype):
    args = args_of(dtype, [(1, 900), (2, 300)], d=32, kv_heads=2, group=2, page_size=16, causal=True, return_lse=True)
    first = None
    for sms in (1, 3, 64):
        with host(sms=sms):
            got = op(**args)
        first = first or got
        assert all(same_bits(a, b) for a, b in zip(first, got, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_are_only_storage(dtype):
    """Contiguous keys, pages of any size, and the same pages elsewhere in the cache give the same bits."""
    lens = [(1, 70), (3, 33)]
    flat = args_of(dtype, lens, d=32, kv_heads=2, group=2, causal=True, return_lse=True)
    want = check(flat)
    for size in (1, 7, 16, 64):
        for seed in range(2):
            order = torch.randperm(80 // size + 4, generator=torch.Generator().manual_seed(seed)).tolist()
            table = torch.full((2, -(-70 // size)), data.UNUSED_PAGE, dtype=torch.int32)
            k, v = (torch.full((len(order) + 80, size, 2, 32), NAN, dtype=flat["k"].dtype) for _ in "kv")
            pages = [p for p in range(len(k))] if size == 1 else order
            for s, (begin, n) in enumerate([(0, 70), (70, 33)]):
                for i in range(-(-n // size)):
                    table[s, i] = page = pages.pop()
                    here = slice(begin + i * size, min(begin + n, begin + (i + 1) * size))
                    k[page, : here.stop - here.start] = flat["k"][here]
                    v[page, : here.stop - here.start] = flat["v"][here]
            paged = dict(flat, k=k, v=v, cu_kv=None, kv_lens=ints(70, 33), page_table=table)
            assert all(same_bits(a, b) for a, b in zip(op(**paged), want, strict=True))


def test_views_of_a_fused_qkv_buffer():
    for dtype in (torch.float32, torch.bfloat16):
        qkv = torch.randn(30, (4 + 2 + 2) * 64, generator=torch.Generator().manual_seed(1)).to(dtype)
        q, k, v = (x.unflatten(1, (-1, 64)) for x in qkv.split([4 * 64, 2 * 64, 2 * 64], 1))
        want = op(q.contiguous(), k.contiguous(), v.contiguous(), causal=True)
        assert same_bits(op(q, k, v, causal=True), want)


def test_offsets_beyond_two_to_the_31():
    # flashinfer#3391. Two tokens 2^31 elements apart: storage that is never touched between them costs nothing.
    far = 1 << 31
    k = torch.empty(far + 64, dtype=torch.bfloat16).as_strided((2, 1, 64), (far, 64, 1))
    k.copy_(torch.randn(2, 1, 64))
    q = torch.randn(3, 1, 64, dtype=torch.bfloat16)
    for queries in (q, q.repeat(4, 1, 1)):  # the decode and the prefill kernel
        assert same_bits(op(queries, k, k), op(queries, k.contiguous(), k.contiguous()))


# ---- what must not matter, and what must


def test_masked_keys_do_not_matter_even_when_nan():
    args = args_of("float32", [(20, 40)], d=16, kv_heads=2, group=2, uniform=True, causal=True, return_lse=True)
    want = op(**args)
    args["k"][30:], args["v"][30:] = NAN, INF  # seen by the last ten queries only
    for a, b in zip(op(**args), want, strict=True):
        assert same_bits(a[:10], b[:10]) and bool(torch.isnan(a[10:]).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_query_poisons_its_row_alone(dtype):
    args = args_of(dtype, [(20, 40)], d=32, kv_heads=1, group=2, uniform=True, causal=True)
    want = op(**args)
    args["q"][7, 1, 3] = NAN
    got = op(**args)
    assert bool(torch.isnan(got[7, 1]).all())
    got[7, 1] = want[7, 1]
    assert same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_len", [1, 12])
@pytest.mark.parametrize("page", [-1, 10_000, 2**31 - 1])
def test_a_page_id_out_of_range_gives_nan_to_its_sequence_alone(dtype, q_len, page):
    args = args_of(dtype, [(q_len, 40), (q_len, 50)], d=32, kv_heads=1, group=2, page_size=16, causal=True)
    want = op(**args)
    args["page_table"][1, 0] = page
    got = op(**args)
    assert same_bits(got[:q_len], want[:q_len])
    assert bool(torch.isnan(got[q_len:]).all())


@pytest.mark.parametrize(("dtype", "q_len"), [("float32", 1), ("bfloat16", 1), ("bfloat16", 12)])
def test_a_page_id_out_of_range_is_no_finding_of_the_checker(dtype, q_len):
    args = args_of(dtype, [(q_len, 40), (q_len, 50)], d=32, kv_heads=1, group=2, page_size=16, causal=True)
    for page in (-1, -(2**31), len(args["k"]), 2**31 - 1):
        args["page_table"][1, 0] = page
        with host(check=True, seed=1):
            got = op(**args)
        assert not bool(torch.isnan(got[:q_len]).any()) and bool(torch.isnan(got[q_len:]).all()), page


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sequences_that_share_queries_are_a_finding_of_the_checker(dtype):
    q, k = torch.zeros(8, 2, 32, dtype=getattr(torch, dtype)), torch.zeros(30, 1, 32, dtype=getattr(torch, dtype))
    good = {"q": q, "k": k, "v": k, "cu_kv": ints(0, 10, 20, 30)}
    with host(check=True, seed=1):
        op(**good, cu_q=ints(0, 3, 3, 8))
        with pytest.raises(CheckError, match="global_race.*out"):
            op(**good, cu_q=ints(0, 5, 3, 8))


def test_lengths_beyond_the_capacity_are_clamped():
    args = args_of("float32", [(1, 32), (1, 16)], d=16, page_size=16, causal=True)
    args["page_table"] = torch.tensor([[0, 1], [2, 2]], dtype=torch.int32)
    full = op(**(args | {"kv_lens": ints(32, 32)}))
    assert same_bits(op(**(args | {"kv_lens": ints(2**31 - 1, 33)})), full)
    out = op(**(args | {"kv_lens": ints(-5, 0)}))
    assert bool((out == 0).all())


# ---- planted errors: the tests above see what the tensor-core kernels could get wrong

PLANTED = [
    ("attention_prefill.cuh", "all_lo = last.lo, all_hi = first.hi", "all_lo = last.lo, all_hi = last.hi"),
    ("attention_prefill.cuh", "keep[h] = exp2_approx(m[i][h] - base[h]);", "keep[h] = 1.f;"),
    ("attention_prefill.cuh", "load_tile(stage ^ 1);", "load_tile(stage);"),
    ("attention_decode.cuh", "key >= min(see.hi, end)", "key > min(see.hi, end)"),
    ("attention_decode.cuh", "begin + step * walk.kStep + warp * 16;", "begin + step * walk.kStep;"),
    ("attention_decode.cuh", "+ head_of(r)) * max_splits;", "+ head * p.group) * max_splits;"),
    ("attention_decode.cuh", "for (int k = 0; k < splits; ++k)", "for (int k = 1; k < splits; ++k)"),
    ("attention_decode.cuh", "next_stage = stage + 1 == kStages", "if (end > begin) next_stage = stage + 1 == kStages"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "right", "wrong"), PLANTED, ids=[f"{f}-{n}" for n, (f, *_) in enumerate(PLANTED)])
def test_planted_errors_are_caught(file, right, wrong, tmp_path):
    text = sources.locate(f"ops/{file}").read_text()
    assert right in text
    planted = tmp_path / file
    planted.write_text(text.replace(right, wrong))

    def plan(problem, target):
        made = op.plan(problem, target)
        swap = [replace(la, source=str(planted)) if la.source.endswith(file) else la for la in made.launches]
        return replace(made, launches=tuple(swap))

    broken = register(replace(op, name=f"attention_planted_{PLANTED.index((file, right, wrong))}", plan=plan))
    lens = [(1, 700), (70, 90), (2, 300), (1, 0), (1, 17)]
    args = args_of("bfloat16", lens, d=32, kv_heads=1, group=2, page_size=16, causal=True)
    check(args)
    tol = op.tolerance("bfloat16")
    with host(sms=1):  # a block goes through several items
        assert mismatch(broken(**args), op.reference(**args), tol.rtol, tol.atol) is not None


@pytest.mark.parametrize("sms", [1, 3])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize(
    "lens",
    [
        [(1, 5), (1, 0), (1, 30), (1, 100)],  # an empty slot of a decode batch
        [(1, 0), (1, 0), (1, 40), (1, 0), (1, 7)],
        [(3, 5), (3, 0), (3, 30)],
        [(7, 5), (2, 40), (9, 3), (1, 33)],  # more queries than keys: the first see none
        [(20, 30), (20, 0), (33, 64), (40, 20)],
    ],
    ids=str,
)
def test_sequences_without_visible_keys_touch_no_other(lens, dtype, sms):
    """A block that goes on from an item without keys must find the next one's where they were copied to."""
    args = args_of(dtype, lens, d=64, kv_heads=3, group=3, page_size=16, causal=True, return_lse=True)
    with host(sms=sms):
        check(args)
    with host(sms=sms, check=True, seed=1):
        check(args)


# ---- plans and refusals


@pytest.mark.parametrize("arch", sorted(TARGETS))
def test_every_case_fits_every_card(arch):
    for case in data.cases():
        plan = op.planned(op.problem_of(case), TARGETS[arch])  # check_plan refuses what does not fit
        assert plan.numerics and plan.variant and plan.why


def test_plans_follow_capacity_not_lengths():
    """A captured graph replays with any lengths: nothing but metadata enters the plan."""
    case = data.batch("bfloat16", [(1, 64)] * 64, d=128, kv_heads=8, group=4, page_size=16)
    problem = op.problem_of(case)
    plan = op.planned(problem, TARGETS["90a"])
    assert plan.variant == "decode"
    assert plan.launches[0].grid == (33, 8, 1)  # two blocks an SM, whatever the batch
    mixed = op.planned(op.problem_of(data.batch("bfloat16", [(1, 64)] * 63 + [(200, 900)], d=128, page_size=16)),
                       TARGETS["90a"])  # fmt: skip
    assert [la.kernel.split("<")[0] for la in mixed.launches] == ["attention_prefill", "attention_decode"]


BAD = [
    ({"q": torch.zeros(4, 3, 16)}, "q.shape[1]: got 3"),
    ({"q": torch.zeros(4, 2, 300), "k": torch.zeros(5, 2, 300), "v": torch.zeros(5, 2, 300)}, "q.shape[2]: got 300"),
    ({"k": torch.zeros(5, 2, 8)}, "k.shape[2]: got 8"),
    ({"k": torch.zeros(5, 2, 16, dtype=torch.float16)}, "k.dtype: got float16"),
    ({"v": torch.zeros(6, 2, 16)}, "v.shape"),
    ({"q": torch.zeros(4, 2, 32)[..., ::2]}, "q.stride(-1): got 2"),
    ({"k": torch.zeros(2, 5, 2, 16), "v": torch.zeros(2, 5, 2, 16)}, "k.shape"),
    ({"page_table": torch.zeros(1, 2, dtype=torch.int32)}, "k.shape"),
    ({"kv_lens": torch.tensor([5])}, "kv_lens.dtype: got int64"),
    ({"cu_q": ints(0, 4)}, "cu_kv: got None"),
    ({"cu_kv": ints(0, 5)}, "cu_q: got None"),
    ({"cu_q": ints(0, 4), "cu_kv": ints(0, 2, 5)}, "cu_kv.shape[0]: got 3"),
    ({"kv_lens": ints(5, 5)}, "page_table: got None"),
    ({"window": 3}, "window: got 3"),
    ({"window": -1, "causal": True}, "window: got -1"),
    ({"softcap": -1.0}, "softcap: got -1.0"),
    ({"softcap": NAN}, "softcap: got nan"),
    ({"scale": -0.5}, "scale: got -0.5"),
    ({"scale": INF}, "scale: got inf"),
    ({"out": (torch.zeros(4, 2, 8), torch.zeros(0))}, "out.shape"),
]


@pytest.mark.parametrize(("change", "message"), BAD, ids=[m for _, m in BAD])
def test_bad_arguments_are_named(change, message):
    good = {"q": torch.zeros(4, 2, 16), "k": torch.zeros(5, 2, 16), "v": torch.zeros(5, 2, 16)}
    with pytest.raises(ArgumentError) as error:
        pykern.attention(**(good | change))
    assert message in str(error.value) and "allowed" in str(error.value)


def test_paged_caches_need_lengths_and_pages():
    k = torch.zeros(2, 16, 2, 16)
    good = {"q": torch.zeros(4, 2, 16), "k": k, "v": k, "page_table": torch.zeros(2, 2, dtype=torch.int32)}
    for change, message in [
        ({}, "kv_lens: got None"),
        ({"kv_lens": ints(5)}, "page_table.shape[0]: got 2"),
        ({"kv_lens": ints(5, 5), "cu_q": ints(0, 4)}, "kv_lens.shape[0]: got 2"),
        ({"kv_lens": ints(5, 5), "cu_kv": ints(0, 4, 5)}, "cu_kv: got a tensor"),
        ({"kv_lens": ints(5, 5), "k": k[:, :0], "v": k[:, :0]}, "k.shape[1]: got 0"),
        ({"kv_lens": ints(5, 5), "q": torch.zeros(3, 2, 16)}, "q.shape[0]: got 3"),
    ]:
        with pytest.raises(ArgumentError) as error:
            pykern.attention(**(good | change))
        assert message in str(error.value), str(error.value)


def test_nothing_to_do():
    k = torch.zeros(5, 2, 16)
    assert op(torch.zeros(0, 2, 16), k, k).shape == (0, 2, 16)
    out, lse = op(torch.ones(3, 2, 16), k[:0], k[:0], return_lse=True)
    assert bool((out == 0).all()) and bool((lse == -INF).all())
