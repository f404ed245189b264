"""Looks a machine over: what is there, what is missing, and what to do about it. Needs no torch and no compiler."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pykern.errors import PykernError, ToolchainError
from pykern.jit import cache, flags, limits, sources, toolchain

MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 10)
MIN_CXX = {"gcc": 11, "clang": 14}
LITTLE_DISK = 1 << 30  # bytes; the demo's builds and its model take about a third of that


@dataclass(frozen=True)
class Finding:
    """One line of the report. ``status``: ok, info (absent and not needed), warn, fail (pykern does not work so)."""

    name: str
    status: str
    detail: str
    hint: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


# Run apart: a torch that crashes on import must not take the doctor with it.
_PROBE = """
import json, sys
import torch
out = {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip, "devices": [], "error": ""}
try:
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            p = torch.cuda.get_device_properties(i)
            out["devices"].append({"name": p.name, "cc": f"{p.major}.{p.minor}", "sms": p.multi_processor_count,
                                   "memory": p.total_memory})
    elif torch.version.cuda:
        try:
            torch.cuda.init()
        except Exception as error:
            out["error"] = str(error).splitlines()[0]
except Exception as error:
    out["error"] = str(error)
print("\\n@@" + json.dumps(out))
"""


def probe_torch(timeout: float = 180.0) -> dict[str, Any]:
    """Version and devices of torch as another process sees them; ``{"missing": why}`` where it does not import."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", _PROBE], capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"missing": str(error)}
    for line in reversed(done.stdout.splitlines()):
        if line.startswith("@@"):
            return dict(json.loads(line[2:]))
    if done.returncode < 0:
        return {"missing": f"`import torch` was killed by signal {-done.returncode}"}
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    return {"missing": lines[-1].strip() if lines else f"`import torch` exited with {done.returncode}"}


def _python() -> Finding:
    detail = f"{platform.python_version()} ({sys.executable}) on {platform.system()} {platform.machine()}"
    if sys.version_info[:2] < MIN_PYTHON:
        return Finding("python", "fail", detail, "Python 3.10 or newer is needed")
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return Finding("python", "fail", detail, "pykern runs on Linux, on x86_64 and aarch64")
    return Finding("python", "ok", detail)


def _sources() -> Finding:
    try:
        return Finding("sources", "ok", str(sources.root()))
    except FileNotFoundError as error:
        return Finding("sources", "fail", str(error), "reinstall pykern, or run from a complete checkout")


def _torch(found: dict[str, Any]) -> Finding:
    if "missing" in found:
        return Finding("torch", "fail", found["missing"], "pip install 'torch>=2.10'")
    detail = f"{found['version']}, " + (f"CUDA {found['cuda']}" if found["cuda"] else "CPU build")
    release = tuple(int(part) for part in found["version"].split("+")[0].split(".")[:2])
    if release < MIN_TORCH:
        return Finding("torch", "fail", detail, "torch 2.10 or newer is needed", found)
    if found["hip"]:
        return Finding(
            "torch", "fail", detail + f", HIP {found['hip']}", "a ROCm build of torch is not supported", found
        )
    return Finding("torch", "ok", detail, facts=found)


def _try_compiler(compiler: toolchain.Cxx) -> str:
    """Empty when the compiler makes a loadable library with the flags we use, else its first complaint."""
    from pykern.jit.diagnose import diagnose

    with tempfile.TemporaryDirectory(prefix="pykern-doctor-") as folder:
        source = Path(folder, "t.cpp")
        source.write_text("#include <string>\nstd::string f(int x) { return std::to_string(x); }\n")
        command = [str(compiler.path), *flags.host(compiler), "-fPIC", "-shared", str(source), "-o", f"{folder}/t.so"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
        except (OSError, subprocess.TimeoutExpired) as error:
            return str(error)
        return "" if done.returncode == 0 else str(diagnose(done.stderr))


def _cxx() -> Finding:
    try:
        compiler = toolchain.cxx()
    except ToolchainError as error:
        return Finding("c++", "fail", str(error), "apt install g++ (or your system's package)")
    detail = f"{compiler.version} ({compiler.path})"
    least = MIN_CXX[compiler.kind]
    if compiler.major < least:
        return Finding("c++", "fail", detail, f"{compiler.kind} {least} or newer is needed; set CXX to one")
    complaint = _try_compiler(compiler)
    if complaint:
        return Finding("c++", "fail", f"{detail}: {complaint}", "the compiler does not work with pykern's flags")
    march = flags.march()
    return Finding("c++", "ok", f"{detail}, {march[0] if march else 'no -march'}")


def _ninja() -> Finding:
    try:
        path = toolchain.find_ninja()
        version = subprocess.run([str(path), "--version"], capture_output=True, text=True, timeout=30).stdout.strip()
    except (ToolchainError, OSError, subprocess.TimeoutExpired) as error:
        return Finding("ninja", "fail", str(error), "pip install ninja")
    return Finding("ninja", "ok", f"{version} ({path})")


def driver_present() -> bool:
    """Whether an NVIDIA driver is loaded, asked without torch."""
    return Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()


def _gpu(torch: dict[str, Any]) -> Finding:
    devices = torch.get("devices", [])
    if devices:
        names = [f"{d['name']} (cc {d['cc']}, {d['sms']} SMs, {d['memory'] >> 30} GiB)" for d in devices]
        return Finding("gpu", "ok", "; ".join(names), facts={"devices": devices})
    if not driver_present():
        return Finding("gpu", "info", "none: CPU tensors run on the host backend")
    if torch.get("cuda"):
        return Finding(
            "gpu", "fail", torch.get("error") or "torch sees no device", "see `nvidia-smi`; CUDA_VISIBLE_DEVICES"
        )
    return Finding(
        "gpu", "warn", "an NVIDIA driver is there, but torch is a CPU build", "install a CUDA build of torch"
    )


def _cuda(torch: dict[str, Any]) -> Finding:
    wanted = bool(torch.get("devices"))
    bad = "fail" if wanted else "warn"
    try:
        found = toolchain.find_cuda()
        detail = f"{found.version} ({found.home}, from {found.origin})"
        toolchain.check_torch_cuda(found, torch.get("cuda"))
        host = toolchain.host_compiler(found)
    except ToolchainError as error:
        if any(os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")) or wanted:
            return Finding("nvcc", bad, str(error), "see the message")
        return Finding("nvcc", "info", "none, and none is needed without a GPU", facts={"reason": str(error)})
    if found.libcudart is None:
        return Finding("nvcc", bad, f"{detail}: no libcudart in it", "pip install nvidia-cuda-runtime")
    return Finding("nvcc", "ok", f"{detail}, -ccbin {host.path}", facts={"home": str(found.home)})


def _cache() -> Finding:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        folder = cache.cache_dir()
        held = cache.size()
    facts = {"folder": str(folder), "wanted": str(cache.wanted_dir()), "bytes": held}
    detail = f"{folder}, {held / 1e6:.1f} MB used"
    if folder != cache.wanted_dir():
        reason = str(caught[0].message) if caught else f"{cache.wanted_dir()} cannot be written"
        return Finding("cache", "warn", reason, "set PYKERN_CACHE to a writable folder", facts)
    free = shutil.disk_usage(folder).free
    if free < LITTLE_DISK:
        return Finding(
            "cache", "warn", f"{detail}, only {free / 1e6:.0f} MB free", "free space or set PYKERN_CACHE", facts
        )
    if os.statvfs(folder).f_flag & getattr(os, "ST_NOEXEC", 8):
        return Finding("cache", "fail", f"{detail}, on a noexec mount", "set PYKERN_CACHE to a folder elsewhere", facts)
    return Finding("cache", "ok", detail, facts=facts)


def _machine() -> Finding:
    free = limits.free_memory()
    memory = "unknown" if free is None else f"{free / 2**30:.1f} GiB"
    detail = f"{limits.cores()} cores, {memory} free: {limits.jobs(False)} g++ or {limits.jobs(True)} nvcc at once"
    if free is not None and free < 1 << 30:
        return Finding("machine", "warn", detail, "compilers may run out of memory")
    return Finding("machine", "ok", detail)


def examine() -> list[Finding]:
    """All checks, in the order a reader needs them. No check raises."""
    torch = probe_torch()
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", _python),
        ("sources", _sources),
        ("torch", lambda: _torch(torch)),
        ("c++", _cxx),
        ("ninja", _ninja),
        ("gpu", lambda: _gpu(torch)),
        ("nvcc", lambda: _cuda(torch)),
        ("cache", _cache),
        ("machine", _machine),
    ]
    report = []
    for name, check in checks:
        try:
            report.append(check())
        except (PykernError, OSError, ValueError) as error:
            report.append(Finding(name, "fail", f"{type(error).__name__}: {error}"))
    return report


def as_dict(report: list[Finding]) -> dict[str, Any]:
    """``{"ok": bool, "findings": [...]}``; ok is False when something needed is missing."""
    return {"ok": all(line.status != "fail" for line in report), "findings": [asdict(line) for line in report]}
