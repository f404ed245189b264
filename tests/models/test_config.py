"""Configs and RoPE angles: what is supported is right, what is not is refused by name."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from model_files import Tiny, f32, hf_config, hf_folder, tiny_gguf

from pykern.errors import ModelError
from pykern.models.config import LlamaConfig, RopeScaling, config_from_gguf, config_from_hf
from pykern.models.gguf import GGUFFile
from pykern.models.rope import cos_sin_table, inverse_frequencies
from pykern.models.weights import load_weights

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes: object) -> LlamaConfig:
    return config_from_hf(hf_config(Tiny(), **changes), {}, "config.json")


def test_both_containers_give_the_same_config(tmp_path: Path) -> None:
    from_gguf = config_from_gguf(GGUFFile(tiny_gguf().write(tmp_path / "m.gguf")))
    from_hf = parse()
    assert from_gguf.norm_eps == pytest.approx(from_hf.norm_eps, rel=1e-6)  # float32 in GGUF
    assert from_gguf == type(from_hf)(**{**vars(from_hf), "norm_eps": from_gguf.norm_eps})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["MixtralForCausalLM"]},
            "got .'MixtralForCausalLM'., allowed: one of LlamaForCausalLM",
        ),
        ({"architectures": None}, "no 'architectures'"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', allowed: silu"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": 4096},
            "sliding_window: got 4096, allowed: null",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "got 'yarn', allowed: default, linear, llama3",
        ),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, "got 'dynamic'"),
        ({"rope_scaling": {**LLAMA3, "factor": 0}}, "factor: got 0, allowed: a number above 0"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor: got 4.0, allowed: below"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: got 0.5"),
        ({"num_attention_heads": 0}, "num_attention_heads: got 0"),
        (
            {"num_attention_heads": 5, "head_dim": None},
            "num_attention_heads: got 5, allowed: a divisor of 64",
        ),
        ({"num_key_value_heads": 3}, "4 query heads is no multiple of 3"),
        ({"head_dim": 15}, "head_dim: got 15, allowed: an even number"),
        ({"hidden_size": "64"}, r"hidden_size: got '64' \(str\), allowed: a whole number"),
        ({"num_hidden_layers": True}, r"num_hidden_layers: got True \(bool\), allowed: a whole number"),
        ({"rms_norm_eps": "1e-5"}, r"rms_norm_eps: got '1e-5' \(str\), allowed: a number or a whole number"),
        ({"tie_word_embeddings": 1}, r"tie_word_embeddings: got 1 \(int\), allowed: true or false"),
        ({"quantization_config": [1]}, r"quantization_config: got \[1\] \(list\), allowed: an object"),
        ({"rope_scaling": [1]}, r"rope_scaling: got \[1\] \(list\), allowed: an object"),
        ({"rope_scaling": "linear"}, r"rope_scaling: got 'linear' \(str\), allowed: an object"),
        ({"rope_parameters": 3}, r"rope_parameters: got 3 \(int\), allowed: an object"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"RoPE scaling: got \['yarn'\], allowed: default, linear"),
        ({"rope_theta": True}, "rope_theta: got True, allowed: a number"),
        ({"eos_token_id": True}, r"eos_token_id: got \[True\], allowed: a whole number"),
        ({"architectures": [{}]}, r"architectures: got \[\{\}\], allowed: one of"),
        ({"num_hidden_layers": 2**40}, "layers: got 1099511627776"),
        ({"rms_norm_eps": -1.0}, "epsilon: got -1.0"),
        ({"rope_theta": "big"}, "rope_theta: got 'big'"),
        ({"eos_token_id": 272}, "end-of-text id: got 272, allowed: 0..271"),
        ({"eos_token_id": ["x"]}, "eos_token_id"),
    ],
)
def test_refused_by_name(changes: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse(**changes)


def test_stop_ids_come_from_the_generation_config() -> None:
    config = config_from_hf(hf_config(Tiny()), {"eos_token_id": [3, 5]}, "config.json")
    assert config.stop_ids == (3, 5)


def test_transformers_5_writes_rope_parameters() -> None:
    new = parse(rope_theta=None, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    assert (new.rope_base, new.rope_scaling) == (5e5, None)


def test_qwen2_has_biases_on_q_k_v_only() -> None:
    config = parse(architectures=["Qwen2ForCausalLM"], use_sliding_window=False, sliding_window=4096)
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (True, False, False)


def test_llama3_scaling_by_wavelength() -> None:
    """Against the rule stated frequency by frequency."""
    config = parse(rope_scaling=LLAMA3, rope_theta=500000.0, head_dim=128)
    plain = inverse_frequencies(parse(rope_theta=500000.0, head_dim=128))
    scaled = inverse_frequencies(config)
    kept = stretched = between = 0
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength > 8192 / 1.0:
            stretched += 1
            assert after == pytest.approx(before / 8)
        elif wavelength < 8192 / 4.0:
            kept += 1
            assert after == before
        else:
            between += 1
            smooth = (8192 / wavelength - 1.0) / (4.0 - 1.0)
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before)
    assert kept and stretched and between


def test_linear_scaling_and_stored_factors() -> None:
    config = parse()
    linear = LlamaConfig(**{**vars(config), "rope_scaling": RopeScaling(4.0)})
    assert torch.equal(inverse_frequencies(linear), inverse_frequencies(config) / 4)
    factors = torch.arange(1, 9, dtype=torch.float32)
    assert torch.equal(inverse_frequencies(config, factors), inverse_frequencies(config) / factors.double())


def test_angles_are_exact_far_out() -> None:
    config = LlamaConfig(**{**vars(parse()), "context": 100000})
    table = cos_sin_table(config, 90001)
    base = 10000.0
    for i in range(8):
        angle = 90000 * base ** (-2 * i / 16)
        assert table[90000, i] == pytest.approx(math.cos(angle), abs=1e-7)
        assert table[90000, 8 + i] == pytest.approx(math.sin(angle), abs=1e-7)


def test_gguf_rope_factors_are_used(tmp_path: Path) -> None:
    from model_files import F32, Stored

    file = tiny_gguf()
    factors = torch.linspace(1, 8, 8)
    file.tensors["rope_freqs.weight"] = Stored(F32, (8,), factors.numpy().tobytes())
    _, weights, _ = load_weights(file.write(tmp_path / "m.gguf"))
    assert torch.equal(weights.rope_factors, factors)
    file.tensors["rope_freqs.weight"] = Stored(F32, (8,), (factors - 1).numpy().tobytes())
    with pytest.raises(ModelError, match="rope_freqs.weight"):
        load_weights(file.write(tmp_path / "m.gguf"))


def test_gguf_linear_scaling(tmp_path: Path) -> None:
    from model_files import text

    file = tiny_gguf()
    file.metadata |= {"llama.rope.scaling.type": text("linear"), "llama.rope.scaling.factor": f32(2.0)}
    assert config_from_gguf(GGUFFile(file.write(tmp_path / "m.gguf"))).rope_scaling == RopeScaling(2.0)


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"architectures": ["LlamaForCausalLM"]}', "\udcff"])
def test_broken_config_json(tmp_path: Path, content: str) -> None:
    folder = hf_folder(tmp_path / "m")
    (folder / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ModelError, match="config.json"):
        load_weights(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelError, match="no config.json"):
        load_weights(folder / "model.safetensors")
