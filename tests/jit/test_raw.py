"""Raw kernels: right results on CPU tensors, and every bad argument refused by name before anything runs."""

from __future__ import annotations

import ctypes
import math
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import pykern
from pykern.errors import ArgumentError, BuildError, CheckError, GradientError
from pykern.jit import declarations, raw, raw_cuda, signature

torch = pytest.importorskip("torch")

SCALE = """
// __global__ void not_this_one(int);  "__global__ void nor_this(int)"
template <typename T, int N = 1>
__global__ void __launch_bounds__(N * 256, 1) scale(const T* __restrict__ x, T* y, int n, float a) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = T(a * float(x[i]) * N);
}
extern "C" __global__ void fill(int64_t* y, const int64_t value, bool negate) {
  y[blockIdx.x * blockDim.x + threadIdx.x] = negate ? -value : value;
}
"""
SUM = """
#include "core/block.cuh"
struct Smem { float part[32]; float all[64]; };
__global__ void total(const float* x, float* y, int n) {
  PK_SMEM(Smem, s);
  float v = 0;
  for (int i = threadIdx.x; i < n; i += blockDim.x) v += x[i];
  s.all[threadIdx.x] = v;
  __syncthreads();
  if (threadIdx.x == 0) {
    float t = 0;
    for (int i = 0; i < 64; ++i) t += s.all[i];
    y[0] = t;
  }
}
"""


def test_a_template_on_cpu_tensors() -> None:
    kernel = pykern.compile(SCALE).kernel("scale<float>")
    x, y = torch.randn(1000), torch.full((1000,), math.nan)
    kernel[(1000 + 255) // 256, 256](x, y, 1000, 2.0)
    assert torch.equal(y, 2 * x)
    kernel.launch((4, 1), (256, 1, 1), x, y, 10, 3)  # an int for a float parameter is a number
    assert torch.equal(y[:10], 3 * x[:10]) and torch.equal(y[10:], 2 * x[10:])


def test_scalars_arrive_unchanged() -> None:
    kernel = pykern.compile(SCALE).kernel("fill")
    y = torch.zeros(8, dtype=torch.int64)
    for value in (2**62 + 1, -(2**63)):
        kernel[1, 8](y, value, False)
        assert y.tolist() == [value] * 8
    kernel[1, 8](y, 5, True)
    assert y.tolist() == [-5] * 8


def test_the_dialect_shared_memory_and_barriers() -> None:
    x, y = torch.arange(1000, dtype=torch.float32), torch.zeros(1)
    pykern.compile(SUM).kernel("total")[1, 64](x, y, 1000)
    assert y.item() == 499500.0


def test_the_checker_finds_what_a_plain_run_does_not() -> None:
    kernel = pykern.compile(SCALE).kernel("scale<float>")
    x, y = torch.randn(1000), torch.zeros(1000)
    kernel.launch(4, 256, x, y, 1000, 2.0, check=True)
    assert torch.equal(y, 2 * x)
    with pytest.raises(CheckError):
        kernel.launch(4, 256, x, y, 1001, 2.0, check=True)  # one past the end


def test_a_file_is_loaded_and_an_edit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "mine.cuh"
    (tmp_path / "helper.cuh").write_text("constexpr float kBy = 2.0f;\n")
    path.write_text('#include "helper.cuh"\n__global__ void k(float* y) { y[threadIdx.x] *= kBy; }\n')
    kernel = pykern.load(path).kernel("k")
    y = torch.ones(4)
    kernel[1, 4](y)
    (tmp_path / "helper.cuh").write_text("constexpr float kBy = 5.0f;\n")
    kernel[1, 4](y)
    assert y.tolist() == [10.0] * 4
    path.write_text("__global__ void k(float* y, int n) { if (threadIdx.x < n) y[threadIdx.x] = 0; }\n")
    with pytest.raises(ArgumentError, match="arguments: got 1, allowed: 2"):
        kernel[1, 4](y)
    kernel[1, 4](y, 2)
    assert y.tolist() == [0.0, 0.0, 10.0, 10.0]


def test_a_compile_error_names_the_line() -> None:
    kernel = pykern.compile("__global__ void k(float* y) {\n  y[0] = nowhere;\n}\n", name="bad.cuh").kernel("k")
    with pytest.raises(BuildError, match=r"^k: .*bad.cuh:2: .*nowhere"):
        kernel[1, 1](torch.zeros(1))


def x32(n: int = 8) -> object:
    return torch.zeros(n)


BAD = [
    # (arguments, launch options, name in the message, what is allowed in it)
    (lambda: (x32(),), {}, "scale<float>: arguments", "4: (const float* x, float* y, int n, float a)"),
    (lambda: (x32().double(), x32(), 8, 1.0), {}, "x", "float32 for `const float* x`"),
    (lambda: (x32(), x32().half(), 8, 1.0), {}, "y", "float32 for `float* y`"),
    (lambda: (x32().numpy(), x32(), 8, 1.0), {}, "x", "a torch tensor or None"),
    (lambda: (3, x32(), 8, 1.0), {}, "x", "a torch tensor or None"),
    (lambda: (x32(), x32(), 8.0, 1.0), {}, "n", "an int"),
    (lambda: (x32(), x32(), "8", 1.0), {}, "n", "an int"),
    (lambda: (x32(), x32(), x32(1), 1.0), {}, "n", "a number"),
    (lambda: (x32(), x32(), 2**31, 1.0), {}, "n", "-2147483648 to 2147483647"),
    (lambda: (x32(), x32(), -(2**31) - 1, 1.0), {}, "n", "-2147483648 to"),
    (lambda: (x32(), x32(), 8, "1"), {}, "a", "a number"),
    (lambda: (x32(), x32(), 8, None), {}, "a", "a number"),
    (lambda: (x32(), x32(), 8, 1e39), {}, "a", "float32's range"),
    (lambda: (x32(), x32().to("meta"), 8, 1.0), {}, "y", "cpu or cuda"),
    (lambda: (torch.zeros(8).to_sparse(), x32(), 8, 1.0), {}, "x", "strided"),
    (lambda: (x32(), x32(), 8, 1.0), {"grid": 0}, "grid.x", "1 to 2147483647"),
    (lambda: (x32(), x32(), 8, 1.0), {"grid": (1, 65536)}, "grid.y", "1 to 65535"),
    (lambda: (x32(), x32(), 8, 1.0), {"grid": (1, 1, 1, 1)}, "grid", "one to three"),
    (lambda: (x32(), x32(), 8, 1.0), {"grid": 1.5}, "grid", "an int"),
    (lambda: (x32(), x32(), 8, 1.0), {"block": 1025}, "block.x", "1 to 1024"),
    (lambda: (x32(), x32(), 8, 1.0), {"block": (32, 33)}, "block", "at most 1024 threads"),
    (lambda: (x32(), x32(), 8, 1.0), {"block": (1, 1, 65)}, "block.z", "1 to 64"),
    (lambda: (x32(), x32(), 8, 1.0), {"smem": -1}, "smem", "0 to 232448 bytes"),
    (lambda: (x32(), x32(), 8, 1.0), {"smem": True}, "smem", "0 to 232448 bytes"),
    (lambda: (x32(), x32(), 8, 1.0), {"smem": 10**9}, "smem", "0 to 232448 bytes"),
    (lambda: (x32(), x32(), 8, 1.0), {"cluster": 0}, "cluster.x", "1 to 16"),
    (lambda: (x32(), x32(), 8, 1.0), {"cluster": 2}, "cluster", "a divisor of the grid"),
    (lambda: (x32(), x32(), 8, 1.0), {"device": "mps"}, "device", "cpu, cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("args", "options", "name", "allowed"), BAD)
def test_bad_arguments_are_refused_by_name(args, options, name, allowed, monkeypatch: pytest.MonkeyPatch) -> None:
    from pykern.jit import build

    monkeypatch.setattr(build, "variant", lambda *a, **k: pytest.fail("compiled before the arguments were checked"))
    options = dict(options)
    grid, block = options.pop("grid", 1), options.pop("block", 8)
    kernel = pykern.compile(SCALE).kernel("scale<float>")
    with pytest.raises(ArgumentError) as caught:
        kernel.launch(grid, block, *args(), **options)
    assert str(caught.value).startswith(f"{name}: got "), str(caught.value)
    assert allowed in str(caught.value)


def test_gradients_and_lazy_views_are_refused() -> None:
    kernel = pykern.compile("__global__ void k(float* y) { y[0] = 1; }").kernel("k")
    y = torch.zeros(1, requires_grad=True)
    with pytest.raises(GradientError, match="y: raw kernels have no gradient"):
        kernel[1, 1](y)
    with torch.no_grad():
        kernel[1, 1](y)
    assert y.item() == 1
    conj = pykern.compile("__global__ void k(void* y) {}").kernel("k")
    with pytest.raises(ArgumentError, match="y: got a lazily conjugated"):
        conj[1, 1](torch.zeros(2, dtype=torch.complex64).conj())


def test_vector_pointers_must_be_aligned() -> None:
    kernel = pykern.compile("__global__ void k(float4* y) { y[threadIdx.x].x = 1; }").kernel("k")
    base = torch.zeros(64)
    with pytest.raises(ArgumentError, match="a pointer aligned to 16 bytes for `float4"):
        kernel[1, 1](base[(-base.data_ptr() // 4) % 4 + 1 :])
    with pytest.raises(ArgumentError, match="y: got a float16 tensor"):
        kernel[1, 1](base.half())


def test_null_pointers_and_offsets() -> None:
    text = "__global__ void k(const float* x, float* y) { y[threadIdx.x] = x ? x[threadIdx.x] : -1.0f; }"
    kernel = pykern.compile(text).kernel("k")
    x, y = torch.arange(8.0), torch.zeros(8)
    kernel[1, 2](None, y[3:])
    assert y.tolist() == [0, 0, 0, -1, -1, 0, 0, 0]
    kernel[1, 2](x[4:], y)
    assert y.tolist()[:2] == [4, 5]


@pytest.mark.parametrize(
    ("text", "instance", "message"),
    [
        ("int f();", None, "source: got"),
        (SCALE, "scal<float>", "kernel: got 'scal<float>', allowed: scale, fill"),
        (SCALE, "scale", "scale: template arguments: got <>, allowed: T, N"),
        (SCALE, "scale<float, 1, 2>", "template arguments"),
        (SCALE, "fill<float>", "fill: template arguments: got <float>, allowed: none"),
        (SCALE, "scale<float", "kernel: got 'scale<float'"),
        (SCALE, "", "kernel: got ''"),
    ],
)
def test_kernels_that_are_not_there(text: str, instance: str | None, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        source = pykern.compile(text)
        assert instance is not None
        source.kernel(instance)
    assert message in str(caught.value)


def test_odd_inputs_to_compile_and_load(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="source: got"):
        pykern.compile(tmp_path)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"name: got 'a/b.cuh'"):
        pykern.compile(SCALE, name="a/b.cuh")
    with pytest.raises(ArgumentError, match="source: got"):
        pykern.load(tmp_path / "none.cuh")
    assert "scale, fill" in repr(pykern.compile(SCALE))
    assert (
        repr(pykern.compile(SCALE).kernel(" fill ")) == "RawKernel(fill(int64_t* y, const int64_t value, bool negate))"
    )


def params(text: str, instance: str) -> list[tuple[str, str, bool, bool]]:
    name, arguments = signature.parse_instance(instance)
    (declared,) = declarations.declarations(text)[name]
    return [(p.name, p.type, p.pointer, p.const) for p in signature.parameters_of(declared, arguments)]


def test_signatures() -> None:
    text = """
    template <class T, int N = 4, typename U = pk::Vec<T, N>>
    __global__ __launch_bounds__(N * (32 + 1)) void k(const T *__restrict__ const x, U* y, unsigned long long z = 3,
        const __grid_constant__ int w, T s, float a[], int /* unused */, pk::bf16* b) { if (x < y) k2<<<1, 2>>>(x); }
    __global__ void k0(void);
    __global__ void k0(void) {}
    """
    assert params(text, "k<pk::half, 8>") == [
        ("x", "pk::half", True, True),
        ("y", "pk::Vec<pk::half, 8>", True, False),
        ("z", "unsigned long long", False, False),
        ("w", "int", False, True),
        ("s", "pk::half", False, False),
        ("a", "float", True, False),
        ("argument 6", "int", False, False),
        ("b", "pk::bf16", True, False),
    ]
    assert params(text, "k0") == []


def test_half_scalars_are_rounded_to_nearest_even() -> None:
    parameter = signature.Parameter("s", "pk::bf16", False, False)
    for value in (1.0, -2.5, 1.00390625, 1.01171875, 3.3895314e38, math.inf, -0.0, 1e-40):
        bits = signature.scalar(parameter, value).value
        assert bits == torch.tensor(value).bfloat16().view(torch.int16).item() & 0xFFFF, value
    half = signature.Parameter("s", "half", False, False)
    for value in (1.0, 65504.0, 1e-8, 0.1):
        assert signature.scalar(half, value).value == torch.tensor(value).half().view(torch.int16).item() & 0xFFFF
    with pytest.raises(ArgumentError, match="float16's range"):
        signature.scalar(half, 70000.0)


@given(st.integers(-(2**70), 2**70), st.sampled_from(["int", "unsigned", "int64_t", "uint8_t", "short", "size_t"]))
def test_integers_fit_or_are_refused(value: int, type_: str) -> None:
    parameter = signature.Parameter("n", type_, False, False)
    bits = signature.element_size(parameter.dtype or "") * 8
    signed = not (parameter.dtype or "").startswith("u")
    fits = -(2 ** (bits - 1)) <= value < 2 ** (bits - 1) if signed else 0 <= value < 2**bits
    if fits:
        assert signature.scalar(parameter, value).value == value
    else:
        with pytest.raises(ArgumentError):
            signature.scalar(parameter, value)


_WORDS = ["template<class T>", "__global__", "void ", "k", "(int x)", "namespace ", "using a=b;", "#if 1\n", "#else\n"]
_MARKS = ["{", "}", "\n", "#define a a\n", "#endif\n", "a ", "'", '"', "/*", ";"]


@given(
    st.text(alphabet='template<>typename T,int__global__ void k();{}*&/"\\\n ', max_size=200)
    | st.lists(st.sampled_from(_WORDS + _MARKS)).map("".join)
)
def test_the_signature_reader_never_crashes_or_hangs(text: str) -> None:
    started = time.monotonic()
    for several in declarations.declarations(text).values():
        for declared in several:
            try:
                signature.parameters_of(declared, [name for name, default in declared.template if default is None])
            except ArgumentError:
                pass
    declarations.unclosed(text)
    assert time.monotonic() - started < 2


def test_float_scalars() -> None:
    parameter = signature.Parameter("a", "float", False, False)
    assert (
        math.isnan(signature.scalar(parameter, math.nan).value)
        and signature.scalar(parameter, math.inf).value == math.inf
    )
    assert signature.scalar(parameter, 0.1).value == struct.unpack("<f", struct.pack("<f", 0.1))[0]
    assert isinstance(signature.scalar(signature.Parameter("a", "double", False, False), 0.1), ctypes.c_double)
    with pytest.raises(ArgumentError, match="cannot be passed from Python"):
        signature.scalar(signature.Parameter("m", "Config", False, False), 1)


def test_nvrtc_compiles_without_a_gpu() -> None:
    pytest.importorskip("cuda.core", reason="cuda.core is not installed")
    kernel = pykern.compile('#include "core/warp.cuh"\n' + SCALE).kernel("scale<pk::bf16, 2>")
    try:
        cubin, name = raw_cuda.compile_nvrtc(kernel, "90a")
    except Exception as error:
        if "libnvrtc" in str(error) and not isinstance(error, BuildError):
            pytest.skip("libnvrtc is not installed")
        raise
    assert cubin[:4] == b"\x7fELF" and "scale" in name
    bad = pykern.compile("__global__ void k(float* y) {\n  y[0] = nowhere;\n}\n", name="bad.cuh").kernel("k")
    with pytest.raises(BuildError, match=r'^k: bad.cuh:2: identifier "nowhere" is undefined'):
        raw_cuda.compile_nvrtc(bad, "90a")


@pytest.mark.gpu
@pytest.mark.parametrize("nvrtc", [True, False])
def test_on_a_gpu(nvrtc: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if nvrtc and not raw_cuda.has_nvrtc():
        pytest.skip("cuda.core is not installed")
    monkeypatch.setattr(raw_cuda, "has_nvrtc", lambda: nvrtc)
    monkeypatch.setattr(raw_cuda, "_functions", {})
    x = torch.randn(1000, device="cuda")
    y = torch.full_like(x, math.nan)
    kernel = pykern.compile(SCALE).kernel("scale<float>")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        kernel[4, 256](x, y, 1000, 2.0)
    stream.synchronize()
    assert torch.equal(y, 2 * x)
    total, one = pykern.compile(SUM).kernel("total"), torch.zeros(1, device="cuda")
    total[1, 64](torch.ones(1000, device="cuda"), one, 1000)
    assert one.item() == 1000
    with pytest.raises(ArgumentError, match="y: got a tensor on cpu, allowed: a tensor on cuda:0, like x"):
        kernel[4, 256](x, y.cpu(), 1000, 2.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel[4, 256](x, y, 1000, 3.0)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, 3 * x)
    dynamic = pykern.compile(
        "struct S { float v[16384]; };\n__global__ void k(float* y) { PK_DYN_SMEM(S, s); int t = threadIdx.x; "
        "s.v[16383 - t] = t; __syncthreads(); y[t] = s.v[16383 - t]; }"
    ).kernel("k")
    dynamic.launch(1, 32, y, smem=65536)
    assert y[:32].tolist() == [float(i) for i in range(32)]
    ranks = pykern.compile(
        '#include "core/async.cuh"\n__global__ void k(int* y) { y[blockIdx.x] = int(pk::cluster_ctarank()); }'
    ).kernel("k")
    out = torch.full((4,), -1, dtype=torch.int32, device="cuda")
    ranks.launch(4, 1, out, cluster=2)
    assert out.tolist() == [0, 1, 0, 1]
    with pytest.raises(ArgumentError, match="smem"):
        dynamic.launch(1, 32, y, smem=1 << 20)
    assert raw.is_tensor(out)


@pytest.mark.parametrize(
    "body",
    [
        "float s = 0; for (int i = threadIdx.x; i < n; i += 0) s += pk::ld(x + i); pk::st(y + threadIdx.x, s);",
        # Thread 1 would end the wait of thread 0, which lets no other run.
        "if (threadIdx.x == 0) while (*static_cast<volatile float*>(y) != 3.f) {}\n"
        "if (threadIdx.x == 1) pk::st(y, 3.f);",
    ],
    ids=["a loop that never steps", "a wait by volatile loads"],
)
def test_a_loop_without_an_end_is_ended_under_the_checker(body: str) -> None:
    text = f'#include "core/vec.cuh"\n__global__ void runaway(const float* x, float* y, int n) {{\n{body}\n}}'
    kernel = pykern.compile(text).kernel("runaway")
    with pytest.raises(CheckError, match="endless.*spin_until_ge"):
        kernel.launch(1, 32, torch.ones(64), torch.ones(64), 64, check=True)


# ---- what newcomers try: refused by name, before anything is compiled

PLAIN = "template <class T> __global__ void scale(const T* x, T* y, int n, float a) {}"


@pytest.mark.parametrize(
    "path", [3, None, "", b"x.cuh", ["x.cuh"], "/tmp", "/dev/null", "x\0y", "x" * 5000, "none.cuh"], ids=repr
)
def test_load_takes_the_path_of_a_file(path: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^source: got .*, allowed: "):
        pykern.load(path)


def test_load_takes_text(tmp_path: Path) -> None:
    path = tmp_path / "binary.cuh"
    path.write_bytes(b"__global__ \xd0\x00\xff")
    with pytest.raises(ArgumentError, match=r"^source: got .*binary.cuh', allowed: a file of CUDA C\+\+ text"):
        pykern.load(path)


@pytest.mark.parametrize("text", ["", None, 3, b"", "hello", "__global__", "// __global__ void k() {}", "\ud800"])
def test_compile_takes_text_with_a_kernel(text: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^source: got .*, allowed: "):
        pykern.compile(text)


@pytest.mark.parametrize("name", ["", "../x", "a/b", ".", "..", 3, None, "\0", "n" * 300, "x.cuh\n"], ids=repr)
def test_compile_takes_a_plain_name(name: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^name: got .*, allowed: a plain file name"):
        pykern.compile(PLAIN, name=name)


@pytest.mark.parametrize("flags", ["-O3", None, 3, [3], [None], [""], ["a\0b"]], ids=repr)
def test_flags_are_a_list(flags: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^flags: got .*, allowed: a list"):
        pykern.compile(PLAIN, flags=flags)


@pytest.mark.parametrize("instance", [None, 3, "", "scale<", "scale<float>; int x", "scale", "scale<>", "a"], ids=repr)
def test_kernels_are_named_by_text(instance: Any) -> None:
    with pytest.raises(ArgumentError, match="allowed: "):
        pykern.compile(PLAIN).kernel(instance)


@pytest.mark.parametrize(
    "options",
    [
        {"check": 2}, {"check": "yes"}, {"cooperative": "x"}, {"seed": -1}, {"seed": "a"}, {"seed": 1.5},
        {"seed": True}, {"seed": 2**64}, {"device": "nope"}, {"device": 3}, {"device": "cpu:9"}, {"device": "cuda:x"},
        {"device": "cuda:200"}, {"smem": "1"}, {"smem": -1}, {"smem": 232449},
    ],
    ids=str,
)  # fmt: skip
def test_options_of_a_launch_are_named(options: dict[str, Any]) -> None:
    scale, x = pykern.compile(PLAIN).kernel("scale<float>"), torch.zeros(64)
    (name,) = options
    with pytest.raises(ArgumentError, match=rf"^{name}: got .*, allowed: "):
        scale.launch(1, 64, x, x, 64, 2.0, **options)


def test_a_tensor_whose_storage_was_freed() -> None:
    scale, x, y = pykern.compile(PLAIN).kernel("scale<float>"), torch.zeros(64), torch.zeros(64)
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="^x: got a tensor without memory"):
        scale.launch(1, 64, x, y, 64, 2.0)


def test_an_access_that_falls_into_another_library_is_out_of_bounds() -> None:
    """Libraries take up hundreds of megabytes of the address space: a wild address must not count as a constant."""
    unit = pykern.compile(
        """
__constant__ float table[2] = {3.f, 5.f};
__global__ void read(float* y, long long at) { y[threadIdx.x] = y[threadIdx.x + at]; }
__global__ void write(float* y, long long at) { y[threadIdx.x + at] = 1.f; }
__global__ void constant(float* y, long long at) { y[threadIdx.x] = table[threadIdx.x % 2] + at; }"""
    )
    y = torch.zeros(32)
    maps = [line.split() for line in open("/proc/self/maps") if "libtorch_cpu" in line]
    assert maps
    for place in (maps[0], maps[-1]):
        at = (int(place[0].split("-")[0], 16) + 64 - y.data_ptr()) // 4
        for kernel in ("read", "write"):
            with pytest.raises(pykern.CheckError, match="in no tensor"):
                unit.kernel(kernel).launch(1, 32, y, at, check=True)
    unit.kernel("constant").launch(1, 32, y, 1, check=True)
    assert y.tolist() == [4.0, 6.0] * 16
