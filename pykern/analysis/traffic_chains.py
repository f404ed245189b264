"""Chains of operations, by name or written as text.

The text form is the width of the input and the steps, joined by ``->``:

    4096 -> linear 14336 -> bias -> gelu -> linear 4096
    4096 -> add keep -> norm
    4096 -> linear 28672 -> silu_mul -> linear 4096
    4096 -> scores heads=32 kv=8 dim=128 keys=4096 -> softmax -> values

Steps (``w`` is the width so far, in elements a token):

    linear N                       a matrix product to width N; weights w x N
    bias, scale                    one weight a column
    norm                           RMS norm, w weights; layernorm has 2 w
    gelu silu relu tanh sigmoid exp softmax rope cast quantize      no weights, same width
    add, mul                       a second operand of the same width is read (a residual, a gate)
    silu_mul, gelu_mul, glu        the halves of a row multiplied: width w / 2
    scores heads= kv= dim= keys=   queries (w = heads x dim) against a cache of keys: width heads x keys
    values                         the weights of the last ``scores`` on the cache of values: width heads x dim

``keep`` after a step: its result is wanted later too, so it is written even when fused.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from pykern.analysis.traffic import MAX_SIZE, Chain, Step
from pykern.errors import ArgumentError, require

_PLAIN = {"gelu": 8, "silu": 5, "relu": 1, "tanh": 4, "sigmoid": 4, "exp": 1, "softmax": 5, "rope": 3, "cast": 0,
          "quantize": 2}  # fmt: skip
_WHOLE_ROW = {"softmax", "quantize"}
STEP_NAMES = ("linear N", "bias", "scale", "norm", "layernorm", *_PLAIN, "add", "mul", "silu_mul", "gelu_mul", "glu",
              "scores heads= kv= dim= keys=", "values")  # fmt: skip


def parse_chain(text: str, name: str = "", *, dtype: str = "bf16", weight_dtype: str = "", queries: int = 1,
                group: int = 0) -> Chain:  # fmt: skip
    """A :class:`Chain` from its text form; :class:`ArgumentError` names the step that is wrong."""
    require(
        isinstance(text, str) and len(text) <= 10_000,
        "chain",
        repr(text)[:60],
        "text of at most 10000 characters",
    )
    parts = [p.strip() for p in text.split("->")]
    width = _size(parts[0], "chain: the input width")
    require(len(parts) > 1, "chain", repr(text[:60]), "a width and steps joined by ->")
    require(len(parts) <= 200, "chain", f"{len(parts) - 1} steps", "at most 199")
    steps: list[Step] = []
    attention: dict[str, int] = {}
    first = width
    for number, part in enumerate(parts[1:], 1):
        step = _step(part, f"chain step {number}", width, attention)
        steps.append(step)
        width = step.out
    return Chain(name or "chain", first, tuple(steps), dtype, weight_dtype, queries, group, text)


def _size(text: str, name: str) -> int:
    match = re.fullmatch(r"\d{1,13}", text)
    require(
        match is not None and 1 <= int(text) <= MAX_SIZE,
        name,
        repr(text[:40]),
        f"a whole number from 1 to {MAX_SIZE}",
    )
    return int(text)


def _step(part: str, where: str, width: int, attention: dict[str, int]) -> Step:
    words = part.split()
    require(bool(words), where, repr(part), f"one of {', '.join(STEP_NAMES)}")
    kind, rest = words[0].lower(), words[1:]
    keep = bool(rest) and rest[-1].lower() == "keep"
    rest = rest[:-1] if keep else rest
    where = f"{where} ({kind})"

    def no_more() -> None:
        require(not rest, where, repr(part[:60]), f"{kind} takes nothing more than keep")

    if kind == "linear":
        require(len(rest) == 1, where, repr(part[:60]), "linear N")
        n = _size(rest[0], where)
        return Step(f"linear {n}", n, weights=width * n, flops=2 * width * n, keep=keep, rows=True)
    if kind in ("bias", "scale"):
        no_more()
        return Step(kind, width, weights=width, flops=width, keep=keep, vector=True)
    if kind in ("norm", "layernorm"):
        no_more()
        vectors = 2 if kind == "layernorm" else 1
        return Step(
            kind,
            width,
            weights=vectors * width,
            flops=(3 + vectors) * width,
            keep=keep,
            rows=True,
            vector=True,
        )
    if kind in _PLAIN:
        no_more()
        return Step(
            kind, width, flops=_PLAIN[kind] * width, keep=keep, rows=kind in _WHOLE_ROW and not attention
        )  # over scores a softmax runs online, tile by tile
    if kind in ("add", "mul"):
        no_more()
        return Step(kind, width, extra=width, flops=width, keep=keep)
    if kind in ("silu_mul", "gelu_mul", "glu"):
        no_more()
        require(width % 2 == 0, where, f"width {width}", "an even width")
        per = {"silu_mul": 6, "gelu_mul": 9, "glu": 5}[kind]
        return Step(kind, width // 2, flops=per * (width // 2), keep=keep)
    if kind == "scores":
        values = _keywords(rest, where, ("heads", "kv", "dim", "keys"))
        require(
            width == values["heads"] * values["dim"],
            where,
            f"input width {width}",
            f"heads x dim = {values['heads'] * values['dim']}",
        )
        require(
            values["heads"] % values["kv"] == 0,
            where,
            f"heads={values['heads']} kv={values['kv']}",
            "heads a multiple of kv",
        )
        attention.update(values)
        return Step("scores", values["heads"] * values["keys"], context=values["kv"] * values["dim"] * values["keys"],
                    flops=2 * width * values["keys"], keep=keep)  # fmt: skip
    if kind == "values":
        no_more()
        require(bool(attention), where, "no scores before it", "a scores step earlier in the chain")
        heads, keys, dim = attention["heads"], attention["keys"], attention["dim"]
        require(width == heads * keys, where, f"input width {width}", f"heads x keys = {heads * keys}")
        return Step(
            "values",
            heads * dim,
            context=attention["kv"] * dim * keys,
            flops=2 * heads * dim * keys,
            keep=keep,
        )
    raise ArgumentError(where, repr(part[:60]), f"one of {', '.join(STEP_NAMES)}")


def _keywords(words: list[str], where: str, names: tuple[str, ...]) -> dict[str, int]:
    values: dict[str, int] = {}
    for word in words:
        key, equals, value = word.partition("=")
        require(
            bool(equals) and key in names and key not in values,
            where,
            repr(word[:40]),
            " ".join(f"{n}=N" for n in names),
        )
        values[key] = _size(value, f"{where} {key}")
    missing = [n for n in names if n not in values]
    require(not missing, where, f"no {', '.join(missing)}", " ".join(f"{n}=N" for n in names))
    return values


#: Name -> (what it is, its text from sizes). Sizes: hidden, inter, heads, kv, dim, keys.
NAMED: dict[str, tuple[str, Callable[[dict[str, int]], str]]] = {
    "mlp": ("projection, bias, GELU, down projection",
            lambda s: f"{s['hidden']} -> linear {s['inter']} -> bias -> gelu -> linear {s['hidden']}"),
    "linear-gelu": ("projection, bias, GELU: an epilogue",
                    lambda s: f"{s['hidden']} -> linear {s['inter']} -> bias -> gelu"),
    "gated-mlp": ("gate and up projection, SiLU x gate, down projection",
                  lambda s: f"{s['hidden']} -> linear {2 * s['inter']} -> silu_mul -> linear {s['hidden']}"),
    "gate-up": ("gate and up projection, SiLU x gate in the epilogue",
                lambda s: f"{s['hidden']} -> linear {2 * s['inter']} -> silu_mul"),
    "residual-norm": ("residual add and RMS norm; the sum is wanted later",
                      lambda s: f"{s['hidden']} -> add keep -> norm"),
    "attention": ("scores, softmax, values over a cache",
                  lambda s: f"{s['heads'] * s['dim']} -> scores heads={s['heads']} kv={s['kv']} dim={s['dim']} "
                            f"keys={s['keys']} -> softmax -> values"),
    "qkv": ("norm, one projection for queries, keys and values, RoPE",
            lambda s: f"{s['hidden']} -> norm -> linear {(s['heads'] + 2 * s['kv']) * s['dim']} -> rope"),
}  # fmt: skip
#: Llama-3-8B.
DEFAULT_SIZES = {"hidden": 4096, "inter": 14336, "heads": 32, "kv": 8, "dim": 128, "keys": 4096}


def named_chain(name: str, sizes: dict[str, int] | None = None, *, dtype: str = "bf16", weight_dtype: str = "",
                queries: int = 1, group: int = 0) -> Chain:  # fmt: skip
    """A chain of :data:`NAMED` at the given sizes (missing ones from :data:`DEFAULT_SIZES`)."""
    require(
        name in NAMED,
        "chain",
        repr(name),
        f"one of {', '.join(NAMED)}, or a chain as text (4096 -> linear 14336 -> gelu)",
    )
    merged = {**DEFAULT_SIZES, **(sizes or {})}
    for key, value in merged.items():
        require(key in DEFAULT_SIZES, "sizes", key, ", ".join(DEFAULT_SIZES))
        require(type(value) is int and 1 <= value <= MAX_SIZE, key, repr(value), f"1 to {MAX_SIZE}")
    return parse_chain(
        NAMED[name][1](merged), name, dtype=dtype, weight_dtype=weight_dtype, queries=queries, group=group
    )


def find_chain(text: str, sizes: dict[str, int] | None = None, *, dtype: str = "bf16", weight_dtype: str = "",
               queries: int = 1, group: int = 0) -> Chain:  # fmt: skip
    """A chain by name, or from its text (anything with ``->``)."""
    if "->" in text:
        return parse_chain(text, dtype=dtype, weight_dtype=weight_dtype, queries=queries, group=group)
    return named_chain(text, sizes, dtype=dtype, weight_dtype=weight_dtype, queries=queries, group=group)
