"""Problems of registered ops from the command line, for the analyses that start from an op's name and shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pykern.analysis.roofline import Work


def shapes_text(values: dict[str, Any]) -> str:
    """``4096x4096,4096 bfloat16``: the shapes of an op's tensors and the dtype of the first."""
    tensors = [v for v in values.values() if hasattr(v, "shape") and hasattr(v, "dtype")]
    if not tensors:
        return ""
    return f"{','.join('x'.join(map(str, t.shape)) for t in tensors)} {tensors[0].dtype}"


def op_problems(
    name: str, shape: str | None, dtype: str, scalars: Sequence[str] = ()
) -> list[tuple[str, Any]]:
    """(label, problem) of an op at a shape; without one, at the shapes it is benchmarked with (else the first it
    declares). Shapes are those of ``pykern occupancy``: the first tensor's, named ones, or dimension sizes."""
    from pykern import op as registry
    from pykern.commands._occupancy_build import problem_values

    found = registry.get(name)
    if shape or scalars:
        values = problem_values(found, ",".join([*([shape] if shape else []), *scalars]), dtype)
        return [(f"{name} {shapes_text(values)}".strip(), found.problem(values))]
    cases = list(found.benches) or list(found.cases())[:4]
    return [(f"{name} {shapes_text(case)}".strip(), found.problem_of(case)) for case in cases]


def op_works(name: str, shape: str | None, dtype: str, scalars: Sequence[str] = ()) -> list[Work]:
    """:func:`op_problems` as :class:`Work`: their FLOPs and compulsory bytes, from the registry."""
    from pykern import op as registry

    found = registry.get(name)
    return [
        Work(label, found.flops(p), found.nbytes(p)) for label, p in op_problems(name, shape, dtype, scalars)
    ]
