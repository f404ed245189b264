"""Sizes of well-known decoder models, from their published ``config.json``, and any other such file.

All of one shape: pre-norm RMSNorm, grouped-query attention with RoPE, a gated MLP (or experts of it). The published
parameter counts that the tests hold these against are exact.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pykern.analysis._files import read_text
from pykern.errors import ArgumentError, ModelError, require

_MAX = 2**31


@dataclass(frozen=True)
class ModelConfig:
    """Sizes in elements. ``experts`` > 0: a mixture of experts with ``active_experts`` a token.

    ``window``: keys a query sees at most (0: all). ``qk_norm``: an RMS norm over each query and key head.
    """

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    experts: int = 0
    active_experts: int = 0
    window: int = 0

    def __post_init__(self) -> None:
        for key in ("layers", "hidden", "intermediate", "heads", "kv_heads", "head_dim", "vocab"):
            value = getattr(self, key)
            if type(value) is not int or not 1 <= value < _MAX:
                raise ModelError(f"{self.name}: {key}: got {value!r}, allowed: a whole number from 1")
        if self.heads % self.kv_heads:
            raise ModelError(
                f"{self.name}: {self.heads} heads are no multiple of {self.kv_heads} key/value heads"
            )
        if not (
            0 <= self.active_experts <= self.experts and (self.experts == 0) == (self.active_experts == 0)
        ):
            raise ModelError(f"{self.name}: experts: got {self.active_experts} of {self.experts} active")

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def qkv_weights(self) -> int:
        """Weights (with biases) of one layer's query, key and value projections."""
        out = self.q_size + 2 * self.kv_size
        return out * self.hidden + (out if self.qkv_bias else 0)

    @property
    def parameters(self) -> int:
        """Every parameter, the embedding once where the head is tied to it."""
        experts = max(1, self.experts)
        mlp = experts * 3 * self.hidden * self.intermediate + (self.experts * self.hidden)
        norms = 2 * self.hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer = self.qkv_weights + self.hidden * self.q_size + mlp + norms
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "parameters": self.parameters}


_ZOO = (
    ModelConfig("llama-3-8b", 32, 4096, 14336, 32, 8, 128, 128256),
    ModelConfig("llama-3-70b", 80, 8192, 28672, 64, 8, 128, 128256),
    ModelConfig("llama-3.2-1b", 16, 2048, 8192, 32, 8, 64, 128256, tied=True),
    ModelConfig("llama-3.2-3b", 28, 3072, 8192, 24, 8, 128, 128256, tied=True),
    ModelConfig("llama-2-7b", 32, 4096, 11008, 32, 32, 128, 32000),
    ModelConfig("smollm2-135m", 30, 576, 1536, 9, 3, 64, 49152, tied=True),
    ModelConfig("smollm2-360m", 32, 960, 2560, 15, 5, 64, 49152, tied=True),
    ModelConfig("smollm2-1.7b", 24, 2048, 8192, 32, 32, 64, 49152, tied=True),
    ModelConfig("mistral-7b-v0.3", 32, 4096, 14336, 32, 8, 128, 32768),
    ModelConfig("mixtral-8x7b", 32, 4096, 14336, 32, 8, 128, 32000, experts=8, active_experts=2),
    ModelConfig("qwen2.5-0.5b", 24, 896, 4864, 14, 2, 64, 151936, tied=True, qkv_bias=True),
    ModelConfig("qwen2.5-7b", 28, 3584, 18944, 28, 4, 128, 152064, qkv_bias=True),
    ModelConfig("qwen3-8b", 36, 4096, 12288, 32, 8, 128, 151936, qk_norm=True),
)
MODELS = {m.name: m for m in _ZOO}
_ALIASES = {"llama8b": "llama-3-8b", "llama38b": "llama-3-8b", "llama318b": "llama-3-8b", "llama70b": "llama-3-70b",
            "llama3170b": "llama-3-70b", "llama1b": "llama-3.2-1b", "llama3b": "llama-3.2-3b", "llama7b": "llama-2-7b",
            "mistral7b": "mistral-7b-v0.3", "smollm2": "smollm2-135m", "mixtral": "mixtral-8x7b"}  # fmt: skip


def find_model(name: str) -> ModelConfig:
    """A model by name (punctuation and case aside), or the path of a Hugging Face ``config.json`` or its folder."""
    require(isinstance(name, str) and name.strip() != "", "model", repr(name), ", ".join(MODELS))
    key = re.sub(r"[^a-z0-9]", "", name.lower())
    by_key = {re.sub(r"[^a-z0-9]", "", n): m for n, m in MODELS.items()}
    if key in by_key:
        return by_key[key]
    if key in _ALIASES:
        return MODELS[_ALIASES[key]]
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or "/" in name:
        return read_config(path)
    raise ArgumentError("model", repr(name), f"{', '.join(MODELS)}, or a config.json")


def read_config(path: Path) -> ModelConfig:
    """From a Hugging Face ``config.json``. Raises :class:`ModelError` for a file that is none, or an unknown family."""
    try:
        config = json.loads(read_text(str(path)))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path}: not JSON ({error})") from None
    if not isinstance(config, dict):
        raise ModelError(f"{path}: not a model's config (no JSON object)")
    if isinstance(config.get("text_config"), dict):
        config = config["text_config"]
    return from_config(config, path.parent.name or str(path))


def from_config(config: dict[str, Any], name: str) -> ModelConfig:
    """From the fields of a ``config.json`` of the Llama, Mistral, Mixtral or Qwen families."""

    def number(key: str, default: int | None = None) -> int:
        value = config.get(key)
        if value is None:
            if default is None:
                raise ModelError(
                    f"{name}: no {key!r}: not a config of the Llama, Mistral, Mixtral or Qwen families"
                )
            return default
        if type(value) is not int or not 0 <= value < _MAX:
            raise ModelError(f"{name}: {key}: got {value!r}, allowed: a whole number")
        return value

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    kind = str(config.get("model_type", ""))
    if config.get("head_dim") is None and (heads == 0 or hidden % heads):
        raise ModelError(
            f"{name}: num_attention_heads: got {heads}, allowed: a divisor of hidden_size {hidden}"
        )
    experts = number("num_local_experts", number("num_experts", 0))
    inter = number("moe_intermediate_size", 0) if experts else 0
    return ModelConfig(
        name=name,
        layers=number("num_hidden_layers"),
        hidden=hidden,
        intermediate=inter or number("intermediate_size"),
        heads=heads,
        kv_heads=number("num_key_value_heads", heads),
        head_dim=number("head_dim", hidden // heads if heads else 0),
        vocab=number("vocab_size"),
        tied=bool(config.get("tie_word_embeddings", False)),
        qkv_bias=bool(config.get("attention_bias", kind.startswith("qwen2"))),
        qk_norm=kind.startswith("qwen3"),
        experts=experts,
        active_experts=number("num_experts_per_tok", 0) if experts else 0,
        window=number("sliding_window", 0) if config.get("use_sliding_window", True) else 0,
    )
