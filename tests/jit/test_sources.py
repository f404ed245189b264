"""The closure of a source: complete, relative, and re-read exactly when something changed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from pykern.errors import ArgumentError
from pykern.jit import sources

from .conftest import REPO, run_python, settle


def test_root_of_the_checkout() -> None:
    assert sources.root() == REPO / "cuda_src"


def test_root_of_a_wheel_is_inside_the_package(tmp_path: Path) -> None:
    shutil.copytree(REPO / "pykern", tmp_path / "pykern", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "pykern" / "cuda_src" / "core").mkdir(parents=True)
    code = "from pykern.jit import sources as s; import importlib; print(importlib.reload(s).root())"
    done = run_python(code, PYTHONPATH=str(tmp_path), PYTHONSAFEPATH="1")
    if str(REPO) in done.stdout:  # Python 3.10 has no PYTHONSAFEPATH: the working directory comes first there
        pytest.skip("the checkout shadows the copy")
    assert done.stdout.strip() == str(tmp_path / "pykern" / "cuda_src"), done.stderr


def test_no_sources_is_said_plainly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "pykern" / "jit" / "sources.py"))
    with pytest.raises(FileNotFoundError, match="kernel sources are missing"):
        sources.root()


def test_closure_is_transitive_and_relative(fake_root: Path) -> None:
    (fake_root / "ops" / "near.cuh").write_text('#include "../core/number.cuh"\n')
    (fake_root / "ops" / "a.cuh").write_text('  #  include "near.cuh"\n#include <vector>\n#include "missing.h"\n')
    found = sources.closure(fake_root / "ops" / "a.cuh")
    assert set(found) == {"ops/a.cuh", "ops/near.cuh", "core/number.cuh"}
    assert found["core/number.cuh"] == (fake_root / "core" / "number.cuh").read_bytes()


def test_an_include_cycle_ends(fake_root: Path) -> None:
    (fake_root / "ops" / "a.cuh").write_text('#include "ops/b.cuh"\n')
    (fake_root / "ops" / "b.cuh").write_text('#include "a.cuh"\n')
    assert set(sources.closure(fake_root / "ops" / "a.cuh")) == {"ops/a.cuh", "ops/b.cuh"}


def test_a_macro_that_names_a_header_counts(fake_root: Path) -> None:
    (fake_root / "core" / "target.cuh").write_text(
        '#if defined(__CUDACC__)\n#define H "core/number.cuh"\n#else\n'
        '#if 1\n#include "host/d.h"\n#endif\n#endif\n#include H\n'
    )
    (fake_root / "host" / "d.h").write_text("")
    path = fake_root / "core" / "target.cuh"
    assert set(sources.closure(path)) == {"core/target.cuh", "core/number.cuh", "host/d.h"}
    assert set(sources.closure(path, "cuda")) == {"core/target.cuh", "core/number.cuh"}
    assert set(sources.closure(path, "host")) == {"core/target.cuh", "host/d.h"}


def test_the_real_headers_are_all_seen() -> None:
    """Every file that the compiler itself lists for a host variant is in our closure, or is not ours."""
    import subprocess

    from pykern.jit import toolchain

    root = REPO / "cuda_src"
    start = root / "core" / "export.cuh"
    if not (root / "host" / "device.h").is_file():
        pytest.skip("the host backend is not there yet")
    command = [str(toolchain.find_cxx()), "-std=c++17", "-M", "-x", "c++", f"-I{root}", str(start)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.replace("\\\n", " ").split()
    ours = {os.path.relpath(os.path.normpath(name), root) for name in listed if name.startswith(str(root))}
    assert len(ours) > 3
    assert ours <= set(sources.closure(start, "host"))


def test_a_callers_header_is_kept_apart_from_ours(fake_root: Path, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    (mine / "core").mkdir(parents=True)
    (mine / "core" / "number.cuh").write_text("// mine\n")
    (mine / "k.cuh").write_text('#include "core/number.cuh"\n#include "core/export.cuh"\n')
    found = sources.closure(mine / "k.cuh")
    assert found["./core/number.cuh"] == b"// mine\n"
    assert "core/number.cuh" in found  # through export.cuh


def test_edits_are_noticed(fake_root: Path) -> None:
    path, header = fake_root / "ops" / "k.cuh", fake_root / "core" / "number.cuh"
    before, stats = sources.walk(path)
    assert sources.unchanged(stats)
    old = header.read_text()
    header.write_text(old.replace("= 1", "= 2"))  # same size
    assert not sources.unchanged(stats)
    after, _ = sources.walk(path)
    assert after["core/number.cuh"] != before["core/number.cuh"]


def test_an_edit_within_the_clock_tick_is_noticed(fake_root: Path) -> None:
    """Two writes of the same size with the same mtime: a young file is never trusted by its stat."""
    path, header = fake_root / "ops" / "k.cuh", fake_root / "core" / "number.cuh"
    header.write_text("#pragma once\nconstexpr int kNumber = 3;\n")
    stamp = time.time_ns()
    os.utime(header, ns=(stamp, stamp))
    before, stats = sources.walk(path)
    with open(header, "r+") as file:
        file.write("#pragma once\nconstexpr int kNumber = 4;\n")
    os.utime(header, ns=(stamp, stamp))
    assert not sources.unchanged(stats)
    assert sources.walk(path)[0]["core/number.cuh"] != before["core/number.cuh"]


def test_a_header_that_appears_earlier_on_the_path_is_noticed(fake_root: Path) -> None:
    path = fake_root / "ops" / "k.cuh"
    _, stats = sources.walk(path)
    (fake_root / "ops" / "core").mkdir()
    (fake_root / "ops" / "core" / "number.cuh").write_text("constexpr int kNumber = 9;\n")
    settle(fake_root / "ops" / "core")
    assert not sources.unchanged(stats)
    assert sources.closure(path)["ops/core/number.cuh"].endswith(b"9;\n")


def test_an_unknown_source_is_named(fake_root: Path) -> None:
    with pytest.raises(ArgumentError, match=r"source: got 'ops/nope.cuh'"):
        sources.locate("ops/nope.cuh")
