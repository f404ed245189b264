"""Finding compilers: nothing is asked for before it is needed, and what is set wrongly is named."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

import pytest

from pykern.errors import ArgumentError, ToolchainError
from pykern.jit import limits, toolchain

from .conftest import run_python


def script(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n" + body)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def toolkit(home: Path, version: str = "13.0.88", gcc_max: int = 15, lib: str = "lib64", link: bool = True) -> Path:
    """A folder that looks like a CUDA toolkit."""
    script(home / "bin" / "nvcc", f'echo "Cuda compilation tools, release 13.0, V{version}"\n')
    (home / "bin" / "nvcc.profile").write_text("")
    (home / "include" / "crt").mkdir(parents=True)
    (home / "include" / "crt" / "host_config.h").write_text(
        f"#if __GNUC__ > {gcc_max}\n#error -- unsupported GNU version\n#endif\n#if (__clang_major__ >= 21)\n#endif\n"
    )
    (home / lib).mkdir(parents=True)
    (home / lib / "libcudart.so.13").write_text("")
    if link:
        (home / lib / "libcudart.so").write_text("")
    return home


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with no CUDA settings and an empty PATH of our own."""
    for name in ("CUDA_HOME", "CUDA_PATH", "CXX", "CC"):
        monkeypatch.delenv(name, raising=False)
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    monkeypatch.setenv("PATH", str(bin_dir))
    monkeypatch.setattr(toolchain, "_wheel_homes", lambda: [])
    return bin_dir


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (":/usr/local/cuda-12.8", "no ':'"),  # pains 10
        ("/nonexistent/cuda", "no such folder"),
        ("{home}/include", "no bin/nvcc in it"),
        ("{home}/bin", "did you mean {home}"),
    ],
)
@pytest.mark.parametrize("name", ["CUDA_HOME", "CUDA_PATH"])
def test_a_bad_cuda_home_is_named(
    bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, says: str
) -> None:
    home = toolkit(tmp_path / "cuda")
    shutil.copy(home / "bin" / "nvcc", bare / "nvcc")  # a good nvcc on PATH does not excuse a bad setting
    value, says = (text.format(tmp=tmp_path, home=home) for text in (value, says))
    monkeypatch.setenv(name, value)
    with pytest.raises(ToolchainError) as caught:
        toolchain.find_cuda()
    assert name in str(caught.value) and repr(value) in str(caught.value) and says in str(caught.value)


def test_cuda_home_wins_over_path(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = toolkit(tmp_path / "one", "13.0.1"), toolkit(tmp_path / "two", "13.1.2")
    (bare / "nvcc").symlink_to(one / "bin" / "nvcc")
    assert toolchain.find_cuda().version == "13.0.1" and toolchain.find_cuda().origin == "PATH"
    assert toolchain.find_cuda().home == one  # through the symlink
    monkeypatch.setenv("CUDA_HOME", str(two))
    found = toolchain.find_cuda()
    assert (found.version, found.home, found.origin, found.major) == ("13.1.2", two, "CUDA_HOME", 13)
    assert (found.gcc_max, found.clang_max) == (15, 20)


def test_nvcc_that_is_a_wrapper_is_asked(bare: Path, tmp_path: Path) -> None:
    """launcher trap 3: dirname(dirname(which nvcc)) would be wrong."""
    home = toolkit(tmp_path / "real")
    script(
        bare / "nvcc",
        f'if [ "$1" = --dryrun ]; then echo "#$ TOP={home}/bin/.." >&2; else exec {home}/bin/nvcc "$@"; fi\n',
    )
    assert toolchain.find_cuda().home == home


def test_nvcc_that_is_no_nvcc(bare: Path) -> None:
    script(bare / "nvcc", "echo hello\n")
    with pytest.raises(ToolchainError, match="is no working nvcc"):
        toolchain.find_cuda()


def test_wheel_layout(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NVIDIA's wheels: nvidia/cu13, `lib` and no `lib64`, no libcudart.so. The newest major is taken."""
    monkeypatch.undo()
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(bare))
    site = tmp_path / "site"
    home = toolkit(site / "nvidia" / "cu13", lib="lib", link=False)
    toolkit(site / "nvidia" / "cu9")
    monkeypatch.syspath_prepend(str(site))
    found = toolchain.find_cuda()
    assert (found.home, found.origin) == (home, "wheel")
    assert found.libcudart == home / "lib" / "libcudart.so.13"


def test_nothing_found_says_what_to_do(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if Path("/usr/local/cuda/bin/nvcc").exists():
        monkeypatch.setattr(toolchain, "USUAL", Path("/nonexistent"))
    assert not toolchain.has_cuda()
    with pytest.raises(ToolchainError, match=r"pip install '.\[cuda\]'"):
        toolchain.find_cuda()
    with pytest.raises(ToolchainError, match="install g\\+\\+"):
        toolchain.find_cxx()


def test_cxx_of_the_environment(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(bare / "c++", "echo 'c++ (Debian 12.2.0-14) 12.2.0'\n")
    mine = script(tmp_path / "mine", "echo 'Debian clang version 14.0.6'\n")
    assert toolchain.cxx().version == "g++ 12.2.0"
    monkeypatch.setenv("CXX", str(mine))
    assert (toolchain.cxx().kind, toolchain.cxx().version, toolchain.cxx().major) == ("clang", "clang 14.0.6", 14)
    monkeypatch.setenv("CXX", "nope++")
    with pytest.raises(ToolchainError, match=r"CXX: got 'nope\+\+'"):
        toolchain.find_cxx()
    monkeypatch.setenv("CXX", str(script(tmp_path / "odd", "echo what\n")))
    with pytest.raises(ToolchainError, match="is no C\\+\\+ compiler"):
        toolchain.cxx()


def test_a_replaced_compiler_is_identified_anew(bare: Path) -> None:
    script(bare / "g++", "echo 'g++ (X) 12.2.0'\n")
    assert toolchain.cxx().version == "g++ 12.2.0"
    script(bare / "g++", "echo 'g++ (Xy) 13.1.0'\n")
    assert toolchain.cxx().version == "g++ 13.1.0"


def test_nvcc_of_another_major_than_torch(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pains 12: torch's `load` would compile and crash later."""
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda")))
    found = toolchain.find_cuda()
    toolchain.check_torch_cuda(found, "13.1")
    toolchain.check_torch_cuda(found, None)
    with pytest.raises(ToolchainError, match=r"nvcc 13.0.88 .*torch \(CUDA 12.8\).*CUDA_HOME to a CUDA 12 toolkit"):
        toolchain.check_torch_cuda(found, "12.8")


def test_a_host_compiler_that_nvcc_refuses(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pains 12: another g++ is passed as -ccbin, or the error says which to install."""
    monkeypatch.setenv("CUDA_HOME", str(toolkit(tmp_path / "cuda", gcc_max=14)))
    script(bare / "g++", "echo 'g++ (X) 15.1.0'\n")
    with pytest.raises(ToolchainError, match=r"does not accept g\+\+ 15.1.0 .*up to 14; install g\+\+-14.*-ccbin"):
        toolchain.host_compiler(toolchain.find_cuda())
    other = script(bare / "g++-13", "echo 'g++-13 (X) 13.3.0'\n")
    assert toolchain.host_compiler(toolchain.find_cuda()).path == other


def test_ninja_of_a_venv_that_is_not_activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """pains 6."""
    pytest.importorskip("ninja")
    monkeypatch.setenv("PATH", "/nonexistent")
    found = toolchain.find_ninja()
    assert os.access(found, os.X_OK) and found.name == "ninja"


def test_nothing_is_looked_for_before_a_build() -> None:
    """pains 7: no compiler, no torch, no ninja for importing and for showing the configuration."""
    code = """
    import pykern.jit.target, pykern.jit.flags
    cache.show(); limits = __import__("pykern.jit.limits").jit.limits; limits.jobs(True)
    print([name for name in ("torch", "ninja", "rich", "torch.utils.cpp_extension") if name in sys.modules])
    """
    done = run_python(code, PATH="/nonexistent", CUDA_HOME=":/bad")
    assert done.stdout.strip() == "[]", done.stderr


def test_jobs_are_capped_by_memory_and_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """pains 9."""
    for name in ("PYKERN_JOBS", "MAX_JOBS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(limits, "cores", lambda: 64)
    for gib, cuda, host in ((24, 8, 24), (2, 1, 2), (0, 1, 1), (10_000, 64, 64)):
        monkeypatch.setattr(limits, "free_memory", lambda gib=gib: gib << 30)
        assert (limits.jobs(True), limits.jobs(False)) == (cuda, host)
    monkeypatch.setenv("MAX_JOBS", "3")
    assert limits.jobs(False) == 3
    monkeypatch.setenv("PYKERN_JOBS", "2")
    assert limits.jobs(False) == 2
    monkeypatch.setenv("PYKERN_JOBS", "")
    assert limits.jobs(False) == 3
    monkeypatch.setattr(limits, "free_memory", lambda: None)
    assert limits.jobs(True) == 3


@pytest.mark.parametrize("text", ["x", "0", "-1", "1.5", "²", "9" * 30])
def test_a_number_of_jobs_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKERN_JOBS", text)
    with pytest.raises(ArgumentError, match=rf"^PYKERN_JOBS: got '{text}', allowed: how many compilers"):
        limits.jobs(False)
    monkeypatch.delenv("PYKERN_JOBS")
    monkeypatch.setenv("MAX_JOBS", text)  # torch's and others': taken where it is a number
    assert limits.jobs(False) >= 1


def test_this_machines_memory_is_read() -> None:
    free = limits.free_memory()
    assert free is None or 0 <= free < 1 << 50
    assert 1 <= limits.cores() <= 4096
