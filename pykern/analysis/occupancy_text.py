"""The answers as text for people, with rich."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from pykern.analysis.occupancy import RESOURCES, arch
from pykern.analysis.occupancy_advice import count, percent
from pykern.analysis.occupancy_answer import LIMIT_NAMES, Answer

if TYPE_CHECKING:
    from rich.console import Console

    from pykern.analysis.occupancy_gate import Change, Verdict
    from pykern.analysis.occupancy_ncu import Launch

_SHOWN_SIZES = 6
_MANY = 4  # more kernels than this are shown as one table, a line each


def show(console: Console, answers: Sequence[Answer], remarks: Sequence[str]) -> None:
    """Print answers: in full for a few, one line each for many."""
    if len(answers) > _MANY:
        _overview(console, answers)
    else:
        for answer in answers:
            _full(console, answer)
    for remark in remarks:
        console.print(f"note: {remark}", style="yellow", markup=False)


def show_side_by_side(console: Console, answers: Sequence[Answer]) -> None:
    """One kernel on several chips: a column each."""
    table = _table("", *(f"{a.result.cc} ({arch(a.result.cc).names.split(',')[0]})" for a in answers))
    table.add_row("occupancy", *(_bold(percent(a.result.occupancy)) for a in answers))
    table.add_row("blocks an SM", *(str(a.result.blocks) for a in answers))
    table.add_row("warps an SM", *(f"{a.result.warps} of {arch(a.result.cc).max_warps}" for a in answers))
    table.add_row("binds", *(_limiters(a) for a in answers))
    table.add_row("next step", *(a.steps[0].text if a.steps else "none" for a in answers))
    for name in RESOURCES:
        table.add_row(f"limit: {LIMIT_NAMES[name]}", *(_limit(a.result.limits[name]) for a in answers))
    console.print(_headline(answers[0], chip=False))
    console.print(table)
    for a in answers:
        for flag in a.flags:
            console.print(f"  [yellow]![/] {a.result.cc}: {flag}")


def show_diff(console: Console, changes: Sequence[Change]) -> None:
    """Print what changed between two builds; kernels that did not are counted."""
    marks = {"worse": "red", "better": "green", "added": "cyan", "removed": "cyan", "changed": "yellow"}
    for change in changes:
        if change.state == "same":
            continue
        moved = [f"{name} {_value(name, a)} -> {_value(name, b)}" for name, (a, b) in change.values.items() if a != b]
        name = f"{_short(change.kernel, 400)} ({change.cc})"
        console.print(f"[{marks[change.state]}]{change.state:8}[/] {name}: {', '.join(moved)}")
    counts = {state: sum(c.state == state for c in changes) for state in (*marks, "same")}
    console.print(", ".join(f"{count} {state}" for state, count in counts.items() if count))


def show_verdicts(console: Console, verdicts: Sequence[Verdict]) -> None:
    """Print the conditions that fail, then a count."""
    for verdict in verdicts:
        if not verdict.ok:
            value = f"{verdict.value:.4g}" if isinstance(verdict.value, float) else str(verdict.value)
            name = f"{_short(verdict.kernel, 400)} ({verdict.cc})"
            console.print(f"[red]FAIL[/] {name}: {verdict.condition} (is {value})")
    failed = sum(not verdict.ok for verdict in verdicts)
    console.print(f"gate: {count(len(verdicts), 'condition')}, {failed} failed")


def show_ncu(console: Console, launches: Sequence[Launch]) -> None:
    """Print theoretical against achieved occupancy of each launch of a report."""
    table = _table("kernel", "grid", "block", "regs", "theoretical", "achieved", "achieved/theoretical", "binds")
    for launch in launches:
        ideal = launch.result.occupancy
        theoretical = percent(ideal)
        if launch.agrees is False and launch.reported is not None:
            theoretical += f" [red](report: {percent(launch.reported)})[/]"
        table.add_row(
            _short(launch.kernel), str(launch.grid or "?"), str(launch.config.threads), str(launch.config.regs),
            theoretical, percent(launch.achieved), percent(launch.achieved / ideal) if ideal else "-",
            ", ".join(LIMIT_NAMES[n] for n in launch.result.limiters),
        )  # fmt: skip
    console.print(table)
    if any(launch.result.occupancy and launch.achieved < 0.8 * launch.result.occupancy for launch in launches):
        console.print(
            "Achieved well below theoretical: the grid is too small for the machine, its last wave is mostly"
            " empty, or blocks take very different times."
        )


def show_tried(console: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print what each launch bound, compiled, really gives."""
    table = _table("launch bounds, compiled", "cc", "registers", "spills B", "blocks", "occupancy", "")
    for index, row in enumerate(rows):
        if index and (row["kernel"], row["cc"]) != (rows[index - 1]["kernel"], rows[index - 1]["cc"]):
            table.add_section()
        dropped = row["blocks"] < row["min_blocks"]
        table.add_row(
            f"({row['threads']}, {row['min_blocks']}) {_short(row['kernel'], 40)}", row["cc"], str(row["regs"]),
            f"{row['spills']:,}" if row["spills"] else "0", str(row["blocks"]), percent(row["occupancy"]),
            "something else binds" if dropped else "",
        )  # fmt: skip
    console.print(table)


def _full(console: Console, answer: Answer) -> None:
    from rich.padding import Padding

    result = answer.result
    console.print(_headline(answer))
    console.print(
        f"  {_bold(percent(result.occupancy))} occupancy: {count(result.blocks, 'block')}, {result.warps} of"
        f" {arch(result.cc).max_warps} warps an SM; binds: {_bold(_limiters(answer))}"
    )
    table = _table("", *(LIMIT_NAMES[name] for name in RESOURCES))
    table.add_row("blocks an SM", *(_limit(result.limits[name]) for name in RESOURCES))
    table.add_row("a block takes", *_takes(answer))
    console.print(Padding(table, (0, 0, 0, 2)))
    for step in answer.steps:
        console.print(f"  next: {step.text}")
    if not answer.steps:
        console.print("  next: nothing to gain, at this or any block size")
    if answer.headroom:
        room = answer.headroom
        console.print(f"  free: {room.regs} more registers a thread, {room.smem:,} B more shared memory a block")
    _choices(console, answer)
    if answer.waves:
        console.print(f"  grid: {answer.waves.text()}")
    if answer.clusters:
        console.print(f"  clusters: {_clusters(answer)}")
    for flag in answer.flags:
        console.print(f"  [yellow]![/] {flag}")
    for text in answer.case.assumed:
        console.print(f"  assumed: {text}", style="dim", markup=False)


def _choices(console: Console, answer: Answer) -> None:
    now = answer.result
    ranked = [f"{row.threads} ({percent(row.result.occupancy)})" for row in answer.sizes[:_SHOWN_SIZES]]
    console.print(f"  block sizes, best first: {', '.join(ranked)}")
    rows = [row for row in answer.bounds if row.blocks > now.blocks][:2] or answer.bounds[-1:]
    for row in rows:
        console.print(
            f"  for {count(row.blocks, 'block')} ({percent(row.occupancy)}): {row.launch_bounds} or maxnreg"
            f" {row.max_regs}, and at most {row.max_smem:,} B of shared memory"
        )


def _overview(console: Console, answers: Sequence[Answer]) -> None:
    table = _table("kernel", "cc", "threads", "regs", "smem B", "spills B", "blocks", "occupancy", "binds")
    for a in answers:
        facts, config = a.case.facts, a.case.config
        spills = "?" if facts is None or facts.spills is None else f"{facts.spills:,}"
        table.add_row(
            _short(a.case.name), a.case.cc, str(config.threads), str(config.regs), f"{config.smem:,}",
            spills if spills in ("0", "?") else f"[yellow]{spills}[/]", str(a.result.blocks),
            percent(a.result.occupancy), _limiters(a),
        )  # fmt: skip
    console.print(table)
    assumed = sorted({text for a in answers for text in a.case.assumed})
    for text in assumed:
        count = sum(text in a.case.assumed for a in answers)
        console.print(f"assumed for {count} of {len(answers)}: {text}", style="dim", markup=False)


def _takes(answer: Answer) -> list[str]:
    result, config = answer.result, answer.case.config
    return [
        f"{result.alloc_regs_per_block:,}",
        f"{result.alloc_smem_per_block:,} B",
        str(config.warps),
        "1",
        str(config.barriers),
    ]


def _clusters(answer: Answer) -> str:
    found = answer.clusters
    assert found is not None
    text = f"at most {found.upper:,} of {count(found.size, 'block')} on {count(found.sms, 'SM')} (upper bound)"
    if found.estimate is not None:
        text += f"; {found.estimate:,} by the given GPC list (an estimate: only the driver of that chip knows)"
    if not found.portable:
        text += "; this size needs cudaFuncAttributeNonPortableClusterSizeAllowed"
    return text


def _headline(answer: Answer, chip: bool = True) -> str:
    config, case = answer.case.config, answer.case
    where = f" on {case.cc} ({arch(case.cc).names})" if chip else ""
    smem = f"{config.smem:,} B of shared memory"
    if config.static_smem and config.dyn_smem:
        smem += f" ({config.static_smem:,} static, {config.dyn_smem:,} dynamic)"
    name = "" if case.facts is None else f"{_short(case.name, 80)}: "
    return f"[bold]{name}{count(config.threads, 'thread')}, {count(config.regs, 'register')}, {smem}[/]{where}"


def _limiters(answer: Answer) -> str:
    return ", ".join(LIMIT_NAMES[name] for name in answer.result.limiters)


def _limit(limit: int | None) -> str:
    return "-" if limit is None else str(limit)


def _value(name: str, value: Any) -> str:
    if value is None:
        return "?"
    return percent(value) if name == "occupancy" else f"{value:,}"


def _bold(text: str) -> str:
    return f"[bold]{text}[/]"


def _short(name: str, width: int = 48) -> str:
    """A name from outside, cut to ``width``; what looks like rich markup in it (``[lambda(int)...]``) is text."""
    from rich.markup import escape

    return escape(name if len(name) <= width else name[: width - 1] + "…")


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left", overflow="fold", no_wrap=index == 0)
    return table
