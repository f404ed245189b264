"""``pykern generate``: text from a Llama-family model, through pykern's own kernels."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click

from pykern.commands._once import Once
from pykern.errors import ArgumentError

DTYPES = ["float32", "float16", "bfloat16"]


@click.command("generate", cls=Once, short_help="Generate text with a GGUF or safetensors model.")
@click.argument("model")
@click.option("--prompt", required=True, help="The text to go on from; with --chat, the user's message.")
@click.option("--max-tokens", type=click.IntRange(min=0), default=64, show_default=True)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="float32",
    show_default=True,
    help="Of activations and cache.",
)
@click.option(
    "--weights",
    type=click.Choice(["auto", "packed", "expanded"]),
    default="auto",
    show_default=True,
    help="Quantised weights: as they are, or in --dtype; auto: packed on a GPU, expanded on a CPU if they fit.",
)
@click.option("--temperature", type=float, default=0.0, show_default=True, help="0: the likeliest token.")
@click.option("--top-k", type=int, default=0, help="Only the k likeliest tokens; 0: off.")
@click.option("--top-p", type=float, default=1.0, help="Only the likeliest tokens that make up p; 1: off.")
@click.option(
    "--min-p", type=float, default=0.0, help="Only tokens of p times the likeliest's probability; 0: off."
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Of the sampler; the same seed, the same text."
)
@click.option("--chunk", type=click.IntRange(min=0), default=0, help="Prompt tokens a pass; 0: all at once.")
@click.option("--chat", is_flag=True, help="Put the prompt into the model's chat template.")
@click.option("--system", default=None, help="With --chat: the system message.")
@click.option("--ignore-eos", is_flag=True, help="Go on past the end-of-text token.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object, and nothing else, on standard output."
)
def command(model: str, prompt: str, as_json: bool, **options: Any) -> None:
    """Generate text with MODEL: a .gguf file, a .safetensors file or its folder, or the name "smollm2".

    Llama-family models of any size; what is not supported is refused by name. The text is streamed to standard
    output, followed by a table of what each op did. The first run compiles the kernels.
    """
    if not prompt and not options["chat"]:  # before a model is fetched
        raise ArgumentError("--prompt", "nothing", "a text")
    from pykern.models.run import run

    os.environ.setdefault("PYKERN_PROGRESS", "0")  # this command shows its own progress
    show = Display(quiet=as_json)
    result = run(model, prompt, progress=show.progress, on_text=show.text, **options)
    show.end()
    if as_json:
        click.echo(json.dumps(result.as_dict(), ensure_ascii=False))
    else:
        print_table(result)


class Display:
    """Text on standard output, progress on standard error where that is a terminal."""

    def __init__(self, quiet: bool) -> None:
        self.quiet = quiet
        self.bar: Any = None
        self.task: Any = None
        self.what = ""
        self.said = False

    def progress(self, what: str, done: int, total: int) -> None:
        """A bar for ``what``; a total of 0 means that it is not known."""
        if not sys.stderr.isatty():
            if what != self.what and not self.quiet:
                click.echo(f"pykern: {what}", err=True)
            self.what = what
            return
        from rich.console import Console
        from rich.progress import Progress

        if self.bar is None:
            self.bar = Progress(console=Console(stderr=True), transient=True)
            self.bar.start()
        if what != self.what:
            if self.task is not None:
                self.bar.remove_task(self.task)
            self.task, self.what = self.bar.add_task(what, total=total or None), what
        self.bar.update(self.task, completed=done, total=total or None)

    def text(self, piece: str) -> None:
        self.close_bar()
        if not self.quiet:
            self.said = True
            sys.stdout.write(piece)
            sys.stdout.flush()

    def close_bar(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = self.task = None
            self.what = ""

    def end(self) -> None:
        self.close_bar()
        if self.said:
            click.echo()


def print_table(result: Any) -> None:
    """The ops, the slowest first, and the speeds."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=result.table_title)
    for name in ("op", "launches", "bytes moved", "time", "share", "backend"):
        table.add_column(name, justify="left" if name in ("op", "backend") else "right")
    for row in result.ops:
        cells = [
            f"{row['launches']:,}",
            human(row["bytes"]),
            f"{row['seconds'] * 1e3:,.1f} ms",
            f"{row['share']:.1%}",
        ]
        table.add_row(row["op"], *cells, row["backend"])
    width = 100 if not sys.stdout.isatty() else None
    console = Console(width=width)
    console.print()
    console.print(table)
    for name, tokens, speed in (
        ("prompt", result.prefill_tokens, result.prefill_tokens_per_second),
        ("new", result.decode_tokens, result.decode_tokens_per_second),
    ):
        if speed is not None:
            console.print(f"{name}: {tokens} tokens, {speed:.2f} tokens/s", highlight=False)
    console.print(f"token hash: {result.token_hash[:16]}   {result.where}", highlight=False, soft_wrap=True)


def human(nbytes: float) -> str:
    """``1.25 GB``: decimal units, as memory bandwidths are quoted."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    return f"{nbytes:.3g} TB"
