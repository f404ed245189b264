"""``pykern doctor``, ``cache`` and ``warmup``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pykern.cli import main
from pykern.errors import ToolchainError
from pykern.jit import build, cache, doctor, limits, toolchain

from .conftest import REPO, python_env

GOOD = {"version": "2.13.0+cpu", "cuda": None, "hip": None, "devices": [], "error": ""}
H200 = {"name": "NVIDIA H200", "cc": "9.0", "sms": 132, "memory": 150 << 30}


def run(*args: str) -> tuple[int, str]:
    result = CliRunner().invoke(main, list(args))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def findings(monkeypatch: pytest.MonkeyPatch, torch: dict) -> dict[str, doctor.Finding]:
    monkeypatch.setattr(doctor, "probe_torch", lambda: torch)
    monkeypatch.setattr(doctor, "_try_compiler", lambda compiler: "")
    return {line.name: line for line in doctor.examine()}


def test_doctor_on_this_machine() -> None:
    code, text = run("doctor", "--json")
    report = json.loads(text)
    assert report["ok"] == (code == 0)
    names = [line["name"] for line in report["findings"]]
    assert names == ["python", "sources", "torch", "c++", "ninja", "gpu", "nvcc", "cache", "machine"]
    assert all(line["status"] in ("ok", "info", "warn", "fail") for line in report["findings"])
    assert report["ok"], text


def test_doctor_where_torch_is_missing_or_broken(tmp_path: Path) -> None:
    """The command still runs, says why, and exits with 1."""
    for body, says in (
        ("raise ImportError('libtorch_cpu.so: cannot open shared object file')", "libtorch_cpu.so"),
        ("import os; os.abort()", "signal 6"),
    ):
        folder = tmp_path / says
        (folder / "torch").mkdir(parents=True)
        (folder / "torch" / "__init__.py").write_text(body)
        env = python_env(PYTHONPATH=f"{folder}:{REPO}", PYKERN_CACHE=str(tmp_path / "cache"))
        command = [sys.executable, "-m", "pykern", "doctor", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=tmp_path)
        assert done.returncode == 1, done.stderr
        lines = {line["name"]: line for line in json.loads(done.stdout)["findings"]}
        assert (
            lines["torch"]["status"] == "fail"
            and says in lines["torch"]["detail"]
            and "torch>=2.10" in lines["torch"]["hint"]
        )


def test_doctor_text_has_a_line_and_advice_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "probe_torch", lambda: {"missing": "No module named 'torch'"})
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    code, text = run("doctor")
    assert code == 1
    assert "fail  torch" in text and "-> pip install 'torch>=2.10'" in text
    assert "fail  c++" in text and "/nonexistent/g++" in text


@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({}, "ok", "CPU build"),
        ({"version": "2.9.1"}, "fail", "2.10 or newer"),
        ({"version": "3.0.0a0+git"}, "ok", ""),
        ({"hip": "6.4"}, "fail", "ROCm"),
    ],
)
def test_doctor_on_torch(change: dict, status: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    line = findings(monkeypatch, {**GOOD, **change})["torch"]
    assert line.status == status and says in line.detail + line.hint


def test_doctor_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "driver_present", lambda: False)
    assert findings(monkeypatch, GOOD)["gpu"].status == "info"
    monkeypatch.setattr(doctor, "driver_present", lambda: True)
    assert "torch is a CPU build" in findings(monkeypatch, GOOD)["gpu"].detail
    broken = findings(monkeypatch, {**GOOD, "cuda": "13.0", "error": "driver too old"})["gpu"]
    assert (broken.status, broken.detail) == ("fail", "driver too old")
    fine = findings(monkeypatch, {**GOOD, "cuda": "13.0", "devices": [H200]})["gpu"]
    assert fine.status == "ok" and "NVIDIA H200 (cc 9.0, 132 SMs, 150 GiB)" in fine.detail


def test_doctor_on_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> toolchain.CudaToolchain:
        raise ToolchainError("no CUDA compiler: ...")

    monkeypatch.setattr(toolchain, "find_cuda", missing)
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert findings(monkeypatch, GOOD)["nvcc"].status == "info"  # not needed without a GPU
    assert findings(monkeypatch, {**GOOD, "cuda": "13.0", "devices": [H200]})["nvcc"].status == "fail"
    monkeypatch.setenv("CUDA_HOME", ":/usr/local/cuda")
    assert findings(monkeypatch, GOOD)["nvcc"].status == "warn"  # set wrongly: said even where it is not needed
    found = toolchain.CudaToolchain(Path("/c"), Path("/c/bin/nvcc"), "13.0.88", "PATH", None, 15, 20)
    monkeypatch.setattr(toolchain, "find_cuda", lambda: found)
    line = findings(monkeypatch, {**GOOD, "cuda": "12.8", "devices": [H200]})["nvcc"]
    assert line.status == "fail" and "differ" in line.detail
    line = findings(monkeypatch, {**GOOD, "cuda": "13.0", "devices": [H200]})["nvcc"]
    assert line.status == "fail" and "libcudart" in line.detail


def test_doctor_on_a_compiler_that_is_old_or_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(toolchain, "cxx", lambda: toolchain.Cxx(Path("/g"), "gcc", "g++ 9.4.0"))
    assert "11 or newer" in findings(monkeypatch, GOOD)["c++"].hint
    monkeypatch.undo()
    broken = tmp_path / "g++"
    broken.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo "g++ (X) 12.2.0" && exit\necho "x: error: no" >&2; exit 1\n'
    )
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    monkeypatch.setattr(doctor, "probe_torch", lambda: GOOD)
    line = next(line for line in doctor.examine() if line.name == "c++")
    assert line.status == "fail" and "no" in line.detail


def test_doctor_on_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PYKERN_CACHE", str(tmp_path / "file" / "x"))
    monkeypatch.setattr(cache, "_chosen", {})
    line = findings(monkeypatch, GOOD)["cache"]
    assert line.status == "warn" and str(tmp_path / "file" / "x") in line.detail and "PYKERN_CACHE" in line.hint


def test_doctor_survives_a_check_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def bad() -> int:
        raise OSError("no /proc")

    monkeypatch.setattr(limits, "cores", bad)
    line = findings(monkeypatch, GOOD)["machine"]
    assert line.status == "fail" and "no /proc" in line.detail


def test_cache_show_and_clear(fake_root: Path) -> None:
    assert json.loads(run("cache", "show", "--json")[1])["entries"] == []
    build.variant("ops/k.cuh", "answer<12>", backend="host")
    shown = json.loads(run("cache", "show", "--json")[1])
    assert sorted(entry["kernel"] for entry in shown["entries"]) == ["answer<12>", "host runtime"]
    assert shown["folder"] == str(cache.cache_dir()) and all(entry["seconds"] > 0 for entry in shown["entries"])
    code, text = run("cache", "show")
    assert code == 0 and "2 entries" in text and "answer<12>" in text
    (cache.store() / "answer_12-aaaaaaaaaaaaaaaaaaaa").mkdir()
    assert "corrupt" in run("cache", "show")[1]
    assert json.loads(run("cache", "clear", "--json")[1])["entries"] == 3
    assert "deleted 0 entries" in run("cache", "clear")[1]


def test_warmup_refuses_what_it_does_not_know() -> None:
    code, text = run("warmup", "no_such_op")
    assert code == 2 and "got 'no_such_op'" in text
    code, text = run("warmup", "--arch", "77")
    assert code == 2 and "--arch: got '77'" in text
    code, text = run("warmup", "--arch", "90a", "--device", "cpu")
    assert code == 2 and "--arch" in text


def test_warmup_builds_each_variant_once_and_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every distinct kernel of the sample plans, once; a failure is shown and makes the exit code 1."""
    from pykern import op as registry
    from pykern.errors import BuildError
    from pykern.plan import host_target

    calls: list[tuple[str, str, bool]] = []
    broken: set[str] = set()

    def variant(source: str, kernel: str, *, backend: str, arch: str, check: bool = False) -> build.Variant:
        calls.append((source, kernel, check))
        if kernel in broken:
            raise BuildError(f"{kernel}: k.cuh:1: nope")
        return build.Variant(Path("/x"), 1, "key", 0.5, False, kernel)

    monkeypatch.setattr(build, "variant", variant)
    monkeypatch.setattr(build, "host_runtime", lambda: None)
    monkeypatch.setattr(build, "launcher", lambda cuda: None)
    wanted = {
        (launch.source, launch.kernel)
        for _, _, plan in registry.sample_plans(host_target(), ["softmax"])
        for launch in plan.launches
    }
    code, text = run("warmup", "softmax", "--device", "cpu", "--json")
    report = json.loads(text)
    assert code == 0 and report["ok"] and len(report["variants"]) == len(calls) == len(wanted) > 1
    assert {(source, kernel) for source, kernel, _ in calls} == wanted
    calls.clear()
    broken.add(sorted(kernel for _, kernel in wanted)[0])
    code, text = run("warmup", "softmax", "--device", "cpu", "--check")
    assert code == 1 and len(calls) == 2 * len(wanted) and "nope" in text and "2 failed" in text
