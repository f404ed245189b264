"""GEGLU's elementwise part: y[m, n] = gelu(x[m, n]) * x[m, N + n], the exact gelu by erf, or its tanh form.

Hendrycks and Gimpel, "Gaussian Error Linear Units", 2016; Shazeer, "GLU Variants Improve Transformer", 2020.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykern.op import Case, Draw
from pykern.ops import _gated_act as shared
from pykern.plan import Plan, Target
from pykern.schema import Problem, Scalar, Tensor


def plan(p: Problem, target: Target) -> Plan:
    return shared.make_plan(p, "kGeluTanh" if p.approximate == "tanh" else "kGelu")


def reference(x: Any, approximate: str = "none") -> Any:
    import torch.nn.functional as F

    a, b = x.double().chunk(2, -1)
    return F.gelu(a, approximate=approximate) * b


def cases() -> Iterator[Case]:
    for case in shared.cases():
        for approximate in ("none", "tanh"):
            yield case | {"approximate": approximate}


def draw(draw: Draw) -> Case:
    return shared.draw(draw) | {"approximate": draw.one_of(("none", "tanh"))}


op = shared.gated(
    "gelu",
    inputs=(
        Tensor("x", "*m n"),
        Scalar("approximate", "str", "none", key=True, choices=("none", "tanh")),
    ),
    plan=plan,
    reference=reference,
    cases=cases,
    draw=draw,
    doc="""GELU of the first half of the last axis, times the second half.

    Args:
        x: ``[..., 2 n]``, float32, float16 or bfloat16; last stride 1, leading axes one stride.
        approximate: ``none`` for the exact gelu (erf), ``tanh`` for its tanh form.
        out: optional result, contiguous.

    Returns:
        ``[..., n]`` of x's dtype, computed in float32.

    Raises:
        ArgumentError: an odd last axis, or a dtype, stride or ``out`` that is not as above.
    """,
)
