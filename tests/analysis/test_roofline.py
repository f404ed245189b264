"""Roofline: roofs of real chips, placing work, files, the program. Whole models are in test_roofline_models.py."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pykern.analysis.roofline import Work, place
from pykern.analysis.roofline_gpus import Roof, find_gpu, gpus
from pykern.analysis.roofline_inputs import read_bench, read_ncu
from pykern.analysis.roofline_plot import merged_labels, roofline_curves
from pykern.commands.roofline import choose_roof, command
from pykern.errors import ArgumentError

DATA = Path(__file__).resolve().parents[1] / "data"
H200 = find_gpu("h200")
SHEET, MEASURED = H200.roof("bf16"), H200.roof("bf16", "measured")
counts = st.floats(0, 1e18, allow_nan=False)
roofs = st.builds(lambda t, g: Roof("r", "bf16", "fp32", t, g, ""), st.floats(0.1, 1e4), st.floats(1, 1e5))


def run(*args: str, text: str = "") -> tuple[int, str, str]:
    result = CliRunner().invoke(command, list(args), input=text)
    return result.exit_code, result.stdout, result.stderr


# --- roofs


def test_roofs_are_dense_and_name_accumulate_and_source() -> None:
    assert (SHEET.tflops, SHEET.gbps, SHEET.accumulate) == (989.4, 4800, "fp32")
    assert "dense" in SHEET.describe() and "datasheet via" in SHEET.describe()
    assert (MEASURED.tflops, MEASURED.gbps) == (800, 4550) and "measured on one H200" in MEASURED.source
    half = find_gpu("rtx 4090").roof("fp16_acc16")
    assert half.accumulate == "fp16" and half.tflops == pytest.approx(
        2 * find_gpu("4090").roof("fp16").tflops, rel=1e-3
    )
    assert find_gpu("gb10").roof("bf16").tflops is None
    assert "unconfirmed" in find_gpu("b200").roof().source


@pytest.mark.parametrize("gpu", gpus(), ids=[g.name for g in gpus()])
def test_every_chip_has_a_sane_roof(gpu) -> None:  # type: ignore[no-untyped-def]
    for dtype, peak in gpu.tflops.items():
        roof = gpu.roof(dtype)
        assert roof.source and (peak is None) == (roof.ridge is None)
        if peak is not None:
            assert 1 < roof.ridge < 3000
    assert find_gpu(gpu.name) is gpu
    assert 500 < gpu.shared_gbps < 60_000


@pytest.mark.parametrize("name", ["", "a100", "h300", "rtx", "!!"])
def test_unclear_chips_are_named(name: str) -> None:
    with pytest.raises(ArgumentError, match="gpu"):
        find_gpu(name)


def test_roof_options() -> None:
    own = choose_roof("h200", "bf16", "datasheet", None, 4550.0)
    assert (own.tflops, own.gbps) == (989.4, 4550) and own.source.startswith("bandwidth given; datasheet")
    for bad in (
        ("h200", "bf16", "datasheet", -1.0, None),
        ("h200", "int4", "datasheet", None, None),
        ("l4", "bf16", "measured", None, None),
        ("h200", "bf16", "x", None, None),
    ):
        with pytest.raises(ArgumentError):
            choose_roof(*bad)


# --- placing work


def test_by_hand() -> None:
    memory, compute, balanced = place(
        [Work("m", 1e9, 1e9), Work("c", 1e15, 1e9), Work("b", 206e9, 1e9)], SHEET
    )
    assert (memory.bound, compute.bound, balanced.bound) == ("memory", "compute", "balanced")
    assert memory.floor_us == pytest.approx(1e9 / 4800e3) and compute.floor_us == pytest.approx(
        1e15 / 989.4e6
    )
    assert memory.attainable_gbps == pytest.approx(4800) and compute.attainable_tflops == pytest.approx(989.4)
    assert SHEET.ridge == pytest.approx(206.1, abs=0.05)
    timed = place([Work("t", 1e9, 1e9, time_us=416.7)], SHEET)[0]
    assert timed.headroom == pytest.approx(2, rel=1e-3) and "50" in timed.note
    assert "miscounted" in place([Work("t", 1e9, 1e9, time_us=100)], SHEET)[0].note
    unknown = place([Work("u", 1e18, 1e9)], find_gpu("gb10").roof("bf16"))[0]
    assert unknown.bound.startswith("memory (no compute peak") and unknown.floor_us == pytest.approx(
        1e9 / 273e3
    )


@given(counts, counts, roofs)
def test_floor_is_a_bound(flops: float, moved: float, roof: Roof) -> None:
    if flops == 0 and moved == 0:
        return
    p = place([Work("w", flops, moved)], roof)[0]
    assert p.attainable_tflops <= roof.tflops * (1 + 1e-9) and p.attainable_gbps <= roof.gbps * (1 + 1e-9)
    assert p.bound in ("memory", "compute", "balanced")
    if p.bound != "balanced" and moved:
        assert (p.work.intensity < roof.ridge) == (p.bound == "memory")
    json.dumps(p.to_json())


@given(counts, counts, roofs, st.floats(1, 100))
def test_floor_is_monotone(flops: float, moved: float, roof: Roof, factor: float) -> None:
    if flops == 0 and moved == 0:
        return
    floor = place([Work("w", flops, moved)], roof)[0].floor_us
    assert place([Work("w", flops * factor, moved)], roof)[0].floor_us >= floor
    assert place([Work("w", flops, moved * factor)], roof)[0].floor_us >= floor
    better = Roof("r", "bf16", "fp32", roof.tflops * factor, roof.gbps * factor, "")
    assert place([Work("w", flops, moved)], better)[0].floor_us <= floor


@pytest.mark.parametrize(
    "work",
    [
        (0, 0, None),
        (-1, 1, None),
        (math.nan, 1, None),
        (1, math.inf, None),
        (1, 1, 0),
        (1, 1, -2),
        (True, 1, None),
    ],
)
def test_bad_work_is_named(work: tuple) -> None:
    with pytest.raises(ArgumentError, match="w: "):
        Work("w", *work)


def test_labels_do_not_overprint() -> None:
    assert merged_labels((1, 1.1, 10), (1, 1.1, 10), ["a", "b", "c"]) == ("a, b", "", "c")
    figure = roofline_curves(place([Work("a", 1, 1), Work("n", 0, 1)], SHEET), [MEASURED])
    assert [line.name.split(":")[0] for line in figure.lines] == [SHEET.name, SHEET.name, "at the roof"]


# --- files


def test_rows_of_pykern_bench() -> None:
    row = {
        "op": "linear",
        "problem": "x 1x4096 bf16",
        "us": 10.0,
        "tbs": 3.4,
        "tflops": 3.4,
        "roof": 0.7,
        "peers": {},
    }
    works = read_bench(json.dumps(row) + "\n" + json.dumps({"op": "x", "problem": "y", "error": "no"}))
    assert [(w.name, w.bytes, w.flops, w.time_us) for w in works] == [
        ("linear x 1x4096 bf16", 3.4e7, 3.4e7, 10.0)
    ]
    with pytest.raises(ArgumentError, match="only rows with an error"):
        read_bench(json.dumps([{"op": "x", "error": "no"}]))


def test_bench_rows() -> None:
    rows = [
        {"op": "softmax", "shape": "16384x4096", "bytes": 268435456, "flops": 3.3e8, "time_us": 68.0},
        {"name": "gemm", "tflops": 800, "ms": 1.374},
        {"case": "copy", "tbps": 4.1, "seconds": 1e-3, "flops": 0},
    ]
    for text in (json.dumps(rows), json.dumps({"rows": rows}), "\n".join(map(json.dumps, rows))):
        works = read_bench(text)
        assert [w.name for w in works] == ["softmax 16384x4096", "gemm", "copy"]
        assert works[0].time_us == 68 and works[1].flops == pytest.approx(800e12 * 1.374e-3)
        assert works[2].bytes == pytest.approx(4.1e9)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "[1]",
        '[{"name": "a"}]',
        '[{"bytes": 3}]',
        '[{"name": "a", "bytes": "x"}]',
        "[[[[",
        '[{"name": "a", "bytes": -1}]',
        '[{"name": "a", "bytes": 1, "us": 0}]',
        "nonsense",
    ],
)
def test_bad_bench_files_are_named(text: str) -> None:
    with pytest.raises(ArgumentError):
        read_bench(text)


DETAILS = """==PROF== Connected to process 1
"ID","Process ID","Kernel Name","Metric Name","Metric Unit","Metric Value"
"0","1","gemm","gpu__time_duration.sum","usecond","1,374.5"
"0","1","gemm","dram__bytes_read.sum","Mbyte","400"
"0","1","gemm","dram__bytes_write.sum","Mbyte","100"
"0","1","gemm","sm__ops_path_tensor_src_bf16_dst_fp32.sum","","1,099,511,627,776"
"0","1","gemm","sm__ops_path_tensor_src_bf16_dst_fp32_sparsity_off.sum","","1,099,511,627,776"
"1","1","axpy","gpu__time_duration.sum","nsecond","2000"
"1","1","axpy","dram__bytes.sum","Kbyte","12"
"1","1","axpy","smsp__sass_thread_inst_executed_op_ffma_pred_on.sum","inst","1000"
"1","1","axpy","smsp__sass_thread_inst_executed_op_fadd_pred_on.sum","inst","10"
"1","1","axpy","smsp__sass_thread_inst_executed_op_hfma_pred_on.sum","inst","100"
"""
RAW = """"ID","Kernel Name","gpu__time_duration.sum","dram__bytes.sum","@"
"","","us","Gbyte","inst"
"0","copy, big","500","2","0"
"1","copy, big","250","1","7"
""".replace("@", "smsp__sass_thread_inst_executed_op_dfma_pred_on.sum")


def test_real_ncu_files() -> None:
    """From an H200: a 4096^3 bf16 product, then x * 2 and x + 1 on 2^26 floats. FLOPs are exact."""
    for page in ("details", "raw"):
        gemm, scaled, added = read_ncu((DATA / f"ncu_h200_{page}.csv").read_text())
        assert gemm.flops == 2 * 4096**3 and 100e6 < gemm.bytes < 200e6 and 178 < gemm.time_us < 182
        assert scaled.flops == 2**26 and added.flops == 2**27, "x + 1 is an FMA there"
        assert scaled.bytes == pytest.approx(2 * 4 * 2**26, rel=0.06)


def test_ncu_details_and_raw() -> None:
    gemm, axpy = read_ncu(DETAILS)
    assert (gemm.name, gemm.flops, gemm.bytes, gemm.time_us) == ("gemm", 2**40, 5e8, 1374.5)
    assert (axpy.flops, axpy.bytes, axpy.time_us) == (2 * 1000 + 10 + 4 * 100, 12e3, 2.0)
    first, second = read_ncu(RAW)
    assert (first.name, first.bytes, first.time_us, second.flops) == ("copy, big", 2e9, 500, 14)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "a,b\n1,2\n",
        '"Kernel Name"\n',
        '"Kernel Name","Metric Name","Metric Unit","Metric Value"\n"k","gpu__time_duration.sum","us","3"\n',
    ],
)
def test_bad_ncu_files_are_named(text: str) -> None:
    with pytest.raises(ArgumentError, match="ncu"):
        read_ncu(text)


@given(st.text(alphabet='",\nKernel NameMtic0123_.', max_size=120))
def test_no_file_crashes(text: str) -> None:
    for read in (read_ncu, read_bench):
        for head in (
            "",
            '"ID","Kernel Name","Metric Name","Metric Unit","Metric Value"\n',
            '[{"name":"a","bytes":',
        ):
            try:
                read(head + text)
            except ArgumentError:
                pass


# --- the program


def test_program_model_json() -> None:
    code, out, _ = run("--model", "llama-8b", "--batch", "1,8,64", "--context", "4096", "--json")
    answer = json.loads(out)
    assert code == 0 and answer["roof"]["gbps"] == 4800 and answer["model"]["parameters"] == 8030261248
    assert [(s["phase"], s["batch"]) for s in answer["steps"]] == [
        (p, b) for p in ("decode", "prefill") for b in (1, 8, 64)
    ]
    one = answer["steps"][0]
    assert one["context"] == 4096 and 300 < one["tokens_per_s"] < 320
    assert {"name", "intensity", "floor_us", "bound", "share"} <= set(one["ops"][0])


def test_program_text() -> None:
    code, out, _ = run("--model", "smollm2-135m", "--batch", "8", "--roof", "measured", "--weights", "int4")
    assert code == 0 and "tokens/s" in out and "gate_up_silu" in out and "weights int4" in out
    code, out, _ = run("--flops", "1e12", "--bytes", "4e8", "--time-us", "1400")
    assert code == 0 and "compute" in out and "headroom" in out and "ridge 206.1" in out
    assert "989.4" in run("--gpus")[1] and "smollm2" in run("--models")[1]
    assert len(json.loads(run("--gpus", "--json")[1])) == len(gpus())


def test_program_files_and_gate(tmp_path: Path) -> None:
    bench = tmp_path / "bench.json"
    bench.write_text(json.dumps([{"name": "copy", "bytes": 4.8e9, "flops": 1, "us": 2000}]))
    code, out, _ = run("--bench", str(bench), "--json")
    assert code == 0 and json.loads(out)["work"][0]["roof_share"] == pytest.approx(0.5)
    assert run("--bench", str(bench), "--min-share", "0.6")[0] == 1
    assert run("--bench", str(bench), "--min-share", "0.4")[0] == 0
    code, out, _ = run("--ncu", "-", "--json", text=DETAILS)
    assert code == 0 and [w["name"] for w in json.loads(out)["work"]] == ["gemm", "axpy"]
    roof = tmp_path / "roof.json"
    roof.write_text(json.dumps({"gbps": 1000, "dense_tflops": {"bf16": 100}}))
    assert (
        json.loads(run("--roof", str(roof), "--flops", "1", "--bytes", "1", "--json")[1])["roof"]["ridge"]
        == 100
    )
    roof.write_text("{}")
    assert run("--roof", str(roof), "--flops", "1")[0] == 2


def test_program_batch_file() -> None:
    lines = [
        {"flops": 1e9, "bytes": 1e9},
        {"flops": 1e15, "bytes": 1, "gpu": "l4", "time_us": 1e8},
        {"bytes": "x"},
        {},
    ]
    code, out, err = run("--batch", "-", text="\n".join(map(json.dumps, lines)))
    rows = [json.loads(line) for line in out.splitlines()]
    assert code == 2 and [r.get("bound") for r in rows] == ["memory", "compute", None, None]
    assert rows[1]["headroom"] == pytest.approx(1e8 / (1e15 / 121e6)) and err.count("error") == 2


def test_program_ops_take_bytes_and_flops_from_the_registry() -> None:
    code, out, _ = run("softmax:4096x1000", "softmax", "--json")
    works = json.loads(out)["work"]
    assert code == 0 and works[0]["bytes"] == 2 * 4096 * 1000 * 2 and works[0]["flops"] > 0
    assert len(works) > 1 and works[0]["bound"] == "memory"


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["nope"],
        ["softmax:4xx"],
        ["--flops", "-1"],
        ["--flops", "nan", "--bytes", "1"],
        ["--time-us", "3"],
        ["--gpu", "a100", "--flops", "1"],
        ["--model", "nope"],
        ["--model", "llama-8b", "--batch", "0"],
        ["--model", "llama-8b", "--context", "0"],
        ["--peak-gbps", "0"],
        ["--model", "llama-8b", "--dtype", "tf32"],
        ["--bench", "/no/such"],
        ["--plot", "x.doc"],
        ["--min-share", "2"],
        ["--gpu", "v100"],
        ["--roof", "/no/such.json"],
        ["--launch-us", "-1"],
        ["--model", "/no/such/config.json"],
    ],
)
def test_bad_options_exit_with_2_and_one_line(args: list[str]) -> None:
    code, _, err = run(*args)
    assert code == 2 and err.startswith("error: ") and err.count("\n") == 1


def test_measure_without_a_gpu_says_so() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("a GPU is here: test_measure covers it")
    code, _, err = run("--measure")
    assert code == 2 and "no CUDA GPU" in err


@pytest.mark.gpu
def test_measure(tmp_path: Path) -> None:
    out = tmp_path / "roof.json"
    assert run("--measure", "--out", str(out))[0] == 0
    roof = json.loads(out.read_text())
    assert 50 < roof["gbps"] < 20_000 and 1 < roof["dense_tflops"]["fp16"] < 10_000
    assert run("--roof", str(out), "--flops", "1e9", "--bytes", "1e9", "--dtype", "fp16")[0] == 0


def test_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "roof.svg"
    code, _, err = run("--model", "smollm2-135m", "--phase", "decode", "--plot", str(path))
    assert code == 0, err
    assert "FLOPs a byte" in path.read_text()
