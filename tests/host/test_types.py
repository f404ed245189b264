"""The number types of the host backend, bit by bit: against exact rounding, numpy, torch and NVIDIA's own headers."""

from __future__ import annotations

import ctypes
import functools
import subprocess
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from _native import ARCH_FLAGS, compile_host, convert, nvcc

NAMES = {"half": "half", "bf16": "bf16", "e4m3": "fp8e4m3", "e5m2": "fp8e5m2"}
STORAGE = {"half": np.uint16, "bf16": np.uint16, "e4m3": np.uint8, "e5m2": np.uint8}
MAX_FINITE = {"half": 65504.0, "bf16": float(torch.finfo(torch.bfloat16).max), "e4m3": 448.0, "e5m2": 57344.0}
# What cvt gives for NaN.
NAN_BITS = {"half": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F}

SOURCE = '#include "host/types.h"\n' + "".join(
    f"""
extern "C" void {short}_to_float(const pk::{name}* in, float* out, long n) {{
  for (long i = 0; i < n; ++i) out[i] = pk::to_float(in[i]);
}}
extern "C" void {short}_from_float(const float* in, pk::{name}* out, long n) {{
  for (long i = 0; i < n; ++i) out[i] = pk::from_float<pk::{name}>(in[i]);
}}
"""
    for short, name in NAMES.items()
)
SOURCE += """
extern "C" void tf32(const float* in, unsigned* out, long n) {
  for (long i = 0; i < n; ++i) out[i] = pk::to_tf32(in[i]);
}
template <class T> void pair(const float* in, unsigned* out, long n) {
  for (long i = 0; i < n / 2; ++i) out[i] = pk::pack2<T>(in[2 * i], in[2 * i + 1]);
}
extern "C" void half_pack2(const float* in, unsigned* out, long n) { pair<pk::half>(in, out, n); }
extern "C" void bf16_pack2(const float* in, unsigned* out, long n) { pair<pk::bf16>(in, out, n); }
template <class T> void unpair(const unsigned* in, float* out, long n) {
  for (long i = 0; i < n; ++i) { const float2 v = pk::unpack2<T>(in[i]); out[2 * i] = v.x; out[2 * i + 1] = v.y; }
}
extern "C" void half_unpack2(const unsigned* in, float* out, long n) { unpair<pk::half>(in, out, n); }
extern "C" void bf16_unpack2(const unsigned* in, float* out, long n) { unpair<pk::bf16>(in, out, n); }
template <class T> void fma2(const unsigned* in, unsigned* out, long n) {
  for (long i = 0; i < n / 3; ++i) out[i] = pk::fma2<T>(in[3 * i], in[3 * i + 1], in[3 * i + 2]);
}
extern "C" void half_fma2(const unsigned* in, unsigned* out, long n) { fma2<pk::half>(in, out, n); }
extern "C" void bf16_fma2(const unsigned* in, unsigned* out, long n) { fma2<pk::bf16>(in, out, n); }
"""


@pytest.fixture(scope="module", params=sorted(ARCH_FLAGS))
def library(request: pytest.FixtureRequest) -> ctypes.CDLL:
    return compile_host(SOURCE, ARCH_FLAGS[request.param])


def decode(short: str, bits: np.ndarray) -> np.ndarray:
    """The value of each bit pattern in float64, from the format's definition."""
    mantissa_bits, exponent_bits = {"half": (10, 5), "bf16": (7, 8), "e4m3": (3, 4), "e5m2": (2, 5)}[short]
    bits = bits.astype(np.int64)
    bias = 2 ** (exponent_bits - 1) - 1
    mantissa = bits & (2**mantissa_bits - 1)
    exponent = bits >> mantissa_bits & (2**exponent_bits - 1)
    sign = np.where(bits >> (mantissa_bits + exponent_bits) & 1, -1.0, 1.0)
    value = np.where(
        exponent == 0,
        np.ldexp(mantissa.astype(np.float64), 1 - bias - mantissa_bits),
        np.ldexp(1 + mantissa / 2.0**mantissa_bits, exponent - bias),
    )
    top = 2**exponent_bits - 1
    if short == "e4m3":
        value = np.where((exponent == top) & (mantissa == 7), np.nan, value)
    else:
        value = np.where(exponent == top, np.where(mantissa == 0, np.inf, np.nan), value)
    return sign * value


def all_bits(short: str) -> np.ndarray:
    return np.arange(2 ** (8 * STORAGE[short]().itemsize), dtype=np.int64).astype(STORAGE[short])


def nearest_even(short: str, x: np.ndarray) -> np.ndarray:
    """Bits of the nearest value of the format, ties to even, from its sorted table: no bit tricks."""
    finite = all_bits(short)[: len(all_bits(short)) // 2]
    values = decode(short, finite)
    finite = finite[np.isfinite(values)]
    values = values[np.isfinite(values)]
    step = values[-1] - values[-2]
    # The value after the largest, to which an overflow would round.
    table = np.concatenate([values, [values[-1] + step]])
    with np.errstate(invalid="ignore"):  # signalling NaN
        magnitude = np.nan_to_num(np.minimum(np.abs(x.astype(np.float64)), table[-1]))
    high = np.clip(np.searchsorted(table, magnitude), 1, len(table) - 1)
    low = high - 1
    middle = (table[low] + table[high]) / 2
    up = (magnitude > middle) | ((magnitude == middle) & (low % 2 == 1))
    index = np.where(up, high, low)
    overflow = index == len(table) - 1
    if short.startswith("e"):  # fp8 saturates
        result = np.where(overflow, finite[-1], finite[np.minimum(index, len(finite) - 1)])
    else:
        infinity = {"half": 0x7C00, "bf16": 0x7F80}[short]
        result = np.where(overflow, infinity, finite[np.minimum(index, len(finite) - 1)])
    sign = np.signbit(x).astype(np.int64) << (8 * STORAGE[short]().itemsize - 1)
    return np.where(np.isnan(x), NAN_BITS[short], result.astype(np.int64) | sign).astype(STORAGE[short])


@functools.cache
def hard_floats(short: str, seed: int = 0) -> np.ndarray:
    """A million floats: every value of the format, every tie and its neighbours, the ends, NaN, random bits."""
    rng, count = np.random.default_rng(seed), 1_000_000
    values = decode(short, all_bits(short)).astype(np.float32)
    values = values[np.isfinite(values)]
    ordered = np.unique(values.astype(np.float64))
    ties = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)  # exact: one bit more than the format
    largest = np.float32(MAX_FINITE[short])
    edge = np.float32(ordered[-1] + (ordered[-1] - ordered[-2]) / 2)
    with np.errstate(over="ignore", invalid="ignore"):
        special = np.array(
            [0, np.inf, np.nan, 1e-45, 1.2e-38, 3.4e38, largest, edge, 464, 465, 480, 61440], np.float32
        )
        near = np.concatenate([values, ties, special])
        near = np.concatenate(
            [near, np.nextafter(near, np.float32(np.inf)), np.nextafter(near, np.float32(-np.inf))]
        )
    nan_payloads = (rng.integers(1, 2**23, 1000) | 0x7F800000).astype(np.uint32)
    bits = rng.integers(0, 2**32, count, dtype=np.uint32)
    # Random bits are mostly out of an fp8's range: half of them are brought into it.
    scaled = (rng.standard_normal(count) * np.exp2(rng.uniform(-12, 10, count))).astype(np.float32)
    rest = count - 2 * near.size - nan_payloads.size
    parts = [
        near,
        -near,
        nan_payloads.view(np.float32),
        bits[: rest // 2].view(np.float32),
        scaled[: rest - rest // 2],
    ]
    return np.concatenate(parts)


@functools.cache
def _expected(short: str) -> np.ndarray:
    return nearest_even(short, hard_floats(short))


@pytest.mark.parametrize("short", NAMES)
def test_to_float_of_every_bit_pattern(library: ctypes.CDLL, short: str) -> None:
    bits = all_bits(short)
    got = convert(library, f"{short}_to_float", bits, np.float32)
    want = decode(short, bits)
    nan = np.isnan(want)
    assert nan.sum() == {"half": 2046, "bf16": 254, "e4m3": 2, "e5m2": 6}[short]
    assert np.array_equal(got[~nan].view(np.uint32), want[~nan].astype(np.float32).view(np.uint32))
    if short == "bf16":  # a shift: the payload stays
        assert np.array_equal(got.view(np.uint32), bits.astype(np.uint32) << 16)
    else:
        assert (got[nan].view(np.uint32) == 0x7FFFFFFF).all()


@pytest.mark.parametrize("short", NAMES)
def test_round_trip_of_every_bit_pattern(library: ctypes.CDLL, short: str) -> None:
    bits = all_bits(short)
    back = convert(
        library,
        f"{short}_from_float",
        convert(library, f"{short}_to_float", bits, np.float32),
        STORAGE[short],
    )
    want = decode(short, bits)
    expected = np.where(np.isnan(want), NAN_BITS[short], bits)
    if short == "e5m2":  # the only 8-bit infinities: they saturate
        expected = np.where(np.isinf(want), (bits & 0x80) | 0x7B, expected)
    assert np.array_equal(back, expected.astype(STORAGE[short]))


@pytest.mark.parametrize("short", NAMES)
def test_from_float_rounds_to_nearest_even(library: ctypes.CDLL, short: str) -> None:
    x = hard_floats(short)
    assert x.size >= 1_000_000
    got = convert(library, f"{short}_from_float", x, STORAGE[short])
    want = _expected(short)
    wrong = np.flatnonzero(got != want)
    assert wrong.size == 0, [(x[i].view(np.uint32), hex(got[i]), hex(want[i])) for i in wrong[:5]]


def test_the_reference_sees_wrong_rounding() -> None:
    """Truncation, ties away and flushed subnormals differ from nearest_even on these inputs."""
    x = hard_floats("bf16")
    bits = x.view(np.uint32)
    number = ~np.isnan(x)
    right = nearest_even("bf16", x)
    assert ((bits >> 16).astype(np.uint16)[number] != right[number]).any()
    with np.errstate(over="ignore"):
        away = ((bits.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    assert (away[number] != right[number]).any()
    half = hard_floats("half")
    flushed = np.where(np.abs(half) < 2.0**-14, np.float32(0), half)
    assert (nearest_even("half", flushed) != nearest_even("half", half)).any()


def test_against_numpy_and_torch(library: ctypes.CDLL) -> None:
    x = hard_floats("half")
    number = ~np.isnan(x)
    with np.errstate(over="ignore"):
        numpy_half = x.astype(np.float16).view(np.uint16)
    got = convert(library, "half_from_float", x, np.uint16)
    assert np.array_equal(got[number], numpy_half[number])
    x = hard_floats("bf16")
    number = ~np.isnan(x)
    torch_bf16 = torch.from_numpy(x).to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16)
    got = convert(library, "bf16_from_float", x, np.uint16)
    assert np.array_equal(got[number], torch_bf16[number])


@pytest.mark.parametrize("short,dtype", [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_against_torch(library: ctypes.CDLL, short: str, dtype: torch.dtype) -> None:
    """Equal wherever torch gives a number. Beyond the largest one the GPU's conversion saturates, infinities too;
    torch gives NaN or inf there (for infinities always, for large numbers before 2.13)."""
    bits = all_bits(short)
    ours = convert(library, f"{short}_to_float", bits, np.float32)
    theirs = torch.from_numpy(bits).view(dtype).float().numpy()
    number = ~np.isnan(theirs)
    assert np.array_equal(np.isnan(ours), np.isnan(theirs))
    assert np.array_equal(ours[number].view(np.uint32), theirs[number].view(np.uint32))

    x = hard_floats(short)
    ours8 = convert(library, f"{short}_from_float", x, np.uint8)
    theirs8 = torch.from_numpy(x).to(dtype).view(torch.uint8).numpy()
    finite = np.isfinite(torch.from_numpy(theirs8).view(dtype).float().numpy()) & np.isfinite(x)
    assert finite.sum() > 400_000
    assert np.array_equal(ours8[finite], theirs8[finite])
    beyond = ~finite & ~np.isnan(x)
    assert np.isinf(x[beyond]).sum() >= 2
    assert (
        np.abs(convert(library, f"{short}_to_float", ours8[beyond], np.float32)) == MAX_FINITE[short]
    ).all()


def test_tf32_keeps_ten_bits_and_rounds_ties_away(library: ctypes.CDLL) -> None:
    rng = np.random.default_rng(1)
    bits = rng.integers(0, 2**32, 500_000, dtype=np.uint32)
    x = bits.view(np.float32)
    got = convert(library, "tf32", x, np.uint32)
    finite = np.isfinite(x)
    assert (got[finite] & 0x1FFF == 0).all()
    expected = ((bits.astype(np.uint64) + 0x1000) & 0xFFFFE000).astype(np.uint32)
    assert np.array_equal(got[finite], expected[finite])
    assert (got[np.isnan(x)] == 0x7FFFFFFF).all()


@pytest.mark.parametrize("short", ["half", "bf16"])
def test_pairs(library: ctypes.CDLL, short: str) -> None:
    x = hard_floats(short)
    x = x[: x.size // 2 * 2]
    single = convert(library, f"{short}_from_float", x, np.uint16)
    packed = np.empty(x.size // 2, np.uint32)
    getattr(library, f"{short}_pack2")(
        ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(packed.ctypes.data), x.size
    )
    assert np.array_equal(packed.view(np.uint16), single)
    unpacked = np.empty(x.size, np.float32)
    getattr(library, f"{short}_unpack2")(
        ctypes.c_void_p(packed.ctypes.data), ctypes.c_void_p(unpacked.ctypes.data), packed.size
    )
    alone = convert(library, f"{short}_to_float", single, np.float32)
    assert np.array_equal(unpacked.view(np.uint32), alone.view(np.uint32))


@pytest.mark.parametrize("short", ["half", "bf16"])
def test_fma2_rounds_once(library: ctypes.CDLL, short: str) -> None:
    """Against exact rational arithmetic, on operands chosen to make double rounding show."""
    rng = np.random.default_rng(2)
    bits = rng.integers(0, 2**16, (300, 3, 2)).astype(np.uint16)
    if short == "half":
        bits = bits & 0xFBFF  # no NaN, no infinity
    else:
        bits = (bits & 0x807F) | (rng.integers(90, 165, bits.shape).astype(np.uint16) << 7)
    # A product that is nearly a tie of c's format, and a c that breaks the tie from far below.
    tie = {"half": [0x3C01, 0x3E00, 0x0001], "bf16": [0x3F81, 0x3FC0, 0x0080]}[short]
    bits[0, :, 0] = tie
    bits[0, :, 1] = [tie[0], tie[1], tie[2] | 0x8000]
    values = decode(short, bits)
    packed = np.ascontiguousarray(bits).view(np.uint32).reshape(-1)
    out = np.empty(300, np.uint32)
    getattr(library, f"{short}_fma2")(
        ctypes.c_void_p(packed.ctypes.data), ctypes.c_void_p(out.ctypes.data), packed.size
    )
    table = all_bits(short)[: 2**15]
    finite = decode(short, table)
    finite = finite[np.isfinite(finite)]
    step = finite[-1] - finite[-2]
    differs_from_naive = 0
    for i in range(300):
        for lane in range(2):
            a, b, c = (Fraction(float(v)) for v in values[i, :, lane])
            exact = a * b + c
            got = int(out[i] >> (16 * lane)) & 0xFFFF
            magnitude = abs(exact)
            if magnitude >= Fraction(float(finite[-1])) + Fraction(float(step)) / 2:
                want = {"half": 0x7C00, "bf16": 0x7F80}[short]
            else:
                high = int(np.searchsorted(finite, float(magnitude)))
                candidates = range(max(high - 2, 0), min(high + 2, len(finite)))
                want = min(candidates, key=lambda k: (abs(Fraction(float(finite[k])) - magnitude), k % 2))
            if exact < 0 or (exact == 0 and got == 0x8000):
                want |= 0x8000
            assert got == want, (i, lane, hex(got), hex(want), values[i, :, lane])
            naive = nearest_even(
                short,
                np.array(
                    [np.float32(values[i, 0, lane] * values[i, 1, lane]) + np.float32(values[i, 2, lane])],
                    np.float32,
                ),
            )
            differs_from_naive += int(naive[0] != got)
    assert differs_from_naive > 0  # float arithmetic would not have been enough


NVIDIA = r"""
// NVIDIA's own host implementations of the same conversions, as a second opinion: no GPU runs here.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cstdio>
#include <cstring>
#include <vector>
static std::vector<unsigned> read_all(const char* path) {
  FILE* f = fopen(path, "rb"); fseek(f, 0, SEEK_END); std::vector<unsigned> v(ftell(f) / 4); rewind(f);
  if (fread(v.data(), 4, v.size(), f) != v.size()) throw 1; fclose(f); return v;
}
int main(int argc, char** argv) {
  FILE* out = fopen(argv[2], "wb");
  auto put = [&](unsigned v) { fwrite(&v, 4, 1, out); };
  auto bits = [](float f) { unsigned u; memcpy(&u, &f, 4); return u; };
  for (unsigned i = 0; i < 65536; ++i) { __half_raw r; r.x = i; put(bits(__half2float(__half(r)))); }
  for (unsigned i = 0; i < 256; ++i) put(bits(__half2float(__half(__nv_cvt_fp8_to_halfraw(i, __NV_E4M3)))));
  for (unsigned i = 0; i < 256; ++i) put(bits(__half2float(__half(__nv_cvt_fp8_to_halfraw(i, __NV_E5M2)))));
  for (unsigned u : read_all(argv[1])) {
    float f; memcpy(&f, &u, 4);
    put(__half_raw(__float2half_rn(f)).x);
    put(__nv_bfloat16_raw(__float2bfloat16_rn(f)).x);
    put(__nv_cvt_float_to_fp8(f, __NV_SATFINITE, __NV_E4M3));
    put(__nv_cvt_float_to_fp8(f, __NV_SATFINITE, __NV_E5M2));
  }
  fclose(out);
}
"""


@pytest.mark.nvcc
def test_against_nvidias_headers(tmp_path: Path) -> None:
    """All 65,536 halves, all fp8, and hard floats, NaN payloads included, as cuda_fp16/bf16/fp8.hpp convert them."""
    library = compile_host(SOURCE)
    program = nvcc(NVIDIA, "-O1", "-arch=sm_80")
    x = np.concatenate([hard_floats(short)[::2] for short in NAMES])
    x.tofile(tmp_path / "in")
    subprocess.run([str(program), str(tmp_path / "in"), str(tmp_path / "out")], check=True, timeout=60)
    theirs = np.fromfile(tmp_path / "out", np.uint32)
    start = 0
    for short in ("half", "e4m3", "e5m2"):
        bits = all_bits(short)
        ours = convert(library, f"{short}_to_float", bits, np.float32).view(np.uint32)
        assert np.array_equal(ours, theirs[start : start + bits.size]), short
        start += bits.size
    table = theirs[start:].reshape(-1, 4)
    assert len(table) == x.size
    for column, short in enumerate(("half", "bf16", "e4m3", "e5m2")):
        ours = convert(library, f"{short}_from_float", x, STORAGE[short])
        wrong = np.flatnonzero(ours != table[:, column])
        assert wrong.size == 0, (
            short,
            [(hex(x[i].view(np.uint32)), hex(ours[i]), hex(table[i, column])) for i in wrong[:5]],
        )
