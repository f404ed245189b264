"""``pykern generate`` from end to end on a tiny model: JSON, table, streaming, errors; and the meter's figures."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from model_files import Q8_0, Tiny, hf_folder, text, tiny_gguf

from pykern.cli import main
from pykern.models.meter import Meter, kernel_name

UNTIED = Tiny(tied=False)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tiny_gguf(UNTIED, Q8_0)
    file.metadata["tokenizer.chat_template"] = text("{{ messages[0]['content'] }}!")
    return file.write(tmp_path_factory.mktemp("m") / "tiny.gguf")


def generate(*args: object) -> Result:
    return CliRunner().invoke(main, ["generate", *map(str, args), "--device", "cpu"])


def as_json(*args: object) -> dict:
    done = generate(*args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def test_json(model: Path) -> None:
    out = as_json(model, "--prompt", "hell hello", "--max-tokens", 9, "--ignore-eos")
    assert out["prompt_ids"][:1] == [259]  # "hell", a merge
    assert len(out["ids"]) == 9 and out["finish"] == "length"
    assert out["token_hash"] == hashlib.sha256(struct.pack("<9i", *out["ids"])).hexdigest()
    assert out["decode_tokens"] == 8 and out["prefill_tokens"] == len(out["prompt_ids"])
    assert out["decode_tokens_per_second"] > 0 and out["prefill_tokens_per_second"] > 0
    assert out["dtype"] == "float32" and "host" in out["device"]
    rows = {row["op"]: row for row in out["ops"]}
    assert {"attention", "rms_norm", "rope_append_kv", "silu_and_mul", "argmax", "embedding"} <= set(rows)
    assert all(row["launches"] > 0 and row["bytes"] > 0 and row["seconds"] > 0 for row in rows.values())
    assert sum(row["share"] for row in rows.values()) == pytest.approx(1)
    assert rows["rms_norm"]["launches"] == 9 * (2 * UNTIED.layers + 1)
    assert rows["attention"]["backend"] == "host"
    # q and out, and the keys and values that were there at each of the 9 passes, in 2 layers.
    prompt = len(out["prompt_ids"])
    keys = sum(prompt + i for i in range(9)) * 2 * 2 * 16 * 4
    assert rows["attention"]["bytes"] == 2 * (2 * (prompt + 8) * 64 * 4 + keys)


def test_packed_and_expanded_weights_give_the_same_bits(model: Path) -> None:
    packed = as_json(model, "--prompt", "hello", "--max-tokens", 6, "--weights", "packed")
    expanded = as_json(model, "--prompt", "hello", "--max-tokens", 6, "--weights", "expanded")
    assert packed["ids"] == expanded["ids"]
    assert (packed["weights"], expanded["weights"]) == ("q8_0", "q8_0 expanded to float32")
    assert "quant_linear" in {row["op"] for row in packed["ops"]}
    assert "quant_linear" not in {row["op"] for row in expanded["ops"]}


def test_chunks_do_not_matter(model: Path) -> None:
    whole = as_json(model, "--prompt", "hello there, chunks", "--max-tokens", 5)
    assert (
        as_json(model, "--prompt", "hello there, chunks", "--max-tokens", 5, "--chunk", 3)["ids"]
        == whole["ids"]
    )


def test_sampling_by_seed(model: Path) -> None:
    options = [
        "--prompt",
        "x",
        "--max-tokens",
        8,
        "--temperature",
        2.0,
        "--top-k",
        200,
        "--top-p",
        0.99,
        "--min-p",
        0.001,
    ]
    a, b, c = (as_json(model, *options, "--seed", seed)["ids"] for seed in (1, 1, 2))
    assert a == b != c


def test_text_and_table(model: Path) -> None:
    out = as_json(model, "--prompt", "hell", "--max-tokens", 6, "--ignore-eos")
    done = generate(model, "--prompt", "hell", "--max-tokens", 6, "--ignore-eos")
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(out["text"].split("\n")[0][:10])
    for word in (
        "op",
        "launches",
        "bytes moved",
        "time",
        "share",
        "backend",
        "attention",
        "tokens/s",
        out["token_hash"][:16],
    ):
        assert word in done.stdout


def test_chat(model: Path) -> None:
    assert as_json(model, "--prompt", "h", "--chat", "--max-tokens", 1)["prompt_ids"] == [104, 33]


def test_no_tokens(model: Path) -> None:
    out = as_json(model, "--prompt", "h", "--max-tokens", 0)
    assert (out["ids"], out["text"], out["decode_tokens_per_second"]) == ([], "", None)


def test_a_huggingface_folder(model: Path, tmp_path: Path) -> None:
    from pykern.models.run import load

    folder = hf_folder(tmp_path / "hf", UNTIED)
    load(model)[2].tokenizer.save(str(folder / "tokenizer.json"))
    out = as_json(folder, "--prompt", "hello", "--max-tokens", 4)
    assert len(out["ids"]) == 4 and out["weights"] == "float32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_other_dtypes(model: Path, dtype: str) -> None:
    """Near the float32 logits: the first tokens agree unless two are close."""
    out = as_json(model, "--prompt", "hello", "--max-tokens", 2, "--dtype", dtype)
    assert len(out["ids"]) == 2 and out["dtype"] == dtype


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--max-tokens", 1000], "--max-tokens: got 1000, allowed: up to 255 after this prompt"),
        (["--temperature", -1], "temperature: got -1.0"),
        (["--temperature", "1e300"], "temperature: got 1e+300"),
        (["--top-k", 2**31], "top_k: got 2147483648"),
        (["--prompt", "\udcff"], "prompt: got '\\udcff', which is no UTF-8"),
        (["--top-p", 0], "top_p: got 0.0"),
        (["--system", "x"], "--system: got 'x', allowed: only together with --chat"),
        (["--prompt", ""], "--prompt: got nothing, allowed: a text"),
    ],
)
def test_refused_by_name(model: Path, options: list, message: str) -> None:
    prompt = [] if "--prompt" in options else ["--prompt", "h"]
    done = generate(model, *prompt, *options)
    assert done.exit_code == 2 and message in done.output and "Traceback" not in done.output


def test_a_broken_file(tmp_path: Path, model: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(model.read_bytes()[:5000])
    done = generate(path, "--prompt", "h")
    assert done.exit_code == 2 and "broken.gguf: " in done.output and "truncated" in done.output
    assert "known names: smollm2" in generate("nowhere", "--prompt", "h").output


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_no_gpu(model: Path) -> None:
    done = CliRunner().invoke(main, ["generate", str(model), "--prompt", "h", "--device", "cuda"])
    assert (
        done.exit_code == 2
        and "--device: got cuda, allowed: cpu (torch sees no CUDA GPU here)" in done.output
    )


def test_kernel_names() -> None:
    for name in ("void pk::linear<float, 4>(float const*)", "pk::linear<pk::half, 8>", "linear"):
        assert kernel_name(name) == "linear"


def test_the_meter_counts_what_the_ops_say() -> None:
    meter = Meter("cpu", ["rms_norm", "linear"])
    x, w = torch.randn(3, 64), torch.randn(32, 64)
    meter.ops.linear(x, w, bias=torch.zeros(32))
    meter.ops.linear(x, w)
    meter.ops.rms_norm(x, torch.ones(64), 1e-5)
    rows = {row["op"]: row for row in meter.table()}
    assert rows["linear"]["launches"] == 2
    assert rows["linear"]["bytes"] == 2 * 4 * (3 * 64 + 32 * 64 + 3 * 32) + 4 * 32
    assert rows["rms_norm"]["launches"] == 1 and rows["rms_norm"]["bytes"] > 0
    meter.reset()
    assert meter.table() == []
