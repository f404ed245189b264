"""What the quantised ops share: the layouts, the check of their planes, and the definition of a weight in torch.

``Tensor[] planes, str layout, int group`` is how an op sees a packed matrix ``[n, k]``; :class:`pykern.QuantTensor`
holds the same. A scale belongs to ``group`` neighbours of a row, ``ceil(k / group)`` of them; group 0 is the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pykern.errors import ArgumentError
from pykern.op import Draw, Spec
from pykern.plan import I32, I64, Arg, In, ceil_div
from pykern.schema import FLOATS, ITEMSIZE, Problem, TensorInfo


@dataclass(frozen=True)
class Layout:
    """One way to lay a matrix out. ``struct``: its name in cuda_src/ops/quant_formats.cuh; ``codes``: dtype of the
    first plane; ``bits`` of a weight's code; ``block``: bytes of a GGUF block of 32, 0 elsewhere; ``multiple``: what
    k must be a multiple of; ``needed``: planes it must have of ``planes``."""

    struct: str
    planes: tuple[str, ...]
    codes: str = "uint8"
    bits: int = 4
    block: int = 0
    multiple: int = 2
    needed: int = 2

    @property
    def minima(self) -> bool:
        return self.planes[-1] == "mins"


LAYOUTS = {
    "q4_0": Layout("QuantQ4_0", ("blocks",), block=18, multiple=32, needed=1),
    "q4_1": Layout("QuantQ4_1", ("blocks",), block=20, multiple=32, needed=1),
    "q8_0": Layout("QuantQ8_0", ("blocks",), bits=8, block=34, multiple=32, needed=1),
    "int4": Layout("QuantInt4", ("codes", "scales", "zeros")),
    "int4_min": Layout("QuantInt4", ("codes", "scales", "mins"), needed=3),
    "int8": Layout("QuantInt8", ("codes", "scales"), codes="int8", bits=8, multiple=1),
    "fp8": Layout("QuantFp8", ("codes", "scales"), codes="float8_e4m3fn", bits=8, multiple=1),
    "packed4.v1": Layout("QuantPacked4", ("codes", "scales", "zeros"), multiple=128),
    "packed4_min.v1": Layout("QuantPacked4", ("codes", "scales", "mins"), multiple=128, needed=3),
}
TYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "uint8": 3}  # QuantType in cuda_src/ops/quant_formats.cuh
FAST, MINIMA, OFFSETS = 1 << 5, 1 << 4, 1 << 11
LIMIT = 1 << 31


@dataclass(frozen=True)
class Packed:
    """A checked packed matrix: sizes, and the words the kernels take."""

    layout: Layout
    n: int
    k: int
    group: int
    groups: int
    tags: int
    planes: int

    @property
    def pointers(self) -> tuple[Arg, ...]:
        """Codes, scales and offsets as kernel arguments; null where the layout has none."""
        return tuple(In("planes", i) if i < self.planes else I64(0) for i in range(3))

    @property
    def sizes(self) -> tuple[Arg, ...]:
        return I32(self.group), I32(self.groups), I32(self.tags)

    @property
    def fast(self) -> bool:
        """Whether 8 weights at a multiple of 8 are whole, aligned, and of one group."""
        return bool(self.tags & FAST)


def packed(p: Problem) -> Packed:
    """The packed matrix of a problem with ``planes``, ``layout`` and ``group``."""
    return check_planes(p["planes"], p.layout, p.group)


def check_planes(planes: Sequence[TensorInfo], name: str, group: int) -> Packed:
    """Sizes of a matrix from its planes; ArgumentError names the plane, what it is and what is allowed."""
    layout = LAYOUTS.get(name)
    if layout is None:
        raise ArgumentError("layout", repr(name), ", ".join(map(repr, LAYOUTS)))
    if not layout.needed <= len(planes) <= len(layout.planes):
        want = f"{layout.needed}..{len(layout.planes)}" if layout.needed < len(layout.planes) else f"{layout.needed}"
        raise ArgumentError("planes", f"{len(planes)} tensors", f"{want}: {', '.join(layout.planes)} ({name})")
    for i, plane in enumerate(planes):
        kinds = (layout.codes,) if i == 0 else (*FLOATS, "uint8") if layout.planes[i] == "zeros" else FLOATS
        if plane.dtype not in kinds:
            raise ArgumentError(f"planes[{i}].dtype", plane.dtype, f"{', '.join(kinds)} ({layout.planes[i]} of {name})")
        if len(plane.shape) != 2:
            raise ArgumentError(f"planes[{i}].dim()", len(plane.shape), f"2 ({layout.planes[i]} of {name})")
        if not plane.contiguous:
            raise ArgumentError(f"planes[{i}].stride()", plane.strides, "contiguous; call .contiguous()")
    n, width = planes[0].shape
    if layout.block:
        if width % layout.block:
            raise ArgumentError("planes[0].shape[1]", width, f"a multiple of {layout.block} bytes, a block of {name}")
        k = width // layout.block * 32
        if group not in (0, 32):
            raise ArgumentError("group", group, f"0 or 32: blocks of {name} hold 32 weights")
    else:
        k = width * 8 // layout.bits
        if k % layout.multiple:
            raise ArgumentError(
                "planes[0].shape[1]", width, f"k = {k} must be a multiple of {layout.multiple} ({name})"
            )
        if not 0 <= group < LIMIT:
            raise ArgumentError("group", group, "0 (a whole row) or the number of neighbours that share a scale")
    if n >= LIMIT or k >= LIMIT or n * ceil_div(k, 8) >= LIMIT:
        raise ArgumentError("planes[0].shape", planes[0].shape, "fewer than 2**34 weights")
    size = 32 if layout.block else group or max(k, 1)
    groups = ceil_div(k, size)
    tags, fast = MINIMA if layout.minima else 0, planes[0].align >= 2
    if not layout.block:
        for i, plane in enumerate(planes[1:], start=1):
            if plane.shape != (n, groups):
                why = f"({n}, {groups}): ceil(k / group) = ceil({k} / {size}) groups a row"
                raise ArgumentError(f"planes[{i}].shape", plane.shape, why)
            tags |= TYPES[plane.dtype] << 2 * (i - 1)
        tags |= OFFSETS if len(planes) == 3 else 0
        # Nibbles are read 16 bytes at a time by quant_linear, bytes 8 at a time.
        fast = k % (32 if layout.bits == 4 else 8) == 0 and size % 8 == 0
        fast = fast and planes[0].align >= (16 if layout.bits == 4 else 8)
    if size & (size - 1) == 0:
        tags |= size.bit_length() << 6
    elif groups == 1 and k <= 1 << 30:  # any shift that leaves nothing of an index: a division costs more than a weight
        tags |= (1 + (k - 1).bit_length()) << 6
    return Packed(layout, n, k, size, groups, tags | (FAST if fast else 0), len(planes))


def in_own_type(p: Problem, q: Packed, dtype: str) -> bool:
    """Whether the weights of ``q`` have the bits that 16-bit ``dtype``'s own arithmetic gives: 4-bit codes whose scales
    are of that type and whose zeros, if any, are bytes. Codes less zeros are exact, and their product with a scale is
    rounded once either way."""
    planes = p["planes"]
    if q.layout.bits != 4 or q.layout.block or q.layout.minima or ITEMSIZE[dtype] != 2:
        return False
    return planes[1].dtype == dtype and (len(planes) < 3 or planes[2].dtype == "uint8")


# ---- the definition


def dequantize_reference(planes: Sequence[Any], name: str, group: int = 0) -> Any:
    """float32 weights ``[n, k]`` by torch operations, each rounded once: what the kernels give, bit for bit."""
    import torch

    layout = LAYOUTS[name]
    planes = [t.cpu().clone() for t in planes]  # a view may start at any byte
    codes = planes[0]
    n = codes.shape[0]
    if layout.block:
        blocks = codes.reshape(n, -1, layout.block)

        def number(at: int) -> Any:
            return blocks[..., at : at + 2].contiguous().view(torch.float16).float()

        if name == "q8_0":
            return (blocks[..., 2:].view(torch.int8).float() * number(0)).reshape(n, -1)
        nibbles = blocks[..., 4:] if name == "q4_1" else blocks[..., 2:]
        q = torch.cat([nibbles & 15, nibbles >> 4], -1).float()
        w = number(0) * q + number(2) if name == "q4_1" else number(0) * (q - 8)
        return w.reshape(n, -1)
    if layout.bits == 4:
        if name.startswith("packed4"):
            codes = unpack_words(codes)
        codes = torch.stack([codes & 15, codes >> 4], -1).reshape(n, -1)
    k = codes.shape[1]
    column = torch.arange(k) // (group or max(k, 1))
    q, scale = codes.float(), planes[1].float()[:, column]
    if layout.bits == 8:
        return q * scale
    offset = planes[2].float()[:, column] if len(planes) > 2 else torch.tensor(8.0)
    return q * scale + offset if layout.minima else (q - offset) * scale


NIBBLE_OF = (0, 4, 1, 5, 2, 6, 3, 7)  # where weight j of a word lies in packed4.v1: interleaved_nibble(j)


def pack_words(codes: Any) -> Any:
    """int4's codes ``[n, k / 2]`` in packed4.v1's order (see cuda_src/ops/quant_formats.cuh)."""
    import torch

    q = torch.stack([codes & 15, codes >> 4], -1).reshape(-1, 4, 4, 8)  # 128 weights: [step u, lane t, weight]
    order = torch.tensor([NIBBLE_OF.index(nibble) for nibble in range(8)], device=codes.device)
    q = q.transpose(1, 2)[..., order].reshape(-1, 2)
    return (q[:, 0] | q[:, 1] << 4).reshape(codes.shape)


def unpack_words(codes: Any) -> Any:
    """The inverse of :func:`pack_words`."""
    import torch

    q = torch.stack([codes & 15, codes >> 4], -1).reshape(-1, 4, 4, 8)
    q = q[..., torch.tensor(NIBBLE_OF, device=codes.device)].transpose(1, 2).reshape(-1, 2)
    return (q[:, 0] | q[:, 1] << 4).reshape(codes.shape)


# ---- test data


def plane_specs(name: str, n: int, k: int, group: int, scales: str, offsets: str | None, layout: str) -> list[Spec]:
    """Specs of the planes of a matrix; ``offsets``: dtype of zeros or minima (None: none); ``layout``: the codes'."""
    kind = LAYOUTS[name]
    if kind.block:
        return [Spec("uint8", (n, k // 32 * kind.block), layout)]
    groups = ceil_div(k, group or max(k, 1))
    specs = [Spec(kind.codes, (n, k * kind.bits // 8), layout), Spec(scales, (n, groups))]
    return specs if offsets is None else [*specs, Spec(offsets, (n, groups))]


def draw_planes(draw: Draw, name: str, k_steps: int = 12) -> tuple[list[Spec], int, int]:
    """(planes, k, group) around what the kernels treat apart: partial groups, odd sizes, misaligned codes."""
    from pykern.testing import sizes

    kind = LAYOUTS[name]
    n = draw(sizes(1, 40, around=[16, 32]))
    if kind.block:
        k, group = 32 * draw(sizes(1, k_steps)), 0
    else:
        step = kind.multiple if kind.multiple > 2 else draw.one_of((kind.multiple, 8, 32))
        k = step * draw(sizes(1, max(1, min(40, 32 * k_steps // step))))
        group = draw.one_of((0, 8, 24, 32, 128, 3 if kind.bits == 8 else 6))
    if kind.minima:
        offsets: str | None = draw.one_of(FLOATS)
    else:
        offsets = draw.one_of((None, *FLOATS, "uint8")) if "zeros" in kind.planes else None
    where = draw.one_of(("contiguous", "contiguous", "offset"))
    return plane_specs(name, n, k, group, draw.one_of(FLOATS), offsets, where), k, group


def make_planes(specs: Sequence[Spec], name: str, rng: Any) -> list[Any]:
    """Random codes, scales of weights near 1, whole zeros in a uint8 plane and any in a real one."""
    import torch

    from pykern.testing.data import lay_out, make_tensor

    kind, made = LAYOUTS[name], []
    for i, spec in enumerate(specs):
        dtype = getattr(torch, spec.dtype)
        if i == 0 and kind.codes == "float8_e4m3fn":
            values = torch.randn(spec.shape, generator=rng).to(dtype)
        elif i == 0:
            values = make_tensor(Spec(spec.dtype, spec.shape), rng)
        elif kind.planes[i] == "scales":
            values = (torch.rand(spec.shape, generator=rng) * 0.1 - 0.02).to(dtype)
        elif kind.planes[i] == "mins":
            values = torch.randn(spec.shape, generator=rng).to(dtype)
        else:
            values = torch.rand(spec.shape, generator=rng) * 15
            values = values.round().to(dtype) if spec.dtype == "uint8" else values.to(dtype)
        if kind.block:
            lanes = (spec.shape[0], spec.shape[1] // kind.block, 2 if name == "q4_1" else 1)
            numbers = (torch.rand(lanes, generator=rng) * 0.1 - 0.02).half()
            values.view(*lanes[:2], kind.block)[..., : 2 * lanes[2]] = numbers.view(torch.uint8)
        made.append(lay_out(values, spec.layout, torch))
    return made
