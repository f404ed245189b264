"""Running a decoder: prefill in chunks, batches of ragged requests, choosing tokens, stopping and going on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pykern.errors import ArgumentError, ModelError
from pykern.graphs import GraphPool
from pykern.models.cache import Batch, PagedCache, Sequence
from pykern.models.llama import Llama

LARGEST = 1e30  # of temperatures: finite in float32 as well


@dataclass(frozen=True)
class Sampling:
    """How a request's tokens are chosen. ``temperature`` 0 is argmax; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 are
    off. The order is temperature, top-k, top-p, min-p. The seed is the request's own: its tokens do not depend on
    what else is in the batch."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise ArgumentError(name, repr(value), "a number")
        for name in ("top_k", "seed"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int):
                raise ArgumentError(name, repr(value), "an int")
        if not 0 <= self.temperature < LARGEST:
            raise ArgumentError("temperature", self.temperature, f"0 (greedy) or above, below {LARGEST:g}")
        if not 0 <= self.top_k < 2**31:
            raise ArgumentError("top_k", self.top_k, "0 (off) or above, below 2**31")
        if not 0 < self.top_p <= 1:
            raise ArgumentError("top_p", self.top_p, "above 0, up to 1 (off)")
        if not 0 <= self.min_p < 1:
            raise ArgumentError("min_p", self.min_p, "0 (off) up to, not including, 1")
        if not 0 <= self.seed < 2**63:
            raise ArgumentError("seed", self.seed, "0..2**63 - 1")


@dataclass
class Clock:
    """Tokens through the model and the seconds they took, prompts and new tokens apart."""

    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0


class Engine:
    """A model with its cache. Sequences may join, leave and come back between any two calls."""

    def __init__(self, model: Llama, cache: PagedCache, *, graphs: bool = False) -> None:
        self.model, self.cache = model, cache
        self.device = model.cos_sin.device
        self.clock = Clock()
        self.pool = GraphPool(self._run) if graphs else None
        self.last_decode: Batch | None = None
        self.on_pass: Callable[[int], None] = lambda kv_tokens: None

    def _run(self, packed: torch.Tensor, shape: Any) -> torch.Tensor:
        return self.model(Batch.view(packed, shape), self.cache)

    @torch.inference_mode()
    def step(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Logits [sequences, vocab] after the next ``n`` pending ids of each sequence."""
        self.on_pass(sum(s.cached + n for s, n in work))
        if self.pool is not None and all(n == 1 for _, n in work):
            batch = Batch.of(self.cache, work)
            self.last_decode = batch
            logits = self.pool(batch.packed, batch.shape)
        else:
            batch = Batch.of(self.cache, work, self.device)
            logits = self.model(batch, self.cache)
        for sequence, n in work:
            sequence.cached += n
        return logits

    def check(self, sequences: list[Sequence]) -> None:
        """ArgumentError for a sequence given twice (it would write its cache twice) and for ids of no token."""
        if len({id(s) for s in sequences}) != len(sequences):
            raise ArgumentError("sequences", f"{len(sequences)}, one of them twice", "each once")
        vocab = self.model.config.vocab
        for i, sequence in enumerate(sequences):
            for token in sequence.pending:
                if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                    raise ArgumentError(f"sequences[{i}].ids", repr(token), f"ints in 0..{vocab - 1}, the vocabulary")

    def prefill(self, sequences: list[Sequence], chunk: int = 0) -> torch.Tensor:
        """Logits [sequences, vocab] after all pending ids, ``chunk`` of each sequence at a time (0: all at once)."""
        if chunk < 0 or not sequences or any(not s.pending for s in sequences):
            raise ArgumentError(
                "chunk, sequences", (chunk, len(sequences)), "chunk >= 0; sequences with pending ids"
            )
        rows: dict[int, torch.Tensor] = {}
        while waiting := [i for i, s in enumerate(sequences) if i not in rows]:
            work = [
                (sequences[i], min(chunk or len(sequences[i].pending), len(sequences[i].pending)))
                for i in waiting
            ]
            logits = self.step(work)
            for row, i in zip(logits, waiting, strict=True):
                if not sequences[i].pending:
                    rows[i] = row.clone()
        return torch.stack([rows[i] for i in range(len(sequences))])

    @torch.inference_mode()
    def choose(self, logits: torch.Tensor, sequences: list[Sequence], sampling: list[Sampling]) -> list[int]:
        """The next id of each sequence."""
        if all(s.temperature == 0 for s in sampling):
            ids = self.model.ops.argmax(logits)
            valid = logits.gather(1, ids.unsqueeze(1)).squeeze(1).isfinite()  # a row of NaN has no argmax
        else:
            ids, valid = sample_rows(self.model.ops, logits, sequences, sampling)
        rows = torch.stack([ids, valid.to(ids.dtype)]).tolist()  # one copy from the device
        for sequence, ok in zip(sequences, rows[1], strict=True):
            if not ok:
                after = f"after {len(sequence.ids)} tokens"
                raise ModelError(f"no token has a valid probability {after}: the logits are NaN or infinite")
        return rows[0]

    def generate(
        self,
        sequences: list[Sequence],
        max_tokens: int,
        sampling: Sampling | list[Sampling] | None = None,
        *,
        stop_ids: tuple[int, ...] = (),
        chunk: int = 0,
        on_token: Callable[[int, int], None] | None = None,
    ) -> list[list[int]]:
        """Up to ``max_tokens`` new ids for each sequence, ending with one of ``stop_ids`` if it comes.

        Ids are appended to the sequences; the last one stays pending, so a later call goes on from the cache.
        ``on_token(i, id)`` is called as each comes. An earlier call may have been stopped anywhere.
        """
        if isinstance(max_tokens, bool) or not isinstance(max_tokens, int) or max_tokens < 0:
            raise ArgumentError("max_tokens", repr(max_tokens), "an int, 0 or above")
        choices = sampling if isinstance(sampling, list) else [sampling or Sampling()] * len(sequences)
        if len(choices) != len(sequences) or not all(isinstance(c, Sampling) for c in choices):
            kinds = ", ".join(type(c).__name__ for c in choices)
            raise ArgumentError("sampling", kinds, f"a Sampling, or a list of {len(sequences)}, one a sequence")
        self.check(sequences)
        new: list[list[int]] = [[] for _ in sequences]
        if max_tokens == 0 or not sequences:
            return new
        started = time.perf_counter()
        self.clock.prefill_tokens += sum(len(s.pending) for s in sequences)
        active = list(range(len(sequences)))
        logits = self.prefill(sequences, chunk)
        while True:
            picked = self.choose(logits, [sequences[i] for i in active], [choices[i] for i in active])
            now = time.perf_counter()
            if any(len(new[i]) for i in active):
                self.clock.decode_seconds += now - started
                self.clock.decode_tokens += len(active)
            else:
                self.clock.prefill_seconds += now - started
            started = now
            for i, token in zip(active, picked, strict=True):
                sequences[i].ids.append(token)
                new[i].append(token)
                if on_token is not None:
                    on_token(i, token)
            active = [i for i in active if len(new[i]) < max_tokens and new[i][-1] not in stop_ids]
            if not active:
                return new
            logits = self.step([(sequences[i], 1) for i in active])


def sample_rows(
    ops: Any, logits: torch.Tensor, sequences: list[Sequence], sampling: list[Sampling]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sampled ids, and whether each is valid.

    A row's random number comes from its request's seed and how long the request is, nothing else.
    """

    def column(values: list[Any], dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device)

    return ops.sample(
        logits,
        column([s.seed for s in sampling], torch.int64),
        offsets=column([len(s.ids) for s in sequences], torch.int64),
        temperatures=column([s.temperature for s in sampling], torch.float32),
        top_ks=column([s.top_k for s in sampling], torch.int32),
        top_ps=column([s.top_p for s in sampling], torch.float32),
        min_ps=column([s.min_p for s in sampling], torch.float32),
        return_valid=True,
    )
