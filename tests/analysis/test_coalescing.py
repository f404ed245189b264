"""Coalescing and bank conflicts: the counted patterns, the expressions, the fixes, the checker's table, the program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pykern.analysis import banks
from pykern.analysis.coalescing import Pattern, batch_line, cost, global_cost, sectors, shared_cost, total
from pykern.analysis.coalescing_expr import Expression, from_expression, parse_addrs, parse_lanes, strided
from pykern.analysis.coalescing_fix import Swizzle, fixes, hint, swizzles
from pykern.analysis.coalescing_plot import bank_grid, grid, sector_grid
from pykern.analysis.coalescing_table import rank, read_table
from pykern.commands.coalescing import command
from pykern.errors import ArgumentError

ROOT = Path(__file__).resolve().parents[2]
DATA = ROOT / "tests" / "data"
H200 = [json.loads(line) for line in (DATA / "coalescing_h200.jsonl").read_text().splitlines()]
MEASURED = json.loads((DATA / "coalescing_measured.json").read_text())
# Loads and stores with inactive lanes beside active ones, counted by Nsight Compute 2025.3 on an H200.
PAIRS = [json.loads(line) for line in (DATA / "coalescing_pairs.jsonl").read_text().splitlines()]
NAMED = [
    {**case, "space": space.split("_")[0]}
    for space in ("global", "shared", "shared_flagged")
    for case in MEASURED[space]
]


@st.composite
def patterns(draw: st.DrawFn) -> Pattern:
    width = draw(st.sampled_from([1, 2, 4, 8, 16]))
    address = st.integers(0, draw(st.sampled_from([8, 64, 1024, 2**40]))).map(lambda n: n * width)
    addrs = draw(st.lists(st.one_of(st.none(), address), min_size=32, max_size=32))
    return Pattern(
        draw(st.sampled_from(["global", "shared"])),
        draw(st.sampled_from(["load", "store"])),
        width,
        tuple(addrs),
    )


# --- the counted patterns


def test_all_600_h200_patterns_are_exact() -> None:
    assert len(H200) == 600
    assert [
        row for row in H200 if batch_line({k: v for k, v in row.items() if k != "expect"}) != row["expect"]
    ] == []


@pytest.mark.parametrize("case", NAMED, ids=[c["id"] for c in NAMED])
def test_every_named_case_is_exact(case: dict) -> None:
    row = {k: v for k, v in case.items() if k != "expect"}
    full = batch_line(row, full=True)
    assert {k: full[k] for k in case["expect"]} == case["expect"]
    assert batch_line(case) == case["expect"]


def test_lanes_beside_inactive_ones_are_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong() -> int:
        return sum(batch_line(row)["wavefronts"] != row["expect"]["wavefronts"] for row in PAIRS)

    assert len(PAIRS) == 152 and wrong() == 0

    def strict(op: str, width: int, addrs: banks.Addresses) -> int:
        """The rule without its half sentence on inactive partners."""
        lanes = banks._PHASE_LANES[width]
        shared = (all(a is None or addrs[n ^ p] == a for n, a in enumerate(addrs)) for p in (1, 2))
        return lanes * 2 if op == "load" and width >= 8 and any(shared) else lanes

    monkeypatch.setattr(banks, "phase_lanes", strict)
    assert wrong() >= 20


def test_the_patterns_discriminate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong rules that people do write down are caught by the counted patterns."""

    def wrong(name: str, value: object) -> int:
        with monkeypatch.context() as patch:
            patch.setattr(banks, name, value)
            return sum(batch_line(row) != row["expect"] for row in H200)

    rule = banks.phase_lanes
    assert wrong("phase_lanes", lambda op, width, addrs: banks._PHASE_LANES[width]) > 0, (
        "no rule for shared addresses"
    )
    assert wrong("phase_lanes", lambda op, width, addrs: rule("load", width, addrs)) > 0, (
        "the rule for stores too"
    )
    assert wrong("phase_lanes", lambda op, width, addrs: 32) > 0, "one phase"
    assert wrong("BANKS", 16) > 0
    assert wrong("phase_lanes", rule) == 0


def test_batch_program_prints_the_expect_fields_in_order() -> None:
    run = CliRunner().invoke(command, ["--batch", str(DATA / "coalescing_h200.jsonl"), "--json"])
    assert run.exit_code == 0
    assert [json.loads(line) for line in run.stdout.splitlines()] == [row["expect"] for row in H200]


# --- properties


@given(patterns())
def test_cost_is_bounded(pattern: Pattern) -> None:
    found = cost(pattern)
    assert 0 <= found.ideal <= found.actual
    if pattern.space == "global":
        assert len(sectors(pattern)) <= pattern.active * max(1, pattern.width // 32 + 1)
        assert (found.efficiency or 1) <= 1
    else:
        assert found.actual <= max(1, pattern.active) * max(1, pattern.width // 4)
        assert found.to_json()["bank_conflicts"] == found.actual - found.ideal


@given(patterns(), st.permutations(range(32)))
def test_global_cost_does_not_depend_on_lane_order(pattern: Pattern, order: list[int]) -> None:
    shuffled = pattern.moved(pattern.addrs[n] for n in order)
    assert global_cost(shuffled) == global_cost(pattern)


@given(patterns(), st.integers(0, 31))
def test_fewer_lanes_never_cost_more_sectors(pattern: Pattern, lane: int) -> None:
    fewer = pattern.moved(None if n == lane else a for n, a in enumerate(pattern.addrs))
    assert global_cost(fewer).sectors <= global_cost(pattern).sectors


@given(patterns())
def test_moving_a_whole_line_changes_nothing(pattern: Pattern) -> None:
    moved = pattern.moved(None if a is None else a + 128 for a in pattern.addrs)
    assert cost(moved).to_json() == cost(pattern).to_json()


@given(patterns())
def test_fixes_are_what_they_claim(pattern: Pattern) -> None:
    """Every claim recounted: the fixed patterns cost what the text says, less than before (or fully used)."""
    before = cost(pattern)
    for fix in fixes([pattern]):
        after = total(fix.patterns)
        assert (fix.before, fix.after) == (before.actual, after.actual)
        assert fix.after < fix.before or (fix.kind == "vector" and after.actual == after.ideal)
        if fix.kind in ("padding", "swizzle"):
            assert fix.extra["companion_after"] <= fix.extra["companion_before"]
            old = [a for a in pattern.addrs if a is not None]
            new = [a for a in fix.patterns[0].addrs if a is not None]
            assert len(set(zip(old, new))) == len(set(old)) == len(set(new)), "elements merged or split"


@given(st.integers(1, 5), st.integers(0, 6), st.integers(0, 6), st.integers(0, 2**40))
def test_swizzle_is_its_own_inverse(bits: int, base: int, more: int, addr: int) -> None:
    swizzle = Swizzle(bits, base, bits + more)
    assert swizzle(swizzle(addr)) == addr
    assert eval(swizzle.code, {}, {"addr": addr}) == swizzle(addr)  # the code shown is the map proven


def test_search_finds_the_swizzle_kernels_use() -> None:
    """16-byte column walk over 128-byte rows: bits 4-6 take bits 7-9, the 128B swizzle of TMA and wgmma."""
    tile = strided("shared", "load", 16, 128)
    best, wavefronts, _ = swizzles([tile])[0]
    assert (best.bits, best.base, best.shift, wavefronts) == (3, 4, 3, 4)


def test_column_walk_gets_padding_and_swizzle() -> None:
    found = {f.kind: f for f in fixes([strided("shared", "load", 4, 128)])}
    assert found["padding"].extra["pad"] == 4 and found["padding"].after == 1
    assert found["swizzle"].after == 1
    assert fixes([strided("shared", "load", 4, 4)]) == []


def test_companions_are_respected() -> None:
    """A swizzle that fixes the column but breaks the given companion is not offered."""
    column = strided("shared", "load", 4, 128)
    diagonal = Pattern("shared", "load", 4, tuple(n * 128 + (n ^ 0) * 4 for n in range(32)))
    assert shared_cost(diagonal).wavefronts == 1
    for fix in fixes([column], companions=[diagonal]):
        if fix.kind in ("padding", "swizzle"):
            assert fix.extra["companion_after"] == 1


@pytest.mark.parametrize(
    ("width", "stride", "offset", "kind", "after"),
    [(4, 4, 4, "alignment", 4), (4, 16, 0, "layout", 4), (4, 4096, 0, "layout", 4), (4, 16, 0, "vector", 16)],
)
def test_global_fixes(width: int, stride: int, offset: int, kind: str, after: int) -> None:
    found = {f.kind: f for f in fixes([strided("global", "load", width, stride, offset)])}
    assert found[kind].after == after


def test_hint_is_for_narrow_full_unit_stride_only() -> None:
    assert "1/4 of the instructions" in hint([strided("global", "load", 4, 4)])
    quiet = [
        strided("global", "load", 16, 16),
        strided("global", "load", 4, 8),
        strided("global", "load", 4, 4, 4),
    ]
    quiet += [strided("global", "load", 4, 4, 0, frozenset({0})), strided("global", "load", 4, 0)]
    assert [hint([p]) for p in quiet] == [""] * 5


# --- patterns as text


@pytest.mark.parametrize(
    ("text", "lane", "value"),
    [
        ("lane*33 + i", 3, 101), ("lane/2", 7, 3), ("-7/2", 0, -3), ("-7 % 3", 0, -1), ("tid", 4, 36),
        ("1 << 4", 0, 16),
        ("lane if lane < 2 else 0", 1, 1), ("lane < 2 && lane > 0", 1, 1), ("lane==0 || 0", 1, 0), ("~lane & 7", 1, 6),
        ("max(lane, 3, i)", 1, 3), ("not lane", 0, 1), ("abs(-5)", 0, 5), ("1 < lane < 4", 3, 1),
    ],
)  # fmt: skip
def test_expressions(text: str, lane: int, value: int) -> None:
    assert Expression(text)(lane, warp=1, i=2) == value


@pytest.mark.parametrize(
    "text",
    ["", "x", "lane**2", "__import__('os')", "lane.real", "lane[0]", "'a'", "1.5", "lambda: 0", "f(1)", "min()",
     "(lane := 1)", "True", "lane and", "abs(1, 2)", "[n for n in (1,)]", "1j", "(" * 3000, "1" * 3000,
     "-" * 1500 + "1", "9" * 20],
)  # fmt: skip
def test_bad_expressions_are_named(text: str) -> None:
    with pytest.raises(ArgumentError, match="expression"):
        Expression(text)


@pytest.mark.parametrize("text", ["lane/0", "lane % 0", "1 << 64", "1 << -1", "(1 << 62) * 4", "1 << 63"])
def test_values_that_do_not_exist_are_named(text: str) -> None:
    with pytest.raises(ArgumentError, match="lane=1"):
        Expression(text)(1)


@given(st.text(alphabet="lanewrpi0123456789+-*/%<>&|^~() ,.=!", max_size=30))
def test_no_expression_crashes(text: str) -> None:
    try:
        value = Expression(text)(3, 1, 2)
        assert isinstance(value, int) and -(2**63) <= value < 2**63
    except ArgumentError:
        pass


@given(st.text(alphabet="0123456789xabcdef,-: \nnul[]", max_size=40))
def test_no_lane_or_address_list_crashes(text: str) -> None:
    for parse in (parse_lanes, parse_addrs):
        try:
            parse(text)
        except ArgumentError:
            pass


def test_lanes_and_addresses() -> None:
    assert parse_lanes("0-3,8,16-30:7") == {0, 1, 2, 3, 8, 16, 23, 30}
    assert parse_lanes("0x80000001") == {0, 31}
    assert parse_addrs("0x10, 4 -, null") == (16, 4, None, None)


def test_expression_patterns_are_one_per_warp_and_step() -> None:
    made = from_expression(
        "shared", "load", 4, Expression("tid*4 + i*128"), where=Expression("lane < 16"), warps=2, iters=3
    )
    assert len(made) == 6 and made[4].addrs[:2] == (256, 260) and made[4].active == 16
    with pytest.raises(ArgumentError, match="warps x iters"):
        from_expression("shared", "load", 4, Expression("0"), warps=100, iters=100)


@pytest.mark.parametrize(
    ("row", "named"),
    [
        ({"width": 4, "addrs": []}, "space"),
        ({"space": "global", "addrs": []}, "width"),
        ({"space": "global", "width": 4}, "addrs"),
        ({"space": "local", "width": 4, "addrs": []}, "space"),
        ({"space": "global", "width": 3, "addrs": []}, "width"),
        ({"space": "global", "width": True, "addrs": []}, "width"),
        ({"space": "global", "width": 4, "addrs": [2]}, r"addrs\[0\]"),
        ({"space": "global", "width": 4, "addrs": [-4]}, r"addrs\[0\]"),
        ({"space": "global", "width": 4, "addrs": [0] * 33}, "addrs"),
        ({"space": "global", "width": 4, "addrs": [0.0]}, r"addrs\[0\]"),
        ({"space": "global", "width": 4, "addrs": "0"}, "addrs"),
        ({"space": "global", "width": 4, "addrs": [2**70]}, r"addrs\[0\]"),
        ({"space": "global", "op": "add", "width": 4, "addrs": []}, "op"),
        ([1], "line"),
        (3, "line"),
    ],
)
def test_bad_lines_are_named(row: object, named: str) -> None:
    with pytest.raises(ArgumentError, match=named):
        batch_line(row)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["space", "op", "width", "addrs", "lines"]), inner)
    ),
    max_leaves=8,
)


@given(json_values)
def test_no_line_or_table_crashes(value: object) -> None:
    for read in (batch_line, lambda v: read_table(json.dumps(v))):
        try:
            read(value)
        except ArgumentError:
            pass


# --- pictures


@given(patterns())
def test_pictures_agree_with_the_counts(pattern: Pattern) -> None:
    picture, found = grid(pattern), cost(pattern)
    assert {len(r) for r in picture.kinds} == {len(picture.kinds[0])}
    if pattern.space == "global":
        cell = min(pattern.width, 4)
        assert picture.count("used") * cell == pattern.unique_bytes
        assert (picture.count("used") + picture.count("wasted")) * cell == found.actual * 32
    elif pattern.active:
        assert len(picture.kinds) == found.actual
        assert sum("conflict" in row for row in picture.kinds) == found.actual - found.ideal


def test_picture_files(tmp_path: Path) -> None:
    for suffix, head in (("png", b"\x89png"), ("svg", b"<?xml"), ("html", b"<!doctype html")):
        path = tmp_path / f"banks.{suffix}"
        run = CliRunner().invoke(command, ["--space", "shared", "--stride", "32", "--plot", str(path)])
        assert run.exit_code == 0, run.output
        assert path.read_bytes().lower().startswith(head)
    assert sector_grid(strided("global", "load", 4, 8)).count("wasted") == 32
    assert bank_grid(strided("shared", "load", 4, 128)).count("conflict") == 31


# --- the checker's table

TABLE = {
    "op": "transpose",
    "lines": [
        {"file": "/src/a.cuh", "line": 10, "space": "global", "op": "load", "bytes": 4, "requests": 8, "sectors": 32,
         "ideal_sectors": 32, "wavefronts": 0, "ideal_wavefronts": 0, "unique_bytes": 1024},
        {"file": "/src/a.cuh", "line": 12, "space": "global", "op": "store", "bytes": 4, "requests": 8, "sectors": 256,
         "ideal_sectors": 32, "wavefronts": 0, "ideal_wavefronts": 0, "unique_bytes": 1024},
        {"file": "/src/a.cuh", "line": 14, "space": "shared", "op": "load", "bytes": 4, "requests": 8, "sectors": 0,
         "ideal_sectors": 0, "wavefronts": 256, "ideal_wavefronts": 8, "unique_bytes": 1024},
    ],
}  # fmt: skip


def test_table_ranks_the_lines_that_waste_most() -> None:
    ranked = rank(read_table(json.dumps(TABLE)), 4800, 30000)
    assert [line.line for line, _ in ranked] == [12, 14, 10]
    assert ranked[0][1] == pytest.approx((256 - 32) * 32 / 4800e3)
    assert ranked[1][1] == pytest.approx((256 - 8) * 128 / 30000e3)
    assert "column" in ranked[0][0].advice() and "swizzle" in ranked[1][0].advice()


def test_a_line_with_several_instructions_is_one_entry() -> None:
    twice = read_table(json.dumps([TABLE, TABLE]))
    assert [line.line for line in twice] == [10, 12, 14] and twice[1].sectors == 512
    nameless = read_table(
        json.dumps({"lines": [{"space": "global", "op": "load", "bytes": 4, "sectors": 3}]})
    )
    assert (nameless[0].file, nameless[0].line, nameless[0].wasted) == ("?", 0, 3)


def test_table_program(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps({"kernels": [TABLE]}))
    run = CliRunner().invoke(command, ["--table", str(path), "--json", "--top", "2"])
    assert [row["line"] for row in json.loads(run.stdout)["lines"]] == [12, 14]
    assert CliRunner().invoke(command, ["--table", str(path)]).exit_code == 0
    assert CliRunner().invoke(command, ["--table", str(path), "--min-efficiency", "0.5"]).exit_code == 1


# --- the program


@pytest.mark.parametrize(
    "args",
    [
        ["--width", "3"],
        ["--stride", "x"],
        ["--offset", "-1"],
        ["--lanes", "40"],
        ["--addrs", "1"],
        ["--index", "lane**2"],
        ["--index", "lane", "--address", "lane"],
        ["--warps", "0"],
        ["--plot", "a.gif"],
        ["--table", "/no/such/file"],
        ["--min-efficiency", "2"],
        ["--gpu", "nope", "--table", "-"],
        ["--index", "-lane"],
        ["--space", "shared", "--pitch", "0"],
        ["--batch", "/no/such/file"],
    ],
)
def test_bad_options_exit_with_2_and_one_line(args: list[str]) -> None:
    run = CliRunner().invoke(command, args, input="{}")
    assert run.exit_code == 2
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1


def test_program_answers() -> None:
    run = CliRunner().invoke(command, ["--width", "4", "--stride", "2", "--offset", "12B", "--json"])
    answer = json.loads(run.stdout)
    assert (answer["sectors"], answer["efficiency"], answer["lines"]) == (9, 128 / 288, 3)
    text = CliRunner().invoke(command, ["--width", "4", "--stride", "2"]).stdout
    assert "structure of arrays" in text and "░█" in text
    assert CliRunner().invoke(command, ["--stride", "2", "--min-efficiency", "0.6"]).exit_code == 1
    assert CliRunner().invoke(command, ["--stride", "2", "--min-efficiency", "0.5"]).exit_code == 0


@pytest.mark.parametrize("tool", ["coalescing", "traffic", "roofline"])
def test_tools_start_at_once_and_import_no_torch(tool: str) -> None:
    """The modules a tool loads stay light; the wall clock is only held to a second, for busy machines."""
    code = (
        "import sys, runpy, time; t = time.perf_counter(); sys.argv = ['x', '--help']\n"
        f"try: runpy.run_path({str(ROOT / 'tools' / (tool + '.py'))!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(time.perf_counter() - t, [m for m in ('torch', 'numpy', 'plotly', 'matplotlib') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    seconds, loaded = run.stdout.splitlines()[-1].split(" ", 1)
    assert run.returncode == 0 and loaded == "[]" and float(seconds) < 1.0
