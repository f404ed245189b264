"""The one-page report: every analysis in one HTML file that needs no network.

The page (``data/report.html``, ``data/report.js``) carries tables made here by the analyses themselves: occupancy
limits, bytes of each chain, FLOPs and bytes of each op and model step. Its controls pick from the tables; only the
sector and bank rules are written a second time, in the page, and the tests hold them against the counted patterns.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pykern.analysis import occupancy as occ
from pykern.analysis.coalescing_fix import Swizzle
from pykern.analysis.models_zoo import MODELS
from pykern.analysis.report_figures import KINDS
from pykern.analysis.roofline import Work
from pykern.analysis.roofline_gpus import gpus
from pykern.analysis.roofline_model import PHASES, Precision, step
from pykern.analysis.traffic import pays_from
from pykern.analysis.traffic_chains import NAMED, named_chain
from pykern.errors import ArgumentError

#: Batches of the traffic pictures.
BATCHES = tuple(2**n for n in range(15))
#: (activations, weights) the traffic section offers.
TYPES = (("bf16", "bf16"), ("fp32", "fp32"), ("fp16", "fp16"), ("fp8", "fp8"), ("int4", "int4"), ("bf16", "fp8"),
         ("bf16", "int4"))  # fmt: skip
ROOFLINE_MODELS = ("llama-3-8b", "llama-3.2-1b", "smollm2-135m", "qwen2.5-7b", "mixtral-8x7b", "llama-3-70b")
ROOFLINE_BATCHES = (1, 8, 64, 256)
ROOFLINE_CONTEXTS = (4096, 512, 16384)
#: The swizzles that kernels use: 128-, 64- and 32-byte rows of 16-byte chunks, and rows of 32 words.
SWIZZLES = (Swizzle(3, 4, 3), Swizzle(2, 4, 3), Swizzle(1, 4, 3), Swizzle(5, 2, 5))
REGISTER_STEP = 8


@functools.cache
def _most_smem(cc: str, blocks: int) -> int:
    """Bytes of shared memory a block may take so that ``blocks`` fit an SM, -1 when not even 0 do."""
    chip = occ.arch(cc)

    def fits(smem: int) -> bool:
        limit = occ.occupancy(chip, occ.Config(threads=32, regs=0, dyn_smem=smem)).limits["shared_memory"]
        return limit is None or limit >= blocks

    low, high = -1, chip.smem_per_block
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def occupancy_table(cc: str) -> dict[str, Any]:
    """Limits of one compute capability in blocks: by warps and registers, by shared memory, by barriers."""
    chip = occ.arch(cc)
    if chip.reg_alloc_unit != REGISTER_STEP * occ.WARP:
        raise ArgumentError("cc", cc, "a register allocation unit of 256")

    def limit(name: str, **config: int) -> int | None:
        return occ.occupancy(chip, occ.Config(**{"threads": 32, "regs": 0, **config})).limits[name]

    registers = [[limit("registers", threads=32 * warps, regs=min(255, regs)) for regs in range(8, 257, REGISTER_STEP)]
                 for warps in range(1, 33)]  # fmt: skip
    barriers = [limit("barriers", barriers=n) for n in range(1, 17)]
    return {
        "names": chip.names, "max_warps": chip.max_warps, "max_blocks": chip.max_blocks,
        "smem_per_block": chip.smem_per_block, "regs": registers,
        "smem": [_most_smem(cc, n) for n in range(1, chip.max_blocks + 2)],
        "barriers": None if barriers[0] is None else barriers,
    }  # fmt: skip


def traffic_table() -> dict[str, Any]:
    """Unfused, fused and weight bytes of every named chain, type pair and batch."""
    moved: dict[str, Any] = {}
    chains = []
    for name, (what, _) in NAMED.items():
        chain = named_chain(name)
        chains.append({"name": name, "what": what, "text": chain.text})
        for dtype, weights in TYPES:
            typed = chain.with_types(dtype, weights)
            rows = [typed.traffic(b) for b in BATCHES]
            moved[f"{name}|{dtype}/{weights}"] = {
                "unfused": [r.unfused for r in rows], "fused": [r.fused for r in rows], "weights": rows[0].weights,
                "pays": pays_from(typed),
            }  # fmt: skip
    rates: list[dict[str, Any]] = [{"name": g.name, "gbps": g.dram_gbps, "source": "datasheet"} for g in gpus()]
    rates += [{"name": f"{g.name} measured", "gbps": g.measured["gbps"], "source": g.measured["source"]}
              for g in gpus() if g.measured]  # fmt: skip
    return {"chains": chains, "types": [f"{d}/{w}" for d, w in TYPES], "batches": list(BATCHES), "bytes": moved,
            "gpus": rates, "gpu": next(n for n, r in enumerate(rates) if r["name"].startswith("H200"))}  # fmt: skip


def roofline_table(ops: Sequence[Work]) -> dict[str, Any]:
    """Roofs of every chip, FLOPs and bytes of every model step, and of the given ops."""
    roofs = []
    for chip in gpus():
        for kind in ("datasheet", "measured") if chip.measured else ("datasheet",):
            for dtype in ("bf16", "fp16", "fp8", "fp32"):
                if dtype in chip.tflops:
                    roofs.append({**chip.roof(dtype, kind).to_json(), "kind": kind})
    roof = gpus()[0].roof("fp16")  # steps are stored as FLOPs and bytes; any roof will do to make them
    bf16, steps = Precision("bf16"), {}
    for name in ROOFLINE_MODELS:
        for phase in PHASES:
            for batch in ROOFLINE_BATCHES:
                for context in ROOFLINE_CONTEXTS:
                    made = step(
                        MODELS[name],
                        roof,
                        batch=batch,
                        context=context,
                        phase=phase,
                        precision=bf16,
                    )
                    steps[f"{name}|{phase}|{batch}|{context}"] = [
                        [p.work.name, p.work.count, p.work.flops, p.work.bytes] for p in made.ops
                    ]
    return {
        "roofs": roofs, "steps": steps, "batches": list(ROOFLINE_BATCHES), "contexts": list(ROOFLINE_CONTEXTS),
        "works": (["ops"] if ops else []) + list(ROOFLINE_MODELS),
        "ops": [[w.name, 1, w.flops, w.bytes] for w in ops],
        "roof": next(n for n, r in enumerate(roofs) if r["name"].startswith("H200") and r["dtype"] == "bf16"),
    }  # fmt: skip


def report_data(
    ops: Sequence[Work] = (), presets: Sequence[dict[str, Any]] = (), about: str = ""
) -> dict[str, Any]:
    """Everything the page shows. ``presets``: block shapes to start the occupancy controls from (name, threads, regs,
    smem, barriers)."""
    ccs = occ.known_ccs()
    return {
        "about": about or "Occupancy, memory sectors and banks, fusion traffic and rooflines of CUDA kernels.",
        "kinds": [{"name": k, "colour": colour, "meaning": meaning} for k, (colour, meaning) in KINDS.items()],
        "occupancy": {"ccs": {cc: occupancy_table(cc) for cc in ccs}, "presets": list(presets)},
        "swizzles": [{"bits": s.bits, "base": s.base, "shift": s.shift, "mask": s.mask, "code": s.code}
                     for s in SWIZZLES],
        "traffic": traffic_table(),
        "roofline": roofline_table(ops),
    }  # fmt: skip


def plotly_source() -> str:
    """plotly.js as text, from the installed plotly package."""
    try:
        import plotly
    except ImportError as error:
        raise ArgumentError("report", f"plotly is missing ({error})", "pip install plotly") from None
    return (Path(plotly.__file__).parent / "package_data" / "plotly.min.js").read_text(encoding="utf-8")


def report_page(data: dict[str, Any], plotly: Callable[[], str] = plotly_source) -> str:
    """The page as one string. Data and scripts are escaped so that nothing in them can end their element."""
    folder = Path(__file__).with_name("data")
    parts = {
        "@@DATA@@": json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"),
        "@@PLOTLY@@": plotly().replace("</script", "<\\/script"),
        "@@SCRIPT@@": (folder / "report.js").read_text(encoding="utf-8").replace("</script", "<\\/script"),
    }
    page = (folder / "report.html").read_text(encoding="utf-8")
    for mark, text in parts.items():
        before, found, after = page.rpartition(mark)
        assert found, mark
        page = before + text + after
    return page
