"""Tokens of two inputs compared by row: the same row of a table must mean the same token, or rows are taken by token.

A tokenizer is read from `tokenizer.json`, else from `vocab.json`, `vocab.txt` or a file of SentencePiece, with added
tokens (`added_tokens.json`, `tokenizer_config.json`). A note says which tokenizers, in other forms, were not compared.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.bounds import parse_object, read_bytes, read_object
from actmat.checkpoints.hashing import hash_file
from actmat.checkpoints.sentencepiece import pieces
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError, first_of
from actmat.identity.configs import words_of

TOKENIZER = "tokenizer.json"
WORDS = ("vocab.*", "merges.txt", "*.model", "tokenizer.model*", "*.spm", "*.tiktoken", "tekken.json", "bpe.codes")
"""Files of tokens in forms other than `tokenizer.json`, beside which they say the same again."""
TOKENIZERS = (TOKENIZER, "tokenizer_config.json", *WORDS)
"""Files by which a folder has a tokenizer."""
CONFIG, ADDED, VOCABULARIES = "tokenizer_config.json", "added_tokens.json", ("vocab.json", "vocab.txt")
FLAGS = "added_tokens"
"""Entry of `tokenizer.json` that says how added tokens are split off and shown."""
_OF_CALLS = ("version", "truncation", "padding")
"""Entries that change no token: transformers sets the latter two in every call."""
MOST_ROWS = 2**31
TokensByRow = Mapping[str, Mapping[int, str]]
"""Label of an input -> row -> token."""
BY_TOKEN = "take rows by token (--set vocabulary=union, or base, or the name of an expert)"


def is_row(value: object) -> bool:
    """True for the number of a row."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < MOST_ROWS


def listed_tokens(data: Mapping[str, Any], place: object) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """Token -> row, and the entries of added tokens, of a `tokenizer.json`.

    Args:
        data: content of the file.
        place: of the file, for messages.

    Raises:
        CheckpointError: its added tokens are not a list.
    """
    model = data.get("model")
    tokens = _vocabulary(model.get("vocab") if isinstance(model, Mapping) else None)
    listed = data.get("added_tokens") or []
    if not isinstance(listed, list):
        said = f"expected a list of added tokens, found {str(listed)[:40]!r}. Fix: save the tokenizer again"
        raise CheckpointError(f"{place}: {said}")
    added = [
        dict(entry)
        for entry in listed
        if isinstance(entry, Mapping) and isinstance(entry.get("content"), str) and is_row(entry.get("id"))
    ]
    return tokens | {entry["content"]: entry["id"] for entry in added}, added


def _vocabulary(listed: Any) -> dict[str, int]:
    """Vocabulary of a BPE or WordPiece model (a mapping) or of a Unigram model (a list of pairs)."""
    if isinstance(listed, Mapping):
        return {str(t): i for t, i in listed.items() if is_row(i)}
    if isinstance(listed, list):
        return {str(pair[0]): i for i, pair in enumerate(listed) if isinstance(pair, list) and pair}
    return {}


def _rules(data: Mapping[str, Any], added: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """All by which texts become tokens, and tokens texts, in a `tokenizer.json`; not the rows of its tokens."""
    model = dict(listed) if isinstance(listed := data.get("model"), Mapping) else {}
    vocabulary, pairs = (v if isinstance(v := model.pop(key, ()), list) else [] for key in ("vocab", "merges"))
    model["scores"] = str([pair[1:] for pair in vocabulary if isinstance(pair, list)])
    model["merges"] = "\n".join(" ".join(map(str, p)) if isinstance(p, list) else str(p) for p in pairs)
    model[FLAGS] = {entry["content"]: {k: v for k, v in entry.items() if k not in ("id", "content")} for entry in added}
    return {k: v for k, v in data.items() if k not in (*_OF_CALLS, "model")} | model


def tokenizer_file(files: Source) -> str | None:
    """The file with the tokens of a tokenizer: JSON, a list of words, or another form such as SentencePiece's."""
    others = (n for n in sorted(files.names) for p in WORDS[2:] if fnmatch.fnmatchcase(n, p))
    return next((n for n in (TOKENIZER, *VOCABULARIES) if n in files.names), next(others, None))


class TokenReader:
    """Reads the tokens of inputs, each file once; equal tokenizers are parsed once."""

    def __init__(self) -> None:
        self._parsed: dict[bytes, tuple[Mapping[str, int], Mapping[str, Any]]] = {}
        self._of_file: dict[Path, tuple[Mapping[str, int], Mapping[str, Any]]] = {}
        self.config: Callable[[Path], Mapping[str, Any]] = functools.cache(read_object)
        """Content of a small JSON file: chat templates and added tokens may be in the same one."""

    def read(self, files: Source, first: str) -> tuple[Mapping[str, int], Mapping[str, Any]]:
        """Token -> row, from the tokenizer among files, empty without one that is read; and its other rules.

        Raises:
            CheckpointError: a file is damaged.
        """
        if (path := files.fetch(first)) in self._of_file:
            return self._of_file[path]
        text = read_bytes(path)
        added, config = (self.config(files.fetch(n)) if n in files.names else {} for n in (ADDED, CONFIG))
        decoder = config.get("added_tokens_decoder")
        seen = hashlib.sha256(text + json.dumps([first, added, decoder, config.get("extra_ids")]).encode()).digest()
        if seen not in self._parsed:
            rules: dict[str, Any] = {}
            if first == TOKENIZER:
                data = parse_object(text, str(path))
                tokens, entries = listed_tokens(data, path)
                rules = _rules(data, entries)
            elif first.endswith(".txt"):
                lines = text.decode("utf-8", "replace").split("\n")
                tokens = {line.rstrip("\r"): i for i, line in enumerate(lines) if line}
            elif first.endswith(".json"):
                tokens = _vocabulary(parse_object(text, str(path)))
            else:
                tokens = pieces(text)
                more = config.get("extra_ids", 0)  # of T5, which numbers them downwards
                end = len(tokens) + (more if is_row(more) and more < len(tokens) else 0)
                tokens |= {f"<extra_id_{end - 1 - row}>": row for row in range(len(tokens), end)}
            named = _vocabulary(added)
            for row, entry in (decoder if isinstance(decoder, Mapping) else {}).items():
                token = entry.get("content") if isinstance(entry, Mapping) else None
                if isinstance(token, str) and row.isascii() and row.isdecimal() and len(row) < len(str(MOST_ROWS)):
                    named.setdefault(token, int(row))
            self._parsed[seen] = {**named, **tokens} if tokens else {}, rules
        self._of_file[path] = self._parsed[seen]
        return self._parsed[seen]


@dataclass(frozen=True, slots=True, eq=False)
class TokenInput:
    """An input with its tokens.

    Args:
        label: `base`, or the name of an expert.
        tokens: token -> row; empty if not known.
        merges_rows: its table is merged row by row with the others.
        path: of the file with the tokens.
    """

    label: str
    tokens: Mapping[str, int]
    merges_rows: bool = True
    path: Path = Path(TOKENIZER)


def comparable(inputs: Sequence[TokenInput]) -> tuple[list[TokenInput], list[str]]:
    """Inputs whose tokens have their rows, and a note on those of whose tokenizers this is not known.

    SentencePiece numbers its pieces, and some classes (XLM-RoBERTa, Pegasus) put tokens before them: where an input
    with written rows shows that, these pieces are not compared.
    """
    written = {i.label for i in inputs if i.path.name.endswith((".json", ".txt"))}
    shown = next((i.tokens for i in inputs if i.tokens and i.label in written), {})

    def is_shifted(tokens: TokenInput) -> bool:
        shifts = Counter(shown[t] - row for t, row in tokens.tokens.items() if t in shown)
        return tokens.label not in written and any(shift for shift, _ in shifts.most_common(1))

    known = [i for i in inputs if i.tokens and not is_shifted(i)]
    unknown = [i for i in inputs if i not in known and i.path.name != TOKENIZER]
    who = ", ".join(f"{words_of(i.label)} ({i.path.name})" for i in unknown)
    differ = len({hash_file(i.path) for i in unknown}) + bool(known) > 1
    text = (
        f"tokens of {who} are not compared with those of others: their tokenizers differ, in forms that do not give "
        "rows. Rows of the token tables may mean other tokens; to compare them, save tokenizer.json"
    )
    return known, [text] * differ


def compare_tokens(
    inputs: Sequence[TokenInput], written: str, rows: int, *, merged: bool = True, fix: str = ""
) -> tuple[list[str], list[str]]:
    """Problems and notes on tokens of inputs whose tables have equal shapes.

    Rows that mean different tokens in two experts, or that moved, are a problem if these rows are merged. Tokens that
    the written tokenizer lacks are a note.

    Args:
        inputs: those with tokens: the base first, if its tokens are known, then experts.
        written: label of the input whose tokenizer is written.
        rows: number of rows of the tables; tokens beyond are not compared.
        merged: tables are merged; False if the recipe keeps the base's.
        fix: how a user resolves it, where no field of a recipe does.
    """
    inputs, notes = comparable(inputs)
    if len(inputs) < 2:
        return [], notes
    at = {i.label: {row: token for token, row in i.tokens.items() if row < rows} for i in inputs}
    reference, *others = inputs if "base" in at else (TokenInput("base", {}), *inputs)
    mixed = [i for i in others if i.merges_rows] if merged else []
    moved = [(i, moved_rows) for i in mixed if reference.tokens and (moved_rows := _moved(reference, i, at))]
    only_base_differs = written in at.keys() - {"base"} and all(
        at[written].get(row, token) == token for label in at if label != "base" for row, token in at[label].items()
    )
    if moved and not only_base_differs:
        return [_problem(reference, expert, moved_rows, at, fix or BY_TOKEN) for expert, moved_rows in moved], notes
    problems = list(_contested(mixed, at, at.get("base", {}), fix or BY_TOKEN))
    return problems, notes if problems else [*_unwritten(inputs, written, at, fix), *notes]


def _moved(reference: TokenInput, expert: TokenInput, at: TokensByRow) -> list[int]:
    """Rows of other tokens, if rows changed places; a row may be renamed, as reserved tokens are."""
    ours, theirs = at[reference.label], at[expert.label]
    different = [row for row, token in theirs.items() if ours.get(row, token) != token]
    moved = [row for row in different if theirs[row] in reference.tokens or ours[row] in expert.tokens]
    return sorted(moved or (different if 2 * len(different) > len(ours) else ()))


def _contested(experts: Sequence[TokenInput], at: TokensByRow, of_base: Mapping[int, str], fix: str) -> Iterator[str]:
    """Problems with rows that mean a new token in two experts, and not the same."""
    first: dict[int, TokenInput] = {}
    for expert in experts:
        pairs: dict[TokenInput, list[int]] = {}
        for row, token in at[expert.label].items():
            if of_base.get(row) != token and at[(holder := first.setdefault(row, expert)).label][row] != token:
                pairs.setdefault(holder, []).append(row)
        yield from (_problem(holder, expert, sorted(rows), at, fix) for holder, rows in pairs.items())


def _problem(a: TokenInput, b: TokenInput, rows: Sequence[int], at: TokensByRow, fix: str) -> str:
    shown = [f"row {r} is {at[a.label][r]!r} and {at[b.label][r]!r}" for r in rows]
    return (
        f"{words_of(a.label)} and {words_of(b.label)} have different tokens in {len(rows)} rows of their token tables: "
        f"{first_of(shown)}. Merged row by row, these would be mixed. Fix: {fix}"
    )


def _unwritten(known: Sequence[TokenInput], written: str, at: TokensByRow, fix: str) -> Iterator[str]:
    """Notes on tokens of experts that the written tokenizer lacks."""
    keeper = next((i for i in known if i.label == written), None)
    if keeper is None:
        return
    fix = fix or "'--set vocabulary=union' gives each its row, '--set files_from=NAME' writes another tokenizer"
    ours = f"the written tokenizer, of {words_of(written)},"
    for holder in (h for h in known if h is not keeper):
        theirs = words_of(holder.label)
        for a, b, said in ((holder, keeper, (theirs, ours, f". {fix}")), (keeper, holder, (ours, theirs, ""))):
            lone = sorted((row, token) for row, token in at[a.label].items() if token not in b.tokens)
            shown = first_of([f"{json.dumps(token, ensure_ascii=False)} (row {row})" for row, token in lone])
            if lone:
                yield f"{said[0]} has {len(lone)} tokens that {said[1]} lacks: {shown}{said[2]}"
