"""The model on a GPU: golden tokens in float32, through graphs and without, in chunks, resumed and in batches."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_files import F32, Q4_1, Q8_0, Tiny, tiny_gguf

from pykern.models import _reference_ops
from pykern.models.cache import Sequence
from pykern.models.engine import Engine, Sampling
from pykern.models.meter import Meter
from pykern.models.run import load, make_engine, prepare, run

pytestmark = pytest.mark.gpu


# --- A tiny model, made here ---------------------------------------------------------------------------------

PROMPT = [5, 260, 17, 99, 3, 200, 41, 8, 77, 150, 12, 9, 31]


def tiny_engine(tmp_path: Path, kind: int, dtype: torch.dtype = torch.float32, graphs: bool = False) -> Engine:
    config, weights, _ = load(tiny_gguf(Tiny(tied=False), kind).write(tmp_path / "tiny.gguf"))
    ready = prepare(weights, dtype, "cuda")
    return make_engine(config, ready, Meter("cuda").ops, tokens=2048, longest=128, graphs=graphs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", [F32, Q4_1, Q8_0])
def test_tiny_logits_agree_with_the_reference(tmp_path: Path, kind: int, dtype: torch.dtype) -> None:
    engine = tiny_engine(tmp_path, kind, dtype)
    got = engine.prefill([Sequence(list(PROMPT))])[0].float().cpu()
    config, weights, _ = load(tmp_path / "tiny.gguf")
    reference = make_engine(config, prepare(weights, torch.float32, "cpu", True), _reference_ops, tokens=128)
    wanted = reference.prefill([Sequence(list(PROMPT))])[0]
    error = ((got - wanted).norm() / wanted.norm()).item()
    assert error < {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}[dtype], error


@pytest.mark.parametrize("kind", [F32, Q4_1])
def test_tiny_graphs_chunks_batches_and_resuming(tmp_path: Path, kind: int) -> None:
    plain, graphed = tiny_engine(tmp_path, kind), tiny_engine(tmp_path, kind, graphs=True)
    (straight,) = greedy(plain, [PROMPT], 20)
    assert len(set(straight)) > 4
    assert greedy(graphed, [PROMPT], 20)[0] == straight
    assert greedy(graphed, [PROMPT], 20, chunk=1)[0] == straight
    assert graphed.pool is not None and graphed.pool.captures == 1
    others = [[(7 * i + j) % 272 for j in range(1 + 4 * i)] for i in range(8)]
    assert greedy(graphed, [*others[:3], PROMPT, *others[3:]], 20)[3] == straight
    s, parts = Sequence(list(PROMPT)), []
    for n in (1, 5, 0, 14):
        parts += graphed.generate([s], n)[0]
    assert parts == straight
    hot = Sampling(temperature=1.5, top_k=40, top_p=0.95, seed=7)
    (alone,) = greedy(graphed, [PROMPT], 10, sampling=hot)
    assert greedy(graphed, [PROMPT[:4], PROMPT], 10, sampling=[Sampling(), hot])[1] == alone


def test_the_command_on_a_tiny_model(tmp_path: Path) -> None:
    tiny_gguf(Tiny(tied=False), Q4_1).write(tmp_path / "tiny.gguf")
    result = run(str(tmp_path / "tiny.gguf"), "hello", max_tokens=12, device="cuda", ignore_eos=True)
    rows = {row["op"]: row for row in result.ops}
    assert len(result.ids) == 12 and result.weights == "q4_1"
    assert rows["quant_linear"]["launches"] >= 8 and rows["attention"]["launches"] >= 2
    assert all(row["seconds"] > 0 for row in rows.values()), rows
    assert all(row["backend"] == "cuda" for row in rows.values())


# --- The real one --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    assert not torch.backends.cuda.matmul.allow_tf32
    config, weights, text = load(smollm2_path)
    return SimpleNamespace(
        config=config, text=text, path=smollm2_path, weights=prepare(weights, torch.float32, "cuda", dequantize=True)
    )


def engine_of(smollm2: Any, graphs: bool, tokens: int = 2048) -> Engine:
    return make_engine(smollm2.config, smollm2.weights, Meter("cuda").ops, tokens=tokens, longest=512, graphs=graphs)


def greedy(engine: Engine, prompts: list[list[int]], n: int, **options: Any) -> list[list[int]]:
    sequences = [Sequence(list(p)) for p in prompts]
    new = engine.generate(sequences, n, **options)
    for s in sequences:
        engine.cache.release(s)
    return new


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_golden_tokens(smollm2: Any, golden: list[dict], chunk: int, graphs: bool) -> None:
    engine = engine_of(smollm2, graphs)
    for case in golden:
        (new,) = greedy(engine, [case["ids"]], 48, stop_ids=smollm2.config.stop_ids, chunk=chunk)
        assert new == case["new"]


def test_golden_tokens_with_quantised_weights(smollm2: Any, golden: list[dict]) -> None:
    """float32 activations; the weights are expanded in the kernels."""
    config, weights, _ = load(smollm2.path)
    engine = make_engine(config, prepare(weights, torch.float32, "cuda"), Meter("cuda").ops, tokens=512, graphs=True)
    for case in golden:
        assert greedy(engine, [case["ids"]], 48, stop_ids=config.stop_ids)[0] == case["new"]


def test_same_bits_alone_in_batches_and_in_chunks(smollm2: Any, golden: list[dict]) -> None:
    engine = engine_of(smollm2, graphs=False)
    prompt = golden[1]["ids"]

    def logits(batch: list[list[int]], row: int, chunk: int = 0) -> torch.Tensor:
        sequences = [Sequence(list(p)) for p in batch]
        out = engine.prefill(sequences, chunk)[row].clone()
        for s in sequences:
            engine.cache.release(s)
        return out

    whole = logits([prompt], 0)
    others = [[(31 * i + j) % 49152 for j in range(1 + 5 * i)] for i in range(8)]
    assert torch.equal(logits([*others[:3], prompt, *others[3:]], 3), whole)
    for chunk in (1, 7):
        assert torch.equal(logits([prompt], 0, chunk), whole)


def test_stopped_and_resumed(smollm2: Any, golden: list[dict]) -> None:
    engine = engine_of(smollm2, graphs=True)
    s, parts = Sequence(list(golden[1]["ids"])), []
    for n in (1, 10, 0, 37):
        parts += engine.generate([s], n)[0]
    assert parts == golden[1]["new"]


def test_the_command_measures_kernels(smollm2: Any) -> None:
    result = run(str(smollm2.path), "Once upon a time", max_tokens=8, device="cuda")
    rows = {row["op"]: row for row in result.ops}
    assert rows["attention"]["launches"] >= 30 and rows["attention"]["seconds"] > 0
    assert result.decode_tokens_per_second > 50
