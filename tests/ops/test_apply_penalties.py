"""Penalties: a case from public bug reports."""

from __future__ import annotations

import torch

import pykern

LOGITS = torch.tensor([[2.0, -2.0, 0.0, 1.0]])
COUNTS = torch.tensor([[3, 1, 0, 0]], dtype=torch.int32)


def test_repetition_is_applied_once_and_never_helps() -> None:
    got = pykern.apply_penalties(LOGITS, COUNTS, repetition=torch.tensor([2.0]))
    assert got.tolist() == [[1.0, -4.0, 0.0, 1.0]]
    want = torch.tensor([[0.4211205, 0.0028375, 0.1549216, 0.4211205]])
    assert torch.allclose(pykern.softmax(got), want, atol=1e-6)


def test_frequency_and_presence() -> None:
    got = pykern.apply_penalties(LOGITS, COUNTS, frequency=torch.tensor([0.5]), presence=torch.tensor([0.25]))
    assert got.tolist() == [[0.25, -2.75, 0.0, 1.0]]


def test_the_prompt_counts_for_repetition_only() -> None:
    prompt = torch.tensor([[False, False, False, True]])
    one = torch.ones(1)
    got = pykern.apply_penalties(LOGITS, None, prompt, repetition=2 * one, frequency=one, presence=one)
    assert got.tolist() == [[2.0, -2.0, 0.0, 0.5]]
