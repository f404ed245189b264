"""Repetition, frequency and presence penalties on logits.

l' = l / r if l > 0 else l r, for tokens seen in the prompt or the output; then l' - count * frequency - presence for
tokens of the output. Keskar et al., "CTRL", 2019 (repetition); the OpenAI API's frequency and presence penalties.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pykern.op import Case, Draw, Op, Spec, Tolerance
from pykern.ops._rows import whole
from pykern.plan import I32, I64, In, Launch, OutPtr, Plan, Target, ceil_div, template
from pykern.schema import FLOATS, Out, Problem, Tensor

THREADS = 256


def plan(p: Problem, target: Target) -> Plan:
    x = p["logits"]
    stride = x.strides[0]
    fast = whole(p.n, x.itemsize) and p.rows_aligned("logits", "y")
    threads = p.m * ceil_div(p.n, 16 // x.itemsize)
    args = (
        In("logits"), In("counts"), In("prompt"), In("repetition"), In("frequency"), In("presence"), OutPtr("y"),
        I64(p.m), I64(stride), I32(p.n), I32(int(fast)),
    )  # fmt: skip
    launch = Launch(template("apply_penalties", x.dtype), ceil_div(threads, THREADS), THREADS, args)
    return Plan((launch,), numerics=x.dtype, variant="apply_penalties", why=("a thread owns 16 bytes of logits",))


def reference(
    logits: Any,
    counts: Any = None,
    prompt: Any = None,
    repetition: Any = None,
    frequency: Any = None,
    presence: Any = None,
) -> Any:
    import torch

    x = logits.double()
    made = counts > 0 if counts is not None else torch.zeros_like(x, dtype=torch.bool)
    seen = made | prompt if prompt is not None else made
    r = repetition.double().unsqueeze(1) if repetition is not None else torch.ones(1, 1, dtype=torch.float64)
    y = torch.where(seen, torch.where(x > 0, x / r, x * r), x)
    if frequency is not None and counts is not None:
        y = torch.where(made, y - counts.double() * frequency.double().unsqueeze(1), y)
    return torch.where(made, y - presence.double().unsqueeze(1), y) if presence is not None else y


def cases() -> Iterator[Case]:
    for dtype in FLOATS:
        yield {"logits": Spec(dtype, (2, 100))}


def draw(draw: Draw) -> Case:
    from pykern.testing import sizes, tensor_spec

    dtype, m, n = draw.one_of(FLOATS), draw(sizes(0, 4)), draw(sizes(1, 300, around=[4, 8]))
    case: Case = {"logits": draw(tensor_spec(dtype, (m, n)))}
    if draw.one_of((True, True, False)):
        case["counts"] = Spec("int32", (m, n))
    if draw.one_of((True, False)):
        case["prompt"] = Spec("bool", (m, n))
    for name in ("repetition", "frequency", "presence"):
        if draw.one_of((True, False)):
            case[name] = Spec("float32", (m,))
    return case


def make(case: Case, rng: Any) -> dict[str, Any]:
    """Counts 0..3; repetition 0.5..1.5."""
    import torch

    from pykern.testing import make_tensor

    made: dict[str, Any] = {k: make_tensor(v, rng) for k, v in case.items() if isinstance(v, Spec)}
    if "counts" in made:
        made["counts"] = torch.randint(0, 4, made["counts"].shape, generator=rng).int()
    if "repetition" in made:
        made["repetition"] = torch.rand(made["repetition"].shape, generator=rng) + 0.5
    return made


def tolerance(dtype: str) -> Tolerance:
    return {
        "float32": Tolerance(1e-6, 2e-6, "a quotient, a product and two differences"),
        "float16": Tolerance(1e-3, 1e-4, "one rounding to 11 bits after a cancellation in float32"),
        "bfloat16": Tolerance(8e-3, 1e-3, "one rounding to 8 bits after a cancellation in float32"),
    }[dtype]


op = Op(
    name="apply_penalties",
    source="ops/apply_penalties.cuh",
    inputs=(
        Tensor("logits", "m n"),
        Tensor("counts", "m n", ("int32",), optional=True, strides="contiguous"),
        Tensor("prompt", "m n", ("bool",), optional=True, strides="contiguous"),
        Tensor("repetition", "m", ("float32",), optional=True, strides="contiguous"),
        Tensor("frequency", "m", ("float32",), optional=True, strides="contiguous"),
        Tensor("presence", "m", ("float32",), optional=True, strides="contiguous"),
    ),
    outputs=(Out("y", "m n", "like logits"),),
    plan=plan,
    reference=reference,
    tolerance=tolerance,
    cases=cases,
    draw=draw,
    make=make,
    nbytes=lambda p: 2 * p["logits"].nbytes + sum(t.nbytes for t in (p["counts"], p["prompt"]) if t is not None),
    flops=lambda p: 4 * p["logits"].numel,
    inplace=("logits",),
    rowwise=tuple((n, 0) for n in ("logits", "counts", "prompt", "repetition", "frequency", "presence")),
    doc="""Repetition, frequency and presence penalties on logits, before temperature.

    Args:
        logits: ``[m, n]``, float32, float16 or bfloat16; last stride 1.
        counts: int32 ``[m, n]``, how often each token was generated (the output, not the prompt).
        prompt: bool ``[m, n]``, which tokens the prompt holds; they count for repetition only.
        repetition: float32 ``[m]``: a seen token's positive logit is divided by it, a negative one multiplied, once.
        frequency, presence: float32 ``[m]``: count * frequency and presence are subtracted from generated tokens.
        out: optional result, contiguous; may be ``logits``.

    Returns:
        ``[m, n]`` of the logits' dtype, computed in float32.

    Raises:
        ArgumentError: a dtype, shape, stride or ``out`` that is not as above.
    """,
    mutants=(
        ("f[i] > 0.0f ? f[i] / repetition : f[i] * repetition", "f[i] / repetition"),
        ("static_cast<float>(count) * frequency", "frequency"),
        ("if (count > 0) f[i] = f[i] -", "if (seen) f[i] = f[i] -"),
    ),
)
