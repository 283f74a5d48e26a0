"""Comparison of base and experts beside their weights: configs, labels, tokens, chat templates."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.folder import ADAPTER_CONFIG, INDEX_SUFFIX
from actmat.checkpoints.layer_names import is_before_layers, split_layer
from actmat.checkpoints.model import CONFIG, Model, ModelFolder
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError, first_of
from actmat.experts.deltas import Deltas
from actmat.identity.configs import FIX, InputAgreement, agree, words_of
from actmat.identity.files import FileAgreement, InputFiles, agree_files, unequal_keys
from actmat.identity.tokens import MOST_ROWS, TOKENIZER, TokenInput, TokenReader, compare_tokens, tokenizer_file
from actmat.layout.ties import is_output_head, is_token_table


def compare_inputs(
    base: Model,
    experts: Sequence[tuple[str, Deltas]],
    kept: Collection[str],
    *,
    config_from: str | None = None,
    files_from: str | None = None,
    has_vocabulary: bool = False,
    is_model: bool = True,
) -> InputAgreement:
    """Compare base and experts.

    Args:
        base: of the merge.
        experts: with their labels.
        kept: tensors that are copied from the base.
        config_from: whose entries of the config are written where they differ: 'base' or a label; None: not said.
        files_from: whose tokenizer is written; None: the experts' where they agree, else the base's.
        has_vocabulary: rows of token tables are taken by token.
        is_model: a model is written; an adapter has no config, so that differences are notes.
    """
    written = base.folder.written.get("config.json", base.config)
    configs = [(label, config_of(expert)) for label, expert in experts]
    found = _with_labels(agree(written, configs, config_from), base, written, configs, config_from, kept)
    reader = TokenReader()
    every: list[tuple[str, Model | Deltas]] = [("base", base), *experts]
    agreed = FileAgreement()
    if base.folder.files:
        files, coded = _files_by_label(every, reader), config_from or "base"
        agreed = agree_files(files, files_from, coded, is_new=has_vocabulary, is_model=is_model)
    problems, notes = ([], []) if has_vocabulary else _tokens(every, files_from or "base", kept, reader)
    if TOKENIZER in agreed.taken and not problems:
        notes = _tokens(every, agreed.taken[TOKENIZER], kept, reader)[1]
    if not is_model:
        return InputAgreement(tuple(problems), (*found.problems, *found.notes, *notes, *agreed.notes), {}, agreed.taken)
    full = [(n, e) for n, e in experts if not e.needs_base and e.model.folder.files and base.folder.files]
    if bare := [f"'{label}'" for label, one in full if (one.config is None) != (base.config is None)]:
        bare = ["the base"] if base.config is None else bare
        notes.append(f"no config.json of {first_of(bare)} is there to be compared. Fix: give the folder of the model")
    notes += [*agreed.notes, *_header_notes(every)]
    return InputAgreement((*found.problems, *problems), (*found.notes, *notes), found.configs, agreed.taken)


def _header_notes(every: Sequence[tuple[str, Model | Deltas]]) -> list[str]:
    """A note on settings of tokenizers that headers of weight files hold and that differ; they are written as one."""
    (first, ours), *others = [(n, s) for n, one in every if (s := _folder(one).header_settings())] or [("", {})]
    rows = [f"{key} ('{label}')" for label, theirs in others for key in unequal_keys(ours, theirs)]
    return [f"headers differ in {first_of(rows)}: those of {words_of(first)} are written"] if rows else []


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


def config_of(expert: Deltas) -> Mapping[str, Any] | None:
    """Config of a full model, or of the model that an adapter was trained on, where its folder has it."""
    if not expert.needs_base:
        return expert.config
    with contextlib.suppress(CheckpointError, OSError, ValueError):
        files = files_of(expert)
        config = read_object(files.fetch(CONFIG)) if files is not None and CONFIG in files.names else {}
        return config if config.get("model_type") else None
    return None


def _files_by_label(every: Sequence[tuple[str, Model | Deltas]], reader: TokenReader) -> dict[str, InputFiles]:
    sources = {label: (files_of(one), _folder(one)) for label, one in every}
    return {n: InputFiles(s, folder.side_files(), reader) for n, (s, folder) in sources.items() if s is not None}


def compare_adapters(labels: Sequence[str], experts: Sequence[Deltas]) -> InputAgreement:
    """Compare adapters without their base: tables in rows of different tokens, and the files beside them."""
    reader, notes, inputs = TokenReader(), list[str](), list[TokenInput]()
    for label, one in zip(labels, experts, strict=True):
        names = () if one.adapter is None else (*one.adapter.extras, *(f"{m}.weight" for m in one.adapter.modules))
        if any(is_token_table(n) or is_output_head(n) for n in names):
            inputs += _token_input(label, one, True, reader, notes)
    problems, told = compare_tokens(inputs, "", MOST_ROWS)
    agreed = agree_files(_files_by_label(list(zip(labels, experts, strict=True)), reader), None, "base")
    problems = [f"{p}; with --base and --to model" for p in problems]
    return InputAgreement(tuple(problems), (*told, *notes, *agreed.notes), files=agreed.taken)


def compare_parts(first: Model, last: Model) -> list[str]:
    """Warnings on a stack, whose token table and files are those of its first part, and whose head is the last's."""
    reader, notes = TokenReader(), list[str]()
    parts: list[tuple[str, Model | Deltas]] = [("base", first), (last.location, last)]
    tokens = [i for label, part in parts for i in _token_input(label, part, True, reader, notes)]
    words = f"table and files are those of the first part, and the output head is that of the last, '{last.location}'"
    if compare_tokens(tokens, "base", MOST_ROWS)[0]:
        notes.append(f"{words}, which has other tokens in its rows: stack models of one vocabulary")
    labels = [names for _, part in parts if (names := label_names(part.config))]
    if len(set(labels)) > 1:
        notes.append(f"{words}, whose rows have other labels: {first_of(labels[1])}")
    return [*notes, *agree_files(_files_by_label(parts, reader), "base", "base").notes]


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
