"""Many processes and threads, and builders that die: one build, all correct, nothing broken afterwards."""

from __future__ import annotations

import ctypes
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from pykern.errors import BuildError
from pykern.jit import build, cache

from .conftest import python_command, python_env, run_python

LOAD = 'v = build.variant("ops/k.cuh", "answer<11>", backend="host"); print(call(v), v.cached, extension.builds)'


def call(variant: build.Variant) -> int:
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(variant.entry)())


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.01)


def leftovers() -> list[Path]:
    return [path for path in cache.store().iterdir() if path.name.startswith((".build", ".private", ".trash"))]


def test_16_processes_of_8_threads_make_one_build(fake_root: Path) -> None:
    """pains 5: the same cold op everywhere at once. Two libraries (runtime and variant), each built once in all."""
    code = """
    results, errors = [], []
    gate = threading.Barrier(8)
    def work():
        try:
            gate.wait()
            results.append(call(build.variant("ops/k.cuh", "answer<11>", backend="host")))
        except BaseException as error:
            errors.append(repr(error))
    threads = [threading.Thread(target=work) for _ in range(8)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print(extension.builds, results == [11] * 8, errors)
    """
    processes = [
        subprocess.Popen(
            python_command(code), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=python_env()
        )
        for _ in range(16)
    ]
    outputs = [process.communicate(timeout=180) for process in processes]
    assert [out.split(" ", 1)[1].strip() for out, _ in outputs] == ["True []"] * 16, outputs
    assert sum(int(out.split()[0]) for out, _ in outputs) == 2
    assert [entry["state"] for entry in cache.show()["entries"]] == ["ok", "ok"]
    assert not leftovers()


def test_different_variants_at_once_in_one_process(fake_root: Path) -> None:
    code = """
    results = {}
    def work(n): results[n] = call(build.variant("ops/k.cuh", f"answer<{n}>", backend="host"))
    threads = [threading.Thread(target=work, args=(n,)) for n in (1, 2, 3)]
    [t.start() for t in threads]
    [t.join() for t in threads]
    print(sorted(results.items()), extension.builds, "CXX" in os.environ)
    """
    done = run_python(code)
    assert done.stdout.strip() == "[(1, 1), (2, 2), (3, 3)] 4 False", done.stderr


SLOW_CXX = """#!/bin/sh
case "$*" in *v.cpp*) echo $$ > "$PK_TEST_MARK"; sleep 60 & wait $!;; esac
exec {cxx} "$@"
"""


@pytest.fixture
def slow_compiler(tmp_path: Path) -> Path:
    """A compiler that never gets past a variant, and says when it is there."""
    path = tmp_path / "slow" / "g++"
    path.parent.mkdir()
    path.write_text(SLOW_CXX.format(cxx=shutil.which("g++")))
    path.chmod(0o755)
    return path


def start_killed_builder(slow_compiler: Path, mark: Path) -> None:
    env = python_env(CXX=str(slow_compiler), PK_TEST_MARK=str(mark))
    with subprocess.Popen(
        python_command(LOAD), env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as builder:
        wait_for(lambda: (mark.exists() and mark.read_text().strip() != "") or builder.poll() is not None)
        assert builder.poll() is None
        builder.send_signal(signal.SIGKILL)  # the builder alone; its compiler lives on for a while
        builder.wait()
    with_compiler = int(mark.read_text())
    subprocess.run(["kill", "-TERM", "--", str(with_compiler)], check=False)


def test_sigkill_in_the_middle_of_a_build(fake_root: Path, tmp_path: Path, slow_compiler: Path) -> None:
    """pains 1: the next process builds at once, and sweeps the dead one's folder."""
    build.host_runtime()  # the slow compiler calls itself the same version, so this is a hit for the builder
    start_killed_builder(slow_compiler, tmp_path / "mark")
    assert leftovers()
    started = time.monotonic()
    made = build.variant("ops/k.cuh", "answer<11>", backend="host")
    assert call(made) == 11 and not made.cached
    assert time.monotonic() - started < 40
    assert not leftovers()


def test_a_waiter_times_out_and_builds_privately(fake_root: Path) -> None:
    build.host_runtime()
    recipe, _ = build._variant_recipe("ops/k.cuh", "answer<11>", "host", "", False, ())
    with cache.locked(recipe.key()):
        done = run_python("import warnings; warnings.simplefilter('always')\n" + LOAD, PYKERN_LOCK_TIMEOUT="0.2")
        assert done.stdout.strip() == "11 False 1"
        assert "building privately" in done.stderr and "PYKERN_LOCK_TIMEOUT" in done.stderr
    assert not leftovers()


def test_disk_full_on_a_small_file_system(fake_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ENOSPC in the middle of a build: a BuildError that says so, no entry, and a good build once there is room."""
    place = tmp_path / "tiny"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=32k", "pykern-test", str(place)], capture_output=True
    ).returncode:
        pytest.skip("mounting a tmpfs is not permitted here")
    try:
        monkeypatch.setenv("PYKERN_CACHE", str(place))
        with pytest.raises(BuildError, match="disk is full"):
            build.variant("ops/k.cuh", "answer<11>", backend="host")
        assert not leftovers() and cache.show()["entries"] == []
        subprocess.run(["mount", "-o", "remount,size=8m", str(place)], check=True)
        assert call(build.variant("ops/k.cuh", "answer<11>", backend="host")) == 11
        assert [entry["state"] for entry in cache.show()["entries"]] == ["ok", "ok"]
    finally:
        subprocess.run(["umount", "-l", str(place)], check=False)


def test_files_may_not_grow(fake_root: Path) -> None:
    """The same through a file size limit, which needs no privilege: the compiler is killed by SIGXFSZ or fails."""
    code = """
    import resource
    import torch.utils.cpp_extension
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    try:
        build.variant("ops/k.cuh", "answer<11>", backend="host")
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "))
    print([p.name for p in cache.store().iterdir() if p.name != ".locks"])
    """
    done = run_python(code, PYTHONDONTWRITEBYTECODE="1")
    lines = done.stdout.strip().splitlines()
    assert lines and lines[0].startswith("BuildError"), done.stdout + done.stderr
    assert lines[-1] == "[]"
    assert call(build.variant("ops/k.cuh", "answer<11>", backend="host")) == 11


def test_cleared_under_a_running_process(fake_root: Path) -> None:
    """A loaded kernel goes on working, and the next process builds again."""
    variant = build.variant("ops/k.cuh", "answer<11>", backend="host")
    cache.clear()
    assert call(variant) == 11 and cache.show()["entries"] == []
    assert build.variant("ops/k.cuh", "answer<11>", backend="host").entry == variant.entry
    assert run_python(LOAD).stdout.strip() == "11 False 2"


def test_a_child_forked_in_the_middle_of_a_build(fake_root: Path) -> None:
    """A data loader's worker: it inherits a half-done build that no thread of its own will finish."""
    code = """
    import signal
    from pykern.errors import BuildError
    build.host_runtime()
    started = threading.Event()
    real = extension._compile
    def slow(*arguments):
        started.set()
        time.sleep(2)
        return real(*arguments)
    extension._compile = slow
    thread = threading.Thread(target=lambda: build.variant("ops/k.cuh", "answer<11>", backend="host"))
    thread.start()
    started.wait()
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        extension._compile = real
        print(call(build.variant("ops/k.cuh", "answer<11>", backend="host")), os.environ.get("CXX"), flush=True)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    thread.join()
    """
    done = run_python(code)
    assert done.stdout.split() == ["11", "None", "0"], done.stdout + done.stderr
