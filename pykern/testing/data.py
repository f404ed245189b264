"""Test data: sizes around boundaries, tensors in awkward layouts, values that hurt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hypothesis import strategies as st

from pykern.errors import ArgumentError
from pykern.op import Case, Op, Spec, row_pad
from pykern.schema import Scalar

FILLS = ("normal", "spiky", "uniform", "zeros", "ties")
TIES = (-1.0, -0.0, 0.0, 0.5, 1.0)  # so few that every row has equal values, zeros of both signs among them
LAYOUTS = ("contiguous", "contiguous", "rows", "offset", "expanded")


class DrawFn:
    """A draw function that also offers ``draw.one_of(values)``."""

    def __init__(self, draw: Callable[[st.SearchStrategy[Any]], Any]) -> None:
        self._draw = draw

    def __call__(self, strategy: st.SearchStrategy[Any]) -> Any:
        return self._draw(strategy)

    def one_of(self, values: Sequence[Any]) -> Any:
        """One of ``values``, each as likely."""
        return self._draw(st.sampled_from(list(values)))


def sizes(low: int, high: int, around: Sequence[int] = ()) -> st.SearchStrategy[int]:
    """Integers in [low, high], often at or one off the values ``around`` (plan boundaries)."""
    edges = sorted({v + d for v in around for d in (-1, 0, 1) if low <= v + d <= high})
    uniform = st.integers(low, high)
    return st.one_of(st.sampled_from(edges), uniform) if edges else uniform


@st.composite
def tensor_spec(
    draw: Any,
    dtype: str,
    shape: tuple[int, ...],
    layouts: Sequence[str] = LAYOUTS,
    fills: Sequence[str] = ("normal", "normal", "spiky"),
) -> Spec:
    """A :class:`Spec` of ``shape`` in a drawn layout and fill."""
    return Spec(dtype, shape, draw(st.sampled_from(list(layouts))), draw(st.sampled_from(list(fills))))


def spikes(dtype: str) -> list[float]:
    """Values that break kernels: zeros of both signs, denormals, infinities, NaN, the largest and the smallest."""
    import torch

    info = torch.finfo(getattr(torch, dtype))
    tiny = info.smallest_normal
    return [0.0, -0.0, tiny, -tiny, tiny / 4, info.max, info.min, float("inf"), float("-inf"), float("nan")]


def fill(shape: tuple[int, ...], dtype: str, kind: str, rng: Any) -> Any:
    """A contiguous tensor of random values: ``normal``, ``spiky`` (about one row in three holds a spike), ``uniform``,
    ``zeros``, ``ties`` (of :data:`TIES`, each as likely; integers: 0, 1, 2); integers else take their whole range."""
    import torch

    t = getattr(torch, dtype)
    if not t.is_floating_point:
        if t is torch.bool:
            return torch.randint(0, 2, shape, generator=rng).to(t)
        if kind == "ties":
            return torch.randint(0, 3, shape, generator=rng).to(t)
        info = torch.iinfo(t)
        low, high = (0, 1 << 16) if info.bits > 32 else (info.min, info.max)
        return torch.randint(low, high, shape, generator=rng).to(t)
    if kind == "zeros":
        return torch.zeros(shape, dtype=t)
    if kind == "ties":
        return torch.tensor(TIES)[torch.randint(0, len(TIES), shape, generator=rng)].to(t)
    base = torch.rand(shape, generator=rng) if kind == "uniform" else torch.randn(shape, generator=rng)
    x = base.to(t)
    if kind == "spiky" and x.numel():
        flat = x.view(-1)
        values = spikes(dtype if t.itemsize > 1 else "float16")
        for _ in range(max(1, x.numel() // max(1, 3 * shape[-1]))):
            at = int(torch.randint(0, flat.numel(), (1,), generator=rng))
            flat[at] = values[int(torch.randint(0, len(values), (1,), generator=rng))]
    return x


def make_tensor(spec: Spec, rng: Any, device: str = "cpu") -> Any:
    """The tensor a :class:`Spec` describes; memory around it (padding, before, after) holds NaN or 0x7f."""
    import torch

    values = fill(spec.shape, spec.dtype, spec.fill, rng).to(device)
    return lay_out(values, spec.layout, torch)


def lay_out(values: Any, layout: str, torch: Any) -> Any:
    """``values`` laid out in memory as ``layout`` says, surrounded by poison."""
    shape = tuple(values.shape)
    poison = float("nan") if values.dtype.is_floating_point and values.dtype.itemsize > 1 else 0x7F

    def poisoned(n: int) -> Any:
        if values.dtype.is_floating_point and values.dtype.itemsize == 1:
            return torch.full((n,), 0x7F, dtype=torch.uint8, device=values.device).view(values.dtype)
        return torch.full((n,), 1 if values.dtype == torch.bool else poison, dtype=values.dtype, device=values.device)

    if layout == "rows" and len(shape) >= 2:
        pad = shape[-1] + row_pad(str(values.dtype).removeprefix("torch."))
        lead = values.numel() // shape[-1] if shape[-1] else 0
        strides, step = [1], pad
        for n in reversed(shape[:-1]):
            strides.append(step)
            step *= max(n, 1)
        out = poisoned(max(1, max(lead, 1) * pad)).as_strided(shape, tuple(reversed(strides)))
    elif layout == "offset":
        out = poisoned(values.numel() + 6)[3 : 3 + values.numel()].view(shape)
    elif layout == "expanded" and shape and shape[0] > 0:
        first = values[:1].contiguous()
        return first.expand(shape)
    elif layout == "transposed" and len(shape) >= 2:
        return values.transpose(-1, -2).contiguous().transpose(-1, -2)
    else:
        return values.contiguous()
    out.copy_(values)
    return out


def make_args(op: Op, case: Case, seed: int, device: str = "cpu") -> dict[str, Any]:
    """Arguments of ``op`` for a case, by name: tensors on ``device`` (made on the CPU, so equal everywhere)."""
    import torch

    rng = torch.Generator().manual_seed(seed)
    if op.make is not None:
        made = op.make(case, rng)
        for spec in op.inputs:
            made.setdefault(spec.name, case.get(spec.name, spec.default if isinstance(spec, Scalar) else None))
    else:
        made = {}
        for spec in op.inputs:
            v = case.get(spec.name)
            for each in v if isinstance(v, list) else [v]:
                if isinstance(each, Spec) and each.fill not in FILLS:
                    raise ArgumentError(
                        f"{spec.name}: fill", repr(each.fill), f"{', '.join(FILLS)} (no make: {op.name})"
                    )
            if isinstance(v, list):
                made[spec.name] = [make_tensor(s, rng) for s in v]
            elif isinstance(v, Spec):
                made[spec.name] = make_tensor(v, rng)
            elif isinstance(spec, Scalar):
                made[spec.name] = spec.default if v is None else v
            else:
                made[spec.name] = v
    return move(made, device)


def move(args: dict[str, Any], device: str) -> dict[str, Any]:
    """``args`` with their tensors on ``device``, strides and storage offsets kept."""
    import torch

    def one(t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.device.type == device:
            return t
        storage = t.untyped_storage()
        flat = torch.empty(storage.nbytes(), dtype=torch.uint8)
        flat.untyped_storage().copy_(storage)
        there = flat.to(device).view(t.dtype) if storage.nbytes() % t.itemsize == 0 else flat.to(device)
        return there.as_strided(tuple(t.shape), tuple(t.stride()), t.storage_offset())

    return {k: [one(t) for t in v] if isinstance(v, list) else one(v) for k, v in args.items()}


def clone(args: dict[str, Any]) -> dict[str, Any]:
    """A copy of ``args`` with the same strides, offsets and surroundings, sharing no memory."""
    import torch

    def one(t: Any) -> Any:
        if not isinstance(t, torch.Tensor):
            return t
        storage = t.untyped_storage().clone()
        out = torch.empty(0, dtype=t.dtype, device=t.device)
        out.set_(storage, t.storage_offset(), tuple(t.shape), tuple(t.stride()))
        return out

    return {k: [one(t) for t in v] if isinstance(v, list) else one(v) for k, v in args.items()}
