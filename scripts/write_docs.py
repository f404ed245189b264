"""Write docs/ops.md from the op registry: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from pykern.bridge import parameters  # noqa: E402
from pykern.op import Op  # noqa: E402
from pykern.schema import Scalar  # noqa: E402

HEADER = """# The ops

Written by `make docs` from the op registry: do not edit.

Every op is `pykern.<name>` and `torch.ops.pykern.<name>`. A tensor's dimensions are given by name; `*m` stands for any
number of leading axes. What stands after `*` in a signature is given by keyword only, and marked so in the table. A
`dtype` is given by its name, a str, not as a `torch.dtype`.
"""


def keyword_only(op: Op) -> set[str]:
    """Names of the inputs that are given by keyword only."""
    names = [a.name for a in op.inputs]
    return set(names[names.index(op.keyword_only) :]) if op.keyword_only else set()


def signature(op: Op) -> str:
    """How ``pykern.<name>`` is called."""
    return f"pykern.{op.name}({', '.join(parameters(op))})"


def argument_rows(op: Op) -> list[str]:
    """One table row per input and output."""
    rows = ["| argument | shape or type | dtype | role |", "|---|---|---|---|"]
    named = keyword_only(op)
    for a in op.inputs:
        how = ", by keyword" if a.name in named else ""
        if isinstance(a, Scalar):
            default = "required" if a.required else f"default `{a.default!r}`"
            low, high = (str(int(v)) if v is not None and v == int(v) else v for v in (a.low, a.high))
            bounds = f"{low}..{high}" if low and high else f">= {low}" if low else f"<= {high}" if high else ""
            allowed = ", ".join(f"`{c!r}`" for c in a.choices) or bounds
            rows.append(f"| `{a.name}` | {a.type}{': ' if allowed else ''}{allowed} | | {default}{how} |")
        elif a.many:  # what they are is checked by the op, not by the schema
            packed = any(b.name == "layout" for b in op.inputs)
            by = "by `layout`: see [packed weights](quant.md#layouts)" if packed else "by the op's check"
            rows.append(f"| `{a.name}` | list of tensors | {by} | {a.role}{how} |")
        else:
            dtypes = a.dtypes if isinstance(a.dtypes, str) else ", ".join(a.dtypes)
            role = f"{a.role}{', optional' if a.optional else ''}{how}"
            rows.append(f"| `{a.name}` | `[{a.dims}]` | {dtypes} | {role} |")
    for o in op.outputs:
        shape = f"`[{o.dims}]`" if isinstance(o.dims, str) else "by the problem"
        rows.append(f"| `{o.name}` | {shape} | {o.dtype if isinstance(o.dtype, str) else 'by the problem'} | output |")
    return rows


def page() -> str:
    """The whole page."""
    from pykern import op as registry

    parts = [HEADER]
    for op in map(registry.get, registry.names()):
        maths = (sys.modules[f"pykern.ops.{op.name}"].__doc__ or "").strip()
        lines = [line[4:] if line.startswith("    ") else line for line in op.doc.strip().splitlines()]
        parts.append(f"## {op.name}\n\n    {maths.splitlines()[0] if maths else ''}\n")
        parts.append(f"```python\n{signature(op)}\n```\n")
        parts.append("\n".join(argument_rows(op)) + "\n")
        parts.append("```text\n" + "\n".join(lines).strip() + "\n```\n")
        parts.append(f"Source: [`cuda_src/{op.source}`](../cuda_src/{op.source})\n")
    return "\n".join(parts)


if __name__ == "__main__":
    target = ROOT / "docs" / "ops.md"
    target.write_text(page(), encoding="utf-8")
    print(f"wrote {target.relative_to(ROOT)}")
