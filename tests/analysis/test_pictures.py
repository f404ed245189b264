"""The pictures as a reader sees them: nothing printed over anything else, axes with units, a legend that means it."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pykern.analysis.coalescing_expr import Expression, from_expression, strided
from pykern.analysis.coalescing_plot import grid
from pykern.analysis.models_zoo import find_model
from pykern.analysis.occupancy import Config
from pykern.analysis.occupancy_plot import Series, curves, draw_matplotlib
from pykern.analysis.report_figures import Figure, to_matplotlib, to_plotly
from pykern.analysis.roofline_gpus import find_gpu
from pykern.analysis.roofline_model import Precision, step
from pykern.analysis.roofline_plot import roofline_curves
from pykern.analysis.traffic_chains import named_chain
from pykern.analysis.traffic_plot import traffic_curves

pytest.importorskip("matplotlib")


def llama(phase: str, batch: int, context: int) -> Figure:
    roof = find_gpu("h200").roof("bf16", "datasheet")
    made = step(find_model("llama-8b"), roof, batch=batch, context=context, phase=phase, precision=Precision("bf16"))
    return roofline_curves(list(made.ops), title=f"{phase} {batch} {context}")


FIGURES = {
    "decode 1": [llama("decode", 1, 4096)],
    "decode 64 and prefill": [llama(p, b, 4096) for p in ("decode", "prefill") for b in (1, 8, 64)],
    "mlp": traffic_curves(named_chain("mlp"), 273.0, "GB10 (DGX Spark) datasheet"),
    "attention": traffic_curves(named_chain("attention"), 4800.0, "H200 datasheet", tflops=989.4),
    "bank conflicts": [grid(from_expression("shared", "load", 4, Expression("lane*32", "--index"))[0], "now")],
    "bytes": [grid(strided("global", "load", 1, 3, 0, frozenset(range(32))), "now")],
}


def boxes(axis: Any) -> list[tuple[str, Any]]:
    """Everything written in or around the axes: (text, extent in pixels)."""
    from matplotlib.text import Text

    written = [(t.get_text(), Text.get_window_extent(t)) for t in axis.texts if t.get_text()]  # without leader lines
    legend = axis.get_legend()
    if legend is not None:
        written.append(("legend", legend.get_window_extent()))
    for text in (axis.xaxis.label, axis.yaxis.label, *(axis.title, axis._left_title)):
        if text.get_text():
            written.append((text.get_text(), text.get_window_extent()))
    return written


def overlap(a: Any, b: Any) -> bool:
    return min(a.x1, b.x1) - max(a.x0, b.x0) > 1 and min(a.y1, b.y1) - max(a.y0, b.y0) > 1


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_printed_over_anything(name: str) -> None:
    canvas = to_matplotlib(FIGURES[name])
    canvas.draw_without_rendering()
    for axis in canvas.axes:
        written = boxes(axis)
        for (one, a), (other, b) in combinations(written, 2):
            assert not overlap(a, b), (name, one, other)
        whole = canvas.bbox
        for text, box in written:
            assert box.x0 >= -1 and box.x1 <= whole.x1 + 1 and box.y0 >= -1 and box.y1 <= whole.y1 + 1, (name, text)


def test_every_point_of_a_roofline_is_named() -> None:
    for figure in FIGURES["decode 64 and prefill"]:
        points = [line for line in figure.lines if line.points]  # type: ignore[union-attr]
        assert points and all(", ".join(filter(None, line.labels)).count(",") + 1 == len(line.x) for line in points)


def test_occupancy_picture_names_its_point_with_a_unit() -> None:
    config = Config(256, 64, 0, 65536)
    figure = draw_matplotlib("title", [Series("one", "9.0", config)])
    figure.draw_without_rendering()
    texts = [t for axis in figure.axes for t in axis.texts]
    assert [t.get_text() for t in texts] == ["256 threads: 37.5%", "64 registers: 37.5%", "64 KiB: 37.5%"]
    top = max(max(c.occupancy) for c in curves("9.0", config))
    for axis, text in zip(figure.axes, texts):
        assert text.get_window_extent().y0 > axis.transData.transform((0, max(top, 1.0)))[1]  # above every curve
    several = draw_matplotlib("title", [Series(cc, cc, config) for cc in ("8.0", "9.0", "12.0")])
    several.draw_without_rendering()
    legend = several.legends[0].get_window_extent()
    assert all(not overlap(legend, axis.get_window_extent()) for axis in several.axes)


def test_plotly_pictures_have_a_legend_each() -> None:
    pytest.importorskip("plotly")
    canvas = to_plotly(FIGURES["mlp"])
    assert [trace.legend or "legend" for trace in canvas.data] == ["legend"] * 3 + ["legend2"] * 3
    assert canvas.layout.legend2.y < canvas.layout.legend.y
    key = to_plotly(FIGURES["bank conflicts"]).layout.annotations[0].text
    assert all(word in key for word in ("used", "wasted", "bank conflict", "not touched"))


CALLS = {
    "occupancy": ["--cc", "8.0,9.0", "--threads", "256", "--regs", "64"],
    "coalescing": ["--stride", "2"],
    "traffic": ["mlp"],
    "roofline": ["--flops", "1e12", "--bytes", "4e8", "--time-us", "2000"],
}


@pytest.mark.parametrize("tool", sorted(CALLS))
@pytest.mark.parametrize("suffix", ["png", "svg", "html"])
def test_every_program_writes_every_format(tool: str, suffix: str, tmp_path: Path) -> None:
    from importlib import import_module

    if suffix == "html":
        pytest.importorskip("plotly")
    path = tmp_path / f"picture.{suffix}"
    command = import_module(f"pykern.commands.{tool}").command
    result = CliRunner().invoke(command, [*CALLS[tool], "--plot", str(path)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    data = path.read_bytes()
    assert data.startswith({"png": b"\x89PNG", "svg": b"<?xml", "html": b"<"}[suffix]) and len(data) > 5000
    if suffix == "html":  # nothing is fetched
        assert b'<script src="http' not in data and b"Plotly.newPlot" in data
