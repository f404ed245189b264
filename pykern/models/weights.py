"""Weights of a Llama-family model, from GGUF or safetensors, checked against the config and laid out for the ops.

Names here are pykern's own: ``embed``, ``norm``, ``head``, and per layer ``0.attn_norm``, ``0.q``, ``0.k``, ``0.v``,
``0.o``, ``0.mlp_norm``, ``0.gate``, ``0.up``, ``0.down`` (with ``.bias`` where the model has one). Q, K and V, and
gate and up, are then joined along their rows: one GEMM each.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from pykern.errors import ModelError
from pykern.models.config import LlamaConfig, config_from_gguf, config_from_hf
from pykern.models.gguf import BlockType, GGUFFile
from pykern.models.sniff import GGUF, SAFETENSORS, kind_of

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True)
class Blocks:
    """A matrix in GGUF blocks as the file has it: ``data`` uint8 ``[rows, bytes of a row]``, ``shape`` in values."""

    type: BlockType
    data: torch.Tensor
    shape: tuple[int, int]

    @property
    def planes(self) -> dict[str, torch.Tensor]:
        """The packed data as the quantised ops take it: for GGUF, the file's own bytes."""
        return {"blocks": self.data}

    @property
    def layout(self) -> str:
        return self.type.name.lower()


Matrix = torch.Tensor | Blocks


@dataclass
class Layer:
    """One decoder block. ``qkv`` [q_size + 2 kv_size, hidden], ``o`` [hidden, q_size], ``gate_up``
    [2 intermediate, hidden], ``down`` [hidden, intermediate]."""

    attn_norm: torch.Tensor
    qkv: Any
    o: Any
    mlp_norm: torch.Tensor
    gate_up: Any
    down: Any
    qkv_bias: torch.Tensor | None = None
    o_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None


@dataclass
class Weights:
    """All weights. ``embed`` and ``head`` [vocab, hidden] are one object when the model ties them;
    ``rope_factors`` [head_dim / 2] divide RoPE's frequencies (GGUF's form of Llama 3's scaling)."""

    embed: Any
    norm: torch.Tensor
    head: Any
    layers: list[Layer] = field(default_factory=list)
    rope_factors: torch.Tensor | None = None


# --- Names -------------------------------------------------------------------------------------------------

_TOP = {
    "embed": ("token_embd", "model.embed_tokens"),
    "norm": ("output_norm", "model.norm"),
    "head": ("output", "lm_head"),
}
_LAYER = {
    "attn_norm": ("attn_norm", "input_layernorm"),
    "q": ("attn_q", "self_attn.q_proj"),
    "k": ("attn_k", "self_attn.k_proj"),
    "v": ("attn_v", "self_attn.v_proj"),
    "o": ("attn_output", "self_attn.o_proj"),
    "mlp_norm": ("ffn_norm", "post_attention_layernorm"),
    "gate": ("ffn_gate", "mlp.gate_proj"),
    "up": ("ffn_up", "mlp.up_proj"),
    "down": ("ffn_down", "mlp.down_proj"),
}
# Tensors that change nothing we compute: buffers that older exporters saved.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rope_freqs.weight")


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of the model by pykern's name."""
    h, q, kv, inner = config.hidden, config.q_size, config.kv_size, config.intermediate
    shapes: dict[str, tuple[int, ...]] = {"embed": (config.vocab, h), "norm": (h,)}
    if not config.tied_head:
        shapes["head"] = (config.vocab, h)
    block = {
        "attn_norm": (h,), "q": (q, h), "k": (kv, h), "v": (kv, h), "o": (h, q),
        "mlp_norm": (h,), "gate": (inner, h), "up": (inner, h), "down": (h, inner),
    }  # fmt: skip
    for i in range(config.layers):
        shapes |= {f"{i}.{name}": shape for name, shape in block.items()}
        biased = ("q", "k", "v") * config.qkv_bias + ("o",) * config.out_bias
        biased += ("gate", "up", "down") * config.mlp_bias
        shapes |= {f"{i}.{name}.bias": block[name][:1] for name in biased}
    return shapes


def stored_name(name: str, hf: bool) -> str:
    """The name a file gives to pykern's ``name``: ``3.q.bias`` -> ``blk.3.attn_q.bias``."""
    parts = name.split(".")
    kind = "bias" if parts[-1] == "bias" else "weight"
    if parts[0].isdigit():
        return f"{'model.layers' if hf else 'blk'}.{parts[0]}.{_LAYER[parts[1]][hf]}.{kind}"
    return f"{_TOP[parts[0]][hf]}.{kind}"


# --- Assembling --------------------------------------------------------------------------------------------


def assemble(
    config: LlamaConfig,
    where: str,
    shapes: dict[str, tuple[int, ...]],
    load: Callable[[str], Matrix],
    hf: bool,
) -> Weights:
    """The weights of ``config`` out of a container that lists ``shapes`` and gives one tensor at a time.

    A missing or unexpected tensor, or one of another shape, is a ModelError: each would change what is computed.
    """
    wanted = expected_shapes(config)
    stored = {stored_name(name, hf): name for name in wanted}
    for file_name, name in stored.items():
        if file_name not in shapes:
            raise ModelError(
                f"{where}: no tensor {file_name!r}, which a model of {config.layers} layers needs"
            )
        if tuple(shapes[file_name]) != wanted[name]:
            raise ModelError(
                f"{where}: shape of {file_name}: got {tuple(shapes[file_name])}, allowed: {wanted[name]}"
            )
    tied_copy = (
        {stored_name("head", hf)} if config.tied_head else set()
    )  # some exporters store the tied head as well
    for file_name in shapes:
        if (
            file_name not in stored
            and file_name not in tied_copy
            and not file_name.endswith(_IGNORED_SUFFIXES)
        ):
            kind = f"a {config.layers}-layer Llama-family model"
            raise ModelError(f"{where}: tensor {file_name!r} has no place in {kind}")

    def get(name: str) -> Any:
        matrix = load(stored_name(name, hf))
        _check_finite(matrix, f"{where}: {stored_name(name, hf)}")
        return matrix

    def bias(i: int, names: str) -> torch.Tensor | None:
        found = [get(f"{i}.{n}.bias") for n in names.split() if f"{i}.{n}.bias" in wanted]
        return torch.cat([b.float() for b in found]) if found else None

    def layer(i: int) -> Layer:
        return Layer(
            attn_norm=get(f"{i}.attn_norm"),
            qkv=join([get(f"{i}.{n}") for n in ("q", "k", "v")]),
            o=get(f"{i}.o"),
            mlp_norm=get(f"{i}.mlp_norm"),
            gate_up=join([get(f"{i}.{n}") for n in ("gate", "up")]),
            down=get(f"{i}.down"),
            qkv_bias=bias(i, "q k v"),
            o_bias=bias(i, "o"),
            gate_up_bias=bias(i, "gate up"),
            down_bias=bias(i, "down"),
        )

    embed = get("embed")
    head = embed if config.tied_head else get("head")
    return Weights(embed, get("norm"), head, [layer(i) for i in range(config.layers)])


def join(parts: list[Matrix]) -> Matrix:
    """Matrices stacked by rows. Block formats stay as they are when all are of one; else float32 for all."""
    first = parts[0]
    if isinstance(first, Blocks):
        if all(isinstance(p, Blocks) and p.type == first.type for p in parts):
            data = torch.cat([p.data for p in parts if isinstance(p, Blocks)])
            return Blocks(first.type, data, (len(data), first.shape[1]))
    elif all(isinstance(p, torch.Tensor) and p.dtype == first.dtype for p in parts):
        return torch.cat([p for p in parts if isinstance(p, torch.Tensor)])
    return torch.cat([p.float() if isinstance(p, torch.Tensor) else dequantize_blocks(p) for p in parts])


def _check_finite(matrix: Matrix, what: str) -> None:
    """Refuse NaN and infinity: no trained weight has them, so they are damage. In blocks, the scales tell."""
    if isinstance(matrix, Blocks):
        blocks = matrix.data.view(matrix.shape[0], -1, matrix.type.nbytes)
        lanes = 4 if matrix.type.name == "Q4_1" else 2  # bytes of the float16 scale, and of the minimum
        values = blocks[..., :lanes].contiguous().view(torch.float16)
    else:
        values = matrix
    bad = ~torch.isfinite(values)
    if bad.any():
        row = int(bad.reshape(len(values), -1).any(dim=1).nonzero()[0, 0])
        raise ModelError(f"{what}: row {row} holds a NaN or an infinity: the file is damaged")


def dequantize_blocks(matrix: Blocks) -> torch.Tensor:
    """float32 values of GGUF blocks, bit-equal to gguf-py's.

    A block holds 32 values of a row. Q4_0: float16 d, 16 bytes of nibbles (low: values 0..15, high: 16..31),
    value = d (q - 8). Q4_1: float16 d and m, nibbles, value = d q + m. Q8_0: float16 d, 32 int8, value = d q.
    """
    rows, cols = matrix.shape
    blocks = matrix.data.view(rows, cols // matrix.type.block, matrix.type.nbytes)
    if matrix.type.name == "Q8_0":
        scale = blocks[..., :2].contiguous().view(torch.float16).float()
        return (scale * blocks[..., 2:].view(torch.int8).float()).view(rows, cols)
    head = 4 if matrix.type.name == "Q4_1" else 2
    nibbles = blocks[..., head:]
    q = torch.cat([nibbles & 15, nibbles >> 4], dim=-1).float()
    scale = blocks[..., :2].contiguous().view(torch.float16).float()
    if matrix.type.name == "Q4_0":
        return (scale * (q - 8)).view(rows, cols)
    minimum = blocks[..., 2:4].contiguous().view(torch.float16).float()
    return (scale * q + minimum).view(rows, cols)


# --- GGUF --------------------------------------------------------------------------------------------------


def weights_from_gguf(file: GGUFFile, config: LlamaConfig) -> Weights:
    """The weights of a GGUF file (bytes are shared with the file's mapping where nothing moves)."""
    permuted = file.metadata["general.architecture"] == "llama"

    def load(name: str) -> Matrix:
        entry = file.tensors[name]
        raw = torch.frombuffer(file.raw(name), dtype=torch.uint8)
        matrix: Matrix
        if entry.type.block == 1:
            matrix = raw.view(DTYPES[entry.type.name]).view(entry.shape)
        else:
            rows, cols = entry.shape
            matrix = Blocks(entry.type, raw.view(rows, -1), (rows, cols))
        if permuted and ".attn_q." in name:
            return unpermute(matrix, config.q_heads)
        return unpermute(matrix, config.kv_heads) if permuted and ".attn_k." in name else matrix

    shapes = {name: entry.shape for name, entry in file.tensors.items()}
    for name, entry in file.tensors.items():
        if entry.type.block != 1 and len(entry.shape) != 2:
            place = f"{file.path.name}: shape of {name}"
            raise ModelError(f"{place}: got {entry.shape}, allowed: a matrix for {entry.type.name}")
    weights = assemble(config, file.path.name, shapes, load, hf=False)
    if "rope_freqs.weight" in file.tensors:
        factors = load("rope_freqs.weight")
        half = (config.head_dim // 2,)
        if isinstance(factors, Blocks) or tuple(factors.shape) != half or not bool((factors > 0).all()):
            raise ModelError(f"{file.path.name}: rope_freqs.weight: allowed: {half} numbers above 0")
        weights.rope_factors = factors.float()
    return weights


def unpermute(matrix: Matrix, heads: int) -> Matrix:
    """Rows of a head back from interleaved pairs (0, 1), (2, 3) ... to halves (0, n/2), (1, n/2 + 1) ...

    GGUF's "llama" stores Q and K for interleaved RoPE; pykern rotates halves. Only whole rows move, so blocks stay
    as they are.
    """
    data = matrix.data if isinstance(matrix, Blocks) else matrix
    half = len(data) // heads // 2
    moved = data.view(heads, half, 2, -1).transpose(1, 2).reshape(data.shape)
    return Blocks(matrix.type, moved, matrix.shape) if isinstance(matrix, Blocks) else moved


# --- safetensors -------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file, or a ModelError that says where it breaks."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path.name}: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path.name}: got a {type(value).__name__}, allowed: a JSON object")
    return value


def config_of_folder(folder: Path) -> LlamaConfig:
    """The config of a Hugging Face model folder."""
    if not (folder / "config.json").exists():
        raise ModelError(
            f"model: got the folder {str(folder)!r} with no config.json beside the weights, allowed: a .gguf file, "
            "or a folder with config.json and .safetensors files"
        )
    generation = folder / "generation_config.json"
    return config_from_hf(
        read_json(folder / "config.json"), read_json(generation) if generation.exists() else {}, "config.json"
    )


def safetensors_files(path: Path) -> list[Path]:
    """The files that hold the weights: ``path`` itself, or the folder's single file or shards."""
    if path.is_file():
        return [path]
    index = path / "model.safetensors.index.json"
    if index.exists():
        table = read_json(index).get("weight_map")
        if not isinstance(table, dict) or not all(
            isinstance(n, str) and n == os.path.basename(n) for n in table.values()
        ):
            raise ModelError(f"{index.name}: weight_map: allowed: tensor names to file names of this folder")
        files = [path / name for name in sorted(set(table.values()))]
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        bins = " (PyTorch's .bin files are not read)" if any(path.glob("*.bin")) else ""
        raise ModelError(f"{path.name}: no .safetensors file in this folder{bins}")
    for file in files:
        if not file.exists():
            raise ModelError(f"{path.name}: shard {file.name} is missing")
    return files


def weights_from_safetensors(path: Path, config: LlamaConfig) -> Weights:
    """The weights of a safetensors file, or of a folder of them."""
    from safetensors import SafetensorError, safe_open

    where = path.name
    owners: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    allowed = {"F32", "F16", "BF16"}
    for file in safetensors_files(path):
        try:
            opened = safe_open(file, framework="pt")
            for name in opened.keys():  # not a dict
                part = opened.get_slice(name)
                if name in shapes:
                    raise ModelError(f"{file.name}: tensor {name!r} appears twice")
                if part.get_dtype() not in allowed and not name.endswith(_IGNORED_SUFFIXES):
                    place = f"{file.name}: dtype of {name}"
                    raise ModelError(f"{place}: got {part.get_dtype()}, allowed: {', '.join(sorted(allowed))}")
                shapes[name], owners[name] = tuple(part.get_shape()), opened
        except (SafetensorError, OSError, ValueError) as error:
            if isinstance(error, ModelError):
                raise
            kind = kind_of(file) if file.is_file() else ""
            if kind and kind != SAFETENSORS:
                raise ModelError(f"{file.name}: got {kind}, allowed: a safetensors file") from error
            raise ModelError(f"{file.name}: not a whole safetensors file: {error}") from error
    return assemble(config, where, shapes, lambda name: owners[name].get_tensor(name), hf=True)


# --- Either ------------------------------------------------------------------------------------------------


def load_weights(path: str | os.PathLike[str]) -> tuple[LlamaConfig, Weights, GGUFFile | Path]:
    """Config, weights and where the tokenizer is: the open GGUF file, or the model's folder.

    ``path``: a GGUF file, a safetensors file beside its ``config.json``, or the folder of both. ModelError for what is
    damaged, not supported, or not there. No tokenizer is needed: ids can be had from elsewhere.
    """
    path = Path(path)
    if not path.is_dir():
        kind = kind_of(path)  # by content, whatever the file is called
        if kind == GGUF or (not kind and path.suffix != ".safetensors"):
            file = GGUFFile(path)
            config = config_from_gguf(file)
            return config, weights_from_gguf(file, config), file
        if kind not in ("", SAFETENSORS):
            raise ModelError(f"{path.name}: got {kind}, allowed: a GGUF or safetensors file")
    folder = path if path.is_dir() else path.parent
    config = config_of_folder(folder)
    return config, weights_from_safetensors(path, config), folder
