"""Write docs/ops.md from the op registry: ``make docs``."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

HEADER = """# The ops

Written by `make docs` from the op registry: do not edit.

Every op is `pykern.<name>` and `torch.ops.pykern.<name>`. A tensor's dimensions are given by name; `*m` stands for any
number of leading axes.
"""


def argument_rows(op: object) -> list[str]:
    """One table row per input and output."""
    from pykern.schema import Scalar

    rows = ["| argument | shape or type | dtype | role |", "|---|---|---|---|"]
    for a in op.inputs:  # type: ignore[attr-defined]
        if isinstance(a, Scalar):
            default = "required" if a.required else f"default `{a.default!r}`"
            low, high = (str(int(v)) if v is not None and v == int(v) else v for v in (a.low, a.high))
            bounds = f"{low}..{high}" if low and high else f">= {low}" if low else f"<= {high}" if high else ""
            allowed = ", ".join(f"`{c!r}`" for c in a.choices) or bounds
            rows.append(f"| `{a.name}` | {a.type}{': ' if allowed else ''}{allowed} | | {default} |")
        elif a.many:  # what they are is checked by the op, not by the schema
            packed = any(b.name == "layout" for b in op.inputs)  # type: ignore[attr-defined]
            by = "by `layout`: see [packed weights](quant.md#layouts)" if packed else "by the op's check"
            rows.append(f"| `{a.name}` | list of tensors | {by} | {a.role} |")
        else:
            dtypes = a.dtypes if isinstance(a.dtypes, str) else ", ".join(a.dtypes)
            rows.append(f"| `{a.name}` | `[{a.dims}]` | {dtypes} | {a.role}{', optional' if a.optional else ''} |")
    for o in op.outputs:  # type: ignore[attr-defined]
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
        parts.append("\n".join(argument_rows(op)) + "\n")
        parts.append("```text\n" + "\n".join(lines).strip() + "\n```\n")
        parts.append(f"Source: [`cuda_src/{op.source}`](../cuda_src/{op.source})\n")
    return "\n".join(parts)


if __name__ == "__main__":
    target = ROOT / "docs" / "ops.md"
    target.write_text(page(), encoding="utf-8")
    print(f"wrote {target.relative_to(ROOT)}")
