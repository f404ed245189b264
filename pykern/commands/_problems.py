"""Problems of registered ops from the command line, for the analyses that start from an op's name and shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pykern.analysis.roofline import Work
from pykern.errors import ArgumentError


def complete_case(found: Any, case: dict[str, Any], dtype: str) -> dict[str, Any]:
    """``case`` with the required tensors that were not given, sized by the dimension names of those that were."""
    from pykern.op import Spec
    from pykern.schema import Tensor

    tensors = [a for a in found.inputs if isinstance(a, Tensor)]
    sizes: dict[str, tuple[int, ...]] = {}
    for spec in tensors:
        given = case.get(spec.name)
        if isinstance(given, Spec):
            tokens, shape = spec.dims.split(), list(given.shape)
            if tokens and tokens[0].startswith("*"):
                lead = len(shape) - len(tokens) + 1
                sizes.setdefault(tokens[0], tuple(shape[: max(0, lead)]))
                tokens, shape = tokens[1:], shape[max(0, lead) :]
            for token, size in zip(tokens, shape):
                sizes.setdefault(token, (size,))
    out = dict(case)
    for spec in tensors:
        if spec.name in out or spec.optional or spec.many:
            continue
        tokens = spec.dims.split()
        known = [(int(t),) if t.isdigit() else sizes.get(t) for t in tokens]
        if any(k is None for k in known):
            missing = [t for t, k in zip(tokens, known) if k is None]
            raise ArgumentError(
                "--shape",
                f"no shape for {spec.name}",
                f"{spec.name}=SIZES ({spec.dims}; {', '.join(missing)} unknown)",
            )
        out[spec.name] = Spec(_dtype(spec, dtype, out), tuple(n for k in known if k is not None for n in k))
    return out


def _dtype(spec: Any, dtype: str, case: dict[str, Any]) -> str:
    if isinstance(spec.dtypes, str):
        like = case.get(spec.dtypes.removeprefix("like ").strip())
        return like.dtype if like is not None else dtype
    return dtype if dtype in spec.dtypes else spec.dtypes[0]


def case_label(name: str, case: dict[str, Any]) -> str:
    """``softmax 4096x4096 bfloat16``: the op, its first tensor, and the other tensors' shapes."""
    from pykern.op import Spec

    shapes = [v for v in case.values() if isinstance(v, Spec)]
    text = ",".join("x".join(map(str, s.shape)) for s in shapes)
    return f"{name} {text} {shapes[0].dtype}" if shapes else name


def op_problems(
    name: str, shape: str | None, dtype: str, scalars: Sequence[str] = ()
) -> list[tuple[str, Any]]:
    """(label, problem) of an op at a shape; without one, at the shapes it is benchmarked with (else the first it
    declares)."""
    from pykern import op as registry
    from pykern.commands.explain import case_of
    from pykern.schema import dtype_name

    found = registry.get(name)
    if shape:
        full = dtype_name(dtype)
        cases = [complete_case(found, case_of(found, shape, full, tuple(scalars)), full)]
    else:
        cases = list(found.benches) or list(found.cases())[:4]
    return [(case_label(name, case), found.problem_of(case)) for case in cases]


def op_works(name: str, shape: str | None, dtype: str, scalars: Sequence[str] = ()) -> list[Work]:
    """:func:`op_problems` as :class:`Work`: their FLOPs and compulsory bytes, from the registry."""
    from pykern import op as registry

    found = registry.get(name)
    return [
        Work(label, found.flops(p), found.nbytes(p)) for label, p in op_problems(name, shape, dtype, scalars)
    ]
