"""The extra ``pykern[cuda]``: NVIDIA's wheels at the pinned versions compile sm_90a with nothing else installed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pykern.jit import toolchain

from .conftest import REPO, run_python


def test_the_pins_are_of_one_cuda_minor() -> None:
    """Unpinned, nvvm and crt are newer than nvcc, and every compile ends in "Unsupported .version"."""
    assert set(toolchain.CUDA_WHEELS.values()) == {"13.0.*"} and len(toolchain.CUDA_WHEELS) == 5


def test_the_extra_holds_the_pins() -> None:
    setup = REPO / "pyproject.toml"
    text = setup.read_text()
    extra = re.search(r"^cuda = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    assert extra is not None, "pyproject.toml has no extra named cuda"
    found = dict(re.findall(r'"(nvidia-[\w-]+)\s*==\s*([\d.*]+)"', extra[1]))
    assert toolchain.CUDA_WHEELS.items() <= found.items()
    assert set(found.values()) == {"13.0.*"}


@pytest.mark.slow
def test_the_wheels_alone_compile_sm_90a(fake_root: Path, tmp_path: Path) -> None:
    """No toolkit: CUDA_HOME unset, and a PATH of g++ and its tools only."""
    site = tmp_path / "site"
    pins = [f"{name}=={version}" for name, version in toolchain.CUDA_WHEELS.items()]
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(site), *pins]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if done.returncode:
        pytest.skip(f"NVIDIA's wheels are not reachable: {done.stderr.strip().splitlines()[-1:]}")
    home = site / "nvidia" / "cu13"
    assert not (home / "lib64").exists() and not (home / "lib" / "libcudart.so").exists()  # the case under test
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("g++", "gcc", "ld", "as", "sh", "cat", "rm", "which", "c++", "cc"):
        for folder in os.environ["PATH"].split(os.pathsep):
            if os.access(os.path.join(folder, name), os.X_OK):
                (tools / name).symlink_to(os.path.join(folder, name))
                break
    code = """
    for name in ("CUDA_HOME", "CUDA_PATH"): os.environ.pop(name, None)
    from pykern.jit import toolchain
    toolchain.USUAL = Path("/nonexistent")
    cuda = toolchain.find_cuda()
    result = build.compile_only("ops/k.cuh", "scale<float, 3>", "90a")
    print(cuda.origin, cuda.home, result.registers > 0, result.cached)
    """
    env = {"PATH": str(tools), "PYTHONPATH": f"{REPO}{os.pathsep}{site}", "LD_LIBRARY_PATH": ""}
    ran = run_python(code, timeout=300, **env)
    assert ran.stdout.split() == ["wheel", str(home), "True", "False"], ran.stdout + ran.stderr
