"""Tokens of two inputs compared by row: the same row of a table must mean the same token, or rows are taken by token.

A tokenizer is read from `tokenizer.json`, else from `vocab.json` or `vocab.txt`, with the tokens that were added to it
(`added_tokens.json`, `tokenizer_config.json`). Of tokenizers in other forms, a note says that they were not compared.
"""

from __future__ import annotations

import fnmatch
import functools
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.bounds import parse_object, read_bytes, read_object
from actmat.checkpoints.side_files import ModelFiles
from actmat.errors import CheckpointError
from actmat.identity.compare import words_of
from actmat.identity.usable import TOKENIZERS

TOKENIZER = "tokenizer.json"
CONFIG, ADDED, VOCABULARIES = "tokenizer_config.json", "added_tokens.json", ("vocab.json", "vocab.txt")
MOST_ROWS = 2**31
SHOWN = 4
"""Tokens that a message names."""


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


def unread_tokenizer(files: ModelFiles) -> str | None:
    """The file of a tokenizer in another form, such as SentencePiece's; None without one."""
    patterns = [p for p in TOKENIZERS if not p.endswith(".json") and not p.startswith("vocab.")]
    return next((n for n in sorted(files.names) for p in patterns if fnmatch.fnmatchcase(n, p)), None)


class TokenReader:
    """Reads the tokens of inputs; every file is read once, and equal tokenizers are parsed once."""

    def __init__(self) -> None:
        self._parsed: dict[bytes, Mapping[str, int]] = {}
        self._tokens: dict[Path, Mapping[str, int]] = {}
        self.config: Callable[[Path], Mapping[str, Any]] = functools.cache(read_object)
        """Content of a small JSON file: chat templates and added tokens may be in the same one."""

    def tokens(self, files: ModelFiles) -> Mapping[str, int]:
        """Token -> row, from the tokenizer among files; empty without one that is read.

        Raises:
            CheckpointError: a file is damaged.
        """
        first = next((n for n in (TOKENIZER, *VOCABULARIES) if n in files.names), None)
        if first is None:
            return {}
        path = files.fetch(first)
        if path in self._tokens:
            return self._tokens[path]
        text = read_bytes(path)
        added, config = (self.config(files.fetch(n)) if n in files.names else {} for n in (ADDED, CONFIG))
        decoder = config.get("added_tokens_decoder")
        seen = hashlib.sha256(hashlib.sha256(text).digest() + json.dumps([first, added, decoder]).encode()).digest()
        if seen not in self._parsed:
            if first == TOKENIZER:
                tokens = listed_tokens(parse_object(text, str(path)), path)[0]
            elif first.endswith(".txt"):
                lines = text.decode("utf-8", "replace").split("\n")
                tokens = {line.rstrip("\r"): i for i, line in enumerate(lines) if line}
            else:
                tokens = _vocabulary(parse_object(text, str(path)))
            more = _vocabulary(added)
            for row, entry in (decoder if isinstance(decoder, Mapping) else {}).items():
                token = entry.get("content") if isinstance(entry, Mapping) else None
                if isinstance(token, str) and row.isascii() and row.isdecimal() and len(row) < len(str(MOST_ROWS)):
                    more.setdefault(token, int(row))
            self._parsed[seen] = {**more, **tokens}
        return self._tokens.setdefault(path, self._parsed[seen])


@dataclass(frozen=True, slots=True, eq=False)
class TokenInput:
    """An input with its tokens.

    Args:
        label: `base`, or the name of an expert.
        tokens: token -> row; empty if not known.
        merges_rows: its table is merged row by row with the others.
    """

    label: str
    tokens: Mapping[str, int]
    merges_rows: bool = True


def compare_tokens(
    inputs: Sequence[TokenInput], written: str, rows: int, *, merged: bool = True
) -> tuple[list[str], list[str]]:
    """Problems and notes on tokens of inputs whose tables have equal shapes.

    Rows that mean different tokens in two experts, or that moved, are a problem if these rows are merged. Tokens that
    the written tokenizer lacks are a note.

    Args:
        inputs: the base first, if its tokens are known, then experts.
        written: label of the input whose tokenizer is written.
        rows: number of rows of the tables; tokens beyond are not compared.
        merged: tables are merged; False if the recipe keeps the base's.
    """
    known = [i for i in inputs if i.tokens]
    if len(known) < 2:
        return [], []
    at = {i.label: {row: token for token, row in i.tokens.items() if row < rows} for i in known}
    reference, *others = known
    problems: list[str] = []
    for one in others if merged else []:
        moved = _moved(reference, one, at)
        if one.merges_rows and reference.merges_rows and moved:
            problems.append(_problem(reference, one, moved, at))
    if problems and _agree_without_base(known, written, at):
        problems = []
    contested = _contested(others, at, at[reference.label]) if merged and not problems else {}
    for (a, b), found in contested.items():
        problems.append(_problem(a, b, found, at))
    if problems:
        return problems, []
    return [], list(_unwritten(known, written, at))


def _moved(reference: TokenInput, one: TokenInput, at: Mapping[str, Mapping[int, str]]) -> list[int]:
    """Rows of other tokens, if rows changed places; a row may be renamed, as reserved tokens are."""
    own, other = at[reference.label], at[one.label]
    different = [row for row, token in other.items() if own.get(row, token) != token]
    moved = [row for row in different if other[row] in reference.tokens or own[row] in one.tokens]
    return sorted(moved or (different if 2 * len(different) > len(own) else ()))


def _agree_without_base(known: Sequence[TokenInput], written: str, at: Mapping[str, Mapping[int, str]]) -> bool:
    """True if all experts have the tokens of the one whose tokenizer is written: then only the base differs."""
    experts = [i for i in known if i.label != "base"]
    return written in {i.label for i in experts} and all(
        at[written].get(row, token) == token for i in experts for row, token in at[i.label].items()
    )


def _contested(
    experts: Sequence[TokenInput], at: Mapping[str, Mapping[int, str]], own: Mapping[int, str]
) -> dict[tuple[TokenInput, TokenInput], list[int]]:
    """Pairs of experts -> rows that mean a new token in both, and not the same."""
    first: dict[int, TokenInput] = {}
    pairs: dict[tuple[str, str], list[int]] = {}
    by_label = {e.label: e for e in experts}
    for one in (e for e in experts if e.merges_rows):
        for row, token in at[one.label].items():
            if own.get(row) == token:
                continue
            holder = first.setdefault(row, one)
            if at[holder.label][row] != token:
                pairs.setdefault((holder.label, one.label), []).append(row)
    return {(by_label[a], by_label[b]): sorted(found) for (a, b), found in pairs.items()}


def _problem(a: TokenInput, b: TokenInput, rows: Sequence[int], at: Mapping[str, Mapping[int, str]]) -> str:
    shown = [f"row {r} is {at[a.label][r]!r} and {at[b.label][r]!r}" for r in rows[:SHOWN]]
    more = f", and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
    return (
        f"{words_of(a.label)} and {words_of(b.label)} have different tokens in {len(rows)} rows of their token tables: "
        f"{', '.join(shown)}{more}. Merged row by row, these would be mixed. Fix: take rows by token (--vocabulary "
        "union, or base, or the name of an expert)"
    )


def _unwritten(known: Sequence[TokenInput], written: str, at: Mapping[str, Mapping[int, str]]) -> Iterator[str]:
    """Notes on tokens of experts that the written tokenizer lacks."""
    keeper = next((i for i in known if i.label == written), None)
    if keeper is None:
        return
    for one in known:
        found = {row: token for row, token in at[one.label].items() if token not in keeper.tokens}
        if one is keeper or not found:
            continue
        shown = [f"{json.dumps(t, ensure_ascii=False)} (row {r})" for r, t in sorted(found.items())[:SHOWN]]
        more = f", and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        yield (
            f"{words_of(one.label)} has {len(found)} tokens that the written tokenizer, of {words_of(written)}, lacks: "
            f"{', '.join(shown)}{more}. '--vocabulary union' gives each its row, '--set files_from=NAME' writes "
            "another tokenizer"
        )
