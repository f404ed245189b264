"""Two kinds of picture, each drawn by matplotlib (png, svg) and by plotly (html) from the same data.

:class:`CellGrid` is a table of coloured cells (sectors, banks), :class:`Curves` lines and points on two axes
(traffic, roofline, occupancy). The drawing libraries are imported only when a picture is drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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
    """One matplotlib figure with the pictures below one another."""
    from matplotlib.figure import Figure as Canvas

    heights = [0.9 + 0.24 * len(f.kinds) if isinstance(f, CellGrid) else 5.0 for f in figures]
    canvas = Canvas(figsize=(11.0, sum(heights) + 0.5), layout="constrained")
    axes = canvas.subplots(len(figures), 1, gridspec_kw={"height_ratios": heights}, squeeze=False)[:, 0]
    for axis, figure in zip(axes, figures):
        if isinstance(figure, CellGrid):
            _grid_axis(axis, figure)
        else:
            _curve_axis(axis, figure)
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
    size = 6.5 if columns <= 32 else 4.0
    for r, row in enumerate(grid.texts):
        for c, text in enumerate(row):
            if text:
                dark = grid.kinds[r][c] in ("used", "conflict")
                axis.text(
                    c + 0.5,
                    r + 0.5,
                    text,
                    ha="center",
                    va="center",
                    fontsize=size,
                    color="white" if dark else "#333333",
                )
    axis.set_ylim(len(cells), 0)
    axis.set_yticks([r + 0.5 for r in range(len(cells))], grid.row_labels, fontsize=7)
    ticks = range(0, columns, grid.bold_every)
    axis.set_xticks([t + 0.5 for t in ticks], [str(t) for t in ticks], fontsize=7)
    axis.set_xlabel(grid.columns, fontsize=8)
    axis.set_title(grid.title, fontsize=9, loc="left")
    shown = [k for k in KIND_CODES if grid.count(k)]
    axis.legend(
        handles=[Patch(color=KINDS[k][0], label=KINDS[k][1]) for k in shown],
        fontsize=7,
        ncols=len(shown),
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )


def _curve_axis(axis: Any, figure: Curves) -> None:
    axis.set_xscale("log" if figure.log_x else "linear")
    axis.set_yscale("log" if figure.log_y else "linear")
    for n, line in enumerate(figure.lines):
        style = (
            {"linestyle": "none", "marker": "o"}
            if line.points
            else {"linestyle": "--" if line.dashed else "-"}
        )
        axis.plot(line.x, line.y, label=line.name, color=colour(figure, n), **style)
        for position, (x, y, text) in enumerate(zip(line.x, line.y, line.labels)):
            if line.points and text:
                above = position % 2 == 0  # neighbours on a roof are often close: alternate the sides
                axis.annotate(
                    text, (x, y), fontsize=7, xytext=(4, 5 if above else -10), textcoords="offset points"
                )
    if not figure.log_y:
        axis.set_ylim(bottom=0)
    axis.grid(True, which="major", alpha=0.35)
    axis.set_xlabel(figure.x_title)
    axis.set_ylabel(figure.y_title)
    axis.set_title(figure.title, fontsize=10, loc="left")
    axis.legend(fontsize=7)


# --- plotly ----------------------------------------------------------------------------------------------


def to_plotly(figures: Sequence[Figure]) -> Any:
    """One plotly figure with the pictures below one another."""
    from plotly.subplots import make_subplots

    heights = [60.0 + 20 * len(f.kinds) if isinstance(f, CellGrid) else 420.0 for f in figures]
    canvas = make_subplots(
        rows=len(figures),
        cols=1,
        row_heights=heights,
        subplot_titles=[f.title for f in figures],
        vertical_spacing=min(0.3, 80 / sum(heights)) if len(figures) > 1 else 0.0,
    )
    for row, figure in enumerate(figures, 1):
        if isinstance(figure, CellGrid):
            _grid_trace(canvas, row, figure)
        else:
            _curve_traces(canvas, row, figure)
    canvas.update_layout(height=sum(heights) + 160, template="plotly_white")
    return canvas


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

    for n, line in enumerate(figure.lines):
        canvas.add_trace(
            go.Scatter(
                x=list(line.x),
                y=list(line.y),
                name=line.name,
                text=list(line.labels) or None,
                mode=("markers+text" if line.labels else "markers") if line.points else "lines",
                textposition="top center",
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
