"""Options are given once: of two values click would take the last, and answer another question than was asked."""

from __future__ import annotations

import click


class Once(click.Command):
    """A command that refuses an option given twice, unless it collects values or is a flag."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        _, _, order = self.make_parser(ctx).parse_args(list(args))
        for option in dict.fromkeys(order):
            single = isinstance(option, click.Option) and not option.multiple and not option.is_flag
            if single and order.count(option) > 1:
                name, times = "/".join(option.opts), order.count(option)
                raise click.UsageError(f"{name} is given {times} times, allowed: once", ctx)
        return super().parse_args(ctx, args)
