"""Hypothesis profiles and the GPU / nvcc markers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

_quiet = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=25, suppress_health_check=_quiet)
settings.register_profile("dev", deadline=None, max_examples=50, suppress_health_check=_quiet)
settings.register_profile("thorough", deadline=None, max_examples=1000, suppress_health_check=_quiet)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


def _has_gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = {name for name in ("gpu", "nvcc") if any(name in item.keywords for item in items)}
    gpu = "gpu" in wanted and _has_gpu()
    nvcc = "nvcc" in wanted and shutil.which("nvcc") is not None
    for item in items:
        if "gpu" in item.keywords and not gpu:
            item.add_marker(pytest.mark.skip(reason="GPU-only: no CUDA GPU here"))
        if "nvcc" in item.keywords and not nvcc:
            item.add_marker(pytest.mark.skip(reason="nvcc-only: no CUDA compiler here"))


@pytest.fixture(scope="module")
def own_registry() -> Iterator[None]:
    """What the tests of a module register is forgotten: other tests go through every op."""
    from pykern import op

    before = dict(op._registry), dict(op._files)
    yield
    for table, old in zip((op._registry, op._files), before, strict=True):
        table.clear()
        table.update(old)
