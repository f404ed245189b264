"""How a problem is launched: pure values, made by each op's ``plan(problem, target)``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pykern.errors import ArgumentError
from pykern.schema import CTYPE


@dataclass(frozen=True)
class Target:
    """The machine a plan is made for. Sizes in bytes. ``backend`` is ``cuda`` or ``host``."""

    arch: str = "90a"
    sms: int = 132
    smem_optin: int = 232448  # largest shared memory of one block
    l2_bytes: int = 60 << 20
    max_cluster: int = 8  # portable limit; 16 needs an opt-in on sm_90
    backend: Literal["cuda", "host"] = "cuda"

    @property
    def cc(self) -> int:
        """Compute capability as a number: 80, 90, 120."""
        return int(self.arch.rstrip("af"))

    @property
    def hopper(self) -> bool:
        """Whether wgmma, TMA and clusters of sm_90a may be used."""
        return self.arch == "90a"


# What plans are made for where no card is there to ask (NVIDIA's data sheets; H200 measured).
TARGETS = {
    "80": Target("80", 108, 166912, 40 << 20, 1),
    "86": Target("86", 84, 101376, 6 << 20, 1),
    "89": Target("89", 128, 101376, 72 << 20, 1),
    "90": Target("90", 132, 232448, 50 << 20, 8),
    "90a": Target("90a", 132, 232448, 60 << 20, 16),
    "100": Target("100", 148, 232448, 126 << 20, 8),
    "120": Target("120", 170, 101376, 96 << 20, 8),
    "121": Target("121", 48, 101376, 24 << 20, 8),
}


def host_target(arch: str = "90a", sms: int = 4) -> Target:
    """The host backend's target: the limits of ``arch`` with few SMs, so that small problems fill it."""
    if arch not in TARGETS:
        raise ArgumentError("arch", repr(arch), ", ".join(TARGETS))
    base = TARGETS[arch]
    return Target(arch, sms, base.smem_optin, base.l2_bytes, base.max_cluster, "host")


# ---- kernel arguments


@dataclass(frozen=True)
class In:
    """Data pointer of input ``name`` (null when an optional one is absent); ``item`` for one of a tensor list."""

    name: str
    item: int = 0


@dataclass(frozen=True)
class OutPtr:
    """Data pointer of output ``name``."""

    name: str


@dataclass(frozen=True)
class Ws:
    """Pointer into workspace ``index``."""

    index: int


@dataclass(frozen=True)
class I32:
    value: int


@dataclass(frozen=True)
class I64:
    value: int


@dataclass(frozen=True)
class F32:
    value: float


@dataclass(frozen=True)
class Run:
    """A scalar argument of the op, read at every call: ``Run("scale", "f32")``."""

    name: str
    type: Literal["f32", "i32", "i64"] = "f32"


@dataclass(frozen=True)
class TensorMap:
    """A 2-D TMA descriptor over input, output or workspace ``tensor``.

    ``rows`` x ``cols`` elements with ``row_stride`` elements between rows; ``box`` = (rows, cols) of a tile;
    ``swizzle`` in bytes (0, 32, 64, 128). Passed as ``const __grid_constant__ pk::TensorMap``.
    """

    tensor: In | OutPtr | Ws
    dtype: str
    rows: int
    cols: int
    row_stride: int
    box: tuple[int, int]
    swizzle: Literal[0, 32, 64, 128] = 128


def divider(d: int) -> tuple[I32, I32]:
    """``pk::Divider`` of ``d`` (1 to 2^31 - 1), core/divide.cuh: its magic number and its shift."""
    if not 1 <= d < 1 << 31:
        raise ValueError(f"divider of {d}: 1 to 2**31 - 1")
    if d == 1:
        return I32(0), I32(0)
    shift = (d - 1).bit_length() - 1
    magic = -(-(1 << (32 + shift)) // d)
    return I32(magic - (1 << 32)), I32(shift)  # magic has its highest bit set: the same bits as an int32


Arg = In | OutPtr | Ws | I32 | I64 | F32 | Run | TensorMap


@dataclass(frozen=True)
class Workspace:
    """Scratch memory. ``counter=True``: zero at rest (the kernel resets it), one per stream or captured graph."""

    nbytes: int
    counter: bool = False


def template(kernel: str, *args: str | int | bool) -> str:
    """C++ text of a kernel instance; dtype names become C++ types: ``template("softmax_warp", "float16", 8)``."""
    parts = []
    for a in args:
        if isinstance(a, bool):
            parts.append("true" if a else "false")
        else:
            parts.append(CTYPE.get(a, a) if isinstance(a, str) else str(int(a)))
    return f"{kernel}<{', '.join(parts)}>" if parts else kernel


@dataclass(frozen=True)
class Launch:
    """One kernel launch. ``kernel`` is the C++ instance (see :func:`template`), ``smem`` dynamic shared bytes."""

    kernel: str
    grid: tuple[int, int, int] | int
    block: tuple[int, int, int] | int
    args: tuple[Arg, ...]
    smem: int = 0
    cluster: tuple[int, int, int] | int = 1
    pdl: bool = True
    cooperative: bool = False
    source: str = ""  # defaults to the op's source

    @staticmethod
    def triple(v: tuple[int, int, int] | int) -> tuple[int, int, int]:
        return (v, 1, 1) if isinstance(v, int) else v


@dataclass(frozen=True)
class Plan:
    """Launches in order, workspaces, and what to say about it.

    ``numerics``: problems whose plans share this class give the same bits for a row alone and in a batch.
    ``variant``: short name for people. ``why``: lines for ``pykern explain`` (why this, why not a faster one).
    An empty ``launches`` means there is nothing to do.
    """

    launches: tuple[Launch, ...] = ()
    workspaces: tuple[Workspace, ...] = ()
    numerics: str = ""
    variant: str = ""
    why: tuple[str, ...] = field(default=())


def check_plan(plan: Plan, target: Target, op: str) -> None:
    """Refuse a plan that no GPU of ``target`` could launch, before anything is compiled."""
    for n, launch in enumerate(plan.launches):
        at = f"{op}: launch {n} ({launch.kernel})"
        grid, block, cluster = (Launch.triple(v) for v in (launch.grid, launch.block, launch.cluster))
        if min(grid) < 1 or grid[0] > 2**31 - 1 or max(grid[1:]) > 65535:
            raise ArgumentError(f"{at} grid", grid, "1..2147483647 x 1..65535 x 1..65535")
        threads = block[0] * block[1] * block[2]
        if min(block) < 1 or threads > 1024 or block[2] > 64:
            raise ArgumentError(f"{at} block", block, "1..1024 threads, z <= 64")
        if launch.smem < 0 or launch.smem > target.smem_optin:
            raise ArgumentError(f"{at} shared memory", launch.smem, f"0..{target.smem_optin} bytes on sm_{target.arch}")
        size = cluster[0] * cluster[1] * cluster[2]
        if size < 1 or (size > 1 and target.cc < 90) or size > max(1, target.max_cluster):
            raise ArgumentError(f"{at} cluster", cluster, f"1..{target.max_cluster} blocks on sm_{target.arch}")
        if any(g % c for g, c in zip(grid, cluster, strict=True)):
            raise ArgumentError(f"{at} grid", grid, f"a multiple of the cluster {cluster}")


def ceil_div(a: int, b: int) -> int:
    """Smallest integer >= a / b."""
    return -(-a // b)


def next_pow2(n: int) -> int:
    """Smallest power of two >= n (n >= 1)."""
    return 1 << max(0, n - 1).bit_length()


class Tuning:
    """Measured choices, per arch and op: ``{"90a": {"softmax": {"n<=4096": {...}}}}``. Looked up by plans;
    its digest is part of the plan memo's key, so a new file takes effect at once."""

    def __init__(self, table: dict[str, dict[str, dict[str, object]]] | None = None) -> None:
        self.table = table or {}

    def get(self, arch: str, op: str, key: str, default: object) -> object:
        """The tuned value of ``key`` for ``op`` on ``arch``, or ``default``."""
        return self.table.get(arch, {}).get(op, {}).get(key, default)

    @staticmethod
    def load(text: str) -> Tuning:
        """Parse a tuning file; ArgumentError names what is wrong."""
        try:
            table = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ArgumentError("tuning file", str(error), "JSON {arch: {op: {key: value}}}") from error
        ok = isinstance(table, dict) and all(
            isinstance(ops, dict) and all(isinstance(keys, dict) for keys in ops.values()) for ops in table.values()
        )
        if not ok:
            raise ArgumentError("tuning file", type(table).__name__, "JSON {arch: {op: {key: value}}}")
        return Tuning(table)


tuning = Tuning()


def tuned(target: Target, op: str, key: str, default: int) -> int:
    """An integer knob of ``op``: from the tuning file in force, else ``default``."""
    value = tuning.get(target.arch, op, key, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ArgumentError(f"tuning {target.arch}.{op}.{key}", value, "an integer")
    return value


def first_fit(options: Sequence[int], need: int) -> int | None:
    """The smallest of ascending ``options`` that is >= need; None if none is."""
    return next((o for o in options if o >= need), None)
