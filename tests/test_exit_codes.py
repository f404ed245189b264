"""Exit codes of every command: 0 the answer is yes, 1 it is no, 2 there is none; and options that do not apply."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pykern.cli import main

MISSING = "nowhere/at.all"
# Of every command: input that cannot be answered, and what the one line of the answer holds.
BAD: dict[str, list[tuple[list[str], str]]] = {
    "bench": [
        (["softmox"], "op: got 'softmox'"),
        (["softmax", "--repeats", "many"], "--repeats"),
        (["softmax", "--repeats", "0"], "--repeats"),
    ],
    "cache": [(["throw"], "throw"), (["show", "--nope"], "--nope")],
    "check": [
        (["softmox"], "op: got 'softmox'"),
        (["softmax", "--seeds", "0"], "--seeds: got 0"),
        (["softmax", "--shape", "0x10"], "with a dimension of 0 there is nothing to compute, and nothing ran"),
        (["linear", "--shape", "x=0x8,w=8x8", "--json"], "with a dimension of 0 there is nothing to compute"),
        (["/dev/null"], "a kernel's .cuh file, too"),
    ],
    "coalescing": [([MISSING], MISSING), (["--stride", "x"], "stride")],
    "compile": [
        (["softmox"], "op: got 'softmox'"),
        (["--arch", "99"], "--arch: got '99'"),
        (["--jobs", "-1"], "jobs"),
        (["cuda_src/ops/norm.cuh"], "an op's name; this file belongs to layer_norm, rms_norm"),
    ],
    "doctor": [(["--nope"], "--nope")],
    "explain": [
        (["softmox"], "op: got 'softmox', allowed: softmax, apply_penalties, "),
        (["softmax", "--arch", "9"], "--arch: got '9'"),
        (["softmax.cuh"], "an op's name; this file belongs to softmax"),
        (["linear_epilogue.cuh"], "this file belongs to gated_linear, linear, quant_linear"),
        (["mine.cuh"], "an op's name, or the .py file that binds one"),
        (["softmax", "--shape", "4x4", "--set", "log"], "--set: got 'log', allowed: log=VALUE"),
    ],
    "generate": [
        (["", "--prompt", "x"], "model: got ''"),
        ([MISSING, "--prompt", "x"], f"model: got '{MISSING}'"),
        (["smollm2"], "--prompt"),
        (["smollm2", "--prompt", ""], "--prompt: got nothing, allowed: a text"),
        (["/dev/null", "--prompt", "x"], "a device or pipe"),
    ],
    "occupancy": [
        (["softmox"], "softmox"),
        (["softmax", "--shape", "0x8"], "--shape: got 0x8, allowed: sizes at which a kernel is launched"),
        (["softmax", "--shape", "x=4x4,y=3"], "--shape: got y=3, allowed: tensors, sizes and scalars of"),
        (["softmax", "--shape", "x=4x4,x=5x5"], "one value for x"),
        (["softmax", "--shape", "n=3x4,m=2"], "--shape: got n=3x4"),
        (["softmax", "--shape", f"{10**20}x4"], "below 2**63"),
        (["--cc", "9.0", "--threads", "32", "--regs", "8", "--plot", "nowhere/x.png"], "nowhere is no folder"),
    ],
    "report": [(["--nope"], "--nope")],
    "roofline": [(["softmox"], "softmox")],
    "traffic": [(["softmox"], "softmox")],
    "warmup": [
        (["softmox"], "op: got 'softmox'"),
        (["--arch", "99"], "--arch: got '99'"),
        (["--arch", "80", "--device", "cpu"], "--arch: got '80'"),
        (["--arch", "80", "--check"], "--check: got True"),
        (["--device", "tpu"], "--device"),
    ],
}


def run(*args: str) -> Any:
    done = CliRunner().invoke(main, list(args))
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def test_every_command_is_here() -> None:
    import click

    assert set(BAD) == set(main.list_commands(click.Context(main)))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("name", "args", "says"), [(n, *case) for n, cases in BAD.items() for case in cases])
def test_bad_input_exits_with_2(name: str, args: list[str], says: str) -> None:
    done = run(name, *args)
    assert done.exit_code == 2, done.output
    assert says in done.stderr and not done.stdout, done.output
    assert "Traceback" not in done.output


def test_no_command_and_an_unknown_one() -> None:
    assert run("nothing").exit_code == 2 and run("--nope").exit_code == 2
    assert run("--help").exit_code == 0 and run("--version").exit_code == 0
    assert "No such command 'explan'. (Did you mean 'explain'?)" in run("explan").stderr


def test_help_says_of_each_command_what_it_says_itself() -> None:
    """The table that spares ``pykern --help`` every import."""
    import click

    from pykern import commands

    group: Any = main
    context = click.Context(group)
    own = {name: group.get_command(context, name).short_help for name in group.list_commands(context)}
    assert commands.SHORT_HELP == own
    shown = " ".join(run("--help").stdout.split())
    assert all(f"{name} {text}" in shown for name, text in own.items()), shown


def test_a_command_that_the_table_lacks_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    from pykern import commands

    text = commands.SHORT_HELP["cache"]
    monkeypatch.delitem(commands.SHORT_HELP, "cache")
    assert text in run("--help").stdout


def test_help_imports_what_click_does_and_little_more() -> None:
    script = (
        "import sys\n"
        "from pykern.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print(*(name for name in sys.modules if name.partition('.')[0] in ('pykern', 'torch', 'numpy', 'rich')),"
        " file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("Usage: "), done.stderr
    needed = {"", ".cli", ".commands", ".analysis", ".analysis._cli", ".analysis._files", ".errors"}
    assert set(done.stderr.split()) == {f"pykern{name}" for name in needed}


def program(*args: str, shell: str = "", **env: str) -> tuple[int, str]:
    """(exit code, stderr) of ``pykern args`` as a process, with ``shell`` after it."""
    line = f"{sys.executable} -m pykern {' '.join(args)} {shell}; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, **env}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, env=environment)
    return done.returncode, done.stderr


@pytest.mark.parametrize(
    "args", [["--help"], ["explain", "--help"], ["explain", "linear"], ["cache", "show"]], ids=" ".join
)
def test_streams_that_take_nothing(args: list[str]) -> None:
    """A reader that goes away, a closed stdout or stderr, a full disk."""
    assert program(*args, shell="| true") == (0, "")
    assert program(*args, shell=">&-") == (0, "")
    assert program(*args, shell="2>&-") == (0, "")
    if os.path.exists("/dev/full"):
        assert program(*args, shell=">/dev/full") == (2, "error: cannot write: No space left on device\n")


def test_a_warning_is_one_line_without_our_source(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    code, text = program("cache", "show", PYKERN_CACHE=str(tmp_path / "file" / "x"))
    assert code == 0 and text.startswith("warning: pykern: the cache folder") and text.count("\n") == 1, text


def test_settings_that_are_none_are_refused_by_name() -> None:
    for name, value, command in (
        ("PYKERN_JOBS", "x", ["compile", "softmax", "--arch", "80"]),
        ("PYKERN_JOBS", "0", ["warmup", "softmax", "--device", "cpu"]),
        ("PYKERN_CACHE", "~nobody-of-that-name", ["cache", "show"]),
    ):
        code, text = program(*command, **{name: value})
        assert code == 2 and text.startswith(f"error: {name}: got '{value}', allowed: "), text


def test_a_kernel_that_spills_or_does_not_compile_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from pykern.errors import BuildError, ToolchainError
    from pykern.jit import build, resources

    def made(registers: int = 32, spills: int = 0) -> Any:
        def compile_only(source: str, kernel: str, arch: str) -> Any:
            return resources.Resources(registers=registers, spills=spills, local_bytes=0, smem=0)

        return compile_only

    def failing(error: Exception) -> Any:
        def compile_only(source: str, kernel: str, arch: str) -> Any:
            raise error

        return compile_only

    monkeypatch.setattr(build, "compile_only", failing(BuildError("k: v.cu:1: no")))
    assert run("compile", "softmax", "--arch", "80").exit_code == 1
    assert run("warmup", "softmax", "--arch", "80").exit_code == 1
    monkeypatch.setattr(build, "compile_only", failing(ToolchainError("no nvcc")))
    done = run("compile", "softmax", "--arch", "80")
    assert done.exit_code == 2 and "no nvcc" in done.stderr


def test_memory_that_cannot_be_had_exits_with_2(monkeypatch: pytest.MonkeyPatch) -> None:
    from pykern.models import run as module

    def fail(*args: Any, **options: Any) -> Any:
        raise MemoryError("of 3 TB")

    monkeypatch.setattr(module, "run", fail)
    done = run("generate", "smollm2", "--prompt", "x")
    assert done.exit_code == 2 and done.stderr == "error: out of memory: of 3 TB\n"


# ---- options that do not apply are refused, not ignored


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["explain", "softmax", "--shape", "4x4", "--dtype", "int8"], "--dtype: got 'int8', allowed: float32, "),
        (["explain", "softmax", "--shape", "4x4", "--dtype", "int3"], "dtype: got 'int3'"),
        (["explain", "softmax", "--dtype", "fp32"], "--shape: got None"),
        (["explain", "softmax", "--set", "log=1"], "--shape: got None"),
        (["explain", "softmax", "--shape", "x=4x4,x=5x5"], "one shape for x"),
        (["explain", "softmax", "--shape", "99999999999999999999"], "--shape: got '99999999999999999999'"),
        (["explain", "softmax", "--shape", "-3x4"], "--shape: got '-3x4'"),
        (["explain", "softmax", "--shape", "4x4", "--set", "log"], "--set: got 'log'"),
        (["explain", "softmax", "--shape", "4x4", "--set", "log=1", "--set", "log=0"], "one value for log"),
        (["explain", "rms_norm", "--shape", "4x4,4", "--set", "eps=-1"], "--set eps: got '-1', allowed: >= 0"),
        (["explain", "rms_norm", "--shape", "4x4,4", "--set", "eps=nan"], "--set eps: got 'nan'"),
        (["explain", "linear", "--shape", "4x8,8x8", "--set", "activation=silly"], "--set activation: got 'silly'"),
        (["explain", "attention", "--shape", "4x1x8,4x1x8,4x1x8", "--set", f"window={10**30}"], "a 64-bit int"),
        (["explain", "quant_linear", "--shape", "x=4x8,planes=3x4"], "none for planes, a list of tensors"),
        (["explain", "softmax", "--shape", ""], "--shape: got ''"),
        (["explain", "softmax", "--shape", "4x4", "--dtype", ""], "dtype: got ''"),
        (["check", "softmax", "--shape", ""], "--shape: got ''"),
        (["check", "softmax", "--shape", "4x4", "--dtype", ""], "dtype: got ''"),
        (["check", "softmax", "--arch", ""], "arch: got ''"),
        (["check", "attention", "--shape", "q=4x2x16,k=8x2x16,v=8x2x16"], "arguments hang together: leave --shape out"),
        (["check", "softmax", "--seeds", "9999999999999999999999"], "--seeds: got 9999999999999999999999"),
        (["check", "softmax", "--dtype", "bf16"], "--shape: got None"),
        (["check", "softmax", "--shape", "4x4", "--dtype", "int8"], "--dtype: got 'int8'"),
        (["check", "softmax", "--grid", "2"], "--grid: got 2, allowed: none for an op"),
        (["check", "softmax", "--block", "32"], "--block: got 32, allowed: none for an op"),
        (["check", "softmax", "--smem", "0"], "--smem: got 0, allowed: none for an op"),
        (["check", "softmax", "--kernel", "k"], "--kernel: got k, allowed: none for an op"),
        (["check", "softmax", "--arg", "f32[4]"], "--arg: got f32[4], allowed: none for an op"),
        (["check", "k.cuh", "--shape", "4"], "--shape: got 4, allowed: none for a file"),
        (["check", "k.cuh", "--dtype", "fp32"], "--dtype: got fp32, allowed: none for a file"),
        (["check", "k.cuh", "--set", "a=1"], "--set: got a=1, allowed: none for a file"),
        (["check", "k.cuh", "--arch", "80"], "--arch: got 80, allowed: none for a file"),
        (["check", "softmax", "--shape", "100000x100000"], "--shape: got 80,000,000,000 bytes of tensors"),
    ],
)
def test_options_that_do_not_apply_are_refused(args: list[str], says: str) -> None:
    done = run(*args)
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.output


def test_a_dtype_that_some_arguments_may_have_is_taken() -> None:
    done = run("explain", "rope", "--shape", "4x2x64,4,8x64", "--dtype", "fp16")
    assert done.exit_code == 0 and "float16" in done.output, done.output


def test_check_refuses_large_arguments(tmp_path: Path) -> None:
    path = tmp_path / "k.cuh"
    path.write_text("__global__ void k(float* x) {}\n")
    done = run("check", str(path), "--arg", "f32[1000000x1000000]")
    assert done.exit_code == 2 and "--arg f32[1000000x1000000]: got 4,000,000,000,000 bytes" in done.stderr


ONCE = {
    "check": ["softmax", "--shape", "4x8", "--shape", "4x9"],
    "coalescing": ["--stride", "1", "--stride", "2"],
    "explain": ["linear", "--shape", "x=1x64", "--shape", "w=8x64"],
    "generate": ["smollm2", "--prompt", "a", "--prompt", "b"],
    "occupancy": ["--cc", "9.0", "--threads", "128", "--threads", "256", "--regs", "32"],
    "roofline": ["--model", "llama-8b", "--batch", "1", "--batch", "2"],
    "traffic": ["mlp", "--gpu", "gb10", "--gpu", "h200"],
}


@pytest.mark.parametrize("name", ONCE)
def test_an_option_given_twice_is_refused(name: str) -> None:
    """click alone would take the last value."""
    done = CliRunner().invoke(main, [name, *ONCE[name]])
    assert done.exit_code == 2, done.output
    assert "is given 2 times, allowed: once" in done.output


def test_options_that_collect_and_flags_may_come_again() -> None:
    done = CliRunner().invoke(main, ["explain", "softmax", "--shape", "4x8", "--set", "log=true", "--json", "--json"])
    assert done.exit_code == 0, done.output
