"""A Zstandard decoder in plain Python, after RFC 8878 (section numbers below are its own). No dictionaries."""

from __future__ import annotations

from pykern.analysis.decompress import Corrupt, copy_match

_WINDOW = 4096  # bits


class _BackBits:
    """A bit stream read from its last byte backwards, as FSE and Huffman streams are; zeros precede it."""

    def __init__(self, data: bytes) -> None:
        if not data or data[-1] == 0:
            raise Corrupt("Zstandard: a bit stream without its end mark")
        self.value = int.from_bytes(data, "little")
        self.left = (len(data) - 1) * 8 + data[-1].bit_length() - 1
        self._base, self._window = self.left + 1, 0

    def read(self, count: int) -> int:
        self.left -= count
        if self.left < 0:
            return (self.value << -self.left) & ((1 << count) - 1)
        if self.left < self._base:
            # The big integer is cut into windows: shifting all of it for every read would be quadratic.
            self._base = max(self.left - _WINDOW, 0)
            self._window = (self.value >> self._base) & ((1 << (2 * _WINDOW)) - 1)
        return (self._window >> (self.left - self._base)) & ((1 << count) - 1)


# A decoding table: per state the symbol, the bits to read and the base of the next state.
_Table = tuple[list[int], list[int], list[int], int]


def _fse_table(counts: list[int], log: int) -> _Table:
    """Spread normalised ``counts`` (-1 for "less than one") over ``1 << log`` states (RFC 8878, 4.1.1)."""
    size = 1 << log
    symbols = [0] * size
    high = size - 1
    following = [0] * len(counts)
    for symbol, count in enumerate(counts):
        if count == -1:
            symbols[high] = symbol
            high -= 1
            following[symbol] = 1
        else:
            following[symbol] = count
    step, position = (size >> 1) + (size >> 3) + 3, 0
    for symbol, count in enumerate(counts):
        for _ in range(max(count, 0)):
            symbols[position] = symbol
            position = (position + step) & (size - 1)
            while position > high:
                position = (position + step) & (size - 1)
    if position:
        raise Corrupt("Zstandard: FSE probabilities do not fill their table")
    bits, base = [0] * size, [0] * size
    for state, symbol in enumerate(symbols):
        value = following[symbol]
        following[symbol] += 1
        bits[state] = log - value.bit_length() + 1
        base[state] = (value << bits[state]) - size
    return symbols, bits, base, log


def _read_fse(data: bytes, pos: int, max_symbol: int, max_log: int) -> tuple[_Table, int]:
    """An FSE table description at ``pos``; returns the table and the position after it."""
    value = int.from_bytes(data[pos : pos + 512], "little")
    log = (value & 15) + 5
    if log > max_log:
        raise Corrupt(f"Zstandard: FSE accuracy {log}, at most {max_log} is allowed here")
    bit, remaining = 4, (1 << log) + 1
    counts: list[int] = []
    while remaining > 1:
        if len(counts) > max_symbol:
            raise Corrupt("Zstandard: more FSE symbols than the alphabet has")
        width = remaining.bit_length()
        low_codes = (1 << width) - 1 - remaining
        code = (value >> bit) & ((1 << (width - 1)) - 1)
        if code < low_codes:
            bit += width - 1
        else:
            code = (value >> bit) & ((1 << width) - 1)
            if code >= 1 << (width - 1):
                code -= low_codes
            bit += width
        count = code - 1
        counts.append(count)
        remaining -= abs(count)
        while count == 0:
            repeat = (value >> bit) & 3
            bit += 2
            counts += [0] * repeat
            if repeat != 3 or len(counts) > max_symbol:
                break
    end = pos + (bit + 7) // 8
    if remaining != 1 or len(counts) > max_symbol + 1 or end > len(data):
        raise Corrupt("Zstandard: a malformed FSE table")
    return _fse_table(counts, log), end


_Huffman = tuple[list[int], list[int], int]  # symbol and length by the next `log` bits


def _read_huffman(data: bytes, pos: int) -> tuple[_Huffman, int]:
    """A Huffman tree description (RFC 8878, 4.2.1); returns its lookup table and the position after it."""
    head = data[pos]
    pos += 1
    if head >= 128:
        count = head - 127
        raw = data[pos : pos + (count + 1) // 2]
        pos += len(raw)
        weights = [nibble for byte in raw for nibble in (byte >> 4, byte & 15)][:count]
    else:
        weights = _fse_weights(data[pos : pos + head])
        pos += head
    total = sum((1 << weight) >> 1 for weight in weights)
    log = total.bit_length()
    rest = (1 << log) - total
    if total == 0 or log > 11 or rest & (rest - 1) or len(weights) > 255:
        raise Corrupt("Zstandard: Huffman weights that are no tree")
    weights.append(rest.bit_length())
    symbols: list[int] = []
    lengths: list[int] = []
    for weight in range(1, log + 1):
        for symbol, own in enumerate(weights):
            if own == weight:
                symbols += [symbol] * (1 << (weight - 1))
                lengths += [log + 1 - weight] * (1 << (weight - 1))
    if len(symbols) != 1 << log:
        raise Corrupt("Zstandard: Huffman weights that are no tree")
    return (symbols, lengths, log), pos


def _fse_weights(data: bytes) -> list[int]:
    (symbols, bits, base, log), pos = _read_fse(data, 0, 12, 6)
    stream = _BackBits(data[pos:])
    states = [stream.read(log), stream.read(log)]
    weights: list[int] = []
    turn = 0
    while len(weights) <= 255:  # two states take turns until the bits run out
        state = states[turn]
        weights.append(symbols[state])
        if stream.left < bits[state]:
            weights.append(symbols[states[1 - turn]])
            break
        states[turn] = base[state] + stream.read(bits[state])
        turn = 1 - turn
    return weights


def _huffman_stream(table: _Huffman, data: bytes, count: int) -> bytes:
    symbols, lengths, log = table
    stream = _BackBits(data)
    value, left = stream.value, stream.left
    mask = (1 << log) - 1
    out = bytearray(count)
    value <<= log  # so that looking `log` bits ahead near the end of the stream reads zeros
    # The big integer is cut into windows: shifting all of it for every symbol would be quadratic.
    base, window = left, 0
    for index in range(count):
        if left < base or index == 0:
            base = max(left + log - 4096, 0)
            window = (value >> base) & ((1 << 4096) - 1)
        code = (window >> (left - base)) & mask
        out[index] = symbols[code]
        left -= lengths[code]
        if left < 0:
            raise Corrupt("Zstandard: a Huffman stream that ends early")
    if left:
        raise Corrupt("Zstandard: a Huffman stream with bits left over")
    return bytes(out)


def _predefined(text: str, log: int) -> _Table:
    return _fse_table([int(word) for word in text.split()], log)


_LL_DEFAULT = "4 3 2 2 2 2 2 2 2 2 2 2 2 1 1 1 2 2 2 2 2 2 2 2 2 3 2 1 1 1 1 1 -1 -1 -1 -1"
_ML_DEFAULT = (
    "1 4 3 2 2 2 2 2 2 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1"
    " -1 -1 -1 -1 -1 -1 -1"
)
_OF_DEFAULT = "1 1 1 1 1 1 2 2 2 1 1 1 1 1 1 1 1 1 1 1 1 1 1 1 -1 -1 -1 -1 -1"


def _codes(plain: int, first: int, extra: list[int]) -> list[tuple[int, int]]:
    """(base value, extra bits) by code: ``plain`` codes of one value each, then ranges of ``extra`` bits."""
    rows = [(first + code, 0) for code in range(plain)]
    base = first + plain
    for bits in extra:
        rows.append((base, bits))
        base += 1 << bits
    return rows


_LL_CODES = _codes(16, 0, [1, 1, 1, 1, 2, 2, 3, 3, 4, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])
_ML_CODES = _codes(32, 3, [1, 1, 1, 1, 2, 2, 3, 3, 4, 4, 5, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16])


class _Frame:
    """What one frame's blocks share: the Huffman tree, the three FSE tables and the last three offsets."""

    def __init__(self) -> None:
        self.huffman: _Huffman | None = None
        self.tables: list[_Table | None] = [None, None, None]
        self.offsets = [1, 4, 8]


def decode_frames(data: bytes, size: int) -> bytes:
    """Every frame in ``data``, at most ``size`` bytes in all; raises Corrupt. Checksums are not verified."""
    out = bytearray()
    pos = 0
    try:
        while pos + 4 <= len(data):
            magic = int.from_bytes(data[pos : pos + 4], "little")
            if magic & 0xFFFFFFF0 == 0x184D2A50:  # a skippable frame
                pos += 8 + int.from_bytes(data[pos + 4 : pos + 8], "little")
            elif magic == 0xFD2FB528:
                pos = _decode_frame(data, pos + 4, out, size)
            else:
                break  # padding behind the last frame
    except IndexError:
        raise Corrupt("Zstandard data ends in the middle of a block") from None
    return bytes(out)


def _decode_frame(data: bytes, pos: int, out: bytearray, size: int) -> int:
    descriptor = data[pos]
    pos += 1
    single = descriptor >> 5 & 1
    if descriptor & 3:
        raise Corrupt("Zstandard: needs a dictionary, which no fat binary carries")
    pos += (0 if single else 1) + ((1 if single else 0, 2, 4, 8)[descriptor >> 6])
    frame = _Frame()
    while True:
        header = int.from_bytes(data[pos : pos + 3], "little")
        if pos + 3 > len(data):
            raise IndexError
        pos += 3
        kind, length = header >> 1 & 3, header >> 3
        stored = 1 if kind == 1 else length
        if pos + stored > len(data) or kind == 3:
            raise Corrupt("Zstandard: a malformed block header")
        if kind == 0:
            out += data[pos : pos + length]
        elif kind == 1:
            if len(out) + length > size:
                raise Corrupt(f"Zstandard: a run leaves the {size}-byte image")
            out += data[pos : pos + 1] * length
        else:
            _decode_block(data[pos : pos + length], frame, out, size)
        if len(out) > size:
            raise Corrupt(f"Zstandard: more than the {size} bytes its header says")
        pos += stored
        if header & 1:
            return pos + (4 if descriptor >> 2 & 1 else 0)  # the checksum is of no use to a reader of ELF


def _literals(block: bytes, frame: _Frame) -> tuple[bytes, int]:
    """The literals section of a block; returns its bytes and the position after it."""
    kind, form = block[0] & 3, block[0] >> 2 & 3
    if kind < 2:
        width, shift = {0: (1, 3), 2: (1, 3), 1: (2, 4), 3: (3, 4)}[form]
        count = int.from_bytes(block[:width], "little") >> shift
        if kind == 1:
            return block[width : width + 1] * count, width + 1
        return block[width : width + count], width + count
    width, bits = ((3, 10), (3, 10), (4, 14), (5, 18))[form]
    value = int.from_bytes(block[:width], "little") >> 4
    count, stored = value & ((1 << bits) - 1), value >> bits
    end, pos = width + stored, width
    if end > len(block):
        raise IndexError
    if kind == 2:
        frame.huffman, pos = _read_huffman(block, pos)
    if frame.huffman is None:
        raise Corrupt("Zstandard: a block repeats a Huffman tree that was never sent")
    if form == 0:
        return _huffman_stream(frame.huffman, block[pos:end], count), end
    sizes = [int.from_bytes(block[pos + 2 * i : pos + 2 * i + 2], "little") for i in range(3)]
    pos += 6
    each = (count + 3) // 4
    parts = []
    for index in range(4):
        stop = pos + sizes[index] if index < 3 else end
        if stop > end:
            raise Corrupt("Zstandard: Huffman streams that overlap")
        parts.append(_huffman_stream(frame.huffman, block[pos:stop], each if index < 3 else count - 3 * each))
        pos = stop
    return b"".join(parts), end


def _sequence_tables(block: bytes, pos: int, frame: _Frame) -> int:
    modes = block[pos]
    pos += 1
    kinds = ((6, _LL_DEFAULT, 6, 35, 9), (4, _OF_DEFAULT, 5, 31, 8), (2, _ML_DEFAULT, 6, 52, 9))
    for index, (shift, default, log, max_symbol, max_log) in enumerate(kinds):
        mode = modes >> shift & 3
        if mode == 0:
            frame.tables[index] = _predefined(default, log)
        elif mode == 1:
            frame.tables[index] = ([block[pos]], [0], [0], 0)
            pos += 1
        elif mode == 2:
            frame.tables[index], pos = _read_fse(block, pos, max_symbol, max_log)
        elif frame.tables[index] is None:
            raise Corrupt("Zstandard: a block repeats a table that was never sent")
    return pos


def _decode_block(block: bytes, frame: _Frame, out: bytearray, size: int) -> None:
    literals, pos = _literals(block, frame)
    count = block[pos]
    pos += 1
    if count >= 128:
        if count == 255:
            count = (block[pos] | block[pos + 1] << 8) + 0x7F00
            pos += 2
        else:
            count = (count - 128 << 8) + block[pos]
            pos += 1
    used = 0
    if count:
        pos = _sequence_tables(block, pos, frame)
        used = _run_sequences(_BackBits(block[pos:]), count, literals, frame, out, size)
    out += literals[used:]


def _run_sequences(
    stream: _BackBits, count: int, literals: bytes, frame: _Frame, out: bytearray, size: int
) -> int:
    ll_table, of_table, ml_table = (table for table in frame.tables if table is not None)
    offsets, read, used = frame.offsets, stream.read, 0
    ll, of, ml = read(ll_table[3]), read(of_table[3]), read(ml_table[3])
    for index in range(count):
        of_code = of_table[0][of]
        value = (1 << of_code) + read(of_code)
        base, bits = _ML_CODES[ml_table[0][ml]]
        match = base + read(bits)
        base, bits = _LL_CODES[ll_table[0][ll]]
        length = base + read(bits)
        if value > 3:
            offsets[:] = [value - 3, offsets[0], offsets[1]]
        else:
            which = value if length == 0 else value - 1
            offset = offsets[which] if which < 3 else offsets[0] - 1
            if which:
                offsets[:] = [offset, offsets[0], offsets[1] if which > 1 else offsets[2]]
        if used + length > len(literals):
            raise Corrupt("Zstandard: more literals used than the block has")
        out += literals[used : used + length]
        used += length
        copy_match(out, offsets[0], match, size)
        if index + 1 < count:
            ll = ll_table[2][ll] + read(ll_table[1][ll])
            ml = ml_table[2][ml] + read(ml_table[1][ml])
            of = of_table[2][of] + read(of_table[1][of])
    if stream.left != 0:
        raise Corrupt("Zstandard: a sequence stream that does not end where it should")
    return used
