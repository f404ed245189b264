"""How many compilers may run at once: capped by cores and by memory that is free now."""

from __future__ import annotations

import os
from pathlib import Path

from pykern.errors import ArgumentError, brief

# nvcc on a tensor-core kernel was seen at 3 GB and more elsewhere; a host variant takes a few hundred MB
BYTES_PER_CUDA_JOB = 3 << 30
BYTES_PER_HOST_JOB = 1 << 30


def cores() -> int:
    """Cores that this process may use: its affinity, and its control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, max(1, int(quota) // int(period)))
    except (OSError, ValueError, ZeroDivisionError):
        pass
    return max(1, count)


def _meminfo(field: str) -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def free_memory() -> int | None:
    """Bytes that can be allocated now, by the machine and by the control group; None where nothing says."""
    free = [_meminfo("MemAvailable")]
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            text = Path(limit).read_text().strip()
            if text != "max" and int(text) < 1 << 60:
                free.append(max(0, int(text) - int(Path(used).read_text())))
        except (OSError, ValueError):
            continue
    known = [value for value in free if value is not None]
    return min(known) if known else None


def _positive(text: str) -> int | None:
    """The number that ``text`` is, if it is one of 1 or more."""
    number = int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0
    return number or None


def asked_jobs() -> int | None:
    """``PYKERN_JOBS``, None where it is not set (or empty)."""
    text = os.environ.get("PYKERN_JOBS", "").strip()
    asked = _positive(text)
    if text and asked is None:
        raise ArgumentError("PYKERN_JOBS", brief(text), "how many compilers may run at once, 1 or more")
    return asked


def jobs(cuda: bool) -> int:
    """Compilers to run at once, at least 1.

    ``PYKERN_JOBS`` or ``MAX_JOBS`` lower it, never raise it past memory. Raises ArgumentError for a ``PYKERN_JOBS``
    that is no number; ``MAX_JOBS`` belongs to others, too, and is taken where it is one.
    """
    count = cores()
    asked = asked_jobs() or _positive(os.environ.get("MAX_JOBS", "").strip())
    if asked is not None:
        count = min(count, asked)
    free = free_memory()
    if free is not None:
        count = min(count, free // (BYTES_PER_CUDA_JOB if cuda else BYTES_PER_HOST_JOB))
    return max(1, count)
