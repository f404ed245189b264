"""Raw kernels on CPU tensors: the host runtime's C interface (``cuda_src/host/abi.h``) through ctypes."""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pykern.errors import KernelError
from pykern.jit import build, raw

if TYPE_CHECKING:
    from pykern.jit.raw import RawKernel

_I64P = ctypes.POINTER(ctypes.c_int64)
_COOPERATIVE = 2
_INPUT, _MUTATED = 0, 3


class PkRegion(ctypes.Structure):
    _fields_ = [
        ("base", ctypes.c_void_p),
        ("bytes", ctypes.c_int64),
        ("name", ctypes.c_char_p),
        ("role", ctypes.c_int32),
        ("elem_bytes", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("size", _I64P),
        ("stride", _I64P),
        ("flags", ctypes.c_int32),
    ]


class PkOptions(ctypes.Structure):
    _fields_ = [
        ("check", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
        ("async_order", ctypes.c_int32),
        ("trace", ctypes.c_int32),
        ("sms", ctypes.c_int32),
    ]


class PkLaunch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("flags", ctypes.c_uint32),
        ("smem", ctypes.c_uint64),
        ("kernel", ctypes.c_char_p),
        ("nargs", ctypes.c_int32),
        ("nregions", ctypes.c_int32),
        ("arg_region", ctypes.POINTER(ctypes.c_int32)),
        ("regions", ctypes.POINTER(PkRegion)),
        ("options", ctypes.POINTER(PkOptions)),
    ]


def _region(name: str, tensor: Any, const: bool) -> PkRegion:
    """The extent of one tensor: what a checked kernel may touch."""
    size, stride, item = tuple(tensor.shape), tuple(tensor.stride()), tensor.element_size()
    last = sum((n - 1) * s for n, s in zip(size, stride)) if tensor.numel() else -1
    axes = ctypes.c_int64 * max(1, len(size))
    return PkRegion(
        tensor.data_ptr(), (last + 1) * item, name.encode(), _INPUT if const else _MUTATED, item, len(size),
        axes(*size), axes(*stride), 0,
    )  # fmt: skip


def run(
    kernel: RawKernel,
    shape: tuple[tuple[int, int, int], tuple[int, int, int], tuple[int, int, int]],
    values: Sequence[Any],
    args: Sequence[Any],
    smem: int,
    cooperative: bool,
    check: bool,
    seed: int,
) -> None:
    """Launch on the host backend. Raises KernelError with the runtime's words, CheckError for findings."""
    runtime = build.host_runtime()
    entry = kernel._host(check)
    regions: list[PkRegion] = []
    region_of = (ctypes.c_int32 * max(1, len(args)))(*[-1] * max(1, len(args)))
    for index, (parameter, value) in enumerate(zip(kernel.parameters, args)):
        if parameter.pointer and raw.is_tensor(value) and value.numel():
            region_of[index] = len(regions)
            regions.append(_region(parameter.name, value, parameter.const))
    # With the seed, under the checker, goes the order in which asynchronous copies land: eager, lazy, random.
    options = PkOptions(int(check), 0, seed, seed % 3 if check else 0, int(check), 0)
    packed = (PkRegion * max(1, len(regions)))(*regions)
    launch = PkLaunch(
        *((ctypes.c_uint32 * 3)(*part) for part in shape), _COOPERATIVE if cooperative else 0, smem,
        kernel.instance.encode(), len(args), len(regions), region_of, packed, ctypes.pointer(options),
    )  # fmt: skip
    pointers = (ctypes.c_void_p * max(1, len(values)))(*(ctypes.addressof(value) for value in values))
    lists = (ctypes.c_void_p * 1)(ctypes.addressof(pointers))
    entries = (ctypes.c_void_p * 1)(entry.entry)
    sequence = runtime.pkh_run_sequence  # ctypes drops the GIL for the call
    sequence.restype, sequence.argtypes = (
        ctypes.c_int,
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int],
    )
    if kernel.source.prints:  # what C and Python write comes in the order in which it was written
        with contextlib.suppress(AttributeError, OSError, ValueError):  # no stdout, or a closed one
            sys.stdout.flush()
    code = sequence(ctypes.byref(launch), entries, lists, 1)
    if kernel.source.prints:
        ctypes.CDLL(None).fflush(None)
    if check:
        from pykern.check import collect

        collect(kernel.instance, bool(code), runtime)
    if code:
        runtime.pkh_error.restype = ctypes.c_char_p
        message = (runtime.pkh_error() or b"").decode(errors="replace")
        message = message.removeprefix(f"{kernel.instance}: ")
        raise KernelError(f"{kernel.instance}: {message or f'the host backend failed with code {code}'}")
