"""``pykern cache``: what the JIT has built and kept."""

from __future__ import annotations

import json

import click


@click.group("cache", short_help="Show or clear the build cache.")
def command() -> None:
    """The libraries that pykern built on this machine. The folder is set by PYKERN_CACHE."""


@command.command("show")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(as_json: bool) -> None:
    """List the entries: kernel, size, seconds it took to build."""
    from pykern.jit import cache

    found = cache.show()
    if as_json:
        click.echo(json.dumps(found, indent=1))
        return
    entries = found["entries"]
    click.echo(f"{found['folder']}: {len(entries)} entries, {found['bytes'] / 1e6:.1f} MB")
    for entry in entries:
        seconds = f"{entry['seconds']:.1f} s" if entry["seconds"] is not None else ""
        state = "" if entry["state"] == "ok" else f"  [{entry['state']}: rebuilt at its next use]"
        name = entry["kernel"] or entry["label"]
        click.echo(f"  {entry['key'][:10]}  {entry['bytes'] / 1e3:8.1f} kB  {seconds:>7}  {name}{state}")


@command.command("clear")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def clear(as_json: bool) -> None:
    """Delete all entries and what killed builds left. Running processes keep what they have loaded."""
    from pykern.jit import cache

    count, freed = cache.clear()
    if as_json:
        click.echo(json.dumps({"folder": str(cache.cache_dir()), "entries": count, "bytes": freed}))
    else:
        click.echo(f"{cache.cache_dir()}: deleted {count} entries, {freed / 1e6:.1f} MB")
