"""QuantTensor: a packed matrix as a value. From GGUF, GPTQ and AWQ checkpoints, or quantised here; used by linear and
embedding below. docs/quant.md describes the layouts.

    qt = QuantTensor.from_gguf(blocks, "q4_1", (n, k))
    y = pykern.quant.linear(x, qt, bias=b)              # pykern.quant_linear, with qt's planes
    h = pykern.quant.embedding(ids, qt, dtype="float16")
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pykern.errors import ArgumentError, typed

if TYPE_CHECKING:
    import torch

BLOCK_BYTES = {"q4_0": 18, "q4_1": 20, "q8_0": 34}
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # nibble i of an AWQ word, lowest first, belongs to this column of eight


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A packed matrix ``[n, k]``. ``planes`` by name, in the order of the layout (pykern.dequantize lists them);
    ``group``: neighbours of a row that share a scale (0: the row).

    ``perm`` (int64 ``[k]``, or None): weight j of a stored row belongs to column ``perm[j]``; of GPTQ checkpoints
    with act-order. A pytree: its leaves are the planes, so it may be an argument or attribute under torch.compile.

    ``==`` and ``hash`` are of the object, as an ``nn.Module``'s: a copy is another matrix, and neither reads gigabytes
    or waits for a GPU. :meth:`equal` compares what two hold. Copies and ``torch.save`` keep everything.
    """

    planes: dict[str, torch.Tensor]
    layout: str
    shape: tuple[int, int]
    group: int = 0
    perm: torch.Tensor | None = None

    def __post_init__(self) -> None:
        _register_pytree()
        self.check()

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Copied or unpickled, perhaps in a process that has made none."""
        _register_pytree()
        self.__dict__.update(state)

    def equal(self, other: QuantTensor) -> bool:
        """Whether ``other`` holds the same: layout, shape, group, and every plane and the perm bit for bit, on whatever
        device. Waits for the devices. The same weights in two layouts are not equal: compare :meth:`dequantize`."""
        import torch

        def of(q: QuantTensor) -> dict[str, torch.Tensor]:
            return q.planes if q.perm is None else {**q.planes, "perm": q.perm}

        _quantised(other, "other")
        mine, others = of(self), of(other)
        here = (self.layout, tuple(self.shape), self.group, list(mine))
        if here != (other.layout, tuple(other.shape), other.group, list(others)):
            return False
        for name, t in mine.items():
            o = others[name]
            if t.dtype != o.dtype or t.shape != o.shape:
                return False
            # As bytes: a NaN equals itself, and fp8 has no comparison of its own.
            if not torch.equal(t.contiguous().view(torch.uint8), o.to(t.device).contiguous().view(torch.uint8)):
                return False
        return True

    def check(self) -> None:
        """ArgumentError unless planes, layout, group, shape and perm fit; a perm must be a permutation (looking at its
        values waits for its device)."""
        import torch

        from pykern.op import tensor_info
        from pykern.ops._quant import LAYOUTS, check_planes

        if not isinstance(self.planes, dict):
            raise ArgumentError("planes", type(self.planes).__name__, "a dict of tensors by name")
        if isinstance(self.group, bool) or not isinstance(self.group, int):
            raise ArgumentError("group", repr(self.group), "an int: neighbours that share a scale, 0 for a row")
        if not isinstance(self.layout, str):
            raise ArgumentError("layout", repr(self.layout), ", ".join(map(repr, LAYOUTS)))
        for name, t in self.planes.items():
            _plain(f"planes[{name!r}]", t, torch)
        packed = check_planes([tensor_info(t, torch) for t in self.planes.values()], self.layout, self.group)
        names = LAYOUTS[self.layout].planes[: len(self.planes)]
        if tuple(self.planes) != names:
            raise ArgumentError("planes", ", ".join(self.planes), f"{', '.join(names)}, in this order ({self.layout})")
        if (packed.n, packed.k) != _sizes(self.shape):
            raise ArgumentError("shape", tuple(self.shape), f"({packed.n}, {packed.k}), what the planes hold")
        places = {str(t.device) for t in self.planes.values()}
        if len(places) > 1:
            raise ArgumentError("planes", f"tensors on {', '.join(sorted(places))}", "one device for all")
        if self.perm is not None:
            self._check_perm(self.perm, packed.k, torch)
            if type(self.perm) is torch.Tensor and self.perm.device.type in ("cpu", "cuda") and not _traced(torch):
                _check_permutation(self.perm, packed.k, torch)

    def _check_perm(self, perm: torch.Tensor, k: int, torch: Any) -> None:
        _plain("perm", perm, torch)
        if perm.dtype != torch.int64:
            raise ArgumentError("perm.dtype", str(perm.dtype).removeprefix("torch."), "int64")
        if tuple(perm.shape) != (k,):
            raise ArgumentError("perm.shape", tuple(perm.shape), f"({k},), a column for each weight of a row")
        if perm.device != self.device:
            raise ArgumentError("perm.device", perm.device, f"{self.device}, as the planes")

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The planes as the ops take them."""
        return list(self.planes.values())

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(t.numel() * t.element_size() for t in self.planes.values())

    @property
    def device(self) -> torch.device:
        return next(iter(self.planes.values())).device

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same matrix on ``device``."""
        check_device(device)
        planes = {name: t.to(device) for name, t in self.planes.items()}
        perm = None if self.perm is None else self.perm.to(device)
        return QuantTensor(planes, self.layout, self.shape, self.group, perm)

    def dequantize(self, dtype: str | torch.dtype = "float32") -> torch.Tensor:
        """The weights ``[n, k]`` (columns in the model's order)."""
        import torch

        import pykern

        w = pykern.dequantize(self.tensors, self.layout, self.group, _dtype_name(dtype))
        if self.perm is None:
            return w
        return torch.empty_like(w).index_copy_(1, self.perm, w)

    # ---- constructors

    @staticmethod
    def from_gguf(blocks: torch.Tensor, layout: str, shape: tuple[int, int]) -> QuantTensor:
        """GGUF's bytes as they are: ``blocks`` uint8 ``[n, row bytes]``, ``shape`` = (n, k), k a multiple of 32."""
        size = _choice("layout", layout, BLOCK_BYTES)
        _tensor("blocks", blocks, "uint8", 2)
        n, k = _sizes(shape)
        if k % 32:
            raise ArgumentError(
                "shape", tuple(shape), f"k = {k}: a multiple of 32, as no block of {layout} may straddle a row"
            )
        if tuple(blocks.shape) != (n, k // 32 * size):
            raise ArgumentError(
                "blocks.shape", tuple(blocks.shape), f"({n}, {k // 32 * size}): {size} bytes per 32 weights"
            )
        return QuantTensor({"blocks": blocks.contiguous()}, layout, (n, k))

    @staticmethod
    def from_gptq(
        qweight: torch.Tensor,
        qzeros: torch.Tensor,
        scales: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        *,
        version: Literal[1, 2],
        group_size: int | None = None,
    ) -> QuantTensor:
        """4-bit GPTQ: int32 ``qweight [k / 8, n]``, ``qzeros [groups, n / 8]``, ``scales [groups, n]``; ``g_idx [k]``
        is the group of each input. Nibble i of a word, lowest first, is row (column of qzeros) 8 w + i.

        ``version``: 1 (``gptq``) stores zero - 1 in 4 bits, 2 (``gptq_v2``) the zero. It comes from the checkpoint's
        config (``checkpoint_format``) and is never guessed. ``group_size``: as in the config (-1: one group); None:
        k / groups where that is whole.
        """
        _tensor("qweight", qweight, "int32", 2)
        _tensor("qzeros", qzeros, "int32", 2)
        _scales("scales", scales)
        if type(version) is not int or version not in (1, 2):
            raise ArgumentError("version", repr(version), "1 (stored zero = zero - 1), 2 (stored zero = zero)")
        k, n = qweight.shape[0] * 8, qweight.shape[1]
        if n % 8:
            raise ArgumentError("qweight.shape[1]", n, "a multiple of 8: a word of qzeros holds 8 columns")
        groups = scales.shape[0]
        group = _group_size(k, group_size, groups)
        _shape("scales", scales, (groups, n))
        _shape("qzeros", qzeros, (groups, n // 8))
        stored = _nibbles(qzeros, range(8))  # [groups, n]
        if version == 1 and stored.numel() and bool((stored == 8).all()):
            warnings.warn(
                "qzeros: every stored zero is 8 (0x88888888), which version 1 reads as 9: a symmetric checkpoint in "
                "version 2 that is labelled version 1? Pass version=2 if so.",
                stacklevel=2,
            )
        zeros = (stored + 1) & 15 if version == 1 else stored
        codes = _nibbles(qweight.T, range(8))  # [n, k]
        order = None if g_idx is None else _group_order(g_idx, k, group, groups)
        if order is not None:
            codes = codes[:, order]
        return _int4(codes, scales.T, zeros.T, group, order)

    @staticmethod
    def from_awq(
        qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, *, group_size: int | None = None
    ) -> QuantTensor:
        """4-bit AWQ (GEMM): int32 ``qweight [k, n / 8]``, ``qzeros [groups, n / 8]``, ``scales [groups, n]``.

        Nibble i of a word, lowest first, is column ``AWQ_COLUMNS[i]`` of its eight; zeros are stored as they are.
        """
        _tensor("qweight", qweight, "int32", 2)
        _tensor("qzeros", qzeros, "int32", 2)
        _scales("scales", scales)
        k, n = qweight.shape[0], qweight.shape[1] * 8
        if k % 2:
            raise ArgumentError("qweight.shape[0]", k, "an even number of inputs")
        groups = scales.shape[0]
        group = _group_size(k, group_size, groups)
        _shape("scales", scales, (groups, n))
        _shape("qzeros", qzeros, (groups, n // 8))
        nibble_of = [AWQ_COLUMNS.index(column) for column in range(8)]
        return _int4(_nibbles(qweight, nibble_of).T, scales.T, _nibbles(qzeros, nibble_of).T, group, None)

    @staticmethod
    def quantize(w: torch.Tensor, layout: str, group: int = 0) -> QuantTensor:
        """``w [n, k]`` in ``layout`` (see pykern.quantize)."""
        import pykern
        from pykern.ops._quant import LAYOUTS

        planes = pykern.quantize(w, layout, group)
        names = LAYOUTS[layout].planes[: len(planes)]
        n, k = w.shape
        return QuantTensor(dict(zip(names, planes, strict=True)), layout, (n, k), group)


# ---- ops on QuantTensors


def linear(
    x: torch.Tensor,
    w: QuantTensor,
    *,
    bias: torch.Tensor | None = None,
    activation: str = "none",
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """act(x @ w.T + bias) + residual: pykern.quant_linear. With ``w.perm`` the columns of x are gathered first."""
    import torch

    import pykern

    _quantised(w)
    if w.perm is not None:
        _plain("x", x, torch)
        if x.dim() < 1 or x.shape[-1] != w.shape[1]:
            raise ArgumentError("x.shape", tuple(x.shape), f"(..., {w.shape[1]}), the inputs of w {tuple(w.shape)}")
        if x.device != w.device:
            raise ArgumentError("x.device", x.device, f"{w.device}, as w")
        x = x.index_select(-1, w.perm)
    return pykern.quant_linear(x, w.tensors, w.layout, w.group, bias=bias, activation=activation, residual=residual)


def embedding(ids: torch.Tensor, table: QuantTensor, *, dtype: str | torch.dtype = "float32") -> torch.Tensor:
    """Rows ``ids`` of ``table`` as ``dtype``: pykern.quant_embedding."""
    import torch

    import pykern

    _quantised(table, "table")
    y = pykern.quant_embedding(ids, table.tensors, table.layout, table.group, _dtype_name(dtype))
    return y if table.perm is None else torch.empty_like(y).index_copy_(-1, table.perm, y)


def prepack(w: QuantTensor) -> QuantTensor:
    """int4 or int4_min in the layout that quant_linear's fragments want: ``packed4.v1``, ``packed4_min.v1``.

    Same weights, same results, same bytes. It saves the kernel, per 32 weights of a row, 4 shuffles, 8 selects and 16
    permutes; see :func:`prepack_cost`. k must be a multiple of 128.
    """
    from pykern.ops._quant import pack_words

    _quantised(w)
    layout = {"int4": "packed4.v1", "int4_min": "packed4_min.v1"}.get(w.layout)
    if layout is None:
        raise ArgumentError("w.layout", repr(w.layout), "'int4', 'int4_min'")
    if w.shape[1] % 128:
        raise ArgumentError("w.shape[1]", w.shape[1], "a multiple of 128")
    planes = {**w.planes, "codes": pack_words(w.planes["codes"])}
    return QuantTensor(planes, layout, w.shape, w.group, w.perm)


def prepack_cost(w: QuantTensor, bytes_per_second: float = 4e12, saved: float = 0.05) -> tuple[float, int]:
    """(seconds, calls after which it has paid): an estimate of :func:`prepack` on a GPU.

    prepack goes through the unpacked codes several times: about 18 bytes moved per weight. ``saved``: the part of a
    quant_linear call (which reads the planes once) that the packed layout saves; measure it on your card
    (``pykern bench quant_linear`` has both layouts), the default is a guess for one token.
    """
    _quantised(w)
    for name, value, most in (("bytes_per_second", bytes_per_second, math.inf), ("saved", saved, 1.0)):
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= most:
            raise ArgumentError(name, repr(value), "above 0" + (f", up to {most:g}" if most < math.inf else ""))
    n, k = w.shape
    seconds = 18.0 * n * k / bytes_per_second
    return seconds, math.ceil(seconds / (saved * w.nbytes / bytes_per_second)) if w.nbytes else 0


# ---- parts of the constructors


def check_device(device: Any) -> None:
    """ArgumentError unless torch can make a tensor on ``device`` here."""
    import torch

    try:
        torch.empty(0, device=torch.device(device))
    except (RuntimeError, TypeError, AssertionError) as error:
        text = str(error).splitlines()[0]
        raise ArgumentError("device", repr(device), f"a device that torch has here ({text[:120]})") from error


def _traced(torch: Any) -> bool:
    """Whether values cannot be looked at now: while torch traces, or a CUDA graph is captured."""
    if torch.compiler.is_compiling():
        return True
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


def _check_permutation(perm: Any, k: int, torch: Any) -> None:
    if not k:
        return
    low, high = int(perm.min()), int(perm.max())
    if low < 0 or high >= k:
        raise ArgumentError("perm", f"{low}..{high}", f"columns in 0..{k - 1}")
    counts = torch.bincount(perm, minlength=k)
    if bool((counts != 1).any()):
        twice = int((counts > 1).nonzero()[0])
        raise ArgumentError("perm", f"column {twice} {int(counts[twice])} times", f"each of 0..{k - 1} once")


def _quantised(w: Any, name: str = "w") -> QuantTensor:
    if not isinstance(w, QuantTensor):
        raise ArgumentError(name, type(w).__name__, "a pykern.QuantTensor")
    return w


def _plain(name: str, t: Any, torch: Any) -> None:
    if not isinstance(t, torch.Tensor):
        raise ArgumentError(name, typed(t), "a tensor")
    if t.is_nested or t.layout != torch.strided or t.is_quantized:
        kind = "nested" if t.is_nested else "quantised by torch" if t.is_quantized else str(t.layout)
        raise ArgumentError(name, f"a {kind} tensor", "a plain tensor (torch.strided)")


def _sizes(shape: Any) -> tuple[int, int]:
    """``(n, k)`` of a given shape."""
    good = isinstance(shape, (tuple, list)) and len(shape) == 2
    if not good or any(isinstance(n, bool) or not isinstance(n, int) or n < 0 for n in shape):
        raise ArgumentError("shape", repr(shape)[:80], "(n, k), two ints")
    return shape[0], shape[1]


def _int4(codes: Any, scales: Any, zeros: Any, group: int, perm: Any) -> QuantTensor:
    """Canonical int4 of unpacked ``codes [n, k]``, ``scales`` and whole ``zeros`` ``[n, groups]``."""
    n, k = codes.shape
    planes = {
        "codes": (codes[:, 0::2] | codes[:, 1::2] << 4).contiguous(),
        "scales": scales.contiguous(),
        "zeros": zeros.contiguous(),
    }
    return QuantTensor(planes, "int4", (n, k), group, perm)


def _nibbles(words: Any, order: Any) -> Any:
    """uint8 ``[rows, 8 * words]`` of int32 ``[rows, words]``: nibbles ``order`` of each word, 0 the lowest."""
    import torch

    parts = [(words >> 4 * i & 15).to(torch.uint8) for i in order]
    return torch.stack(parts, -1).reshape(words.shape[0], 8 * words.shape[1])


def _group_size(k: int, group_size: int | None, groups: int) -> int:
    """The group size, given or from the number of scale rows; the rows must be ceil(k / group_size)."""
    if group_size is not None and type(group_size) is not int:
        raise ArgumentError("group_size", repr(group_size), "an int: -1 (one group) or at least 1; or None")
    if group_size is None:
        if groups == 0 or k % groups:
            raise ArgumentError(
                "group_size", None, f"a size: k = {k} inputs do not divide into {groups} rows of scales"
            )
        return k // groups
    if group_size == -1:
        group_size = k
    if group_size < 1:
        raise ArgumentError("group_size", group_size, "-1 (one group) or at least 1")
    if groups != -(-k // group_size):
        want = f"{-(-k // group_size)} rows: ceil(K / group_size) with K = {k}, group_size = {group_size}"
        raise ArgumentError("scales.shape[0]", groups, want)
    return group_size


def _group_order(g_idx: Any, k: int, group: int, groups: int) -> Any:
    """Inputs sorted by group, or None when they are already; groups must be whole for the result to have one size."""
    import torch

    _plain("g_idx", g_idx, torch)
    if g_idx.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("g_idx.dtype", str(g_idx.dtype).removeprefix("torch."), "int32, int64")
    if tuple(g_idx.shape) != (k,):
        raise ArgumentError("g_idx.shape", tuple(g_idx.shape), f"({k},), the inputs")
    index = g_idx.long()
    plain = torch.arange(k, device=index.device) // group
    if torch.equal(index, plain):
        return None
    order = torch.argsort(index, stable=True)
    if not torch.equal(index[order], plain):
        raise ArgumentError(
            "g_idx",
            f"groups {index.unique().tolist()[:8]}",
            f"each of {groups} groups {group} times (the last: the rest)",
        )
    return order


def _choice(name: str, value: str, allowed: dict[str, int]) -> int:
    if not isinstance(value, str) or value not in allowed:
        raise ArgumentError(name, repr(value), ", ".join(map(repr, allowed)))
    return allowed[value]


def _tensor(name: str, t: Any, dtype: str, rank: int) -> None:
    import torch

    _plain(name, t, torch)
    if str(t.dtype) not in [f"torch.{d}" for d in dtype.split(", ")]:
        raise ArgumentError(f"{name}.dtype", str(t.dtype).removeprefix("torch."), dtype)
    if t.dim() != rank:
        raise ArgumentError(f"{name}.dim()", t.dim(), str(rank))


def _scales(name: str, t: Any) -> None:
    _tensor(name, t, "float32, float16, bfloat16", 2)


def _shape(name: str, t: Any, want: tuple[int, ...]) -> None:
    if tuple(t.shape) != want:
        raise ArgumentError(f"{name}.shape", tuple(t.shape), str(want))


def _dtype_name(dtype: Any) -> str:
    return dtype if isinstance(dtype, str) else str(dtype).removeprefix("torch.")


_registered = False


def _register_pytree() -> None:
    """Tell torch, once, that a QuantTensor is a pytree of its planes."""
    global _registered
    if _registered:
        return
    import torch.utils._pytree as pytree

    def flatten(q: QuantTensor) -> tuple[list[Any], tuple[Any, ...]]:
        return [*q.planes.values(), q.perm], (tuple(q.planes), q.layout, tuple(q.shape), q.group)

    def unflatten(leaves: Any, context: tuple[Any, ...]) -> QuantTensor:
        names, layout, shape, group = context
        *planes, perm = leaves
        # As it is, unchecked: torch rebuilds pytrees with leaves of all kinds (None, specs), and at every call.
        made = object.__new__(QuantTensor)
        fields = {"layout": layout, "shape": shape, "group": group, "perm": perm}
        for name, value in {"planes": dict(zip(names, planes, strict=True)), **fields}.items():
            object.__setattr__(made, name, value)
        return made

    flat: Callable[..., Any] = flatten
    pytree.register_pytree_node(QuantTensor, flat, unflatten, serialized_type_name="pykern.QuantTensor")
    _registered = True
