"""``pykern compile``: build every variant of every op with nvcc, for several architectures, with no GPU needed."""

from __future__ import annotations

import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import click

from pykern.analysis import _cli
from pykern.commands._once import Once

# sm_121 (GB10) runs sm_120 code; it is listed where an op plans it differently.
DEFAULT_ARCHS = "80,90a,120"


@click.command("compile", cls=Once, short_help="Build every op variant with nvcc (no GPU needed).")
@click.argument("ops", nargs=-1)
@click.option("--arch", default=DEFAULT_ARCHS, show_default=True, help="Architectures, comma separated.")
@click.option("--jobs", type=click.IntRange(0), default=0, help="Compilers at once; 0: PYKERN_JOBS, else one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object instead of the table.")
def command(ops: tuple[str, ...], arch: str, jobs: int, as_json: bool) -> None:
    """Build every kernel variant that the plans of OPS (default: all) can choose.

    Fails when a kernel does not compile, or uses local memory (spills, arrays in memory) that its op does not declare.

    Exit codes: 0 all built, 1 one fails, 2 bad input or no nvcc.
    """
    from pykern import op as registry
    from pykern.errors import ArgumentError, BuildError
    from pykern.jit import build, limits
    from pykern.plan import TARGETS

    asked = limits.asked_jobs()  # refused before anything is planned
    wanted: dict[tuple[str, str, str], str] = {}
    for a in arch.split(","):
        if a not in TARGETS:
            raise ArgumentError("--arch", repr(a), ", ".join(TARGETS))
        for op, _, plan in registry.sample_plans(TARGETS[a], [registry.get(n).name for n in ops]):
            for launch in plan.launches:
                wanted.setdefault((launch.source, launch.kernel, a), op.name)
    started = time.monotonic()
    rows: list[dict[str, Any]] = []

    def one(item: tuple[tuple[str, str, str], str]) -> dict[str, Any]:
        (source, kernel, a), name = item
        row: dict[str, Any] = {"op": name, "kernel": kernel, "arch": a, "ok": True, "error": ""}
        try:
            r = build.compile_only(source, kernel, a)
        except BuildError as error:
            return {**row, "ok": False, "error": str(error)}
        row |= {"registers": r.registers, "spills": r.spills, "local": r.local_bytes, "smem": r.smem}
        row |= {"seconds": round(r.seconds, 2), "cached": r.cached}
        declared = any(kernel.startswith(prefix) for prefix in registry.get(name).declares_local)
        if (r.spills or r.local_bytes) and not declared:
            row |= {"ok": False, "error": f"{r.spills} bytes of spills, {r.local_bytes} of local memory"}
        return row

    with ThreadPoolExecutor(jobs or asked or limits.cores()) as pool:
        for row in pool.map(one, wanted.items()):
            rows.append(row)
            if not as_json and sys.stderr.isatty():
                print(f"\r{len(rows)}/{len(wanted)} {row['op']:<24}", end="", file=sys.stderr, flush=True)
    bad = [r for r in rows if not r["ok"]]
    seconds = time.monotonic() - started
    if as_json:
        click.echo(json.dumps({"variants": rows, "failed": len(bad), "seconds": round(seconds, 1)}))
    else:
        _print(rows, bad, seconds)
    if bad:
        raise SystemExit(_cli.FAILED)


def _print(rows: list[dict[str, Any]], bad: list[dict[str, Any]], seconds: float) -> None:
    by_op: dict[str, list[dict[str, Any]]] = {}
    for r in rows:
        by_op.setdefault(r["op"], []).append(r)
    click.echo(f"{'op':<22} {'variants':>8} {'compiled':>8} {'max regs':>8} {'max smem':>8}")
    for name, found in sorted(by_op.items()):
        built = [r for r in found if "registers" in r]
        regs = max((r["registers"] for r in built), default=0)
        smem = max((r["smem"] for r in built), default=0)
        fresh = sum(not r["cached"] for r in built)
        click.echo(f"{name:<22} {len(found):>8} {fresh:>8} {regs:>8} {smem:>8}")
    for r in bad:
        click.echo(f"FAILED {r['op']} sm_{r['arch']} {r['kernel']}: {r['error']}")
    click.echo(f"{len(rows) - len(bad)} passed, {len(bad)} failed ({seconds:.0f} s)")
