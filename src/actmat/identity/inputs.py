"""Comparison of base and experts beside their weights: configs, labels, tokens, chat templates."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.folder import ADAPTER_CONFIG, INDEX_SUFFIX
from actmat.checkpoints.layer_names import is_before_layers, split_layer
from actmat.checkpoints.model import Model, ModelFolder
from actmat.checkpoints.side_files import MODULES
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError, first_of
from actmat.experts.deltas import Deltas
from actmat.identity.configs import FIX, InputAgreement, agree, words_of
from actmat.identity.entries import differing
from actmat.identity.tokens import MOST_ROWS, TokenInput, TokenReader, compare_tokens, tokenizer_file
from actmat.identity.usable import PROCESSORS
from actmat.layout.ties import is_output_head, is_token_table

TEMPLATE = "chat_template.jinja"
ONE_FILE = (*PROCESSORS, "generation_config.json")
"""Files of settings that tell by their absence, too."""
SETTINGS = (
    *(*ONE_FILE, "tokenizer_config.json", "tokenizer.json"),
    *("sentence_bert_config.json", "config_sentence_transformers.json"),
)
"""Files by which models are called, in the folder of a tokenizer."""
POOLING = "1_Pooling/config.json"
"""File of the module by which a sentence-transformers model makes an embedding; written as the base's."""
ReadJson = Callable[[Path], Mapping[str, Any]]


def compare_inputs(
    base: Model,
    experts: Sequence[tuple[str, Deltas]],
    kept: Collection[str],
    *,
    config_from: str | None = None,
    files_from: str = "base",
    has_vocabulary: bool = False,
    is_model: bool = True,
) -> InputAgreement:
    """Compare base and experts.

    Args:
        base: of the merge.
        experts: with their labels.
        kept: tensors that are copied from the base.
        config_from: whose entries of the config are written where they differ: 'base' or a label; None: not said.
        files_from: whose tokenizer is written.
        has_vocabulary: rows of token tables are taken by token.
        is_model: a model is written; an adapter has no config and no chat template, so that differences are notes.
    """
    written = base.folder.written.get("config.json", base.config)
    configs = [(label, expert.config) for label, expert in experts]
    found = _with_labels(agree(written, configs, config_from), base, written, configs, config_from, kept)
    reader = TokenReader()
    every: list[tuple[str, Model | Deltas]] = [("base", base), *experts]
    problems, notes = ([], []) if has_vocabulary else _tokens(every, files_from, kept, reader)
    if not is_model:
        return InputAgreement(tuple(problems), (*found.problems, *found.notes, *notes))
    files = {label: of_one for label, one in every if (of_one := files_of(one)) is not None}
    full = [(n, e) for n, e in experts if not e.needs_base and e.model.folder.files and base.folder.files]
    if bare := [f"'{label}'" for label, one in full if (one.config is None) != (base.config is None)]:
        which = "the base" if base.config is None else first_of(bare)
        notes.append(f"no config.json of {which} is there to be compared. Fix: give the folder of the model")
    notes += _template_note(files, files_from, reader.config)
    notes += _setting_notes(files, files_from, config_from or "base", reader)
    return InputAgreement((*found.problems, *problems), (*found.notes, *notes), found.configs)


def _with_labels(
    found: InputAgreement,
    base: Model,
    written: Mapping[str, Any] | None,
    configs: Sequence[tuple[str, Mapping[str, Any] | None]],
    take: str | None,
    kept: Collection[str],
) -> InputAgreement:
    """The comparison with that of labels; those of an expert are written if its entries are, or the base has none."""
    named = {label: names for label, config in (("base", base.config), *configs) if (names := label_names(config))}
    first = "base" if "base" in named else next(iter(named), "")
    sizes = ((n := len(named.get(first, ()))), n + 1)  # detectors have a row for "no object", and a head per layer
    rows = [n for n, s in base.specs.items() if s.shape and s.shape[0] in sizes and n not in kept]
    heads = [
        n for n in rows if re.search("class|score|label", n) or (split_layer(n) is None and not is_before_layers(n))
    ]
    if not heads or set(named) <= {"base"}:
        return found
    owner = take if take in named or take == "base" else first
    if owner != "base" and named[owner] != named.get("base"):
        labels = {k: v for k, v in (dict(configs)[owner] or {}).items() if k in ("id2label", "label2id")}
        config = {**(found.configs.get("config.json") or written or {}), **labels}
        found = replace(found, configs={**found.configs, "config.json": config})
    if len(set(named.values())) < 2:
        return found
    listed = "; ".join(f"{words_of(label)}: {first_of(names, 4)}" for label, names in named.items())
    text = f"config.json: id2label differs, so that rows of the head mean other labels ({listed})"
    if take is not None:
        return replace(found, notes=(*found.notes, f"{text}; written as in {words_of(owner)} (config_from)"))
    every = re.sub(r"\.\d+\.", ".*.", heads[0]).rpartition(".")[0] + ".*"
    problem = (
        f"{text}: '{heads[0]}' cannot be merged row by row. Fix: give experts whose labels have one order, keep the "
        f"base's head (--keep '{every}'), or merge it all the same: {FIX}"
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


def _tokens(
    every: Sequence[tuple[str, Model | Deltas]], files_from: str, kept: Collection[str], reader: TokenReader
) -> tuple[list[str], list[str]]:
    """Problems and notes on rows of token tables that mean different tokens; tables of other sizes are not compared.

    Args:
        every: labels and inputs, the base first.
        files_from: label of the input whose tokenizer is written.
        kept: tensors that are copied from the base.
        reader: of tokens.
    """
    base = every[0][1]
    if not (tables := _tables(base)) or len(every) < 2:
        return [], []
    rows = max(base.specs[n].shape[0] for n in tables)
    notes: list[str] = []
    inputs: list[TokenInput] = []
    for label, one in every:
        changes = True
        if isinstance(one, Deltas) and one.needs_base:
            names = (n for n in one.specs if is_token_table(n) or is_output_head(n))
            changes = any(one.source(n).kind != "zero" for n in names)
        elif rows not in {one.specs[n].shape[0] for n in _tables(one)}:
            continue
        inputs += _token_input(label, one, changes, reader, notes)
    heads = [n for n, s in base.specs.items() if is_output_head(n) and s.shape[:1] == (rows,)]
    problems, told = compare_tokens(inputs, files_from, rows, merged=not all(n in kept for n in (*tables, *heads)))
    return problems, [*told, *notes]


def compare_adapters(labels: Sequence[str], experts: Sequence[Deltas]) -> tuple[list[str], list[str]]:
    """Problems and notes on token tables that adapters change in rows of different tokens, without their base."""
    reader, notes, inputs = TokenReader(), list[str](), list[TokenInput]()
    for label, one in zip(labels, experts, strict=True):
        names = () if one.adapter is None else (*one.adapter.extras, *(f"{m}.weight" for m in one.adapter.modules))
        if any(is_token_table(n) or is_output_head(n) for n in names):
            inputs += _token_input(label, one, True, reader, notes)
    problems, told = compare_tokens(inputs, "", MOST_ROWS)
    return [f"{p}; with --base and --to model" for p in problems], [*told, *notes]


def _token_input(
    label: str, one: Model | Deltas, changes: bool, reader: TokenReader, notes: list[str]
) -> Iterator[TokenInput]:
    """The input with its tokens, if it has any; a note says that they cannot be read."""
    files = files_of(one)
    if listed := _folder(one).tokens():
        yield TokenInput(label, {t: row for row, t in enumerate(listed) if t}, changes)
    elif files is not None and (name := tokenizer_file(files)) is not None:
        try:
            yield TokenInput(label, reader.found(files, name)[0], changes, files.fetch(name))
        except CheckpointError as error:
            notes.append(f"{label}: its tokens are not compared with those of others: {error.problems[0]}")


def _tables(one: Model | Deltas) -> list[str]:
    """Token embeddings; heads over the vocabulary of a model without, as those of speech recognition."""
    matrices = [n for n, s in one.specs.items() if len(s.shape) == 2]
    return [n for n in matrices if is_token_table(n)] or [n for n in matrices if is_output_head(n)]


def _folder(one: Model | Deltas) -> ModelFolder:
    return one.folder if isinstance(one, Model) else one.model.folder


def files_of(one: Model | Deltas) -> Source | None:
    """Files of an input's folder; None for a single file, whose folder may hold the files of other models."""
    for files in _folder(one).files[:1]:
        folder = files.whole()
        if files.named is None or files.named.endswith(INDEX_SUFFIX) or ADAPTER_CONFIG in folder.names:
            return folder
    return None


def _template_note(files: Mapping[str, Source], taken: str, read: ReadJson) -> Iterator[str]:
    """Note on chat templates that differ; `taken`: whose tokenizer files are written."""
    found = {label: chat_template(of_one, read) for label, of_one in files.items()}
    templates = {label: text for label, text in found.items() if text is not None}
    other = [f"'{label}'" for label, text in templates.items() if text != templates.get(taken)]
    if other:
        owner = words_of(taken)
        whose = f"that of {owner} is written" if taken in templates else f"{owner} has none, and none is written"
        yield f"chat templates differ ({', '.join(other)}): {whose}. Another one: --set files_from=NAME"


def _setting_notes(files: Mapping[str, Source], taken: str, coded: str, reader: TokenReader) -> Iterator[str]:
    """Notes on files of settings, and of code (`coded`: whose is written), that differ from those that are written."""
    code = {n for of_one in files.values() for n in of_one.names if n.endswith(".py")}
    for name in (*SETTINGS, MODULES, POOLING, *sorted(code)):
        found: dict[str, Mapping[str, Any]] = {}
        for label, of_one in files.items():
            with contextlib.suppress(OSError, CheckpointError, ValueError, TypeError):
                if (MODULES if name == POOLING else name) in of_one.names:
                    found[label] = reader.content(of_one, name)
        of_base = name in (MODULES, POOLING, *code)
        owner, fix = (coded if name in code else "base" if of_base else taken), ". Another one: --set files_from=NAME"
        lacking = [f"'{n}'" for n, f in files.items() if n not in {*found, owner} and ADAPTER_CONFIG not in f.names]
        if name in ONE_FILE and owner not in found and found:
            yield f"{name} is only in {first_of([words_of(n) for n in found])}: none is written{fix}"
        elif name in ONE_FILE and found and lacking:
            yield f"{name} is not in {first_of(lacking)}: that of {words_of(owner)} is written"
        own = found.pop(owner, {})
        if other := {k: label for label, content in found.items() for k in differing(own, content)}:
            shown = [f"{k} ('{label}')" for k, label in other.items()]
            yield f"{name} differs in {first_of(shown)}: that of {words_of(owner)} is written{'' if of_base else fix}"


def chat_template(files: Source | None, read: ReadJson = read_object, name: str | None = None) -> str | None:
    """Chat template of a tokenizer, from any of the files that transformers reads; of several, all, or that of a name.

    Args:
        files: of the tokenizer.
        read: reads a JSON file.
        name: of one template.
    """
    names = () if files is None else files.names
    with contextlib.suppress(OSError, CheckpointError):
        if files is not None and TEMPLATE in names:
            return files.fetch(TEMPLATE).read_text(encoding="utf-8", errors="replace").strip()
        for file in ("chat_template.json", "tokenizer_config.json"):
            if files is None or file not in names or not (found := read(files.fetch(file)).get("chat_template")):
                continue
            if name is not None and isinstance(found, list):
                of_name = (t.get("template") for t in found if isinstance(t, Mapping) and t.get("name") == name)
                found = next(of_name, None)
            return (found if isinstance(found, str) else json.dumps(found)).strip() if found else None
    return None
