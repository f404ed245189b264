"""Bad input to the public functions: refused by name, before anything is compiled; never a crash, never an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import pykern
from pykern import op as registry
from pykern.errors import ArgumentError, GradientError
from pykern.op import Op
from pykern.schema import Scalar, Tensor
from pykern.testing.data import clone, make_args

OPS = registry.names()


class Odd(torch.Tensor):
    """A wrapper subclass that knows no op."""

    @staticmethod
    def __new__(cls, t: torch.Tensor) -> Odd:
        return torch.Tensor._make_wrapper_subclass(cls, t.shape, dtype=t.dtype, device=t.device)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented


def good(op: Op) -> dict[str, Any]:
    return make_args(op, next(iter(op.cases())), 1)


def freed(t: torch.Tensor) -> torch.Tensor:
    t = t.contiguous().clone()
    t.untyped_storage().resize_(0)
    return t


# What a tensor is replaced with, and what the message says of it.
KINDS: dict[str, tuple[Any, str]] = {
    "sparse": (lambda t: torch.zeros(t.shape).to_sparse(), "layout: got torch.sparse_coo, allowed: torch.strided"),
    "csr": (lambda t: torch.zeros(4, 4).to_sparse_csr(), "layout: got torch.sparse_csr"),
    "mkldnn": (lambda t: torch.zeros(4, 4).to_mkldnn(), "layout: got torch._mkldnn"),
    "nested": (lambda t: torch.nested.nested_tensor([torch.zeros(2, 3), torch.zeros(1, 3)]), "a nested tensor"),
    "quantised": (lambda t: torch.quantize_per_tensor(torch.zeros(4, 4), 0.1, 0, torch.qint8), "torch.qint8"),
    "complex": (lambda t: torch.zeros(t.shape, dtype=torch.complex64), "dtype: got complex64, allowed: "),
    "uint16": (lambda t: torch.zeros(t.shape, dtype=torch.uint16), "dtype: got uint16, allowed: "),
    "subclass": (Odd, "got a Odd, allowed: a plain torch.Tensor"),
    "freed": (freed, "without memory"),
    "numpy": (lambda t: np.zeros(t.shape, np.float32), "ndarray"),
    "list": (lambda t: [1.0], "list"),
    "text": (lambda t: "3", "str"),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", OPS)
def test_tensors_of_a_wrong_kind_are_named(name: str, kind: str) -> None:
    op = registry.get(name)
    make, says = KINDS[kind]
    args = good(op)
    for spec in op.inputs:
        t = args.get(spec.name)
        if not isinstance(spec, Tensor) or t is None:
            continue
        if spec.many and kind in ("numpy", "list", "text"):
            continue
        whole = t[0] if spec.many else t
        if kind == "freed" and not whole.numel():
            continue
        value = [make(whole), *t[1:]] if spec.many else make(whole)
        with pytest.raises(ArgumentError) as caught:
            op(**{**clone(args), spec.name: value})
        text = str(caught.value)
        assert text.startswith(spec.name) and "allowed: " in text, f"{spec.name}: {text}"
        # A rank or shape that is wrong as well may be told first.
        assert says in text or ".dim()" in text or ".shape" in text, f"{spec.name}: {text}"


@pytest.mark.parametrize("name", [n for n in OPS if any(getattr(a, "many", False) for a in registry.get(n).inputs)])
@pytest.mark.parametrize("wrong", [None, 3, "text", [], [None], [3.5], ["text"]], ids=repr)
def test_lists_of_planes_are_named(name: str, wrong: Any) -> None:
    op = registry.get(name)
    with pytest.raises(ArgumentError, match=r"^planes.*allowed: "):
        op(**{**good(op), "planes": wrong})


WRONG_SCALARS = {
    "bool": [2, 1, 0, None, "no", 2.5, float("nan"), [True], torch.tensor(True), b""],
    "int": [None, "3", 2.5, float("nan"), True, [1], 2**63, -(2**63) - 1, 10**30, torch.tensor(1), np.float32(1)],
    "float": [None, "3", True, [1.0], 1j, 10**400, torch.tensor(1.0), torch.tensor(1.0, requires_grad=True)],
    "str": [None, 3, True, ["none"], b"none", "no such value", "\0", "x" * 100_000],
}


@pytest.mark.parametrize("name", OPS)
def test_scalars_of_a_wrong_kind_are_named(name: str) -> None:
    op = registry.get(name)
    args = good(op)
    for spec in op.inputs:
        if not isinstance(spec, Scalar):
            continue
        for value in WRONG_SCALARS[spec.type]:
            with pytest.raises(ArgumentError, match="allowed: ") as caught:
                op(**{**clone(args), spec.name: value})
            assert str(caught.value).startswith(spec.name), f"{spec.name} = {value!r}: {caught.value}"


def test_numbers_of_numpy_are_numbers() -> None:
    x = torch.randn(3, 40)
    assert torch.equal(pykern.softmax(x, log=np.bool_(True)), pykern.softmax(x, log=True))
    w = torch.ones(40)
    assert torch.equal(pykern.rms_norm(x, w, np.float32(0.5)), pykern.rms_norm(x, w, 0.5))
    assert torch.equal(pykern.rms_norm(x, w, 1), pykern.rms_norm(x, w, 1.0))


@pytest.mark.parametrize(
    ("out", "says"),
    [
        (lambda x: x.numpy(), "out: got ndarray, allowed: a tensor"),
        (lambda x: (x,), "out: got tuple of 1"),
        (lambda x: x.to_sparse(), "out.layout: got torch.sparse_coo"),
        (lambda x: torch._neg_view(torch.empty_like(x)), "negated"),
        (lambda x: torch.empty(x.shape, device="meta"), "out.device: got meta, allowed: cpu"),
        (lambda x: torch.empty(x.shape, dtype=torch.float64), "out.dtype: got float64, allowed: float32"),
        (lambda x: torch.empty(x.shape[1]), "out.shape"),
        (lambda x: torch.empty(1, x.shape[1]).expand(x.shape), "out.stride()"),
        (lambda x: freed(x), "out: got a tensor without memory"),
        (lambda x: Odd(x), "out: got a Odd"),
    ],
)
def test_out_is_named(out: Any, says: str) -> None:
    x = torch.randn(3, 40)
    with pytest.raises(ArgumentError) as caught:
        pykern.softmax(x, out=out(x))
    assert says in str(caught.value)


def test_views_that_negate_lazily_are_read_right() -> None:
    x = torch.randn(3, 40)
    assert torch.equal(pykern.softmax(torch._neg_view(x)), pykern.softmax(-x))


def test_memory_that_cannot_be_had_is_an_out_of_memory_error() -> None:
    says = r"pykern.softmax: no memory on cpu for y \(1073741824, 1048576\) float32 \(4,503,599,627,370,496 bytes\)"
    with pytest.raises(torch.OutOfMemoryError, match=says):
        pykern.softmax(torch.zeros(1, 1 << 20).expand(1 << 30, 1 << 20))


def test_devices_are_named() -> None:
    x, w = torch.randn(3, 40), torch.ones(40)
    with pytest.raises(ArgumentError, match=r"weight.device: got meta, allowed: cpu, as x"):
        pykern.rms_norm(x, w.to("meta"))
    with pytest.raises(ArgumentError, match=r"weight.device: got cpu, allowed: meta, as x"):
        pykern.rms_norm(x.to("meta"), w)
    assert pykern.softmax(x.to("meta")).device.type == "meta"


def test_the_tensor_that_asks_for_a_gradient_is_named() -> None:
    def leaf(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, requires_grad=True)

    x, w = torch.ones(2, 8), torch.ones(8)
    with pytest.raises(GradientError, match=r"pykern\.rms_norm: .*\(x requires grad\).* detach x$"):
        pykern.rms_norm(leaf(2, 8), w)
    with pytest.raises(GradientError, match=r"\(weight requires grad\)"):
        pykern.rms_norm(x, leaf(8))
    with pytest.raises(GradientError, match=r"\(residual requires grad\)"):
        pykern.rms_norm(x, w, residual=leaf(2, 8))
    q = pykern.quantize(torch.ones(8, 128), "int4", 32)
    planes = [q[0], q[1].float().requires_grad_(), *q[2:]]
    with pytest.raises(GradientError, match=r"\(planes requires grad\)"):
        pykern.dequantize(planes, "int4", 32)
    with torch.no_grad():
        assert pykern.rms_norm(leaf(2, 8), w).requires_grad is False


def test_a_gradient_of_a_scalar_is_not_dropped() -> None:
    with pytest.raises((ArgumentError, GradientError)):
        pykern.rms_norm(torch.ones(2, 8), torch.ones(8), torch.tensor(1e-5, requires_grad=True))


# ---- pykern.host, pykern.use_tuning, the registry


@pytest.mark.parametrize(
    "options",
    [
        {"arch": 90}, {"arch": "7"}, {"arch": ["90a"]}, {"check": "yes"}, {"check": 2}, {"trace": "no"},
        {"seed": 1.5}, {"seed": "1"}, {"seed": True}, {"seed": -1}, {"seed": 2**63}, {"async_order": 1},
        {"async_order": "late"}, {"threads": 2.5}, {"threads": "2"}, {"threads": -1}, {"threads": 10**9},
        {"sms": 0}, {"sms": "4"}, {"sms": 2.0}, {"sms": 2**31},
    ],
    ids=str,
)  # fmt: skip
def test_host_options_are_named_and_a_refusal_leaves_the_thread_as_it_was(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ArgumentError, match=rf"^{name}: got .*, allowed: "), pykern.host(**options):
        pytest.fail("accepted")
    assert registry.host_options() == registry.HostOptions()
    x = torch.randn(2, 8)
    assert torch.allclose(pykern.softmax(x), x.softmax(-1), atol=1e-6)


@pytest.fixture
def untuned() -> Iterator[None]:
    yield
    pykern.use_tuning(None)


@pytest.mark.usefixtures("untuned")
def test_tuning_is_a_file_or_its_text(tmp_path: Path) -> None:
    good = tmp_path / "tuned.json"
    good.write_text('{"90a": {"softmax": {"rows": 2}}}')
    for given in (good, str(good), good.read_text(), None, "{}"):
        pykern.use_tuning(given)
    bad = tmp_path / "bad.json"
    bad.write_bytes(b"\xff\xfe")
    allowed = r"^tuning: got .*, allowed: a JSON file .*"
    for wrong, says in (
        (tmp_path, "a folder"), (str(tmp_path), "a folder"), (tmp_path / "none.json", "no such file"),
        ("none.json", "no such file"), ("/dev/null", "not a plain file"), (bad, "utf-8"), ("", "None"), (3, "None"),
        (b"{}", "None"), ({"90a": {}}, "None"), ("a\0b", "None"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=allowed + says):
            pykern.use_tuning(wrong)
    for text, says in (
        ('{"77": {}}', "architecture '77', allowed: 80"), ('{"90a": {"softmox": {}}}', "op 'softmox', allowed: "),
        ("[]", "allowed: JSON"), ("{", "allowed: JSON"), ("[" * 100_000, "allowed: JSON"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=says):
            pykern.use_tuning(text)


@pytest.mark.parametrize("name", [None, 3, "", "softmox", "x" * 5000, "../softmax", "_rows", "none.py", "softmax.cuh"])
def test_names_of_ops(name: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^op: got .*allowed: "):
        registry.get(name)
