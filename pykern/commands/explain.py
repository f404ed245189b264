"""``pykern explain OP``: which variant a problem gets, and why not a faster one."""

from __future__ import annotations

import json
from typing import Any

import click

from pykern.commands._once import Once


@click.command("explain", cls=Once, short_help="Which kernel variant a problem gets, and why.")
@click.argument("op")
@click.option("--shape", help='Sizes of the tensors: "4096x4096" for the first, or "x=16x4096,w=4096x4096".')
@click.option("--dtype", help="dtype of the floating-point inputs; bf16 unless given. Needs --shape.")
@click.option("--arch", default="90a", show_default=True, help="Architecture to plan for.")
@click.option("--set", "scalars", multiple=True, metavar="NAME=VALUE", help="A scalar argument, e.g. --set log=true.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of text.")
def command(op: str, shape: str | None, dtype: str | None, arch: str, scalars: tuple[str, ...], as_json: bool) -> None:
    """Print the launches that OP is planned with, without compiling anything.

    Without --shape the op's first declared cases are explained.
    """
    from pykern import op as registry
    from pykern.errors import ArgumentError
    from pykern.op import Spec
    from pykern.plan import TARGETS, Launch
    from pykern.schema import dtype_name

    found = registry.get(op)
    if arch not in TARGETS:
        raise ArgumentError("--arch", repr(arch), ", ".join(TARGETS))
    if shape is None and (scalars or dtype is not None):
        raise ArgumentError("--shape", None, "sizes, where --dtype or --set is given")
    kind = dtype_name(dtype) if dtype is not None else None
    cases = [case_of(found, shape, kind, scalars)] if shape is not None else list(found.cases())[:4]
    out: list[dict[str, Any]] = []
    for case in cases:
        problem = found.problem_of(case)
        plan = found.planned(problem, TARGETS[arch])
        shapes = {k: "x".join(map(str, v.shape)) + f" {v.dtype}" for k, v in case.items() if isinstance(v, Spec)}
        rows = [
            {
                "kernel": la.kernel,
                "source": la.source,
                "grid": Launch.triple(la.grid),
                "block": Launch.triple(la.block),
                "cluster": Launch.triple(la.cluster),
                "dynamic_smem": la.smem,
                "pdl": la.pdl,
                "cooperative": la.cooperative,
            }
            for la in plan.launches
        ]
        out.append(
            {
                "op": op,
                "arch": arch,
                "problem": shapes,
                "variant": plan.variant,
                "numerics": plan.numerics,
                "why": list(plan.why),
                "launches": rows,
                "workspace_bytes": sum(w.nbytes for w in plan.workspaces),
                "bytes": found.nbytes(problem),
                "flops": found.flops(problem),
            }
        )
    if as_json:
        click.echo(json.dumps(out if len(out) > 1 else out[0]))
        return
    for e in out:
        click.echo(f"{op} {e['problem']} on sm_{arch}: {e['variant']} (numerics class {e['numerics']})")
        for reason in e["why"]:
            click.echo(f"  {reason}")
        for row in e["launches"]:
            extra = f", {row['dynamic_smem']} B shared" if row["dynamic_smem"] else ""
            click.echo(f"  {row['kernel']}: grid {row['grid']}, block {row['block']}{extra}")
        click.echo(f"  moves at least {e['bytes']:,} bytes, {e['flops']:,} FLOP")


def case_of(
    found: Any, shape: str | None, dtype: str | None, scalars: tuple[str, ...], default: str = "bfloat16"
) -> dict[str, Any]:
    """A Case from the command line's shapes and scalars. ``dtype``: what was asked for, else ``default`` where the
    argument may be that."""
    from pykern.errors import ArgumentError
    from pykern.op import Spec
    from pykern.schema import Scalar, Tensor

    tensors = [a for a in found.inputs if isinstance(a, Tensor)]
    case: dict[str, Any] = {}
    taken, refusing = False, []
    for n, part in enumerate(shape.split(",") if shape is not None else []):
        name, _, sizes = part.rpartition("=")
        dims = sizes_of(part, sizes)
        if not name and n >= len(tensors):
            raise ArgumentError("--shape", repr(shape), f"at most {len(tensors)} shapes for {found.name}")
        spec = next((t for t in tensors if t.name == name), None) if name else tensors[n]
        if spec is None:
            raise ArgumentError("--shape", repr(name), ", ".join(t.name for t in tensors))
        if spec.name in case:
            raise ArgumentError("--shape", repr(shape), f"one shape for {spec.name}")
        if spec.many:
            raise ArgumentError("--shape", repr(part), f"none for {spec.name}, a list of tensors; leave --shape out")
        wanted = dtype or default
        allowed = spec.dtypes if isinstance(spec.dtypes, tuple) else (wanted,)
        taken = taken or wanted in allowed
        refusing += [d for d in allowed if d not in refusing]
        case[spec.name] = Spec(wanted if wanted in allowed else allowed[0], dims)
    if dtype and case and not taken:
        raise ArgumentError("--dtype", repr(dtype), ", ".join(refusing))
    for text in scalars:
        name, equals, value = text.partition("=")
        known = next((a for a in found.inputs if isinstance(a, Scalar) and a.name == name), None)
        if known is not None and not equals:
            raise ArgumentError("--set", repr(text), f"{name}=VALUE")
        if known is None:
            names = [a.name for a in found.inputs if isinstance(a, Scalar)]
            raise ArgumentError("--set", repr(name), ", ".join(names) or "no scalars")
        if name in case:
            raise ArgumentError("--set", repr(text), f"one value for {name}")
        case[name] = scalar_of(known, value)
    return case


def sizes_of(part: str, sizes: str) -> tuple[int, ...]:
    """``4096x4096`` as integers below 2**63."""
    from pykern.errors import ArgumentError

    try:
        dims = tuple(int(v) for v in sizes.lower().split("x"))
    except ValueError:
        dims = ()
    if not dims or min(dims) < 0 or max(dims) >= 2**63:
        raise ArgumentError("--shape", repr(part)[:80], "sizes such as 4096x4096")
    return dims


def scalar_of(known: Any, value: str) -> Any:
    """The value of ``--set NAME=VALUE``, of the argument's type and within its bounds."""
    from pykern.errors import ArgumentError

    at = f"--set {known.name}"
    if known.type == "bool":
        words = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
        if value.lower() not in words:
            raise ArgumentError(at, repr(value), "true or false")
        return words[value.lower()]
    try:
        made = {"float": float, "int": int, "str": str}[known.type](value)
    except ValueError:
        raise ArgumentError(at, repr(value)[:80], f"a value of type {known.type}") from None
    if known.type == "int" and not -(2**63) <= made < 2**63:
        raise ArgumentError(at, repr(value)[:80], "a 64-bit int")
    if known.choices and made not in known.choices:
        raise ArgumentError(at, repr(value)[:80], ", ".join(map(repr, known.choices)))
    low, high = known.low, known.high
    if (low is not None or high is not None) and not ((low is None or low <= made) and (high is None or made <= high)):
        raise ArgumentError(at, repr(value), known.allowed)
    return made
