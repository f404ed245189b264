"""The ``__global__`` functions of a source text: names with their namespaces, template parameters, parameter lists.

Not a C++ parser and no preprocessor: it knows the shapes that kernels have. Conditionals are followed where a ``-D``
flag, a ``#define`` of the text or a number decides them; elsewhere both sides are read. What it takes a parameter list
for is held against the compiler's view when the kernel is built (``core/raw.cuh``), so a wrong reading is an error and
never a wrong call.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

_QUIET = re.compile(
    r'R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)"|//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])\'',
    re.DOTALL,
)


def strip_comments(source: str) -> str:
    """Source without comments and without the contents of literals, line by line as it was."""

    def blank(match: re.Match[str]) -> str:
        text = match[0]
        lines = "\n" * text.count("\n")
        return f'""{lines}' if text[0] in 'R"' else f"' '{lines}" if text[0] == "'" else " " + lines

    return _QUIET.sub(blank, source)


def unclosed(source: str) -> tuple[int, int] | None:
    """(line of the outermost ``{`` that is never closed, the last line of the text), None where braces balance."""
    open_at: list[int] = []
    for number, line in enumerate(strip_comments(source).splitlines(), 1):
        for char in line:
            if char == "{":
                open_at.append(number)
            elif char == "}" and open_at:
                open_at.pop()
    return (open_at[0], last_line(source)) if open_at else None


def last_line(source: str) -> int:
    """The number of the last line that holds anything."""
    return max(1, len(source.rstrip().splitlines()))


def split_arguments(text: str) -> list[str]:
    """``"a, b<c, d>, (e, f)"`` at its top-level commas."""
    parts, depth, current = [], 0, ""
    for char in text:
        depth += char in "<([{"
        depth -= char in ">)]}"
        if char == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += char
    parts.append(current.strip())
    return [part for part in parts if part]


def _balanced(text: str, start: int, pair: str = "()") -> int:
    """Index just after the bracket that closes the one at ``start``; -1 where it is never closed."""
    depth = 0
    for index in range(start, len(text)):
        depth += text[index] == pair[0]
        depth -= text[index] == pair[1]
        if depth == 0:
            return index + 1
    return -1


_QUALIFIERS = re.compile(r"\b(const|volatile|__restrict__|__restrict|__grid_constant__)\b")


@dataclass(frozen=True)
class Declaration:
    """A ``__global__`` function: its name from outside all namespaces, its template parameter names (with defaults, or
    None), its raw parameters, and the names of types that the text gives to other types."""

    name: str
    template: tuple[tuple[str, str | None], ...]
    parameters: tuple[str, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    defined: bool = True

    def shape(self) -> tuple[object, ...]:
        """What two declarations of one function have in common, whatever they call their parameters."""
        places = {name: f"${index}" for index, (name, _) in enumerate(self.template)}
        kinds = []
        for text in self.parameters:
            text = _QUALIFIERS.sub(" ", text.partition("=")[0])
            text = re.sub(r"(?:(?<=[\s*])[A-Za-z_]\w*)?\s*\[[^\]]*\]\s*$", "*", text)
            words = re.findall(r"\w+|[^\w\s]", substitute(text, dict(self.aliases) | places))
            # the last word is the parameter's name, if a type stands before it
            named = len(words) > 1 and re.match(r"\w", words[-1]) and words[-2] not in ("::", ":")
            kinds.append(tuple(words[:-1] if named and words[-1] not in TYPE_WORDS else words))
        return (len(self.template), tuple(kinds))


TYPE_WORDS = frozenset({"int", "long", "short", "char", "unsigned", "signed", "float", "double", "bool"})


def substitute(text: str, values: dict[str, str]) -> str:
    """``text`` with whole words replaced."""
    return re.sub(r"(?<![\w:])[A-Za-z_]\w*", lambda m: values.get(m[0], m[0]), text) if values else text


def expand(text: str, values: dict[str, str]) -> str:
    """:func:`substitute`, and what stands in for a word too, up to a depth at which it must go in circles."""
    for _ in range(8):
        text, before = substitute(text, values), text
        if text == before or len(text) > 10_000:
            break
    return text


# ---------------------------------------------------------------- conditionals and macros

_DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(\w+)[ \t]*(.*)$")
_MACRO = re.compile(r"^([A-Za-z_]\w*)(\(?)(.*)$")


def _decided(word: str, text: str, macros: dict[str, str], foreign: bool) -> bool | None:
    """Whether the branch of an ``#if`` is taken; None where only the compiler knows."""
    if word in ("ifdef", "ifndef"):
        text = f"{'!' if word == 'ifndef' else ''}defined({text.strip()})"
    found = re.fullmatch(r"\s*(!?)\s*defined\s*\(?\s*([A-Za-z_]\w*)\s*\)?\s*", text)
    if found:
        name = found[2]
        if name not in macros and (foreign or name.startswith(("_", "PK_"))):
            return None
        return (name in macros) != bool(found[1])
    value = macros.get(text.strip(), text).strip()
    return bool(int(value)) if re.fullmatch(r"\d{1,9}", value) else None


def _active(source: str, defines: Sequence[str]) -> tuple[str, dict[str, str]]:
    """(text without directives and without the branches that are off, object-like macros)."""
    macros = {name: value or "1" for name, _, value in (text.partition("=") for text in defines)}
    foreign = bool(re.search(r'^[ \t]*#[ \t]*include[ \t]*["<](?!core/)', source, re.MULTILINE))
    kept: list[str] = []
    stack: list[tuple[bool, bool | None]] = []  # of each open #if: is this branch read, was one surely taken
    for line in source.replace("\\\n", " ").splitlines():
        directive = _DIRECTIVE.match(line)
        reading = all(read for read, _ in stack)
        if directive is None:
            if reading:
                kept.append(line)
            continue
        word, rest = directive.groups()
        if word in ("if", "ifdef", "ifndef"):
            on = _decided(word, rest, macros, foreign)
            stack.append((on is not False, on))
        elif word in ("elif", "else") and stack:
            taken = stack[-1][1]
            on = True if word == "else" else _decided("if", rest, macros, foreign)
            stack[-1] = (False, True) if taken else (on is not False, on if taken is False else taken)
        elif word == "endif" and stack:
            stack.pop()
        elif word == "define" and reading and (macro := _MACRO.match(rest)) and not macro[2]:
            macros[macro[1]] = macro[3].strip()
        elif word == "undef" and reading:
            macros.pop(rest.strip(), None)
    return "\n".join(kept), macros


# ---------------------------------------------------------------- declarations

_ATTRIBUTES = {"__launch_bounds__", "__cluster_dims__", "__maxnreg__", "__block_size__", "__attribute__", "alignas"}


def declarations(source: str, defines: Sequence[str] = ()) -> dict[str, tuple[Declaration, ...]]:
    """The ``__global__`` functions of ``source`` by name, as seen from outside all namespaces.

    More than one for a name: an overloaded one. ``defines``: what ``-D`` flags define, as ``"N"`` or ``"N=4"``.
    """
    text, macros = _active(strip_comments(source), defines)
    found: dict[str, list[Declaration]] = {}
    for made in _scan(text, macros):
        same = found.setdefault(made.name, [])
        twin = next((n for n, other in enumerate(same) if other.shape() == made.shape()), None)
        if twin is None:
            same.append(made)
        else:
            same[twin] = _merged(same[twin], made)
    return {name: tuple(several) for name, several in found.items()}


def _merged(first: Declaration, second: Declaration) -> Declaration:
    """A forward declaration and its definition, whichever comes first: names of the one, defaults of either."""
    chosen, other = (first, second) if first.defined else (second, first)
    template = tuple((n, d if d is not None else e) for (n, d), (_, e) in zip(chosen.template, other.template))
    return replace(chosen, template=template)


def _scan(text: str, macros: dict[str, str]) -> Iterator[Declaration]:
    aliases: dict[str, str] = {}
    markers = "|".join(["__global__", *(name for name, value in macros.items() if "__global__" in value)])
    token = re.compile(
        rf"(?P<inline>\binline\s+)?\bnamespace\b(?P<namespace>[^;{{}}()=]*)\{{"
        r"|\b(?:struct|class|union)\s+(?P<class>[A-Za-z_]\w*)[^;{}()=<>]*\{"
        r"|\benum\b(?:\s+(?:class|struct)\b)?\s*(?P<enum>[A-Za-z_]\w*)?\s*(?::(?P<base>[\w:\s]+))?\{"
        r"|\busing\s+(?P<alias>[A-Za-z_]\w*)\s*=\s*(?P<value>[^;{}]+);"
        r"|\btypedef\s+(?P<old>[^;{}()]+?[\s*])(?P<new>[A-Za-z_]\w*)\s*;"
        rf"|(?P<kernel>\b(?:{markers})\b)|(?P<open>\{{)|(?P<close>\}})"
    )
    scopes: list[str | None] = []  # None: a body or another brace, in which no kernel stands
    position = 0
    while found := token.search(text, position):
        position = found.end()
        if found["namespace"] is not None:
            name = "::".join(re.findall(r"[A-Za-z_]\w*", re.sub(r"\[\[.*?\]\]", "", found["namespace"])))
            scopes.append("" if found["inline"] else name)
        elif found["class"]:
            scopes.append(found["class"])
        elif found["close"]:
            if scopes:
                scopes.pop()
        elif found["kernel"]:
            made = _declaration(text, found.start(), found.end(), [name for name in scopes if name], aliases, macros)
            if made is not None:
                yield made
        elif found["alias"] or found["new"]:
            is_template = text[: found.start()].rstrip().endswith(">")
            if None not in scopes and not is_template:
                aliases[found["alias"] or found["new"]] = (found["value"] or found["old"]).strip()
        else:
            if found["enum"] and None not in scopes:
                aliases[found["enum"]] = (found["base"] or "int").strip()
            linkage = found["open"] and text[: found.start()].rstrip().endswith('extern ""')
            scopes.append("" if linkage else None)


def _declaration(
    text: str, start: int, end: int, scopes: Sequence[str], aliases: dict[str, str], macros: dict[str, str]
) -> Declaration | None:
    """The kernel whose ``__global__`` stands in ``text[start:end]``; None where there is none, or a specialisation."""
    index, name, opening = end, "", -1
    for token in re.compile(r"[A-Za-z_]\w*|[(;{<]").finditer(text, index):
        if token.start() < index:
            continue
        if token[0] == "(" and name in _ATTRIBUTES:
            index = _balanced(text, token.start())
            name = ""
            if index < 0:
                return None
        elif token[0] == "(":
            opening = token.start()
            break
        elif token[0] in ";{<":
            return None
        else:
            name = token[0]
    closing = _balanced(text, opening) if opening >= 0 else -1
    if closing < 0 or not name:
        return None
    parameters = tuple(split_arguments(expand(text[opening + 1 : closing - 1], macros)))
    template = _template_before(text, start)
    return Declaration(
        "::".join([*scopes, name]),
        template,
        () if parameters == ("void",) else parameters,
        tuple(sorted((key, value) for key, value in aliases.items() if key not in dict(template))),
        text[closing:].lstrip().startswith("{"),
    )


def _template_before(text: str, position: int) -> tuple[tuple[str, str | None], ...]:
    """Template parameters of the function whose ``__global__`` stands at ``position``."""
    since = max(text.rfind(char, 0, position) for char in ";}")
    heads = list(re.finditer(r"\btemplate\s*<", text[since + 1 : position]))
    if not heads:
        return ()
    opening = since + 1 + heads[-1].end() - 1
    closing = _balanced(text, opening, "<>")
    if closing < 0:
        return ()
    result: list[tuple[str, str | None]] = []
    for part in split_arguments(text[opening + 1 : closing - 1]):
        declared, _, default = part.partition("=")
        names = re.findall(r"[A-Za-z_]\w*", declared)
        pack = "..." if "..." in declared else ""
        result.append(((names[-1] if names else "") + pack, default.strip() or None))
    return tuple(result)
