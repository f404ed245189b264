"""QuantTensor as an object: identity, sameness, copies, pickles."""

from __future__ import annotations

import copy
import io
import pickle
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pykern.errors import ArgumentError
from pykern.ops._quant import LAYOUTS
from pykern.quant import QuantTensor, embedding, prepack

LAYOUT_NAMES = [name for name in LAYOUTS if not name.startswith("packed")]


def made(layout: str = "int4", n: int = 3, k: int = 64, group: int = 0) -> QuantTensor:
    return QuantTensor.quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(1)), layout, group)


def act_order() -> QuantTensor:
    q = made()
    return replace(q, perm=torch.randperm(64, generator=torch.Generator().manual_seed(2)))


def copies(q: QuantTensor) -> list[QuantTensor]:
    stored = io.BytesIO()
    torch.save(q, stored)
    stored.seek(0)
    found = [copy.deepcopy(q), copy.copy(q), torch.load(stored, weights_only=False), q.to("cpu"), replace(q)]
    # Of float8 torch 2.13 cannot read its own plain pickle ("UntypedStorage has no attribute 'dtype'").
    return found if q.layout == "fp8" else [*found, pickle.loads(pickle.dumps(q))]


@pytest.mark.parametrize("layout", LAYOUT_NAMES)
def test_equality_is_identity(layout: str) -> None:
    """Of the object: a copy is another one, however alike; as hashes want it."""
    q = made(layout)
    for other in copies(q):
        assert q == q and q != other and other not in [q]
        assert len({q, other, q}) == 2 and {q: "first", other: "second"}[q] == "first"
        assert q.equal(other) and other.equal(q)
    assert q != "int4" and q != None and q != q.planes  # noqa: E711


def test_a_dict_of_matrices_reads_none_of_them() -> None:
    """Values that cannot be looked at: comparing or hashing them would raise."""
    with torch.device("meta"):
        one, other = (QuantTensor({"codes": torch.empty(3, 32, dtype=torch.uint8), "scales": torch.empty(3, 1)},
                                  "int4", (3, 64)) for _ in range(2))  # fmt: skip
    assert {one: 1, other: 2} == {one: 1, other: 2} and one != other


PACKED = prepack(made("int4_min", k=128, group=32))


@pytest.mark.parametrize("q", [made("fp8"), act_order(), PACKED, made(n=0), made(k=0)])
def test_a_copy_is_whole(q: QuantTensor) -> None:
    for other in copies(q):
        assert other.equal(q) and (other.layout, other.shape, other.group) == (q.layout, q.shape, q.group)
        other.check()
        assert torch.equal(other.dequantize(), q.dequantize())
    deep = copy.deepcopy(q)
    for name, t in deep.planes.items():
        assert not t.numel() or t.data_ptr() != q.planes[name].data_ptr()


def test_sameness_tells_every_difference() -> None:
    q, changed = act_order(), []

    def with_plane(name: str, t: torch.Tensor) -> None:
        changed.append(replace(q, planes={**q.planes, name: t}))

    for name, t in q.planes.items():
        other = t.clone()
        other.view(torch.uint8)[-1, -1] ^= 1  # one bit of one element
        with_plane(name, other)
    with_plane("scales", q.planes["scales"].half())
    with_plane("zeros", torch.full((3, 1), 8, dtype=torch.uint8))  # the same weights, told otherwise
    changed += [replace(q, perm=None), replace(q, perm=q.perm.flip(0)), replace(q, group=64), made(n=4), made("int8")]
    for other in changed:
        assert not q.equal(other) and not other.equal(q)
    nan = {**q.planes, "scales": torch.full((3, 1), float("nan"))}
    assert replace(q, planes=nan).equal(replace(q, planes={k: v.clone() for k, v in nan.items()}))
    negative = {**q.planes, "scales": torch.zeros(3, 1)}
    assert not replace(q, planes=negative).equal(replace(q, planes={**negative, "scales": -torch.zeros(3, 1)}))


def test_sameness_wants_a_matrix() -> None:
    wrong: Any
    for wrong in (None, torch.ones(2, 2), "int4", {}):
        with pytest.raises(ArgumentError, match=f"^other: got {type(wrong).__name__}, allowed: a pykern.QuantTensor"):
            made().equal(wrong)
    with pytest.raises(ArgumentError, match="^table: got Tensor, allowed: a pykern.QuantTensor"):
        embedding(torch.tensor([0]), torch.ones(2, 2))  # type: ignore[arg-type]


def test_an_unpickled_one_is_a_pytree_in_a_process_that_made_none(tmp_path: Path) -> None:
    (tmp_path / "q.pickle").write_bytes(pickle.dumps(act_order()))
    code = (
        "import pickle, sys, torch, torch.utils._pytree as pytree\n"
        "q = pickle.load(open(sys.argv[1], 'rb'))\n"
        "leaves, _ = pytree.tree_flatten(q)\n"
        "assert [type(t).__name__ for t in leaves] == ['Tensor'] * 3, leaves\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "q.pickle")], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_the_pages_example_runs() -> None:
    """docs/quant.md's, as it stands."""
    page = (Path(__file__).parents[2] / "docs" / "quant.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    space: dict[str, Any] = {}
    exec(compile(block, "quant.md", "exec"), space)
    assert space["y"].shape == (1, 64) and space["w"].dtype == torch.bfloat16
    assert torch.equal(space["h"], space["qt"].dequantize()[[3, 1]])
    assert copy.deepcopy(space["qt"]) != space["qt"] and copy.deepcopy(space["qt"]).equal(space["qt"])
