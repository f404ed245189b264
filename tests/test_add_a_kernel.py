"""docs/add_a_kernel.md, followed to the letter in an empty folder: its files, its commands, its outputs."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from click.testing import CliRunner

from pykern.cli import main

pytestmark = pytest.mark.usefixtures("own_registry")

ROOT = Path(__file__).parent.parent
DOC = (ROOT / "docs" / "add_a_kernel.md").read_text(encoding="utf-8")
EXAMPLE = ROOT / "examples" / "unit_rows"
FILES = dict(re.findall(r"^`([\w.]+)`:\n\n```\w+\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE))
SNIPPETS = [b for b in re.findall(r"^```python\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE) if b not in FILES.values()]
CONSOLE = "".join(re.findall(r"^```console\n(.*?)^```$", DOC, re.DOTALL | re.MULTILINE))
# (command, the lines shown below it)
COMMANDS = [
    (block.splitlines()[0], block.splitlines()[1:]) for block in re.split(r"^\$ ", CONSOLE, flags=re.MULTILINE) if block
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The reader's folder with the three files; the working directory and on the import path, as pytest makes it."""
    place = tmp_path_factory.mktemp("unit_rows")
    for name, text in FILES.items():
        (place / name).write_text(text)
    before = Path.cwd()
    os.chdir(place)
    sys.path.insert(0, str(place))
    yield place
    os.chdir(before)
    sys.path.remove(str(place))
    for name in ("unit_rows", "test_unit_rows"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def module(folder: Path) -> ModuleType:
    return importlib.import_module("unit_rows")


def run(line: str) -> tuple[int, str]:
    words = shlex.split(line, comments=True)
    assert words[0] == "pykern"
    done = CliRunner().invoke(main, words[1:])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.output


def squeezed(text: str) -> str:
    return " ".join(text.split())


def check_output(shown: list[str], output: str) -> None:
    """Every line the page shows is (the beginning of) a line of the output, but for spaces."""
    lines = [squeezed(line) for line in output.splitlines()]
    for line in shown:
        assert any(out.startswith(squeezed(line)) for out in lines), f"{line!r} is not in\n{output}"


def test_the_page_has_what_the_example_has() -> None:
    assert set(FILES) == {"unit_rows.cuh", "unit_rows.py", "test_unit_rows.py"}
    for name, text in FILES.items():
        assert (EXAMPLE / name).read_text(encoding="utf-8") == text, f"examples/unit_rows/{name} and the page differ"
    assert len(SNIPPETS) == 2 and len(COMMANDS) == 7


def test_the_snippets_run(module: ModuleType) -> None:
    for text in SNIPPETS:
        exec(compile(text, "add_a_kernel.md", "exec"), {})


def test_every_law(module: ModuleType) -> None:
    """The page's own test: every law on the plans of every architecture, mutants included."""
    importlib.import_module("test_unit_rows").test_laws()


@pytest.mark.parametrize(
    "number", [n for n, (line, _) in enumerate(COMMANDS) if not re.search("without|compile|occupancy", line)]
)
def test_commands_print_what_the_page_shows(number: int, module: ModuleType) -> None:
    line, shown = COMMANDS[number]
    code, output = run(line)
    check_output(shown, output)
    assert code == ("out_of_bounds" in shown[0])


@pytest.mark.nvcc
@pytest.mark.parametrize("word", ["compile", "occupancy"])
def test_what_nvcc_says(word: str, module: ModuleType) -> None:
    """Registers are the compiler's; what is checked is that the kernels compile without spills and are found."""
    ((line, shown),) = [(line, shown) for line, shown in COMMANDS if f"pykern {word}" in line]
    code, output = run(line)
    assert code == 0, output
    assert squeezed(output.replace("unit_rows.py", "")).count(shown[0].split(":")[0].split()[0])
    assert word != "compile" or "3 passed, 0 failed" in output


def test_without_the_barrier(tmp_path: Path) -> None:
    """The page's planted race, in a folder (and under a name) of its own."""
    ((line, shown),) = [(line, shown) for line, shown in COMMANDS if "without" in line]
    text = FILES["unit_rows.cuh"]
    assert text.count("  __syncthreads();\n") == 1
    (tmp_path / "unit_rows.cuh").write_text(text.replace("  __syncthreads();\n", ""))
    (tmp_path / "unit_rows.py").write_text(FILES["unit_rows.py"].replace('name="unit_rows"', 'name="unit_rows_racy"'))
    code, output = run(line.replace("unit_rows.py", str(tmp_path / "unit_rows.py")))
    check_output(shown, output)
    assert code == 1


def test_three_files_and_no_edit_make_it_an_op_of_the_package(tmp_path: Path) -> None:
    """A copy of the package with the three files where the page puts them: ``pykern.unit_rows`` is there."""
    skip = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "pykern", tmp_path / "pykern", ignore=skip)
    shutil.copytree(ROOT / "cuda_src", tmp_path / "cuda_src", ignore=skip)
    source = 'source=str(Path(__file__).with_suffix(".cuh"))'
    assert source in FILES["unit_rows.py"]
    (tmp_path / "cuda_src/ops/unit_rows.cuh").write_text(FILES["unit_rows.cuh"])
    text = FILES["unit_rows.py"].replace(source, 'source="ops/unit_rows.cuh"')
    (tmp_path / "pykern/ops/unit_rows.py").write_text(text)
    code = (
        "import sys, torch, pykern, pykern.op\n"
        "assert pykern.__file__.startswith(sys.argv[1]), pykern.__file__\n"
        "x = torch.tensor([[1.0, -4.0, 2.0]])\n"
        "y, s = pykern.unit_rows(x)\n"
        "assert s.tolist() == [4.0] and torch.equal(torch.ops.pykern.unit_rows(x)[0], y)\n"
        "assert 'unit_rows' in pykern.op.names()\n"
    )
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


WRONG = {
    "forgets that out= may lie anywhere": (" and (out is None or out.align >= 16)", "", "writes_every_output"),
    "forgets that rows may be padded": ("I64(stride)", "I64(p.n)", "agrees_with_reference"),
    "plans a kernel that cases does not reach": ("for dtype in FLOATS:", "for dtype in FLOATS[:2]:", "plans_are_few"),
    "allows any error": ("Tolerance(1.3e-7,", "Tolerance(float('inf'),", "discriminates"),
    "allows a large error": ("Tolerance(1.3e-7,", "Tolerance(0.5,", "can_fail"),
    "allows a large absolute error": ("1e-44,", "1.0,", "can_fail"),
    "allows an error less than none": ("1e-44,", "-1e-44,", "can_fail"),
    "says not why it allows an error": ('"one rounding to 24 bits"', '""', "can_fail"),
    "plants no error": ("    mutants=(", "    peers={} and (", "can_fail"),
    "plants what is no error": ('("bits = warp_max(bits);", "")', '("bits", "bits")', "can_fail"),
    "plants errors and says that there are none": ("    mutants=(", '    no_mutants="why", mutants=(', "can_fail"),
    "plants what does not compile": ('warp_max(bits);", ""', 'warp_max(bits);", "no such thing"', "mutants_are_caught"),
    "has no cases": ("for dtype in FLOATS:", "for dtype in ():", "can_fail"),
    "refuses everything": ("1 <= p.n < 1 << 30", "p.n < 0", "can_fail"),
    "compares with a constant": ("return x / s[..., None], s", "return 0 * x, 0 * s", "can_fail"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_op_breaks_its_law(what: str, folder: Path, tmp_path: Path) -> None:
    """Mistakes one makes in the Python file, each with the law that tells."""
    from pykern import op
    from pykern.errors import CheckError
    from pykern.testing.laws import Where, check_law

    old, new, law = WRONG[what]
    text = FILES["unit_rows.py"]
    assert text.count(old) == 1
    name = f"unit_rows_wrong_{list(WRONG).index(what)}"
    (tmp_path / "unit_rows.cuh").write_text(FILES["unit_rows.cuh"])
    (tmp_path / "wrong.py").write_text(
        text.replace(old, new).replace('name="unit_rows"', f'name="{name}"')
        .replace('with_suffix(".cuh")', 'with_name("unit_rows.cuh")')
    )  # fmt: skip
    wrong = op.get(str(tmp_path / "wrong.py"))
    with pytest.raises((AssertionError, CheckError)) as caught:
        check_law(wrong, law, Where("host", "90a"), 200)
    assert name in str(caught.value)


WILD = ("y + row * n, s + row, n", "y + row * n, s + (row + 1) * 100000000, n")


@pytest.mark.parametrize("planted", [False, True])
def test_a_wild_index_is_a_finding_and_no_crash(planted: bool, tmp_path: Path) -> None:
    """In the kernel, and in one of its mutants; in a process of its own, as it would take this one down."""
    kernel, op = FILES["unit_rows.cuh"], FILES["unit_rows.py"]
    assert kernel.count(WILD[0]) == 2 and op.count("    mutants=(\n") == 1
    if planted:
        op = op.replace("    mutants=(\n", f"    mutants=(\n        {WILD!r},\n")
    else:
        kernel = kernel.replace(*WILD)
    (tmp_path / "unit_rows.cuh").write_text(kernel)
    (tmp_path / "unit_rows.py").write_text(op)
    code = (
        "from unit_rows import op\n"
        "from pykern.testing.laws import Where, check_law\n"
        "for law in ('can_fail', 'mutants_are_caught'):\n"
        "    check_law(op, law, Where('host', '90a'))\n"
    )
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{tmp_path}"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == (0 if planted else 1), done.stderr[-2000:]
    assert planted or re.search(r"CheckError: .*out_of_bounds in unit_rows<\w+> at unit_rows.cuh:31", done.stderr)


def test_equal_values_show_what_random_ones_do_not() -> None:
    """argmax's last mutant takes the last of equal values: drawn with `ties` it is caught, without it passes."""
    from dataclasses import replace

    from pykern import op
    from pykern.schema import FLOATS
    from pykern.testing import sizes, tensor_spec
    from pykern.testing.laws import Where, check_law

    argmax = op.get("argmax")
    where, last = Where("host", "90a"), replace(argmax, mutants=argmax.mutants[-1:])
    check_law(last, "mutants_are_caught", where)

    def without(draw: Any) -> dict[str, Any]:
        n = draw(sizes(1, 5000, around=[1, 1024]))
        return {"x": draw(tensor_spec(draw.one_of(FLOATS), (draw(sizes(0, 4)), n)))}

    with pytest.raises(AssertionError, match="passes the reference law"):
        check_law(replace(last, draw=without), "mutants_are_caught", where)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int64", "uint8", "bool"])
def test_ties_are_in_every_row(dtype: str) -> None:
    import torch

    from pykern.op import Spec
    from pykern.testing import make_tensor

    x = make_tensor(Spec(dtype, (5, 40), "rows", fill="ties"), torch.Generator().manual_seed(0))
    for row in x:
        values, counts = row.unique(return_counts=True)
        assert len(values) > 1 and bool((counts > 1).all())
    if x.is_floating_point():
        zeros = x[x == 0]
        assert bool(zeros.signbit().any()) and not bool(zeros.signbit().all())


def test_an_op_may_say_why_it_plants_no_error(folder: Path, tmp_path: Path) -> None:
    from pykern import op
    from pykern.testing.laws import Where, check_law

    (tmp_path / "unit_rows.cuh").write_text(FILES["unit_rows.cuh"])
    text = FILES["unit_rows.py"].replace('with_suffix(".cuh")', 'with_name("unit_rows.cuh")')
    text = text.replace('name="unit_rows"', 'name="unit_rows_unplanted"')
    text = text.replace("    mutants=(", '    no_mutants="shown elsewhere", peers={} and (')
    (tmp_path / "unplanted.py").write_text(text)
    check_law(op.get(str(tmp_path / "unplanted.py")), "can_fail", Where("host", "90a"))


def test_a_kernel_that_does_not_compile_says_so_once(folder: Path, tmp_path: Path) -> None:
    """At the first law, before any example is shrunk."""
    import time

    from pykern import op
    from pykern.errors import BuildError
    from pykern.testing import check_laws
    from pykern.testing.laws import LAWS, Where, check_law

    broken = FILES["unit_rows.cuh"].replace("  __syncthreads();", "  no_such_function();")
    (tmp_path / "unit_rows.cuh").write_text(broken)
    text = FILES["unit_rows.py"].replace('with_suffix(".cuh")', 'with_name("unit_rows.cuh")')
    (tmp_path / "uncompiled.py").write_text(text.replace('name="unit_rows"', 'name="unit_rows_uncompiled"'))
    wrong = op.get(str(tmp_path / "uncompiled.py"))
    started = time.monotonic()
    with pytest.raises(BuildError, match=r"unit_rows.cuh:\d+: .*no_such_function") as caught:
        check_laws(wrong)
    assert time.monotonic() - started < 60 and not getattr(caught.value, "__notes__", [])
    for law in ("agrees_with_reference", "checker_is_silent"):
        assert law in LAWS
        with pytest.raises(BuildError, match="no_such_function") as caught:
            check_law(wrong, law, Where("host", "90a"))
        assert not getattr(caught.value, "__notes__", []), "a falsifying example was sought"


def test_what_check_laws_is_given(module: ModuleType) -> None:
    from pykern.errors import ArgumentError
    from pykern.op import Spec
    from pykern.testing import check_laws
    from pykern.testing.data import make_args
    from pykern.testing.laws import Where, check_law

    here = Where("host", "90a")
    for call, says in (
        (lambda: check_laws(None), "op: got NoneType"), (lambda: check_laws("unit_rows"), "op: got str"),
        (lambda: check_law(module.op, "nothing", here), "law: got 'nothing', allowed: can_fail"),
        (lambda: check_law(module.op, "can_fail", "host"), "where: got 'host'"),
        (lambda: check_law(module.op, "agrees_with_reference", here, 0), "examples: got 0"),
        (lambda: Where("host", "7"), "arch: got '7'"), (lambda: Where("gpu", ""), "backend: got 'gpu'"),
        (lambda: Spec("float32", (3,), "row"), "layout: got 'row', allowed: contiguous, rows"),
        (lambda: Spec("float3", (3,)), "dtype: got 'float3'"),
        (lambda: make_args(module.op, {"x": Spec("float32", (3, 4), fill="spikey")}, 0), "x: fill: got 'spikey'"),
    ):  # fmt: skip
        with pytest.raises(ArgumentError, match=f"^{says}"):
            call()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("import nothing_of_that_name\n", "line 1: ModuleNotFoundError"),
        ("x = 1\n\nop = (\n", "SyntaxError"),
        ("x = 1\n", "it binds NoneType"),
        (None, "no such file"),
    ],
)
def test_a_file_that_is_no_op_is_refused_by_name(text: str | None, says: str, tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    if text is not None:
        path.write_text(text)
    from pykern import op
    from pykern.errors import ArgumentError

    with pytest.raises(ArgumentError, match=f"broken.py.*{says}"):
        op.get(str(path))


def test_an_op_file_is_loaded_once(module: Any, folder: Path) -> None:
    from pykern import op

    assert op.get("unit_rows.py") is op.get(str(folder / "unit_rows.py")) is module.op is op.get("unit_rows")
