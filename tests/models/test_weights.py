"""Both containers hold the same model; safetensors files that are damaged or of another kind are refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_files import BF16, F16, F32, Q4_0, Q4_1, Q8_0, Tiny, hf_folder, permuted, random_weights, tiny_gguf

from pykern.errors import ModelError
from pykern.models.weights import Blocks, dequantize_blocks, load_weights, unpermute


def dense(w: object) -> torch.Tensor:
    return dequantize_blocks(w) if isinstance(w, Blocks) else w.float()


@pytest.mark.parametrize("tiny", [Tiny(), Tiny(tied=False), Tiny(biased=True, q_heads=6, kv_heads=2, hidden=96)])
def test_gguf_and_safetensors_agree(tmp_path: Path, tiny: Tiny) -> None:
    arch, name = ("qwen2", "Qwen2ForCausalLM") if tiny.biased else ("llama", "LlamaForCausalLM")
    _, a, _ = load_weights(tiny_gguf(tiny, F32, arch).write(tmp_path / "m.gguf"))
    _, b, _ = load_weights(hf_folder(tmp_path / "hf", tiny, architectures=[name]))
    for x, y in [(a.embed, b.embed), (a.norm, b.norm), (a.head, b.head)]:
        assert torch.equal(x, y)
    assert len(a.layers) == len(b.layers) == tiny.layers
    for mine, theirs in zip(a.layers, b.layers, strict=True):
        for name, value in vars(mine).items():
            other = getattr(theirs, name)
            assert (value is None) == (other is None), name
            assert value is None or torch.equal(value, other), name
    assert (a.layers[0].qkv_bias is not None) == tiny.biased
    assert (a.head is a.embed) == tiny.tied


@pytest.mark.parametrize("kind", [F16, BF16, Q4_0, Q4_1, Q8_0])
def test_quantised_rows_stay_in_place(tmp_path: Path, kind: int) -> None:
    """Un-permuting and joining move whole rows: each row is near the value it was made from."""
    tiny = Tiny()
    _, weights, _ = load_weights(tiny_gguf(tiny, kind).write(tmp_path / "m.gguf"))
    source = random_weights(tiny)
    layer = [source[f"model.layers.1.self_attn.{n}_proj.weight"] for n in "qkv"]
    wanted, got = torch.cat(layer), dense(weights.layers[1].qkv)
    error = (got - wanted).abs().mean(dim=1) / wanted.abs().mean(dim=1)
    assert error.max() < 0.25  # a row in another's place would be off by 1.4
    assert torch.allclose(dense(weights.embed), source["model.embed_tokens.weight"], atol=0.6)


def test_mixed_kinds_join_as_float32(tmp_path: Path) -> None:
    file, other = tiny_gguf(kind=Q8_0), tiny_gguf(kind=Q4_0)
    file.tensors["blk.0.attn_v.weight"] = other.tensors["blk.0.attn_v.weight"]
    _, weights, _ = load_weights(file.write(tmp_path / "m.gguf"))
    assert isinstance(weights.layers[0].qkv, torch.Tensor) and weights.layers[0].qkv.dtype == torch.float32
    assert isinstance(weights.layers[1].qkv, Blocks)


@given(heads=st.integers(1, 5), half=st.integers(1, 6), cols=st.integers(1, 4))
def test_unpermute_undoes_permute(heads: int, half: int, cols: int) -> None:
    w = torch.arange(heads * half * 2 * cols, dtype=torch.float32).view(-1, cols)
    assert torch.equal(unpermute(permuted(w, heads), heads), w)
    assert torch.equal(unpermute(permuted(w, heads)[:, 0], heads), w[:, 0])


GOOD: dict[str, bytes] = {}


def good_bytes(tmp_path: Path) -> bytes:
    if not GOOD:
        GOOD["x"] = (hf_folder(tmp_path / "good", Tiny(layers=1)) / "model.safetensors").read_bytes()
    return GOOD["x"]


@given(cut=st.floats(0, 1, exclude_max=True))
def test_truncated_safetensors(tmp_path: Path, cut: float) -> None:
    data = good_bytes(tmp_path)
    folder = hf_folder(tmp_path / "m", Tiny(layers=1))
    (folder / "model.safetensors").write_bytes(data[: int(cut * len(data))])
    with pytest.raises(ModelError, match=r"model.safetensors"):
        load_weights(folder)


@given(bits=st.lists(st.integers(0, 8000), min_size=1, max_size=3, unique=True))
def test_flipped_bits_in_safetensors(tmp_path: Path, bits: list[int]) -> None:
    data = bytearray(good_bytes(tmp_path))
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    folder = hf_folder(tmp_path / "m", Tiny(layers=1))
    (folder / "model.safetensors").write_bytes(data)
    try:
        config, weights, _ = load_weights(folder)
    except ModelError:
        return
    assert weights.layers[0].qkv.shape == (128, 64)


def _edit(folder: Path, change: object) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("model.norm.weight"), "no tensor 'model.norm.weight'"),
        (lambda t: t.update(extra=torch.zeros(1)), "'extra' has no place"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32)}), r"got \(32,\), allowed: \(64,\)"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int32)}), "got I32, allowed"),
        (lambda t: t["model.norm.weight"].fill_(float("inf")), "row 0 holds a NaN or an infinity"),
    ],
)
def test_wrong_tensors(tmp_path: Path, change: object, message: str) -> None:
    folder = hf_folder(tmp_path / "m")
    _edit(folder, change)
    with pytest.raises(ModelError, match=message):
        load_weights(folder)


def test_older_exporters_buffers_are_ignored(tmp_path: Path) -> None:
    folder = hf_folder(tmp_path / "m")
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8),
        "lm_head.weight": torch.zeros(272, 64),
    }
    _edit(folder, lambda t: t.update(extra))
    _, weights, _ = load_weights(folder)
    assert weights.head is weights.embed


def test_shards(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = hf_folder(tmp_path / "m")
    _, whole, _ = load_weights(folder)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, keys in parts.items():
        save_file({k: tensors[k] for k in keys}, folder / file)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {k: f for f, keys in parts.items() for k in keys}}))
    _, sharded, _ = load_weights(folder)
    assert torch.equal(whole.layers[1].qkv, sharded.layers[1].qkv)
    (folder / "b.safetensors").unlink()
    with pytest.raises(ModelError, match="shard b.safetensors is missing"):
        load_weights(folder)
    index.write_text(json.dumps({"weight_map": {"x": "../../elsewhere.safetensors"}}))
    with pytest.raises(ModelError, match="file names of this folder"):
        load_weights(folder)
    index.unlink()
    (folder / "a.safetensors").unlink()
    with pytest.raises(ModelError, match="no .safetensors file"):
        load_weights(folder)
