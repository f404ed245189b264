"""Ids as transformers gives them, text back without loss, streaming that never splits a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_files import GGUF, Tiny, array, byte_tokens, f32, flag, text, tiny_gguf, u32

from pykern.errors import ArgumentError, ModelError
from pykern.models.gguf import GGUFFile
from pykern.models.tokenizer import TextModel, tokenizer_from_folder, tokenizer_from_gguf

VOCAB = Tiny().vocab


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> TextModel:
    return tokenizer_from_gguf(GGUFFile(smollm2_path), 49152)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TextModel:
    path = tiny_gguf().write(tmp_path_factory.mktemp("tok") / "m.gguf")
    return tokenizer_from_gguf(GGUFFile(path), VOCAB)


def test_golden_ids(smollm2: TextModel, golden: list[dict]) -> None:
    for case in golden:
        assert smollm2.encode(case["prompt"]) == case["ids"]
        assert smollm2.decode(case["new"]) == case["text"]


def test_digits_stand_alone(smollm2: TextModel) -> None:
    """The "smollm" rule; GPT-2's would merge them."""
    assert smollm2.encode("12345") == [smollm2.encode(d)[0] for d in "12345"]


def test_special_tokens_and_chat(smollm2: TextModel) -> None:
    prompt = smollm2.chat("hi")
    assert prompt.endswith("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")
    assert "You are a helpful AI assistant named SmolLM" in prompt
    ids = smollm2.encode(prompt)
    assert ids.count(1) == 3 and ids.count(2) == 2  # <|im_start|>, <|im_end|>
    assert smollm2.decode(ids) == prompt
    assert "helpful" not in smollm2.chat("hi", system="Be brief.")


@given(value=st.text(max_size=40))
def test_round_trip_and_stream(smollm2: TextModel, tiny: TextModel, value: str) -> None:
    assert tiny.decode(tiny.encode(value)) == value
    if all(ord(c) >= 32 or c in "\t\n\r" for c in value) and value.isprintable():
        assert smollm2.decode(smollm2.encode(value)) == value
    for model in (smollm2, tiny):
        ids = model.encode(value)
        stream = model.stream()
        assert "".join([stream.push(i) for i in ids]) + stream.end() == model.decode(ids)


def test_bytes_that_the_vocabulary_lacks(smollm2: TextModel) -> None:
    """SmolLM2 has no token for some control bytes; transformers drops them, and so do we."""
    assert smollm2.encode("a\x16b") == smollm2.encode("a") + smollm2.encode("b")


@given(raw=st.binary(max_size=24))
def test_stream_of_any_bytes(tiny: TextModel, raw: bytes) -> None:
    """Ids 0..255 are the bytes themselves: also those that are no UTF-8."""
    ids = list(raw)
    stream = tiny.stream()
    parts = [stream.push(i) for i in ids] + [stream.end()]
    assert "".join(parts) == raw.decode("utf-8", errors="replace") == tiny.decode(ids)


@given(value=st.text(min_size=1, max_size=12), cut=st.integers(0, 40))
def test_stream_goes_on_after_a_context(tiny: TextModel, value: str, cut: int) -> None:
    ids = tiny.encode(value)
    cut = min(cut, len(ids))
    before = tiny.decode(ids[:cut])
    stream = tiny.stream(ids[:cut])
    rest = "".join([stream.push(i) for i in ids[cut:]]) + stream.end()
    assert before.rstrip("\ufffd") + rest == value or cut == len(ids)


def test_no_character_is_given_in_part(tiny: TextModel) -> None:
    stream = tiny.stream()
    assert [stream.push(b) for b in "é😀".encode()] == ["", "é", "", "", "", "😀"]


def spm_file(tmp_path: Path, **changes: object) -> GGUFFile:
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]
    singles = {"▁": -1.0, "h": -2.0, "e": -3.0, "l": -4.0, "o": -5.0}
    scored = singles | {"he": -6.0, "ll": -7.0, "hell": -8.0, "▁hell": -9.0, "el": -0.5}
    tokens = pieces + list(scored)
    meta = {
        "tokenizer.ggml.model": text("llama"),
        "tokenizer.ggml.tokens": array(8, tokens),
        "tokenizer.ggml.scores": array(6, [0.0] * len(pieces) + list(scored.values())),
        "tokenizer.ggml.token_type": array(5, [2, 3, 3] + [6] * 256 + [1] * len(scored)),
        "tokenizer.ggml.bos_token_id": u32(1),
        "tokenizer.ggml.eos_token_id": u32(2),
        **changes,
    }
    return GGUFFile(GGUF(meta).write(tmp_path / "spm.gguf"))


def test_sentence_piece(tmp_path: Path) -> None:
    """The best score merges first: "el" before "he", so "hello" is h·el·l·o although "hell" is a token."""
    file = spm_file(tmp_path)
    model = tokenizer_from_gguf(file, 300)
    tokens = file.metadata["tokenizer.ggml.tokens"]
    ids = model.encode("hello")
    assert [tokens[i] for i in ids] == ["<s>", "▁", "h", "el", "l", "o"]
    assert model.decode(ids[1:]) == "hello"
    snow = model.encode("hé☃")
    assert "<0xE2>" in [tokens[i] for i in snow]
    stream = model.stream(snow[:1])
    assert "".join(stream.push(i) for i in snow[1:]).strip() == "hé☃"
    plain = tokenizer_from_gguf(spm_file(tmp_path, **{"tokenizer.ggml.add_bos_token": flag(False)}), 300)
    assert plain.encode("hello") == ids[1:]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": text("t5")}, "got 't5', allowed: gpt2, llama"),
        ({"tokenizer.ggml.pre": text("tekken")}, "got 'tekken', allowed: gpt-2, smollm"),
        (
            {"tokenizer.ggml.tokens": array(8, [*byte_tokens(VOCAB), "one too many"])},
            "got 273 items, allowed: 1..272",
        ),
        ({"tokenizer.ggml.tokens": array(8, [*byte_tokens(VOCAB)[:-1], "he"])}, "'he' appears twice"),
        ({"tokenizer.ggml.tokens": array(5, [1, 2])}, "strings"),
        ({"tokenizer.ggml.token_type": array(5, [1])}, "got 1 items, allowed: 272"),
        ({"tokenizer.ggml.merges": array(8, ["h e", "he"])}, r"merges\[1\]: got 'he'"),
        ({"tokenizer.ggml.merges": array(8, ["h o"])}, "two tokens that form a third"),
        ({"tokenizer.ggml.eos_token_id": u32(5000)}, "got 5000, allowed: 0..271"),
        ({"tokenizer.ggml.add_bos_token": flag(True)}, "there is no bos_token_id"),
    ],
)
def test_refused_by_name(tmp_path: Path, changes: dict, message: str) -> None:
    file = tiny_gguf()
    file.metadata |= changes
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(GGUFFile(file.write(tmp_path / "m.gguf")), VOCAB)


def test_chat_templates_are_sandboxed(tmp_path: Path) -> None:
    file = tiny_gguf()
    for template, message in [
        ("{{ messages.__class__.__mro__ }}", "unsafe|no attribute|undefined"),
        ("{{ raise_exception('no') }}", "no"),
        ("{% for %}", "chat template"),
    ]:
        file.metadata["tokenizer.chat_template"] = text(template)
        model = tokenizer_from_gguf(GGUFFile(file.write(tmp_path / "m.gguf")), VOCAB)
        with pytest.raises(ModelError, match=message):
            model.chat("x")
    with pytest.raises(ModelError, match="no chat template"):
        tokenizer_from_gguf(GGUFFile(tiny_gguf().write(tmp_path / "m.gguf")), VOCAB).chat("x")


def test_huggingface_folder(tmp_path: Path, tiny: TextModel) -> None:
    folder = tmp_path / "hf"
    folder.mkdir()
    tiny.tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "eos_token": {"content": "<|c3|>"},
                "chat_template": "{{ messages[0]['content'] }}{{ eos_token }}",
            }
        )
    )
    model = tokenizer_from_folder(folder, VOCAB)
    assert model.encode("hell hello") == tiny.encode("hell hello")
    assert model.bos is None
    assert model.chat("hey") == "hey<|c3|>"
    with pytest.raises(ModelError, match="below the model's vocabulary of 100"):
        tokenizer_from_folder(folder, 100).encode("é")
    (folder / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelError, match="tokenizer.json"):
        tokenizer_from_folder(folder, VOCAB)
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match="no tokenizer.json"):
        tokenizer_from_folder(folder, VOCAB)


def test_first_token_of_a_huggingface_folder(tmp_path: Path, tiny: TextModel) -> None:
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(tiny.tokenizer.to_str())
    bos = tokenizer.token_to_id("<|c0|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|c0|> $A", special_tokens=[("<|c0|>", bos)]
    )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"bos_token": "<|c0|>"}')
    model = tokenizer_from_folder(tmp_path, VOCAB)
    assert model.encode("a")[0] == bos and len(model.encode("a")) == 2
    assert model.encode("<|c0|>a") == model.encode("a")


def test_typed_metadata_is_checked(tmp_path: Path) -> None:
    file = tiny_gguf()
    file.metadata["tokenizer.ggml.pre"] = f32(1.0)
    with pytest.raises(ModelError, match=r"tokenizer.ggml.pre: got 1.0 \(float\), allowed: str"):
        tokenizer_from_gguf(GGUFFile(file.write(tmp_path / "m.gguf")), VOCAB)


def test_prompts_are_text(tiny: TextModel) -> None:
    from pykern.errors import ArgumentError

    for wrong in ("half a character \udcff", b"bytes", None, 3, ["a"]):
        with pytest.raises(ArgumentError, match="^prompt: got .*, allowed: "):
            tiny.encode(wrong)  # type: ignore[arg-type]


def test_what_decode_is_given(tiny: TextModel) -> None:
    """Ids of one sequence; not what generate returns, a list of lists."""
    tensor: Any = torch.tensor([71, 72])
    assert tiny.decode(tensor) == tiny.decode([71, 72]) == tiny.decode((71, 72))
    wrong: Any
    for wrong in ([[71, 72]], "ab", None, 71, [71.0], ["a"]):
        with pytest.raises(ArgumentError, match="^ids: got .*, allowed: the ints of one sequence"):
            tiny.decode(wrong)
    for token in (-1, 2**40, tiny.vocab):
        with pytest.raises(ArgumentError, match=rf"^ids: got {token}, allowed: ints in 0..{tiny.vocab - 1}"):
            tiny.decode([71, token])
    with pytest.raises(ArgumentError, match="^ids: got"):
        tiny.stream().push("a")  # type: ignore[arg-type]
