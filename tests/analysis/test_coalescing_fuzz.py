"""No options and no input crash the coalescing, traffic and roofline programs: they answer, or exit with 1 or 2."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pykern.commands import coalescing, roofline, traffic

VALUES = [
    "0",
    "1",
    "-1",
    "2",
    "3",
    "16",
    "1e9",
    "nan",
    "inf",
    "1e308",
    "9" * 20,
    "9" * 400,
    "abc",
    "",
    "lane*4",
    "lane/0",
    "1:4",
    "1:99999999999",
    "int4",
    "bf16",
    "h200",
    "gb10",
    "4096 -> gelu",
    "4096 -> norm -> linear 99999999999",
    "/dev/null",
    "/",
    "-",
    "softmax:4x4",
    "softmax:0x4",
    "softmax:m",
    "llama-8b",
    "1.5",
    "0x10",
    "0-31",
    "{}",
    "é",
    "'",
    "1B",
    "-4B",
    "-lane",
    "1<<70",
]
INPUTS = [
    "",
    "{}",
    "[1]",
    '{"lines":[{}]}',
    '{"chain":"mlp","batch":1e400}',
    '{"flops":1e400,"bytes":1}',
    'a,b\n"Kernel Name"',
    '{"space":"global","width":4,"addrs":[1e3]}',
    "\ufffd",
    "[" * 3000,
    '{"space":"shared","width":16,"addrs":[0,16]}',
]


def options(command: Any) -> list[tuple[str, bool]]:
    """(name, is a flag) of every option but those that write files or time a GPU."""
    return [
        (p.opts[0], p.is_flag)
        for p in command.params
        if p.opts[0].startswith("-") and p.opts[0] not in ("--plot", "--out", "--measure")
    ]


@pytest.mark.parametrize(
    "module", [coalescing, traffic, roofline], ids=lambda m: m.__name__.rsplit(".", 1)[1]
)
@given(data=st.data())
def test_no_options_crash(module: Any, data: st.DataObject) -> None:
    args: list[str] = []
    for name, is_flag in data.draw(st.lists(st.sampled_from(options(module.command)), max_size=5)):
        args += [name] if is_flag else [name, data.draw(st.sampled_from(VALUES))]
    if module is not coalescing:
        args += data.draw(st.lists(st.sampled_from(VALUES), max_size=1))
    run = CliRunner().invoke(module.command, args, input=data.draw(st.sampled_from(INPUTS)))
    assert run.exception is None or isinstance(run.exception, SystemExit), (args, run.exception)
    assert run.exit_code in (0, 1, 2), args
    if run.exit_code == 2:
        assert run.stderr.strip(), args
