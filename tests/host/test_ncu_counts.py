"""The host checker counts what Nsight Compute counted on a GPU: requests, sectors and wavefronts of shipped kernels.

tests/data/ncu_counts.json is written by ``python scripts/ncu_counts.py collect`` on a GPU. Where a count differs for a
reason, its problem has ``"because": {count: {"ncu": n, "host": n, "reason": "..."}}``; the numbers are checked as well.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from _scripts import load_script

ROOT = Path(__file__).resolve().parents[2]


script = load_script("ncu_counts")
RECORD: dict[str, Any] = json.loads(script.DATA.read_text()) if script.DATA.exists() else {"problems": []}
RECORDED = {p["name"]: p for p in RECORD["problems"]}
needs_record = pytest.mark.skipif(not RECORDED, reason="tests/data/ncu_counts.json has not been written on a GPU yet")
LEAST_EXACT = 10


@functools.cache
def counted(name: str) -> dict[str, int]:
    problem = next(p for p in script.problems() if p.name == name)
    return script.host_counts(script.host_rows(problem, RECORD.get("sms", 132)))


def unexplained(entry: dict[str, Any], host: dict[str, int]) -> list[str]:
    """What differs without a reason, and reasons for what does not differ so."""
    wrong = script.differences(entry["counts"], host)
    because = entry.get("because", {})
    out = [f"{n}: ncu {a}, host {b}" for n, (a, b) in wrong.items() if n not in because]
    for name, why in because.items():
        if not why.get("reason") or wrong.get(name) != (why["ncu"], why["host"]):
            out.append(f"{name}: explained as ncu {why['ncu']}, host {why['host']}, found {wrong.get(name, 'equal')}")
    return out


def changed(entry: dict[str, Any]) -> bool:
    """Whether a kernel of the problem, or its launch, is not what was measured."""
    problem = next(p for p in script.problems() if p.name == entry["name"])
    now = problem.launches("cpu", RECORD["sms"])
    keys = ("kernel", "grid", "block", "digest")
    return [[a[k] for k in keys] for a in now] != [[b[k] for k in keys] for b in entry["launches"]]


# ---- against the record


@needs_record
@pytest.mark.parametrize("name", sorted(RECORDED))
def test_counts_are_those_of_the_gpu(name: str) -> None:
    wrong = unexplained(RECORDED[name], counted(name))
    if wrong and changed(RECORDED[name]):
        pytest.skip("the kernel was changed since it was measured: collect again on a GPU")
    assert not wrong, wrong


@needs_record
def test_enough_kernels_are_equal() -> None:
    """Kernel templates all of whose counts, of a problem that launches nothing else, are the GPU's."""
    kernels = {
        launch["kernel"].split("<")[0]
        for entry in RECORD["problems"]
        if len(entry["launches"]) == 1 and not script.differences(entry["counts"], counted(entry["name"]))
        for launch in entry["launches"]
    }
    assert len(kernels) >= LEAST_EXACT, sorted(kernels)


@needs_record
def test_the_record_is_whole() -> None:
    """Every problem was measured, with no count missing."""
    assert sorted(RECORDED) == sorted(p.name for p in script.problems())
    for name, entry in RECORDED.items():
        assert {"global load sectors", "global store sectors", "shared load wavefronts"} <= set(entry["counts"]), name


# ---- the machinery


def test_a_difference_is_reported() -> None:
    entry = {"counts": {"global load sectors": 10, "cp.async sectors": 4}}
    assert unexplained(entry, {"global load sectors": 10, "cp.async sectors": 4}) == []
    assert unexplained(entry, {"global load sectors": 11, "cp.async sectors": 4})
    why = {"global load sectors": {"ncu": 10, "host": 11, "reason": "measured so"}}
    assert unexplained({**entry, "because": why}, {"global load sectors": 11, "cp.async sectors": 4}) == []
    assert unexplained({**entry, "because": why}, {"global load sectors": 12, "cp.async sectors": 4})
    assert unexplained({**entry, "because": why}, {"global load sectors": 10, "cp.async sectors": 4})


def test_raw_pages_are_read() -> None:
    """A page of a real run, of other metrics: launches in order, thousands separators, the row of units left out."""
    launches = script.parse_raw((ROOT / "tests" / "data" / "ncu_h200_raw.csv").read_text())
    assert [launch["id"] for launch in launches][:3] == [3, 4, 5]
    assert launches[1]["kernel"].startswith("void at::vectorized_elementwise_kernel<4, at::AUnaryFunctor")
    assert launches[1]["grid"] == [65536, 1, 1] and launches[1]["block"] == [128, 1, 1]
    assert launches[0]["metrics"]["dram__bytes.sum"] == 176357120


def test_launches_are_matched_by_kernel_and_grid() -> None:
    planned = {"kernel": "pk::copy<float, 4>", "grid": [2, 1, 1], "block": [32, 1, 1]}
    load = {"l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum": 6.0}

    def launch(kernel: str, grid: int) -> dict[str, Any]:
        return {"kernel": kernel, "grid": [grid, 1, 1], "block": [32, 1, 1], "metrics": load}

    seen = [launch("void copy_twice<float>(T1)", 1), launch("void pk::copy<float, (int)4>(const T1 *)", 2)]
    (found,) = script.match([{"name": "a", "launches": [planned]}], seen)
    assert found["counts"] == {"global load requests": 6}
    with pytest.raises(SystemExit, match="no launch of copy"):
        script.match([{"name": "a", "launches": [planned]}], seen[:1])
    with pytest.raises(SystemExit, match="grid"):
        script.match([{"name": "a", "launches": [planned]}], [launch("void pk::copy<float>()", 3)])


def test_metrics_are_picked_from_what_the_card_has() -> None:
    available = """Device NVIDIA H200 (GH100)
----------------------------------------------------------------------------  ----------
Metric Name                                                  Metric Type  Metric Unit  Metric Description
l1tex__t_sectors_pipe_lsu_mem_global_op_ld                   Counter      sector       # of sectors
l1tex__t_sectors_pipe_lsu_mem_global_op_ld_lookup_hit        Counter      sector       # of hits
smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld   Counter                   # of wavefronts
dram__bytes                                                  Counter      byte         # of bytes
"""
    assert script.pick_metrics(available) == [
        "l1tex__t_sectors_pipe_lsu_mem_global_op_ld",
        "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ld",
    ]
    assert "l1tex__t_requests_pipe_lsu_mem_global_op_st" in script.pick_metrics("")


def test_counts_of_kinds_of_access() -> None:
    """Copies by cp.async and matrix loads are told from ordinary loads and stores."""

    def access(space: str, op: str, by: str) -> dict[str, Any]:
        return {"space": space, "op": op, "by": by, "requests": 1, "sectors": 4, "wavefronts": 2}

    rows = [access(*key) for key in script.HOST] + [access("shared", "store", "cp.async")]
    counts = script.host_counts(rows)
    assert counts == {n: 1 if "requests" in n else 4 if "sectors" in n else 2 for n in script.COUNTS}


def test_a_real_kernel_is_counted_as_its_layout_says() -> None:
    """9 rows of 1000 bfloat16 in warps: 125 chunks of 16 bytes are 4 requests and 62.5 sectors a row."""
    counts = counted("softmax_warp")
    assert counts["global load requests"] == counts["global store requests"] == 9 * 4
    # A row starts in the middle of a sector when its number is odd; chunks of 512 bytes then touch 17 of them.
    rows = [sum((b + 511) // 32 - b // 32 + 1 for b in range(r * 2000, r * 2000 + 1536, 512)) for r in range(9)]
    ends = [((r + 1) * 2000 - 1) // 32 - (r * 2000 + 1536) // 32 + 1 for r in range(9)]
    assert counts["global load sectors"] == sum(rows) + sum(ends)
    assert counts["shared load requests"] == counts["cp.async requests"] == 0
