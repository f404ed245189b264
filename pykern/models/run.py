"""From a model's name to its text: load, prepare for a device, compile ahead, generate, account."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from pykern.errors import ArgumentError
from pykern.models.cache import Batch, PagedCache, Sequence
from pykern.models.config import LlamaConfig
from pykern.models.engine import Clock, Engine, Sampling
from pykern.models.gguf import GGUFFile
from pykern.models.hub import Progress, model_path
from pykern.models.llama import Llama, Ops
from pykern.models.meter import Meter
from pykern.models.tokenizer import TextModel, tokenizer_from_folder, tokenizer_from_gguf
from pykern.models.weights import Blocks, Layer, Weights, dequantize_blocks, load_weights
from pykern.quant import check_device

MEASURED_STEPS = 8  # decode steps timed by kernel on a GPU, after the run


@dataclass
class Result:
    """A generation. ``token_hash``: sha256 of the new ids as little-endian int32. Speeds are None where no token was
    made; prefill's includes choosing the first token, and neither includes loading or compiling ahead."""

    prompt_ids: list[int]
    ids: list[int]
    text: str
    token_hash: str
    prefill_tokens: int
    decode_tokens: int
    prefill_tokens_per_second: float | None
    decode_tokens_per_second: float | None
    finish: str
    device: str
    dtype: str
    weights: str
    ops: list[dict[str, Any]] = field(default_factory=list)
    table_title: str = ""

    @property
    def where(self) -> str:
        return f"{self.device}, {self.dtype} activations, weights {self.weights}"

    def as_dict(self) -> dict[str, Any]:
        return {k: v for k, v in vars(self).items() if k != "table_title"}


def token_hash(ids: list[int]) -> str:
    """sha256, in hex, of ``ids`` as little-endian int32."""
    return hashlib.sha256(b"".join(i.to_bytes(4, "little", signed=True) for i in ids)).hexdigest()


def load(
    model: str | os.PathLike[str], progress: Progress = lambda what, done, total: None
) -> tuple[LlamaConfig, Weights, TextModel]:
    """Config, weights (on the CPU, as stored) and tokenizer of a path or a known name."""
    path = model_path(model, progress)
    progress(f"loading {path.name}", 0, 0)
    config, weights, source = load_weights(path)
    if isinstance(source, GGUFFile):
        return config, weights, tokenizer_from_gguf(source, config.vocab)
    return config, weights, tokenizer_from_folder(source, config.vocab)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def prepare(
    weights: Weights, dtype: torch.dtype | str, device: torch.device | str, dequantize: bool = False
) -> Weights:
    """``weights`` for the ops: on ``device``, plain ones in ``dtype`` (float32, float16 or bfloat16, or its name),
    packed ones packed still or expanded.

    The embedding table is expanded in any case: its rows are looked up, and a packed head keeps its own bytes.
    """
    if isinstance(dtype, str):
        dtype = next((d for d in DTYPES if str(d) == f"torch.{dtype}"), dtype)
    if not isinstance(dtype, torch.dtype) or dtype not in DTYPES:
        raise ArgumentError("dtype", repr(dtype)[:60], ", ".join(map(str, DTYPES)))
    check_device(device)

    def expanded(w: Any) -> torch.Tensor:
        return (dequantize_blocks(w) if isinstance(w, Blocks) else w).to(device, dtype).contiguous()

    def ready(w: Any) -> Any:
        if w is None:
            return None
        if isinstance(w, Blocks) and not dequantize:
            return replace(w, data=w.data.to(device).contiguous())
        return expanded(w)

    embed, head = expanded(weights.embed), weights.head
    same = head is weights.embed and (dequantize or not isinstance(head, Blocks))
    return Weights(
        embed=embed,
        norm=expanded(weights.norm),
        head=embed if same else ready(head),
        layers=[Layer(**{name: ready(w) for name, w in vars(layer).items()}) for layer in weights.layers],
        rope_factors=weights.rope_factors,
    )


def expand_by_default(weights: Weights, dtype: torch.dtype, device: str) -> bool:
    """Whether packed weights are expanded when nothing is said.

    On a GPU they are not: reading fewer bytes is what makes decoding fast. The host backend is bound by arithmetic,
    and unpacking costs it three times what the products do: there they are, if a quarter of the free memory is enough.
    """
    if device != "cpu":
        return False
    import psutil

    count = sum(_numel(m) for layer in weights.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down))
    return (count + _numel(weights.head)) * dtype.itemsize < psutil.virtual_memory().available // 4


def _numel(m: Any) -> int:
    return m.shape[0] * m.shape[1]


def stored_as(weights: Weights) -> str:
    """How the decoder's matrices are held: ``q4_1``, ``float32``."""
    kinds = {_kind(m) for layer in weights.layers for m in (layer.qkv, layer.o, layer.gate_up, layer.down)}
    return ", ".join(sorted(kinds))


WEIGHTS = ("auto", "packed", "expanded")


def _kind(m: Any) -> str:
    if isinstance(m, torch.Tensor):
        return str(m.dtype).removeprefix("torch.")
    return str(m.layout)


def pick_device(device: str) -> str:
    """``cpu`` or ``cuda``; ``auto`` is the GPU where there is one."""
    gpu = torch.cuda.is_available()
    if device == "cuda" and not gpu:
        raise ArgumentError("--device", "cuda", "cpu (torch sees no CUDA GPU here)")
    return ("cuda" if gpu else "cpu") if device == "auto" else device


def make_engine(
    config: LlamaConfig,
    weights: Weights,
    ops: Ops,
    *,
    tokens: int,
    longest: int | None = None,
    graphs: bool = False,
) -> Engine:
    """An engine over prepared ``weights`` with room for ``tokens`` tokens, ``longest`` a sequence."""
    norm = weights.norm
    cache = PagedCache(config, tokens, longest, dtype=norm.dtype, device=norm.device)
    return Engine(Llama(config, weights, ops, cache.longest), cache, graphs=graphs)


def run(
    model: str,
    prompt: str,
    *,
    max_tokens: int = 64,
    device: str = "auto",
    dtype: str = "float32",
    weights: str = "auto",
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    chunk: int = 0,
    chat: bool = False,
    system: str | None = None,
    ignore_eos: bool = False,
    progress: Progress = lambda what, done, total: None,
    on_text: Callable[[str], None] = lambda text: None,
) -> Result:
    """Generate: what ``pykern generate`` does. ``on_text`` gets the text piece by piece."""
    sampling = Sampling(temperature, top_k, top_p, min_p, seed)
    if weights not in WEIGHTS:
        raise ArgumentError("--weights", repr(weights), ", ".join(WEIGHTS))
    device = pick_device(device)
    config, stored, text = load(model, progress)
    if system is not None and not chat:
        raise ArgumentError("--system", repr(system), "only together with --chat")
    prompt_ids = text.encode(text.chat(prompt, system) if chat else prompt)
    if not prompt_ids:
        raise ArgumentError("--prompt", repr(prompt), "at least one token")
    total = len(prompt_ids) + max_tokens
    if total > config.context:
        raise ArgumentError(
            "--max-tokens", max_tokens, f"up to {config.context - len(prompt_ids)} after this prompt"
        )
    progress("preparing weights", 0, 0)
    kind = getattr(torch, dtype)
    expand = weights == "expanded" or (weights == "auto" and expand_by_default(stored, kind, device))
    ready = prepare(stored, kind, device, expand)
    was, now = stored_as(stored), stored_as(ready)
    meter = Meter(device)
    engine = make_engine(config, ready, meter.ops, tokens=total, graphs=device == "cuda")
    engine.on_pass = meter.note_pass
    if max_tokens:
        warm_up(engine, meter, len(prompt_ids), sampling, chunk, progress)

    sequence = Sequence(list(prompt_ids))
    stream = text.stream(prompt_ids)
    stops = () if ignore_eos else config.stop_ids
    (ids,) = engine.generate(
        [sequence],
        max_tokens,
        sampling,
        stop_ids=stops,
        chunk=chunk,
        on_token=lambda _, token: on_text("" if token in stops else stream.push(token)),
    )
    on_text(stream.end())
    title = "the whole run"
    if device == "cuda" and engine.last_decode is not None:
        title = measure_steps(engine, meter)
    clock = engine.clock
    return Result(
        prompt_ids=prompt_ids,
        ids=ids,
        text=text.decode(ids),
        token_hash=token_hash(ids),
        prefill_tokens=clock.prefill_tokens,
        decode_tokens=clock.decode_tokens,
        prefill_tokens_per_second=_rate(clock.prefill_tokens, clock.prefill_seconds),
        decode_tokens_per_second=_rate(clock.decode_tokens, clock.decode_seconds),
        finish="stop" if ids and ids[-1] in stops else "length",
        device=torch.cuda.get_device_name() if device == "cuda" else "CPU (host backend)",
        dtype=dtype,
        weights=now if now == was else f"{was} expanded to {now}",
        ops=meter.table(),
        table_title=title,
    )


def _rate(count: int, seconds: float) -> float | None:
    return count / seconds if count and seconds > 0 else None


def warm_up(
    engine: Engine, meter: Meter, prompt: int, sampling: Sampling, chunk: int, progress: Progress
) -> None:
    """Compile what the run needs, so that neither its text nor its timing waits for compilers.

    A one-layer copy of the model is traced without data to learn which kernels that is; they are built side by side;
    then the copy really goes through a prompt of that length and one more token, which builds what tracing missed
    and loads everything.
    """
    model = engine.model
    progress("building the launcher", 0, 0)
    config = replace(model.config, layers=1)
    short = Weights(model.weights.embed, model.weights.norm, model.weights.head, model.weights.layers[:1])
    longest = engine.cache.longest
    cache = PagedCache(config, longest, longest, dtype=engine.cache.k[0].dtype, device=engine.device)
    trial = Engine(Llama(config, short, model.ops, longest), cache)
    step = min(chunk or prompt, prompt)
    compile_ahead(trial, meter, sorted({step, prompt % step or step, 1}), progress)
    progress("trying the kernels", 0, 0)
    trial.generate([Sequence([0] * prompt)], min(2, longest - prompt), sampling, chunk=chunk)
    meter.reset()
    engine.clock = Clock()


def compile_ahead(trial: Engine, meter: Meter, passes: list[int], progress: Progress) -> None:
    """Build the kernels of passes of so many tokens, as many at once as the machine bears."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from pykern.jit import build

    width = trial.cache.width
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        for tokens in passes:
            batch = Batch.empty((tokens, 1, width), trial.device)
            trial.model.ops.argmax(trial.model(batch, trial.cache))
    wanted, target = list(meter.variants), meter.target()
    progress("compiling kernels", 0, len(wanted))

    def one(variant: tuple[str, str]) -> None:
        build.variant(*variant, backend=meter.backend, arch=target.arch)

    with ThreadPoolExecutor(max(2, os.cpu_count() or 1)) as pool:
        for done, _ in enumerate(pool.map(one, wanted), start=1):
            progress("compiling kernels", done, len(wanted))


def measure_steps(engine: Engine, meter: Meter) -> str:
    """Time the last decode step again, kernel by kernel, and leave one step's figures in the meter."""
    batch, pool = engine.last_decode, engine.pool
    assert batch is not None and pool is not None
    meter.reset()
    engine.model(batch.to(engine.device), engine.cache)  # uncaptured, for calls and bytes
    meter.on = False
    meter.time_kernels(lambda: pool(batch.packed, batch.shape), MEASURED_STEPS)
    for row in meter.rows.values():
        row.launches //= MEASURED_STEPS
        row.seconds /= MEASURED_STEPS
    meter.on = True
    return "one decode step, timed by kernel"
