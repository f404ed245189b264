"""Two kinds of picture, each drawn by matplotlib (png, svg) and by plotly (html) from the same data.

:class:`CellGrid` is a table of coloured cells (sectors, banks), :class:`Curves` lines and points on two axes
(traffic, roofline, occupancy). The drawing libraries are imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

#: Cell kind -> (colour, meaning). Blue is useful, orange and red cost something for nothing; the palette is
#: readable with the common colour blindnesses, and every kind differs in lightness too.
KINDS: dict[str, tuple[str, str]] = {
    "idle": ("#eef0f3", "not touched"),
    "used": ("#2f6fb3", "used"),
    "wasted": ("#f5a623", "wasted: moved unused, or a bank idle in an extra pass"),
    "conflict": ("#b3261e", "used in an extra pass (bank conflict)"),
}
KIND_CODES = tuple(KINDS)
#: The character of each kind in a terminal, and where its encoding has no block characters.
BLOCK_MARKS = {"idle": "·", "used": "█", "wasted": "░", "conflict": "▓"}
ASCII_MARKS = {"idle": ".", "used": "#", "wasted": "o", "conflict": "x"}
PALETTE = ("#2f6fb3", "#d1495b", "#3a9a5b", "#8a5fbf", "#c77d12", "#2a9d9d", "#7a6a53", "#c2569a")


@dataclass(frozen=True)
class CellGrid:
    """Rows of equal length; ``kinds`` names of :data:`KINDS`, ``texts`` what a cell shows ('' for nothing)."""

    title: str
    columns: str
    row_labels: tuple[str, ...]
    kinds: tuple[tuple[str, ...], ...]
    texts: tuple[tuple[str, ...], ...]
    bold_every: int = 8

    def count(self, kind: str) -> int:
        """Cells of one kind."""
        return sum(row.count(kind) for row in self.kinds)

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "columns": self.columns,
            "rows": list(self.row_labels),
            "cells": [[KIND_CODES.index(k) for k in row] for row in self.kinds],
            "texts": [list(t) for t in self.texts],
            "bold_every": self.bold_every,
        }

    def to_text(self, marks: dict[str, str] = BLOCK_MARKS) -> list[tuple[str, list[tuple[str, str]]]]:
        """Rows for a terminal: (label, [(character, kind) ...])."""
        return [(label, [(marks[k], k) for k in row]) for label, row in zip(self.row_labels, self.kinds)]


@dataclass(frozen=True)
class Line:
    """One curve or, with ``points``, separate marks. ``labels`` are written beside points (and on hover)."""

    name: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    points: bool = False
    dashed: bool = False
    labels: tuple[str, ...] = ()
    color: str | None = None

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "x": list(self.x),
            "y": list(self.y),
            "points": self.points,
            "dashed": self.dashed,
            "labels": list(self.labels),
        }


@dataclass(frozen=True)
class Curves:
    """Lines over two axes."""

    title: str
    x_title: str
    y_title: str
    lines: tuple[Line, ...]
    log_x: bool = False
    log_y: bool = False

    def to_json(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "x_title": self.x_title,
            "y_title": self.y_title,
            "log_x": self.log_x,
            "log_y": self.log_y,
            "lines": [line.to_json() for line in self.lines],
        }


Figure = CellGrid | Curves


def colour(figure: Curves, index: int) -> str:
    return figure.lines[index].color or PALETTE[index % len(PALETTE)]


# --- matplotlib ------------------------------------------------------------------------------------------


def to_matplotlib(figures: Sequence[Figure]) -> Any:
    """One matplotlib figure with the pictures below one another; more than three curves stand in two columns."""
    from matplotlib.figure import Figure as Canvas

    columns = 2 if len(figures) > 3 and all(isinstance(f, Curves) for f in figures) else 1
    rows = -(-len(figures) // columns)
    heights = [1.3 + 0.24 * len(f.kinds) if isinstance(f, CellGrid) else 5.0 for f in figures[:rows]]
    canvas = Canvas(figsize=(11.0 if columns == 1 else 16.0, sum(heights) + 0.5), layout="constrained")
    axes = canvas.subplots(rows, columns, gridspec_kw={"height_ratios": heights}, squeeze=False)
    flat = list(axes.flat)
    for axis in flat[len(figures) :]:
        axis.set_axis_off()
    for axis, figure in zip(flat, figures):
        if isinstance(figure, CellGrid):
            _grid_axis(axis, figure)
        else:
            _curve_axis(axis, figure)
    canvas.draw_without_rendering()  # the axes get their final size, which the labels need
    for axis, figure in zip(flat, figures):
        if isinstance(figure, Curves):
            _labels(axis, figure)
    return canvas


def _grid_axis(axis: Any, grid: CellGrid) -> None:
    from matplotlib.colors import BoundaryNorm, ListedColormap
    from matplotlib.patches import Patch

    columns = len(grid.kinds[0])
    cells = [[KIND_CODES.index(k) for k in row] for row in grid.kinds]
    norm = BoundaryNorm(range(len(KINDS) + 1), len(KINDS))
    axis.pcolormesh(
        cells,
        cmap=ListedColormap([c for c, _ in KINDS.values()]),
        norm=norm,
        edgecolors="white",
        linewidth=0.6,
    )
    for edge in range(grid.bold_every, columns, grid.bold_every):
        axis.axvline(edge, color="#333333", linewidth=1.0)
    narrow = columns > 64
    for r, row in enumerate(grid.texts):
        for c, text in enumerate(row):
            if text:
                axis.text(
                    c + 0.5,
                    r + 0.5,
                    text,
                    ha="center",
                    va="center",
                    fontsize=6.5 if columns <= 32 else 5.0,
                    rotation=90 if narrow and len(text) > 1 else 0,
                    color="white" if grid.kinds[r][c] in ("used", "conflict") else "#333333",
                )
    axis.set_ylim(len(cells), 0)
    axis.set_yticks([r + 0.5 for r in range(len(cells))], grid.row_labels, fontsize=7)
    ticks = range(0, columns, grid.bold_every)
    axis.set_xticks([t + 0.5 for t in ticks], [str(t) for t in ticks], fontsize=7)
    axis.set_xlabel(grid.columns, fontsize=8, loc="left")
    axis.set_title(grid.title, fontsize=9, loc="left")
    shown = [k for k in KIND_CODES if grid.count(k)]
    axis.legend(  # below, where no title is: both may be long
        handles=[Patch(color=KINDS[k][0], label=KINDS[k][1]) for k in shown],
        fontsize=7,
        ncols=len(shown),
        loc="upper right",
        bbox_to_anchor=(1.0, 0.0),
        borderaxespad=2.6,
        frameon=False,
    )


def _curve_axis(axis: Any, figure: Curves) -> None:
    axis.set_xscale("log" if figure.log_x else "linear")
    axis.set_yscale("log" if figure.log_y else "linear")
    for n, line in enumerate(figure.lines):
        style = (
            {"linestyle": "none", "marker": "o", "zorder": 4}
            if line.points
            else {"linestyle": "--" if line.dashed else "-"}
        )
        axis.plot(line.x, line.y, label=line.name, color=colour(figure, n), **style)
    if not figure.log_y:
        axis.set_ylim(bottom=0)
    for side, log in ((axis.xaxis, figure.log_x), (axis.yaxis, figure.log_y)):
        if log:
            _plain_ticks(side)
    axis.grid(True, which="major", alpha=0.35)
    axis.set_xlabel(figure.x_title)
    axis.set_ylabel(figure.y_title)
    axis.set_title(figure.title, fontsize=10, loc="left")
    axis.legend(fontsize=7)


def _plain_ticks(side: Any) -> None:
    """Numbers (``1,000``) instead of powers; where fewer than three decades are shown, 2 and 5 are numbered too."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    def text(value: float, _: Any = None) -> str:
        return f"{value:,.0f}" if value >= 1 else f"{value:g}"

    low, high = side.get_view_interval()
    if high < 1000 * low:
        side.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    side.set_major_formatter(FuncFormatter(text))
    side.set_minor_formatter(NullFormatter())


_LABEL_POINTS = 7.0
_FAR = 12  # points above or below a mark from which a thin line leads to its name


def _labels(axis: Any, figure: Curves) -> None:
    """Name the points, each in the first free place near it: nothing is printed over a name, a mark or a curve."""
    scale = axis.figure.dpi / 72
    legend = axis.get_legend().get_window_extent()
    taken = [(legend.x0, legend.y0, legend.x1, legend.y1)]
    marks, curves = [], []
    for line in figure.lines:
        pixels = axis.transData.transform([(x, y) for x, y in zip(line.x, line.y)])
        if line.points:
            marks += [(x - 5, y - 5, x + 5, y + 5) for x, y in pixels]
        else:
            curves += [p for a, b in pairwise(pixels) for p in _between(a, b)]
    frame = axis.get_window_extent()
    for line in figure.lines:
        if not line.points:
            continue
        for x, y, text in zip(line.x, line.y, line.labels):
            if not text:
                continue
            at_x, at_y = axis.transData.transform((x, y))
            width, height = 0.56 * _LABEL_POINTS * len(text) * scale, 1.25 * _LABEL_POINTS * scale
            best = None
            for dx, dy in _PLACES:
                left = at_x + dx * scale - (width if dx < 0 else 0)
                box = (left, at_y + dy * scale - height / 2, left + width, at_y + dy * scale + height / 2)
                inside = frame.x0 <= box[0] and box[2] <= frame.x1 and frame.y0 <= box[1] and box[3] <= frame.y1
                if not inside or any(_meet(box, other) for other in taken + marks):
                    continue
                leader = _between((at_x, at_y), (at_x + dx * scale, at_y + dy * scale)) if abs(dy) > _FAR else []
                if any(_meet((px, py, px, py), other) for px, py in leader for other in taken):
                    continue
                best = best or (dx, dy, box)
                if not any(box[0] <= px <= box[2] and box[1] <= py <= box[3] for px, py in curves):
                    best = (dx, dy, box)
                    break
            dx, dy, box = best or (*_PLACES[0], (0.0, 0.0, 0.0, 0.0))
            taken.append(box)
            leader_style = {"arrowstyle": "-", "color": "#888888", "linewidth": 0.6, "shrinkA": 0,
                            "relpos": (1.0 if dx < 0 else 0.0, 0.5)}  # fmt: skip
            axis.annotate(
                text, (x, y), fontsize=_LABEL_POINTS, xytext=(dx, dy), textcoords="offset points", va="center",
                ha="right" if dx < 0 else "left",
                arrowprops=leader_style if abs(dy) > _FAR else None,
            )  # fmt: skip


#: Offsets in points: below on the right and above on the left first, which a rising roof leaves free.
_PLACES = tuple(
    (side * (6 + step // 2), -side * step) for step in (8, 20, 32, 44, 56, 68, 80, 92) for side in (1, -1)
) + tuple((side * (6 + step // 2), side * step) for step in (10, 22, 34, 46) for side in (1, -1))


def _between(a: Any, b: Any) -> list[tuple[float, float]]:
    """Pixels along a straight piece of a curve, four apart."""
    steps = max(1, int(max(abs(b[0] - a[0]), abs(b[1] - a[1])) // 4))
    return [(a[0] + (b[0] - a[0]) * n / steps, a[1] + (b[1] - a[1]) * n / steps) for n in range(steps + 1)]


def _meet(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


# --- plotly ----------------------------------------------------------------------------------------------


def to_plotly(figures: Sequence[Figure]) -> Any:
    """One plotly figure with the pictures below one another."""
    from plotly.subplots import make_subplots

    heights = [80.0 + 20 * len(f.kinds) if isinstance(f, CellGrid) else 420.0 for f in figures]
    canvas = make_subplots(
        rows=len(figures),
        cols=1,
        row_heights=heights,
        subplot_titles=[f"{f.title}<br>{_key(f)}" if isinstance(f, CellGrid) else f.title for f in figures],
        vertical_spacing=min(0.3, 100 / sum(heights)) if len(figures) > 1 else 0.0,
    )
    for row, figure in enumerate(figures, 1):
        if isinstance(figure, CellGrid):
            _grid_trace(canvas, row, figure)
        else:
            _curve_traces(canvas, row, figure)
    canvas.update_layout(height=sum(heights) + 160, template="plotly_white")
    return canvas


def _key(grid: CellGrid) -> str:
    """The legend of a grid as text: a coloured square and its meaning for each kind that occurs."""
    shown = [KINDS[kind] for kind in KIND_CODES if grid.count(kind)]
    squares = (f"<span style='color:{colour}'>&#9632;</span> {meaning}" for colour, meaning in shown)
    return f"<span style='font-size:11px'>{' &nbsp; '.join(squares)}</span>"


def grid_scale() -> list[list[Any]]:
    """A stepwise plotly colour scale for :data:`KIND_CODES`."""
    steps = len(KINDS)
    return [
        pair for n, (c, _) in enumerate(KINDS.values()) for pair in ([n / steps, c], [(n + 1) / steps, c])
    ]


def _grid_trace(canvas: Any, row: int, grid: CellGrid) -> None:
    import plotly.graph_objects as go

    names = [
        [f"{KINDS[k][1]}{' · lane ' + t if t else ''}" for k, t in zip(kinds, texts)]
        for kinds, texts in zip(grid.kinds, grid.texts)
    ]
    canvas.add_trace(
        go.Heatmap(
            z=[[KIND_CODES.index(k) + 0.5 for k in r] for r in grid.kinds],
            text=[list(t) for t in grid.texts],
            customdata=names,
            texttemplate="%{text}",
            hovertemplate="%{y}, %{x}<br>%{customdata}<extra></extra>",
            y=list(grid.row_labels),
            x=list(range(len(grid.kinds[0]))),
            zmin=0,
            zmax=len(KINDS),
            colorscale=grid_scale(),
            showscale=False,
            xgap=1,
            ygap=1,
        ),
        row=row,
        col=1,
    )
    canvas.update_yaxes(autorange="reversed", type="category", row=row, col=1)
    canvas.update_xaxes(title=grid.columns, dtick=grid.bold_every, row=row, col=1)


def _curve_traces(canvas: Any, row: int, figure: Curves) -> None:
    import plotly.graph_objects as go

    top = canvas.layout[f"yaxis{'' if row == 1 else row}"].domain[1]
    name = f"legend{'' if row == 1 else row}"  # one beside each picture
    place = {"orientation": "h", "x": 0.0, "y": top, "yanchor": "bottom", "font": {"size": 10}}
    canvas.update_layout({name: place})
    canvas.layout.annotations[row - 1].yshift = 22  # the title, above its legend
    for n, line in enumerate(figure.lines):
        named = [k for k, label in enumerate(line.labels) if label]
        places = ["bottom right"] * len(line.labels)  # a rising roof leaves these two sides free
        for k in named[1::2]:
            places[k] = "top left"
        canvas.add_trace(
            go.Scatter(
                legend=name,
                cliponaxis=not line.points,
                x=list(line.x),
                y=list(line.y),
                name=line.name,
                text=list(line.labels) or None,
                mode=("markers+text" if line.labels else "markers") if line.points else "lines",
                textposition=places or None,
                line={"color": colour(figure, n), "dash": "dash" if line.dashed else "solid"},
                marker={"color": colour(figure, n), "size": 9},
            ),
            row=row,
            col=1,
        )
    canvas.update_xaxes(title=figure.x_title, type="log" if figure.log_x else "linear", row=row, col=1)
    canvas.update_yaxes(title=figure.y_title, type="log" if figure.log_y else "linear", row=row, col=1)


def save(path: str, figures: Sequence[Figure]) -> None:
    """Write the pictures to ``path`` (.png, .svg or .html)."""
    from pykern.analysis._cli import save_plot

    save_plot(path, matplotlib=lambda: to_matplotlib(figures), plotly=lambda: to_plotly(figures))
