"""The ``pykern`` command. Each subcommand is a module of ``pykern.commands`` and is imported when it is used."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import warnings
from collections.abc import Iterator
from typing import Any

import click

from pykern import __version__, commands
from pykern.analysis import _cli


@contextlib.contextmanager
def _plain_warnings() -> Iterator[None]:
    """Warnings as one line, without the place in pykern's code that they come from."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *place, **more: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


class LazyGroup(click.Group):
    """A click group whose commands are found by file name, so that ``pykern --help`` starts at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        names = os.listdir(os.path.dirname(commands.__file__))
        return sorted(name[:-3].replace("_", "-") for name in names if re.fullmatch(r"[a-z]\w*\.py", name))

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"pykern.commands.{name.replace('-', '_')}").command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        known = self.list_commands(ctx)
        if args and args[0].isidentifier() and args[0] not in known:
            import difflib

            near = difflib.get_close_matches(args[0], known, 2, 0.5)
            also = f" (Did you mean {' or '.join(map(repr, near))}?)" if near else ""
            raise click.UsageError(f"No such command {args[0]!r}.{also}", ctx)
        return super().resolve_command(ctx, args)

    def make_context(self, *args: Any, **extra: Any) -> click.Context:
        """Answers ``--help`` and ``--version``, too, where a reader that goes away changes no exit code."""
        try:
            return super().make_context(*args, **extra)
        except BrokenPipeError:
            _cli.drop_stdout()
            raise click.exceptions.Exit(_cli.OK) from None
        except OSError as error:
            _cli.fail(f"cannot write: {error.strerror or error}")

    def invoke(self, ctx: click.Context) -> object:
        """The exit codes of every command: 0, 1 (the command's own: a finding, a spill, a gate), 2 (no answer)."""

        def run() -> object:
            try:
                with _plain_warnings():
                    return super(LazyGroup, self).invoke(ctx)
            except Exception as error:
                if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                    _cli.fail(f"out of memory: {error}")
                raise

        return _cli.reporting_errors(run)()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            text = commands.SHORT_HELP.get(name)
            command = None if text else self.get_command(ctx, name)
            rows.append((name, text or (command.get_short_help_str(limit=80) if command else "")))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pykern", message="%(prog)s %(version)s")
def main() -> None:
    """CUDA kernels for LLM inference that also run, checked, on a machine with no GPU."""


if __name__ == "__main__":
    main()
