"""Files that are not what they are called, and what the model's functions are given."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_files import F32, Q4_1, Tiny, hf_folder, tiny_gguf

import pykern
from pykern.errors import ArgumentError, ModelError
from pykern.models import _reference_ops
from pykern.models.cache import Sequence
from pykern.models.run import load, make_engine, prepare
from pykern.models.weights import load_weights

LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:0000\nsize 269060552\n"
ELSE = {
    "a zip archive, as PyTorch's .bin and .pt files are": b"PK\x03\x04" + bytes(60),
    "a Python pickle": b"\x80\x02}q\x00.",
    "a Git LFS pointer in the place of the model: run `git lfs pull`": LFS,
    "a gzip archive": b"\x1f\x8b\x08" + bytes(30),
    "a web page": b"<!DOCTYPE html><html><body>404</body></html>",
    "a file from before GGUF": b"tjgg\x03\0\0\0" + bytes(40),
    "an empty file": b"",
}


@pytest.mark.parametrize("kind", ELSE)
def test_what_a_file_is_instead(kind: str, tmp_path: Path) -> None:
    """By its first bytes, whatever its name: of a single file, and of one in a model's folder."""
    folder = hf_folder(tmp_path / "m", Tiny(layers=1))
    for path in (tmp_path / "model.gguf", folder / "other.safetensors", tmp_path / "model"):
        path.write_bytes(ELSE[kind])
        with pytest.raises(ModelError) as caught:
            load_weights(path)
        assert str(caught.value).startswith(f"{path.name}: got {kind}") and "allowed: " in str(caught.value)
    with pytest.raises(ModelError) as caught:
        load_weights(folder)
    assert str(caught.value).startswith(f"other.safetensors: got {kind}")


def test_names_do_not_matter(tmp_path: Path) -> None:
    """Whole models under each other's names load as what they are."""
    folder = hf_folder(tmp_path / "m")
    _, wanted, _ = load_weights(folder)
    os.rename(folder / "model.safetensors", folder / "model.gguf")
    _, renamed, place = load_weights(folder / "model.gguf")
    assert torch.equal(wanted.layers[1].qkv, renamed.layers[1].qkv) and place == folder
    gguf = tiny_gguf(Tiny(), F32).write(folder / "other.safetensors")
    config, weights, _ = load_weights(str(gguf))
    assert torch.allclose(weights.layers[1].qkv, wanted.layers[1].qkv) and config.layers == 2
    with pytest.raises(ModelError, match="^other.safetensors: got a GGUF file, allowed: a safetensors file"):
        load_weights(folder)  # a folder's are safetensors


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="^nothing.gguf: No such file"):
        load_weights(tmp_path / "nothing.gguf")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ModelError, match="^pipe: got a folder, device or pipe, allowed: a file"):
        load_weights(tmp_path / "pipe")
    folder = hf_folder(tmp_path / "m")
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(
        ModelError, match=r"m: no .safetensors file in this folder \(PyTorch's .bin files are not read\)"
    ):
        load_weights(folder)


# ---- from Python: docs/models.md

PAGE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")


def test_the_pages_example_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As it stands, but for the model: a tiny one in the place of smollm2."""
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    path = tiny_gguf(Tiny(tied=False), Q4_1).write(tmp_path / "m.gguf")
    assert block.count('"smollm2"') == 1
    space: dict[str, Any] = {}
    exec(compile(block.replace('"smollm2"', repr(str(path))), "models.md", "exec"), space)
    a, b, prompt = space["a"], space["b"], space["text"].encode("Once upon a time")
    assert a.ids == prompt + space["first"] + space["more"][0] and len(space["more"][0]) == 4
    assert (a.pages, a.cached) == ([], 0) and b.pages and len(b.ids) - b.cached == 1
    assert capsys.readouterr().out == space["text"].decode(space["second"]) + "\n"


def test_a_model_without_a_tokenizer_runs_on_ids(tmp_path: Path) -> None:
    """load_weights for ids that come from elsewhere, pykern itself as the ops, weights by a dtype's name."""
    folder = hf_folder(tmp_path / "m", Tiny(tied=False))
    with pytest.raises(ModelError, match="no tokenizer.json"):
        load(folder)
    config, weights, _ = load_weights(folder)
    engines = [
        make_engine(config, prepare(weights, dtype, "cpu"), ops, tokens=64)
        for dtype, ops in ((torch.float32, _reference_ops), ("float32", pykern))
    ]
    prompt = [5, 260, 17, 99]
    plain, ours = (engine.generate([Sequence(list(prompt))], 6) for engine in engines)
    assert plain == ours and len(ours[0]) == 6


def test_prepare_names_what_is_wrong(tmp_path: Path) -> None:
    _, weights, _ = load(tiny_gguf(Tiny(layers=1), Q4_1).write(tmp_path / "m.gguf"))
    for dtype in ("float64", "torch.float32", torch.float64, torch.int32, None, 32):
        wrong: Any = dtype
        with pytest.raises(
            ArgumentError, match="^dtype: got .*, allowed: torch.float32, torch.float16, torch.bfloat16"
        ):
            prepare(weights, wrong, "cpu")
    for device in ("gpu", "cpu:x", None, 1.5):
        wrong = device
        with pytest.raises(ArgumentError, match="^device: got .*, allowed: a device that torch has here"):
            prepare(weights, "float32", wrong)
    assert prepare(weights, "bfloat16", torch.device("cpu")).norm.dtype == torch.bfloat16
