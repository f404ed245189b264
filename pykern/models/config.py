"""What a Llama-family model is made of, as one flat value, from a GGUF file or a Hugging Face ``config.json``.

What pykern does not compute is refused by name here, before any weight is read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pykern.errors import ModelError
from pykern.models.gguf import GGUFFile

# Decoder blocks with the same arithmetic: pre-norm RMSNorm, grouped-query attention with RoPE, SwiGLU.
# GGUF "llama" holds Q and K rows permuted for interleaved RoPE; loaders put them back (see weights.py).
GGUF_ARCHITECTURES = ("llama", "qwen2")
HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM")
# Far above any model there is; a count past it is a damaged file, not a model.
MAX_SIZE = 1 << 24


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's scaling: wavelengths over ``original / low`` are stretched by ``factor``, those under
    ``original / high`` are kept, and between the two the change is smooth. ``low = high = 0``: all are stretched
    (linear scaling, "position interpolation")."""

    factor: float
    low: float = 0.0
    high: float = 0.0
    original: int = 0


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes in elements. ``q_heads`` is a multiple of ``kv_heads``; ``rope_base`` is theta in theta^(-2i/head_dim)."""

    layers: int
    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    context: int
    norm_eps: float
    rope_base: float
    rope_scaling: RopeScaling | None = None
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    stop_ids: tuple[int, ...] = ()

    @property
    def q_size(self) -> int:
        return self.q_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    def check(self, where: str) -> LlamaConfig:
        """This config, or a ModelError that names the value no Llama-family model can have."""
        sizes = ("layers", "hidden", "intermediate", "q_heads", "kv_heads", "head_dim", "vocab", "context")
        for name in sizes:
            value = getattr(self, name)
            if not 1 <= value <= MAX_SIZE:
                raise ModelError(f"{where}: {name}: got {value}, allowed: 1..{MAX_SIZE}")
        if self.q_heads % self.kv_heads:
            raise ModelError(
                f"{where}: {self.q_heads} query heads is no multiple of {self.kv_heads} key/value heads"
            )
        if self.head_dim % 2:
            raise ModelError(f"{where}: head_dim: got {self.head_dim}, allowed: an even number")
        if not 0.0 < self.norm_eps < 1.0:
            raise ModelError(f"{where}: RMSNorm epsilon: got {self.norm_eps}, allowed: above 0, below 1")
        if not (math.isfinite(self.rope_base) and self.rope_base > 1.0):
            raise ModelError(f"{where}: RoPE base: got {self.rope_base}, allowed: a finite number above 1")
        for token in self.stop_ids:
            if not 0 <= token < self.vocab:
                raise ModelError(f"{where}: end-of-text id: got {token}, allowed: 0..{self.vocab - 1}")
        return self


def config_from_gguf(file: GGUFFile) -> LlamaConfig:
    """The config a GGUF file states in its metadata."""
    where = file.path.name
    arch = file.get("general.architecture", str)
    if arch not in GGUF_ARCHITECTURES:
        raise ModelError(f"{where}: architecture: got {arch!r}, allowed: {', '.join(GGUF_ARCHITECTURES)}")
    if file.get(f"{arch}.expert_count", int, 0):
        raise ModelError(f"{where}: mixture of experts ({arch}.expert_count) is not supported")
    if file.get(f"{arch}.attention.sliding_window", int, 0):
        raise ModelError(
            f"{where}: sliding-window attention ({arch}.attention.sliding_window) is not supported"
        )
    heads = file.get(f"{arch}.attention.head_count", int)
    hidden = file.get(f"{arch}.embedding_length", int)
    if heads < 1 or (hidden % heads and f"{arch}.attention.key_length" not in file.metadata):
        raise ModelError(f"{where}: {arch}.attention.head_count: got {heads}, allowed: a divisor of {hidden}")
    head_dim = file.get(f"{arch}.attention.key_length", int, hidden // heads)
    if file.get(f"{arch}.attention.value_length", int, head_dim) != head_dim:
        raise ModelError(f"{where}: keys and values of different head sizes are not supported")
    rotated = file.get(f"{arch}.rope.dimension_count", int, head_dim)
    if rotated != head_dim:
        raise ModelError(f"{where}: partial RoPE ({rotated} of {head_dim} dimensions) is not supported")
    vocab = file.tensors["token_embd.weight"].shape[0] if "token_embd.weight" in file.tensors else 0
    stop = [file.get(f"tokenizer.ggml.{k}_token_id", int, None) for k in ("eos", "eot", "eom")]
    return LlamaConfig(
        layers=file.get(f"{arch}.block_count", int),
        hidden=hidden,
        intermediate=file.get(f"{arch}.feed_forward_length", int),
        q_heads=heads,
        kv_heads=file.get(f"{arch}.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        vocab=vocab,
        context=file.get(f"{arch}.context_length", int),
        norm_eps=file.get(f"{arch}.attention.layer_norm_rms_epsilon", float),
        rope_base=file.get(f"{arch}.rope.freq_base", float, 10000.0),
        rope_scaling=_gguf_scaling(file, arch),
        tied_head="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        out_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in file.tensors,
        stop_ids=tuple(dict.fromkeys(t for t in stop if t is not None)),
    ).check(where)


def _gguf_scaling(file: GGUFFile, arch: str) -> RopeScaling | None:
    """Linear scaling; Llama 3's is stored by GGUF as a tensor of divisors instead (``rope_freqs.weight``)."""
    kind = file.get(f"{arch}.rope.scaling.type", str, "none")
    factor = file.get(f"{arch}.rope.scaling.factor", float, file.get(f"{arch}.rope.scale_linear", float, 1.0))
    if kind not in ("none", "linear"):
        raise ModelError(f"{file.path.name}: {arch}.rope.scaling.type: got {kind!r}, allowed: none, linear")
    if not (math.isfinite(factor) and factor > 0):
        raise ModelError(
            f"{file.path.name}: {arch}.rope.scaling.factor: got {factor}, allowed: a number above 0"
        )
    return RopeScaling(factor) if factor != 1.0 and kind == "linear" else None


def config_from_hf(config: Mapping[str, Any], generation: Mapping[str, Any], where: str) -> LlamaConfig:
    """The config of a ``config.json`` (``generation``: that of ``generation_config.json``, may be empty)."""

    def get(key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        value = config.get(key)
        if value is None:
            if default is ...:
                raise ModelError(f"{where}: no {key!r}")
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            kinds = kind if isinstance(kind, tuple) else (kind,)
            allowed = " or ".join({int: "a whole number", float: "a number", str: "a string", bool: "true or false",
                                   list: "a list", dict: "an object"}[k] for k in kinds)  # fmt: skip
            raise ModelError(f"{where}: {key}: got {value!r} ({type(value).__name__}), allowed: {allowed}")
        return value

    archs = get("architectures", list)
    if len(archs) != 1 or archs[0] not in HF_ARCHITECTURES:
        raise ModelError(
            f"{where}: architectures: got {archs}, allowed: one of {', '.join(HF_ARCHITECTURES)}"
        )
    qwen = archs[0] == "Qwen2ForCausalLM"
    act = get("hidden_act", str, "silu")
    if act != "silu":
        raise ModelError(f"{where}: hidden_act: got {act!r}, allowed: silu")
    if config.get("quantization_config"):
        method = get("quantization_config", dict).get("quant_method", "unnamed")
        raise ModelError(
            f"{where}: quantization_config ({method}) is not supported for safetensors; use a GGUF file"
        )
    if config.get("sliding_window") and config.get("use_sliding_window", not qwen):
        raise ModelError(f"{where}: sliding_window: got {config['sliding_window']}, allowed: null")
    if config.get("partial_rotary_factor", 1.0) != 1.0:
        raise ModelError(
            f"{where}: partial_rotary_factor: got {config['partial_rotary_factor']}, allowed: 1.0"
        )
    heads, hidden = get("num_attention_heads", int), get("hidden_size", int)
    if heads < 1 or (hidden % heads and config.get("head_dim") is None):
        raise ModelError(f"{where}: num_attention_heads: got {heads}, allowed: a divisor of {hidden}")
    rope = get("rope_parameters", dict, {}) or get("rope_scaling", dict, {})  # transformers 5 and before
    stop = generation.get("eos_token_id", config.get("eos_token_id"))
    stop = [] if stop is None else stop if isinstance(stop, list) else [stop]
    if not all(isinstance(t, int) and not isinstance(t, bool) for t in stop):
        raise ModelError(f"{where}: eos_token_id: got {stop}, allowed: a whole number or a list of them")
    base = rope.get("rope_theta", config.get("rope_theta", 10000.0))
    if not isinstance(base, (int, float)) or isinstance(base, bool):
        raise ModelError(f"{where}: rope_theta: got {base!r}, allowed: a number")
    return LlamaConfig(
        layers=get("num_hidden_layers", int),
        hidden=hidden,
        intermediate=get("intermediate_size", int),
        q_heads=heads,
        kv_heads=get("num_key_value_heads", int, heads),
        head_dim=get("head_dim", int, hidden // heads),
        vocab=get("vocab_size", int),
        context=get("max_position_embeddings", int, 2048),
        norm_eps=float(get("rms_norm_eps", (float, int), 1e-6)),
        rope_base=float(base),
        rope_scaling=_hf_scaling(rope, where),
        tied_head=get("tie_word_embeddings", bool, False),
        qkv_bias=qwen or get("attention_bias", bool, False),
        out_bias=not qwen and get("attention_bias", bool, False),
        mlp_bias=get("mlp_bias", bool, False),
        stop_ids=tuple(stop),
    ).check(where)


def _hf_scaling(rope: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    keys = {
        "default": (),
        "linear": ("factor",),
        "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    }
    if not isinstance(kind, str) or kind not in keys:
        raise ModelError(f"{where}: RoPE scaling: got {kind!r}, allowed: {', '.join(keys)}")
    values: list[Any] = [rope.get(key) for key in keys[kind]]
    for key, value in zip(keys[kind], values, strict=True):
        if (
            not isinstance(value, (int, float))
            or isinstance(value, bool)
            or not math.isfinite(value)
            or value <= 0
        ):
            raise ModelError(f"{where}: RoPE scaling: {key}: got {value!r}, allowed: a number above 0")
    if kind == "llama3" and values[1] >= values[2]:
        raise ModelError(
            f"{where}: low_freq_factor: got {values[1]}, allowed: below high_freq_factor {values[2]}"
        )
    return RopeScaling(*values) if kind != "default" else None
