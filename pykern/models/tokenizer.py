"""Text to token ids and back: the tokenizer a GGUF file carries, or a ``tokenizer.json``."""

from __future__ import annotations

import json
import operator
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from pykern.errors import ArgumentError, ModelError
from pykern.models.gguf import GGUFFile

# GGUF's token types.
CONTROL, USER_DEFINED = 3, 4
SPACE = "\u2581"  # SentencePiece's stand-in for a space
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = (
    _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _byte_level(split: str | None = None, digits: bool = False) -> pre_tokenizers.PreTokenizer:
    """GPT-2's bytes as characters, after words were split by ``split`` (None: GPT-2's own rule)."""
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if split is not None:
        steps.append(pre_tokenizers.Split(Regex(split), behavior="isolated", invert=False))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None))
    return pre_tokenizers.Sequence(steps)


# How text is cut into words before merging, by the name in ``tokenizer.ggml.pre``.
PRE_TOKENIZERS = {
    "gpt-2": _byte_level,
    "smollm": lambda: _byte_level(digits=True),
    "llama-bpe": lambda: _byte_level(_LLAMA3),
    "qwen2": lambda: _byte_level(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}


class TextModel:
    """Encodes prompts and decodes ids; ``chat`` renders one user message with the model's own template."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        bos: int | None = None,
        template: str | None = None,
        specials: Mapping[str, str] | None = None,
        vocab: int | None = None,
    ) -> None:
        self.tokenizer, self.bos, self.template = tokenizer, bos, template
        self.specials = dict(specials or {})  # names a template may use: bos_token, eos_token
        self.vocab = vocab if vocab is not None else tokenizer.get_vocab_size()

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; special tokens written in it count as such, and the model's first token is added.

        Bytes that the vocabulary has no token for (SmolLM2: some control characters) are dropped, as elsewhere.
        """
        if not isinstance(text, str):
            raise ArgumentError("prompt", f"{type(text).__name__} {text!r}"[:80], "a str")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ArgumentError("prompt", f"{text[:40]!r}, which is no UTF-8", "text") from error
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        if self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        if any(i >= self.vocab for i in ids):
            raise ModelError(
                f"prompt: got token {max(ids)}, allowed: below the model's vocabulary of {self.vocab}"
            )
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids`` (of one sequence: ints, or a tensor of them), special tokens included; bytes that are no
        UTF-8 become U+FFFD."""
        try:
            numbers = [operator.index(i) for i in ids]
        except TypeError:
            shown = f"{type(ids).__name__} {ids!r}"[:80]
            raise ArgumentError("ids", shown, "the ints of one sequence") from None
        for token in numbers:
            if not 0 <= token < self.vocab:
                raise ArgumentError("ids", token, f"ints in 0..{self.vocab - 1}, the vocabulary")
        return str(self.tokenizer.decode(numbers, skip_special_tokens=False))

    def stream(self, context: Iterable[int] = ()) -> TextStream:
        """A decoder for ids that arrive one at a time, after the ids of ``context``."""
        return TextStream(self, context)

    def chat(self, message: str, system: str | None = None) -> str:
        """The prompt in which ``message`` is the user's turn and the model's turn is next."""
        if not self.template:
            raise ModelError("chat: this model has no chat template; give the prompt as it is")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        turns = [{"role": "system", "content": system}] if system else []
        turns.append({"role": "user", "content": message})

        def refuse(reason: str) -> None:
            raise TemplateError(reason)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = refuse
        try:
            template = environment.from_string(self.template)
            return template.render(messages=turns, add_generation_prompt=True, **self.specials)
        except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
            raise ModelError(f"chat template: {error}") from error


class TextStream:
    """Text as ids arrive: no character is given before all its bytes are there, and none is given twice.

    What :meth:`push` returned, joined, plus :meth:`end`, is the text of all the ids after the context.
    """

    def __init__(self, text: TextModel, context: Iterable[int] = ()) -> None:
        self.text = text
        # Some decoders drop the first id's leading space, so new ids are decoded behind a few earlier ones.
        self.ids = list(context)[-8:]
        self.start = 0  # the window decoded: ids[start:], of which ids[:known] have been given out
        self.known = len(self.ids)
        while self.known and text.decode(self.ids[: self.known]).endswith("\ufffd"):
            self.known -= 1  # a character begun in the context is given when it ends
        self.pushed = False

    def _new(self) -> str:
        whole = self.text.decode(self.ids[self.start :])
        return whole[len(self.text.decode(self.ids[self.start : self.known])) :]

    def push(self, token: int) -> str:
        self.ids.append(token)
        self.pushed = True
        new = self._new()
        if not new or new.endswith("\ufffd"):  # ends inside a character, or may
            return ""
        # The window starts at a character's end and stops at one: what follows decodes the same without the rest.
        self.start, self.known = self.known, len(self.ids)
        return new

    def end(self) -> str:
        """What is left: the bytes of a character that was never finished, as U+FFFD."""
        new = self._new() if self.pushed else ""
        self.known = len(self.ids)
        return new


# --- From a GGUF file --------------------------------------------------------------------------------------


def tokenizer_from_gguf(file: GGUFFile, vocab: int) -> TextModel:
    """The tokenizer in a GGUF file's metadata, for a model with ``vocab`` embedding rows."""
    where = file.path.name
    kind = file.get("tokenizer.ggml.model", str)
    builders = {"gpt2": _byte_pairs, "llama": _sentence_piece}
    if kind not in builders:
        raise ModelError(f"{where}: tokenizer.ggml.model: got {kind!r}, allowed: {', '.join(builders)}")
    tokens = file.get("tokenizer.ggml.tokens", list)
    if not all(isinstance(t, str) for t in tokens) or not 1 <= len(tokens) <= vocab:
        raise ModelError(
            f"{where}: tokenizer.ggml.tokens: got {len(tokens)} items, allowed: 1..{vocab} strings"
        )
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        seen: set[str] = set()
        twice = next(t for t in tokens if t in seen or seen.add(t))  # type: ignore[func-returns-value]
        raise ModelError(f"{where}: tokenizer.ggml.tokens: {twice!r} appears twice")
    types = file.get("tokenizer.ggml.token_type", list, [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(
            f"{where}: tokenizer.ggml.token_type: got {len(types)} items, allowed: {len(tokens)}"
        )
    try:
        tokenizer = builders[kind](file, tokens, ids)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"{where}: the tokenizer's tables are inconsistent: {error}") from error
    special = [tokens[i] for i, t in enumerate(types) if t == CONTROL]
    added = [tokens[i] for i, t in enumerate(types) if t == USER_DEFINED]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in added])

    def token_id(name: str) -> int | None:
        value = file.get(f"tokenizer.ggml.{name}_token_id", int, None)
        if value is not None and not 0 <= value < len(tokens):
            raise ModelError(
                f"{where}: tokenizer.ggml.{name}_token_id: got {value}, allowed: 0..{len(tokens) - 1}"
            )
        return value

    bos, eos = token_id("bos"), token_id("eos")
    adds_bos = file.get("tokenizer.ggml.add_bos_token", bool, _adds_bos_by_default(file, kind))
    if adds_bos and bos is None:
        raise ModelError(f"{where}: tokenizer.ggml.add_bos_token is set, but there is no bos_token_id")
    specials = {f"{n}_token": tokens[i] for n, i in (("bos", bos), ("eos", eos)) if i is not None}
    template = file.get("tokenizer.chat_template", str, None)
    return TextModel(
        tokenizer, bos=bos if adds_bos else None, template=template, specials=specials, vocab=vocab
    )


def _adds_bos_by_default(file: GGUFFile, kind: str) -> bool:
    """What the format says where the file does not: SentencePiece and Llama 3 start with one, GPT-2's kind do not."""
    return kind == "llama" or file.get("tokenizer.ggml.pre", str, "") == "llama-bpe"


def _byte_pairs(file: GGUFFile, tokens: list[str], ids: dict[str, int]) -> Tokenizer:
    """Byte-level BPE: merges are listed in the file in order of rank."""
    where = file.path.name
    pre = file.get("tokenizer.ggml.pre", str, "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise ModelError(f"{where}: tokenizer.ggml.pre: got {pre!r}, allowed: {', '.join(PRE_TOKENIZERS)}")
    merges = []
    for n, line in enumerate(file.get("tokenizer.ggml.merges", list)):
        pair = tuple(line.split(" ")) if isinstance(line, str) else ()
        if len(pair) != 2 or pair[0] not in ids or pair[1] not in ids or pair[0] + pair[1] not in ids:
            place = f"{where}: tokenizer.ggml.merges[{n}]"
            raise ModelError(f"{place}: got {line!r}, allowed: two tokens that form a third")
        merges.append(pair)
    # Llama 3's vocabulary holds whole words that no sequence of merges reaches.
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(file: GGUFFile, tokens: list[str], ids: dict[str, int]) -> Tokenizer:
    """SentencePiece BPE: of all neighbours that form a token, the one with the highest score is merged first."""
    where = file.path.name
    scores = file.get("tokenizer.ggml.scores", list)
    if len(scores) != len(tokens) or not all(isinstance(s, float) for s in scores):
        raise ModelError(
            f"{where}: tokenizer.ggml.scores: got {len(scores)} items, allowed: {len(tokens)} floats"
        )
    pairs = []
    for token, i in ids.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                pairs.append((-scores[i], ids[left], ids[right], left, right))
    pairs.sort()
    unknown = file.get("tokenizer.ggml.unknown_token_id", int, 0)
    if not 0 <= unknown < len(tokens):
        raise ModelError(
            f"{where}: tokenizer.ggml.unknown_token_id: got {unknown}, allowed: below {len(tokens)}"
        )
    bpe = models.BPE(
        vocab=ids, merges=[p[3:] for p in pairs], unk_token=tokens[unknown], fuse_unk=True, byte_fallback=True
    )
    tokenizer = Tokenizer(bpe)
    prefix = file.get("tokenizer.ggml.add_space_prefix", bool, True)
    steps: list[Any] = [normalizers.Prepend(SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    undo: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(undo + ([decoders.Strip(" ", 1, 0)] if prefix else []))
    return tokenizer


# --- From a Hugging Face folder ----------------------------------------------------------------------------


def tokenizer_from_folder(folder: Path, vocab: int) -> TextModel:
    """``tokenizer.json``, with ``tokenizer_config.json`` for the chat template and the first token."""
    path = folder / "tokenizer.json"
    if not path.exists():
        raise ModelError(f"{folder.name}: no tokenizer.json beside the weights")
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises bare Exception
        raise ModelError(f"tokenizer.json: {error}") from error
    settings: dict[str, Any] = {}
    if (folder / "tokenizer_config.json").exists():
        from pykern.models.weights import read_json

        settings = read_json(folder / "tokenizer_config.json")
    specials = {}
    for name in ("bos_token", "eos_token"):
        value = settings.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            specials[name] = text
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").exists():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    # The file's own post-processor knows whether a first token is added: ask it.
    first = tokenizer.encode("", add_special_tokens=True).ids
    bos = first[0] if first and tokenizer.id_to_token(first[0]) == specials.get("bos_token") else None
    return TextModel(
        tokenizer,
        bos=bos,
        template=template if isinstance(template, str) else None,
        specials=specials,
        vocab=vocab,
    )
