"""The ``pykern`` command. Each subcommand is a module of ``pykern.commands`` and is imported when it is used."""

from __future__ import annotations

import importlib
import pkgutil

import click

from pykern import __version__, commands
from pykern.analysis import _cli


class LazyGroup(click.Group):
    """A click group whose commands are found by file name, so that ``pykern --help`` starts at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(
            m.name.replace("_", "-") for m in pkgutil.iter_modules(commands.__path__) if not m.name.startswith("_")
        )

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        return importlib.import_module(f"pykern.commands.{name.replace('-', '_')}").command

    def invoke(self, ctx: click.Context) -> object:
        """The exit codes of every command: 0, 1 (the command's own: a finding, a spill, a gate), 2 (no answer)."""

        def run() -> object:
            try:
                return super(LazyGroup, self).invoke(ctx)
            except Exception as error:
                if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
                    _cli.fail(f"out of memory: {error}")
                raise

        return _cli.reporting_errors(run)()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = []
        for name in self.list_commands(ctx):
            command = self.get_command(ctx, name)
            if command is not None:
                rows.append((name, command.get_short_help_str(limit=80)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pykern", message="%(prog)s %(version)s")
def main() -> None:
    """CUDA kernels for LLM inference that also run, checked, on a machine with no GPU."""


if __name__ == "__main__":
    main()
