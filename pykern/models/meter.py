"""What a run of the model did, op by op: calls, launches, bytes moved, time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from pykern import op as registry
from pykern.op import Op, tensor_info
from pykern.plan import Target
from pykern.schema import Scalar

# The ops the decoder calls (llama.py, engine.py).
OPS = (
    "embedding", "rms_norm", "linear", "quant_linear", "rope_append_kv", "attention", "silu_and_mul",
    "argmax", "sample",
)  # fmt: skip


@dataclass
class Row:
    """One op's share of a run. ``nbytes``: compulsory traffic, from the op's own accounting. ``seconds``: on the CPU
    the calls' wall time; on a GPU 0 until :meth:`Meter.time_kernels` measured it."""

    calls: int = 0
    launches: int = 0
    nbytes: int = 0
    seconds: float = 0.0


class Meter:
    """Counts and times ops. :attr:`ops` is a namespace with the metered functions, to be given to the model."""

    def __init__(self, device: str, names: Iterable[str] = OPS) -> None:
        self.device = device
        self.rows: dict[str, Row] = {}
        self.kernels: dict[str, str] = {}  # kernel function name -> op
        self.plans: dict[Any, tuple[int, int]] = {}
        self.variants: dict[tuple[str, str], None] = {}  # (source, kernel) of every launch, in order of use
        self.kv_tokens = (
            0  # cached tokens that this pass attends to, set by the engine: lengths live on the device
        )
        self.on = True
        there = registry.names()
        found = {name: registry.get(name) for name in names if name in there}
        self.ops = SimpleNamespace(**{name: self.metered(op) for name, op in found.items()})

    @property
    def backend(self) -> str:
        return "cuda" if self.device == "cuda" else "host"

    def metered(self, op: Op) -> Callable[..., Any]:
        """The public function of ``op``, counted."""
        function = op.public
        row = self.rows.setdefault(op.name, Row())

        def call(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return function(*args, **kwargs)
            started = time.perf_counter()
            result = function(*args, **kwargs)
            if self.device == "cpu":
                row.seconds += time.perf_counter() - started
            launches, nbytes = self.accounted(op, bound(op, args, kwargs))
            row.calls += 1
            row.launches += launches
            row.nbytes += nbytes
            return result

        return call

    def accounted(self, op: Op, values: dict[str, Any]) -> tuple[int, int]:
        """(launches, bytes) of a call, remembered by the shapes that decide them."""
        infos = {n: _info(v) for n, v in values.items()}
        key = (op.name, tuple(infos.items()))
        if key not in self.plans:
            problem = op.problem(infos)
            plan = op.planned(problem, self.target())
            for launch in plan.launches:
                self.kernels[kernel_name(launch.kernel)] = op.name
                self.variants[launch.source, launch.kernel] = None
            self.plans[key] = len(plan.launches), op.nbytes(problem)
        launches, nbytes = self.plans[key]
        if op.name == "attention":
            # The op counts what the page tables could name; this run knows what they do.
            q, k = infos["q"], infos["k"]
            nbytes = 2 * q.nbytes + 2 * self.kv_tokens * k.shape[-2] * k.shape[-1] * k.itemsize
        return launches, nbytes

    def note_pass(self, kv_tokens: int) -> None:
        """The next pass attends to so many cached tokens in all."""
        self.kv_tokens = kv_tokens

    def target(self) -> Target:
        from pykern.jit.target import default_target

        return registry.host_options().target() if self.device == "cpu" else default_target("cuda")

    def reset(self) -> None:
        """Back to zero, in place: the metered functions keep their rows."""
        for row in self.rows.values():
            row.calls = row.launches = row.nbytes = 0
            row.seconds = 0.0

    def time_kernels(self, run: Callable[[], object], repeats: int) -> None:
        """Device time and launches of ``repeats`` calls of ``run`` (GPU), from the profiler, by kernel name."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(repeats):
                run()
            torch.cuda.synchronize()
        for row in self.rows.values():
            row.launches = 0
        for event in profiler.events():
            name = self.kernels.get(kernel_name(event.name))
            if event.device_type == DeviceType.CUDA and name is not None:
                self.rows[name].launches += 1
                self.rows[name].seconds += event.time_range.elapsed_us() / 1e6

    def table(self) -> list[dict[str, Any]]:
        """One dict per op that ran, the slowest first: op, launches, bytes, seconds, share, backend."""
        ran = {name: row for name, row in self.rows.items() if row.launches or row.calls}
        total = sum(row.seconds for row in ran.values()) or 1.0
        return [
            {
                "op": name,
                "launches": row.launches,
                "bytes": row.nbytes,
                "seconds": row.seconds,
                "share": row.seconds / total,
                "backend": self.backend,
            }
            for name, row in sorted(ran.items(), key=lambda item: -item[1].seconds)
        ]


def bound(op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name, the schema's defaults filled in."""
    values = dict(zip([a.name for a in op.inputs], args, strict=False)) | kwargs
    return {a.name: values.get(a.name, a.default if isinstance(a, Scalar) else None) for a in op.inputs}


def _info(v: Any) -> Any:
    if isinstance(v, torch.Tensor):
        return tensor_info(v, torch)
    return tuple(tensor_info(t, torch) for t in v) if isinstance(v, (list, tuple)) else v


def kernel_name(text: str) -> str:
    """The bare function name of a kernel: ``void pk::linear<float, 4>(...)`` and ``linear<float, 4>`` -> ``linear``."""
    return text.split("(")[0].split("<")[0].strip().split(" ")[-1].split("::")[-1]
