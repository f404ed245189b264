"""What fusing really costs: registers, shared memory and occupancy of pykern's own kernels, as the compiler made them.

A chain is read from the left; where one shipped op does several steps (a product with bias and activation, a gated
product, an add with its norm, attention) that op is the fused kernel, and the ops that do the steps one by one are
the kernels before. Needs nvcc (or its results in the cache), no GPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pykern.analysis.traffic import Chain, Step

_ACTIVATIONS = ("gelu", "silu", "relu")
_GATED = {"silu_mul": ("silu_and_mul", "silu"), "gelu_mul": ("gelu_and_mul", "gelu")}
_NORMS = {"norm": "rms_norm", "layernorm": "layer_norm"}
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True)
class Group:
    """Consecutive steps that one shipped op does, and the ops for them one by one: (op, shape) pairs. ``fused`` is
    None where no op does the step; ``apart`` leaves out steps that no op does alone."""

    steps: tuple[str, ...]
    fused: tuple[str, str] | None
    apart: tuple[tuple[str, str], ...]


def groups(chain: Chain, batch: int) -> list[Group]:
    """The chain as shipped ops at ``batch``, longest first from the left."""
    found, at, width, rows = [], 0, chain.input, batch * chain.queries
    while at < len(chain.steps):
        group, taken = _group(chain.steps[at:], width, rows, chain.queries)
        found.append(group)
        at += taken
        width = chain.steps[at - 1].out
    return found


def _group(steps: tuple[Step, ...], width: int, rows: int, queries: int) -> tuple[Group, int]:
    names = [step.name for step in steps]
    first, n = names[0], steps[0].out
    if first.startswith("linear"):
        product = f"x={rows}x{width},w={n}x{width}"
        if len(steps) > 1 and names[1] in _GATED and not steps[0].keep:
            op, activation = _GATED[names[1]]
            gated = f"x={rows}x{width},w_gate={n // 2}x{width},w_up={n // 2}x{width},activation={activation}"
            return Group(tuple(names[:2]), ("gated_linear", gated), (("linear", product), (op, f"{rows}x{n}"))), 2
        taken, fused = 1, product
        for wanted, text in ((("bias",), f",bias={n}"), (_ACTIVATIONS, None), (("add",), f",residual={rows}x{n}")):
            if taken < len(steps) and names[taken] in wanted and not steps[taken - 1].keep:
                fused += text or f",activation={names[taken]}"
                taken += 1
        return Group(tuple(names[:taken]), ("linear", fused), (("linear", product),)), taken
    if first == "add" and len(steps) > 1 and names[1] in _NORMS:
        op = _NORMS[names[1]]
        return Group(tuple(names[:2]), (op, f"x={rows}x{width},residual={rows}x{width}"), ((op, f"{rows}x{width}"),)), 2
    if names[:3] == ["scores", "softmax", "values"]:
        keys = steps[0].flops // (2 * width)
        heads = steps[0].out // keys
        dim = width // heads
        cache = f"{keys}x{steps[0].context // (dim * keys)}x{dim}"
        shape = f"q={queries}x{heads}x{dim},k={cache},v={cache}"  # one sequence: of a batch each runs the same kernel
        return Group(tuple(names[:3]), ("attention", shape), ()), 3
    if first in _NORMS:
        own = (_NORMS[first], f"{rows}x{width}")
        return Group((first,), own, (own,)), 1
    if first in _GATED:
        own = (_GATED[first][0], f"{rows}x{width}")
        return Group((first,), own, (own,)), 1
    if first == "softmax":
        own = ("softmax", f"{rows}x{width}")
        return Group((first,), own, (own,)), 1
    return Group((first,), None, ()), 1


def shipped_cost(chain: Chain, batch: int, arch: str) -> dict[str, Any]:
    """Figures of the shipped kernels for ``chain``, before and after fusing, at ``batch`` on ``arch`` (``90a``).

    ``groups`` holds a row for each group: ``steps``, and under ``before`` and ``after`` its kernels with ``op``,
    ``kernel``, ``threads``, ``regs``, ``smem``, ``spills``, ``blocks``, ``occupancy``. Raises ToolchainError where
    nothing can be compiled, ArgumentError for types that the ops do not take.
    """
    from pykern.errors import require

    same = chain.dtype == chain.weight_dtype
    allowed = f"{', '.join(_DTYPES)} with weights of the same type"
    require(same and chain.dtype in _DTYPES, "--kernels", f"{chain.dtype}, weights {chain.weight_dtype}", allowed)
    made: dict[tuple[str, str], list[dict[str, Any]]] = {}

    def kernels(pair: tuple[str, str]) -> list[dict[str, Any]]:
        if pair not in made:
            made[pair] = _kernels(*pair, _DTYPES[chain.dtype], arch)
        return made[pair]

    rows = []
    for group in groups(chain, batch):
        before = [kernel for pair in group.apart for kernel in kernels(pair)]
        after = kernels(group.fused) if group.fused else []
        rows.append({"steps": list(group.steps), "before": before, "after": after})
    return {"batch": batch, "arch": arch, "groups": rows}


def _kernels(op: str, shape: str, dtype: str, arch: str) -> list[dict[str, Any]]:
    from pykern.analysis.occupancy import occupancy
    from pykern.analysis.occupancy_sources import Given
    from pykern.commands._occupancy_build import op_cases

    rows = []
    for case in op_cases(op, shape, dtype, arch, Given())[0]:
        result, config = occupancy(case.cc, case.config), case.config
        row = {"op": op, "kernel": case.name, "threads": config.threads, "regs": config.regs, "smem": config.smem}
        spills = case.facts.spills if case.facts else None
        rows.append({**row, "spills": spills, "blocks": result.blocks, "occupancy": round(result.occupancy, 6)})
    return rows
