"""The same kernels on the host backend and, where there is one, on a GPU: conversions bit by bit, fragments, wgmma.

The expected bits come from the pure functions that test_types.py and test_core.py check against independent
references, so on a GPU this compares the host's model with the hardware.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
import torch
from _native import address, compile_host

import pykern

from .test_mma import K, b_position, fragments, operand
from .test_mma import d_position as place
from .test_types import NAMES, hard_floats

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def cases(cpu: list[Any], cuda: list[Any]) -> list[Any]:
    """(device, case): a few on the CPU, whose arithmetic has tests of its own, all of them on a GPU."""
    return [("cpu", c) for c in cpu] + [pytest.param("cuda", c, marks=pytest.mark.gpu) for c in cuda]


SOURCE = """
#include "core/async.cuh"
#include "core/mma.cuh"
#include "core/quant.cuh"
#include "core/vec.cuh"

__global__ void narrow(const float* x, uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  out[8 * i + 0] = pk::from_float<pk::half>(x[i]).bits;
  out[8 * i + 1] = pk::from_float<pk::bf16>(x[i]).bits;
  out[8 * i + 2] = pk::from_float<pk::fp8e4m3>(x[i]).bits;
  out[8 * i + 3] = pk::from_float<pk::fp8e5m2>(x[i]).bits;
  out[8 * i + 4] = pk::to_tf32(x[i]);
  out[8 * i + 5] = pk::pack2<pk::half>(x[i], x[n - 1 - i]);
  out[8 * i + 6] = pk::pack2<pk::bf16>(x[i], x[n - 1 - i]);
  out[8 * i + 7] = 0;
}

__global__ void widen(uint32_t* out) {
  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;  // 65536
  pk::half h;
  pk::bf16 b;
  pk::fp8e4m3 e4;
  pk::fp8e5m2 e5;
  h.bits = b.bits = static_cast<uint16_t>(i);
  e4.bits = e5.bits = static_cast<uint8_t>(i);
  out[4 * i + 0] = __float_as_uint(pk::to_float(h));
  out[4 * i + 1] = __float_as_uint(pk::to_float(b));
  out[4 * i + 2] = __float_as_uint(pk::to_float(e4));
  out[4 * i + 3] = __float_as_uint(pk::to_float(e5));
}

__global__ void packed(const uint32_t* x, uint32_t* out, int n) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  const uint32_t a = x[3 * i], b = x[3 * i + 1], c = x[3 * i + 2];
  uint32_t* o = out + 32 * i;
  o[0] = pk::fma2<pk::half>(a, b, c);
  o[1] = pk::fma2<pk::bf16>(a, b, c);
  o[2] = pk::add2<pk::half>(a, b);
  o[3] = pk::add2<pk::bf16>(a, b);
  o[4] = pk::mul2<pk::half>(a, b);
  o[5] = pk::mul2<pk::bf16>(a, b);
  pk::unpack_u4_pairs<pk::half, 0>(a, o + 6);
  pk::unpack_u4_pairs<pk::half, 8>(a, o + 10);
  pk::unpack_u4_pairs<pk::bf16, 8>(a, o + 14);
  pk::unpack_s8_pairs<pk::half>(a, o + 18);
  pk::unpack_s8_pairs<pk::bf16>(a, o + 20);
  const pk::Vec<float, 4> e4 = pk::unpack_fp8<pk::fp8e4m3>(b), e5 = pk::unpack_fp8<pk::fp8e5m2>(c);
  for (int j = 0; j < 4; ++j) o[22 + j] = __float_as_uint(e4[j]), o[26 + j] = __float_as_uint(e5[j]);
  o[30] = pk::lop3<0x96>(a, b, c) + pk::lop3<0xe8>(a, b, c);
  o[31] = pk::prmt(a, b, c & 0xffff);
}

struct TileSmem {
  alignas(1024) uint16_t words[64 * 64];
};

// One warp loads 32 rows of 16 bytes, of which lane l names row 7 l % 32, and stores what it got elsewhere.
template <int X, bool Trans>
__global__ void matrices(const uint16_t* x, uint32_t* r, uint16_t* y) {
  PK_SMEM(TileSmem, s);
  const int lane = threadIdx.x;
  for (int i = 0; i < 8; ++i) s.words[lane * 8 + i] = x[lane * 8 + i];
  for (int i = 0; i < 8; ++i) s.words[256 + lane * 8 + i] = 0;
  __syncwarp();
  uint32_t v[X];
  pk::ldmatrix<X, Trans>(v, s.words + 7 * lane % 32 * 8);
  for (int i = 0; i < X; ++i) r[lane * X + i] = v[i];
  pk::stmatrix<X, Trans>(s.words + 256 + 7 * lane % 32 * 8, v);
  __syncwarp();
  for (int i = 0; i < 8; ++i) y[lane * 8 + i] = s.words[256 + lane * 8 + i];
}

struct Tf32 {};
template <class T>
__global__ void multiply(const uint32_t* a, const uint32_t* b, uint32_t* d) {
  uint32_t fa[4], fb[2];
  float acc[4];
  int32_t sum[4];
  for (int i = 0; i < 4; ++i) fa[i] = a[4 * threadIdx.x + i];
  for (int i = 0; i < 2; ++i) fb[i] = b[2 * threadIdx.x + i];
  for (int i = 0; i < 4; ++i) acc[i] = __uint_as_float(d[4 * threadIdx.x + i]);
  for (int i = 0; i < 4; ++i) sum[i] = static_cast<int32_t>(d[4 * threadIdx.x + i]);
  constexpr bool kInteger = pk::detail::same<T, int8_t>::value;
  if constexpr (kInteger) pk::mma_m16n8k32_s8(sum, fa, fb);
  else if constexpr (pk::detail::same<T, Tf32>::value) pk::mma_m16n8k8_tf32(acc, fa, fb);
  else if constexpr (sizeof(T) == 1) pk::mma_m16n8k32_fp8<T>(acc, fa, fb);
  else pk::mma_m16n8k16<T>(acc, fa, fb);
  for (int i = 0; i < 4; ++i)
    d[4 * threadIdx.x + i] = kInteger ? static_cast<uint32_t>(sum[i]) : __float_as_uint(acc[i]);
}

template <int N>
struct WgmmaSmem {
  alignas(1024) pk::bf16 a[64 * 64];
  alignas(1024) pk::bf16 b[N * 64];
};
// d[64, N] = a[64, 64] b[N, 64]^T; the threads lay the operands down in the 128-byte swizzle themselves.
template <int N>
__global__ void __launch_bounds__(128) warpgroup(const pk::bf16* a, const pk::bf16* b, float* d) {
  using S = WgmmaSmem<N>;
  PK_SMEM(S, s);
  for (int i = threadIdx.x; i < 64 * 8; i += 128)
    pk::st_vec(s.a + 8 * pk::swizzle_chunk<8>(i / 8, i % 8), pk::ld_vec<pk::bf16, 8>(a + 8 * i));
  for (int i = threadIdx.x; i < N * 8; i += 128)
    pk::st_vec(s.b + 8 * pk::swizzle_chunk<8>(i / 8, i % 8), pk::ld_vec<pk::bf16, 8>(b + 8 * i));
  pk::fence_proxy_async();
  __syncthreads();
  float acc[N / 2];
#pragma unroll
  for (int i = 0; i < N / 2; ++i) acc[i] = 0.f;
  pk::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; ++k)
    pk::wgmma<N, pk::bf16>(acc, pk::wgmma_desc_sw128(s.a + 16 * k), pk::wgmma_desc_sw128(s.b + 16 * k), k != 0);
  pk::wgmma_commit();
  pk::wgmma_wait<0>(acc);
#pragma unroll
  for (int i = 0; i < N / 2; ++i) d[pk::wgmma_row(threadIdx.x, i) * N + pk::wgmma_col(threadIdx.x, i)] = acc[i];
}
"""

# The same functions called one by one, outside a launch.
PURE = """
#include "core/quant.cuh"
extern "C" void narrow(const float* x, unsigned* out, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    out[8 * i + 0] = pk::from_float<pk::half>(x[i]).bits;
    out[8 * i + 1] = pk::from_float<pk::bf16>(x[i]).bits;
    out[8 * i + 2] = pk::from_float<pk::fp8e4m3>(x[i]).bits;
    out[8 * i + 3] = pk::from_float<pk::fp8e5m2>(x[i]).bits;
    out[8 * i + 4] = pk::to_tf32(x[i]);
    out[8 * i + 5] = out[8 * i] | pk::from_float<pk::half>(x[n - 1 - i]).bits << 16;
    out[8 * i + 6] = out[8 * i + 1] | pk::from_float<pk::bf16>(x[n - 1 - i]).bits << 16;
    out[8 * i + 7] = 0;
  }
}
"""
PURE += (
    SOURCE[SOURCE.index("__global__ void widen") : SOURCE.index("struct TileSmem")]
    .replace("__global__ void widen(uint32_t* out) {", 'extern "C" void widen(uint32_t* out, uint32_t i) {')
    .replace("  const uint32_t i = blockIdx.x * blockDim.x + threadIdx.x;  // 65536\n", "")
    .replace(
        "__global__ void packed(const uint32_t* x, uint32_t* out, int n) {",
        'extern "C" void packed(const uint32_t* x, uint32_t* out, int i) {',
    )
    .replace("  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n  if (i >= n) return;\n", "")
)
PURE += """
extern "C" void widen_all(uint32_t* out) { for (uint32_t i = 0; i < 65536; ++i) widen(out, i); }
extern "C" void packed_all(const uint32_t* x, uint32_t* out, int n) { for (int i = 0; i < n; ++i) packed(x, out, i); }
"""


@pytest.fixture(scope="module")
def source() -> pykern.jit.raw.RawSource:
    return pykern.compile(SOURCE, name="fidelity.cuh")


@pytest.fixture(scope="module")
def pure() -> ctypes.CDLL:
    return compile_host(PURE)


def to(device: str, array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(array)).to(device)


def bits_of(tensor: torch.Tensor) -> np.ndarray:
    return tensor.cpu().numpy().view(np.uint32)


def same_bits(got: np.ndarray, want: np.ndarray, columns: list[str], inputs: np.ndarray) -> None:
    wrong = np.argwhere(got != want)
    text = [f"{columns[c]} of {inputs[r]}: {got[r, c]:#x}, expected {want[r, c]:#x}" for r, c in wrong[:8]]
    assert not len(wrong), (len(wrong), text)


@pytest.mark.parametrize("device", DEVICES)
def test_conversions_to_narrow_types(
    source: pykern.jit.raw.RawSource, pure: ctypes.CDLL, device: str
) -> None:
    step = 1 if device == "cuda" else 40
    x = np.concatenate([hard_floats(short)[::step] for short in NAMES])
    got = torch.zeros((x.size, 8), dtype=torch.int32, device=device)
    source.kernel("narrow")[(x.size + 255) // 256, 256](to(device, x), got, x.size)
    want = np.empty((x.size, 8), np.uint32)
    pure.narrow(address(x), address(want), ctypes.c_int64(x.size))
    names = ["half", "bf16", "e4m3", "e5m2", "tf32", "half2", "bf16x2", ""]
    # The low 13 bits of a tf32 are not defined; the tensor cores ignore them.
    clean = np.array([2**32 - 1] * 4 + [0xFFFFE000] + [2**32 - 1] * 3, np.uint32)
    number = ~np.isnan(x)
    got_bits = bits_of(got) & clean
    same_bits(got_bits[number], (want & clean)[number], names, x[number])
    columns = [0, 1, 2, 3]
    same_bits(got_bits[:, columns], want[:, columns], names, x.view(np.uint32))  # NaN too


@pytest.mark.parametrize("device", DEVICES)
def test_conversions_to_float(source: pykern.jit.raw.RawSource, pure: ctypes.CDLL, device: str) -> None:
    got = torch.zeros((65536, 4), dtype=torch.int32, device=device)
    source.kernel("widen")[256, 256](got)
    want = np.empty((65536, 4), np.uint32)
    pure.widen_all(address(want))
    same_bits(bits_of(got), want, ["half", "bf16", "e4m3", "e5m2"], np.arange(65536))


@pytest.mark.parametrize("device", DEVICES)
def test_packed_arithmetic(source: pykern.jit.raw.RawSource, pure: ctypes.CDLL, device: str) -> None:
    n = 200_000 if device == "cuda" else 4000
    x = np.random.default_rng(0).integers(0, 2**32, (n, 3), dtype=np.uint32)
    got = torch.zeros((n, 32), dtype=torch.int32, device=device)
    source.kernel("packed")[(n + 127) // 128, 128](to(device, x.view(np.int32)), got, n)
    want = np.empty((n, 32), np.uint32)
    pure.packed_all(address(x), address(want), n)
    same_bits(bits_of(got), want, [f"word {i}" for i in range(32)], x)


@pytest.mark.parametrize(
    "device,form", cases(["4, true"], [f"{x}, {t}" for x in (1, 2, 4) for t in ("false", "true")])
)
def test_matrix_moves(source: pykern.jit.raw.RawSource, device: str, form: str) -> None:
    x, trans = int(form[0]), form[3:]
    rows = np.random.default_rng(x).integers(0, 2**16, (32, 8)).astype(np.uint16)
    r = torch.zeros((32, x), dtype=torch.int32, device=device)
    y = torch.zeros((32, 8), dtype=torch.int16, device=device)
    source.kernel(f"matrices<{form}>")[1, 32](to(device, rows.view(np.int16)), r, y)
    order = 7 * np.arange(32) % 32
    for m in range(x):
        tile = rows[order[8 * m : 8 * m + 8]]
        want = (tile.T if trans == "true" else tile).copy().view(np.uint32)
        assert np.array_equal(bits_of(r)[:, m].reshape(8, 4), want)
    expected = np.zeros_like(rows)
    expected[order[: 8 * x]] = rows[order[: 8 * x]]
    assert np.array_equal(y.cpu().numpy().view(np.uint16), expected)


CPP = {"half": "pk::half", "bf16": "pk::bf16", "tf32": "Tf32", "s8": "int8_t", "e4m3": "pk::fp8e4m3"}
CPP["e5m2"] = "pk::fp8e5m2"


@pytest.mark.parametrize("device,name", cases(["half", "s8"], list(K)))
def test_mma(source: pykern.jit.raw.RawSource, device: str, name: str) -> None:
    rng = np.random.default_rng(1)
    a_bits, a = operand(name, rng, (16, K[name]))
    b_bits, b = operand(name, rng, (K[name], 8))
    d = rng.integers(-1000, 1000, (16, 8)).astype(np.int32) if name == "s8" else rng.standard_normal((16, 8))
    d = d if name == "s8" else d.astype(np.float32)
    fa, fb = fragments(name, a_bits, b_bits)
    assert b_position(name, 5, 0)[1] == 1  # columns go with lane / 4
    fd = np.array([[d[place(lane, i)] for i in range(4)] for lane in range(32)], d.dtype)
    acc = to(device, fd.view(np.int32))
    source.kernel(f"multiply<{CPP[name]}>")[1, 32](
        to(device, fa.view(np.int32)), to(device, fb.view(np.int32)), acc
    )
    result = acc.cpu().numpy().view(d.dtype)
    got = np.empty_like(d)
    for lane in range(32):
        for i in range(4):
            got[place(lane, i)] = result[lane, i]
    want = d + a @ b
    if name == "s8":
        assert np.array_equal(got, want.astype(np.int32))
        return
    # The tensor cores align products to the largest and cut; fp8 ones of Hopper keep about 13 bits.
    unit = 2.0**-12 if name in ("e4m3", "e5m2") and device == "cuda" else 2.0**-20
    assert not (np.abs(got - want) > unit * (np.abs(d) + np.abs(a) @ np.abs(b))).any()


@pytest.mark.parametrize("device,n", cases([64], [8, 64, 136, 256]))
def test_wgmma(source: pykern.jit.raw.RawSource, device: str, n: int) -> None:
    if device == "cuda" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("wgmma is sm_90a's alone")
    g = torch.Generator().manual_seed(n)
    a, b = (torch.randn(rows, 64, generator=g).bfloat16() for rows in (64, n))
    d = torch.zeros((64, n), device=device)
    source.kernel(f"warpgroup<{n}>")[1, 128](a.to(device), b.to(device), d)
    want = a.double() @ b.double().T
    bound = 2.0**-20 * (a.double().abs() @ b.double().abs().T)
    assert not ((d.cpu().double() - want).abs() > bound).any()
