"""The roofs of real chips from ``data/gpus.json``: dense rates, accumulate type and source named.

Datasheets quote sparse rates first and GeForce tensor cores halve their rate with fp32 accumulation; both are kept
apart here. A key that ends in ``_acc16`` accumulates in fp16, every other fp16/bf16/fp8 rate in fp32.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pykern.errors import ArgumentError, require

_ACCUMULATE = {"fp64": "fp64", "fp64_tensor": "fp64", "fp32": "fp32", "int8": "int32", "int4": "int32"}


@dataclass(frozen=True)
class Roof:
    """A compute and a memory ceiling: TFLOP/s (``None``: unknown) of ``dtype`` and GB/s (1e9 B/s), with sources."""

    name: str
    dtype: str
    accumulate: str
    tflops: float | None
    gbps: float
    source: str

    @property
    def ridge(self) -> float | None:
        """FLOPs a byte at which the two ceilings meet."""
        return None if self.tflops is None else self.tflops * 1e3 / self.gbps

    def describe(self) -> str:
        peak = "no dense peak known" if self.tflops is None else f"{self.tflops:g} TFLOP/s dense"
        return f"{self.name}: {peak} ({self.dtype}, {self.accumulate} accumulate), {self.gbps:g} GB/s; {self.source}"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "dtype": self.dtype,
            "accumulate": self.accumulate,
            "tflops": self.tflops,
            "gbps": self.gbps,
            "ridge": self.ridge,
            "source": self.source,
        }


@dataclass(frozen=True, eq=False)
class Gpu:
    """One chip of ``gpus.json``."""

    name: str
    cc: str
    sm_count: int
    dram_gbps: float
    l2_mib: float
    boost_mhz: float | None
    tflops: dict[str, float | None]
    sources: tuple[str, ...]
    notes: str
    measured: dict[str, Any] | None

    @property
    def shared_gbps(self) -> float:
        """Shared-memory bandwidth of the whole chip: 128 bytes a clock an SM (1.7 GHz where the clock is unknown)."""
        return self.sm_count * 128 * (self.boost_mhz or 1700.0) / 1e3

    def roof(self, dtype: str = "bf16", kind: str = "datasheet") -> Roof:
        """The ceilings for one dtype: ``datasheet``, or ``measured`` where a measured pair is on record.

        An unknown dense peak gives ``tflops=None``: the memory roof still stands. A dtype the chip does not have,
        or a measured roof it lacks, raises :class:`ArgumentError`.
        """
        require(kind in ("datasheet", "measured"), "roof", repr(kind), "datasheet or measured")
        require(dtype in self.tflops, "dtype", repr(dtype), f"one of {', '.join(self.tflops)} on {self.name}")
        accumulate = "fp16" if dtype.endswith("_acc16") else _ACCUMULATE.get(dtype, "fp32")
        if kind == "datasheet":
            named = "datasheet via " + "; ".join(describe_source(s) for s in self.sources)
            return Roof(self.name, dtype, accumulate, self.tflops[dtype], self.dram_gbps, named)
        if self.measured is None:
            raise ArgumentError(
                "roof", "measured", f"datasheet for {self.name}, or your own --peak-tflops and --peak-gbps"
            )
        rates = self.measured["dense_tflops"]
        source, peak = self.measured["source"], rates.get(dtype)
        if peak is None and dtype == "fp16":
            peak = rates.get("bf16")
        if peak is None:
            peak, source = self.tflops[dtype], source + f" ({dtype} peak: datasheet)"
        return Roof(self.name, dtype, accumulate, peak, self.measured["gbps"], source)


def _document() -> dict[str, Any]:
    return json.loads(Path(__file__).with_name("data").joinpath("gpus.json").read_text(encoding="utf-8"))


@functools.cache
def gpus() -> tuple[Gpu, ...]:
    """Every chip on record."""
    return tuple(
        Gpu(
            g["name"],
            g["cc"],
            g["sm_count"],
            g["dram_gbps"],
            g["l2_mib"],
            g["boost_mhz"].get("default"),
            dict(g["dense_tflops"]),
            tuple(g["sources"]),
            g.get("notes", ""),
            g.get("measured"),
        )
        for g in _document()["gpus"]
    )


@functools.cache
def _sources() -> dict[str, str]:
    return _document()["_meta"]["sources"]


def describe_source(key: str) -> str:
    """What a source tag of ``gpus.json`` stands for; a tag with a note in brackets keeps it."""
    tag = key.split(" ")[0]
    if tag == "BG":
        return "parts unconfirmed" + (key[2:] if len(key) > 2 else "")
    if tag == "DERIVED":
        return "rechecked from SMs x clock" + key[len(tag) :]
    text = _sources().get(tag, tag)
    return re.split(r" \(|, |: | \+ ", text)[0] + key[len(tag) :]


def find_gpu(name: str) -> Gpu:
    """A chip by name or part of one, case and spaces aside (``h200``, ``rtx4090``, ``a100 pcie``)."""
    require(
        isinstance(name, str) and name.strip() != "", "gpu", repr(name), ", ".join(g.name for g in gpus())
    )
    wanted = re.sub(r"[^a-z0-9]", "", name.lower())
    keys = {g: re.sub(r"[^a-z0-9]", "", g.name.lower()) for g in gpus()}
    exact = [g for g, k in keys.items() if k == wanted]
    starts = [g for g, k in keys.items() if wanted and k.startswith(wanted)]
    inside = [g for g, k in keys.items() if wanted and wanted in k]
    for found in (exact, starts, inside):
        if len(found) == 1:
            return found[0]
        if found:
            raise ArgumentError("gpu", repr(name), f"one chip; this fits {', '.join(g.name for g in found)}")
    raise ArgumentError("gpu", repr(name), ", ".join(g.name for g in gpus()))
