"""Comparison of base and experts beside their weights: configs, labels, tokens, chat templates."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.folder import ADAPTER_CONFIG, INDEX_SUFFIX
from actmat.checkpoints.hashing import hash_file
from actmat.checkpoints.layer_names import is_before_layers, split_layer
from actmat.checkpoints.side_files import ModelFiles
from actmat.errors import CheckpointError
from actmat.experts.base import Expert
from actmat.identity.compare import FIX, InputAgreement, agree, words_of
from actmat.identity.tokens import TokenInput, TokenReader, compare_tokens, unread_tokenizer
from actmat.layout.ties import is_output_head, is_token_table

TEMPLATE = "chat_template.jinja"
Named = Sequence[tuple[str, Expert]]
"""Experts with their labels."""


@dataclass(frozen=True, slots=True)
class Choices:
    """A recipe's choices for what an output has beside its weights.

    Args:
        config_from: whose entries of the config are written where they differ: 'base' or a label; None: not said.
        files_from: whose tokenizer is written.
        has_vocabulary: rows of token tables are taken by token.
        is_model: a model is written; an adapter has no config and no chat template, so that differences are notes.
    """

    config_from: str | None = None
    files_from: str = "base"
    has_vocabulary: bool = False
    is_model: bool = True


def compare_inputs(
    base: Checkpoint, experts: Named, chosen: Choices, written: Mapping[str, Any] | None, kept: Collection[str]
) -> InputAgreement:
    """Compare base and experts.

    Args:
        base: of the merge.
        experts: with their labels.
        chosen: by the recipe.
        written: config of the base as an output has it.
        kept: tensors that are copied from the base.
    """
    configs = [(label, expert.config) for label, expert in experts]
    found = _with_labels(agree(written, configs, chosen.config_from), base, written, configs, chosen.config_from, kept)
    reader = TokenReader()
    problems, notes = ([], []) if chosen.has_vocabulary else _tokens(base, experts, chosen.files_from, kept, reader)
    if not chosen.is_model:
        return InputAgreement(tuple(problems), (*found.problems, *found.notes, *notes))
    notes += _template_note(base, experts, chosen.files_from, reader.config)
    return InputAgreement((*found.problems, *problems), (*found.notes, *notes), found.configs)


def _with_labels(
    found: InputAgreement,
    base: Checkpoint,
    written: Mapping[str, Any] | None,
    configs: Sequence[tuple[str, Mapping[str, Any] | None]],
    take: str | None,
    kept: Collection[str],
) -> InputAgreement:
    """The comparison with that of labels; those of an expert are written if its entries are, or the base has none."""
    named = {label: names for label, config in (("base", base.config), *configs) if (names := label_names(config))}
    if set(named) <= {"base"}:
        return found
    first = "base" if "base" in named else next(iter(named))
    rows = (n for n, s in base.specs.items() if s.shape and s.shape[0] == len(named[first]))
    heads = [n for n in rows if split_layer(n) is None and not is_before_layers(n) and n not in kept]
    if not heads:
        return found
    owner = take if take in named or take == "base" else first
    if owner != "base" and named[owner] != named.get("base"):
        own = next(config for label, config in configs if label == owner) or {}
        labels = {k: own[k] for k in ("id2label", "label2id") if k in own}
        config = {**(found.configs.get("config.json") or written or {}), **labels}
        found = replace(found, configs={**found.configs, "config.json": config})
    if len(set(named.values())) < 2:
        return found
    shown = ((label if label == "base" else words_of(label), names) for label, names in named.items())
    listed = "; ".join(f"{who}: {_shown(names)}" for who, names in shown)
    text = f"config.json: id2label differs, so that rows of the head mean other labels ({listed})"
    if take is not None:
        return replace(found, notes=(*found.notes, f"{text}; written as in {words_of(owner)} (config_from)"))
    problem = (
        f"{text}: '{heads[0]}' cannot be merged row by row. Fix: give experts whose labels have one order, keep the "
        f"base's head (--keep '{heads[0]}'), or merge it all the same: {FIX}"
    )
    return replace(found, problems=(*found.problems, problem))


def label_names(config: Mapping[str, Any] | None) -> tuple[str, ...] | None:
    """Names of a classifier's labels, in the order of its rows; None without any, or for generic names.

    >>> label_names({"id2label": {"1": "pos", "0": "neg"}}), label_names({"id2label": {"0": "LABEL_0"}})
    (('neg', 'pos'), None)
    """
    given = (config or {}).get("id2label")
    if not isinstance(given, Mapping) or not all(str(k).isdecimal() and len(str(k)) < 9 for k in given):
        return None
    names = tuple(str(given[k]) for k in sorted(given, key=lambda k: int(str(k))))
    return None if not names or names == tuple(f"LABEL_{i}" for i in range(len(names))) else names


def _shown(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _tokens(
    base: Checkpoint, experts: Named, files_from: str, kept: Collection[str], reader: TokenReader
) -> tuple[list[str], list[str]]:
    """Problems and notes on rows of token tables that mean different tokens; tables of other sizes are not compared."""
    tables = [n for n, s in base.specs.items() if len(s.shape) == 2 and is_token_table(n)]
    if not tables or not experts:
        return [], []
    rows = max(base.specs[n].shape[0] for n in tables)
    notes: list[str] = []
    inputs: list[TokenInput] = []
    unread: dict[str, list[str]] = {}
    every: list[tuple[str, Checkpoint | Expert]] = [("base", base), *experts]
    for label, one in every:
        changes = True
        if isinstance(one, Expert) and one.needs_base:
            names = (n for n in one.specs if is_token_table(n) or is_output_head(n))
            changes = any(one.source(n).kind != "zero" for n in names)
        elif rows not in {s.shape[0] for n, s in one.specs.items() if len(s.shape) == 2 and is_token_table(n)}:
            continue
        if (files := files_of(one)) is None:
            continue
        try:
            inputs.append(TokenInput(label, reader.tokens(files), changes))
            if not inputs[-1].tokens and (name := unread_tokenizer(files)) is not None:
                unread.setdefault(hash_file(files.fetch(name)), []).append(f"{words_of(label)} ({name})")
        except CheckpointError as error:
            notes.append(f"{label}: its tokens are not compared with those of others: {error.problems[0]}")
    if len(unread) + any(i.tokens for i in inputs) > 1:
        who = ", ".join(name for of_file in unread.values() for name in of_file)
        notes.append(
            f"tokens of {who} are not compared with those of others: their tokenizers differ, in a form that is not "
            "read. Rows of the token tables may mean other tokens; to compare them, save tokenizer.json (use_fast)"
        )
    heads = [n for n, s in base.specs.items() if is_output_head(n) and s.shape[:1] == (rows,)]
    problems, told = compare_tokens(inputs, files_from, rows, merged=not all(n in kept for n in (*tables, *heads)))
    return problems, [*told, *notes]


def files_of(one: Checkpoint | Expert) -> ModelFiles | None:
    """Files of an input's folder; None for a single file, whose folder may hold the files of other models."""
    for files in one.sources()[:1]:
        folder = files.whole()
        if files.named is None or files.named.endswith(INDEX_SUFFIX) or ADAPTER_CONFIG in folder.names:
            return folder
    return None


def _template_note(
    base: Checkpoint, experts: Named, taken: str, read: Callable[[Path], Mapping[str, Any]]
) -> list[str]:
    """Note on chat templates that differ; `taken`: whose tokenizer files are written."""
    every: list[tuple[str, Checkpoint | Expert]] = [("base", base), *experts]
    found = {label: chat_template(files_of(one), read) for label, one in every}
    templates = {label: text for label, text in found.items() if text is not None}
    other = [f"'{label}'" for label, text in templates.items() if text != templates.get(taken)]
    if not other:
        return []
    owner = words_of(taken)
    whose = f"that of {owner} is written" if taken in templates else f"{owner} has none, and none is written"
    return [f"chat templates differ ({', '.join(other)}): {whose}. Another one: --set files_from=NAME"]


def chat_template(
    files: ModelFiles | None, read: Callable[[Path], Mapping[str, Any]] = read_object, name: str | None = None
) -> str | None:
    """Chat template of a tokenizer, from any of the files that transformers reads; of several, all, or that of a name.

    Args:
        files: of the tokenizer.
        read: reads a JSON file.
        name: of one template.
    """
    names = () if files is None else files.names
    try:
        if files is not None and TEMPLATE in names:
            return files.fetch(TEMPLATE).read_text(encoding="utf-8", errors="replace").strip()
        for file in ("chat_template.json", "tokenizer_config.json"):
            if files is None or file not in names or not (found := read(files.fetch(file)).get("chat_template")):
                continue
            if name is not None and isinstance(found, list):
                found = next(
                    (t.get("template") for t in found if isinstance(t, Mapping) and t.get("name") == name), None
                )
            return (found if isinstance(found, str) else json.dumps(found)).strip() if found else None
    except (OSError, CheckpointError):
        return None
    return None


def most_frequent_template(inputs: Sequence[Checkpoint | Expert]) -> str | None:
    """The chat template that most inputs have, the first of several; None if no input has one."""
    found = [text for one in inputs if (text := chat_template(files_of(one), name="default"))]
    return Counter(found).most_common(1)[0][0] if found else None
