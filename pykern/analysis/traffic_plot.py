"""The picture of a chain over batch: traffic, time and the share that fusing saves."""

from __future__ import annotations

from pykern.analysis.report_figures import Curves, Line
from pykern.analysis.traffic import Chain, pays_from

#: Batches of the picture: powers of two to 16384.
BATCHES = tuple(2**n for n in range(15))


def traffic_curves(
    chain: Chain, gbps: float, where: str, share: float = 0.1, tflops: float | None = None
) -> list[Curves]:
    """Two pictures: bytes over bandwidth (unfused, fused, weights alone); the share saved and the share of weights."""
    moved = [chain.traffic(b) for b in BATCHES]
    x = tuple(float(b) for b in BATCHES)
    text = chain.text or chain.name
    arithmetic = tuple(t.flops / tflops / 1e6 for t in moved) if tflops else ()
    name = f"arithmetic alone ({tflops:g} TFLOP/s)" if tflops else ""
    times = Curves(
        f"{chain.name} ({chain.dtype}, weights {chain.weight_dtype}): {text}",
        "batch",
        f"microseconds at {gbps:g} GB/s ({where})",
        (
            Line("unfused", x, tuple(t.time_us(gbps, fused=False) for t in moved)),
            Line("fused", x, tuple(t.time_us(gbps, fused=True) for t in moved)),
            Line("weights alone", x, tuple(t.weights / gbps / 1e3 for t in moved), dashed=True),
            *([Line(name, x, arithmetic, dashed=True)] if tflops else []),
        ),
        log_x=True,
        log_y=True,
    )
    lines = [
        Line("saved by fusing", x, tuple(100 * t.saved_share for t in moved)),
        Line("weights", x, tuple(100 * t.weight_share for t in moved), dashed=True),
    ]
    pays = pays_from(chain, share)
    if pays is not None and pays <= BATCHES[-1]:
        value = 100 * chain.traffic(pays).saved_share
        lines.append(
            Line("pays", (float(pays),), (value,), points=True, labels=(f"batch {pays}: {value:.3g}%",))
        )
    shares = Curves("share of the unfused traffic", "batch", "percent", tuple(lines), log_x=True)
    return [times, shares]
