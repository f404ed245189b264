"""The GGUF reader: right on good files, a ModelError on every bad one, and never a large allocation."""

from __future__ import annotations

import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from model_files import (
    F32,
    GGUF,
    Q4_0,
    Q4_1,
    Q8_0,
    Stored,
    Typed,
    array,
    f32,
    flag,
    quantized,
    text,
    tiny_gguf,
    u32,
)

from pykern.errors import ModelError
from pykern.models.gguf import TYPES, GGUFFile
from pykern.models.weights import Blocks, dequantize_blocks, load_weights

GOOD = tiny_gguf(kind=Q8_0)
GOOD_BYTES = GOOD.bytes()
HEADER = len(GOOD.header())


def load(tmp_path: Path, data: bytes) -> object:
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        return load_weights(path)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 20e6, f"{peak / 1e6:.0f} MB allocated for a file of {len(data)} bytes"


def test_reads_every_value_type(tmp_path: Path) -> None:
    values = {
        "a.u8": Typed(0, 200), "a.i8": Typed(1, -5), "a.u16": Typed(2, 60000), "a.i16": Typed(3, -6), "a.u32": u32(7),
        "a.i32": Typed(5, -7), "a.f32": f32(0.5), "a.bool": flag(True), "a.text": text("naïve"),
        "a.u64": Typed(10, 2**63), "a.i64": Typed(11, -(2**62)), "a.f64": Typed(12, 1e300),
        "a.ints": array(5, [1, -2, 3]), "a.strings": array(8, ["x", "", "ü"]), "a.empty": array(4, []),
    }  # fmt: skip
    file = GGUFFile(GGUF(values, {"t": Stored(F32, (2, 3), bytes(24))}).write(tmp_path / "m.gguf"))
    assert file.metadata == {key: value.value for key, value in values.items()}
    assert file.tensors["t"].shape == (2, 3)
    assert bytes(file.raw("t")) == bytes(24)


def test_agrees_with_gguf_py(tmp_path: Path) -> None:
    reader = pytest.importorskip("gguf").GGUFReader
    path = GOOD.write(tmp_path / "m.gguf")
    theirs, ours = reader(path), GGUFFile(path)
    assert {t.name for t in theirs.tensors} == set(ours.tensors)
    for t in theirs.tensors:
        entry = ours.tensors[t.name]
        assert (entry.start, entry.nbytes) == (t.data_offset, t.n_bytes)
        assert entry.shape == tuple(int(n) for n in reversed(t.shape))
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.metadata[key] == field.contents(), key


def test_reads_what_gguf_py_writes(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    import numpy as np

    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    writer.add_uint32("llama.block_count", 3)
    writer.add_array("some.list", ["p", "q"])
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    packed = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("w", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.metadata["some.list"] == ["p", "q"]
    assert file.tensors["w"].shape == (4, 64)
    assert bytes(file.raw("w")) == packed.tobytes()


@pytest.mark.parametrize("kind", [Q4_0, Q4_1, Q8_0])
def test_block_formats_bit_equal_to_gguf_py(kind: int) -> None:
    quants = pytest.importorskip("gguf.quants")
    import gguf
    import numpy as np

    values = torch.randn(6, 96, generator=torch.Generator().manual_seed(kind)) * 3
    raw = quantized(kind, values)
    ours = dequantize_blocks(
        Blocks(TYPES[kind], torch.frombuffer(bytearray(raw), dtype=torch.uint8).view(6, -1), (6, 96))
    )
    blocks = np.frombuffer(raw, dtype=np.uint8).reshape(6, -1)
    theirs = quants.dequantize(blocks, gguf.GGMLQuantizationType(kind))
    assert torch.equal(ours, torch.from_numpy(theirs))
    assert torch.allclose(ours, values, atol=0.8 if kind != Q8_0 else 0.05)  # the encoder is a real one


def test_the_good_file_loads(tmp_path: Path) -> None:
    config, weights, _ = load(tmp_path, GOOD_BYTES)
    assert config.layers == len(weights.layers) == 2


@given(cut=st.integers(0, len(GOOD_BYTES) - 1))
@example(cut=0)
@example(cut=23)
@example(cut=HEADER)
@example(cut=len(GOOD_BYTES) - 1)
def test_truncated_anywhere(tmp_path: Path, cut: int) -> None:
    with pytest.raises(ModelError, match="model.gguf"):
        load(tmp_path, GOOD_BYTES[:cut])


@given(bits=st.lists(st.integers(0, HEADER * 8 - 1), min_size=1, max_size=4, unique=True))
def test_flipped_bits_in_the_header(tmp_path: Path, bits: list[int]) -> None:
    data = bytearray(GOOD_BYTES)
    for bit in bits:
        data[bit // 8] ^= 1 << bit % 8
    try:
        config, weights, _ = load(tmp_path, bytes(data))
    except ModelError as error:
        assert "model.gguf" in str(error)
        return
    # A flip in a token's text or in a number that stays sensible is a valid file: of the same shapes, then.
    assert (config.hidden, config.layers) == (64, 2)
    assert weights.layers[0].qkv.shape == (128, 64)


def _length_fields() -> list[int]:
    """Positions of the file's 64-bit counts and lengths: tensor count, metadata count, key and array lengths."""
    at, places = 24, [8, 16]
    for key, value in GOOD.metadata.items():
        places.append(at)
        at += 8 + len(key)
        if value.kind == 8:
            places.append(at + 4)
        if value.kind == 9:
            places.append(at + 8)
        at += 4 + _size(value)
    for name, t in GOOD.tensors.items():
        places += [at, at + 12 + len(name), at + 12 + len(name) + 8 * len(t.shape) + 4]
        at += 8 + len(name) + 4 + 8 * len(t.shape) + 4 + 8
    assert at == HEADER
    return places


def _size(value: Typed) -> int:
    from model_files import packed

    return len(packed(value))


@given(
    place=st.sampled_from(_length_fields()),
    value=st.sampled_from([2**64 - 1, 2**63, 2**40, 2**32, 2**31, 2**20]),
)
def test_lengths_that_lie(tmp_path: Path, place: int, value: int) -> None:
    data = bytearray(GOOD_BYTES)
    struct.pack_into("<Q", data, place, value)
    with pytest.raises(ModelError, match="model.gguf"):
        load(tmp_path, bytes(data))


def _changed(**changes: object) -> bytes:
    file = tiny_gguf(kind=Q8_0)
    for name, value in changes.items():
        setattr(file, name, value)
    return file.bytes()


def _with(meta: dict | None = None, tensors: dict | None = None, drop: str = "") -> bytes:
    file = tiny_gguf(kind=Q8_0)
    file.metadata |= meta or {}
    file.tensors |= tensors or {}
    file.metadata.pop(drop, None)
    file.tensors.pop(drop, None)
    return file.bytes()


def _nan_norm() -> Stored:
    norm = torch.ones(64)
    norm[5] = float("nan")
    return Stored(F32, (64,), norm.numpy().tobytes())


def _nan_scale() -> Stored:
    good = GOOD.tensors["blk.1.ffn_up.weight"]
    row = 7 * 64 // 32 * 34
    return Stored(Q8_0, good.shape, good.data[:row] + b"\xff\xff" + good.data[row + 2 :])


BAD = {
    "unknown": (b"XYZW" + GOOD_BYTES[4:], "not a GGUF file: it starts with b'XYZW'"),
    "not a GGUF file": (b"PK\x03\x04" + GOOD_BYTES[4:], "got a zip archive"),
    "big-endian": (GOOD_BYTES[:4] + struct.pack(">I", 3) + GOOD_BYTES[8:], "big-endian"),
    "version": (_changed(version=9), "GGUF version: got 9, allowed: 2 or 3"),
    "architecture": (_with({"general.architecture": text("gemma")}), "got 'gemma', allowed: llama, qwen2"),
    "no architecture": (_with(drop="general.architecture"), "no metadata entry 'general.architecture'"),
    "mislabelled type": (
        _with({"llama.block_count": text("2")}),
        r"llama.block_count: got '2' \(str\), allowed: int",
    ),
    "experts": (_with({"llama.expert_count": u32(8)}), "mixture of experts"),
    "sliding window": (_with({"llama.attention.sliding_window": u32(128)}), "sliding-window"),
    "rope scaling": (_with({"llama.rope.scaling.type": text("yarn")}), "got 'yarn', allowed: none, linear"),
    "partial rope": (_with({"llama.rope.dimension_count": u32(8)}), "partial RoPE"),
    "heads": (_with({"llama.attention.head_count": u32(3)}), "head_count: got 3"),
    "kv heads": (_with({"llama.attention.head_count_kv": u32(3)}), "no multiple of 3"),
    "zero heads": (_with({"llama.attention.head_count_kv": u32(0)}), "kv_heads: got 0"),
    "layers": (_with({"llama.block_count": u32(3)}), "no tensor 'blk.2"),
    "too few layers": (_with({"llama.block_count": u32(1)}), "'blk.1.* has no place"),
    "eps": (_with({"llama.attention.layer_norm_rms_epsilon": f32(float("nan"))}), "epsilon: got nan"),
    "rope base": (_with({"llama.rope.freq_base": f32(float("inf"))}), "RoPE base: got inf"),
    "alignment": (
        _with({"general.alignment": u32(48)}),
        "general.alignment: got 48, allowed: a power of two",
    ),
    "missing tensor": (_with(drop="blk.1.attn_k.weight"), "no tensor 'blk.1.attn_k.weight'"),
    "wrong shape": (
        _with(tensors={"blk.0.ffn_norm.weight": Stored(F32, (32,), bytes(128))}),
        r"shape of blk.0.ffn_norm.weight: got \(32,\), allowed: \(64,\)",
    ),
    "unknown tensor": (
        _with(tensors={"blk.0.attn_q_norm.weight": Stored(F32, (16,), bytes(64))}),
        "has no place",
    ),
    "quant kind": (
        _with(tensors={"x": Stored(12, (1, 256), bytes(144))}),
        "got Q4_K .supported by GGUF, not by py",
    ),
    "no such kind": (_with(tensors={"x": Stored(77, (1, 256), bytes(144))}), "type of x: got 77"),
    "ragged blocks": (_with(tensors={"x": Stored(Q4_0, (2, 40), bytes(36))}), "multiple of 32 for Q4_0"),
    "NaN norm": (_with(tensors={"blk.0.attn_norm.weight": _nan_norm()}), "row 5 holds a NaN"),
    "NaN scale": (
        _with(tensors={"blk.1.ffn_up.weight": _nan_scale()}),
        "blk.1.ffn_up.weight: row 7 holds a NaN",
    ),
    "empty": (b"", "an empty file"),
}


@pytest.mark.parametrize("name", BAD)
def test_refused_by_name(tmp_path: Path, name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(ModelError, match=message):
        load(tmp_path, data)


def test_duplicates_and_overlaps_are_refused(tmp_path: Path) -> None:
    twice = GOOD.header().replace(b"blk.1.attn_k.weight", b"blk.0.attn_k.weight")
    with pytest.raises(ModelError, match=r"'blk.0.attn_k.weight' appears twice"):
        load(tmp_path, twice + GOOD_BYTES[HEADER:])
    two = GGUF({}, {"a": Stored(F32, (16,), bytes(64)), "b": Stored(F32, (16,), bytes(64))})
    data = two.bytes()
    at = len(two.header()) - 8  # b's offset
    with pytest.raises(ModelError, match="a and b overlap"):
        load(tmp_path, data[:at] + struct.pack("<Q", 32) + data[at + 8 :])
    with pytest.raises(ModelError, match="offset of b: got 33, allowed: a multiple of 32"):
        load(tmp_path, data[:at] + struct.pack("<Q", 33) + data[at + 8 :])
