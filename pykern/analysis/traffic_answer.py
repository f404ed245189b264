"""What the traffic program answers about a chain, as JSON values, and how its options are read."""

from __future__ import annotations

import re
from typing import Any

from pykern.analysis._cli import field
from pykern.analysis.traffic import Chain, pays_from, roofed_us, sweep, verdict
from pykern.analysis.traffic_chains import DEFAULT_SIZES, find_chain
from pykern.analysis.traffic_cost import fitting_kernels, fusion_cost, kernels_traffic
from pykern.errors import ArgumentError, require

DEFAULT_BATCHES = "1,8,64,512,4096"


def parse_batches(text: str, name: str = "--batch") -> list[int]:
    """``1,8,64`` or a doubling range ``1:4096``."""
    out: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,13})(?::([0-9]{1,13}))?\s*", part)
        if match is None:
            raise ArgumentError(name, repr(text[:60]), "numbers like 1,8,64 or a doubling range 1:4096")
        value, last = int(match[1]), int(match[2] or match[1])
        require(value >= 1 and last >= value, name, repr(part), "1 or more, ascending")
        while value <= last:
            out.append(value)
            value *= 2
    return out


def split_batch(text: str | None) -> tuple[str | None, str | None]:
    """``--batch`` means two things: batch sizes (``1,8,64``) or a JSONL file. Returns (sizes, file)."""
    if text is not None and re.fullmatch(r"[0-9:,\s]+", text):
        return text, None
    return None, text


def bandwidth(gpu: str | None, gbps: float | None, measured: bool = False) -> tuple[float, str]:
    """GB/s and where the figure is from: given, measured where a chip has a measured roof, or its datasheet."""
    from pykern.analysis.roofline_gpus import find_gpu, gpus

    if gbps is not None:
        require(0 < gbps <= 1e9, "--gbps", gbps, "a positive number of GB/s")
        return gbps, "given"
    chip = find_gpu(gpu or "h200")
    if not measured:
        return chip.dram_gbps, f"{chip.name} datasheet"
    have = [g.name for g in gpus() if g.measured]
    if chip.measured is None:
        raise ArgumentError("--measured", chip.name, f"{', '.join(have)}, or --gbps with your own figure")
    return chip.measured["gbps"], f"{chip.name}, {chip.measured['source'].split(':')[0]}"


def peak(gpu: str | None, dtype: str) -> float | None:
    """Dense TFLOP/s of the chip for ``dtype``; ``None`` where none is on record."""
    from pykern.analysis.roofline_gpus import find_gpu

    return find_gpu(gpu or "h200").tflops.get(dtype)


def answer(chain: Chain, batches: list[int], gbps: float, where: str, *, tflops: float | None = None,
           share: float = 0.1, launch_us: float = 0.0, cc: str = "9.0",
           tile_rows: int = 128, threads: int = 256) -> dict[str, Any]:  # fmt: skip
    """Everything the program knows about a chain, as JSON values."""
    pays = pays_from(chain, share)
    kernels = fitting_kernels(chain, cc, tile_rows=tile_rows, threads=threads)
    rows = []
    for moved in sweep(chain, batches):
        partly = kernels_traffic(chain, kernels, moved.batch)
        row = {**moved.to_json(gbps, launch_us), "fitting": partly, "verdict": verdict(moved, pays, share),
               "fitting_us": partly / gbps / 1e3 + len(kernels) * launch_us}  # fmt: skip
        if tflops:
            unfused, fused = roofed_us(chain, moved.batch, gbps, tflops)
            row |= {"unfused_roofed_us": unfused, "fused_roofed_us": fused}
            if moved.saved and fused > 1.001 * moved.time_us(gbps, fused=True):
                row["verdict"] += (
                    f"; but arithmetic takes longer than the fused traffic: at {tflops:g} TFLOP/s "
                    f"{unfused:.4g} -> {fused:.4g} us, saves {100 * (1 - fused / unfused):.3g}% of the time"
                )
        rows.append(row)
    return {
        "chain": chain.name, "text": chain.text, "dtype": chain.dtype, "weight_dtype": chain.weight_dtype,
        "queries": chain.queries, "gbps": gbps, "gbps_source": where, "tflops": tflops, "launch_us": launch_us,
        "pays_share": share,
        "pays_from_batch": pays, "batches": rows,
        "cost": fusion_cost(chain, cc, tile_rows=tile_rows, threads=threads).to_json(),
        "fitting_kernels": [[s.name for s in k.steps] for k in kernels],
    }  # fmt: skip


def batch_line(row: dict[str, Any], gbps: float, launch_us: float = 0.0) -> dict[str, Any]:
    """Answer one line of a batch file: bytes by kind, unfused and fused, and their times."""
    text = field(row, "chain", str)
    sizes = {k: field(row, k, int) for k in DEFAULT_SIZES if k in row}
    chain = find_chain(text, sizes, dtype=field(row, "dtype", str, "bf16"),
                       weight_dtype=field(row, "weight_dtype", str, ""),
                       queries=field(row, "queries", int, 1), group=field(row, "group", int, 0))  # fmt: skip
    rate = field(row, "gbps", (int, float), gbps)
    require(0 < rate <= 1e9, "gbps", rate, "a positive number of GB/s")
    moved = chain.traffic(field(row, "batch", int))
    return {"chain": chain.name, **moved.to_json(rate, launch_us), "pays_from_batch": pays_from(chain)}


def human_bytes(n: float) -> str:
    """``12.3 MB`` (powers of ten)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if n < 1000 or unit == "TB":
            return f"{n:.4g} {unit}"
        n /= 1000
    return ""
