"""What every analysis program promises: exit codes, one-line errors, no traceback, no hang, a quick start.

The programs run as a user runs them. Exit codes: 0 answered, 1 a gate failed, 2 bad input.
"""

from __future__ import annotations

import json
import os
import random
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pykern.commands import coalescing, occupancy, report, roofline, traffic

ROOT = Path(__file__).parents[2]
DATA = ROOT / "tests" / "data"
COMMANDS = {
    "occupancy": occupancy.command,
    "coalescing": coalescing.command,
    "traffic": traffic.command,
    "roofline": roofline.command,
    "report": report.command,
}
#: A small question that each program answers.
ASK = {
    "occupancy": ["--cc", "9.0", "--threads", "256", "--regs", "64"],
    "coalescing": ["--stride", "2"],
    "traffic": ["mlp"],
    "roofline": ["--flops", "1e12", "--bytes", "4e8"],
}
NCU = str(DATA / "occupancy" / "ncu_details.csv")
PTXAS = str(DATA / "occupancy" / "sm_90a.log")


def invoke(tool: str, *args: str, stdin: str | None = None) -> Result:
    """Run in this process; anything but an exit code that the programs document is an error."""
    result = CliRunner().invoke(COMMANDS[tool], list(args), input=stdin)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(f"{tool} {args}: {result.exception!r}") from result.exception
    assert result.exit_code in (0, 1, 2), (tool, args, result.exit_code)
    return result


def program(tool: str, *args: str, command: bool = False, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
    """Run ``tools/x.py`` or ``pykern x`` as a process of its own."""
    start = ["-m", "pykern", tool] if command else [str(ROOT / "tools" / f"{tool}.py")]
    settings: dict[str, object] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "timeout": 120, "cwd": ROOT}
    command_line = [sys.executable, *start, *args]
    return subprocess.run(command_line, check=False, **(settings | kwargs))  # type: ignore[call-overload]


# --- exit codes -----------------------------------------------------------------------------------------------------

OK = [
    ("occupancy", *ASK["occupancy"]),
    ("occupancy", *ASK["occupancy"], "--gate", "regs<=64, occupancy>=50%"),
    ("occupancy", "--ncu", NCU, "--gate", "achieved>=1%"),
    ("occupancy", "--diff", PTXAS, PTXAS),
    ("coalescing", "--stride", "2", "--min-efficiency", "0.5"),
    ("traffic", "mlp"),
    ("roofline", *ASK["roofline"], "--time-us", "2000", "--min-share", "0.1"),
]
FAILS = [
    ("occupancy", *ASK["occupancy"], "--gate", "occupancy>=0.9"),
    ("occupancy", "--cc", "9.0", "--threads", "1024", "--regs", "255"),  # cannot be launched
    ("occupancy", "--cc", "9.0,8.0", "--threads", "1024", "--regs", "255", "--json"),
    ("occupancy", "--cc", "9.0", "--threads", "1024", "--regs", "255", "--gate", "regs<=255"),
    ("occupancy", "--ncu", NCU, "--gate", "achieved>=0.99"),
    ("occupancy", "--ncu", NCU, "--gate", "regs<=8"),
    ("occupancy", PTXAS, "--cc", "9.0", "--gate", "spills==0"),
    ("coalescing", "--stride", "2", "--min-efficiency", "0.6"),
    ("roofline", *ASK["roofline"], "--time-us", "2000", "--min-share", "0.9"),
]
REFUSED = [
    ("occupancy", "--threads", "256"),
    ("occupancy", *ASK["occupancy"], "--smem-per-thread", "nan"),
    ("occupancy", *ASK["occupancy"], "--smem-per-thread", "inf"),
    ("occupancy", *ASK["occupancy"], "--sms", "-1"),
    ("occupancy", *ASK["occupancy"], "--sms", "132", "--grid", "0"),
    ("occupancy", *ASK["occupancy"], "--gate", "spills==0"),  # numbers say nothing of spills
    ("occupancy", *ASK["occupancy"], "--gate", "regs"),
    ("occupancy", "--ncu", NCU, "--kernel", "nowhere"),
    ("occupancy", "--ncu", NCU, "--plot", "x.png"),
    ("occupancy", "--batch", str(DATA / "occupancy_header.jsonl"), "--gate", "regs<=5"),
    ("occupancy", "--diff", PTXAS, str(DATA / "occupancy" / "sm_80.log")),  # no kernel in common
    ("coalescing", "--lanes", "none", "--min-efficiency", "0.5"),
    ("coalescing", "--batch", str(DATA / "coalescing_h200.jsonl"), "--min-efficiency", "0.5"),
    ("traffic", "--batch", str(DATA / "coalescing_h200.jsonl"), "--plot", "x.png"),
    ("traffic", "mlp", "--batch", "1,2", "--batch-sizes", "3"),
    ("roofline", *ASK["roofline"], "--min-share", "0.5"),  # nothing was measured
    ("roofline", *ASK["roofline"], "--batch", "1,8"),
    ("roofline", "--model", "llama-8b", "--min-share", "0.5"),
    ("roofline", "--model", "llama-8b", "--flops", "1"),
    ("roofline", *ASK["roofline"], "--out", "x.json"),
    ("roofline", "--flops", "1" + "0" * 400, "--bytes", "1"),
    ("report", "--arch", "61"),
    ("report", "--op", "no_such_op", "--regs", "32"),
    ("report", "--op", "softmax", "--regs", "300"),
    ("report", "--shape", "4x4"),
    *((tool, "--no-such-option") for tool in COMMANDS),
    *((tool, *args, "--plot", "picture.pdf") for tool, args in ASK.items()),
    *((tool, *args, "--plot", "nowhere/picture.png") for tool, args in ASK.items()),
]


@pytest.mark.parametrize(
    ("code", "call"),
    [(code, call) for code, calls in enumerate((OK, FAILS, REFUSED)) for call in calls],
    ids=lambda value: " ".join(value)[:70] if isinstance(value, tuple) else str(value),
)
def test_exit_codes(code: int, call: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = invoke(*call)
    assert result.exit_code == code, result.output
    assert list(tmp_path.iterdir()) == []  # a refused picture or page is not begun
    if code == 2:
        assert re.search(r"^[Ee]rror: .+", result.stderr, re.M) and "Traceback" not in result.stderr


@pytest.mark.parametrize("tool", sorted(COMMANDS))
def test_an_empty_value_is_refused(tool: str) -> None:
    """``--gate "$GATE"`` with the variable unset must not pass."""
    import click

    for param in COMMANDS[tool].params:
        if isinstance(param, click.Option) and not param.is_flag and param.nargs == 1:
            name = max(param.opts, key=len)
            ask = list(ASK.get(tool, []))
            for known in param.opts:  # options are given once
                while known in ask:
                    del ask[ask.index(known) : ask.index(known) + 2]
            result = invoke(tool, *ask, name, "")
            assert result.exit_code == 2 and name in result.stderr, (name, result.output)


# --- bad files ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def bad_files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("bad")
    cubin = (DATA / "occupancy" / "sm_90a.cubin").read_bytes()
    contents = {
        "empty": b"",
        "rubbish.cubin": bytes((n * 7919 >> 3) & 255 for n in range(3000)),
        "zeros.ptx": bytes(4096),
        "magic": b"\x7fELF",
        "cut.cubin": cubin[: len(cubin) // 2],
        "deep.json": b"[" * 200_000,
        "deep.jsonl": b'{"chain":' + b"[" * 50_000 + b"]" * 50_000 + b"}\n",
        "utf16.csv": "Kernel Name,ID\n1,2\n".encode("utf-16"),
        "scalar.json": b"7",
        "list.json": b'[{"name": 5}]',
    }
    for name, data in contents.items():
        (folder / name).write_bytes(data)
    return [*(str(folder / name) for name in contents), str(folder), str(folder / "missing"), "/dev/null", "/dev/zero"]


def test_bad_files_are_named_and_refused(bad_files: list[str]) -> None:
    takes = [
        ("occupancy",), ("occupancy", "--ncu"), ("coalescing", "--table"), ("roofline", "--bench"),
        ("roofline", "--ncu"), ("roofline", "--model"), ("roofline", *ASK["roofline"], "--roof"),
    ]  # fmt: skip
    for path in bad_files:
        for call in takes:
            if call[-1] == "--roof" and not path.endswith(".json"):
                continue
            if path == "/dev/zero" and not os.path.exists(path):
                continue
            started = time.monotonic()
            result = invoke(*call, path)
            assert result.exit_code == 2 and "rror: " in result.stderr, (call, path, result.output)
            assert time.monotonic() - started < 30, (call, path)
        assert invoke("occupancy", "--diff", path, PTXAS).exit_code == 2


#: A line that some program might take, in every way wrong.
_VALUES: tuple[object, ...] = (
    None, True, -1, 0, 1.5, 1e308, 10**400, float("nan"), float("inf"), "", "x", "[/red]", "\ud800", [], {}, [1],
)  # fmt: skip
_GOOD = {
    "occupancy": {"cc": "9.0", "threads": 128, "regs": 32, "static_smem": 0, "dyn_smem": 0, "barriers": 1,
                  "carveout_pct": -1},
    "coalescing": {"space": "shared", "op": "load", "width": 4, "addrs": list(range(0, 128, 4)), "expect": {}},
    "traffic": {"chain": "mlp", "batch": 8, "dtype": "bf16", "weight_dtype": "int4", "queries": 1, "group": 0,
                "gbps": 4550, "hidden": 4096},
    "roofline": {"name": "k", "flops": 1e9, "bytes": 1e6, "time_us": 10.0, "dtype": "bf16", "gpu": "h200"},
}  # fmt: skip


@pytest.mark.parametrize("tool", sorted(_GOOD))
def test_batch_lines_of_every_wrong_kind(tool: str, tmp_path: Path) -> None:
    """One answer a line, in order: the good ones answered, the others named; the exit code says that some were bad."""
    rows: list[object] = [_GOOD[tool]]
    rows += [{**_GOOD[tool], key: value} for key in _GOOD[tool] for value in _VALUES]
    rows += [{k: v for k, v in _GOOD[tool].items() if k != key} for key in _GOOD[tool]]
    texts = [json.dumps(row) for row in rows]
    texts += ["null", "1", "{", "[]", "{}", "\x00", "{" * 50_000, texts[0]]
    (tmp_path / "rows.jsonl").write_text("\ufeff" + "\r\n".join(texts) + "\r\n\r\n", encoding="utf-8")
    result = invoke(tool, "--batch", str(tmp_path / "rows.jsonl"), "--json")
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == len(texts) and result.exit_code == 2
    assert answers[0] == answers[-1] and "error" not in answers[0]
    wrong = [n for n, answer in enumerate(answers, 1) if "error" in answer]
    assert [answers[n - 1]["line"] for n in wrong] == wrong and len(wrong) > len(_GOOD[tool])
    assert result.stderr.count("error: ") >= len(wrong)


def _damaged(value: object, rng: random.Random) -> object:
    """``value`` with some of its parts replaced, left out, or under another key."""
    if rng.random() < 0.12:
        return rng.choice((*_VALUES, 1e30, "9" * 400, {"lines": [1]}, [None] * 40))
    if isinstance(value, dict):
        kept = [item for item in value.items() if rng.random() > 0.05]
        return {key if rng.random() > 0.05 else "other": _damaged(item, rng) for key, item in kept}
    if isinstance(value, list):
        return [_damaged(item, rng) for item in value if rng.random() > 0.05]
    return value


def _damaged_text(text: str, rng: random.Random) -> str:
    parts = list(text)
    for _ in range(rng.randint(1, 30)):
        at = rng.randrange(len(parts))
        parts[at] = rng.choice(("", ",", '"', "\n", "-", "9" * 20, "nan", "%", "\0", "[", "e"))
        if rng.random() < 0.1 and len(parts) > 300:
            del parts[at : at + rng.randint(1, 200)]
    return "".join(parts)


_DOCUMENTS: list[tuple[tuple[str, ...], object]] = [
    (("coalescing", "--table"), {"lines": [
        {"file": "k.cuh", "line": 9, "space": "global", "op": "load", "bytes": 4, "requests": 12, "sectors": 13,
         "ideal_sectors": 12, "wavefronts": 0, "ideal_wavefronts": 0, "unique_bytes": 60}]}),
    (("roofline", "--bench"), {"rows": [
        {"name": "a", "bytes": 1e6, "flops": 1e9, "time_us": 10, "dtype": "bf16"}, {"op": "b", "nbytes": 5, "ms": 1},
        {"case": "c", "tflops": 3, "seconds": 1e-3}]}),
    (("roofline", *ASK["roofline"], "--roof"),
     {"name": "x", "gbps": 4000, "dense_tflops": {"bf16": 800}, "source": "s"}),
    (("roofline", "--model"), {
        "model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "num_hidden_layers": 32, "intermediate_size": 14336, "vocab_size": 32000, "num_local_experts": 8,
        "num_experts_per_tok": 2, "head_dim": 128, "text_config": None}),
]  # fmt: skip


def test_damaged_documents_are_answered_or_refused(tmp_path: Path) -> None:
    rng = random.Random(7)
    path = tmp_path / "document.json"
    for call, document in _DOCUMENTS:
        for _ in range(60):
            path.write_text(json.dumps(_damaged(document, rng)), encoding="utf-8", errors="surrogatepass")
            invoke(*call, str(path))
    ncu, roofline_ncu = Path(NCU), DATA / "ncu_h200_details.csv"
    texts = [(("occupancy", "--ncu"), ncu), (("occupancy", "--ncu"), ncu.with_name("ncu_raw.csv")),
             (("roofline", "--ncu"), roofline_ncu), (("occupancy", "--threads", "128"), Path(PTXAS))]  # fmt: skip
    for call, source in texts:
        text = source.read_text(encoding="utf-8")[:20_000]
        for _ in range(60):
            path.write_text(_damaged_text(text, rng), encoding="utf-8")
            invoke(*call, str(path))
    path.write_text("ID,Kernel Name,Metric Name\n1," + "k" * 200_000 + ",x\n", encoding="utf-8")
    for tool in ("occupancy", "roofline"):  # longer than a field of the csv module may be
        assert invoke(tool, "--ncu", str(path)).exit_code == 2


# --- streams and text -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tool", sorted(ASK))
def test_streams(tool: str) -> None:
    """A closed or full stdout, a reader that goes away, an encoding without block characters."""
    for args in (ASK[tool], [*ASK[tool], "--json"]):
        if os.path.exists("/dev/full"):
            with open("/dev/full", "w") as full:
                done = program(tool, *args, stdout=full)
            assert done.returncode == 2 and done.stderr.startswith(b"error: cannot write"), done.stderr
    ascii_only = program(tool, *ASK[tool], env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert ascii_only.returncode == 0 and not ascii_only.stderr
    assert ascii_only.stdout.isascii() and b"\\u" not in ascii_only.stdout
    script = f"{sys.executable} tools/{tool}.py {' '.join(ASK[tool])}"
    closed = subprocess.run(["sh", "-c", f"{script} >&-; echo $?"], cwd=ROOT, capture_output=True, timeout=120)
    assert closed.stdout.strip() == b"0" and not closed.stderr
    no_stdin = subprocess.run(
        ["sh", "-c", f"{sys.executable} tools/{tool}.py --batch - <&-; echo $?"],
        cwd=ROOT, capture_output=True, timeout=120,
    )  # fmt: skip
    assert no_stdin.stdout.strip() == b"2" and no_stdin.stderr.startswith(b"error: ")


def test_a_reader_that_goes_away_changes_no_exit_code() -> None:
    """``pykern occupancy ... --gate ... | head -1`` under pipefail must not turn 0 into 1, nor 1 into 0."""
    calls = [(ASK["occupancy"], 0), ([*ASK["occupancy"], "--gate", "occupancy>=0.9"], 1)]
    for args, code in calls:
        for extra in ([], ["--json"]):
            started = subprocess.Popen(
                [sys.executable, "tools/occupancy.py", *args, *extra], cwd=ROOT,
                stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            )  # fmt: skip
            assert started.stdout is not None and started.stderr is not None
            started.stdout.close()
            errors = started.stderr.read()
            assert (started.wait(60), errors) == (code, b"")


def test_names_that_look_like_markup_are_text(tmp_path: Path) -> None:
    """Demangled lambdas hold brackets: they are shown, neither dropped nor taken for a broken style."""
    name = "k<[lambda(int)]>[/r]"
    rows = [{"name": name, "bytes": 1000, "flops": 10, "time_us": 1e-5}]
    (tmp_path / "bench.json").write_text(json.dumps(rows), encoding="utf-8")
    shown = invoke("roofline", "--bench", str(tmp_path / "bench.json"))
    assert shown.exit_code == 0 and shown.stdout.count(name) == 2
    report_text = Path(NCU).read_text(encoding="utf-8").replace('"plain"', f'"{name}"')
    assert name in report_text
    (tmp_path / "ncu.csv").write_text(report_text, encoding="utf-8")
    shown = invoke("occupancy", "--ncu", str(tmp_path / "ncu.csv"), "--gate", "regs<=8")
    assert shown.exit_code == 1 and shown.stdout.count(name) == 2
    log = Path(PTXAS).read_text(encoding="utf-8")
    kernel = re.search(r"Compiling entry function '(\w+)'", log)
    assert kernel
    (tmp_path / "log.txt").write_text(log.replace(f"'{kernel[1]}'", f"'{name}'"), encoding="utf-8")
    shown = invoke("occupancy", str(tmp_path / "log.txt"), "--cc", "9.0", "--threads", "128", "--kernel", "lambda")
    assert shown.exit_code == 0 and name in shown.stdout
    shown = invoke("occupancy", "--diff", PTXAS, str(tmp_path / "log.txt"), "--cc", "9.0", "--threads", "128")
    assert name in shown.stdout


# --- start-up -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [False, True], ids=["tools", "pykern"])
@pytest.mark.parametrize("tool", sorted(COMMANDS))
def test_start_up_takes_at_most_300_ms(tool: str, command: bool) -> None:
    """``--help`` and a small answer; the best of five, and processor time where the machine is busy."""
    for args in (["--help"], *([ASK[tool], [*ASK[tool], "--json"]] if tool in ASK else [])):
        best = 10.0
        for _ in range(5):
            before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
            assert program(tool, *args, command=command).returncode == 0
            after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - started
            processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
            best = min(best, wall, processor)
            if best <= 0.3:
                break
        assert best <= 0.3, (tool, args, best)
