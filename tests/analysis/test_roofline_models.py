"""Whole models under a roof: published sizes, floors by hand, every weight once, config files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.analysis.models_zoo import MODELS, find_model, from_config, read_config
from pykern.analysis.roofline_gpus import find_gpu
from pykern.analysis.roofline_model import Precision, attended_keys, experts_touched, memory_bytes, step
from pykern.errors import ArgumentError, ModelError, PykernError

SHEET, MEASURED = find_gpu("h200").roof("bf16"), find_gpu("h200").roof("bf16", "measured")
#: Published parameter counts (the model cards' safetensors metadata).
PARAMETERS = {
    "llama-3-8b": 8030261248,
    "llama-3-70b": 70553706496,
    "llama-3.2-1b": 1235814400,
    "llama-3.2-3b": 3212749824,
    "llama-2-7b": 6738415616,
    "smollm2-135m": 134515008,
    "smollm2-360m": 361821120,
    "smollm2-1.7b": 1711376384,
    "mistral-7b-v0.3": 7248023552,
    "mixtral-8x7b": 46702792704,
    "qwen2.5-0.5b": 494032768,
    "qwen2.5-7b": 7615616512,
    "qwen3-8b": 8190735360,
}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert MODELS[name].parameters == PARAMETERS[name]


def test_llama_8b_batch_1_floor_at_the_read_roof() -> None:
    """8.03e9 parameters less the embedding table, in bf16: 15.0 GB a token, 303 tokens/s at 4.55 TB/s."""
    made = step(find_model("llama-8b"), MEASURED, batch=1, context=1)
    assert made.weight_bytes == 2 * (8030261248 - 128256 * 4096)
    assert 1e6 / made.hard_floor_us == pytest.approx(303, abs=0.5)
    assert made.tokens / made.floor_us * 1e6 == pytest.approx(303, abs=0.5)
    sheet = step(find_model("llama-8b"), SHEET, batch=1, context=1)
    assert 1e6 / sheet.hard_floor_us == pytest.approx(4.8e12 / (made.weight_bytes + made.kv_bytes))
    assert 1e6 / step(
        find_model("llama-3.2-1b"), MEASURED, batch=1, context=1
    ).hard_floor_us == pytest.approx(1840, abs=2)


@pytest.mark.parametrize("name", sorted(MODELS))
@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_ops_carry_every_weight_once(name: str, phase: str) -> None:
    """One sequence, one token: the products' bytes are the weights, all experts' share and the head included."""
    model = MODELS[name]
    made = step(model, SHEET, batch=1, context=1, phase=phase)
    moved = sum(p.work.bytes * p.work.count for p in made.ops)
    assert made.weight_bytes <= moved <= 1.05 * made.weight_bytes + made.kv_bytes
    active = model.parameters - model.vocab * model.hidden * (0 if model.tied else 1)
    if model.experts:
        active -= (
            model.layers * (model.experts - model.active_experts) * 3 * model.hidden * model.intermediate
        )
    assert made.weight_bytes == pytest.approx(2 * active, rel=1e-3)


@given(
    st.sampled_from(sorted(MODELS)),
    st.integers(1, 512),
    st.integers(1, 20000),
    st.sampled_from(["decode", "prefill"]),
    st.sampled_from(["bf16", "fp8", "int4"]),
)
def test_steps_are_bounded_and_monotone(
    name: str, batch: int, context: int, phase: str, weights: str
) -> None:
    model, kinds = MODELS[name], Precision("bf16", weights)
    made = step(model, SHEET, batch=batch, context=context, phase=phase, precision=kinds)
    assert made.hard_floor_us <= made.floor_us * (1 + 1e-9)
    assert (
        step(model, SHEET, batch=batch + 1, context=context, phase=phase, precision=kinds).floor_us
        >= made.floor_us
    )
    assert (
        step(model, SHEET, batch=batch, context=context + 1, phase=phase, precision=kinds).floor_us
        >= made.floor_us
    )
    row = made.to_json()
    assert sum(op["share"] for op in row["ops"]) == pytest.approx(1)
    assert sum(op["total_us"] for op in row["ops"]) == pytest.approx(row["floor_us"])
    if phase == "decode":
        assert (
            step(model, SHEET, batch=batch, context=context, precision=Precision("fp32")).floor_us
            > made.floor_us
        )


def test_prefill_is_the_parameters_twice_a_token() -> None:
    """FLOPs of a prompt: 2 a weight a token, plus the causal triangle of attention."""
    model = find_model("llama-8b")
    made = step(model, SHEET, batch=2, context=1024, phase="prefill")
    flops = {p.work.name: p.work.flops * p.work.count for p in made.ops}
    products = sum(flops[n] for n in ("qkv", "out_proj", "gate_up_silu", "down"))
    matrices = model.parameters - 2 * model.vocab * model.hidden - (2 * model.layers + 1) * model.hidden
    assert products == pytest.approx(2 * 2048 * matrices, rel=2e-3)
    assert flops["attention"] == 32 * 2 * 4 * 32 * 128 * (1024 * 1025 // 2)
    assert made.kernels == 260


def test_windows_experts_and_cache() -> None:
    model = find_model("mistral-7b-v0.3")
    windowed = from_config(
        {
            "hidden_size": 64,
            "num_attention_heads": 4,
            "num_hidden_layers": 1,
            "vocab_size": 9,
            "intermediate_size": 8,
            "sliding_window": 16,
            "model_type": "mistral",
        },
        "w",
    )
    assert attended_keys(windowed, "decode", 100) == 16 and attended_keys(windowed, "decode", 7) == 7
    assert attended_keys(windowed, "prefill", 100) == sum(min(i + 1, 16) for i in range(100))
    assert attended_keys(model, "prefill", 100) == 5050
    assert experts_touched(8, 2, 1) == 2 and 7.9 < experts_touched(8, 2, 16) < 8
    cache = step(model, SHEET, batch=4, context=1000, precision=Precision("bf16", kv="fp8")).kv_bytes
    assert cache == 4 * 1000 * 2 * 8 * 128 * 32
    assert memory_bytes(find_model("llama-8b"), Precision("bf16"), 1, 1) == 2 * (
        8030261248 + 2 * 32 * 8 * 128
    )


def test_config_files(tmp_path: Path) -> None:
    config = {
        "hidden_size": 576,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "num_hidden_layers": 30,
        "vocab_size": 49152,
        "intermediate_size": 1536,
        "tie_word_embeddings": True,
        "model_type": "llama",
    }
    folder = tmp_path / "SmolLM2"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    for name in (str(folder), str(folder / "config.json")):
        assert find_model(name).parameters == PARAMETERS["smollm2-135m"]
    for change in (
        {"hidden_size": None},
        {"hidden_size": "x"},
        {"num_attention_heads": 7},
        {"num_attention_heads": 0},
        {"num_hidden_layers": 0},
        {"num_key_value_heads": 2},
        {"vocab_size": True},
        {"num_local_experts": 4},
    ):
        with pytest.raises(ModelError):
            from_config({**config, **change}, "bad")
    for text in ("", "[]", "{}", "[" * 5000):
        (folder / "config.json").write_text(text)
        with pytest.raises(ModelError):
            read_config(folder / "config.json")
    with pytest.raises(ArgumentError, match="llama-3-8b"):
        find_model("gpt-5")


@given(
    st.dictionaries(
        st.sampled_from(
            [
                "hidden_size",
                "num_attention_heads",
                "num_hidden_layers",
                "vocab_size",
                "head_dim",
                "intermediate_size",
                "num_key_value_heads",
                "num_local_experts",
                "sliding_window",
            ]
        ),
        st.none() | st.integers(-2, 100) | st.text(max_size=2) | st.floats() | st.booleans(),
    )
)
def test_no_config_crashes(config: dict) -> None:
    try:
        step(from_config(config, "any"), SHEET, batch=1, context=8)
    except PykernError:
        pass
