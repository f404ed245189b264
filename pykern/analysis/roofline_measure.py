"""Measured roofs of this machine's GPU: read and copy bandwidth, and sustained matrix throughput, by torch.

The only place in the analyses that imports torch, and only when asked. Buffers exceed every L2; each figure is the
best of several timings of many milliseconds, so the microseconds that events add do not matter. Data is random:
tensor cores run faster on zeros.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from pykern.errors import ArgumentError

_REPEATS = 5
#: Bytes of one buffer: far beyond any L2, and still small beside a data-centre GPU's memory.
_BUFFER = 2 << 30


def _best_seconds(torch: Any, work: Any, calls: int) -> float:
    work()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(_REPEATS):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(calls):
            work()
        stop.record()
        torch.cuda.synchronize()
        best = min(best, start.elapsed_time(stop) / 1e3 / calls)
    return best


def measure() -> dict[str, Any]:
    """``{"name", "gbps", "gbps_copy", "dense_tflops", "source"}`` of the current GPU.

    Raises :class:`ArgumentError` where there is no torch or no GPU.
    """
    try:
        import torch
    except ImportError as error:
        raise ArgumentError(
            "--measure", f"no torch ({error})", "a machine with torch and a CUDA GPU"
        ) from None
    if not torch.cuda.is_available():
        raise ArgumentError("--measure", "no CUDA GPU", "a machine with torch and a CUDA GPU")
    free, _ = torch.cuda.mem_get_info()
    size = min(_BUFFER, free // 4)
    source = torch.randn(size // 4, device="cuda")
    target = torch.empty_like(source)
    read = size / _best_seconds(torch, lambda: source.sum(), 10)
    copy = 2 * size / _best_seconds(torch, lambda: target.copy_(source), 10)
    rates: dict[str, float] = {}
    n = 8192 if free > 4 << 30 else 4096
    for key, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if key == "bf16" and not torch.cuda.is_bf16_supported():
            continue
        a, b = (torch.randn(n, n, device="cuda", dtype=dtype) for _ in range(2))
        c = torch.empty_like(a)
        product = partial(torch.mm, a, b, out=c)
        rates[key] = 2 * n**3 / _best_seconds(torch, product, 20) / 1e12
    if torch.cuda.get_device_capability() >= (8, 9):
        a8 = torch.randn(n, n, device="cuda").to(torch.float8_e4m3fn)
        one = torch.ones((), device="cuda")
        rates["fp8"] = (
            2 * n**3
            / _best_seconds(torch, lambda: torch._scaled_mm(a8, a8.t(), one, one, out_dtype=torch.bfloat16), 20)
            / 1e12
        )  # fmt: skip
    return {
        "name": torch.cuda.get_device_name(),
        "gbps": max(read, copy) / 1e9,
        "gbps_read": read / 1e9,
        "gbps_copy": copy / 1e9,
        "dense_tflops": rates,
        "source": f"measured here, torch {torch.__version__}: sum and copy of {size >> 20} MiB, {n}^3 products",
    }
