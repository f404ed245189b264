"""``pykern traffic``: what fusing a chain of operations saves, from which batch on, and what it costs."""

from __future__ import annotations

import sys
from typing import Any

import click

from pykern.analysis import _cli
from pykern.analysis.traffic import Chain
from pykern.analysis.traffic_answer import (
    DEFAULT_BATCHES,
    answer,
    bandwidth,
    batch_line,
    human_bytes,
    parse_batches,
    peak,
    split_batch,
)
from pykern.analysis.traffic_chains import DEFAULT_SIZES, NAMED, find_chain
from pykern.commands._once import Once
from pykern.errors import require

_DTYPES = click.Choice(["fp32", "fp16", "bf16", "fp8", "int4"])


@click.command(name="traffic", cls=Once, short_help="What fusing a chain of operations saves, and from which batch on.")
@click.argument("chain", default="mlp")
@click.option(
    "--dtype",
    type=_DTYPES,
    default="bf16",
    show_default=True,
    help="Of activations, and of weights unless given.",
)
@click.option("--weights", type=_DTYPES, help="Of weight matrices (--weights int4 is W4A16).")
@click.option(
    "--group",
    type=int,
    default=0,
    show_default=True,
    help="int4 weights that share a 2-byte scale; 0: none counted.",
)
@click.option("-b", "--batch-sizes", metavar="LIST", help="Same as --batch with numbers.")
@click.option(
    "--queries", type=int, default=1, show_default=True, help="Tokens a sequence (prefill: the prompt)."
)
@click.option("--gpu", help="Chip whose memory bandwidth counts (default h200; GB10 273, H200 4800 GB/s).")
@click.option("--measured", is_flag=True, help="The chip's measured read bandwidth, where one is on record.")
@click.option("--gbps", type=float, help="A bandwidth of your own, e.g. a measured 4550.")
@click.option(
    "--launch-us",
    type=float,
    default=0.0,
    show_default=True,
    help="Added for every kernel (0.9 in a graph, 5 to 11 eager).",
)
@click.option(
    "--share", type=float, default=0.1, show_default=True, help="Part of the traffic that counts as paying."
)
@click.option("--cc", default="9.0", show_default=True, help="Compute capability for what fusing costs.")
@click.option("--tile-rows", type=int, default=128, show_default=True, help="Tokens a block owns.")
@click.option("--threads", type=int, default=256, show_default=True, help="Threads of a block.")
@click.option("--hidden", type=int)
@click.option("--inter", type=int)
@click.option("--heads", type=int)
@click.option("--kv", type=int)
@click.option("--dim", type=int)
@click.option("--keys", type=int, help="Sizes of a named chain; those of Llama-3-8B unless given.")
@click.option(
    "--model",
    help="Take hidden, inter, heads, kv and dim from a model (pykern roofline --models lists them).",
)
@click.option(
    "--kernels",
    is_flag=True,
    help="What fusing costs by pykern's own kernels, compiled (nvcc, no GPU), beside the estimate.",
)
@click.option("--list", "list_chains", is_flag=True, help="Show the named chains and the text form.")
@_cli.common_options
@_cli.reporting_errors
def command(chain: str, dtype: str, weights: str | None, group: int, batch_sizes: str | None, queries: int,
            gpu: str | None,
            measured: bool, gbps: float | None, launch_us: float, share: float, cc: str, tile_rows: int, threads: int,
            model: str | None, kernels: bool, list_chains: bool, as_json: bool, batch: str | None, plot: str | None,
            **sizes: int | None) -> None:  # fmt: skip
    """Memory traffic of CHAIN, a kernel a step against one kernel for all.

    CHAIN is a name (--list) or text such as '4096 -> linear 14336 -> bias -> gelu -> linear 4096'.

    \b
    pykern traffic mlp --gpu gb10 --batch 1:4096 --plot mlp.png
    pykern traffic gated-mlp --weights int4 --group 128 --gbps 4550
    pykern traffic '4096 -> add keep -> norm' --json

    --batch takes batch sizes (1,8,64 or a doubling range 1:4096; default 1,8,64,512,4096) or a JSONL file, whose
    lines hold chain, batch and optionally dtype, weight_dtype, queries,
    group, gbps and sizes.
    """
    if plot is not None:
        _cli.plot_format(plot)
    require(0 <= launch_us <= 1e6, "--launch-us", launch_us, "0 to 1e6 microseconds")
    require(0 < share < 1, "--share", share, "between 0 and 1")
    listed, lines = split_batch(batch)
    if lines is not None:
        unused = {"--batch-sizes": batch_sizes, "--plot": plot, "--kernels": kernels, "--list": list_chains}
        _cli.only_with("--batch FILE", unused)
        rate, _ = bandwidth(gpu, gbps, measured)
        sys.exit(_cli.run_batch(lines, lambda row: batch_line(row, rate, launch_us)))
    if listed is not None:
        _cli.only_with("--batch " + listed, {"--batch-sizes": batch_sizes})
    if list_chains:
        _list(as_json)
        return
    given = {**(_model_sizes(model) if model else {}), **{k: v for k, v in sizes.items() if v is not None}}
    made = find_chain(chain, given, dtype=dtype, weight_dtype=weights or "", queries=queries, group=group)
    rate, where = bandwidth(gpu, gbps, measured)
    document = answer(made, parse_batches(listed or batch_sizes or DEFAULT_BATCHES), rate, where,
                      tflops=peak(gpu, made.dtype), share=share, launch_us=launch_us, cc=cc,
                      tile_rows=tile_rows, threads=threads)  # fmt: skip
    if kernels:
        document["shipped"] = _shipped(made, document["batches"][-1]["batch"], cc)
    if as_json:
        _cli.print_json(document)
    else:
        _show(document)
    if plot is not None:
        from pykern.analysis.report_figures import save
        from pykern.analysis.traffic_plot import traffic_curves

        save(plot, traffic_curves(made, rate, where, share, peak(gpu, made.dtype)))


def _model_sizes(name: str) -> dict[str, int]:
    from pykern.analysis.models_zoo import find_model

    model = find_model(name)
    return {
        "hidden": model.hidden,
        "inter": model.intermediate,
        "heads": model.heads,
        "kv": model.kv_heads,
        "dim": model.head_dim,
    }


def _shipped(chain: Chain, batch: int, cc: str) -> dict[str, Any]:
    """The shipped kernels' figures, or why there are none: the estimate then stands alone."""
    from pykern.analysis.occupancy import parse_cc
    from pykern.commands._traffic_kernels import shipped_cost
    from pykern.errors import BuildError, ToolchainError
    from pykern.plan import TARGETS

    digits = parse_cc(cc, "--cc").replace(".", "")
    arch = next((name for name in (f"{digits}a", digits) if name in TARGETS), None)
    require(arch is not None, "--cc", cc, f"one that pykern has kernels for: {', '.join(TARGETS)}")
    try:
        return shipped_cost(chain, batch, str(arch))
    except (ToolchainError, BuildError) as error:
        return {"batch": batch, "arch": arch, "groups": None, "why": str(error)}


def _list(as_json: bool) -> None:
    from pykern.analysis import traffic_chains

    rows = [(name, what, text(DEFAULT_SIZES)) for name, (what, text) in NAMED.items()]
    if as_json:
        _cli.print_json([{"name": n, "what": w, "text": t} for n, w, t in rows])
        return
    out = _cli.console()
    for name, what, text in rows:
        out.print(f"[bold]{name}[/bold]: {what}\n    {text}", soft_wrap=True)
    out.print("\n" + (traffic_chains.__doc__ or ""), markup=False)


def _show(document: dict[str, Any]) -> None:
    from rich.table import Table

    out = _cli.console()
    out.print(f"[bold]{document['chain']}[/bold] {document['text']}", soft_wrap=True)
    out.print(f"  activations {document['dtype']}, weights {document['weight_dtype']}, {document['gbps']:g} GB/s "
              f"({document['gbps_source']})")  # fmt: skip
    view = Table()
    for name in (
        "batch",
        "input",
        "weights",
        "intermediates",
        "output",
        "unfused",
        "fused",
        "saved",
        "unfused us",
        "fused us",
    ):
        view.add_column(name, justify="right")
    for row in document["batches"]:
        view.add_row(str(row["batch"]), *(human_bytes(row[k]) for k in ("input", "weights", "intermediates", "output",
                     "unfused", "fused")), f"{100 * row['saved_share']:.3g}%", f"{row['unfused_us']:.4g}",
                     f"{row['fused_us']:.4g}")  # fmt: skip
    out.print(view)
    for row in document["batches"]:
        out.print(f"  {row['verdict']}", soft_wrap=True)
    pays = document["pays_from_batch"]
    out.print(f"  fusing pays ({100 * document['pays_share']:.3g}% saved) "
              + ("at no batch" if pays is None else f"from batch {pays}"))  # fmt: skip
    cost = document["cost"]
    after = f"{100 * cost['occupancy_after']:.3g}%" if cost["fits"] else "does not fit"
    block = f"{cost['tile_rows']} tokens a block, {cost['threads']} threads"
    out.print(f"  what it costs on {cost['cc']} (estimate; {block}): "
              f"registers {cost['regs_before']} -> {cost['regs_after']}, "
              f"shared memory {cost['smem_before']} -> {cost['smem_after']} B, "
              f"occupancy {100 * cost['occupancy_before']:.3g}% -> {after}", soft_wrap=True)  # fmt: skip
    for note in cost["notes"]:
        out.print(f"    {note}", soft_wrap=True)
    if "shipped" in document:
        _show_shipped(out, document["shipped"])
    else:
        out.print("    an estimate; --kernels asks the compiler about pykern's own kernels", style="dim")
    if len(document["fitting_kernels"]) > 1:
        last = document["batches"][-1]
        names = " | ".join(" + ".join(k) for k in document["fitting_kernels"])
        out.print(
            f"  what fits: {names}: {human_bytes(last['fitting'])} at batch {last['batch']}", soft_wrap=True
        )


def _show_shipped(out: Any, shipped: dict[str, Any]) -> None:
    if shipped["groups"] is None:
        why = f"not known ({shipped['why']}); the estimate stands"
        out.print(f"  pykern's own kernels: {why}", soft_wrap=True, markup=False)
        return
    out.print(f"  pykern's own kernels at batch {shipped['batch']}, compiled for sm_{shipped['arch']}:", soft_wrap=True)
    for group in shipped["groups"]:
        apart = " | ".join(map(_kernel_text, group["before"])) or "no op does these steps one by one"
        fused = " | ".join(map(_kernel_text, group["after"])) or "no op does this step alone"
        out.print(f"    {' + '.join(group['steps'])}: {fused}", soft_wrap=True, markup=False)
        if group["before"] != group["after"]:
            out.print(f"      apart: {apart}", soft_wrap=True, markup=False)


def _kernel_text(kernel: dict[str, Any]) -> str:
    spills = f", {kernel['spills']:,} B spilled" if kernel["spills"] else ""
    return (f"{kernel['op']} ({kernel['threads']} threads): {kernel['regs']} registers{spills}, {kernel['smem']:,} B, "
            f"occupancy {100 * kernel['occupancy']:.3g}%")  # fmt: skip
