"""The three classic curves: occupancy over block size, registers and shared memory, with the current point."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pykern.analysis.occupancy import Config, arch, occupancy
from pykern.analysis.occupancy_advice import REG_STEP, percent

_COLOURS = ("#2f6fb3", "#d1495b", "#3a9a5b", "#8a5fbf", "#c77d12", "#2a9d9d")
_SMEM_POINTS = 456  # of an SM's 228 KiB every 512 bytes


@dataclass(frozen=True)
class Curve:
    """Occupancy (share 0 to 1) over one resource; ``current`` is the index of the point nearest the kernel's own x.

    ``x`` are block sizes in threads, registers a thread, or KiB of shared memory a block.
    """

    name: str
    x_title: str
    x: tuple[float, ...]
    occupancy: tuple[float, ...]
    blocks: tuple[int, ...]
    current_x: float
    current: float
    binds: tuple[str, ...]

    @property
    def unit(self) -> str:
        """Of ``x``: threads, registers or KiB."""
        return self.x_title.split()[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "name": self.name,
            "x_title": self.x_title,
            "x": list(self.x),
            "occupancy": [round(share, 6) for share in self.occupancy],
            "blocks": list(self.blocks),
            "current": [self.current_x, round(self.current, 6)],
        }


def curves(cc: object, config: Config) -> tuple[Curve, Curve, Curve]:
    """Occupancy over block size, registers and shared memory, everything else as in ``config``."""
    chip = arch(cc)
    now = occupancy(chip, config)
    threads = range(32, chip.max_threads_per_block + 1, 32)
    regs = (1, *range(REG_STEP, chip.regs_per_thread + 1, REG_STEP), chip.regs_per_thread)
    step = max(chip.smem_per_block // _SMEM_POINTS // chip.smem_alloc_unit, 1) * chip.smem_alloc_unit
    smem = (*range(0, chip.smem_per_block, step), chip.smem_per_block)

    def curve(name: str, x_title: str, x: Sequence[float], at: float, configs: Iterable[Config]) -> Curve:
        results = [occupancy(chip, one) for one in configs]
        shares, blocks = tuple(r.occupancy for r in results), tuple(r.blocks for r in results)
        return Curve(name, x_title, tuple(x), shares, blocks, at, now.occupancy, now.limiters)

    kib = [s / 1024 for s in smem]
    by_smem = (config.but(static_smem=0, dyn_smem=s) for s in smem)
    return (
        curve("block size", "threads a block", threads, config.threads, (config.but(threads=t) for t in threads)),
        curve("registers", "registers a thread", regs, config.regs, (config.but(regs=r) for r in regs)),
        curve("shared memory", "KiB of shared memory a block", kib, config.smem / 1024, by_smem),
    )


@dataclass(frozen=True)
class Series:
    """One kernel on one chip in the picture."""

    label: str
    cc: str
    config: Config


def draw_matplotlib(title: str, series: Sequence[Series]) -> Any:
    """A matplotlib Figure: three panels side by side, one line a series, a dot where each kernel is."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    figure = Figure(figsize=(13.0, 4.4), layout="constrained")
    axes = figure.subplots(1, 3, sharey=True)
    for number, one in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        # Lines of several chips often coincide: the later are thinner, so that each stays visible.
        width = 1.8 if len(series) == 1 else max(1.2, 4.8 - 1.1 * number)
        size = 8 if len(series) == 1 else max(5, 11 - 2 * number)
        for axis, curve in zip(axes, curves(one.cc, one.config)):
            axis.step(curve.x, curve.occupancy, where=_where(curve), color=colour, linewidth=width, label=one.label)
            axis.axvline(curve.current_x, color=colour, linewidth=0.8, linestyle=":")
            dot = {"color": colour, "markersize": size, "markeredgecolor": "white", "zorder": 5}
            axis.plot([curve.current_x], [curve.current], "o", **dot)
            if len(series) == 1:
                axis.fill_between(curve.x, curve.occupancy, step=_where(curve), color=colour, alpha=0.12)
                right = curve.current_x > (curve.x[0] + curve.x[-1]) / 2
                axis.annotate(  # above 100%, where no curve is
                    f"{_plain(curve.current_x)} {curve.unit}: {percent(curve.current)}", (curve.current_x, 1.07),
                    xytext=(-6 if right else 6, 0), textcoords="offset points", ha="right" if right else "left",
                    va="center", fontsize=9, zorder=6,
                )  # fmt: skip
            axis.set_xlabel(curve.x_title)
            axis.set_xlim(0, max(curve.x[-1] * 1.02, axis.get_xlim()[1] if number else 0))
            axis.grid(True, alpha=0.3)
    axes[0].set_ylim(0, 1.12)
    axes[0].set_ylabel("occupancy")
    axes[0].yaxis.set_major_formatter(PercentFormatter(1.0))
    axes[0].set_xticks(range(0, 1025, 128))
    axes[1].set_xticks(range(0, 257, 32))
    if len(series) > 1:
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, fontsize=8, loc="outside lower center", ncols=min(6, len(series)))
    figure.suptitle(title, fontsize=11)
    return figure


def draw_plotly(title: str, series: Sequence[Series]) -> Any:
    """The same as a plotly Figure, with blocks and limits on hover."""
    from plotly.graph_objects import Figure, Scatter
    from plotly.subplots import make_subplots

    figure: Figure = make_subplots(1, 3, shared_yaxes=True, horizontal_spacing=0.04)
    ends = [0.0, 0.0, 0.0]
    for number, one in enumerate(series):
        colour = _COLOURS[number % len(_COLOURS)]
        width = 2.0 if len(series) == 1 else max(1.5, 6.0 - 1.5 * number)  # coinciding lines stay visible
        for column, curve in enumerate(curves(one.cc, one.config), 1):
            common = {"legendgroup": one.label, "name": one.label, "showlegend": column == 1 and len(series) > 1}
            hover = [
                f"{_plain(x)} {curve.x_title}<br>{b} blocks an SM, {percent(share)}"
                for x, b, share in zip(curve.x, curve.blocks, curve.occupancy)
            ]
            steps = {"color": colour, "shape": "hvh" if _where(curve) == "mid" else "vh", "width": width}
            here = f"{_plain(curve.current_x)} {curve.x_title}<br>{percent(curve.current)}"
            here += f", binds: {', '.join(curve.binds)}"
            text = "%{text}<extra></extra>"
            line = Scatter(x=curve.x, y=curve.occupancy, line=steps, text=hover, hovertemplate=text, **common)
            dot = Scatter(
                x=[curve.current_x], y=[curve.current], mode="markers", marker={"color": colour, "size": 8 + width},
                text=[here], hovertemplate=text, **(common | {"showlegend": False}),
            )  # fmt: skip
            figure.add_trace(line, 1, column)
            figure.add_trace(dot, 1, column)
            ends[column - 1] = max(ends[column - 1], curve.x[-1] * 1.02)
            figure.update_xaxes(title_text=curve.x_title, range=[0, ends[column - 1]], row=1, col=column)
    figure.update_yaxes(title_text="occupancy", tickformat=".0%", row=1, col=1)
    figure.update_yaxes(range=[0, 1.06])
    figure.update_layout(title=title, template="plotly_white", height=460)
    return figure


def _where(curve: Curve) -> str:
    """Registers and shared memory hold their occupancy up to x; a block size is a point, drawn centred."""
    return "mid" if curve.name == "block size" else "pre"


def _plain(value: float) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".")
