"""The tensor-core arithmetic of the host backend against numpy, for every shape and type.

The fragments are laid out here from the tables of the PTX manual (element by element), not with the layout helpers
of core/mma.cuh, which have their own test.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np
import pytest
from _native import ARCH_FLAGS, address, compile_host
from hypothesis import given
from hypothesis import strategies as st

TYPES = ["half", "bf16", "tf32", "s8", "e4m3", "e5m2"]
K = {"half": 16, "bf16": 16, "tf32": 8, "s8": 32, "e4m3": 32, "e5m2": 32}
CPP = {"half": "pk::half", "bf16": "pk::bf16", "tf32": "Tf32", "s8": "int8_t", "e4m3": "pk::fp8e4m3"}
CPP["e5m2"] = "pk::fp8e5m2"

SOURCE = '#include "host/mma.h"\n#include <ctime>\nusing namespace pk::host;\n'
SOURCE += """
static void run(WarpOp op, void* d, const unsigned* a, const unsigned* b) {
  MmaLane lane[32];
  void* slots[32];
  for (int l = 0; l < 32; ++l) {
    lane[l] = {static_cast<unsigned*>(d) + 4 * l, a + 4 * l, b + 2 * l};
    slots[l] = &lane[l];
  }
  op(slots);
}
extern "C" double seconds_of_one_mma() {
  unsigned a[32 * 4] = {}, b[32 * 2] = {};
  float d[32 * 4] = {};
  const std::clock_t start = std::clock();  // CPU time: others run too
  for (int i = 0; i < 2000; ++i) run(mma_warp<pk::bf16>, d, a, b);
  return static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC / 2000;
}
extern "C" void wgmma(int is_half, float* d, const unsigned char* smem, uint64_t a, uint64_t b, int n, int scale_d) {
  float* threads[128];
  for (int t = 0; t < 128; ++t) threads[t] = d + t * (n / 2);
  (is_half ? wgmma_warpgroup<pk::half> : wgmma_warpgroup<pk::bf16>)(threads, smem, a, b, n, scale_d);
}
extern "C" const char* problem(uint64_t desc, int rows, uint64_t bytes) {
  return wgmma_desc_problem(desc, rows, bytes);
}
"""
SOURCE = SOURCE.replace("static void run", "using WarpOp = void (*)(void**);\nstatic void run")
for name in TYPES:
    SOURCE += f"""
extern "C" void mma_{name}(void* d, const unsigned* a, const unsigned* b) {{ run(mma_warp<{CPP[name]}>, d, a, b); }}
"""
for x in (1, 2, 4):
    for trans in (0, 1):
        SOURCE += f"""
extern "C" void ldmatrix_{x}_{trans}(const unsigned char* smem, const int* row, unsigned* r) {{
  LdmatrixLane lane[32];
  void* slots[32];
  for (int l = 0; l < 32; ++l) {{ lane[l] = {{smem + row[l], r + {x} * l}}; slots[l] = &lane[l]; }}
  ldmatrix_warp<{x}, {trans}>(slots);
}}
extern "C" void stmatrix_{x}_{trans}(unsigned char* smem, const int* row, const unsigned* r) {{
  StmatrixLane lane[32];
  void* slots[32];
  for (int l = 0; l < 32; ++l) {{ lane[l] = {{smem + row[l], r + {x} * l}}; slots[l] = &lane[l]; }}
  stmatrix_warp<{x}, {trans}>(slots);
}}
"""


@pytest.fixture(scope="module", params=sorted(ARCH_FLAGS))
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    lib = compile_host(SOURCE, ARCH_FLAGS[request.param])
    lib.seconds_of_one_mma.restype = ctypes.c_double
    lib.problem.restype = ctypes.c_char_p
    return lib


# ---- operand values: bits, and the float64 they stand for


@functools.cache
def _fp8_values(name: str) -> np.ndarray:
    import torch

    dtype = torch.float8_e4m3fn if name == "e4m3" else torch.float8_e5m2
    return torch.arange(256, dtype=torch.int64).to(torch.uint8).view(dtype).double().numpy()


def operand(name: str, rng: np.random.Generator, shape: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    if name == "s8":
        bits = rng.integers(-128, 128, shape).astype(np.int8)
        return bits.view(np.uint8), bits.astype(np.float64)
    if name in ("e4m3", "e5m2"):
        values = _fp8_values(name)
        finite = np.flatnonzero(np.abs(values) <= 16)  # the whole grid of small values, subnormals included
        bits = rng.choice(finite, shape).astype(np.uint8)
        return bits, values[bits]
    x = rng.standard_normal(shape).astype(np.float32)
    if name == "half":
        h = x.astype(np.float16)
        return h.view(np.uint16), h.astype(np.float64)
    if name == "bf16":
        bits = (x.view(np.uint32) >> 16).astype(np.uint16)
        return bits, (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return x.view(np.uint32), (x.view(np.uint32) & 0xFFFFE000).view(np.float32).astype(
        np.float64
    )  # low bits ignored


# ---- the tables of the PTX manual: position of element i of a lane's fragment


def a_position(name: str, lane: int, i: int) -> tuple[int, int]:
    g, t, k = lane // 4, lane % 4, K[name]
    if k == 8:
        return (g if i in (0, 2) else g + 8), (t if i < 2 else t + 4)
    per = 2 if k == 16 else 4  # elements in a register
    row = g if i < per or 2 * per <= i < 3 * per else g + 8
    return row, t * per + i % per + (k // 2 if i >= 2 * per else 0)


def b_position(name: str, lane: int, i: int) -> tuple[int, int]:
    g, t, k = lane // 4, lane % 4, K[name]
    if k == 8:
        return (t if i == 0 else t + 4), g
    per = 2 if k == 16 else 4
    return t * per + i % per + (k // 2 if i >= per else 0), g


def d_position(lane: int, i: int) -> tuple[int, int]:
    return (lane // 4 if i < 2 else lane // 4 + 8), lane % 4 * 2 + i % 2


def fragments(name: str, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Registers a[32, 4], b[32, 2] (uint32) of the tiles a[16, K], b[K, 8] given as bits."""
    count = 4 // a.itemsize
    fa = np.array([[a[a_position(name, lane, i)] for i in range(4 * count)] for lane in range(32)], a.dtype)
    fb = np.array([[b[b_position(name, lane, i)] for i in range(2 * count)] for lane in range(32)], a.dtype)
    return fa.view(np.uint32), fb.view(np.uint32)


def run_mma(library: ctypes.CDLL, name: str, fa: np.ndarray, fb: np.ndarray, d: np.ndarray) -> np.ndarray:
    """The tile [16, 8] after the multiplication, from the tile d before it."""
    fd = np.array([[d[d_position(lane, i)] for i in range(4)] for lane in range(32)], d.dtype)
    getattr(library, f"mma_{name}")(
        address(fd), address(np.ascontiguousarray(fa)), address(np.ascontiguousarray(fb))
    )
    out = np.empty_like(d)
    for lane in range(32):
        for i in range(4):
            out[d_position(lane, i)] = fd[lane, i]
    return out


@pytest.mark.parametrize("name", TYPES)
@given(seed=st.integers(0, 2**32 - 1))
def test_mma(library: ctypes.CDLL, name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    a_bits, a = operand(name, rng, (16, K[name]))
    b_bits, b = operand(name, rng, (K[name], 8))
    fa, fb = fragments(name, a_bits, b_bits)
    if name == "s8":
        d = rng.integers(-(2**31), 2**31, (16, 8)).astype(np.int32)
        want = d.astype(np.int64) + (a @ b).astype(np.int64)
        assert np.array_equal(run_mma(library, name, fa, fb, d), want.astype(np.int32))  # wraps around
        return
    d = rng.standard_normal((16, 8)).astype(np.float32)
    got = run_mma(library, name, fa, fb, d)
    want = d + a @ b
    bound = 2.0**-24 * (K[name] + 2) * (np.abs(d) + np.abs(a) @ np.abs(b))
    assert not (np.abs(got - want) > bound).any()
    assert np.isfinite(got).all()


@pytest.mark.parametrize("name", TYPES)
def test_mma_data_tells_registers_apart(library: ctypes.CDLL, name: str) -> None:
    """Swapping any two registers of a fragment, or two lanes, changes the result."""
    rng = np.random.default_rng(3)
    a_bits, _ = operand(name, rng, (16, K[name]))
    b_bits, _ = operand(name, rng, (K[name], 8))
    fa, fb = fragments(name, a_bits, b_bits)
    d = np.zeros((16, 8), np.int32 if name == "s8" else np.float32)
    right = run_mma(library, name, fa, fb, d)
    for i in range(4):
        for j in range(i):
            swapped = fa.copy()
            swapped[:, [i, j]] = swapped[:, [j, i]]
            assert not np.array_equal(run_mma(library, name, swapped, fb, d), right)
    assert not np.array_equal(run_mma(library, name, fa, fb[:, ::-1], d), right)
    assert not np.array_equal(run_mma(library, name, np.roll(fa, 1, 0), fb, d), right)


@pytest.mark.parametrize("name", ["half", "bf16", "e4m3", "e5m2"])
def test_mma_special_values(library: ctypes.CDLL, name: str) -> None:
    """NaN and infinities reach exactly the rows and columns they touch; e4m3 has no infinity, and 0x7f is NaN."""
    rng = np.random.default_rng(4)
    a_bits, _ = operand(name, rng, (16, K[name]))
    b_bits, b = operand(name, rng, (K[name], 8))
    nan = {"half": 0x7E00, "bf16": 0x7FC0, "e4m3": 0x7F, "e5m2": 0x7E}[name]
    infinity = {"half": 0x7C00, "bf16": 0x7F80, "e5m2": 0x7C}.get(name)
    a_bits = a_bits.copy()
    a_bits[5, 3] = nan
    if infinity is not None:
        a_bits[9, K[name] - 1] = infinity
    got = run_mma(library, name, *fragments(name, a_bits, b_bits), np.zeros((16, 8), np.float32))
    assert np.isnan(got[5]).all()
    if infinity is not None:
        last = b[K[name] - 1]
        assert np.array_equal(got[9, last != 0], np.copysign(np.inf, last[last != 0]).astype(np.float32))
    rest = np.delete(got, [5, 9], axis=0)
    assert np.isfinite(rest).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_every_fp8_value_as_operand(library: ctypes.CDLL, name: str) -> None:
    """All 256 bit patterns times one: the widening is exact."""
    values = _fp8_values(name)
    one = {"e4m3": 0x38, "e5m2": 0x3C}[name]
    for start in range(0, 256, 16):
        a_bits = np.zeros((16, 32), np.uint8)
        a_bits[:, 7] = np.arange(start, start + 16)
        b_bits = np.zeros((32, 8), np.uint8)
        b_bits[7] = one
        got = run_mma(library, name, *fragments(name, a_bits, b_bits), np.zeros((16, 8), np.float32))
        assert np.array_equal(got[:, 2].astype(np.float64), values[start : start + 16] + 0.0, equal_nan=True)


def test_mma_is_fast_enough(library: ctypes.CDLL) -> None:
    """Host GEMMs run on it: well under a microsecond, 0.2 to 0.35 here (the best of several, as others run too)."""
    best = min(library.seconds_of_one_mma() for _ in range(10))
    assert best < 2e-6 if library is compile_host(SOURCE, ARCH_FLAGS["baseline"]) else best < 1e-6


# ---- ldmatrix, stmatrix


@pytest.mark.parametrize("trans", [0, 1])
@pytest.mark.parametrize("x", [1, 2, 4])
def test_ldmatrix_and_stmatrix(library: ctypes.CDLL, x: int, trans: int) -> None:
    rng = np.random.default_rng(5)
    smem = rng.integers(0, 256, 8192, dtype=np.uint8)
    # 8 X rows in any order; the lanes beyond them pass addresses that are not used.
    rows = np.full(32, 8000, np.int32)
    rows[: 8 * x] = rng.permutation(256)[: 8 * x] * 16
    r = np.zeros((32, x), np.uint32)
    getattr(library, f"ldmatrix_{x}_{trans}")(address(smem), address(rows), address(r))
    for m in range(x):
        tile = np.stack([smem[rows[8 * m + i] : rows[8 * m + i] + 16].view(np.uint16) for i in range(8)])
        want = (tile.T if trans else tile).copy().view(np.uint32)  # [8, 4]: row l / 4, pair l % 4
        assert np.array_equal(r[:, m].reshape(8, 4), want)
    written = np.zeros_like(smem)
    getattr(library, f"stmatrix_{x}_{trans}")(address(written), address(rows), address(r))
    expected = np.zeros_like(smem)
    for i in range(8 * x):
        expected[rows[i] : rows[i] + 16] = smem[rows[i] : rows[i] + 16]
    assert np.array_equal(written, expected)


# ---- wgmma


def swizzled(tile: np.ndarray, stride: int) -> np.ndarray:
    """Rows of 64 16-bit values as TMA lays them down: 16-byte chunk c of row r at chunk c ^ (r % 8), eight rows in
    1024 bytes, groups `stride` bytes apart."""
    groups = tile.shape[0] // 8
    out = np.zeros(stride * groups, np.uint8)
    chunks = np.ascontiguousarray(tile).view(np.uint8).reshape(-1, 8, 16)
    for r in range(tile.shape[0]):
        for c in range(8):
            at = r // 8 * stride + r % 8 * 128 + (c ^ (r % 8)) * 16
            out[at : at + 16] = chunks[r, c]
    return out


def descriptor(start: int, stride: int) -> int:
    return start >> 4 | 1 << 16 | (stride >> 4) << 32 | 1 << 62


def smem_with(*parts: tuple[int, np.ndarray]) -> np.ndarray:
    raw = np.full(1024 * 230, 0xFF, np.uint8)
    smem = raw[-raw.ctypes.data % 1024 :][: 227 * 1024]
    for at, data in parts:
        smem[at : at + data.size] = data
    return smem


@pytest.mark.parametrize("scale_d", [0, 1])
@pytest.mark.parametrize("name", ["half", "bf16"])
@pytest.mark.parametrize("n", [8, 16, 24, 64, 72, 120, 128, 192, 248, 256])
def test_wgmma(library: ctypes.CDLL, n: int, name: str, scale_d: int) -> None:
    rng = np.random.default_rng(n)
    a_bits, a = operand(name, rng, (64, 64))
    b_bits, b = operand(name, rng, (n, 64))
    stride_b = 2048 if n == 64 else 1024  # groups of eight rows need not follow each other at once
    a_at, b_at = 1024, 64 * 1024
    smem = smem_with((a_at, swizzled(a_bits, 1024)), (b_at, swizzled(b_bits, stride_b)))
    d = rng.standard_normal((64, n)).astype(np.float32)
    t, i = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
    row, column = 16 * (t // 32) + t % 32 // 4 + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * (t % 4) + i % 2
    for kk in range(4):  # the four k steps of a 128-byte row
        fd = np.ascontiguousarray(d[row, column])
        desc_a, desc_b = descriptor(a_at + 32 * kk, 1024), descriptor(b_at + 32 * kk, stride_b)
        assert library.problem(ctypes.c_uint64(desc_a), 64, ctypes.c_uint64(smem.size)) is None
        assert library.problem(ctypes.c_uint64(desc_b), n, ctypes.c_uint64(smem.size)) is None
        library.wgmma(
            int(name == "half"),
            address(fd),
            address(smem),
            ctypes.c_uint64(desc_a),
            ctypes.c_uint64(desc_b),
            n,
            scale_d,
        )
        got = np.empty_like(d)
        got[row, column] = fd
        step = slice(16 * kk, 16 * kk + 16)
        want = scale_d * d + a[:, step] @ b[:, step].T
        bound = 2.0**-24 * 18 * (np.abs(d) + np.abs(a[:, step]) @ np.abs(b[:, step]).T)
        assert not (np.abs(got - want) > bound).any()
        assert np.isfinite(got).all()


def test_every_n_of_wgmma(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(6)
    a_bits, a = operand("bf16", rng, (64, 64))
    b_bits, b = operand("bf16", rng, (256, 64))
    smem = smem_with((0, swizzled(a_bits, 1024)), (8192, swizzled(b_bits, 1024)))
    for n in range(8, 257, 8):
        fd = np.full((128, n // 2), np.nan, np.float32)
        desc_a, desc_b = ctypes.c_uint64(descriptor(0, 1024)), ctypes.c_uint64(descriptor(8192, 1024))
        library.wgmma(0, address(fd), address(smem), desc_a, desc_b, n, 0)
        t, i = np.meshgrid(np.arange(128), np.arange(n // 2), indexing="ij")
        got = np.empty((64, n))
        got[16 * (t // 32) + t % 32 // 4 + 8 * (i % 4 // 2), 8 * (i // 4) + 2 * (t % 4) + i % 2] = fd
        assert not (np.abs(got - a[:, :16] @ b[:n, :16].T) > 1e-4).any(), n


@pytest.mark.parametrize(
    "desc,rows,part",
    [
        (descriptor(1024, 1024) & ~(3 << 62), 64, "128-byte swizzle"),
        (descriptor(1024, 1024) | 1 << 49, 64, "base offset"),
        (descriptor(1024 + 128, 1024), 64, "k step"),
        (descriptor(1024 + 16, 1024), 64, "k step"),
        (descriptor(1024, 0), 64, "stride"),
        (descriptor(1024, 512), 64, "stride"),
        (descriptor(221 * 1024, 1024), 64, "beyond"),
        (descriptor(1024, 8192), 256, "beyond"),
    ],
)
def test_bad_wgmma_descriptors_are_named(library: ctypes.CDLL, desc: int, rows: int, part: str) -> None:
    text = library.problem(ctypes.c_uint64(desc), rows, ctypes.c_uint64(227 * 1024))
    assert text is not None and part in text.decode()


def test_a_wrong_swizzle_is_seen(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(7)
    a_bits, a = operand("bf16", rng, (64, 64))
    b_bits, b = operand("bf16", rng, (8, 64))
    for wrong in (False, True):
        tile = a_bits.view(np.uint8).reshape(-1) if wrong else swizzled(a_bits, 1024)
        smem = smem_with((0, tile), (8192, swizzled(b_bits, 1024)))
        fd = np.zeros((128, 4), np.float32)
        desc_a, desc_b = ctypes.c_uint64(descriptor(0, 1024)), ctypes.c_uint64(descriptor(8192, 1024))
        library.wgmma(0, address(fd), address(smem), desc_a, desc_b, 8, 0)
        want = (a[:, :16] @ b[:, :16].T)[[0, 0], [0, 1]]
        assert np.allclose(fd[0, :2], want, atol=1e-4)  # row 0 is not permuted
        want = (a[:, :16] @ b[:, :16].T)[[3, 3], [0, 1]]
        assert np.allclose(fd[12, :2], want, atol=1e-4) != wrong
