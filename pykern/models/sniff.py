"""What a file is, whatever its name says: for files that are not what they are called."""

from __future__ import annotations

from pathlib import Path

from pykern.errors import ModelError

GGUF = "a GGUF file"
SAFETENSORS = "a safetensors file"
_STARTS = (
    (b"GGUF", GGUF),
    (b"PK\x03\x04", "a zip archive, as PyTorch's .bin and .pt files are"),
    (b"\x80\x02", "a Python pickle, as old .bin and .pt files are"),
    (b"version https://git-lfs", "a Git LFS pointer in the place of the model: run `git lfs pull`"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"<!DOCTYPE", "a web page"),
    (b"<html", "a web page"),
    (b"lmgg", "a file from before GGUF"),  # ggml, ggmf and ggjt, as little-endian numbers
    (b"fmgg", "a file from before GGUF"),
    (b"tjgg", "a file from before GGUF"),
)


def kind_of(path: Path) -> str:
    """What the first bytes of ``path`` show it to be, in words; "" for what is not known. ModelError where it cannot be
    read."""
    if path.exists() and not path.is_file():
        raise ModelError(f"{path.name}: got a folder, device or pipe, allowed: a file")
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = file.read(32)
    except OSError as error:
        raise ModelError(f"{path.name}: {error.strerror or error}") from error
    if not head:
        return "an empty file"
    for start, kind in _STARTS:
        if head.startswith(start):
            return kind
    # The length of a JSON object in 8 bytes, then the object.
    if head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= size - 8:
        return SAFETENSORS
    return ""
