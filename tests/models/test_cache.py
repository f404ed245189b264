"""The page allocator: no page belongs to two sequences, none is lost, batches say where everything is."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_files import Tiny, hf_config

from pykern.errors import ArgumentError
from pykern.models.cache import Batch, PagedCache, Sequence
from pykern.models.config import config_from_hf

CONFIG = config_from_hf(hf_config(Tiny(layers=1)), {}, "config.json")


def cache(tokens: int = 64, longest: int | None = 32, page_size: int = 4) -> PagedCache:
    return PagedCache(CONFIG, tokens, longest, page_size=page_size)


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 40)), max_size=30))
def test_pages_are_never_shared_or_lost(steps: list[tuple[int, int]]) -> None:
    """A step (i, n) lets sequence i have n tokens; n = 0 releases it."""
    c = cache()
    everything = sorted(c.free)
    sequences = [Sequence() for _ in range(5)]
    for i, n in steps:
        if n == 0:
            c.release(sequences[i])
        else:
            before = list(sequences[i].pages)
            try:
                c.reserve(sequences[i], n)
                assert len(sequences[i].pages) >= -(-n // 4)
            except ArgumentError:
                assert n > 32 or -(-n // 4) - len(before) > len(c.free)
                assert sequences[i].pages == before
        held = [p for s in sequences for p in s.pages]
        assert sorted(held + c.free) == everything


@given(work=st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=4))
def test_batches_say_where_tokens_are(work: list[tuple[int, int]]) -> None:
    """(tokens cached before, tokens of this pass) per sequence."""
    c = cache(tokens=128)
    sequences = []
    for i, (before, n) in enumerate(work):
        s = Sequence([100 * i + j for j in range(before + n + 2)])
        c.reserve(s, before or 1)
        s.cached = before
        sequences.append(s)
    batch = Batch.of(c, [(s, n) for s, (_, n) in zip(sequences, work, strict=True)])
    row = 0
    for i, (s, (before, n)) in enumerate(zip(sequences, work, strict=True)):
        assert batch.kv_lens[i] == before + n
        assert (batch.cu_q[i], batch.cu_q[i + 1]) == (row, row + n)
        for j in range(n):
            position = before + j
            assert batch.ids[row + j] == s.ids[position]
            assert batch.positions[row + j] == position
            assert batch.slots[row + j] == batch.page_table[i, position // 4] * 4 + position % 4
        row += n
        if batch.last is not None:
            assert batch.last[i] == row - 1
    assert (batch.last is None) == all(n == 1 for _, n in work)
    assert len(set(batch.slots.tolist())) == row
    again = Batch.view(batch.packed.clone(), batch.shape)
    for name in ("ids", "positions", "slots", "cu_q", "kv_lens", "page_table"):
        part = getattr(again, name)
        assert torch.equal(part, getattr(batch, name)) and part.is_contiguous()
        assert part.storage_offset() * part.element_size() % 16 == 0


def test_refused() -> None:
    c = cache()
    with pytest.raises(ArgumentError, match="tokens of a sequence: got 3, allowed: 1..2"):
        Batch.of(c, [(Sequence([1, 2]), 3)])
    held = [Sequence() for _ in range(3)]
    with pytest.raises(
        ArgumentError, match="^free cache pages: got 0, allowed: 8 more for the 32 tokens of a sequence"
    ):
        for s in held:
            c.reserve(s, 32)
    assert [len(s.pages) for s in held] == [8, 8, 0]
    with pytest.raises(ArgumentError, match="longest"):
        PagedCache(CONFIG, 64, 1000)


def test_pages_of_what_is_gone_are_taken_back() -> None:
    """When they are needed, and no sooner; those of a sequence that is still there stay, whatever is equal to it."""
    c = cache()
    kept, everything = Sequence([1]), sorted(c.free)
    c.reserve(kept, 8)
    for _ in range(9):
        c.reserve(Sequence([1]), 32)
    assert all(c.holds(kept, page) for page in kept.pages) and len(kept.pages) == 2
    assert sorted({*c.free, *kept.pages}) != everything
    twin = Sequence([1], 0, list(kept.pages))
    assert twin == kept and not any(c.holds(twin, page) for page in kept.pages)
    foreign = r"^sequence.pages: got pages of another sequence or cache, allowed: pages that this cache gave"
    for call in (lambda: c.reserve(twin, 9), lambda: c.release(twin), lambda: c.check(twin)):
        with pytest.raises(ArgumentError, match=foreign):
            call()
    c.release(kept)
    c.release(kept)
    assert kept.pages == [] and len(c.free) == len(set(c.free))
