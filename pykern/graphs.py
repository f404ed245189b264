"""A pool of CUDA graphs: one function, captured once per input shape and replayed after that."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

import torch

from pykern.errors import ArgumentError


@dataclass
class _Captured:
    graph: torch.cuda.CUDAGraph
    inputs: torch.Tensor
    output: torch.Tensor


class GraphPool:
    """Runs ``function(inputs, key) -> output``, both tensors on one GPU, through captured graphs.

    The function must do the same launches for the same ``key`` and input shape, read what varies from ``inputs``
    only, and not synchronise. The first call with a key runs it as it is (that compiles and plans whatever it needs;
    a compile during capture is refused), captures it, and replays; later calls copy ``inputs`` into the graph's own
    and replay. The output belongs to the pool: use or copy it before the next call, whatever its key.

    ``limit``: how many graphs are kept; the one unused longest goes first. All share one memory pool, so they must
    not run at the same time.
    """

    def __init__(self, function: Callable[[torch.Tensor, Any], torch.Tensor], limit: int = 32) -> None:
        if limit < 1:
            raise ArgumentError("limit", limit, "at least 1")
        self.function, self.limit = function, limit
        self.graphs: OrderedDict[Hashable, _Captured] = OrderedDict()
        self.memory: Any = None
        self.captures = 0

    @torch.inference_mode()  # the captured tensors are inference tensors, which only this mode may write
    def __call__(self, inputs: torch.Tensor, key: Hashable = None) -> torch.Tensor:
        full_key = (key, tuple(inputs.shape), inputs.dtype)
        found = self.graphs.get(full_key)
        if found is None:
            found = self.graphs[full_key] = self._capture(inputs, key)
            while len(self.graphs) > self.limit:
                self.graphs.popitem(last=False)
        else:
            found.inputs.copy_(inputs, non_blocking=True)
        self.graphs.move_to_end(full_key)
        found.graph.replay()
        return found.output

    def _capture(self, inputs: torch.Tensor, key: Hashable) -> _Captured:
        if not torch.cuda.is_available():
            raise ArgumentError("device", "cpu", "a CUDA GPU for graphs")
        own = inputs.to("cuda", copy=True)
        # torch's rule: warm up on a side stream, so that lazy set-up is not captured.
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.function(own, key)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.memory):
            output = self.function(own, key)
        self.memory = self.memory or graph.pool()
        self.captures += 1
        return _Captured(graph, own, output)
