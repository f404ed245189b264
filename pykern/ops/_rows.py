"""What the row kernels share: which group of threads owns a row, and which rows are whole chunks of 16 bytes."""

from __future__ import annotations

from collections.abc import Iterator

from pykern.plan import ceil_div
from pykern.schema import FLOATS, ITEMSIZE

# (chunks of 16 bytes a row may have, threads, chunks a thread): the first that fits. 4 chunks a thread are enough
# bytes in flight for HBM; 8, or 1024 threads, spill: the compiler keeps the row both packed and as floats.
FITS = ((32, 32, 1), (128, 32, 4), (512, 128, 4), (1024, 256, 4), (2048, 512, 4))
LONG_THREADS = 1024


def group(n: int, dtype: str) -> tuple[int, int] | None:
    """(threads, chunks a thread) of a row of ``n`` elements kept in registers; None when it is too long."""
    chunks = ceil_div(n, 16 // ITEMSIZE[dtype])
    return next(((threads, per) for limit, threads, per in FITS if chunks <= limit), None)


def grid_block(rows: int, threads: int) -> tuple[int, int]:
    """Grid and block of a group of ``threads`` per row: four warps share a block."""
    per_block = 4 if threads == 32 else 1
    return ceil_div(rows, per_block), threads * per_block


def whole(n: int, itemsize: int) -> bool:
    """Whether rows of ``n`` contiguous elements are whole chunks of 16 bytes."""
    return n * itemsize % 16 == 0


def lengths(dtype: str) -> Iterator[int]:
    """Row lengths that together reach every group, the kernels for long and for unaligned rows included."""
    chunk = 16 // ITEMSIZE[dtype]
    yield chunk + 1
    for limit, _, _ in FITS:
        yield limit * chunk
    yield FITS[-1][0] * chunk + 1


def every_length() -> Iterator[tuple[str, int]]:
    """(dtype, row length) pairs that reach every variant."""
    for dtype in FLOATS:
        for n in lengths(dtype):
            yield dtype, n
