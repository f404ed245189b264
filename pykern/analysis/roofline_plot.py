"""The roofline picture: ceilings, and every piece of work at what it reached or can reach."""

from __future__ import annotations

import math

from pykern.analysis.report_figures import Curves, Line
from pykern.analysis.roofline import Placed
from pykern.analysis.roofline_gpus import Roof


def roof_line(roof: Roof, low: float, high: float, dashed: bool = False) -> Line:
    """The ceiling of a roof between two intensities: up the bandwidth, along the peak."""
    x = [low]
    if roof.ridge is not None and low < roof.ridge < high:
        x.append(roof.ridge)
    x.append(high)
    reach = [min(v * roof.gbps / 1e3, roof.tflops if roof.tflops is not None else math.inf) for v in x]
    peak = "no peak known" if roof.tflops is None else f"{roof.tflops:.4g} TFLOP/s {roof.dtype}"
    ridge = "" if roof.ridge is None else f", ridge at {roof.ridge:.4g} FLOPs a byte"
    return Line(f"{roof.name}: {roof.gbps:.4g} GB/s, {peak}{ridge}", tuple(x), tuple(reach), dashed=dashed)


def merged_labels(x: tuple[float, ...], y: tuple[float, ...], names: list[str]) -> tuple[str, ...]:
    """Labels that do not overprint: points within 30% of each other share one, at the first of them."""
    labels = [""] * len(names)
    heads: list[int] = []
    for n, name in enumerate(names):
        near = next((h for h in heads if max(abs(math.log(x[h] / x[n])), abs(math.log(y[h] / y[n]))) < 0.26), None)
        if near is None:
            heads.append(n)
            labels[n] = name
        else:
            labels[near] += f", {name}"
    return tuple(labels)


def roofline_curves(
    placed: list[Placed], other_roofs: list[Roof] | None = None, title: str = "roofline"
) -> Curves:
    """Log-log picture. Work without arithmetic, or without traffic, has no place on it and is left out."""
    shown = [p for p in placed if p.work.flops > 0 and p.work.bytes > 0]
    values = [p.work.flops / p.work.bytes for p in shown]
    roofs = ([placed[0].roof] if placed else []) + (other_roofs or [])
    ridges = [r.ridge for r in roofs if r.ridge]
    low = min([0.1, *values]) / 2
    high = max([1000.0, *values, *ridges]) * 2
    lines = [roof_line(r, low, high, dashed=n > 0) for n, r in enumerate(roofs)]
    for measured in (True, False):
        part = [p for p in shown if (p.work.time_us is not None) == measured]
        if part:
            x = tuple(p.work.flops / p.work.bytes for p in part)
            y = tuple(p.work.flops / ((p.work.time_us if measured else None) or p.floor_us) / 1e6 for p in part)
            labels = merged_labels(x, y, [p.work.name for p in part])
            lines.append(Line("measured" if measured else "at the roof", x, y, points=True, labels=labels))
    return Curves(title, "FLOPs a byte", "TFLOP/s", tuple(lines), log_x=True, log_y=True)
