"""The real model, fetched once; golden tokens."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from pykern.errors import ModelError

# Two spinning threads each in several test processes on two cores make every product ten times slower.
torch.set_num_threads(1)

DATA = Path(__file__).parent.parent / "data"


@pytest.fixture(scope="session")
def golden() -> list[dict]:
    """Greedy tokens of SmolLM2-135M-Instruct (Q4_1, dequantised to float32) from transformers 5.24."""
    return json.loads((DATA / "smollm2_greedy.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    from pykern.models.hub import model_path

    try:
        return model_path("smollm2")
    except ModelError as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"needs the model, which is not cached here and cannot be downloaded: {error}")
