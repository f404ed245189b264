"""``pykern warmup``: compile ahead, so that no op compiles at its first call (or is refused in a graph capture)."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import click

from pykern.analysis import _cli
from pykern.commands._once import Once


@click.command("warmup", cls=Once, short_help="Compile op kernels ahead of their first call.")
@click.argument("ops", nargs=-1)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--arch", default="", help="Compile for this CUDA architecture (such as 90a); needs no GPU.")
@click.option("--check", is_flag=True, help="The checked variants of the host backend, too.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(ops: tuple[str, ...], device: str, arch: str, check: bool, as_json: bool) -> None:
    """Build the variants of OPS (default: all) that their sample problems reach, and the launcher.

    On a machine with a GPU for that card, else for the host backend.

    Exit codes: 0 all built, 1 one does not compile, 2 bad input or no compiler.
    """
    from pykern import op as registry
    from pykern.errors import ArgumentError, PykernError
    from pykern.jit import build, limits
    from pykern.jit.target import default_target
    from pykern.plan import TARGETS

    if arch and arch not in TARGETS:
        raise ArgumentError("--arch", repr(arch), ", ".join(TARGETS))
    if arch and device == "cpu":
        raise ArgumentError("--arch", repr(arch), "none with --device cpu")
    if device == "cuda" and not arch and not _has_gpu():
        raise ArgumentError("--device", "cuda", "cpu, or --arch (torch sees no CUDA GPU here)")
    only = [registry.get(name).name for name in ops]  # an unknown name is refused here
    on_gpu = bool(arch) or device == "cuda" or (device == "auto" and _has_gpu())
    if check and on_gpu:
        raise ArgumentError("--check", True, "with the host backend: --device cpu")
    target = TARGETS[arch] if arch else default_target("cuda" if on_gpu else "cpu")
    wanted = {
        (launch.source, launch.kernel): op.name
        for op, _, plan in registry.sample_plans(target, only)
        for launch in plan.launches
    }
    jobs: list[tuple[str, Callable[[], Any]]] = []
    for source, kernel in wanted:
        if arch:
            jobs.append((kernel, partial(build.compile_only, source, kernel, arch)))
            continue
        make = partial(build.variant, source, kernel, backend="cuda" if on_gpu else "host", arch=target.arch)
        jobs.append((kernel, make))
        if check:
            jobs.append((f"{kernel} (checked)", partial(make, check=True)))

    def one(job: tuple[str, Callable[[], Any]]) -> dict[str, Any]:
        name, make = job
        try:
            made = make()
        except PykernError as error:
            return {"kernel": name, "ok": False, "error": str(error)}
        return {"kernel": name, "ok": True, "cached": made.cached, "seconds": round(made.seconds, 2)}

    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    if not arch:  # with --arch the kernels are for another machine, and the launcher belongs to that one's torch
        build.host_runtime()
        build.launcher(on_gpu)
    with ThreadPoolExecutor(limits.jobs(on_gpu)) as pool:
        for row in pool.map(one, jobs):
            rows.append(row)
            if not as_json and not row["ok"]:
                click.echo(f"  failed  {row['kernel']}\n{row['error']}")
    failed = [row for row in rows if not row["ok"]]
    compiled = [row for row in rows if row["ok"] and not row["cached"]]
    seconds = round(time.monotonic() - started, 1)
    if as_json:
        click.echo(json.dumps({"ok": not failed, "arch": target.arch, "seconds": seconds, "variants": rows}, indent=1))
    else:
        where = f"sm_{target.arch}" if on_gpu else "the host backend"
        click.echo(
            f"{len(rows)} variants for {where}: {len(compiled)} compiled, {len(rows) - len(compiled) - len(failed)} "
            f"were there, {len(failed)} failed; {seconds} s"
        )
    if failed:
        raise SystemExit(_cli.FAILED)


def _has_gpu() -> bool:
    try:
        import torch
    except (ImportError, OSError):
        return False
    return bool(torch.cuda.is_available())
