"""What the analysis programs share: common options, the JSONL batch driver, output, pictures, exit codes.

Exit codes: 0 the answer was given (or the gate holds), 1 the answer is "no" (a gate failed, a diff got
worse), 2 the input was bad. click, rich and the plotting libraries are imported only when they are used, so that a
program starts in well under 0.3 s.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from pykern.analysis._files import read_lines
from pykern.errors import ArgumentError, PykernError

if TYPE_CHECKING:
    from rich.console import Console

OK, FAILED, BAD_INPUT = 0, 1, 2
PLOT_SUFFIXES = ("png", "svg", "html")

F = TypeVar("F", bound=Callable[..., Any])


def common_options(function: F) -> F:
    """Add ``--json``, ``--batch``, ``--plot`` to a click command: keywords ``as_json``, ``batch``, ``plot``."""
    import click

    for option in (
        click.option("--plot", metavar="FILE", help="Write the picture to FILE (.png, .svg or .html)."),
        click.option("--batch", metavar="FILE.jsonl", help="One JSON object a line in, one out; - is stdin."),
        click.option("--json", "as_json", is_flag=True, help="Print JSON instead of text."),
    ):
        function = option(function)
    return function


def reporting_errors(function: F) -> F:
    """Turn a :class:`PykernError` or an unreadable file into one line on stderr and exit code 2.

    Options given as the empty string are refused too: an unset variable in a script must not switch a gate off. A
    reader that goes away (``| head``) changes no exit code.
    """
    import functools

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        _prepare_streams()
        try:
            try:
                _refuse_empty()
                result = function(*args, **kwargs)
            finally:
                _flush()
        except PykernError as error:
            fail(error)
        except BrokenPipeError:  # of a batch: nobody reads on, so nothing is left to answer
            drop_stdout()
            sys.exit(OK)
        except OSError as error:
            fail(f"{error.filename or 'cannot write'}: {error.strerror or error}")
        return result

    return wrapper  # type: ignore[return-value]


def _prepare_streams() -> None:
    """A closed stream takes nothing, and a character that its encoding lacks is escaped: neither is a crash."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _refuse_empty() -> None:
    import click
    from click.core import ParameterSource

    context = click.get_current_context(silent=True)
    for param in context.command.params if context else ():
        assert context is not None and param.name is not None
        value = context.params.get(param.name)
        if context.get_parameter_source(param.name) is ParameterSource.COMMANDLINE and (
            value == "" or (isinstance(value, tuple) and "" in value)
        ):
            name = max(param.opts, key=len) if isinstance(param, click.Option) else param.human_readable_name
            raise ArgumentError(name, "nothing", "a value")


def _flush() -> None:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_stdout()


def drop_stdout() -> None:
    """Send what is still to be written nowhere: the reader of stdout is gone, the exit code still counts."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)


def only_with(mode: str, options: Mapping[str, object]) -> None:
    """Refuse options that ``mode`` would ignore: ``options`` maps names to values, unset ones are None or false."""
    given = [name for name, value in options.items() if value is not None and value is not False and value != ()]
    if given:
        raise ArgumentError(", ".join(given), "a value", f"nothing together with {mode}, which would ignore it")


def fail(message: object) -> NoReturn:
    """Print ``error: message`` on stderr and leave with exit code 2."""
    print(f"error: {message}", file=sys.stderr)
    sys.exit(BAD_INPUT)


def run_tool(command: Any) -> NoReturn:
    """Run a click ``command`` as a program of ``tools/``: its own name, its own exit codes."""
    command.main(prog_name=Path(sys.argv[0]).name)
    sys.exit(OK)


# --- JSON ------------------------------------------------------------------------------------------------


def to_json(value: object, *, indent: int | None = None) -> str:
    """Strict JSON text: NaN and infinities become null, which every reader accepts."""
    return json.dumps(_finite(value), indent=indent, separators=(",", ":") if indent is None else None)


def _finite(value: object) -> object:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def print_json(value: object) -> None:
    """Print one indented JSON document."""
    try:
        print(to_json(value, indent=2))
    except BrokenPipeError:
        drop_stdout()


def run_batch(path: str, answer: Callable[[dict[str, Any]], object]) -> int:
    """Answer every line of a JSONL file in order, one JSON line each; returns the exit code.

    A line that is no JSON object, or that ``answer`` refuses with a :class:`PykernError`, is answered by
    ``{"error": ..., "line": N}`` and named on stderr; the rest is still answered and the exit code is 2.
    Blank lines are skipped.
    """
    code = OK
    for number, text in read_lines(path):
        if not text.strip():
            continue
        try:
            print(to_json(answer(_parse_object(text))))
        except PykernError as error:
            code = BAD_INPUT
            print(to_json({"error": str(error), "line": number}))
            print(f"error: {path}:{number}: {error}", file=sys.stderr)
    return code


def _parse_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ArgumentError("line", repr(text.strip()[:60]), f"one JSON object ({error})") from None
    if not isinstance(value, dict):
        raise ArgumentError("line", repr(text.strip()[:60]), "one JSON object")
    return value


def field(row: dict[str, Any], name: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
    """Field ``name`` of a batch line, of type ``kind`` (a bool is no int); required unless ``default`` is given."""
    if name not in row:
        if default is ...:
            raise ArgumentError(name, "nothing", f"a value of type {_kind_name(kind)}; it is required")
        return default
    value = row[name]
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ArgumentError(name, repr(value), f"a value of type {_kind_name(kind)}")
    return value


def _kind_name(kind: type | tuple[type, ...]) -> str:
    return " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))


# --- text and pictures -----------------------------------------------------------------------------------


def console() -> Console:
    """A rich console on stdout; 120 columns when stdout is no terminal, so that a pipe is reproducible."""
    from rich.console import Console

    class Quiet(Console):
        def on_broken_pipe(self) -> None:
            drop_stdout()  # rich would leave with 1, which here means that a gate failed

    return Quiet(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else 120)


def plot_format(path: str) -> str:
    """``png``, ``svg`` or ``html`` by the suffix of ``path``; anything else, and a place where no file can be made, is
    refused before any work is done."""
    suffix = Path(path).suffix.lower().lstrip(".")
    if suffix not in PLOT_SUFFIXES:
        raise ArgumentError("--plot", path, "a file name ending in .png, .svg or .html")
    folder = Path(path).parent
    why = "it is a folder" if Path(path).is_dir() else ""
    if not os.access(folder, os.W_OK):
        why = f"{folder} is {'read-only' if folder.is_dir() else 'no folder'}"
    if why:
        raise ArgumentError("--plot", path, f"a file that can be written ({why})")
    return suffix


def save_plot(path: str, *, matplotlib: Callable[[], Any], plotly: Callable[[], Any]) -> None:
    """Write a picture: the callables build a matplotlib Figure (png, svg) or a plotly Figure (html, no network).

    Build the matplotlib figure with ``matplotlib.figure.Figure``, not pyplot: no display, no global state.
    """
    kind = plot_format(path)
    try:
        if kind == "html":
            plotly().write_html(path, include_plotlyjs=True, full_html=True)
        else:
            matplotlib().savefig(path, format=kind, dpi=144)
    except ImportError as error:
        need = "plotly" if kind == "html" else "matplotlib"
        allowed = f"a format whose library is installed (pip install {need}; {error})"
        raise ArgumentError("--plot", path, allowed) from None
