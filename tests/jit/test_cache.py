"""The cache: where it lies, what survives damage, and that locks die with their owners."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import threading
import time
import warnings
from pathlib import Path

import pytest

from pykern.errors import ArgumentError
from pykern.jit import cache

from .conftest import python_command, python_env, run_python


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYKERN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cache, "_chosen", {})
    return cache.store()


KEY = "0123456789abcdef0123"


def put(text: bytes = b"library", key: str = KEY, label: str = "k") -> cache.Entry:
    work = cache.work_folder(key)
    (work / cache.LIBRARY).write_bytes(text)
    (work / "v.cpp").write_text("source")
    (work / "junk.o").write_text("object")
    return cache.publish(work, f"{label}-{key}", {"label": label, "seconds": 1.0}, keep=("v.cpp",))


def test_default_is_the_users_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for empty in (None, ""):
        monkeypatch.delenv("PYKERN_CACHE", raising=False)
        if empty is not None:
            monkeypatch.setenv("PYKERN_CACHE", empty)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert cache.wanted_dir() == tmp_path / "pykern"


def test_relative_and_home_overrides_are_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cache, "_wanted", {})
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYKERN_CACHE", "here")
    assert cache.wanted_dir() == tmp_path / "here"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert cache.wanted_dir() == tmp_path / "here"  # where it was when it was first asked for
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PYKERN_CACHE", "~/there")
    assert cache.wanted_dir() == tmp_path / "there"


def test_a_relative_cache_stays_where_it_was(tmp_path: Path) -> None:
    """A script that changes its working directory neither builds anew nor litters."""
    script = """
    import os
    from pykern.jit import cache
    first, stores = cache.cache_dir(), cache.read_stores()
    os.mkdir("elsewhere")
    os.chdir("elsewhere")
    assert cache.cache_dir() == first and cache.read_stores() == stores and len(stores) == 1, cache.read_stores()
    assert cache.show()["wanted"] == str(first) and os.listdir() == []
    print(first)
    """
    command = python_command(script)
    env = python_env(PYKERN_CACHE="here")
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=env, cwd=tmp_path)
    assert done.stdout.strip() == str(tmp_path / "here"), done.stderr


def test_a_cache_that_is_no_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKERN_CACHE", "~nobody-of-that-name/x")
    with pytest.raises(ArgumentError, match=r"^PYKERN_CACHE: got '~nobody-of-that-name/x', allowed: a folder"):
        cache.wanted_dir()


@pytest.mark.parametrize("text", ["x", "-1", "nan", "1 s"])
def test_a_lock_timeout_that_is_no_time_is_refused(text: str, store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYKERN_LOCK_TIMEOUT", text)
    with pytest.raises(ArgumentError, match=rf"^PYKERN_LOCK_TIMEOUT: got '{text}', allowed: seconds"):
        with cache.locked(KEY):
            pass
    for good, seconds in (("", 600.0), ("0", 0.0), ("1.5", 1.5), ("inf", float("inf"))):
        monkeypatch.setenv("PYKERN_LOCK_TIMEOUT", good)
        assert cache.lock_timeout() == seconds


def assert_falls_back(wanted: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("PYKERN_CACHE", str(wanted))
    monkeypatch.setattr(cache, "_chosen", {})
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.warns(RuntimeWarning) as caught:
        used = cache.cache_dir()
    message = str(caught[0].message)
    assert str(wanted) in message and str(used) in message  # both are named
    assert used != wanted and used.is_dir()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert cache.cache_dir() == used  # said once
    return used


def test_unwritable_below_a_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    used = assert_falls_back(tmp_path / "file" / "cache", monkeypatch, tmp_path)
    assert put().path.is_relative_to(used)


@pytest.mark.parametrize("name", ["dol$x", "a:b"])
def test_a_path_that_ninja_cannot_take(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    """'$' and ':' mean something in a build file: every build would fail without a word."""
    monkeypatch.setenv("PYKERN_CACHE", str(tmp_path / name))
    with pytest.warns(RuntimeWarning, match="ninja takes no path with"):
        assert cache.cache_dir() != tmp_path / name


def test_fallback_is_not_a_folder_of_somebody_elses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    trap = tmp_path / f"pykern-{os.getuid()}"
    trap.mkdir()
    trap.chmod(0o777)  # anybody may put a library there
    used = assert_falls_back(tmp_path / "file" / "cache", monkeypatch, tmp_path)
    assert used != trap and not used.stat().st_mode & 0o022


@pytest.fixture
def tmpfs(tmp_path: Path):
    """``mount(options)`` makes a small file system, where the machine lets us."""
    places: list[Path] = []

    def mount(options: str) -> Path:
        place = tmp_path / f"mount{len(places)}"
        place.mkdir()
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "pykern-test", str(place)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a tmpfs is not permitted here")
        places.append(place)
        return place

    if shutil.which("mount") is None:
        pytest.skip("no mount command")
    yield mount
    for place in places:
        subprocess.run(["umount", "-l", str(place)], capture_output=True, check=False)


def test_read_only_cache_still_hits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmpfs) -> None:
    """An image's cache, baked in and mounted read-only, is read; new builds go to the fallback."""
    place = tmpfs("size=1m")
    monkeypatch.setenv("PYKERN_CACHE", str(place))
    monkeypatch.setattr(cache, "_chosen", {})
    put()
    remount = ["mount", "-o", "remount,ro", str(place)]
    if subprocess.run(remount, capture_output=True).returncode:
        pytest.skip("remounting is not permitted here")
    used = assert_falls_back(place, monkeypatch, tmp_path)
    old = cache.find(f"k-{KEY}")
    assert old is not None and old.path.is_relative_to(place)
    assert put(key="f" * 20).path.is_relative_to(used)


def test_publish_keeps_only_what_it_should(store: Path) -> None:
    entry = put()
    assert sorted(path.name for path in entry.folder.iterdir()) == ["entry.json", "lib.so", "v.cpp"]
    found = cache.find(f"k-{KEY}")
    assert found is not None and found.path == entry.path and found.record["seconds"] == 1.0
    assert not list(store.glob(".build-*"))


@pytest.mark.parametrize("damage", ["truncate", "empty", "flip", "missing", "record", "json", "folder", "directory"])
def test_a_damaged_entry_is_a_miss_and_is_replaced(store: Path, damage: str) -> None:
    entry = put()
    library, record = entry.path, entry.folder / cache.RECORD
    if damage == "truncate":
        os.truncate(library, 3)
    elif damage == "empty":
        library.write_bytes(b"")
    elif damage == "flip":
        library.write_bytes(b"librarz")  # same size, other contents
    elif damage == "missing":
        library.unlink()
    elif damage == "record":
        record.unlink()
    elif damage == "json":
        record.write_text("[1, 2")
    elif damage == "folder":
        shutil.rmtree(entry.folder)
        entry.folder.write_text("a file where a folder should be")
    elif damage == "directory":
        library.unlink()
        library.mkdir()
    assert cache.find(f"k-{KEY}") is None
    put()
    found = cache.find(f"k-{KEY}")
    assert found is not None and found.path.read_bytes() == b"library"
    assert not list(store.glob(".trash-*"))


def test_a_record_of_the_wrong_shape_is_a_miss(store: Path) -> None:
    entry = put()
    for text in ("[]", "null", "{}", '{"size": "7"}', '{"size": 7, "sha256": null}'):
        (entry.folder / cache.RECORD).write_text(text)
        assert cache.find(f"k-{KEY}") is None


def test_the_loser_of_a_publish_takes_the_winners(store: Path) -> None:
    first = cache.work_folder(KEY, private=True)
    second = cache.work_folder(KEY, private=True)
    for work in (first, second):
        (work / cache.LIBRARY).write_bytes(b"same")
    won = cache.publish(first, f"k-{KEY}", {"by": "first"})
    lost = cache.publish(second, f"k-{KEY}", {"by": "second"})
    assert lost.record["by"] == "first" and lost.path == won.path
    assert not second.exists()


def test_lock_excludes_threads_and_times_out(store: Path) -> None:
    inside, most = 0, 0

    def work() -> None:
        nonlocal inside, most
        with cache.locked(KEY) as held:
            assert held
            inside += 1
            most = max(most, inside)
            time.sleep(0.01)
            inside -= 1

    threads = [threading.Thread(target=work) for _ in range(6)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert most == 1
    with cache.locked(KEY) as outer, cache.locked(KEY, timeout=0.05) as inner:
        assert outer and not inner


def test_a_stale_lock_file_means_nothing(store: Path) -> None:
    """pains 1: what a killed build leaves behind is a file, not a lock."""
    path = store / ".locks" / f"{KEY}.lock"
    path.parent.mkdir(parents=True)
    path.write_text("pid 12345")
    started = time.monotonic()
    with cache.locked(KEY) as held:
        assert held
    assert time.monotonic() - started < 1


def test_a_lock_dies_with_its_owner(store: Path) -> None:
    code = f"""
    with cache.locked({KEY!r}) as held:
        print("held", held, flush=True)
        time.sleep(60)
    """
    with subprocess.Popen(python_command(code), stdout=subprocess.PIPE, text=True, env=python_env()) as owner:
        assert owner.stdout is not None and owner.stdout.readline().strip() == "held True"
        with cache.locked(KEY, timeout=0.1) as held:
            assert not held
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        with cache.locked(KEY, timeout=10) as held:
            assert held


def test_a_forked_child_does_not_keep_the_lock(store: Path) -> None:
    """A worker forked by another thread while a build holds the lock shares the open file."""
    with cache.locked(KEY):
        child = os.fork()
        if child == 0:
            time.sleep(5)
            os._exit(0)
    try:
        with cache.locked(KEY, timeout=1) as held:
            assert held
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_swept_lock_file_does_not_let_two_in(store: Path) -> None:
    with cache.locked(KEY):
        path = store / ".locks" / f"{KEY}.lock"
        handle = os.open(path, os.O_RDWR)  # a waiter has opened the file that is then deleted
        path.unlink()
        os.close(handle)
        with cache.locked(KEY, timeout=0.05) as second:
            assert second  # a fresh file: allowed, publishing is atomic anyway
            with cache.locked(KEY, timeout=0.05) as third:
                assert not third


def test_next_owner_sweeps_a_killed_builders_folder(store: Path) -> None:
    left = cache.work_folder(KEY)
    (left / "half.o").write_text("x")
    fresh = cache.work_folder(KEY)
    assert not left.exists() and fresh.exists()


def test_build_slots_cap_all_processes(store: Path) -> None:
    order: list[str] = []
    with cache.build_slot(1):
        other = threading.Thread(target=lambda: [order.append("in") for _ in [cache.build_slot(1).__enter__()]])
        other.start()
        time.sleep(0.1)
        order.append("out")
    other.join()
    assert order == ["out", "in"]


def test_show_and_clear(store: Path) -> None:
    put()
    bad = put(key="e" * 20, label="bad_name")
    bad.path.write_bytes(b"")
    shown = cache.show()
    assert [(entry["label"], entry["state"]) for entry in shown["entries"]] == [("bad_name", "corrupt"), ("k", "ok")]
    assert shown["bytes"] > 0 and json.dumps(shown)
    with cache.locked("a" * 20):
        busy = cache.work_folder("a" * 20)
        dead = cache.work_folder("b" * 20)
        assert cache.clear()[0] == 2
        assert busy.exists() and not dead.exists()  # a build at work is left alone
    assert cache.show()["entries"] == []
    assert cache.clear() == (0, 0) and not busy.exists()


def test_clear_where_nothing_was_ever_built(store: Path) -> None:
    assert cache.clear() == (0, 0) and cache.show()["entries"] == []


def test_locks_work_without_torch_or_compiler(store: Path) -> None:
    done = run_python("print(cache.show()['entries'], 'torch' in sys.modules)", PATH="/nonexistent")
    assert done.stdout.strip() == "[] False", done.stderr


def test_sizes_while_builders_come_and_go(store: Path) -> None:
    store.mkdir(parents=True, exist_ok=True)
    stop = threading.Event()

    def build() -> None:
        while not stop.is_set():
            work = store / ".build-0-x"
            (work / "deep" / "er").mkdir(parents=True)
            (work / "deep" / "er" / "lib.so").write_bytes(b"x")
            shutil.rmtree(work)

    builder = threading.Thread(target=build)
    builder.start()
    try:
        assert all(cache.size() >= 0 for _ in range(400))
    finally:
        stop.set()
        builder.join()
