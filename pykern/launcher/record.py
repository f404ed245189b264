"""Packs a plan into the int64 words that ``record.h`` decodes, and unpacks the launcher's keys into problems."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

from pykern.plan import F32, I32, I64, In, Launch, OutPtr, Plan, Run, TensorMap, Ws
from pykern.schema import (
    DTYPE_CODES,
    DTYPE_NAMES,
    ITEMSIZE,
    OTHER_DTYPES,
    Scalar,
    Tensor,
    TensorInfo,
    contiguous_strides,
)  # fmt: skip

MAGIC = 0x706B02
IN_PTR, OUT_PTR, WS_PTR, K_I32, K_I64, K_F32, RUN_F32, RUN_I32, RUN_I64, MAP = range(10)
ROLES = {"input": 0, "weight": 1, "output": 2, "mutated": 3, "workspace": 4}
PDL, COOPERATIVE = 1, 2
DEVICES = {0: "cpu", 1: "cuda"}


def _text(s: str) -> list[int]:
    raw = s.encode()
    words = (len(raw) + 7) // 8
    return [len(raw), *struct.unpack(f"<{words}q", raw.ljust(words * 8, b"\0"))]


def unpack_key(
    key: bytes, args: Sequence[Tensor | Scalar]
) -> tuple[dict[str, Any], list[tuple[str, TensorInfo | None]]]:
    """Argument values by name, and the flat list of tensors, from the words of a memo key.

    Scalars that are not part of the key come back as None.
    """
    words = struct.unpack(f"<{len(key) // 8}q", key)
    at = 1
    flat: list[tuple[str, TensorInfo | None]] = []
    values: dict[str, Any] = {}

    def tensor(name: str) -> TensorInfo | None:
        nonlocal at
        head = words[at]
        at += 1
        if head == -1:
            flat.append((name, None))
            return None
        code, d = head & 0xFFFF, head >> 16 & 0xFF
        device, index = head >> 24 & 0xFF, head >> 32 & 0xFF
        info = TensorInfo(
            DTYPE_NAMES.get(code) or OTHER_DTYPES.get(code, f"dtype {code}"),
            tuple(words[at : at + d]),
            tuple(words[at + d : at + 2 * d]),
            1 << (head >> 40),
            DEVICES.get(device, f"device {device}"),
            0 if index == 0xFF else index,
        )
        at += 2 * d
        flat.append((name, info))
        return info

    for spec in args:
        if isinstance(spec, Tensor):
            if spec.many:
                n = words[at]
                at += 1
                values[spec.name] = tuple(tensor(f"{spec.name}[{i}]") for i in range(n))
            else:
                values[spec.name] = tensor(spec.name)
        elif spec.type == "str":
            n = words[at]
            m = (n + 7) // 8
            values[spec.name] = struct.pack(f"<{m}q", *words[at + 1 : at + 1 + m])[:n].decode()
            at += 1 + m
        elif spec.key:
            word = words[at]
            at += 1
            if spec.type == "float":
                values[spec.name] = struct.unpack("<d", struct.pack("<q", word))[0]
            else:
                values[spec.name] = bool(word) if spec.type == "bool" else word
        else:
            values[spec.name] = None
    return values, flat


def pack(
    plan: Plan,
    outs: Sequence[tuple[str, str, tuple[int, ...]]],
    flat: Sequence[tuple[str, str]],
    given_outs: dict[str, int],
    scalars: Sequence[str],
    overlaps: Sequence[tuple[int, int, bool]],
    entry: Callable[[Launch], int],
) -> bytes:
    """The record of ``plan``.

    ``outs``: (name, dtype, shape) of the outputs the launcher allocates. ``flat``: (name, role) of every tensor of
    the call in order. ``given_outs``: output name -> flat index, for ``.out`` forms. ``scalars``: run-time order of
    the scalars. ``entry``: address of a launch's kernel.
    """
    out_index = {name: i for i, (name, _, _) in enumerate(outs)}
    flat_index = {name: i for i, (name, _) in enumerate(flat)}
    scalar_index = {name: i for i, name in enumerate(scalars)}
    maps: list[list[int]] = []

    def pointer(a: In | OutPtr | Ws) -> tuple[int, int]:
        if isinstance(a, Ws):
            return WS_PTR, a.index
        if isinstance(a, OutPtr):
            if a.name in given_outs:
                return IN_PTR, given_outs[a.name]
            return OUT_PTR, out_index[a.name]
        name = a.name if a.name in flat_index else f"{a.name}[{a.item}]"
        return IN_PTR, flat_index[name]

    def argument(a: Any) -> tuple[int, int]:
        if isinstance(a, (In, OutPtr, Ws)):
            return pointer(a)
        if isinstance(a, I32):
            return K_I32, a.value
        if isinstance(a, I64):
            return K_I64, a.value
        if isinstance(a, F32):
            return K_F32, struct.unpack("<I", struct.pack("<f", a.value))[0]
        if isinstance(a, Run):
            return {"f32": RUN_F32, "i32": RUN_I32, "i64": RUN_I64}[a.type], scalar_index[a.name]
        if isinstance(a, TensorMap):
            kind, index = pointer(a.tensor)
            size = ITEMSIZE[a.dtype]
            maps.append(
                [kind, index, DTYPE_CODES[a.dtype], size, a.rows, a.cols, a.row_stride * size, *a.box, a.swizzle]
            )
            return MAP, len(maps) - 1
        raise TypeError(f"not a kernel argument: {a!r}")

    launches: list[int] = [len(plan.launches)]
    for launch in plan.launches:
        args = [argument(a) for a in launch.args]
        flags = (PDL if launch.pdl else 0) | (COOPERATIVE if launch.cooperative else 0)
        launches += [entry(launch), *_text(launch.kernel)]
        for v in (launch.grid, launch.block, launch.cluster):
            launches += Launch.triple(v)
        launches += [launch.smem, flags, len(args)]
        for pair in args:
            launches += pair

    words = [MAGIC, len(outs)]
    for _, dtype, shape in outs:
        words += [DTYPE_CODES[dtype], len(shape), *shape, *contiguous_strides(shape)]
    words.append(len(plan.workspaces))
    for w in plan.workspaces:
        words += [max(w.nbytes, 1), int(w.counter)]
    names = [name for name, _ in flat] + [name for name, _, _ in outs]
    words.append(len(names))
    for name in names:
        words += _text(name)
    words += [len(flat), *(ROLES[role] for _, role in flat)]
    words.append(len(overlaps))
    for a, b, same in overlaps:
        words += [a, b, int(same)]
    words.append(len(maps))
    for m in maps:
        words += m
    words += launches
    return struct.pack(f"<{len(words)}q", *words)
