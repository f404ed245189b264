"""The decoder against golden tokens, and against itself: chunks, resuming, batches.

Every test runs on the plain-PyTorch ops (the reference) and on pykern's own, which on CPU tensors are the CUDA
kernels on the host backend.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_files import F32, Q4_1, Q8_0, Tiny, tiny_gguf

from pykern.errors import ArgumentError, ModelError
from pykern.models import _reference_ops
from pykern.models.cache import PagedCache, Sequence
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
    return SimpleNamespace(config=config, text=text, weights=prepare(weights, torch.float32, "cpu", dequantize=True))


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

    def append(q: Any, k: Any, v: Any, positions: Any, table: Any, k_cache: Any, v_cache: Any, slots: Any) -> Any:
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


def tiny_engine(tmp_path: Path, ops: str, kind: int = F32, tiny: Tiny = TIED, arch: str = "llama", **kw: Any) -> Engine:
    config, weights, _ = load(tiny_gguf(tiny, kind, arch).write(tmp_path / "tiny.gguf"))
    return make_engine(config, prepare(weights, torch.float32, "cpu", **kw), ops_of(ops), tokens=2048, longest=128)


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
    vocab = engine.model.config.vocab
    one, two = Sequence([1]), Sequence([1, 2])
    done = Sequence([1])
    engine.prefill([done])
    cases: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("max_tokens: got -1, allowed: an int, 0 or above", ([one], -1), {}),
        ("max_tokens: got '3', allowed: an int", ([one], "3"), {}),
        ("chunk: got -1, allowed: an int, 0 \\(all at once\\) or above", ([one], 1), {"chunk": -1}),
        ("chunk: got 1.5, allowed: an int", ([one], 1), {"chunk": 1.5}),
        ("chunk: got None, allowed: an int", ([one], 1), {"chunk": None}),
        ("sequence length: got 200, allowed: at most 128", ([Sequence([1] * 200)], 1), {}),
        ("sequences: got Sequence, allowed: a list of", (one, 1), {}),
        (r"sequences\[1\]: got list, allowed: a pykern.models.cache.Sequence", ([one, [1, 2]], 1), {}),
        (r"sequences\[0\].ids: got no ids, allowed: at least one", ([Sequence()], 1), {}),
        (r"sequences\[1\].ids: got no ids, allowed: at least one", ([one, Sequence()], 1), {}),
        (r"sequences\[0\].ids: got 1 ids, all of them in the cache", ([done], 1), {}),
        (r"sequences\[0\].ids: got tuple, allowed: a list", ([Sequence((1, 2))], 1), {}),  # type: ignore[arg-type]
        (r"sequences\[0\].ids: got NoneType, allowed: a list", ([Sequence(None)], 1), {}),  # type: ignore[arg-type]
        ("sequences: got 2, one of them twice, allowed: each sequence once", ([two, two], 1), {}),
        (r"on_token: got int, allowed: a function", ([one], 1), {"on_token": 3}),
    ]
    for stops in (2, "2", (vocab,), (-1,), (1.0,), (True,), None):
        cases.append((f"stop_ids: got .*, allowed: a tuple of ints in 0..{vocab - 1}", ([one], 1), {"stop_ids": stops}))
    for token in (vocab, -1, 2**40, 1.5, True, "a", None, torch.tensor(1)):
        allowed = rf"sequences\[1\].ids: got .*, allowed: ints in 0..{vocab - 1}, the vocabulary"
        cases.append((allowed, ([one, Sequence([1, token])], 1), {}))  # type: ignore[list-item]
    each = "allowed: a Sampling, or a list of 1, one a sequence"
    wrong_sampling: list[tuple[str, Any]] = [
        ("a list of 0", []), ("a list of 2", [Sampling()] * 2), ("a list of 3", (Sampling(),) * 3),
        ("str 'greedy'", "greedy"), ("dict {}", {}), ("int 0", 0),
    ]  # fmt: skip
    cases += [(f"sampling: got {got}, {each}", ([one], 1, sampling), {}) for got, sampling in wrong_sampling]
    for got, wrong in (("str 'greedy'", "greedy"), ("NoneType None", None)):
        says = rf"sampling\[1\]: got {got}, allowed: a Sampling"
        cases.append((says, ([one, two], 1, [Sampling(), wrong]), {}))
    free = len(engine.cache.free)
    for says, args, options in cases:
        with pytest.raises(ArgumentError, match=f"^{says}"):
            engine.generate(*args, **options)
    assert (one.ids, two.ids, one.cached, two.cached) == ([1], [1, 2], 0, 0) and len(engine.cache.free) == free
    for says, call in (
        (r"sequences\[0\].ids: got no ids", lambda: engine.prefill([Sequence()])),
        (r"sequences: got none, allowed: at least one", lambda: engine.prefill([])),
        (rf"sequences\[0\].ids: got {vocab}, allowed: ints in", lambda: engine.prefill([Sequence([1, vocab])])),
        (r"sequences: got 2, one of them twice", lambda: engine.prefill([two, two])),
        (r"chunk: got '1', allowed: an int", lambda: engine.prefill([one], "1")),  # type: ignore[arg-type]
        (rf"work\[1\]\[0\].ids: got {vocab}, allowed: ints", lambda: engine.step([(one, 1), (Sequence([vocab]), 1)])),
        (r"work\[0\]: got Sequence, allowed: a \(Seq", lambda: engine.step([one])),  # type: ignore[list-item]
        (r"work\[0\]\[0\]: got list, allowed: a pykern", lambda: engine.step([([1], 1)])),  # type: ignore[list-item]
        (r"work\[0\]\[1\]: got 1.0, allowed: an int", lambda: engine.step([(one, 1.0)])),  # type: ignore[list-item]
        (r"work: got 2, one of them twice", lambda: engine.step([(two, 1), (two, 1)])),
        (r"tokens of a sequence: got 2, allowed: 1..1", lambda: engine.step([(one, 2)])),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"^{says}"):
            call()
    assert (one.cached, two.cached) == (0, 0) and len(engine.cache.free) == free
    assert engine.generate([], 3) == [] and engine.generate([Sequence(), two], 0) == [[], []]
    with pytest.raises(ArgumentError, match="^device: got cpu, allowed: a CUDA GPU for graphs"):
        graphs = make_engine(engine.model.config, engine.model.weights, _reference_ops, tokens=64, graphs=True)
        graphs.generate([one], 2)


def test_sampling_settings_are_checked() -> None:
    bad: dict[str, tuple[Any, ...]] = {
        "temperature": (-1.0, float("nan"), float("inf"), 1e300, "hot", None, True), "top_k": (-1, 2**31, 2.5, "3"),
        "top_p": (0.0, 1.5, float("nan"), "1"), "min_p": (1.0, float("nan")), "seed": (-1, 2**63, 1.0, True, None),
    }  # fmt: skip
    for name, values in bad.items():
        for value in values:
            with pytest.raises(ArgumentError, match=f"{name}: got"):
                Sampling(**{name: value})


def test_a_sequence_belongs_to_its_engine(tmp_path: Path) -> None:
    """One of another engine, or a copy, would read and write pages that are not its own: refused, nothing changed."""
    engine, other = (tiny_engine(tmp_path, "reference", tiny=UNTIED) for _ in range(2))
    s = Sequence(list(PROMPT))
    engine.generate([s], 3)
    before = (list(s.ids), s.cached, list(s.pages))
    allowed = "allowed: pages that this cache gave to this sequence"
    forged = replace(s, ids=list(s.ids), pages=list(s.pages))
    for wrong, where in ((s, other), (copy.deepcopy(s), engine), (copy.copy(s), engine), (forged, engine),
                         (Sequence([1, 2], 1, [0]), other), (Sequence([1, 2], 1, [10**6]), other)):  # fmt: skip
        for call in (lambda e, q: e.generate([q], 1), lambda e, q: e.prefill([q]), lambda e, q: e.step([(q, 1)])):
            with pytest.raises(ArgumentError, match=rf".*\.pages: got pages of another sequence or cache, {allowed}"):
                call(where, wrong)
        with pytest.raises(ArgumentError, match=rf"sequence\.pages: got .*, {allowed}"):
            where.cache.release(wrong)
    for wrong in (Sequence([1, 2], 2), Sequence([1, 2], 5), Sequence([1, 2], -1), Sequence([1, 2], True)):
        with pytest.raises(ArgumentError, match=r"sequences\[0\].cached: got"):
            engine.generate([wrong], 1)
    assert (s.ids, s.cached, s.pages) == before
    again = Sequence(list(s.ids))
    assert other.generate([again], 4) == engine.generate([Sequence(list(s.ids))], 4) == engine.generate([s], 4)


def test_a_sequence_may_be_taken_back(tmp_path: Path) -> None:
    """Cut to fewer ids, with ``cached`` no more than they are: it goes on as if the rest had never been."""
    engine = tiny_engine(tmp_path, "reference", tiny=UNTIED)
    s = Sequence(list(PROMPT))
    (first,) = engine.generate([s], 12)
    s.ids, s.cached = s.ids[: len(PROMPT)], len(PROMPT) - 1
    assert engine.generate([s], 12) == [first]


def test_pages_of_sequences_that_are_gone_are_used_again(tmp_path: Path) -> None:
    config, weights, _ = load(tiny_gguf(UNTIED, F32).write(tmp_path / "tiny.gguf"))
    engine = make_engine(config, prepare(weights, torch.float32, "cpu"), _reference_ops, tokens=64)
    kept = Sequence(list(PROMPT))
    (first,) = engine.generate([kept], 8)
    for _ in range(12):  # each takes two of four pages
        assert engine.generate([Sequence(list(PROMPT))], 8) == [first]
    held = [Sequence(list(PROMPT))]
    engine.generate(held, 8)
    with pytest.raises(ArgumentError, match="^free cache pages: got 0, allowed: 1 more for the 13 tokens of a seq"):
        engine.generate([Sequence(list(PROMPT))], 8)
    assert len({*kept.pages, *held[0].pages}) == 4
    engine.cache.release(held[0])
    assert engine.generate([Sequence(list(PROMPT))], 8) == [first]


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("tokens", 0, "an int, 1 or above"), ("tokens", "64", "an int, 1 or above"), ("tokens", 1.5, "an int"),
        ("longest", 0, "an int in 1..256, the model's context"), ("longest", 257, "an int in 1..256"),
        ("longest", True, "an int in"), ("page_size", 0, "an int, 1"), ("page_size", None, "an int, 1"),
    ],
)  # fmt: skip
def test_sizes_of_a_cache(name: str, value: Any, allowed: str, tmp_path: Path) -> None:
    config, _, _ = load(tiny_gguf(TIED, F32).write(tmp_path / "tiny.gguf"))
    sizes: dict[str, Any] = {"tokens": 64, "longest": 64, "page_size": 16, name: value}
    with pytest.raises(ArgumentError, match=f"^{name}: got {value!r}, allowed: {allowed}"):
        PagedCache(config, **sizes)
