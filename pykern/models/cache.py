"""The paged key/value cache: pages of a fixed number of tokens, handed out to sequences and taken back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from pykern.errors import ArgumentError
from pykern.models.config import LlamaConfig

PAGE_SIZE = 16  # tokens; small enough that short sequences waste little, large enough for whole cache lines per head


@dataclass
class Sequence:
    """One request: its ids, how many of them the cache holds, and the pages they are in."""

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
    graph keeps working as sequences grow. ``tokens`` is the capacity for all sequences together.
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
        longest = min(tokens, config.context) if longest is None else longest
        if page_size < 1 or tokens < 1 or not 1 <= longest <= config.context:
            raise ArgumentError(
                "tokens, longest, page_size", (tokens, longest, page_size), f"1 and up; longest up to {config.context}"
            )
        self.page_size, self.longest = page_size, longest
        self.width = -(-longest // page_size)
        pages = max(-(-tokens // page_size), self.width)
        shape = (pages, page_size, config.kv_heads, config.head_dim)
        # Zeros, so that a masked read of a page's unused end can never meet a NaN.
        self.k = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.v = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(config.layers)]
        self.free = list(range(pages - 1, -1, -1))

    def reserve(self, sequence: Sequence, tokens: int) -> None:
        """Give ``sequence`` the pages for its first ``tokens`` tokens; ArgumentError when they cannot be had."""
        if tokens > self.longest:
            raise ArgumentError("sequence length", tokens, f"at most {self.longest}, the cache's longest")
        wanted = -(-tokens // self.page_size) - len(sequence.pages)
        if wanted > len(self.free):
            raise ArgumentError("free cache pages", len(self.free), f"{wanted} are needed; release finished sequences")
        for _ in range(wanted):
            sequence.pages.append(self.free.pop())

    def release(self, sequence: Sequence) -> None:
        """Take back all pages of ``sequence``; its ids stay, and would have to be computed again."""
        self.free.extend(reversed(sequence.pages))
        sequence.pages, sequence.cached = [], 0

    def slot(self, sequence: Sequence, position: int) -> int:
        """Where token ``position`` of ``sequence`` is: page * page_size + place in the page."""
        return sequence.pages[position // self.page_size] * self.page_size + position % self.page_size


@dataclass
class Batch:
    """One pass through the model over a ragged batch.

    ``ids``, ``positions``, ``slots`` int64 [tokens]; ``cu_q`` int32 [sequences + 1] (row ranges), ``kv_lens`` int32
    [sequences] (cached tokens, this pass included), ``page_table`` int32 [sequences, width]; ``last`` int64
    [sequences] (row of each sequence's last token), or None when every row is one (decoding).
    """

    ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cu_q: torch.Tensor
    kv_lens: torch.Tensor
    page_table: torch.Tensor
    last: torch.Tensor | None

    @staticmethod
    def of(cache: PagedCache, work: list[tuple[Sequence, int]], device: torch.device | str = "cpu") -> Batch:
        """The next ``n`` pending ids of each sequence in ``work`` (pages are reserved)."""
        ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        cu_q, kv_lens, tables = [0], [], []
        for sequence, n in work:
            if not 1 <= n <= len(sequence.pending):
                raise ArgumentError("tokens of a sequence", n, f"1..{len(sequence.pending)}, its pending ids")
            start, end = sequence.cached, sequence.cached + n
            cache.reserve(sequence, end)
            ids += sequence.ids[start:end]
            positions += range(start, end)
            slots += [cache.slot(sequence, p) for p in range(start, end)]
            cu_q.append(len(ids))
            kv_lens.append(end)
            tables.append(sequence.pages + [0] * (cache.width - len(sequence.pages)))
        decoding = len(ids) == len(work)

        def tensor(values: list, dtype: torch.dtype) -> torch.Tensor:
            return torch.tensor(values, dtype=dtype, device=device)

        return Batch(
            tensor(ids, torch.int64),
            tensor(positions, torch.int64),
            tensor(slots, torch.int64),
            tensor(cu_q, torch.int32),
            tensor(kv_lens, torch.int32),
            tensor(tables, torch.int32),
            None if decoding else tensor(cu_q[1:], torch.int64) - 1,
        )
