"""What the README shows runs as it stands."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
from _scripts import load_script

from pykern import op

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.parametrize("number", range(len(BLOCKS)))
def test_python_blocks_run(number: int) -> None:
    exec(compile(BLOCKS[number], f"README.md block {number}", "exec"), {})


def test_the_first_kernel_is_checked() -> None:
    """The comment's promise: one element too many is found, and the tensor named."""
    from pykern.errors import CheckError

    (block,) = [b for b in BLOCKS if "check=True" in b]
    space: dict[str, Any] = {}
    exec(compile(block, "README.md", "exec"), space)
    with pytest.raises(CheckError, match="x"):
        space["scale"].launch(4, 256, space["x"], space["y"], 1001, 3.0, check=True)


def test_the_op_table_names_every_op() -> None:
    """Each op of the registry, and nothing else."""
    table = README[README.index("## Ops") : README.index("## Analyses")]
    rows = [line.split("|")[2] for line in table.splitlines() if line.count("|") == 3]
    listed = set(re.findall(r"`([a-z_]+)`", "".join(rows)))
    assert listed == set(op.names())


def test_the_page_of_ops_is_what_the_registry_says() -> None:
    """Else: make docs."""
    space = runpy.run_path(str(ROOT / "scripts" / "write_docs.py"))
    assert (ROOT / "docs" / "ops.md").read_text(encoding="utf-8") == space["page"]()


def test_every_make_target_and_command_it_names_exists() -> None:
    import pkgutil

    from pykern import commands

    there = {m.name.replace("_", "-") for m in pkgutil.iter_modules(commands.__path__)}
    named = set(re.findall(r"pykern ([a-z]+)\b(?= [A-Zm…])", README))
    assert named and named <= there, named - there


def test_the_page_of_ops_says_what_an_argument_may_be() -> None:
    """Written by scripts/write_docs.py: planes are of many dtypes, choices and bounds are named."""
    argument_rows = load_script("write_docs").argument_rows

    def row(name: str, argument: str) -> str:
        (found,) = [r for r in argument_rows(op.get(name)) if r.startswith(f"| `{argument}` |")]
        return found

    for name in ("dequantize", "quant_linear", "quant_embedding"):
        planes = row(name, "planes")
        assert "by `layout`: see [packed weights](quant.md#layouts)" in planes and "float" not in planes, planes
    assert "| str: `'none'`, `'tanh'` |" in row("gelu_and_mul", "approximate")
    assert "| int: 0..2147483647 |" in row("sample", "top_k") and "| float: >= 0 |" in row("rms_norm", "eps")


@pytest.mark.parametrize("name", op.names())
def test_the_page_of_ops_says_how_an_op_is_called(name: str) -> None:
    """The function's own signature; and keyword-only arguments are marked in the table, others are not."""
    import inspect

    docs = load_script("write_docs")
    called = inspect.signature(op.get(name).public)
    assert docs.signature(op.get(name)) == f"pykern.{name}{called}"
    marked = {row.split("`")[1] for row in docs.argument_rows(op.get(name)) if row.endswith(", by keyword |")}
    assert marked == {p.name for p in called.parameters.values() if p.kind == p.KEYWORD_ONLY} - {"out"}
