"""Division by multiplication: the numbers a plan passes to pk::Divider (core/divide.cuh) divide exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.plan import divider

TOP = (1 << 31) - 1


def divided(n: int, d: int) -> int:
    """What the kernel computes."""
    magic, shift = (arg.value for arg in divider(d))
    return n if magic == 0 else ((n * (magic % (1 << 32))) >> 32) >> shift


@given(st.integers(1, TOP), st.integers(0, TOP))
def test_any(d: int, n: int) -> None:
    assert divided(n, d) == n // d


@given(st.integers(0, 30), st.integers(-2, 2), st.integers(0, TOP), st.integers(-1, 1))
def test_around_powers_and_multiples(e: int, near: int, q: int, off: int) -> None:
    d = min(max(1, (1 << e) + near), TOP)
    for n in (q // d * d + off, TOP // d * d + off, TOP):
        if 0 <= n <= TOP:
            assert divided(n, d) == n // d, (n, d)


def test_every_small_divisor() -> None:
    for d in range(1, 2000):
        for q in (1, 2, 3, 1000, TOP // d - 1, TOP // d):
            for n in (q * d - 1, q * d, q * d + 1):
                if n <= TOP:
                    assert divided(n, d) == n // d, (n, d)


@pytest.mark.parametrize("d", [0, -1, 1 << 31])
def test_what_cannot_be_divided_by(d: int) -> None:
    with pytest.raises(ValueError, match="1 to 2"):
        divider(d)
