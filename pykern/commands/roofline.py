"""``pykern roofline``: what bounds ops, measurements and whole models on a chip, and how far they are from it."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import click

from pykern.analysis import _cli
from pykern.analysis._files import read_text
from pykern.analysis.roofline import Placed, Work, place
from pykern.analysis.roofline_gpus import Gpu, Roof, find_gpu, gpus
from pykern.commands._once import Once
from pykern.errors import ArgumentError, require

_DTYPES = (
    "fp32",
    "tf32",
    "fp16",
    "bf16",
    "fp8",
    "int8",
    "int4",
    "fp4",
    "fp64",
    "fp16_acc16",
    "fp8_acc16",
    "fp64_tensor",
)


def choose_roof(gpu: str, dtype: str, kind: str, peak_tflops: float | None,
            peak_gbps: float | None,
                measured: dict[str, Any] | None = None) -> Roof:  # fmt: skip
    """The roof the options describe: a chip's datasheet or measured figures, a measured file, and overrides."""
    for name, value in (("--peak-tflops", peak_tflops), ("--peak-gbps", peak_gbps)):
        if value is not None:
            require(math.isfinite(value) and value > 0, name, value, "more than 0")
    document = measured
    if document is None and kind.endswith(".json"):
        document = _measured_file(kind)
    if document is not None:
        rates = document["dense_tflops"]
        roof = Roof(str(document.get("name", "measured")), dtype, "fp32", rates.get(dtype), document["gbps"],
                    str(document.get("source", "measured")))  # fmt: skip
    else:
        roof = find_gpu(gpu).roof(dtype, kind)
    if peak_tflops is None and peak_gbps is None:
        return roof
    given = [n for n, v in (("peak", peak_tflops), ("bandwidth", peak_gbps)) if v is not None]
    kept = "" if len(given) == 2 else f"; {roof.source}"
    return Roof(roof.name, roof.dtype, roof.accumulate, peak_tflops or roof.tflops, peak_gbps or roof.gbps,
                f"{' and '.join(given)} given{kept}")  # fmt: skip


def _measured_file(path: str) -> dict[str, Any]:
    try:
        value = json.loads(read_text(path))
        rates = [value["gbps"], *value["dense_tflops"].values()]
        good = all(type(rate) in (int, float) and 0 < rate < 1e12 for rate in rates)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        good = False
    require(good, "--roof", path, "a file that --measure --out wrote (gbps, dense_tflops)")
    return value


@click.command(name="roofline", cls=Once, short_help="What bounds ops, measurements and whole models on a chip.")
@click.argument("ops", nargs=-1, metavar="[OP[:SHAPE]]...")
@click.option("--shape", help='Sizes for ops without their own: "4096x4096", or "x=16x4096,w=4096x4096".')
@click.option("--set", "scalars", multiple=True, metavar="NAME=VALUE", help="A scalar argument of the op.")
@click.option(
    "--dtype", type=click.Choice(_DTYPES), default="bf16", show_default=True, help="Of the arithmetic."
)
@click.option("--flops", type=float, help="Work by numbers: FLOPs of a call.")
@click.option("--bytes", "moved", type=float, help="Work by numbers: bytes a call moves.")
@click.option("--time-us", type=float, help="Work by numbers: microseconds measured.")
@click.option("--bench", metavar="FILE", help="Rows of a benchmark's JSON (- is stdin).")
@click.option("--ncu", metavar="FILE", help="Kernels of an 'ncu --csv' file (- is stdin).")
@click.option("--model", help="A whole model: its name, or a config.json.")
@click.option("--models", "list_models", is_flag=True, help="List the models known by name.")
@click.option(
    "--context",
    type=int,
    default=4096,
    show_default=True,
    help="--model: tokens in the cache (decode) or prompt.",
)
@click.option("--phase", type=click.Choice(["decode", "prefill", "both"]), default="both", show_default=True)
@click.option(
    "--weights",
    type=click.Choice(["fp32", "fp16", "bf16", "fp8", "int4"]),
    help="--model: of weight matrices.",
)
@click.option(
    "--kv", type=click.Choice(["fp32", "fp16", "bf16", "fp8", "int4"]), help="--model: of the KV cache."
)
@click.option(
    "--head",
    type=click.Choice(["fp32", "fp16", "bf16", "fp8", "int4"]),
    help="--model: of embedding and head.",
)
@click.option(
    "--group",
    type=int,
    default=128,
    show_default=True,
    help="--model: int4 weights that share a 2-byte scale.",
)
@click.option(
    "--launch-us", type=float, default=0.0, show_default=True, help="--model: added for every kernel."
)
@click.option("--gpu", default="h200", show_default=True, help="A chip by name (--gpus lists them).")
@click.option("--gpus", "list_gpus", is_flag=True, help="List the chips with their roofs and sources.")
@click.option(
    "--roof",
    "kind",
    default="datasheet",
    show_default=True,
    help="datasheet, measured, or a measured FILE.json.",
)
@click.option("--peak-tflops", type=float, help="A compute ceiling of your own.")
@click.option("--peak-gbps", type=float, help="A memory ceiling of your own.")
@click.option("--measure", is_flag=True, help="Measure this machine's GPU with torch and use that roof.")
@click.option("--out", metavar="FILE.json", help="--measure: write the roof there, for --roof.")
@click.option(
    "--min-share", type=float, help="Exit with 1 when a measurement is below this share of its roof (0 to 1)."
)
@_cli.common_options
@_cli.reporting_errors
def command(ops: tuple[str, ...], shape: str | None, scalars: tuple[str, ...], dtype: str, flops: float | None,
            moved: float | None, time_us: float | None, bench: str | None, ncu: str | None, model: str | None,
            list_models: bool, context: int, phase: str, weights: str | None, kv: str | None, head: str | None,
            group: int, launch_us: float, gpu: str, list_gpus: bool, kind: str, peak_tflops: float | None,
            peak_gbps: float | None,
            measure: bool, out: str | None, min_share: float | None, as_json: bool, batch: str | None,
            plot: str | None) -> None:  # fmt: skip
    """Place work under a chip's roofline: the bound, the ridge, the floor time, the headroom.

    \b
    pykern roofline softmax:16384x4096 rms_norm:16384x4096 --gpu h200
    pykern roofline --flops 1.1e12 --bytes 4e8 --time-us 1400 --plot roof.png
    pykern roofline --model llama-8b --batch 1,8,64 --context 4096 --roof measured
    pykern roofline --bench bench.json --measure --out roof.json

    --batch takes batch sizes with --model (1,8,64; default 1), or a JSONL file whose lines hold flops, bytes and
    optionally name, time_us, dtype, gpu. Exit codes: 0 answered, 1 below --min-share, 2 bad input.
    """
    if plot is not None:
        _cli.plot_format(plot)
    require(0 <= launch_us <= 1e6, "--launch-us", launch_us, "0 to 1e6 microseconds")
    require(min_share is None or 0 <= min_share <= 1, "--min-share", min_share, "0 to 1")
    if list_gpus or list_models:
        _lists(list_gpus, as_json)
        return
    _refuse_unused(ops, {"--flops": flops, "--bytes": moved, "--bench": bench, "--ncu": ncu, "--batch": batch,
                         "--model": model}, measure, out, min_share, plot)  # fmt: skip
    measured = None
    if measure:
        from pykern.analysis.roofline_measure import measure as run

        measured = run()
        if out is not None:
            Path(out).write_text(_cli.to_json(measured, indent=2) + "\n", encoding="utf-8")
    from pykern.analysis.traffic_answer import split_batch

    sizes, lines = split_batch(batch)

    def roof_for(row_dtype: str, row_gpu: str) -> Roof:
        return choose_roof(row_gpu, row_dtype, kind, peak_tflops, peak_gbps, measured)

    if lines is not None:
        sys.exit(_cli.run_batch(lines, lambda row: _batch_line(row, dtype, gpu, roof_for)))
    roof = roof_for(dtype, gpu)
    if model is not None:
        precision = {"weights": weights, "kv": kv, "head": head}
        _model(model, roof, sizes or "1", context, phase, dtype, precision, group, launch_us, as_json, plot)
        return
    works = _works(ops, shape, scalars, dtype, flops, moved, time_us, bench, ncu)
    if not works:
        if measured is not None:
            if as_json:
                _cli.print_json(measured)
            else:
                _cli.console().print(roof.describe(), soft_wrap=True, markup=False)
            return
        raise ArgumentError("work", "nothing given", "ops, --flops and --bytes, --bench, --ncu, or --model")
    placed = place(works, roof)
    if as_json:
        _cli.print_json({"roof": roof.to_json(), "work": [p.to_json() for p in placed]})
    else:
        _show(placed)
    if plot is not None:
        from pykern.analysis.report_figures import save
        from pykern.analysis.roofline_plot import roofline_curves

        save(plot, [roofline_curves(placed, title=roof.name)])
    shares = [p.roof_share for p in placed if p.roof_share is not None]
    if min_share is not None:
        require(bool(shares), "--min-share", min_share, "work with a time (--time-us, --bench, --ncu)")
        if any(s < min_share for s in shares):
            sys.exit(_cli.FAILED)


def _refuse_unused(ops: tuple[str, ...], work: dict[str, Any], measure: bool, out: str | None,
                   min_share: float | None, plot: str | None) -> None:  # fmt: skip
    """Options that the chosen input would ignore: a gate that is never looked at must not pass."""
    from pykern.analysis.traffic_answer import split_batch

    sizes, lines = split_batch(work["--batch"])
    if lines is not None:
        others = {name: value for name, value in work.items() if name != "--batch"}
        _cli.only_with("--batch FILE", {"OP": ops, **others, "--min-share": min_share, "--plot": plot})
    elif work["--model"] is not None:
        others = {name: value for name, value in work.items() if name not in ("--batch", "--model")}
        _cli.only_with("--model", {"OP": ops, **others, "--min-share": min_share})
    else:
        _cli.only_with("no --model", {"--batch " + str(sizes): sizes})
    if not measure:
        _cli.only_with("no --measure", {"--out": out})


def _works(ops: tuple[str, ...], shape: str | None, scalars: tuple[str, ...], dtype: str, flops: float | None,
           moved: float | None, time_us: float | None, bench: str | None, ncu: str | None) -> list[Work]:  # fmt: skip
    works: list[Work] = []
    for text in ops:
        from pykern.commands._problems import op_works

        name, _, own = text.partition(":")
        works += op_works(name, own or shape, dtype, scalars)
    if flops is not None or moved is not None:
        works.append(Work("given", flops or 0.0, moved or 0.0, time_us))
    elif time_us is not None:
        raise ArgumentError("--time-us", time_us, "only with --flops or --bytes")
    from pykern.analysis.roofline_inputs import read_bench, read_ncu

    for path, read, name in ((bench, read_bench, "--bench"), (ncu, read_ncu, "--ncu")):
        if path is not None:
            works += read(read_text(path), name)
    return works


def _batch_line(row: dict[str, Any], dtype: str, gpu: str, roof_for: Any) -> dict[str, Any]:
    numbers = (int, float)
    work = Work(_cli.field(row, "name", str, "work"), _cli.field(row, "flops", numbers, 0.0),
                _cli.field(row, "bytes", numbers, 0.0), _cli.field(row, "time_us", numbers, None))  # fmt: skip
    roof = roof_for(_cli.field(row, "dtype", str, dtype), _cli.field(row, "gpu", str, gpu))
    return place([work], roof)[0].to_json()


def _lists(list_gpus: bool, as_json: bool) -> None:
    from pykern.analysis.models_zoo import MODELS

    rows = [_gpu_row(g) for g in gpus()] if list_gpus else [m.to_json() for m in MODELS.values()]
    if as_json:
        _cli.print_json(rows)
        return
    out = _cli.console()
    for row in rows:
        name = f"[bold]{row['name']}[/bold]"
        if list_gpus:
            rates = ", ".join(f"{k} {v:g}" if v else f"{k} unknown" for k, v in row["dense_tflops"].items())
            chip = f"{name} (cc {row['cc']}, {row['sms']} SMs): {row['gbps']:g} GB/s; dense TFLOP/s: {rates}"
            out.print(f"{chip}\n    [dim]{'; '.join(row['sources'])}. {row['notes']}[/dim]", soft_wrap=True)
        else:
            heads = f"heads {row['heads']}/{row['kv_heads']} x {row['head_dim']}"
            heads = f"{row['layers']} layers, hidden {row['hidden']}, {heads}"
            out.print(f"{name}: {row['parameters'] / 1e9:.4g} B parameters, {heads}", soft_wrap=True)


def _gpu_row(chip: Gpu) -> dict[str, Any]:
    from pykern.analysis.roofline_gpus import describe_source

    return {
        "name": chip.name, "cc": chip.cc, "sms": chip.sm_count, "gbps": chip.dram_gbps, "dense_tflops": chip.tflops,
        "measured": chip.measured, "sources": [describe_source(s) for s in chip.sources], "notes": chip.notes,
    }  # fmt: skip


def _short(name: str) -> str:
    """Kernel names of templates run to hundreds of characters: keep what fits a table. No markup in them counts."""
    from rich.markup import escape

    return escape(name if len(name) <= 48 else name[:45] + "...")


def _show(placed: list[Placed]) -> None:
    from rich.table import Table

    roof = placed[0].roof
    out = _cli.console()
    out.print(roof.describe(), soft_wrap=True, markup=False)
    out.print("ridge " + ("unknown" if roof.ridge is None else f"{roof.ridge:.4g} FLOPs a byte"))
    view = Table()
    for name in (
        "work",
        "FLOPs",
        "bytes",
        "FLOPs/B",
        "bound",
        "floor us",
        "at the roof",
        "time us",
        "of roof",
    ):
        view.add_column(
            name, justify="left" if name in ("work", "bound") else "right", min_width=20 * (name == "work")
        )
    for p in placed:
        reach = (
            f"{p.attainable_gbps / 1e3:.4g} TB/s"
            if p.bound != "compute"
            else f"{p.attainable_tflops:.4g} TFLOP/s"
        )
        view.add_row(_short(p.work.name), f"{p.work.flops:.4g}", f"{p.work.bytes:.4g}",
                     "-" if p.work.intensity is None else f"{p.work.intensity:.4g}", p.bound, f"{p.floor_us:.4g}",
                     reach,
                     "-" if p.work.time_us is None else f"{p.work.time_us:.4g}",
                     "-" if p.roof_share is None else f"{100 * p.roof_share:.3g}%")  # fmt: skip
    out.print(view)
    for p in placed:
        if p.note:
            out.print(f"  {_short(p.work.name)}: {p.note}", soft_wrap=True)


def _model(name: str, roof: Roof, sizes: str, context: int, phase: str, dtype: str, precision: dict[str, str | None],
           group: int, launch_us: float, as_json: bool, plot: str | None) -> None:  # fmt: skip
    from pykern.analysis.models_zoo import find_model
    from pykern.analysis.roofline_model import Precision, memory_bytes, step
    from pykern.analysis.traffic_answer import human_bytes, parse_batches

    require(
        dtype in ("fp32", "fp16", "bf16", "fp8"), "--dtype", dtype, "fp32, fp16, bf16 or fp8 with --model"
    )
    model = find_model(name)
    kinds = Precision(
        dtype, precision["weights"] or "", precision["kv"] or "", precision["head"] or "", group
    )
    phases = ("decode", "prefill") if phase == "both" else (phase,)
    steps = [step(model, roof, batch=b, context=context, phase=ph, precision=kinds, launch_us=launch_us)
             for ph in phases for b in parse_batches(sizes)]  # fmt: skip
    if as_json:
        rows = [{**s.to_json(), "memory_bytes": memory_bytes(model, kinds, s.batch, context)} for s in steps]
        _cli.print_json(
            {
                "roof": roof.to_json(),
                "model": model.to_json(),
                "steps": rows,
            }
        )
    else:
        out = _cli.console()
        out.print(f"[bold]{_short(model.name)}[/bold]: {model.parameters / 1e9:.4g} B parameters; {kinds.dtype}, "
                  f"weights {kinds.weights}, cache {kinds.kv}, head {kinds.head}", soft_wrap=True)  # fmt: skip
        out.print(roof.describe(), soft_wrap=True, markup=False)
        for s in steps:
            memory = human_bytes(memory_bytes(model, kinds, s.batch, context))
            _show_step(out, s.to_json(), memory)
    if plot is not None:
        from pykern.analysis.report_figures import save
        from pykern.analysis.roofline_plot import roofline_curves

        save(plot, [roofline_curves(list(s.ops), title=f"{model.name} {s.phase}, batch {s.batch}, context {context}")
                    for s in steps])  # fmt: skip


def _show_step(out: Any, row: dict[str, Any], memory: str) -> None:
    from rich.table import Table

    view = Table(title=f"{row['phase']}, batch {row['batch']}, context {row['context']} ({memory} of weights, cache)",
                 title_justify="left")  # fmt: skip
    for name in ("op", "calls", "FLOPs/B", "bound", "floor us", "x calls", "share"):
        view.add_column(name, justify="left" if name in ("op", "bound") else "right")
    for op in row["ops"]:
        view.add_row(op["name"], str(op["count"]), f"{op['intensity'] or 0:.4g}", op["bound"], f"{op['floor_us']:.4g}",
                     f"{op['total_us']:.4g}", f"{100 * op['share']:.3g}%")  # fmt: skip
    out.print(view)
    what = "tokens/s" if row["phase"] == "decode" else "prompt tokens/s"
    whole = f"{row['floor_us'] / 1e3:.4g} ms: {row['tokens_per_s']:.4g} {what}"
    perfect = f"{row['hard_floor_us'] / 1e3:.4g} ms, {row['hard_tokens_per_s']:.4g} {what}"
    kernels = f"{row['kernels']} kernels, {row['launch_us']:g} us each"
    out.print(f"  step floor {whole} ({kernels}); one perfect kernel: {perfect}", soft_wrap=True)
