"""Small model files for tests: a GGUF writer that can also write wrong files, and tiny Llama-family models."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

F32, F16, Q4_0, Q4_1, Q8_0, BF16 = 0, 1, 2, 3, 8, 30
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


@dataclass
class Typed:
    """A metadata value with its GGUF type; ``item`` is that of an array's items."""

    kind: int
    value: Any
    item: int = 0


def u32(value: int) -> Typed:
    return Typed(4, value)


def f32(value: float) -> Typed:
    return Typed(6, value)


def text(value: str) -> Typed:
    return Typed(8, value)


def flag(value: bool) -> Typed:
    return Typed(7, value)


def array(item: int, values: list) -> Typed:
    return Typed(9, values, item)


@dataclass
class Stored:
    """A tensor as it goes into the file: ``shape`` as torch has it, ``data`` its bytes."""

    kind: int
    shape: tuple[int, ...]
    data: bytes


def string(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def packed(value: Typed) -> bytes:
    if value.kind == 8:
        return string(value.value)
    if value.kind == 9:
        items = [
            string(v) if value.item == 8 else struct.pack("<" + CODES[value.item], v) for v in value.value
        ]
        return struct.pack("<IQ", value.item, len(items)) + b"".join(items)
    return struct.pack("<" + CODES[value.kind], value.value)


@dataclass
class GGUF:
    """Parts of a GGUF file; :meth:`bytes` puts them together."""

    metadata: dict[str, Typed] = field(default_factory=dict)
    tensors: dict[str, Stored] = field(default_factory=dict)
    version: int = 3
    alignment: int = 32

    def header(self) -> bytes:
        out = b"GGUF" + struct.pack("<IQQ", self.version, len(self.tensors), len(self.metadata))
        for key, value in self.metadata.items():
            out += string(key) + struct.pack("<I", value.kind) + packed(value)
        offset = 0
        for name, t in self.tensors.items():
            out += (
                string(name)
                + struct.pack("<I", len(t.shape))
                + struct.pack(f"<{len(t.shape)}Q", *reversed(t.shape))
            )
            out += struct.pack("<IQ", t.kind, offset)
            offset += -(-len(t.data) // self.alignment) * self.alignment
        return out

    def bytes(self) -> bytes:
        header = self.header()
        out = header + b"\0" * (-len(header) % self.alignment)
        body = b""
        for t in self.tensors.values():
            body += b"\0" * (-len(body) % self.alignment) + t.data
        return out + body

    def write(self, path: Path) -> Path:
        path.write_bytes(self.bytes())
        return path


def quantized(kind: int, values: torch.Tensor) -> bytes:
    """Blocks of 32 values (a plain encoder of the tests' own, round to nearest)."""
    import numpy as np

    blocks = values.float().reshape(-1, 32).numpy()
    out = bytearray()
    for block in blocks:
        if kind == Q8_0:
            d = np.float16(np.abs(block).max() / 127 or 1.0)
            q = np.clip(np.round(block / np.float32(d)), -127, 127).astype(np.int8)
            out += d.tobytes() + q.tobytes()
            continue
        low = block.min() if kind == Q4_1 else 0.0
        d = np.float16(((block.max() - low) / 15 if kind == Q4_1 else np.abs(block).max() / 7) or 1.0)
        q = np.clip(np.round((block - low) / np.float32(d)) + (8 if kind == Q4_0 else 0), 0, 15).astype(
            np.uint8
        )
        out += (
            d.tobytes()
            + (np.float16(low).tobytes() if kind == Q4_1 else b"")
            + (q[:16] | q[16:] << 4).tobytes()
        )
    return bytes(out)


def stored(kind: int, values: torch.Tensor) -> Stored:
    dtypes = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}
    if kind in dtypes:
        raw = values.to(dtypes[kind]).contiguous().view(torch.uint8).numpy().tobytes()
    else:
        raw = quantized(kind, values)
    return Stored(kind, tuple(values.shape), raw)


@dataclass(frozen=True)
class Tiny:
    """Sizes of a tiny model."""

    layers: int = 2
    hidden: int = 64
    inner: int = 96
    q_heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 272
    biased: bool = False
    tied: bool = True


def random_weights(tiny: Tiny, seed: int = 0) -> dict[str, torch.Tensor]:
    """Hugging Face names to float32 tensors, scaled so that activations stay near one."""
    rng = torch.Generator().manual_seed(seed)

    def matrix(rows: int, cols: int) -> torch.Tensor:
        return torch.randn(rows, cols, generator=rng) / cols**0.5

    q, kv = tiny.q_heads * tiny.head_dim, tiny.kv_heads * tiny.head_dim
    out = {
        "model.embed_tokens.weight": torch.randn(tiny.vocab, tiny.hidden, generator=rng),
        "model.norm.weight": 1 + 0.1 * torch.randn(tiny.hidden, generator=rng),
    }
    if not tiny.tied:
        out["lm_head.weight"] = matrix(tiny.vocab, tiny.hidden)
    for i in range(tiny.layers):
        p = f"model.layers.{i}."
        for name, rows, cols in (
            ("self_attn.q_proj", q, tiny.hidden),
            ("self_attn.k_proj", kv, tiny.hidden),
            ("self_attn.v_proj", kv, tiny.hidden),
            ("self_attn.o_proj", tiny.hidden, q),
            ("mlp.gate_proj", tiny.inner, tiny.hidden),
            ("mlp.up_proj", tiny.inner, tiny.hidden),
            ("mlp.down_proj", tiny.hidden, tiny.inner),
        ):
            out[f"{p}{name}.weight"] = matrix(rows, cols)
            if tiny.biased and name.endswith(("q_proj", "k_proj", "v_proj")):
                out[f"{p}{name}.bias"] = torch.randn(rows, generator=rng)
        for name in ("input_layernorm", "post_attention_layernorm"):
            out[f"{p}{name}.weight"] = 1 + 0.1 * torch.randn(tiny.hidden, generator=rng)
    return out


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    base, kind = name.rsplit(".", 1)
    if base.startswith("model.layers."):
        _, _, layer, rest = base.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[base]}.{kind}"


def permuted(w: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of each head from halves to interleaved pairs, as converters to GGUF's "llama" do."""
    return w.view(heads, 2, len(w) // heads // 2, -1).transpose(1, 2).reshape(w.shape)


def byte_tokens(vocab: int) -> list[str]:
    """A byte-level vocabulary: the 256 bytes in GPT-2's letters, some merges, then control tokens."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {b: chr(b) for b in printable}
    for n, b in enumerate(b for b in range(256) if b not in letters):
        letters[b] = chr(256 + n)
    tokens = [letters[b] for b in range(256)] + ["he", "ll", "Ġt", "hell"]
    return tokens + [f"<|c{i}|>" for i in range(vocab - len(tokens))]


def tiny_gguf(tiny: Tiny = Tiny(), kind: int = F32, arch: str = "llama", seed: int = 0) -> GGUF:
    """A whole model: matrices of ``kind``, norms in float32, a byte-level tokenizer."""
    tokens = byte_tokens(tiny.vocab)
    controls = [3 if t.startswith("<|") else 1 for t in tokens]
    meta = {
        "general.architecture": text(arch),
        f"{arch}.block_count": u32(tiny.layers),
        f"{arch}.context_length": u32(256),
        f"{arch}.embedding_length": u32(tiny.hidden),
        f"{arch}.feed_forward_length": u32(tiny.inner),
        f"{arch}.attention.head_count": u32(tiny.q_heads),
        f"{arch}.attention.head_count_kv": u32(tiny.kv_heads),
        f"{arch}.attention.layer_norm_rms_epsilon": f32(1e-5),
        f"{arch}.rope.freq_base": f32(10000.0),
        "tokenizer.ggml.model": text("gpt2"),
        "tokenizer.ggml.pre": text("smollm"),
        "tokenizer.ggml.tokens": array(8, tokens),
        "tokenizer.ggml.token_type": array(5, controls),
        "tokenizer.ggml.merges": array(8, ["h e", "l l", "Ġ t", "he ll"]),
        "tokenizer.ggml.eos_token_id": u32(tiny.vocab - 1),
        "tokenizer.ggml.add_bos_token": flag(False),
    }
    file = GGUF(meta)
    for name, w in random_weights(tiny, seed).items():
        if arch == "llama" and "q_proj" in name:
            w = permuted(w, tiny.q_heads)
        if arch == "llama" and "k_proj" in name:
            w = permuted(w, tiny.kv_heads)
        file.tensors[gguf_name(name)] = stored(kind if w.dim() == 2 else F32, w)
    return file


def hf_config(tiny: Tiny, **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": tiny.hidden,
        "intermediate_size": tiny.inner,
        "num_hidden_layers": tiny.layers,
        "num_attention_heads": tiny.q_heads,
        "num_key_value_heads": tiny.kv_heads,
        "head_dim": tiny.head_dim,
        "vocab_size": tiny.vocab,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tiny.tied,
        "eos_token_id": tiny.vocab - 1,
    }
    return config | changes


def hf_folder(folder: Path, tiny: Tiny = Tiny(), seed: int = 0, **changes: Any) -> Path:
    """A Hugging Face model folder with ``config.json`` and ``model.safetensors``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config(tiny, **changes)))
    save_file(random_weights(tiny, seed), folder / "model.safetensors")
    return folder
