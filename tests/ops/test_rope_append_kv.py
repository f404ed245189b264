"""rope_append_kv: equal to rope and copies."""

from __future__ import annotations

import torch

import pykern


def test_it_is_rope_and_two_copies() -> None:
    t, h, kh, d = 5, 4, 2, 16
    qkv = torch.randn(t, (h + 2 * kh) * d)
    q, k, v = (p.view(t, -1, d) for p in qkv.split([h * d, kh * d, kh * d], -1))
    angles = torch.rand(32, d // 2)
    cos_sin = torch.cat([angles.cos(), angles.sin()], -1)
    positions, slots = torch.tensor([7, 0, 3, 31, 2]), torch.tensor([11, 0, -1, 5, 9])
    k_cache, v_cache = torch.randn(4, 3, kh, d), torch.randn(4, 3, kh, d)
    k_want, v_want = k_cache.clone(), v_cache.clone()
    rotated = pykern.rope(k, positions, cos_sin)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_want[slot // 3, slot % 3], v_want[slot // 3, slot % 3] = rotated[token], v[token]
    y = pykern.rope_append_kv(q, k, v, positions, cos_sin, k_cache, v_cache, slots)
    assert torch.equal(y, pykern.rope(q, positions, cos_sin))
    assert torch.equal(k_cache, k_want) and torch.equal(v_cache, v_want)


def test_slots_outside_the_cache_change_nothing() -> None:
    one = torch.ones(2, 1, 8)
    cache = torch.zeros(2, 2, 1, 8)
    pykern.rope_append_kv(
        one, one, one, torch.zeros(2, dtype=torch.int64), torch.ones(1, 8), cache, cache.clone(), torch.tensor([4, 99])
    )
    assert bool((cache == 0).all())
