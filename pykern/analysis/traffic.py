"""Fusion traffic: the bytes a chain of operations moves through memory, one kernel per step against one for all.

    unfused = input + weights + 2 x intermediates + output
    fused   = input + weights + output

An intermediate is written by one kernel and read by the next, hence twice. A step may *keep* its result (a residual
stream that later layers need): it then counts as output, and unfused it is read back once more. Weights do not grow
with the batch, everything else does, so at batch 1 weights are nearly all of the traffic and fusing saves little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pykern.errors import ArgumentError, require

#: Bytes an element. int4 packs two values a byte; its group scales are added by :attr:`Chain.group`.
DTYPE_BYTES = {"fp32": 4.0, "fp16": 2.0, "bf16": 2.0, "fp8": 1.0, "int4": 0.5}
MAX_SIZE = 2**40


def dtype_bytes(dtype: str, name: str = "dtype") -> float:
    """Bytes of one element of ``dtype``."""
    require(isinstance(dtype, str) and dtype in DTYPE_BYTES, name, repr(dtype), ", ".join(DTYPE_BYTES))
    return DTYPE_BYTES[dtype]


def size_in_bytes(elements: int, dtype: str) -> int:
    """Bytes of ``elements`` packed without gaps, in whole numbers (sizes go beyond what a float holds exactly)."""
    return -(-elements * int(2 * dtype_bytes(dtype)) // 2)


@dataclass(frozen=True)
class Step:
    """One operation: elements a token of its result, its weights, and what else it reads.

    ``out`` and ``extra`` are elements a token (a residual operand), ``context`` elements a sequence read from a cache
    (keys, values), ``weights`` elements in all, ``flops`` arithmetic a token. ``rows``: needs the whole row of its
    input on chip when fused (a norm, a softmax, the next matrix product). ``vector``: its weights are vectors, which
    keep the activation dtype when matrices are quantised.
    """

    name: str
    out: int
    weights: int = 0
    extra: int = 0
    context: int = 0
    flops: int = 0
    keep: bool = False
    rows: bool = False
    vector: bool = False


@dataclass(frozen=True)
class Chain:
    """Operations one after another. ``input``: elements a token; ``queries``: tokens a sequence in the batch.

    ``dtype`` is that of activations (and the cache), ``weight_dtype`` that of weight matrices; with ``group`` each
    so many int4 weights carry a 2-byte scale.
    """

    name: str
    input: int
    steps: tuple[Step, ...]
    dtype: str = "bf16"
    weight_dtype: str = ""
    queries: int = 1
    group: int = 0
    text: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        dtype_bytes(self.dtype)
        if not self.weight_dtype:
            object.__setattr__(self, "weight_dtype", self.dtype)
        dtype_bytes(self.weight_dtype, "weight_dtype")
        require(bool(self.steps), "chain", "no step", "at least one step")
        require(1 <= self.queries <= MAX_SIZE, "queries", self.queries, f"1 to {MAX_SIZE} tokens a sequence")
        require(
            0 <= self.group <= MAX_SIZE,
            "group",
            self.group,
            "0 (no scales) or the weights that share a scale",
        )
        require(1 <= self.input <= MAX_SIZE, "input", self.input, f"1 to {MAX_SIZE} elements")

    def with_types(self, dtype: str, weight_dtype: str = "", group: int = 0) -> Chain:
        """The same chain in other dtypes."""
        return replace(self, dtype=dtype, weight_dtype=weight_dtype or dtype, group=group)

    def _weight_bytes(self, step: Step) -> int:
        if step.vector:
            return size_in_bytes(step.weights, self.dtype)
        scales = -(-step.weights // self.group) * 2 if self.group and self.weight_dtype == "int4" else 0
        return size_in_bytes(step.weights, self.weight_dtype) + scales

    def steps_traffic(self, batch: int) -> list[tuple[Step, int, int]]:
        """(step, bytes, FLOPs) of each unfused kernel: what it reads and writes. The bytes add up to ``unfused``."""
        self._check_batch(batch)
        tokens, width, out = batch * self.queries, self.input, []
        for step in self.steps:
            moved = size_in_bytes(tokens * width, self.dtype) + size_in_bytes(tokens * step.extra, self.dtype)
            moved += size_in_bytes(batch * step.context, self.dtype) + self._weight_bytes(step)
            out.append((step, moved + size_in_bytes(tokens * step.out, self.dtype), tokens * step.flops))
            width = step.out
        return out

    @staticmethod
    def _check_batch(batch: int) -> None:
        require(type(batch) is int and 1 <= batch <= MAX_SIZE, "batch", repr(batch), f"1 to {MAX_SIZE}")

    def traffic(self, batch: int) -> Traffic:
        """Bytes moved for ``batch`` sequences. Raises :class:`ArgumentError` for a batch below 1."""
        self._check_batch(batch)
        tokens = batch * self.queries

        def activation(elements: int) -> int:
            return size_in_bytes(elements, self.dtype)

        outputs = [s.keep or n == len(self.steps) - 1 for n, s in enumerate(self.steps)]
        return Traffic(
            batch=batch,
            input=activation(tokens * (self.input + sum(s.extra for s in self.steps)))
            + activation(batch * sum(s.context for s in self.steps)),
            weights=sum(self._weight_bytes(s) for s in self.steps),
            intermediates=activation(
                tokens * sum(s.out for s, is_out in zip(self.steps, outputs) if not is_out)
            ),
            kept=activation(tokens * sum(s.out for s in self.steps[:-1] if s.keep)),
            output=activation(tokens * sum(s.out for s, is_out in zip(self.steps, outputs) if is_out)),
            flops=tokens * sum(s.flops for s in self.steps),
            kernels=len(self.steps),
        )


@dataclass(frozen=True)
class Traffic:
    """Bytes of a chain at one batch. ``kept`` (part of ``output``) is read back once by the unfused kernels."""

    batch: int
    input: int
    weights: int
    intermediates: int
    kept: int
    output: int
    flops: int
    kernels: int

    @property
    def fused(self) -> int:
        return self.input + self.weights + self.output

    @property
    def unfused(self) -> int:
        return self.input + self.weights + 2 * self.intermediates + self.kept + self.output

    @property
    def saved(self) -> int:
        return self.unfused - self.fused

    @property
    def saved_share(self) -> float:
        """Part of the unfused traffic that fusing removes, 0 to 1."""
        return self.saved / self.unfused if self.unfused else 0.0

    @property
    def weight_share(self) -> float:
        """Part of the unfused traffic that is weights, 0 to 1."""
        return self.weights / self.unfused if self.unfused else 0.0

    def time_us(self, gbps: float, *, fused: bool, launch_us: float = 0.0) -> float:
        """Microseconds at a bandwidth in GB/s (1e9 B/s), plus ``launch_us`` for each kernel."""
        moved, kernels = (self.fused, 1) if fused else (self.unfused, self.kernels)
        return moved / gbps / 1e3 + kernels * launch_us

    def to_json(self, gbps: float | None = None, launch_us: float = 0.0) -> dict[str, Any]:
        out: dict[str, Any] = {
            "batch": self.batch, "input": self.input, "weights": self.weights, "intermediates": self.intermediates,
            "kept": self.kept, "output": self.output, "unfused": self.unfused, "fused": self.fused,
            "saved": self.saved, "saved_share": self.saved_share, "weight_share": self.weight_share,
            "flops": self.flops, "kernels": self.kernels,
        }  # fmt: skip
        if gbps is not None:
            out["unfused_us"] = self.time_us(gbps, fused=False, launch_us=launch_us)
            out["fused_us"] = self.time_us(gbps, fused=True, launch_us=launch_us)
        return out


def roofed_us(chain: Chain, batch: int, gbps: float, tflops: float) -> tuple[float, float]:
    """Microseconds (unfused, fused) when arithmetic counts too: each kernel takes the longer of its two times."""

    def longer(moved: float, flops: float) -> float:
        return max(moved / gbps / 1e3, flops / tflops / 1e6)

    whole = chain.traffic(batch)
    return sum(longer(b, f) for _, b, f in chain.steps_traffic(batch)), longer(whole.fused, whole.flops)


def pays_from(chain: Chain, share: float = 0.1) -> int | None:
    """The smallest batch at which fusing removes at least ``share`` of the unfused traffic; ``None``: at no batch.

    The saved share only grows with the batch (weights are the one constant part), so a bisection finds it.
    """
    require(0 < share < 1, "share", share, "between 0 and 1")
    if chain.traffic(MAX_SIZE).saved_share < share:
        return None
    low, high = 1, 1
    while chain.traffic(high).saved_share < share:
        low, high = high, min(MAX_SIZE, high * 2)
    while low < high:
        middle = (low + high) // 2
        if chain.traffic(middle).saved_share >= share:
            high = middle
        else:
            low = middle + 1
    return high


def verdict(traffic: Traffic, pays: int | None, share: float = 0.1) -> str:
    """One sentence: whether fusing is worth it at this batch, and why."""
    percent, weight = 100 * traffic.saved_share, 100 * traffic.weight_share
    if traffic.saved == 0:
        return "nothing to fuse: the chain has no intermediate"
    head = f"fusing saves {percent:.3g}% of the traffic at batch {traffic.batch}"
    if traffic.saved_share >= share:
        return head
    if traffic.weight_share >= 0.5:
        where = f"; it reaches {100 * share:.3g}% at batch {pays}" if pays is not None else ""
        return f"{head}: weights dominate ({weight:.3g}% of it), so it saves little{where}"
    where = (
        f"; it reaches {100 * share:.3g}% at batch {pays}" if pays is not None else "; no batch reaches more"
    )
    return f"{head}: inputs and outputs dominate{where}"


def sweep(chain: Chain, batches: Sequence[int]) -> list[Traffic]:
    """The traffic at each batch."""
    if not batches:
        raise ArgumentError("batch", "none", "at least one batch")
    return [chain.traffic(b) for b in batches]
