"""What a plan may ask about a tensor, against the addresses themselves."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykern.errors import ArgumentError
from pykern.schema import ITEMSIZE, Problem, TensorInfo

DTYPES = ("float32", "bfloat16", "uint8")
STEPS = (0, 1, 2, 4, 6, 8, 16, 24)


@st.composite
def tensors(draw: st.DrawFn) -> TensorInfo:
    shape = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=4)))
    strides = (*(draw(st.sampled_from(STEPS)) for _ in shape[1:]), 1)
    return TensorInfo(draw(st.sampled_from(DTYPES)), shape, strides, draw(st.sampled_from((1, 2, 4, 8, 16, 64, 256))))


def row_starts(t: TensorInfo) -> list[int]:
    """Byte addresses of all rows along the last axis, of a tensor that lies no better than its ``align`` says."""
    places = itertools.product(*(range(n) for n in t.shape[:-1]))
    steps = [sum(i * s for i, s in zip(place, t.strides, strict=False)) for place in places]
    return [t.align + step * ITEMSIZE[t.dtype] for step in steps]


@given(tensors(), st.sampled_from((1, 2, 4, 8, 16, 32)))
def test_rows_aligned_is_what_the_addresses_say(t: TensorInfo, nbytes: int) -> None:
    assert t.rows_aligned(nbytes) == all(start % nbytes == 0 for start in row_starts(t))


@given(tensors())
def test_rows_walk_the_leading_axes(t: TensorInfo) -> None:
    try:
        rows, stride = t.rows("x")
    except ArgumentError:
        return
    first = t.align
    assert row_starts(t) == [first + i * stride * t.itemsize for i in range(rows)]


def test_a_problem_answers_for_inputs_and_outputs() -> None:
    good, bad = TensorInfo("float32", (2, 8), (8, 1)), TensorInfo("float32", (2, 8), (9, 1))
    p = Problem({"x": good, "w": bad, "none": None}, {}, {}, outs={"y": TensorInfo("float32", (2, 8), (8, 1), align=4)})
    assert p.rows_aligned("x") and p.rows_aligned("w", nbytes=4) and p.rows_aligned("y", nbytes=4)
    assert p.rows_aligned("x", "none", "fresh")  # an absent input, an output that is allocated
    for name in ("w", "y"):
        assert not p.rows_aligned("x", name)


@pytest.mark.parametrize("strides", [(12, 5, 1), (4, 8, 1)])
def test_axes_that_no_stride_walks_are_refused_by_name(strides: tuple[int, ...]) -> None:
    with pytest.raises(ArgumentError, match=r"x\.stride\(\): got .*, allowed: leading axes of \(2, 3, 4\)"):
        TensorInfo("float32", (2, 3, 4), strides).rows("x")
