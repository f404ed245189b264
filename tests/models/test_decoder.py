"""The decoder against golden tokens, and against itself: chunks, resuming, batches.

Every test runs on the plain-PyTorch ops (the reference) and on pykern's own, which on CPU tensors are the CUDA
kernels on the host backend.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_files import F32, Q4_1, Q8_0, Tiny, tiny_gguf

from pykern.errors import ArgumentError, ModelError
from pykern.models import _reference_ops
from pykern.models.cache import Sequence
from pykern.models.engine import Engine, Sampling
from pykern.models.meter import OPS, Meter
from pykern.models.run import load, make_engine, prepare


def ops_of(name: str) -> Any:
    if name == "reference":
        return _reference_ops
    return Meter("cpu").ops


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> Any:
    """Weights dequantised to float32 and float32 activations: what the golden tokens were made with."""
    config, weights, text = load(smollm2_path)
    return SimpleNamespace(
        config=config, text=text, weights=prepare(weights, torch.float32, "cpu", dequantize=True)
    )


def real_engine(smollm2: Any, ops: str = "reference", tokens: int = 512) -> Engine:
    return make_engine(smollm2.config, smollm2.weights, ops_of(ops), tokens=tokens)


def greedy(engine: Engine, prompts: list[list[int]], n: int, **options: Any) -> list[list[int]]:
    sequences = [Sequence(list(p)) for p in prompts]
    try:
        return engine.generate(sequences, n, **options)
    finally:
        for s in sequences:
            engine.cache.release(s)


@pytest.mark.parametrize("chunk", [0, 1, 7])
def test_golden_tokens_of_the_reference(smollm2: Any, golden: list[dict], chunk: int) -> None:
    engine = real_engine(smollm2)
    for case in golden if chunk == 0 else golden[:1]:
        (new,) = greedy(engine, [case["ids"]], 48, stop_ids=smollm2.config.stop_ids, chunk=chunk)
        assert new == case["new"]


def test_golden_tokens_among_others(smollm2: Any, golden: list[dict]) -> None:
    engine = real_engine(smollm2, tokens=2048)
    others = [golden[i % 2]["ids"][: 1 + i] + [300 + i] * (3 * i) for i in range(8)]
    new = greedy(engine, [*others[:4], golden[0]["ids"], *others[4:], golden[1]["ids"]], 12)
    assert new[4] == golden[0]["new"][:12]
    assert new[9] == golden[1]["new"][:12]


def test_a_wrong_decoder_gives_other_tokens(smollm2: Any, golden: list[dict]) -> None:
    """The golden tokens discriminate: each planted error changes them."""

    def changed(**functions: Any) -> SimpleNamespace:
        return SimpleNamespace(**{n: getattr(_reference_ops, n) for n in (*OPS, "rope") if hasattr(_reference_ops, n)}
                               | functions)  # fmt: skip

    ref = _reference_ops

    def interleaved(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        even_odd = torch.cat([x[..., ::2], x[..., 1::2]], -1)
        out = ref.rope(even_odd, positions, table)
        a, b = out.chunk(2, -1)
        return torch.stack([a, b], -1).flatten(-2)

    def append(
        q: Any, k: Any, v: Any, positions: Any, table: Any, k_cache: Any, v_cache: Any, slots: Any
    ) -> Any:
        k_cache.view(-1, *k_cache.shape[2:])[slots] = interleaved(k, positions, table)
        v_cache.view(-1, *v_cache.shape[2:])[slots] = v
        return interleaved(q, positions, table)

    wrong = {
        "rope interleaved": changed(rope_append_kv=append),
        "not causal": changed(attention=lambda *a, **k: ref.attention(*a, **{**k, "causal": False})),
        "gate and up swapped": changed(silu_and_mul=lambda x: ref.silu_and_mul(x.roll(x.shape[-1] // 2, -1))),
        "no residual": changed(linear=lambda x, w, bias=None, residual=None: ref.linear(x, w, bias=bias)),
    }
    for name, ops in wrong.items():
        engine = make_engine(smollm2.config, smollm2.weights, ops, tokens=128)
        (new,) = greedy(engine, [golden[0]["ids"]], 8)
        assert new != golden[0]["new"][:8], name


# --- A tiny model, bit by bit --------------------------------------------------------------------------------


BACKENDS = ["pykern"]
TIED = Tiny()
UNTIED = Tiny(tied=False)  # a tied random model only repeats its last token


def tiny_engine(
    tmp_path: Path, ops: str, kind: int = F32, tiny: Tiny = TIED, arch: str = "llama", **kw: Any
) -> Engine:
    config, weights, _ = load(tiny_gguf(tiny, kind, arch).write(tmp_path / "tiny.gguf"))
    return make_engine(
        config, prepare(weights, torch.float32, "cpu", **kw), ops_of(ops), tokens=2048, longest=128
    )


PROMPT = [5, 260, 17, 99, 3, 200, 41, 8, 77, 150, 12, 9, 31]


def logits_of(engine: Engine, prompt: list[int], chunk: int = 0) -> torch.Tensor:
    s = Sequence(list(prompt))
    try:
        return engine.prefill([s], chunk)[0].clone()
    finally:
        engine.cache.release(s)


@pytest.mark.parametrize("ops", BACKENDS)
@pytest.mark.parametrize("kind", [F32, Q4_1, Q8_0])
def test_same_bits_in_chunks_and_batches(tmp_path: Path, ops: str, kind: int) -> None:
    engine = tiny_engine(tmp_path, ops, kind)
    whole = logits_of(engine, PROMPT)
    for chunk in (1, 7):
        assert torch.equal(logits_of(engine, PROMPT, chunk), whole), chunk
    rest = [Sequence([(7 * i + j) % 272 for j in range(1 + 4 * i)]) for i in range(8)]
    batch = [*rest[:3], Sequence(list(PROMPT)), *rest[3:]]
    assert torch.equal(engine.prefill(batch)[3], whole)
    for s in batch:
        engine.cache.release(s)


@pytest.mark.parametrize("ops", BACKENDS)
def test_stopped_and_resumed(tmp_path: Path, ops: str) -> None:
    engine = tiny_engine(tmp_path, ops, tiny=UNTIED)
    (straight,) = greedy(engine, [PROMPT], 12)
    assert len(set(straight)) > 4
    s, parts = Sequence(list(PROMPT)), []
    for n in (1, 4, 0, 7):
        parts += engine.generate([s], n)[0]
    assert parts == straight
    assert s.ids == PROMPT + straight and len(s.pending) == 1


@pytest.mark.parametrize("ops", BACKENDS)
def test_agrees_with_the_reference(tmp_path: Path, ops: str) -> None:
    for kind, tiny, arch in [
        (F32, Tiny(), "llama"),
        (Q4_1, Tiny(tied=False), "llama"),
        (Q8_0, Tiny(biased=True, q_heads=6, kv_heads=2, hidden=96), "qwen2"),
    ]:
        got = logits_of(tiny_engine(tmp_path, ops, kind, tiny, arch), PROMPT)
        wanted = logits_of(tiny_engine(tmp_path, "reference", kind, tiny, arch, dequantize=True), PROMPT)
        error = ((got - wanted).norm() / wanted.norm()).item()
        assert error < 1e-5, (kind, arch, error)


@pytest.mark.slow
@pytest.mark.parametrize("ops", BACKENDS)
def test_golden_tokens_on_the_host_backend(smollm2: Any, golden: list[dict], ops: str) -> None:
    """Both prompts in one batch, to their ends."""
    engine = real_engine(smollm2, ops)
    new = greedy(engine, [case["ids"] for case in golden], 48, stop_ids=smollm2.config.stop_ids)
    assert new == [case["new"] for case in golden]


@pytest.mark.parametrize("ops", BACKENDS)
def test_sampling_belongs_to_its_request(tmp_path: Path, ops: str) -> None:
    """The same seed, the same tokens: alone, among others, stopped and resumed; other seeds give others."""
    engine = tiny_engine(tmp_path, ops, tiny=UNTIED)
    hot = Sampling(temperature=1.5, top_k=40, top_p=0.95, min_p=0.01, seed=11)
    (alone,) = greedy(engine, [PROMPT], 10, sampling=hot)
    mixed = [Sampling(), hot, Sampling(temperature=0.7, seed=3)]
    plain, among, _ = greedy(engine, [PROMPT, PROMPT, PROMPT[:3]], 10, sampling=mixed)
    assert among == alone
    assert plain == greedy(engine, [PROMPT], 10)[0] != alone
    s, parts = Sequence(list(PROMPT)), []
    for n in (3, 7):
        parts += engine.generate([s], n, hot)[0]
    assert parts == alone
    seeds = [Sampling(temperature=1.5, seed=i) for i in range(6)]
    assert len({tuple(t) for t in greedy(engine, [PROMPT] * 6, 6, sampling=seeds)}) > 1
    assert greedy(engine, [PROMPT], 10, sampling=Sampling(temperature=1.0, top_k=1))[0] == plain


@pytest.mark.parametrize("ops", BACKENDS)
def test_nan_logits_are_reported(tmp_path: Path, ops: str) -> None:
    engine = tiny_engine(tmp_path, ops)
    engine.model.weights.norm = torch.full_like(engine.model.weights.norm, float("nan"))
    for sampling in (Sampling(), Sampling(temperature=1.0)):
        with pytest.raises(ModelError, match="no token has a valid probability after 13 tokens"):
            greedy(engine, [PROMPT], 3, sampling=sampling)


@pytest.mark.slow
def test_real_logits_have_the_same_bits(smollm2: Any, golden: list[dict]) -> None:
    """The real model on the host backend: the prompt whole, in chunks, and among eight ragged others."""
    engine = real_engine(smollm2, "pykern", tokens=1024)
    prompt = golden[1]["ids"]
    whole = logits_of(engine, prompt)
    assert int(whole.argmax()) == golden[1]["new"][0]
    for chunk in (1, 7):
        assert torch.equal(logits_of(engine, prompt, chunk), whole), chunk
    others = [Sequence([(977 * i + j) % 49152 for j in range(1 + i % 4)]) for i in range(8)]
    assert torch.equal(engine.prefill([*others[:5], Sequence(list(prompt)), *others[5:]])[5], whole)


def test_bad_arguments(tmp_path: Path) -> None:
    engine = tiny_engine(tmp_path, "reference")
    with pytest.raises(ArgumentError, match="max_tokens: got -1"):
        engine.generate([Sequence([1])], -1)
    with pytest.raises(ArgumentError, match="sequences with pending ids"):
        engine.generate([Sequence([])], 1)
    with pytest.raises(ArgumentError, match="sequence length: got 200, allowed: at most 128"):
        engine.generate([Sequence([1] * 200)], 1)
    with pytest.raises(ArgumentError, match="max_tokens: got '3', allowed: an int"):
        engine.generate([Sequence([1])], "3")  # type: ignore[arg-type]
    same = Sequence([1, 2])
    with pytest.raises(ArgumentError, match="sequences: got 2, one of them twice"):
        engine.generate([same, same], 1)  # it would write its pages twice
    vocab = engine.model.config.vocab
    for token in (vocab, -1, 2**40, 1.5, True, "a", None):
        with pytest.raises(ArgumentError, match=rf"sequences\[1\].ids: got .*, allowed: ints in 0..{vocab - 1}"):
            engine.generate([Sequence([1]), Sequence([1, token])], 1)  # type: ignore[list-item]
    for sampling in ([], [Sampling()] * 2, ["greedy"], "greedy", {"seed": 1}):
        with pytest.raises(ArgumentError, match="sampling: got .*, allowed: a Sampling, or a list of 1"):
            engine.generate([Sequence([1])], 1, sampling)  # type: ignore[arg-type]
    bad: dict[str, tuple[Any, ...]] = {
        "temperature": (-1.0, float("nan"), float("inf"), 1e300, "hot", None, True), "top_k": (-1, 2**31, 2.5, "3"),
        "top_p": (0.0, 1.5, float("nan"), "1"), "min_p": (1.0, float("nan")), "seed": (-1, 2**63, 1.0, True, None),
    }  # fmt: skip
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ArgumentError, match=f"{name}: got"):
                Sampling(**{name: value})
