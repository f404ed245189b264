"""Fusion traffic: the formula, chains as text, where fusing pays, what it costs, the program."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pykern.analysis.traffic import DTYPE_BYTES, Chain, Step, pays_from, roofed_us, verdict
from pykern.analysis.traffic_answer import human_bytes, parse_batches, split_batch
from pykern.analysis.traffic_chains import DEFAULT_SIZES, NAMED, find_chain, named_chain, parse_chain
from pykern.analysis.traffic_cost import fitting_kernels, fusion_cost, kernels_traffic
from pykern.commands.traffic import command
from pykern.errors import ArgumentError

DTYPES = sorted(DTYPE_BYTES)
WORDS = [
    "bias",
    "scale",
    "norm",
    "layernorm",
    "gelu",
    "silu",
    "softmax",
    "rope",
    "add",
    "mul",
    "silu_mul",
    "glu",
]


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    width = 2 ** draw(st.integers(3, 12))
    parts = [str(width)]
    for _ in range(draw(st.integers(1, 6))):
        word = draw(st.sampled_from([*WORDS, "linear"]))
        if word in ("silu_mul", "glu"):
            word, width = (word, width // 2) if width >= 16 else ("gelu", width)
        if word == "linear":
            width = 2 ** draw(st.integers(3, 12))
            word = f"linear {width}"
        parts.append(word + draw(st.sampled_from(["", " keep"])))
    return parse_chain(
        " -> ".join(parts),
        dtype=draw(st.sampled_from(DTYPES)),
        weight_dtype=draw(st.sampled_from(DTYPES)),
        queries=draw(st.sampled_from([1, 7, 512])),
        group=draw(st.sampled_from([0, 128])),
    )


# --- the formula


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_mlp_by_hand(dtype: str, batch: int) -> None:
    """Projection, bias, GELU, down projection: three intermediates of the inner width."""
    h, n, item = 4096, 14336, DTYPE_BYTES[dtype]
    moved = named_chain("mlp", dtype=dtype).traffic(batch)
    weights = (2 * h * n + n) * item
    assert moved.input == moved.output == batch * h * item
    assert (moved.weights, moved.intermediates) == (weights, 3 * batch * n * item)
    assert moved.fused == 2 * batch * h * item + weights
    assert moved.unfused == 2 * batch * h * item + weights + 6 * batch * n * item


def test_gated_mlp_qkv_and_attention_by_hand() -> None:
    gated = named_chain("gated-mlp").traffic(2)
    assert gated.weights == 2 * 3 * 4096 * 14336
    assert gated.intermediates == 2 * 2 * (2 * 14336 + 14336)
    qkv = named_chain("qkv").traffic(1)
    assert qkv.weights == 2 * (4096 + 4096 * 6144) and qkv.intermediates == 2 * (4096 + 6144)
    attention = named_chain("attention").traffic(3)
    assert attention.weights == 0
    assert attention.input == 2 * 3 * (4096 + 2 * 8 * 128 * 4096)
    assert attention.intermediates == 2 * 3 * 2 * 32 * 4096


def test_a_kept_intermediate_is_written_once_and_read_back_once() -> None:
    """add keep -> norm: unfused x, r in, h out, h in, w in, y out; fused x, r, w in, h, y out."""
    moved = named_chain("residual-norm").traffic(10)
    row, w = 10 * 4096 * 2, 4096 * 2
    assert moved.unfused == 5 * row + w and moved.fused == 4 * row + w


def test_int4_weights_carry_their_scales() -> None:
    chain = parse_chain("4096 -> linear 4096", dtype="bf16", weight_dtype="int4", group=128)
    assert chain.traffic(1).weights == 4096 * 4096 // 2 + 4096 * 4096 // 128 * 2
    vectors = parse_chain("4096 -> bias -> norm", dtype="bf16", weight_dtype="int4")
    assert vectors.traffic(1).weights == 2 * 2 * 4096, "vectors keep the activations' dtype"


@given(chains(), st.integers(1, 10_000))
def test_formula_and_bounds(chain: Chain, batch: int) -> None:
    moved = chain.traffic(batch)
    assert moved.fused == moved.input + moved.weights + moved.output
    assert moved.unfused == moved.fused + 2 * moved.intermediates + moved.kept
    assert 0 <= moved.saved_share < 1 and 0 <= moved.weight_share <= 1
    # A kernel at a time reads its inputs and writes its output: the same bytes, counted another way. int4 rows are
    # rounded to whole bytes once a tensor here and once a sum there.
    steps = sum(b for _, b, _ in chain.steps_traffic(batch))
    assert abs(steps - moved.unfused) <= (0 if chain.dtype != "int4" else 4 * len(chain.steps))
    assert sum(f for _, _, f in chain.steps_traffic(batch)) == moved.flops


@given(chains(), st.integers(1, 5000))
def test_monotone_in_batch(chain: Chain, batch: int) -> None:
    less, more = chain.traffic(batch), chain.traffic(batch + 1)
    assert less.unfused <= more.unfused and less.fused <= more.fused and less.weights == more.weights
    assert less.saved_share <= more.saved_share + 1e-6


@given(chains(), st.sampled_from([0.01, 0.1, 0.5]))
def test_pays_from_is_the_first_batch(chain: Chain, share: float) -> None:
    pays = pays_from(chain, share)
    if pays is None:
        assert chain.traffic(2**40).saved_share < share
    else:
        assert chain.traffic(pays).saved_share >= share
        assert pays == 1 or chain.traffic(pays - 1).saved_share < share


@given(chains(), st.integers(1, 5000))
def test_times(chain: Chain, batch: int) -> None:
    moved = chain.traffic(batch)
    assert moved.time_us(1000, fused=True) <= moved.time_us(1000, fused=False)
    assert moved.time_us(4800, fused=False) == pytest.approx(moved.unfused / 4800e3)
    assert moved.time_us(4800, fused=False, launch_us=2) == pytest.approx(
        moved.unfused / 4800e3 + 2 * len(chain.steps)
    )
    unfused, fused = roofed_us(chain, batch, 4800, 989)
    # int4 rounding (above) may make one kernel a byte heavier than the whole.
    assert fused <= unfused * (1 + 1e-9) + 1e-3
    assert fused >= max(moved.fused / 4800e3, moved.flops / 989e6) * (1 - 1e-9)


def test_verdicts() -> None:
    chain = named_chain("mlp")
    pays = pays_from(chain)
    assert pays == 154
    assert "weights dominate" in verdict(chain.traffic(1), pays) and "batch 154" in verdict(
        chain.traffic(1), pays
    )
    assert verdict(chain.traffic(4096), pays) == "fusing saves 70% of the traffic at batch 4096"
    assert "nothing to fuse" in verdict(parse_chain("8 -> gelu").traffic(1), None)
    assert "inputs and outputs dominate" in verdict(named_chain("attention").traffic(64), None)


# --- chains as text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "4096",
        "-> gelu",
        "4096 -> ",
        "x -> gelu",
        "0 -> gelu",
        "4096 -> linear",
        "4096 -> linear 0",
        "4096 -> linear x",
        "4096 -> gelu 3",
        "4096 -> foo",
        "7 -> silu_mul",
        "4096 -> values",
        "4096 -> scores heads=32",
        "99 -> scores heads=2 kv=1 dim=8 keys=4",
        "16 -> scores heads=2 kv=1 dim=8 keys=4 -> values keep now",
        "24 -> scores heads=3 kv=2 dim=8 keys=4",
        "16 -> scores heads=2 heads=2 kv=1 dim=8 keys=4",
        "9" * 20 + " -> gelu",
        "4096 -> linear -5",
        "8 -> gelu" + " -> gelu" * 300,
    ],
)
def test_bad_chains_are_named(text: str) -> None:
    with pytest.raises(ArgumentError, match="chain"):
        find_chain(text if "->" in text else text + "->")


@given(st.text(alphabet="0123456789 ->linearbsgupkdvwt=\n", max_size=60))
def test_no_chain_text_crashes(text: str) -> None:
    try:
        find_chain("8 -> " + text).traffic(3)
    except ArgumentError:
        pass


def test_named_chains_are_their_text() -> None:
    for name, (_, text) in NAMED.items():
        assert named_chain(name).steps == parse_chain(text(DEFAULT_SIZES)).steps
    with pytest.raises(ArgumentError, match="mlp"):
        find_chain("nope")
    with pytest.raises(ArgumentError, match="hidden"):
        named_chain("mlp", {"hidden": 0})


@pytest.mark.parametrize("batch", [0, -1, 2**50, True, 1.0])
def test_bad_batches_are_named(batch: object) -> None:
    with pytest.raises(ArgumentError, match="batch"):
        named_chain("mlp").traffic(batch)  # type: ignore[arg-type]


def test_batch_option_means_sizes_or_a_file() -> None:
    assert split_batch("1,8,64") == ("1,8,64", None) and split_batch("rows.jsonl") == (None, "rows.jsonl")
    assert split_batch("-") == (None, "-") and split_batch(None) == (None, None)
    assert parse_batches("1:16,100") == [1, 2, 4, 8, 16, 100]
    for text in ("", "0", "8:1", "1,,2", "-1", "9" * 30):
        with pytest.raises(ArgumentError, match="--batch"):
            parse_batches(text)


# --- what fusing costs


def test_cost_counts_what_the_block_must_hold() -> None:
    whole = fusion_cost(named_chain("mlp"), "9.0")
    assert not whole.fits and whole.held == 128 * 14336 * 2
    epilogue = fusion_cost(named_chain("linear-gelu"), "9.0")
    assert epilogue.fits and epilogue.held == 0 and epilogue.regs_after > epilogue.regs_before
    small = fusion_cost(named_chain("mlp", {"hidden": 256, "inter": 512}), "9.0", tile_rows=32)
    assert small.fits and small.smem_after == small.smem_before + 32 * 512 * 2
    assert small.after is not None and small.after.occupancy <= small.before.occupancy


@pytest.mark.parametrize("name", sorted(NAMED))
@pytest.mark.parametrize("cc", ["7.0", "8.6", "9.0", "12.0"])
def test_cost_is_never_better_than_before(name: str, cc: str) -> None:
    cost = fusion_cost(named_chain(name), cc, tile_rows=32)
    assert cost.regs_after >= cost.regs_before and cost.smem_after >= cost.smem_before
    if cost.after is not None:
        assert cost.after.occupancy <= cost.before.occupancy and cost.after.blocks >= 1
    elif cost.held:
        space = cost.fitting_rows * (cost.held // cost.tile_rows) + cost.smem_before
        assert space <= 232448, "the rows it says fit, fit"


@given(chains(), st.integers(1, 300))
def test_fitting_kernels_are_the_chain_and_move_between_fused_and_unfused(chain: Chain, batch: int) -> None:
    kernels = fitting_kernels(chain)
    assert tuple(s for k in kernels for s in k.steps) == chain.steps
    moved = chain.traffic(batch)
    part = kernels_traffic(chain, kernels, batch)
    assert moved.fused <= part <= moved.unfused + len(chain.steps)
    assert all(len(k.steps) == 1 or fusion_cost(k).fits for k in kernels)


def test_what_fits_of_an_mlp_is_its_epilogue() -> None:
    assert [[s.name for s in k.steps] for k in fitting_kernels(named_chain("mlp"))] == [
        ["linear 14336", "bias", "gelu"],
        ["linear 4096"],
    ]


def test_a_step_may_be_made_by_hand() -> None:
    chain = Chain(
        "own", 8, (Step("a", 16, weights=4), Step("b", 4, extra=2, context=100)), dtype="fp32", queries=2
    )
    moved = chain.traffic(3)
    assert (moved.input, moved.weights, moved.intermediates, moved.output) == (
        6 * 10 * 4 + 3 * 100 * 4,
        16,
        6 * 16 * 4,
        96,
    )


# --- the program


def run(*args: str, text: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(command, list(args), input=text)
    return result.exit_code, result.stdout, result.stderr


def test_program_json() -> None:
    code, out, _ = run("mlp", "--gpu", "gb10", "--batch", "1,4096", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["gbps"] == 273 and answer["pays_from_batch"] == 154
    assert [row["batch"] for row in answer["batches"]] == [1, 4096]
    assert answer["batches"][0]["unfused_us"] == pytest.approx(235098112 / 273e3)
    assert answer["tflops"] is None and "unfused_roofed_us" not in answer["batches"][0], (
        "no dense bf16 peak is on record"
    )
    timed = json.loads(run("mlp", "--measured", "--json")[1])
    assert timed["gbps"] == 4550 and "measured on one H200" in timed["gbps_source"]
    h200 = json.loads(run("mlp", "--batch", "4096", "--json")[1])["batches"][0]
    assert "arithmetic takes longer" in h200["verdict"] and h200["fused_roofed_us"] > h200["fused_us"]


def test_program_text_and_list() -> None:
    code, out, _ = run("4096 -> add keep -> norm", "-b", "1:4")
    assert code == 0 and "norm needs whole rows" in out and "fusing pays" in out
    assert "silu_mul" in run("--list")[1]
    assert {row["name"] for row in json.loads(run("--list", "--json")[1])} == set(NAMED)
    assert "576 -> linear 3072 -> silu_mul" in run("gated-mlp", "--model", "smollm2-135m")[1]


def test_program_batch_file() -> None:
    lines = [
        {"chain": "mlp", "batch": 1},
        {"chain": "8 -> gelu", "batch": 2, "dtype": "fp32", "gbps": 1},
        {"chain": "mlp"},
        {"chain": "mlp", "batch": 1, "hidden": 8, "inter": 8},
    ]
    code, out, err = run("--batch", "-", text="\n".join(map(json.dumps, lines)))
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 2 and "batch" in rows[2]["error"] and err.startswith("error: -:3")
    assert rows[0]["fused"] == 234926080 and rows[1]["fused_us"] == pytest.approx(2 * 2 * 8 * 4 / 1e3)
    assert rows[3]["weights"] == 2 * (8 * 8 * 2 + 8)


@pytest.mark.parametrize(
    "args",
    [
        ["nope"],
        ["mlp", "--batch", "0"],
        ["mlp", "--gbps", "0"],
        ["mlp", "--gbps", "nan"],
        ["mlp", "--measured", "--gpu", "gb10"],
        ["mlp", "--gpu", "nope"],
        ["mlp", "--share", "1"],
        ["mlp", "--cc", "5.5"],
        ["mlp", "--plot", "x.pdf"],
        ["mlp", "--hidden", "0"],
        ["mlp", "--threads", "0"],
        ["mlp", "--tile-rows", "0"],
        ["mlp", "--queries", "0"],
        ["mlp", "--launch-us", "-1"],
        ["mlp", "--group", "-1"],
    ],
)
def test_bad_options_exit_with_2_and_one_line(args: list[str]) -> None:
    code, _, err = run(*args)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1


def test_picture(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pytest.importorskip("matplotlib")
    path = tmp_path / "mlp.svg"
    assert run("mlp", "--plot", str(path))[0] == 0 and "weights alone" in path.read_text()


def test_human_bytes() -> None:
    assert [human_bytes(n) for n in (0, 999, 1500, 2.5e9)] == ["0 B", "999 B", "1.5 kB", "2.5 GB"]
