"""What fusing a chain costs: registers, shared memory and so occupancy, as an estimate from a plain tile kernel.

The model is a block of ``threads`` threads that owns ``tile_rows`` tokens. A matrix product keeps an fp32 tile of
``tile_rows x 128`` results in registers and feeds it through a ring of 4 stages of 64-element slices in shared
memory. Fusing a step adds the registers of its operands; a step that needs its whole input row (a norm, the next
matrix product) makes the block keep ``tile_rows`` complete rows in shared memory. Replace the estimate by the
compiler's numbers where a kernel exists (``pykern occupancy``).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pykern.analysis import occupancy as occ
from pykern.analysis.traffic import Chain, Step, size_in_bytes
from pykern.errors import require

TILE_COLUMNS, SLICE, STAGES = 128, 64, 4
#: Addresses, loop counters and fragments of a plain tile kernel, in registers a thread.
BASE_REGISTERS = 40
_STEP_REGISTERS = {
    "bias": 2,
    "scale": 2,
    "add": 8,
    "mul": 8,
    "rope": 6,
    "softmax": 8,
    "quantize": 4,
    "norm": 4,
    "layernorm": 6,
}
_ACTIVATION_REGISTERS = 6


@dataclass(frozen=True)
class FusionCost:
    """Occupancy of the heaviest unfused kernel and of the fused one. ``held``: bytes of rows the block must keep."""

    cc: str
    tile_rows: int
    threads: int
    regs_before: int
    regs_after: int
    smem_before: int
    smem_after: int
    before: occ.Occupancy
    after: occ.Occupancy | None
    held: int
    fitting_rows: int
    cluster: int | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        return self.after is not None

    def to_json(self) -> dict[str, Any]:
        return {
            "cc": self.cc, "tile_rows": self.tile_rows, "threads": self.threads, "estimate": True,
            "regs_before": self.regs_before, "regs_after": self.regs_after, "smem_before": self.smem_before,
            "smem_after": self.smem_after, "occupancy_before": self.before.occupancy,
            "occupancy_after": None if self.after is None else self.after.occupancy, "fits": self.fits,
            "limiters_after": [] if self.after is None else list(self.after.limiters), "held": self.held,
            "fitting_rows": self.fitting_rows, "cluster": self.cluster, "notes": list(self.notes),
        }  # fmt: skip


def _is_product(step: Step) -> bool:
    return step.name.startswith("linear") or step.name in ("scores", "values")


def _registers(step: Step, accumulators: int, dim_accumulators: int) -> int:
    """Registers a thread that ``step`` adds to the epilogue of the kernel it is fused into."""
    if step.name in ("silu_mul", "gelu_mul", "glu"):
        return accumulators + _ACTIVATION_REGISTERS  # gate and up tiles live side by side
    if _is_product(step):
        return dim_accumulators
    return _STEP_REGISTERS.get(step.name, _ACTIVATION_REGISTERS)


def fusion_cost(chain: Chain, cc: str = "9.0", *, tile_rows: int = 128, threads: int = 256) -> FusionCost:
    """Estimate what fusing ``chain`` into one kernel costs on ``cc``."""
    chip = occ.arch(cc)
    require(1 <= tile_rows <= 1024, "tile_rows", tile_rows, "1 to 1024 tokens a block")
    require(1 <= threads <= 1024, "threads", threads, "1 to 1024 threads a block")
    products = any(_is_product(s) for s in chain.steps)
    rows = tile_rows if products else 1
    accumulators = -(-rows * TILE_COLUMNS // threads) if products else 8
    ring = size_in_bytes(STAGES * SLICE * (rows + TILE_COLUMNS), chain.dtype) if products else 0
    base = BASE_REGISTERS + accumulators
    total, held, width, notes = base, 0, chain.input, []
    for number, step in enumerate(chain.steps):
        if number:
            heads_dim = step.out if step.name == "values" else TILE_COLUMNS
            per_head = min(heads_dim, TILE_COLUMNS)
            total += _registers(step, accumulators, -(-rows * per_head // threads))
            if step.rows:
                row_bytes = size_in_bytes(width, chain.dtype)
                held = max(held, row_bytes)
                notes.append(f"{step.name} needs whole rows: {rows} x {row_bytes} B stay on chip")
        width = step.out
    spilled = max(0, total - chip.regs_per_thread)
    if spilled:
        notes.append(
            f"{total} registers a thread wanted, {chip.regs_per_thread} there are: {spilled} spill, take fewer rows"
        )
        total = chip.regs_per_thread
    smem_after = ring + rows * held
    base = min(base, chip.regs_per_thread)
    before = occ.occupancy(cc, occ.Config(threads=threads, regs=base, dyn_smem=ring))
    space = chip.smem_per_block
    after: occ.Occupancy | None = None
    if smem_after <= space:
        after = occ.occupancy(cc, occ.Config(threads=threads, regs=total, dyn_smem=smem_after))
        after = after if after.blocks else None
    cluster, fitting = None, rows
    if held and after is None:
        fitting = max(0, (space - ring) // held) if held else rows
        wanted = -(-rows * held // max(1, space - ring)) if space > ring else 0
        cluster = next(
            (n for n in (2, 4, 8, 16) if wanted and n >= wanted and n <= (chip.cluster_max or 1)), None
        )
        fix = f"{fitting} rows a block would fit" if fitting else "not even one row fits"
        notes.append(f"{rows} rows do not fit in {space} B of shared memory: {fix}"
                     + (f", or a cluster of {cluster} blocks that share the rows" if cluster else ""))  # fmt: skip
    return FusionCost(chip.cc, rows, threads, base, total, ring, smem_after, before, after, rows * held, fitting,
                      cluster, tuple(notes))  # fmt: skip


def fitting_kernels(
    chain: Chain, cc: str = "9.0", *, tile_rows: int = 128, threads: int = 256
) -> list[Chain]:
    """The chain as the fewest kernels whose fused form fits the chip, longest first from the left.

    A step alone always counts as fitting: unfused it streams its input and need not hold it.
    """
    kernels, start, width = [], 0, chain.input
    while start < len(chain.steps):
        length = len(chain.steps) - start
        while length > 1:
            part = replace(chain, input=width, steps=chain.steps[start : start + length])
            if fusion_cost(part, cc, tile_rows=tile_rows, threads=threads).fits:
                break
            length -= 1
        kernels.append(replace(chain, input=width, steps=chain.steps[start : start + length]))
        start += length
        width = chain.steps[start - 1].out
    return kernels


def kernels_traffic(chain: Chain, kernels: list[Chain], batch: int) -> int:
    """Bytes at ``batch`` when the chain runs as ``kernels``: fused, plus what crosses from one kernel to the next."""
    moved, at = chain.traffic(batch).fused, 0
    for kernel in kernels[:-1]:
        at += len(kernel.steps)
        last = chain.steps[at - 1]
        moved += (1 if last.keep else 2) * size_in_bytes(batch * chain.queries * last.out, chain.dtype)
    return moved
