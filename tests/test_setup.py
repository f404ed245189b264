"""The set-up script, Makefile, packaging and CI script. Nothing here uses the network."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from _scripts import load_script

ROOT = Path(__file__).parent.parent


@pytest.fixture
def bootstrap() -> Any:
    return load_script("bootstrap")


def test_requirements_are_read_from_pyproject(bootstrap: Any) -> None:
    found = bootstrap.requirements()
    assert "torch>=2.10" in found
    names = {r.split(">")[0] for r in found}
    assert {"ninja", "click", "safetensors", "pytest", "ruff", "mypy", "gguf"} <= names
    if sys.version_info >= (3, 11):
        import tomllib

        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        assert found == project["dependencies"] + project["optional-dependencies"]["dev"]


def test_the_oldest_python_is_the_same_everywhere(bootstrap: Any) -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'requires-python = ">={}.{}"'.format(*bootstrap.OLDEST) in text
    assert 'target-version = "py{}{}"'.format(*bootstrap.OLDEST) in text
    assert (
        bootstrap.TORCH_GPU == "torch>={}.{}".format(*bootstrap.TORCH_OLDEST) and bootstrap.TORCH_GPU in text
    )


def test_versions(bootstrap: Any) -> None:
    assert bootstrap.at_least("2.13.0+cpu", (2, 10))
    assert bootstrap.at_least("2.10", (2, 10))
    assert not bootstrap.at_least("2.9.1", (2, 10))
    assert bootstrap.at_least("3.0", (2, 10))


def test_an_active_python_with_torch_is_used(bootstrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap, "torch_of", lambda python: "2.11.0+cu130")
    assert bootstrap.choose() == (sys.executable, True)
    for other in (None, "2.9.1"):
        monkeypatch.setattr(bootstrap, "torch_of", lambda python, other=other: other)
        assert bootstrap.choose() == (bootstrap.venv_python(), False)


def installs(
    bootstrap: Any, monkeypatch: pytest.MonkeyPatch, torch: list[str | None], gpu: bool
) -> list[str]:
    """The pip calls of a fresh set-up; ``torch``: what is there, before and after the first."""
    calls: list[str] = []
    versions = iter(torch)
    last: list[str | None] = [None]

    def torch_of(python: str) -> str | None:
        last[0] = next(versions, last[0])
        return last[0]

    monkeypatch.setattr(bootstrap, "pip_for", lambda python, base: ["pip"])
    monkeypatch.setattr(bootstrap, "has_gpu", lambda: gpu)
    monkeypatch.setattr(bootstrap, "torch_of", torch_of)
    monkeypatch.setattr(bootstrap, "run", lambda args, **_: calls.append(" ".join(args)))
    bootstrap.install("python", "base", in_place=False)
    return calls


def test_torch_comes_first_and_alone(bootstrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = installs(bootstrap, monkeypatch, [None, "2.13.0+cpu"], gpu=False)
    assert calls[0].split()[-1] == "torch==2.13.0" and "ninja" not in calls[0]
    assert "torch==2.13.0+cpu" in calls[1]  # pinned to what was installed
    assert "--editable" in calls[2] and "--no-deps" in calls[2]
    assert len(calls) == 3
    calls = installs(bootstrap, monkeypatch, [None, "2.14.0+cu130"], gpu=True)
    assert calls[0].split()[-1] == "torch>=2.10"


def test_torch_that_fits_is_left_alone(bootstrap: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(installs(bootstrap, monkeypatch, ["2.13.0+cpu"], gpu=False)) == 2
    assert len(installs(bootstrap, monkeypatch, ["2.11.0"], gpu=True)) == 2
    assert len(installs(bootstrap, monkeypatch, ["2.11.0", "2.13.0"], gpu=False)) == 3


def test_without_a_network_an_active_python_is_used_as_it_is(
    bootstrap: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: list[str], **_: Any) -> None:
        raise subprocess.CalledProcessError(1, args)

    monkeypatch.setattr(bootstrap, "choose", lambda: (sys.executable, True))
    monkeypatch.setattr(bootstrap, "stamp_path", lambda *_: str(tmp_path / "stamp"))
    monkeypatch.setattr(bootstrap, "missing_from", lambda python: ["plotly>=5.20"])
    monkeypatch.setattr(bootstrap, "torch_of", lambda python: "2.11.0")
    monkeypatch.setattr(bootstrap, "pip_for", lambda python, base: ["pip"])
    monkeypatch.setattr(bootstrap, "run", fail)
    assert bootstrap.ensure() == sys.executable
    assert "going on without plotly>=5.20" in capsys.readouterr().err
    assert not (tmp_path / "stamp").exists()
    monkeypatch.setattr(bootstrap, "choose", lambda: (sys.executable, False))
    monkeypatch.setattr(bootstrap, "make_venv", lambda base: None)
    with pytest.raises(bootstrap.SetupError, match="pip failed"):
        bootstrap.ensure()


def test_no_way_to_install_is_said_clearly(
    bootstrap: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A base Python with neither ensurepip nor pip: Debian without python3-venv and python3-pip."""
    for name in ("ensurepip", "pip"):
        (tmp_path / f"{name}.py").write_text("raise ImportError('split off')")
    env = dict(os.environ, PYTHONPATH=str(tmp_path))
    copy = tmp_path / "checkout" / "scripts"
    copy.mkdir(parents=True)
    (copy / "bootstrap.py").write_text((ROOT / "scripts" / "bootstrap.py").read_text())
    (copy.parent / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    base = getattr(sys, "_base_executable", sys.executable)
    done = subprocess.run(
        [base, "-S", str(copy / "bootstrap.py")], env=env, capture_output=True, text=True, timeout=120
    )
    if "ready:" in done.stderr:
        pytest.skip("the base Python has torch")
    assert done.returncode == 2, done.stderr
    assert "apt-get install python3-venv" in done.stderr and "Traceback" not in done.stderr


def test_a_wheel_holds_the_sources(tmp_path: Path) -> None:
    """And the package's data: whatever the checkout has of both."""
    pytest.importorskip("setuptools", minversion="77")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
    ]
    env = dict(os.environ, PIP_DISABLE_PIP_VERSION_CHECK="1")
    source = tmp_path / "source"
    ignore = (
        ".git",
        ".venv",
        "build",
        "dist",
        "tests",
        "__pycache__",
        ".mypy_cache",
        ".ruff_cache",
        ".hypothesis",
    )
    import shutil

    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*ignore))
    done = subprocess.run(
        [*command, "-w", str(tmp_path), str(source)], env=env, capture_output=True, text=True, timeout=300
    )
    if "No module named pip" in done.stderr:
        pytest.skip("no pip in this environment")
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    wanted = {
        f"pykern/cuda_src/{p.relative_to(ROOT / 'cuda_src').as_posix()}"
        for p in (ROOT / "cuda_src").rglob("*")
        if p.suffix in (".cuh", ".h", ".cpp")
    }
    package = [p for p in (ROOT / "pykern").rglob("*") if p.is_file() and "__pycache__" not in p.parts]
    wanted |= {p.relative_to(ROOT).as_posix() for p in package}
    assert not sorted(wanted - names)
    assert not [n for n in names if n.startswith(("tests", "tools", "scripts", "cuda_src"))]


def test_make_targets_exist() -> None:
    for target in ("demo", "test", "compile", "gpu-test", "sanitize", "bench", "docs", "clean"):
        done = subprocess.run(["make", "-n", target], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, (target, done.stderr)
        assert done.stdout.strip(), target


def test_ci_runs_what_it_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
    assert script.index("make test") < script.index("make compile")
    assert subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")]).returncode == 0
