"""The two compression schemes of CUDA fat binaries, in plain Python: LZ4 blocks and Zstandard frames.

``nvcc`` 13 compresses with Zstandard by default and with LZ4 for ``--compress-mode=speed``. Nothing outside
the standard library is needed; where ``compression.zstd`` (Python 3.14) or the ``zstandard`` package is
present it is used, because it is far faster. Written from the LZ4 block format description and RFC 8878
(dictionaries, which fat binaries do not use, are refused by name).
"""

from __future__ import annotations

from pykern.errors import ArgumentError

MAX_BYTES = 1 << 30  # no image in a fat binary is larger; a corrupt header must not allocate more


class Corrupt(ArgumentError):
    """Compressed data that breaks its format."""


def lz4_block(data: bytes, size: int) -> bytes:
    """Decode one LZ4 block to exactly ``size`` bytes; raises Corrupt otherwise."""
    _check_size(size)
    out = bytearray()
    pos, end = 0, len(data)
    try:
        while pos < end:
            token = data[pos]
            pos += 1
            literals, pos = _lz4_length(data, pos, token >> 4)
            if pos + literals > end:
                raise IndexError
            out += data[pos : pos + literals]
            pos += literals
            if pos >= end or len(out) >= size:
                break
            offset = data[pos] | data[pos + 1] << 8
            length, pos = _lz4_length(data, pos + 2, token & 15)
            copy_match(out, offset, length + 4, size)
    except IndexError:
        raise Corrupt("LZ4 data ends in the middle of a sequence") from None
    if len(out) != size:
        raise Corrupt(f"LZ4 data decodes to {len(out)} bytes where its header says {size}")
    return bytes(out)


def _lz4_length(data: bytes, pos: int, length: int) -> tuple[int, int]:
    if length == 15:
        while True:
            byte = data[pos]
            pos += 1
            length += byte
            if byte != 255:
                break
    return length, pos


def copy_match(out: bytearray, offset: int, length: int, size: int) -> None:
    """Append ``length`` bytes from ``offset`` back; source and target may overlap."""
    start = len(out) - offset
    if offset == 0 or start < 0 or len(out) + length > size:
        raise Corrupt(f"a match of {length} bytes, {offset} back, leaves the {size}-byte image")
    if offset >= length:
        out += out[start : start + length]
    else:
        pattern = bytes(out[start:])
        out += (pattern * (length // offset + 1))[:length]


def zstd(data: bytes, size: int) -> bytes:
    """Decode Zstandard ``data`` to exactly ``size`` bytes; raises Corrupt otherwise."""
    _check_size(size)
    out = _library_zstd(data, size)
    if out is None:
        from pykern.analysis.zstd import decode_frames

        out = decode_frames(data, size)
    if len(out) != size:
        raise Corrupt(f"Zstandard data decodes to {len(out)} bytes where its header says {size}")
    return out


def _check_size(size: int) -> None:
    if not 0 <= size <= MAX_BYTES:
        raise Corrupt("decompressed size", size, f"0 to {MAX_BYTES} bytes")


def _library_zstd(data: bytes, size: int) -> bytes | None:
    try:
        from compression import zstd as library  # Python 3.14
    except ImportError:
        try:
            import zstandard
        except ImportError:
            return None
        try:
            return zstandard.ZstdDecompressor().decompress(data, max_output_size=size)
        except zstandard.ZstdError as error:
            raise Corrupt(f"Zstandard: {error}") from None
    try:
        return library.ZstdDecompressor().decompress(data, max_length=size + 1)
    except library.ZstdError as error:
        raise Corrupt(f"Zstandard: {error}") from None
