"""``pykern doctor``: what this machine has, what pykern lacks on it, and what to do."""

from __future__ import annotations

import json

import click

from pykern.analysis import _cli
from pykern.commands._once import Once

_COLOUR = {"ok": "green", "info": "blue", "warn": "yellow", "fail": "red"}


@click.command("doctor", cls=Once, short_help="Explain this machine: Python, torch, compilers, GPU, cache.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(as_json: bool) -> None:
    """Check Python, torch, g++, ninja, nvcc, GPU and cache. Works where torch is broken or missing.

    Exit codes: 0 all there, 1 something that pykern needs here is missing.
    """
    from pykern import __version__
    from pykern.jit import doctor

    report = doctor.examine()
    summary = doctor.as_dict(report)
    if as_json:
        click.echo(json.dumps({"pykern": __version__, **summary}, indent=1))
    else:
        click.echo(f"pykern {__version__}")
        for line in report:
            click.echo(f"  {click.style(f'{line.status:4}', fg=_COLOUR[line.status])}  {line.name:8} {line.detail}")
            if line.hint:
                click.echo(f"                 -> {line.hint}")
    if not summary["ok"]:
        raise SystemExit(_cli.FAILED)
