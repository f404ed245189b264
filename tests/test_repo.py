"""The rules of the house, kept by the repository itself. Each rule is shown to catch what it forbids."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "pykern"
LAYERS = ["leaves", "jit", "op", "ops", "graphs", "models", "top"]
LEAVES = {"__init__", "errors", "schema", "plan", "declared", "numerics"}
MAX_LINES = 800  # one reading; the aim is 400
TEXT = {
    ".py",
    ".cuh",
    ".h",
    ".cpp",
    ".md",
    ".toml",
    ".json",
    ".sh",
    ".html",
    ".css",
    ".js",
    ".yml",
    ".cfg",
    ".in",
    "",
}


def tracked() -> list[Path]:
    """Files under version control, or, in an unpacked archive, all but what builds leave behind."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode == 0 and done.stdout:
        found = [ROOT / name for name in done.stdout.split("\0") if name]
    else:
        skip = {".git", ".venv", "build", "dist", "__pycache__"}
        found = [p for p in ROOT.rglob("*") if not skip & set(p.relative_to(ROOT).parts)]
    return [p for p in found if p.is_file()]


def texts() -> Iterator[tuple[Path, str]]:
    for path in tracked():
        if path.suffix in TEXT:
            yield path, path.read_text(encoding="utf-8")


# --- Imports -------------------------------------------------------------------------------------------------


def layer_of(module: str) -> str | None:
    """The layer of ``pykern.x.y``; None for what stands beside them (analysis, testing, check)."""
    parts = module.split(".")[1:]
    first = parts[0] if parts else "__init__"
    if first in LEAVES:
        return "leaves"
    return {
        "jit": "jit", "op": "op", "bridge": "op", "launcher": "op", "ops": "ops", "quant": "ops", "graphs": "graphs",
        "models": "models", "cli": "top", "commands": "top", "__main__": "top",
    }.get(first)  # fmt: skip


def imports(source: str, module: str) -> set[str]:
    """Modules of pykern that ``source`` imports anywhere, function bodies included (TYPE_CHECKING blocks apart)."""
    found: set[str] = set()
    tree = ast.parse(source)
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join(module.split(".")[: -node.level] + ([base] if base else []))
            found.add(base)
            if base == "pykern":
                found |= {f"pykern.{a.name}" for a in node.names}
    return {m for m in found if m == "pykern" or m.startswith("pykern.")}


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


# Calls upward that happen only when something is asked for, never at import time.
LAZY = {
    ("pykern", "*"),  # the package's __getattr__
    ("pykern.op", "pykern.ops"),  # discovery
    ("pykern.op", "pykern.check"),  # a finding of the checker, raised
    ("pykern.jit.raw", "pykern.op"),
}


def import_errors(module: str, source: str) -> list[str]:
    mine = layer_of(module)
    errors = []
    for other in sorted(imports(source, module)):
        if (module, other) in LAZY or (module, "*") in LAZY:
            continue
        theirs = layer_of(other)
        if module.startswith("pykern.analysis"):
            if theirs != "leaves" and not other.startswith("pykern.analysis"):
                errors.append(f"{module} imports {other}: analysis imports leaves only")
        elif mine and theirs and LAYERS.index(theirs) > LAYERS.index(mine):
            errors.append(f"{module} ({mine}) imports {other} ({theirs})")
        elif mine == "leaves" and other.startswith(("pykern.testing", "pykern.analysis", "pykern.check")):
            errors.append(f"{module} ({mine}) imports {other}")
    return errors


def test_who_imports_whom() -> None:
    errors = []
    for path in PACKAGE.rglob("*.py"):
        errors += import_errors(module_name(path), path.read_text(encoding="utf-8"))
    assert not errors, "\n".join(errors)


def test_the_import_rule_catches() -> None:
    assert import_errors("pykern.schema", "import pykern.op")
    assert import_errors("pykern.jit.build", "def f():\n    from pykern.models import run")
    assert import_errors("pykern.analysis.roofline", "from pykern import jit")
    assert import_errors("pykern.ops.x", "from pykern.graphs import GraphPool")
    assert import_errors("pykern.models.llama", "from pykern.commands.generate import command")
    assert not import_errors(
        "pykern.models.llama", "from pykern.models.cache import Batch\nimport pykern.plan"
    )
    assert not import_errors("pykern.plan", "if TYPE_CHECKING:\n    from pykern import op")


def test_no_import_of_tests_or_tools() -> None:
    for path in [*PACKAGE.rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
            assert not [n for n in names if n.split(".")[0] in ("tests", "tools", "conftest")], path


@pytest.mark.parametrize(
    "statement", ["import pykern", "import pykern.cli", "import pykern.plan, pykern.schema, pykern.analysis"]
)
def test_no_torch_before_an_op(statement: str) -> None:
    code = f"{statement}\nimport sys\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_every_package_folder_is_a_package() -> None:
    for folder in {p.parent for p in PACKAGE.rglob("*.py")}:
        assert (folder / "__init__.py").exists(), folder


# --- Device code ---------------------------------------------------------------------------------------------

# What tells the compilers apart. core/gpu/ is only reached through target.cuh, and may ask which GPU it is for.
_MACROS = "__CUDACC__|__CUDA_ARCH__|__NVCC__|PK_HOST|PK_GPU|PK_CUDA"
BACKEND_TEST = re.compile(rf"^\s*#\s*(if|ifdef|ifndef|elif)\b.*\b({_MACROS})\b", re.MULTILINE)


def test_only_target_knows_the_backend() -> None:
    allowed = {"core/target.cuh"}
    for path in (ROOT / "cuda_src").rglob("*"):
        name = path.relative_to(ROOT / "cuda_src").as_posix()
        if path.suffix in (".cuh", ".cu", ".h", ".hpp", ".cpp") and name not in allowed:
            text = path.read_text(encoding="utf-8")
            text = re.sub("__CUDA_ARCH__", "", text) if name.startswith("core/gpu/") else text
            found = BACKEND_TEST.search(text)
            assert not found, f"{name}: {found.group().strip() if found else ''}"
    assert BACKEND_TEST.search("#if defined(__CUDACC__) && X") and not BACKEND_TEST.search("#ifdef PK_CHECK")


def test_ops_include_core_only() -> None:
    for path in (ROOT / "cuda_src" / "ops").glob("*.cuh"):
        for line in path.read_text(encoding="utf-8").splitlines():
            found = re.match(r'\s*#\s*include\s*(["<])([^">]+)', line)
            if found:
                kind, name = found.groups()
                standard = kind == "<" and name in (
                    "cstdint",
                    "cstddef",
                    "type_traits",
                    "limits",
                    "cmath",
                    "utility",
                )
                assert standard or name.startswith(("core/", "ops/")), f"{path.name}: {line.strip()}"


def test_device_code_never_sees_torch() -> None:
    for path in (ROOT / "cuda_src").rglob("*"):
        if path.suffix in (".cuh", ".cu", ".h", ".hpp", ".cpp"):
            text = path.read_text(encoding="utf-8")
            assert not re.search(r"#\s*include\s*[<\"](torch|ATen|c10|Python\.h)", text), path


# --- Files ---------------------------------------------------------------------------------------------------


def op_modules() -> list[Path]:
    return sorted(p for p in (PACKAGE / "ops").glob("*.py") if not p.name.startswith("_"))


@pytest.mark.parametrize("path", op_modules(), ids=lambda p: p.stem)
def test_an_op_is_three_files(path: Path) -> None:
    """Its module, a source, and a test of its own algebra, which may be shared by a family."""
    import importlib

    op = importlib.import_module(f"pykern.ops.{path.stem}").op
    assert op.name == path.stem
    assert (ROOT / "cuda_src" / op.source).is_file(), op.source
    tests = [p for p in (ROOT / "tests" / "ops").glob("test_*.py")]
    named = [
        p
        for p in tests
        if re.search(rf"\b{path.stem}\b", p.stem.removeprefix("test_") + "\n" + p.read_text())
    ]
    assert named, f"no file in tests/ops tests {path.stem}"


def test_files_are_one_reading_long() -> None:
    long = {}
    for path, text in texts():
        if path.suffix in (".py", ".cuh", ".h", ".cpp"):
            lines = text.count("\n")
            if lines > MAX_LINES:
                long[path.relative_to(ROOT).as_posix()] = lines
    assert not long, long


def test_lines_are_short() -> None:
    for path, text in texts():
        if path.suffix in (".cuh", ".h", ".cpp", ".py"):
            for n, line in enumerate(text.splitlines(), 1):
                assert len(line) <= 120, f"{path.relative_to(ROOT)}:{n}: {len(line)} characters"


# Absolute paths of one machine, and words that have no place in what people read.
_PARTS = (
    "/wo" + "rk/",
    "/ho" + "me/",
    "/Us" + "ers/",
    "sha" + "red/",
    "hel" + "per session",
    "this se" + "ssion",
)
_UNFINISHED = ("TO" + "DO", "FIX" + "ME", "XX" + "X:")


def words_found(text: str) -> list[str]:
    return [w for w in (*_PARTS, *_UNFINISHED) if w in text]


def test_no_machine_paths_or_unfinished_work() -> None:
    for path, text in texts():
        if "data" not in path.relative_to(ROOT).parts:
            assert not words_found(text), f"{path.relative_to(ROOT)}: {words_found(text)}"
    assert words_found("see /wo" + "rk/x") and words_found("# TO" + "DO: later")


def test_no_large_files() -> None:
    for path in tracked():
        assert path.stat().st_size <= 2_000_000, path


def test_versions_agree() -> None:
    import pykern

    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## (\d+\.\d+\.\d+)", changes, re.MULTILINE)
    assert newest and newest.group(1) == pykern.__version__
    assert 'attr = "pykern.__version__"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert re.fullmatch(r"\d+\.\d+\.\d+", pykern.__version__)


def test_licence_is_apache_2() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert (
        "Apache License" in text
        and "Version 2.0, January 2004" in text
        and "END OF TERMS AND CONDITIONS" in text
    )


def test_every_command_can_say_what_it_does() -> None:
    """By file name, as the command group finds them."""
    import importlib
    import pkgutil

    import click

    from pykern import commands

    for module in pkgutil.iter_modules(commands.__path__):
        if not module.name.startswith("_"):
            command = importlib.import_module(f"pykern.commands.{module.name}").command
            assert isinstance(command, click.Command) and command.help, module.name


def test_links_in_documents_lead_somewhere() -> None:
    for path, text in texts():
        if path.suffix == ".md":
            text = re.sub(r"^```.*?^```|`[^`\n]*`|^ {4}.*?$", "", text, flags=re.DOTALL | re.MULTILINE)
            for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
                assert (path.parent / link).exists(), f"{path.relative_to(ROOT)}: {link}"
