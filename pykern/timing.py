"""Timing kernels on a GPU: dozens of calls over rotated buffers in one CUDA graph, medians, arms alternated."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

L2_FACTOR = 4  # rotated buffers together are this many times the L2


@dataclass(frozen=True)
class Timing:
    """Microseconds a call: median of the repeats, fastest, slowest."""

    median: float
    low: float
    high: float


def capture(call: Callable[[int], Any], calls: int) -> Any:
    """A CUDA graph of ``calls`` calls; ``call(i)`` issues the i-th. Warmed up on a side stream first."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for i in range(min(calls, 3)):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls):
            call(i)
    return graph


def replay_us(graph: Any, calls: int) -> float:
    """Microseconds a call of one replay."""
    import torch

    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3 / calls


def alternate(arms: Sequence[tuple[Any, int]], repeats: int = 9) -> list[Timing]:
    """Replay each ``(graph, calls)`` in turn, ``repeats`` times: the chip's drift hits all arms alike."""
    times: list[list[float]] = [[] for _ in arms]
    for graph, calls in arms:
        replay_us(graph, calls)
    for _ in range(repeats):
        for n, (graph, calls) in enumerate(arms):
            times[n].append(replay_us(graph, calls))
    return [Timing(statistics.median(t), min(t), max(t)) for t in times]


def rotation(nbytes: int, l2_bytes: int, limit: int = 24) -> int:
    """How many argument sets keep the L2 cold between uses of one."""
    return max(1, min(limit, -(-L2_FACTOR * l2_bytes // max(nbytes, 1))))
