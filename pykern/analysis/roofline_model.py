"""Prefill and decode of a whole decoder model under a roof: every op's floor, the step's, and tokens per second.

The ops are those of a fused implementation: residual adds inside the norms, one product for Q, K and V, gate and up
in one with SiLU x gate in its epilogue, RoPE with the cache append. Two floors: ``floor`` adds the ops one after
another, each at its own roof, activations moved to and from memory; ``hard_floor`` is the longer of all arithmetic
and of weights and cache alone, what one perfect kernel for the whole step would take.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykern.analysis.models_zoo import ModelConfig
from pykern.analysis.roofline import Placed, Work, place
from pykern.analysis.roofline_gpus import Roof
from pykern.analysis.traffic import dtype_bytes, size_in_bytes
from pykern.errors import require

PHASES = ("decode", "prefill")
_MAX = 2**31


@dataclass(frozen=True)
class Precision:
    """dtypes of activations, weight matrices and the KV cache; ``group``: int4 weights that share a 2-byte scale.

    Embedding and head keep ``dtype`` unless ``head`` says otherwise, as GPTQ and AWQ checkpoints do.
    """

    dtype: str = "bf16"
    weights: str = ""
    kv: str = ""
    head: str = ""
    group: int = 128

    def __post_init__(self) -> None:
        for name in ("weights", "kv", "head"):
            if not getattr(self, name):
                object.__setattr__(self, name, self.dtype)
            dtype_bytes(getattr(self, name), name)
        dtype_bytes(self.dtype)
        require(
            0 <= self.group < _MAX, "group", self.group, "0 (no scales) or the weights that share a scale"
        )

    def weight_bytes(self, elements: int, dtype: str = "") -> int:
        dtype = dtype or self.weights
        scales = -(-elements // self.group) * 2 if self.group and dtype == "int4" else 0
        return size_in_bytes(elements, dtype) + scales


@dataclass(frozen=True)
class Step:
    """One forward pass. ``weight_bytes`` and ``kv_bytes`` are what it must read whatever the fusion."""

    model: ModelConfig
    phase: str
    batch: int
    context: int
    precision: Precision
    ops: tuple[Placed, ...]
    weight_bytes: int
    kv_bytes: int
    roof: Roof
    launch_us: float

    @property
    def kernels(self) -> int:
        return sum(p.work.count for p in self.ops)

    @property
    def floor_us(self) -> float:
        """Every op at its own roof, one after another, plus the launch time of each."""
        return sum(p.floor_us * p.work.count for p in self.ops) + self.kernels * self.launch_us

    @property
    def hard_floor_us(self) -> float:
        flops = sum(p.work.flops * p.work.count for p in self.ops)
        memory = (self.weight_bytes + self.kv_bytes) / self.roof.gbps / 1e3
        return max(memory, flops / self.roof.tflops / 1e6 if self.roof.tflops else 0.0)

    @property
    def tokens(self) -> int:
        """Tokens the step is about: one a sequence in decode, the prompt in prefill."""
        return self.batch * (1 if self.phase == "decode" else self.context)

    def to_json(self) -> dict[str, Any]:
        ops = []
        for p in self.ops:
            total = p.floor_us * p.work.count
            share = total / (self.floor_us - self.kernels * self.launch_us)
            ops.append({**p.to_json(), "count": p.work.count, "total_us": total, "share": share})
        return {
            "model": self.model.name, "phase": self.phase, "batch": self.batch, "context": self.context,
            "dtype": self.precision.dtype, "weights": self.precision.weights, "kv": self.precision.kv,
            "weight_bytes": self.weight_bytes, "kv_bytes": self.kv_bytes, "kernels": self.kernels,
            "launch_us": self.launch_us, "floor_us": self.floor_us, "tokens_per_s": self.tokens / self.floor_us * 1e6,
            "hard_floor_us": self.hard_floor_us, "hard_tokens_per_s": self.tokens / self.hard_floor_us * 1e6,
            "ops": ops,
        }  # fmt: skip


def experts_touched(experts: int, active: int, tokens: int) -> float:
    """Expected number of distinct experts that ``tokens`` tokens choose, were each choice of ``active`` uniform."""
    return experts * (1 - (1 - active / experts) ** tokens) if experts else 0.0


def attended_keys(model: ModelConfig, phase: str, context: int) -> int:
    """Query-key pairs of one sequence, a head: ``context`` in decode, the causal triangle in prefill."""
    window = model.window or context
    if phase == "decode":
        return min(context, window)
    full = min(context, window)
    return full * (full + 1) // 2 + (context - full) * full


def step(model: ModelConfig, roof: Roof, *, batch: int, context: int, phase: str = "decode",
         precision: Precision | None = None, launch_us: float = 0.0) -> Step:  # fmt: skip
    """One pass of ``batch`` sequences: a token each at ``context`` (decode), or their whole prompt (prefill)."""
    for name, value in (("batch", batch), ("context", context)):
        require(type(value) is int and 1 <= value < _MAX, name, repr(value), f"1 to {_MAX - 1}")
    require(phase in PHASES, "phase", repr(phase), " or ".join(PHASES))
    p = precision or Precision()
    m, tokens = model, batch * (1 if phase == "decode" else context)
    h, q, kv, inter, layers = m.hidden, m.q_size, m.kv_size, m.intermediate, m.layers

    def act(elements: int) -> int:
        return size_in_bytes(elements, p.dtype)

    keys = min(context, m.window or context) if phase == "decode" else context
    cache = batch * size_in_bytes(keys * 2 * kv, p.kv)
    qkv_out = q + 2 * kv
    qkv_weights = p.weight_bytes(qkv_out * h) + (act(qkv_out) if m.qkv_bias else 0)
    touched = experts_touched(m.experts, m.active_experts, tokens) if m.experts else 1.0
    per_token = m.active_experts if m.experts else 1
    gate_up, down = (round(touched * p.weight_bytes(n * h * inter)) for n in (2, 1))
    head = p.weight_bytes(m.vocab * h, p.head)
    norm = act(h) + (act(2 * m.head_dim) if m.qk_norm else 0)
    works = [
        Work("embedding", 0, act(tokens * h) + size_in_bytes(tokens * h, p.head)),
        Work("rms_norm", 4 * tokens * h, act(2 * tokens * h) + act(h)),
        Work("qkv", 2 * tokens * h * qkv_out, act(tokens * (h + qkv_out)) + qkv_weights, count=layers),
        Work("rope_append_kv", 3 * tokens * (q + kv), act(tokens * (qkv_out + q)) + size_in_bytes(2 * tokens * kv, p.kv)
             + norm - act(h), count=layers),
        Work("attention", 4 * batch * m.heads * m.head_dim * attended_keys(m, phase, context),
             act(2 * tokens * q) + cache, count=layers),
        Work("out_proj", 2 * tokens * q * h, act(tokens * (q + h)) + p.weight_bytes(q * h), count=layers),
        Work("add_rms_norm", 5 * tokens * h, act(4 * tokens * h) + act(h), count=2 * layers),
    ]  # fmt: skip
    if m.experts:
        works.append(Work("route", 2 * tokens * h * m.experts, act(tokens * (h + m.experts)) + act(h * m.experts),
                          count=layers))  # fmt: skip
    works += [
        Work("gate_up_silu", (4 * h + 6) * tokens * per_token * inter, act(tokens * (h + per_token * inter)) + gate_up,
             count=layers),
        Work("down", 2 * tokens * per_token * inter * h, act(tokens * (per_token * inter + h)) + down, count=layers),
        Work("lm_head", 2 * batch * h * m.vocab, act(batch * (h + m.vocab)) + head),
        Work("sample", batch * m.vocab, act(batch * m.vocab)),
    ]  # fmt: skip
    router = act(h * m.experts)
    weights = (
        layers * (qkv_weights + p.weight_bytes(q * h) + gate_up + down + router + norm + act(h))
        + act(h)
        + head
    )
    return Step(
        m, phase, batch, context, p, tuple(place(works, roof)), weights, layers * cache, roof, launch_us
    )


def memory_bytes(model: ModelConfig, precision: Precision, batch: int, context: int) -> int:
    """Bytes that weights and the KV cache take in GPU memory."""
    head = precision.weight_bytes(model.vocab * model.hidden, precision.head) * (1 if model.tied else 2)
    rest = model.parameters - model.vocab * model.hidden * (1 if model.tied else 2)
    keys = min(context, model.window or context)
    return (
        precision.weight_bytes(rest)
        + head
        + model.layers * batch * size_in_bytes(2 * keys * model.kv_size, precision.kv)
    )
