"""Building and loading variants: right kernels, real errors, edits noticed, nothing left behind."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import pytest

from pykern.errors import ArgumentError, BuildError, CaptureError, ToolchainError
from pykern.jit import build, cache, extension, flags, toolchain

from .conftest import REPO, run_python, settle


def call(variant: build.Variant) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(variant.entry)())


def host(instance: str, **more: object) -> build.Variant:
    return build.variant("ops/k.cuh", instance, backend="host", **more)  # type: ignore[arg-type]


def needed(path: Path) -> list[str]:
    """NEEDED entries of an ELF library."""
    out = subprocess.run(["readelf", "-dW", str(path)], capture_output=True, text=True, check=True).stdout
    return re.findall(r"\(NEEDED\).*\[(.+?)\]", out)


def test_two_variants_of_one_template_are_two_kernels(fake_root: Path) -> None:
    """launcher trap 1: with default flags the second would return, or share state with, the first."""
    one, two = host("marked<5>"), host("answer<42>")
    assert one.entry != two.entry
    assert call(one) == 5
    assert call(two) == 42  # 47 if the function-local static were shared
    again = host("marked<5>")
    assert again.entry == one.entry and again.key == one.key


def test_a_planted_default_build_would_share_state(fake_root: Path, tmp_path: Path) -> None:
    """The kernel above does discriminate: with default flags the two libraries share the static."""
    (tmp_path / "a.cpp").write_text('#include "ops/k.cuh"\n#include "core/export.cuh"\nPK_VARIANT(marked<5>)\n')
    (tmp_path / "b.cpp").write_text('#include "ops/k.cuh"\n#include "core/export.cuh"\nPK_VARIANT(answer<42>)\n')
    build.host_runtime()
    results = []
    for name in "ab":
        out = tmp_path / f"{name}.so"
        command = [str(toolchain.find_cxx()), "-shared", "-fPIC", f"-I{fake_root}", str(tmp_path / f"{name}.cpp")]
        subprocess.run([*command, "-o", str(out)], check=True)
        library = ctypes.CDLL(str(out))
        library.pk_entry.restype = ctypes.c_void_p
        results.append(ctypes.CFUNCTYPE(ctypes.c_int)(library.pk_entry())())
    assert results == [5, 47]


def test_a_host_variant_needs_no_torch_and_exports_one_symbol(fake_root: Path) -> None:
    path = host("answer<1>").path
    assert not [name for name in needed(path) if re.match(r"lib(torch|c10)", name)], needed(path)
    out = subprocess.run(["readelf", "--dyn-syms", "-W", str(path)], capture_output=True, text=True, check=True).stdout
    defined = [line.split()[-1] for line in out.splitlines() if " UND " not in line and "GLOBAL" in line]
    assert defined == ["pk_entry"]
    assert "UNIQUE" not in out


@pytest.mark.parametrize("check", [False, True])
def test_a_real_variant_needs_no_torch_either(check: bool) -> None:
    """The first variant of softmax, with the real headers and runtime; checked ones need no libtsan."""
    from pykern import op as registry
    from pykern.plan import host_target

    _, _, plan = next(registry.sample_plans(host_target(), ["softmax"]))
    launch = plan.launches[0]
    made = build.variant(launch.source, launch.kernel, backend="host", check=check)
    assert not [name for name in needed(made.path) if re.match(r"lib(torch|c10|tsan)", name)], needed(made.path)
    assert made.entry and made.kernel == launch.kernel


def test_a_warm_hit_imports_neither_torch_nor_ninja(fake_root: Path) -> None:
    host("answer<1>")
    code = """
    started = time.perf_counter()
    v = build.variant("ops/k.cuh", "answer<1>", backend="host")
    seconds = time.perf_counter() - started
    imported = [name for name in ("torch", "ninja", "rich") if name in sys.modules]
    print(call(v), v.cached, imported, extension.builds, seconds < 0.3)
    """
    done = run_python(code)
    assert done.stdout.strip() == "1 True [] 0 True", done.stdout + done.stderr


def test_a_header_edited_in_a_running_process_is_picked_up(fake_root: Path) -> None:
    """pains 14: torch's `load` ignores header edits when sources and flags are the same."""
    first = host("answer<10>")
    assert call(first) == 10
    header = fake_root / "core" / "number.cuh"
    header.write_text(header.read_text().replace("= 1;", "= 2;"))
    second = host("answer<10>")
    assert call(second) == 20 and call(first) == 10  # the old kernel stays loaded for launches in flight
    header.write_text(header.read_text().replace("= 2;", "= 1;"))
    third = host("answer<10>")
    assert (third.key, third.entry) == (first.key, first.entry)


def test_the_memo_costs_microseconds(fake_root: Path) -> None:
    host("answer<3>")
    started = time.perf_counter()
    for _ in range(100):
        host("answer<3>")
    assert time.perf_counter() - started < 0.5


def test_keys_hold_contents_not_paths(fake_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pains 3 and 4."""
    first = host("answer<2>")
    moved = tmp_path / "elsewhere" / "src"
    shutil.copytree(fake_root, moved)
    monkeypatch.setattr(build.sources, "root", lambda: moved)
    monkeypatch.setattr(build, "_memo", {})
    before = extension.builds
    assert host("answer<2>").key == first.key and extension.builds == before
    record = (first.path.parent / cache.RECORD).read_text()
    assert str(fake_root) not in record.replace("\\", "")


def test_a_callers_own_file_and_its_key(fake_root: Path, tmp_path: Path) -> None:
    keys = set()
    for place in ("one", "two"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine.cuh").write_text('#include "core/number.cuh"\ninline int f() { return kNumber; }\n')
        variant = build.variant(str(tmp_path / place / "mine.cuh"), "f", backend="host")
        assert call(variant) == 1
        keys.add(variant.key)
    assert len(keys) == 1
    (tmp_path / "two" / "mine.cuh").write_text("inline int f() { return 5; }\n")
    assert call(build.variant(str(tmp_path / "two" / "mine.cuh"), "f", backend="host")) == 5


def recipe(**change: object) -> extension.Recipe:
    base: dict[str, object] = dict(
        label="k", filename="v.cpp", text="t", contents={"a": b"1"}, cflags=["-O2"], cuda_cflags=[], ldflags=[],
        with_cuda=False,
    )  # fmt: skip
    return extension.Recipe(**{**base, **change})  # type: ignore[arg-type]


def test_what_changes_a_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """pains 2: torch's version and ABI are in the key of what links to torch, and of nothing else."""
    keys = [recipe().key()]
    keys += [recipe(contents=c).key() for c in ({"a": b"2"}, {"b": b"1"}, {"a": b"1", "b": b""}, {"a1": b""})]
    keys += [recipe(text="u").key(), recipe(cflags=["-O3"]).key(), recipe(ldflags=["-O2"]).key()]
    keys += [recipe(abi=f"torch 2.{n}").key() for n in (10, 11)]
    monkeypatch.setattr(toolchain, "cxx", lambda: toolchain.Cxx(Path("/usr/bin/g++"), "gcc", "g++ 99.1.0"))
    keys.append(recipe().key())
    assert len(set(keys)) == len(keys)
    assert recipe(label="other").key() == recipe().key()


def test_a_compile_error_names_file_line_and_text(fake_root: Path) -> None:
    (fake_root / "ops" / "bad.cuh").write_text("template <int N> int f() {\n  return nowhere;\n}\n")
    with pytest.raises(BuildError) as caught:
        build.variant("ops/bad.cuh", "f<1>", backend="host")
    message = str(caught.value)
    assert message.startswith("f<1>: ops/bad.cuh:2: ") and "nowhere" in message.splitlines()[0]
    assert "error" in caught.value.log
    assert not list(cache.store().glob(".build-*")) and not list(cache.store().glob("f_1*"))


def test_a_missing_header_gets_a_hint(fake_root: Path) -> None:
    """pains 8."""
    (fake_root / "ops" / "bad.cuh").write_text('#include "core/absent.cuh"\nint f();\n')
    with pytest.raises(BuildError, match=r"ops/bad.cuh:1: core/absent.cuh: No such.*\n  hint: a header is missing"):
        build.variant("ops/bad.cuh", "f", backend="host")


def test_an_undefined_symbol_is_a_build_error_with_its_name(fake_root: Path) -> None:
    (fake_root / "ops" / "bad.cuh").write_text("int absent_function();\ninline int f() { return absent_function(); }\n")
    with pytest.raises(BuildError, match=r"^f: undefined symbol: \w*absent_function"):
        build.variant("ops/bad.cuh", "f", backend="host")


def test_failed_then_fixed(fake_root: Path) -> None:
    """pains 14: nothing of a failed build is imported, by this process or a waiter."""
    path = fake_root / "ops" / "b.cuh"
    path.write_text("inline int f() { return 1 }\n")
    errors: list[BaseException] = []

    def attempt() -> None:
        try:
            build.variant("ops/b.cuh", "f", backend="host")
        except BuildError as error:
            errors.append(error)

    threads = [threading.Thread(target=attempt) for _ in range(4)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert len(errors) == 4
    path.write_text("inline int f() { return 1; }\n")
    assert call(build.variant("ops/b.cuh", "f", backend="host")) == 1


def test_a_corrupt_library_is_rebuilt(fake_root: Path) -> None:
    first = host("answer<6>")
    first.path.unlink()  # not written in place: this process has it mapped
    first.path.write_bytes(b"\x7fELF garbage")
    done = run_python('v = build.variant("ops/k.cuh", "answer<6>", backend="host"); print(call(v), v.cached)')
    assert done.stdout.strip() == "6 False", done.stderr


def test_bad_arguments_are_named(fake_root: Path) -> None:
    for arguments, name in (
        (dict(backend="hip"), "backend"),
        (dict(backend="cuda", arch="sm_90"), "arch"),
        (dict(backend="cuda", arch="90a", check=True), "check"),
    ):
        with pytest.raises(ArgumentError, match=f"^{name}: got "):
            build.variant("ops/k.cuh", "answer<1>", **arguments)  # type: ignore[arg-type]
    for instance in ("", "a\nb"):
        with pytest.raises(ArgumentError, match=r"^instance: got "):
            host(instance)
    with pytest.raises(ArgumentError, match=r"^source: got "):
        build.variant("ops/none.cuh", "f", backend="host")


def test_compiling_during_graph_capture_is_refused(fake_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pains 15: with the advice; a variant that is built already still loads."""
    host("answer<7>")
    monkeypatch.setattr(extension, "capturing", lambda: True)
    monkeypatch.setattr(build, "_memo", {})
    assert call(host("answer<7>")) == 7
    with pytest.raises(CaptureError, match=r"answer<8> is not compiled yet.*pykern warmup"):
        host("answer<8>")
    monkeypatch.undo()


def test_capturing_asks_torch_only_when_cuda_is_in_use(monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"available": False, "initialized": False, "capturing": True}
    cuda = types.SimpleNamespace(
        is_available=lambda: state["available"],
        is_initialized=lambda: state["initialized"],
        is_current_stream_capturing=lambda: state["capturing"],
    )
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert not extension.capturing()
    monkeypatch.setitem(sys.modules, "torch", types.SimpleNamespace(cuda=cuda))  # type: ignore[arg-type]
    assert not extension.capturing()
    state["available"] = True
    assert not extension.capturing()
    state["initialized"] = True
    assert extension.capturing()
    state["capturing"] = False
    assert not extension.capturing()


def test_the_environment_is_put_back(fake_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    monkeypatch.setenv("CC", "weird-cc")
    monkeypatch.delenv("CXX", raising=False)
    before = dict(os.environ)
    host("answer<9>")
    assert dict(os.environ) == before


def test_ninja_is_found_with_a_venv_not_activated(fake_root: Path, tmp_path: Path) -> None:
    """pains 6, through the whole build: PATH holds compilers but no ninja."""
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("g++", "ld", "as", "sh", "cat", "uname", "which"):
        place = shutil.which(name)
        if place is not None:
            (tools / name).symlink_to(place)
    done = run_python(
        'print(call(build.variant("ops/k.cuh", "answer<4>", backend="host")), extension.builds)', PATH=str(tools)
    )
    assert done.stdout.strip() == "4 2", done.stderr


def test_march_falls_back_where_the_cpu_is_older(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flags.platform, "machine", lambda: "x86_64")
    new = frozenset({"avx2", "fma", "bmi2", "f16c", "movbe", "sse4_2", "popcnt", "ssse3"})
    for features, wanted in ((new, ["-march=x86-64-v3"]), (new - {"avx2"}, ["-march=x86-64-v2"]), (frozenset(), [])):
        monkeypatch.setattr(flags, "_cpu_features", lambda features=features: features)
        assert flags.march() == wanted
    monkeypatch.setattr(flags.platform, "machine", lambda: "aarch64")
    assert flags.march() == []


def test_flags_by_compiler() -> None:
    gcc, clang = (toolchain.Cxx(Path("/x"), kind, f"{kind} 14.0.0") for kind in ("gcc", "clang"))
    assert "-fno-gnu-unique" in flags.host(gcc) and "-fno-gnu-unique" not in flags.host(clang)
    for compiler in (gcc, clang):
        assert "-fsanitize=thread" in flags.host(compiler, check=True)
        assert "-fsanitize=thread" not in flags.host(compiler)
    assert not [flag for flag in flags.nvcc("90a") if flag == "-G" or "/" in flag]
    assert "-gencode=arch=compute_90a,code=sm_90a" in flags.nvcc("90a")


@pytest.mark.nvcc
def test_compile_only_reports_resources(fake_root: Path) -> None:
    """pains 13: no GPU, no arch list, no IndexError; through `load`, with the flags that a GPU machine uses."""
    result = build.compile_only("ops/k.cuh", "scale<float, 3>", "90a")
    assert result.registers > 0 and result.spills == 0 and result.local_bytes == 0 and not result.cached
    assert not [name for name in needed(result.path) if re.match(r"lib(torch|c10)", name)], needed(result.path)
    assert any(name.startswith("libcudart") for name in needed(result.path))
    assert build.compile_only("ops/k.cuh", "scale<float, 3>", "90a").cached
    settle(fake_root)
    (fake_root / "host" / "runtime.cpp").write_text("// host sources are in no CUDA key\n")
    assert build.compile_only("ops/k.cuh", "scale<float, 3>", "90a").cached


@pytest.mark.nvcc
def test_each_kernel_of_a_file_has_its_own_figures(fake_root: Path) -> None:
    from pykern.commands._occupancy_build import facts_of

    (fake_root / "ops" / "two.cuh").write_text(
        "__global__ void small(float* p) { p[0] = 1; }\n__global__ void big(float* p) { __shared__ float s[300]; "
        "s[threadIdx.x] = p[threadIdx.x]; __syncthreads(); p[threadIdx.x] = s[299 - threadIdx.x]; }\n"
    )
    for kernel, smem in (("small", 0), ("big", 1200)):
        result = build.compile_only("ops/two.cuh", kernel, "80")
        assert result.smem == smem and facts_of(result.path, kernel).static_smem == smem


@pytest.mark.nvcc
def test_a_missing_brace_of_an_op_is_named(fake_root: Path) -> None:
    (fake_root / "ops" / "open.cuh").write_text("template <int N> __global__ void k(int* p) {\n  if (N) {\n}\n\n")
    with pytest.raises(BuildError, match=r"^k<1>: ops/open.cuh:3: the file ends where a } is missing"):
        build.compile_only("ops/open.cuh", "k<1>", "90a")


@pytest.mark.nvcc
def test_nvcc_errors_and_spills(fake_root: Path) -> None:
    (fake_root / "ops" / "bad.cuh").write_text("template <int N> __global__ void k(int* p) {\n  p[0] = nowhere;\n}\n")
    with pytest.raises(BuildError, match=r'^k<1>: ops/bad.cuh:2: identifier "nowhere" is undefined'):
        build.compile_only("ops/bad.cuh", "k<1>", "90a")
    (fake_root / "ops" / "local.cuh").write_text(
        "template <int N> __global__ void k(int* p, int n) {\n  int a[N];\n"
        "  for (int i = 0; i < n; ++i) a[(i * 7) % N] = p[i];\n  p[threadIdx.x] = a[n % N];\n}\n"
    )
    assert build.compile_only("ops/local.cuh", "k<64>", "80").local_bytes >= 256
    with pytest.raises(BuildError, match="does not know the architecture"):
        build.compile_only("ops/k.cuh", "scale<float, 3>", "30")


@pytest.mark.nvcc
def test_torch_of_another_cuda_is_refused_before_the_build(fake_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ToolchainError, match=r"torch \(CUDA 12.8\) differ"):
        build.compile_only("ops/k.cuh", "scale<float, 5>", "90a")


def test_the_launcher_is_keyed_by_torch() -> None:
    torch = pytest.importorskip("torch")
    assert torch.__version__ in build.torch_abi() and f"cuda {torch.version.cuda}" in build.torch_abi()
    folder = REPO / "pykern" / "launcher"
    assert build.sources.launcher_sources() == (folder / "launcher.cpp", folder / "plan.cpp")


def test_a_library_of_ones_own(fake_root: Path) -> None:
    text = '#include "core/number.cuh"\nextern "C" int f() { return kNumber + EXTRA; }\n'
    arguments = dict(roots=["core/number.cuh"], cflags=["-DEXTRA=4"])
    path = build.library("my lib", "f.cpp", text, **arguments)  # type: ignore[arg-type]
    assert ctypes.CDLL(str(path)).f() == 5 and path.parent.name.startswith("my_lib-")
    assert build.library("my lib", "f.cpp", text, **arguments) == path  # type: ignore[arg-type]
    assert build.library("my lib", "f.cpp", text, **arguments, abi="torch 2.10") != path  # type: ignore[arg-type]


def test_the_runtime_is_two_files_where_it_is_only_a_list(fake_root: Path) -> None:
    parts = '// parts\n#include "host/run.cpp"\n\n#include "host/check_a.cpp"\n#include "host/more.cpp"\n'
    halves = build._runtime_files(parts)
    assert halves == (
        '#include "host/run.cpp"\n#include "host/more.cpp"\n',
        {"checker.cpp": '#include "host/check_a.cpp"\n'},
    )
    whole = ('#include "host/runtime.cpp"\n', {})
    assert build._runtime_files(parts + "int x;\n") == whole  # nothing is ever left out
    assert build._runtime_files('#include "host/run.cpp"\n') == whole
    (fake_root / "host" / "runtime.cpp").write_text('#include "host/run.cpp"\n#include "host/check.cpp"\n')
    (fake_root / "host" / "run.cpp").write_text('int checked(); extern "C" int pkh_version() { return checked(); }\n')
    (fake_root / "host" / "check.cpp").write_text("int checked() { return 9; }\n")
    assert build.host_runtime().pkh_version() == 9


def test_capturing_while_torch_is_half_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compilers run in threads; the first to need torch imports it while others ask whether a graph is captured."""
    import sys
    import types

    from pykern.jit import extension

    half = types.ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", half)
    assert extension.capturing() is False
    half.cuda = types.ModuleType("torch.cuda")  # type: ignore[attr-defined]
    assert extension.capturing() is False
