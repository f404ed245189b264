"""pykern: CUDA kernels for LLM inference whose one source also runs, checked, on the CPU.

``pykern.softmax(x)`` and every other op, ``pykern.host(...)``, ``pykern.compile(source)`` are found at first use:
importing pykern imports no torch.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

__version__ = "0.1.0"

_HERE = Path(__file__).parent

# Public names that are not ops, and the module each lives in.
_PUBLIC = {
    "host": "pykern.op",
    "use_tuning": "pykern.op",
    "register_all": "pykern.op",
    "compile": "pykern.jit.raw",
    "load": "pykern.jit.raw",
    "QuantTensor": "pykern.quant",
    "prepack": "pykern.quant",
    "ArgumentError": "pykern.errors",
    "BuildError": "pykern.errors",
    "CaptureError": "pykern.errors",
    "CheckError": "pykern.errors",
    "GradientError": "pykern.errors",
    "KernelError": "pykern.errors",
    "ModelError": "pykern.errors",
    "PykernError": "pykern.errors",
    "ToolchainError": "pykern.errors",
}


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        found = getattr(importlib.import_module(_PUBLIC[name]), name)
    elif name.startswith("_") or (_HERE / name).is_dir() or (_HERE / f"{name}.py").is_file():
        # A submodule is no attribute until it is imported; `from pykern import x` asks here first.
        raise AttributeError(f"module 'pykern' has no attribute {name!r}")
    else:
        # Not `from pykern import op`: that would ask this function for "op" first.
        op = importlib.import_module("pykern.op")
        if name not in op.names():
            raise AttributeError(f"module 'pykern' has no attribute {name!r}")
        found = op.get(name).public
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    op = importlib.import_module("pykern.op")
    return sorted({*globals(), *_PUBLIC, *op.names()})
