"""``pykern coalescing``: sectors, bank conflicts and their fix for an access pattern, or a checked kernel's lines."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from pykern.analysis import _cli
from pykern.analysis._files import read_text
from pykern.analysis.coalescing import Pattern, batch_line, cost, total
from pykern.analysis.coalescing_expr import (
    Expression,
    from_expression,
    parse_addrs,
    parse_lanes,
    parse_size,
    strided,
)
from pykern.analysis.coalescing_fix import Fix, fixes, hint
from pykern.commands._once import Once
from pykern.errors import ArgumentError, require


def build_patterns(
    space: str,
    op: str,
    width: int,
    *,
    stride: str = "1",
    offset: str = "0",
    lanes: str = "all",
    addrs: str | None = None,
    index: str | None = None,
    address: str | None = None,
    where: str | None = None,
    warps: int = 1,
    iters: int = 1,
) -> list[Pattern]:
    """The instructions the options describe; exactly one way to give the addresses."""
    active = parse_lanes(lanes)
    require(width in (1, 2, 4, 8, 16), "--width", width, "1, 2, 4, 8 or 16 bytes")
    given = [
        name
        for name, value in (("--addrs", addrs), ("--index", index), ("--address", address))
        if value is not None
    ]
    if len(given) > 1:
        raise ArgumentError(" and ".join(given), "both", "one of --addrs, --index, --address")
    for name, value in (("--warps", warps), ("--iters", iters)):
        if index is None and address is None:
            require(value == 1, name, value, "1 without --index or --address")
    if addrs is not None:
        listed = parse_addrs(addrs)
        return [Pattern(space, op, width, tuple(a if n in active else None for n, a in enumerate(listed)))]
    predicate = Expression(where, "--where") if where is not None else None
    if index is not None or address is not None:
        name, text = ("--index", index) if index is not None else ("--address", address)
        assert text is not None
        return from_expression(
            space,
            op,
            width,
            Expression(text, name),
            elements=index is not None,
            where=predicate,
            lanes=active,
            warps=warps,
            iters=iters,
        )
    if predicate is not None:
        active = frozenset(n for n in active if predicate(n))
    return [
        strided(
            space,
            op,
            width,
            parse_size(stride, width, "--stride"),
            parse_size(offset, width, "--offset"),
            active,
        )
    ]


#: Rows of a grid shown in the terminal; --plot draws all of them.
_ROWS = 12


@click.command(name="coalescing", cls=Once, short_help="Sectors, bank conflicts and the fix of an access pattern.")
@click.option("--space", type=click.Choice(["global", "shared"]), default="global", show_default=True)
@click.option("--op", type=click.Choice(["load", "store"]), default="load", show_default=True)
@click.option(
    "--width", type=int, default=4, show_default=True, help="Bytes a lane accesses: 1, 2, 4, 8, 16."
)
@click.option(
    "--stride", default="1", show_default=True, help="From lane to lane: elements (2) or bytes (8B)."
)
@click.option("--offset", default="0", show_default=True, help="Of lane 0: elements (1) or bytes (4B).")
@click.option(
    "--lanes", default="all", show_default=True, help="Active lanes: all, none, 0xffff, or 0-15,20,24-30:2."
)
@click.option("--addrs", metavar="LIST", help="Byte addresses, one a lane; - for an inactive lane.")
@click.option("--index", metavar="EXPR", help="Element index in lane, warp, i: 'lane*33 + i'.")
@click.option("--address", metavar="EXPR", help="Byte address in lane, warp, i.")
@click.option("--where", metavar="EXPR", help="Lanes for which EXPR is 0 are inactive: 'lane < 20'.")
@click.option("--warps", type=int, default=1, show_default=True, help="Warps: one instruction each.")
@click.option("--iters", type=int, default=1, show_default=True, help="Values of i: one instruction each.")
@click.option(
    "--pitch", metavar="SIZE", help="Row pitch of the shared buffer, for padding: elements or bytes (128B)."
)
@click.option(
    "--companion",
    "companions",
    multiple=True,
    metavar="EXPR",
    help="Another access of the same buffer (element index) that a fix must not make worse; repeatable.",
)
@click.option("--table", metavar="FILE", help="Rank the lines of 'pykern check OP --json' (- is stdin).")
@click.option("--top", type=int, default=20, show_default=True, help="With --table: lines shown.")
@click.option(
    "--gpu",
    default="h200",
    show_default=True,
    help="With --table: the chip whose bandwidths weigh the waste.",
)
@click.option("--full", is_flag=True, help="With --batch: every field, not only the hardware counters.")
@click.option(
    "--min-efficiency", type=float, metavar="F", help="Exit with 1 when the efficiency is below F (0 to 1)."
)
@_cli.common_options
@_cli.reporting_errors
def command(
    space: str,
    op: str,
    width: int,
    stride: str,
    offset: str,
    lanes: str,
    addrs: str | None,
    index: str | None,
    address: str | None,
    where: str | None,
    warps: int,
    iters: int,
    pitch: str | None,
    companions: tuple[str, ...],
    table: str | None,
    top: int,
    gpu: str,
    full: bool,
    min_efficiency: float | None,
    as_json: bool,
    batch: str | None,
    plot: str | None,
) -> None:
    """Count what a warp's memory instruction costs, exactly as the hardware counters do, and say what to change.

    \b
    pykern coalescing --width 4 --stride 2 --offset 1
    pykern coalescing --space shared --index 'lane*32' --pitch 128B --plot banks.png
    pykern coalescing --space shared --width 16 --index '(i*8 + lane%8)*8 + lane/8' --iters 4
    pykern check softmax --json | pykern coalescing --table -

    Exit codes: 0 answered, 1 below --min-efficiency, 2 bad input.
    """
    if min_efficiency is not None:
        require(0 <= min_efficiency <= 1, "--min-efficiency", min_efficiency, "0 to 1")
    if plot is not None:
        _cli.plot_format(plot)
    shape = {"--addrs": addrs, "--index": index, "--address": address, "--where": where, "--pitch": pitch,
             "--companion": companions}  # fmt: skip
    if batch is not None:
        _cli.only_with("--batch", {**shape, "--table": table, "--min-efficiency": min_efficiency, "--plot": plot})
        sys.exit(_cli.run_batch(batch, lambda row: batch_line(row, full)))
    if table is not None:
        _cli.only_with("--table", {**shape, "--plot": plot})
        sys.exit(_table(table, top, gpu, as_json, min_efficiency))
    patterns = build_patterns(
        space,
        op,
        width,
        stride=stride,
        offset=offset,
        lanes=lanes,
        addrs=addrs,
        index=index,
        address=address,
        where=where,
        warps=warps,
        iters=iters,
    )
    others: list[Pattern] | None = None
    if companions:
        others = [
            p
            for text in companions
            for p in from_expression(
                space, op, width, Expression(text, "--companion"), elements=True, warps=warps, iters=iters
            )
        ]
    row_pitch = None if pitch is None else parse_size(pitch, width, "--pitch")
    found = fixes(patterns, row_pitch, others)
    answer = total(patterns)
    if as_json:
        document: dict[str, Any] = {
            "space": space,
            "op": op,
            "width": width,
            "instructions": len(patterns),
            **answer.to_json(),
            "fixes": [f.to_json() for f in found],
            "hint": hint(patterns),
        }
        if len(patterns) == 1:
            document["addrs"] = list(patterns[0].addrs)
        _cli.print_json(document)
    else:
        _show(patterns, found)
    if plot is not None:
        _plot(plot, patterns, found)
    if min_efficiency is not None:
        if answer.efficiency is None:
            raise ArgumentError("--min-efficiency", min_efficiency, "a pattern with an active lane")
        if answer.efficiency < min_efficiency:
            sys.exit(_cli.FAILED)


def _worst(patterns: list[Pattern]) -> int:
    """The instruction to draw: the first of those that waste most."""
    waste = [c.actual - c.ideal for c in map(cost, patterns)]
    return waste.index(max(waste))


def _show(patterns: list[Pattern], found: list[Fix]) -> None:
    from rich.text import Text

    from pykern.analysis.coalescing_plot import grid
    from pykern.analysis.report_figures import ASCII_MARKS, BLOCK_MARKS, KINDS

    out = _cli.console()
    marks = ASCII_MARKS if out.options.ascii_only else BLOCK_MARKS
    answer = total(patterns)
    first = patterns[0]
    lanes = (
        "all lanes"
        if first.active == 32
        else f"{first.active} lanes"
        if len(patterns) == 1
        else "lanes by rule"
    )
    out.print(
        f"[bold]{first.space} {first.op}, {first.width} B a lane, {lanes}, "
        f"{len(patterns)} instruction{'s' * (len(patterns) > 1)}[/bold]"
    )
    fields = answer.to_json()
    fields.pop("phases", None) if len(patterns) > 1 else None
    for key, value in fields.items():
        out.print(
            f"  {key.replace('_', ' '):<20} {value if not isinstance(value, float) else format(value, '.4g')}"
        )
    picture = grid(patterns[_worst(patterns)])
    out.print(
        f"  [dim]{picture.columns}; {marks['used']} used {marks['wasted']} wasted {marks['conflict']} used in an "
        f"extra pass {marks['idle']} not touched[/dim]"
        + (" [dim](the instruction that wastes most)[/dim]" if len(patterns) > 1 else "")
    )
    rows = picture.to_text(marks)
    for label, cells in rows[:_ROWS]:
        line = Text(f"  {label:>18} ")
        for n, (mark, kind) in enumerate(cells):
            line.append(
                (" " if n and n % picture.bold_every == 0 else "") + mark,
                style=KINDS[kind][0] if kind != "idle" else "dim",
            )
        out.print(line, no_wrap=True, overflow="crop")
    if len(rows) > _ROWS:
        out.print(f"  {'':>18} [dim]and {len(rows) - _ROWS} more rows[/dim]")
    for fix in found:
        out.print(f"  [green]fix[/green] {fix.text}", soft_wrap=True)
        proof = ""
        if fix.extra.get("companions"):
            proof = (
                f"; the {fix.extra['companions']} companion accesses {fix.extra['companion_before']} -> "
                f"{fix.extra['companion_after']}"
            )
        out.print(f"      {fix.code}   [dim](recounted{proof})[/dim]", soft_wrap=True)
    if not found:
        out.print(
            f"  {hint(patterns) or 'nothing to gain'}"
            if answer.actual == answer.ideal
            else "  no fix found: give --pitch, or change the layout"
        )


def _plot(path: str, patterns: list[Pattern], found: list[Fix]) -> None:
    from pykern.analysis.coalescing_plot import grid
    from pykern.analysis.report_figures import save

    at = _worst(patterns)
    pictures = [grid(patterns[at], "now")]
    if found:
        pictures.append(grid(found[0].patterns[at], f"with the {found[0].kind} fix"))
    save(path, pictures)


def _table(path: str, top: int, gpu: str, as_json: bool, min_efficiency: float | None) -> int:
    from pykern.analysis.coalescing_table import rank, read_table
    from pykern.analysis.roofline_gpus import find_gpu

    require(top > 0, "--top", top, "1 or more")
    chip = find_gpu(gpu)
    text = read_text(path)
    ranked = rank(read_table(text, "--table"), chip.dram_gbps, chip.shared_gbps)
    if as_json:
        _cli.print_json(
            {"gpu": chip.name, "lines": [{**line.to_json(), "wasted_us": us} for line, us in ranked[:top]]}
        )
    else:
        from rich.table import Table

        view = Table(
            title=f"lines that waste most (time on {chip.name} if nothing hits a cache: an upper bound)",
            title_justify="left",
        )
        for name in ("line", "access", "requests", "actual", "ideal", "wasted", "wasted us", "what to do"):
            view.add_column(name, justify="left" if name in ("line", "access", "what to do") else "right")
        for line, us in ranked[:top]:
            unit = "wavefronts" if line.space == "shared" else "sectors"
            view.add_row(
                f"{Path(line.file).name}:{line.line}",
                f"{line.space} {line.op} {line.bytes} B",
                str(line.requests),
                f"{line.actual} {unit}",
                str(line.ideal),
                str(line.wasted),
                f"{us:.3g}",
                line.advice(),
            )
        _cli.console().print(view)
    if min_efficiency is None:
        return _cli.OK
    shares = [line.efficiency for line, _ in ranked if line.efficiency is not None]
    require(bool(shares), "--min-efficiency", min_efficiency, "a table whose lines move something")
    return _cli.FAILED if min(shares) < min_efficiency else _cli.OK
