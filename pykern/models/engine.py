"""Running a decoder: prefill in chunks, batches of ragged requests, choosing tokens, stopping and going on."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from pykern.errors import ArgumentError, ModelError
from pykern.graphs import GraphPool
from pykern.models.cache import Batch, PagedCache, Sequence, whole
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

    def step(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
        """Logits [sequences, vocab] after the next ``n`` pending ids of each sequence."""
        for i, pair in enumerate(work):
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise ArgumentError(f"work[{i}]", type(pair).__name__, "a (Sequence, int)")
            sequence, n = pair
            self.cache.check(sequence, f"work[{i}][0]", every_page=False)  # this is called for every token
            if isinstance(n, bool) or not isinstance(n, int):
                raise ArgumentError(f"work[{i}][1]", repr(n)[:60], "an int: how many pending ids to run")
            self._check_ids(sequence.ids[sequence.cached : sequence.cached + n], f"work[{i}][0]")
        self._check_once([sequence for sequence, _ in work], "work")
        return self._step(work)

    @torch.inference_mode()
    def _step(self, work: list[tuple[Sequence, int]]) -> torch.Tensor:
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

    def check(self, sequences: list[Sequence], *, pending: bool = False) -> None:
        """ArgumentError for what is no list of sequences, for one given twice (it would write its cache twice), for one
        of another engine, for ids of no token, and with ``pending`` for one that has nothing to run."""
        if not isinstance(sequences, (list, tuple)):
            raise ArgumentError("sequences", type(sequences).__name__, "a list of pykern.models.cache.Sequence")
        for i, sequence in enumerate(sequences):
            self.cache.check(sequence, f"sequences[{i}]")
            self._check_ids(sequence.pending, f"sequences[{i}]")
            if pending and len(sequence.ids) == sequence.cached:
                got = f"{len(sequence.ids)} ids, all of them in the cache" if sequence.ids else "no ids"
                raise ArgumentError(f"sequences[{i}].ids", got, "at least one id that is pending")
        self._check_once(sequences, "sequences")

    def _check_ids(self, ids: list[int], at: str) -> None:
        vocab = self.model.config.vocab
        for token in ids:
            if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
                shown = repr(token)[:60] if isinstance(token, int) else f"{type(token).__name__} {token!r}"[:60]
                raise ArgumentError(f"{at}.ids", shown, f"ints in 0..{vocab - 1}, the vocabulary")

    @staticmethod
    def _check_once(sequences: list[Sequence], name: str) -> None:
        if len({id(s) for s in sequences}) != len(sequences):
            raise ArgumentError(name, f"{len(sequences)}, one of them twice", "each sequence once")

    def prefill(self, sequences: list[Sequence], chunk: int = 0) -> torch.Tensor:
        """Logits [sequences, vocab] after all pending ids, ``chunk`` of each sequence at a time (0: all at once)."""
        whole("chunk", chunk, "an int, 0 (all at once) or above")
        self.check(sequences, pending=True)
        if not sequences:
            raise ArgumentError("sequences", "none", "at least one")
        return self._prefill(sequences, chunk)

    def _prefill(self, sequences: list[Sequence], chunk: int) -> torch.Tensor:
        rows: dict[int, torch.Tensor] = {}
        while waiting := [i for i, s in enumerate(sequences) if i not in rows]:
            left = [len(sequences[i].ids) - sequences[i].cached for i in waiting]
            work = [(sequences[i], min(chunk or n, n)) for i, n in zip(waiting, left, strict=True)]
            logits = self._step(work)
            for row, i in zip(logits, waiting, strict=True):
                if len(sequences[i].ids) == sequences[i].cached:
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

        ``sampling``: one for all sequences, or a list with one for each; None: greedy. Ids are appended to the
        sequences; the last one stays pending, so a later call goes on from the cache. ``on_token(i, id)`` is called as
        each comes. An earlier call may have been stopped anywhere, by an error too: what came until then is in the
        sequences. ArgumentError also when the cache runs out of pages or a sequence of its longest on the way.
        """
        whole("max_tokens", max_tokens, "an int, 0 or above")
        whole("chunk", chunk, "an int, 0 (all at once) or above")
        self.check(sequences, pending=max_tokens > 0)
        choices = self._choices(sampling, len(sequences))
        vocab = self.model.config.vocab
        plain = isinstance(stop_ids, (tuple, list, set, frozenset))
        if not plain or not all(type(t) is int and 0 <= t < vocab for t in stop_ids):
            raise ArgumentError("stop_ids", repr(stop_ids)[:60], f"a tuple of ints in 0..{vocab - 1}, the vocabulary")
        if on_token is not None and not callable(on_token):
            raise ArgumentError("on_token", type(on_token).__name__, "a function of (i, id), or None")
        new: list[list[int]] = [[] for _ in sequences]
        if max_tokens == 0 or not sequences:
            return new
        started = time.perf_counter()
        self.clock.prefill_tokens += sum(len(s.pending) for s in sequences)
        active = list(range(len(sequences)))
        logits = self._prefill(sequences, chunk)
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
            logits = self._step([(sequences[i], 1) for i in active])

    @staticmethod
    def _choices(sampling: Any, count: int) -> list[Sampling]:
        """One Sampling a sequence."""
        allowed = f"a Sampling, or a list of {count}, one a sequence"
        if sampling is None or isinstance(sampling, Sampling):
            return [sampling or Sampling()] * count
        if not isinstance(sampling, (list, tuple)):
            raise ArgumentError("sampling", f"{type(sampling).__name__} {sampling!r}"[:60], allowed)
        for i, one in enumerate(sampling):
            if not isinstance(one, Sampling):
                raise ArgumentError(f"sampling[{i}]", f"{type(one).__name__} {one!r}"[:60], "a Sampling")
        if len(sampling) != count:
            raise ArgumentError("sampling", f"a list of {len(sampling)}", allowed)
        return list(sampling)


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
