"""docs/debugging.md: its gdb session, its ASan and gcov commands, run as they stand, print what the page shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs" / "debugging.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "unit_rows"


def section(title: str) -> str:
    return DOC.split(f"\n## {title}\n")[1].split("\n## ")[0]


def blocks(text: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def console(title: str, prompt: str) -> tuple[list[str], list[str]]:
    """(commands, lines shown) of a section's sessions; of a gdb session its commands only where the prompt is gdb's."""
    lines = "".join(blocks(section(title), "console")).splitlines()
    commands = [line.removeprefix(prompt) for line in lines if line.startswith(prompt)]
    return commands, [line for line in lines if not line.startswith(("$ ", "(gdb) "))]


def check_output(shown: list[str], output: str) -> None:
    """Every line shown is in the output, in this order; … stands for anything."""
    at = 0
    lines = output.splitlines()
    for line in shown:
        parts = [re.escape(" ".join(part.split())) for part in line.split("…")]
        pattern = re.compile(r"\s*.*".join(parts))
        found = next((n for n in range(at, len(lines)) if pattern.search(" ".join(lines[n].split()))), None)
        assert found is not None, f"{line!r} does not follow in\n" + "\n".join(lines[at : at + 60])
        at = found + 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for path in EXAMPLE.iterdir():
        if path.is_file():
            shutil.copy(path, tmp_path)
    kernel, script = blocks(section("AddressSanitizer"), "cpp")[0], blocks(section("AddressSanitizer"), "python")[0]
    (tmp_path / "shift.cuh").write_text(kernel)
    (tmp_path / "shift.py").write_text(script)
    (tmp_path / "python").symlink_to(sys.executable)
    return tmp_path


def shell(commands: list[str], folder: Path) -> str:
    """The commands in one shell, whose ``python`` is this one."""
    python = f"python() {{ '{sys.executable}' \"$@\"; }}"
    text = "\n".join(["set -e", python, *commands]).replace(") python ", f") '{sys.executable}' ")
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(["bash", "-c", text], cwd=folder, env=env, capture_output=True, text=True, timeout=400)
    return done.stdout + done.stderr


def test_the_script_is_the_examples() -> None:
    assert (EXAMPLE / "run.py").read_text(encoding="utf-8") == blocks(DOC, "python")[0]


def can_debug() -> bool:
    """gdb is there and may trace a child (containers often forbid it)."""
    if shutil.which("gdb") is None:
        return False
    done = subprocess.run(["gdb", "-batch", "-ex", "run", "--args", "/bin/true"], capture_output=True, text=True)
    return "exited normally" in done.stdout


@pytest.mark.skipif(not can_debug(), reason="gdb-only: no gdb here, or it may not trace")
def test_gdb(folder: Path) -> None:
    before, shown = console("gdb", "$ ")
    typed, _ = console("gdb", "(gdb) ")
    assert before[-1].startswith("gdb -q --args python run.py") and len(typed) >= 14
    name = Path(sys.executable).name  # what gdb calls the thread
    shown = [line.replace('"python"', f'"{name}"') for line in shown if line != "tensor([1024., 2048.])"]
    quiet = ["set pagination off", "set confirm off", "directory ."]  # the cached build may be of another copy
    (folder / "session").write_text("\n".join([*quiet, *typed, "kill"]) + "\n")
    gdb = f"gdb -q -batch -x session --args '{sys.executable}' run.py"
    output = shell([*before[:-1], gdb], folder)
    assert "tensor([1024., 2048.])" in output, output
    check_output(shown, output)


def libasan() -> bool:
    compiler = shutil.which("g++")
    if compiler is None or os.environ.get("CXX", "g++") != "g++":
        return False
    said = subprocess.run([compiler, "-print-file-name=libasan.so"], capture_output=True, text=True).stdout.strip()
    return os.path.isabs(said) and os.path.exists(said)


@pytest.mark.skipif(not libasan(), reason="ASan-only: no g++ with libasan here")
def test_address_sanitizer(folder: Path) -> None:
    commands, shown = console("AddressSanitizer", "$ ")
    # The same kernel within its bounds, and one with barriers, shared memory and many fibers, are clean. This also
    # builds what the second run needs.
    bad = (folder / "shift.py").read_text()
    (folder / "clean.py").write_text(bad.replace("y, 1000)", "y, 999)") + (folder / "run.py").read_text())
    output = shell([c.replace("shift.py", "clean.py") for c in commands], folder)
    assert "tensor([1024., 2048.])" in output and "ERROR" not in output, output
    check_output(shown, shell(commands, folder))


@pytest.mark.skipif(shutil.which("gcov") is None, reason="gcov-only: no gcov here")
def test_gcov(folder: Path) -> None:
    from pykern.jit import cache

    commands, shown = console("gcov", "$ ")
    for label in ("host_runtime", "launcher"):  # what the flags do not touch need not be built again
        for entry in cache.store().glob(f"{label}-*"):
            shutil.copytree(entry, folder / "coverage" / cache.store().name / entry.name)
    output = shell(commands, folder)
    check_output(shown, output)


def test_flags_are_part_of_the_key_and_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    from pykern.errors import ArgumentError
    from pykern.jit import build, flags

    def keys() -> list[str]:
        recipes = [
            build._variant_recipe("ops/softmax.cuh", "softmax_long<float, 1024>", backend, "90a", False, ())[0]
            for backend in ("host", *(["cuda"] if shutil.which("nvcc") else []))
        ]
        return [recipe.key() for recipe in recipes]

    plain = keys()
    monkeypatch.setenv("PYKERN_HOST_FLAGS", "-O0 -g '-DNAME=\"a b\"'")
    assert flags.extra() == ["-O0", "-g", '-DNAME="a b"']
    assert keys()[0] != plain[0] and keys()[1:] == plain[1:], "host variants only"
    monkeypatch.setenv("PYKERN_HOST_FLAGS", "-fsanitize=address -g -fsanitize=thread")
    assert flags.sanitizers() == ["-fsanitize=address"]
    monkeypatch.setenv("PYKERN_HOST_FLAGS", "-DX='open")
    with pytest.raises(ArgumentError, match="PYKERN_HOST_FLAGS: got .*open"):
        keys()
