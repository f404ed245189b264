"""The machine that plans are made for, from the card that a tensor lies on."""

from __future__ import annotations

import functools
from typing import Any

from pykern.errors import ToolchainError
from pykern.plan import TARGETS, Target, host_target

# Architectures whose full instruction set needs the "a" suffix; wgmma and setmaxnreg exist on sm_90a only.
_FULL = {90: "90a"}


def arch_of(major: int, minor: int) -> str:
    """The architecture to compile for: ``90a`` for compute capability 9.0, else the plain number."""
    number = major * 10 + minor
    return _FULL.get(number, str(number))


def _from_cuda_core(index: int) -> dict[str, int] | None:
    """Properties through ``cuda.core``, which asks the driver directly; its import takes a fifth of a second.

    None where it is not installed or fails.
    """
    try:
        try:
            from cuda.core import Device
        except ImportError:
            from cuda.core.experimental import Device
        properties: Any = Device(index).properties
        return {
            "major": int(properties.compute_capability_major),
            "minor": int(properties.compute_capability_minor),
            "sms": int(properties.multiprocessor_count),
            "smem": int(properties.max_shared_memory_per_block_optin),
            "l2": int(properties.l2_cache_size),
        }
    except Exception:  # optional package: any failure means "ask torch instead"
        return None


def _from_torch(index: int) -> dict[str, int]:
    """Properties through torch, which is there already; of a torch that does not tell all, the rest from ``cuda.core``
    or, without that, from what the architecture has."""
    import torch

    if not torch.cuda.is_available():
        raise ToolchainError("no CUDA device: torch.cuda.is_available() is False; see `pykern doctor`")
    properties: Any = torch.cuda.get_device_properties(index)
    smem = getattr(properties, "shared_memory_per_block_optin", None)
    l2 = getattr(properties, "L2_cache_size", None)
    if smem is None or l2 is None:
        if found := _from_cuda_core(index):
            return found
        known = TARGETS.get(arch_of(properties.major, properties.minor), TARGETS["80"])
        smem, l2 = smem or known.smem_optin, l2 or known.l2_bytes
    return {
        "major": properties.major,
        "minor": properties.minor,
        "sms": properties.multi_processor_count,
        "smem": smem,
        "l2": l2,
    }


@functools.lru_cache(maxsize=64)
def cuda_target(index: int) -> Target:
    """Target of CUDA device ``index``.

    Arch, SMs, opt-in shared memory of a block, L2 bytes, largest cluster.
    """
    found = _from_torch(index)
    arch = arch_of(found["major"], found["minor"])
    # 16 blocks need an opt-in attribute on 9.0 and are portable nowhere; below 9.0 there are no clusters
    cluster = 1 if found["major"] < 9 else TARGETS[arch].max_cluster if arch in TARGETS else 8
    return Target(arch, found["sms"], found["smem"], found["l2"], cluster)


def default_target(device: Any = "cpu") -> Target:
    """Target of a ``torch.device``, its name (``"cuda:1"``) or index; a CPU gets the host backend's default.

    Raises ToolchainError where a CUDA device is asked for and there is none.
    """
    kind, index = _split(device)
    return host_target() if kind == "cpu" else cuda_target(index)


def _split(device: Any) -> tuple[str, int]:
    if isinstance(device, int):
        return "cuda", device
    kind = getattr(device, "type", None)
    index = getattr(device, "index", None)
    if kind is None:
        kind, _, number = str(device).partition(":")
        index = int(number) if number else None
    if kind == "cuda" and index is None:
        import torch

        index = torch.cuda.current_device() if torch.cuda.is_available() else 0
    return str(kind), index or 0
