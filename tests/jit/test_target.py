"""Targets: what a card says about itself, from torch or cuda.core."""

from __future__ import annotations

import types

import pytest

from pykern.errors import ToolchainError
from pykern.jit import target
from pykern.plan import Target, host_target

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def fresh():
    target.cuda_target.cache_clear()
    yield
    target.cuda_target.cache_clear()


def card(monkeypatch: pytest.MonkeyPatch, **properties: object) -> None:
    monkeypatch.setattr(target, "_from_cuda_core", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: types.SimpleNamespace(**properties))


def test_the_host_default() -> None:
    for device in ("cpu", torch.device("cpu")):
        assert target.default_target(device) == host_target()


def test_an_h200_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    card(
        monkeypatch, major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=232448,
        L2_cache_size=60 << 20,
    )  # fmt: skip
    wanted = Target("90a", 132, 232448, 60 << 20, 16)
    for device in (0, "cuda:0", torch.device("cuda", 0)):
        assert target.default_target(device) == wanted


def test_properties_that_an_older_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, major=8, minor=0, multi_processor_count=108)
    found = target.default_target(1)
    assert (found.arch, found.sms, found.smem_optin, found.max_cluster) == ("80", 108, 166912, 1)


def test_a_card_that_is_not_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    card(monkeypatch, major=12, minor=9, multi_processor_count=7, shared_memory_per_block_optin=1, L2_cache_size=2)
    found = target.default_target(0)
    assert (found.arch, found.max_cluster) == ("129", 8)


def test_cuda_core_is_asked_what_torch_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only then: its import is most of a first call's time."""
    facts = {"major": 9, "minor": 0, "sms": 114, "smem": 232448, "l2": 50 << 20}
    asked: list[int] = []
    known = dict(major=9, minor=0, multi_processor_count=132, shared_memory_per_block_optin=1)
    card(monkeypatch, **known)
    monkeypatch.setattr(target, "_from_cuda_core", lambda index: asked.append(index) or facts)
    assert target.default_target(3) == Target("90a", 114, 232448, 50 << 20, 16) and asked == [3]
    card(monkeypatch, **known, L2_cache_size=2)
    monkeypatch.setattr(target, "_from_cuda_core", lambda index: asked.append(index) or facts)
    assert target.default_target(2) == Target("90a", 132, 1, 2, 16) and asked == [3]


def test_no_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "_from_cuda_core", lambda index: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ToolchainError, match="no CUDA device"):
        target.default_target("cuda")


@pytest.mark.gpu
def test_both_sources_agree_on_a_real_card() -> None:
    by_core, by_torch = target._from_cuda_core(0), target._from_torch(0)
    if by_core is None:
        pytest.skip("cuda.core is not installed")
    assert by_core == by_torch
