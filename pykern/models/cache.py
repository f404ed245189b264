"""The paged key/value cache: pages of a fixed number of tokens, handed out to sequences and taken back."""

from __future__ import annotations

import math
import weakref
from dataclasses import dataclass, field
from typing import NoReturn

import torch

from pykern.errors import ArgumentError
from pykern.models.config import LlamaConfig

PAGE_SIZE = 16  # tokens; small enough that short sequences waste little, large enough for whole cache lines per head


@dataclass
class Sequence:
    """One request: its ids, how many of them the cache holds, and the pages they are in.

    ``ids`` is a list of ints and yours to make; ``cached`` and ``pages`` are the engine's. A copy does not hold the
    pages: go on from a copy of the ids, ``Sequence(list(ids))``.
    """

    ids: list[int] = field(default_factory=list)
    cached: int = 0
    pages: list[int] = field(default_factory=list)

    @property
    def pending(self) -> list[int]:
        """Ids that have not been through the model."""
        return self.ids[self.cached :]


class PagedCache:
    """Keys and values of every layer, ``[pages, page_size, kv_heads, head_dim]`` each.

    ``longest`` is the number of tokens a sequence may reach: it fixes the width of page tables, so that a captured
    graph keeps working as sequences grow. ``tokens`` is the capacity for all sequences together. Pages go back by
    :meth:`release`; those of sequences that nobody refers to any more are taken back when others need them.
    """

    def __init__(
        self,
        config: LlamaConfig,
        tokens: int,
        longest: int | None = None,
        *,
        page_size: int = PAGE_SIZE,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        whole("tokens", tokens, "an int, 1 or above", low=1)
        whole("page_size", page_size, "an int, 1 or above", low=1)
        longest = min(tokens, config.context) if longest is None else longest
        whole("longest", longest, f"an int in 1..{config.context}, the model's context", low=1, most=config.context)
        self.page_size, self.longest = page_size, longest
        self.width = -(-longest // page_size)
        pages = max(-(-tokens // page_size), self.width)
        shape = (pages, page_size, config.kv_heads, config.head_dim)
        # Zeros, so that a masked read of a page's unused end can never meet a NaN.
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.free = list(range(pages - 1, -1, -1))
        # Who has each page. A sequence is compared by identity: an equal one, or a copy, holds nothing.
        self.holders: list[weakref.ref[Sequence] | None] = [None] * pages

    def holds(self, sequence: Sequence, page: object) -> bool:
        """Whether ``page`` of this cache was given to this very sequence."""
        if isinstance(page, bool) or not isinstance(page, int) or not 0 <= page < len(self.holders):
            return False
        holder = self.holders[page]
        return holder is not None and holder() is sequence

    def check(self, sequence: Sequence, at: str = "sequence", *, every_page: bool = True) -> None:
        """ArgumentError, with the place ``at`` in it, for what is no sequence or claims to be cached and is not: it has
        the pages of another cache, or of the sequence that it was copied from. Not ``every_page``: only the last is
        looked at."""
        if not isinstance(sequence, Sequence):
            allowed = "a pykern.models.cache.Sequence, such as Sequence([1, 2])"
            raise ArgumentError(at, type(sequence).__name__, allowed)
        ids, cached, pages = sequence.ids, sequence.cached, sequence.pages
        if not isinstance(ids, list):
            raise ArgumentError(f"{at}.ids", type(ids).__name__, "a list of ints")
        if isinstance(cached, bool) or not isinstance(cached, int) or not 0 <= cached <= len(ids):
            raise ArgumentError(f"{at}.cached", repr(cached), f"0..{len(ids)}, its number of ids")
        if not isinstance(pages, list):
            self._foreign(at)
        if not all(self.holds(sequence, page) for page in (pages if every_page else pages[-1:])):
            self._foreign(at)
        if cached > len(pages) * self.page_size:
            most = len(pages) * self.page_size
            raise ArgumentError(f"{at}.cached", cached, f"at most {most}, what its {len(pages)} pages hold")

    def _foreign(self, at: str) -> NoReturn:
        allowed = "pages that this cache gave to this sequence; for a copy or another engine Sequence(list(ids))"
        raise ArgumentError(f"{at}.pages", "pages of another sequence or cache", allowed)

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Give ``sequence`` the pages for its first ``tokens`` tokens; ArgumentError when they cannot be had."""
        if tokens > self.longest:
            raise ArgumentError("sequence length", tokens, f"at most {self.longest}, the cache's longest")
        if sequence.pages and not self.holds(sequence, sequence.pages[-1]):  # the last: this is called at every step
            self._foreign("sequence")
        wanted = -(-tokens // self.page_size) - len(sequence.pages)
        if wanted > len(self.free):
            self._reclaim()
        if wanted > len(self.free):
            pages = f"{wanted} more for the {tokens} tokens of a sequence"
            raise ArgumentError(
                "free cache pages", len(self.free), f"{pages}; release finished ones, or give the cache more tokens"
            )
        for _ in range(wanted):
            page = self.free.pop()
            self.holders[page] = weakref.ref(sequence)
            sequence.pages.append(page)

    def _reclaim(self) -> None:
        """Take back the pages of sequences that are gone."""
        for page, holder in enumerate(self.holders):
            if holder is not None and holder() is None:
                self.holders[page] = None
                self.free.append(page)

    def release(self, sequence: Sequence) -> None:
        """Take back all pages of ``sequence``; its ids stay, and would have to be computed again."""
        if not all(self.holds(sequence, page) for page in sequence.pages):
            self._foreign("sequence")
        for page in reversed(sequence.pages):
            self.holders[page] = None
            self.free.append(page)
        sequence.pages, sequence.cached = [], 0

    def slot(self, sequence: Sequence, position: int) -> int:
        """Where token ``position`` of ``sequence`` is: page * page_size + place in the page."""
        return sequence.pages[position // self.page_size] * self.page_size + position % self.page_size


@dataclass
class Batch:
    """One pass through the model over a ragged batch. All tensors are views of ``packed``: one copy to the device.

    ``ids``, ``positions``, ``slots`` int64 [tokens]; ``last`` int64 [sequences] (row of each sequence's last token),
    or None when every row is one (decoding); ``cu_q`` int32 [sequences + 1] (row ranges), ``kv_lens`` int32
    [sequences] (cached tokens, this pass included), ``page_table`` int32 [sequences, width].
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    last: torch.Tensor | None
    cu_q: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    packed: torch.Tensor

    @property
    def shape(self) -> tuple[int, int, int]:
        """(tokens, sequences, page-table width): what a captured graph is made for."""
        return len(self.ids), len(self.kv_lens), self.page_table.shape[1]

    @staticmethod
    def of(cache: PagedCache, work: list[tuple[Sequence, int]], device: torch.device | str = "cpu") -> Batch:
        """The next ``n`` pending ids of each sequence in ``work``; their pages are reserved."""
        for sequence, n in work:
            if not 1 <= n <= len(sequence.pending):
                raise ArgumentError("tokens of a sequence", n, f"1..{len(sequence.pending)}, its pending ids")
        for sequence, n in work:
            cache.reserve(sequence, sequence.cached + n)
        shape = (sum(n for _, n in work), len(work), cache.width)
        batch = Batch.empty(shape)
        row = 0
        for i, (sequence, n) in enumerate(work):
            start, rows = sequence.cached, slice(row, row + n)
            positions = torch.arange(start, start + n)
            pages = torch.tensor(sequence.pages, dtype=torch.int64)
            batch.ids[rows] = torch.tensor(sequence.ids[start : start + n])
            batch.positions[rows] = positions
            batch.slots[rows] = pages[positions // cache.page_size] * cache.page_size + positions % cache.page_size
            batch.page_table[i, : len(pages)] = pages
            batch.kv_lens[i] = start + n
            row += n
            batch.cu_q[i + 1] = row
            if batch.last is not None:
                batch.last[i] = row - 1
        return batch.to(device)

    @staticmethod
    def empty(shape: tuple[int, int, int], device: torch.device | str = "cpu") -> Batch:
        """A batch of zeros: for tracing."""
        return Batch.view(torch.zeros(_words(shape), dtype=torch.int32, device=device), shape)

    def to(self, device: torch.device | str) -> Batch:
        """This batch on ``device``."""
        if self.packed.device == torch.device(device):
            return self
        return Batch.view(self.packed.to(device, non_blocking=True), self.shape)

    @staticmethod
    def view(packed: torch.Tensor, shape: tuple[int, int, int]) -> Batch:
        """The batch that ``packed`` (int32, :func:`_words` of ``shape`` long) holds."""
        tokens, sequences, width = shape
        at = 0

        def take(count: int, words: int) -> torch.Tensor:
            nonlocal at
            part = packed[at : at + count * words]
            at += _padded(count * words)
            return part.view(torch.int64) if words == 2 else part

        ids, positions, slots, last = (take(n, 2) for n in (tokens, tokens, tokens, sequences))
        cu_q, kv_lens, table = (take(n, 1) for n in (sequences + 1, sequences, sequences * width))
        decoding = tokens == sequences
        return Batch(
            ids,
            positions,
            slots,
            None if decoding else last,
            cu_q,
            kv_lens,
            table.view(sequences, width),
            packed,
        )


def whole(name: str, value: object, allowed: str, *, low: int = 0, most: float = math.inf) -> None:
    """ArgumentError unless ``value`` is an int in low..most."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= most:
        raise ArgumentError(name, repr(value)[:60], allowed)


def _padded(words: int) -> int:
    """Each part starts on 16 bytes, so that kernels may use their widest loads."""
    return -(-words // 4) * 4


def _words(shape: tuple[int, int, int]) -> int:
    tokens, sequences, width = shape
    parts = [2 * tokens] * 3 + [2 * sequences, sequences + 1, sequences, sequences * width]
    return sum(map(_padded, parts))
