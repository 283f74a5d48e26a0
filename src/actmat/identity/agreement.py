"""`agree`: everything of a command's inputs beside their tensors, compared; what it means for the output.

Configs, labels, tokens, chat templates, settings and files follow the rule of weights; what differs is said or refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from actmat.checkpoints.layer_names import is_before_layers, split_layer
from actmat.checkpoints.model import CONFIG, Model
from actmat.checkpoints.side_files import PIPELINE
from actmat.checkpoints.untied import TIE
from actmat.errors import AlignmentError, first_of
from actmat.experts.deltas import Deltas
from actmat.identity.configs import InputAgreement, agree_configs, words_of
from actmat.identity.entries import label_names
from actmat.identity.files import agree_files, unequal_keys
from actmat.identity.inventory import Inventory
from actmat.identity.templates import HEADER_TEMPLATE
from actmat.identity.tokens import MOST_ROWS, TOKENIZER, TokenInput, TokenReader, compare_tokens, tokenizer_file
from actmat.layout.ties import is_output_head, is_token_table, may_have_head, ties_embeddings


@dataclass(frozen=True, slots=True)
class OutputChoice:
    """What an output is, and what the user chose for it.

    Args:
        kind: a model in a folder; an adapter, which has no config of a model; a stack, which has the files of its first
            part; or one file, whose header is that of the base.
        config_from: whose entries of the config are written where they differ: 'base' or a label; None: not said.
        files_from: whose tokenizer and settings are written; None: the experts' where they agree, else the base's.
        kept: tensors that are copied from the base.
        has_vocabulary: rows of token tables are taken by token.
        fix: how a user resolves what differs, where no field of a recipe does.
    """

    kind: Literal["model", "adapter", "stack", "file"] = "model"
    config_from: str | None = None
    files_from: str | None = None
    kept: Collection[str] = ()
    has_vocabulary: bool = False
    fix: str = ""


def agree(inputs: Sequence[tuple[str, Model | Deltas]], output: OutputChoice) -> InputAgreement:
    """Compare the inputs of a command, and derive the output's config and files.

    Args:
        inputs: with their labels; the base first, labelled 'base', where there is one.
        output: what is written.
    """
    reader = TokenReader()
    every = [Inventory(label, model, reader) for label, model in inputs]
    base = every[0] if every[0].label == "base" else None
    experts = every if base is None else every[1:]
    warnings = [text for expert in experts for text in expert.unread(base)]
    agreed = InputAgreement()
    if base is not None:
        agreed = agreed if output.kind == "stack" else _agree_models(base, experts, output)
        agreed = _agree_heads(agreed, base, experts)
    of_files = InputAgreement()
    if output.kind != "file" and (base is None or base.folder.files or base.folder.texts):
        owner, coded = output.files_from, output.config_from or "base"
        by_label = {i.label: i for i in every if i.source is not None or i.folder.texts}
        if base is not None and PIPELINE in base.side.kept:  # a component has no files of the others
            by_label = {label: i for label, i in by_label.items() if PIPELINE in i.side.kept}
        is_model = output.kind == "model"
        of_files = agree_files(by_label, owner, coded, is_new=output.has_vocabulary, is_model=is_model)
    problems, notes = ([], []) if output.has_vocabulary else _tokens(every, output)
    if TOKENIZER in of_files.files and not problems:
        notes = _tokens(every, replace(output, files_from=of_files.files[TOKENIZER]))[1]
    if base is None:
        problems = [f"{p}; with --base and --to model" for p in problems]
    notes = [*agreed.notes, *notes, *of_files.notes, *_header_notes(every, output)]
    if output.kind == "adapter":
        agreed, notes = InputAgreement(), [*agreed.problems, *notes]
    problems = [*agreed.problems, *problems]
    return InputAgreement(tuple(problems), tuple(notes), (*agreed.warnings, *warnings), agreed.configs, of_files.files)


def export_remarks(inputs: Sequence[tuple[str, Model | Deltas]], fix: str = "") -> list[str]:
    """Lines on what the file of an export will not have of the last input; with the header of a base, if there is one.

    Args:
        inputs: with their labels, see `agree`.
        fix: how a user resolves what differs.

    Raises:
        AlignmentError: the input computes otherwise than the header says, or its tokens are others.
    """
    agreed, (_, made) = agree(inputs, OutputChoice("file", files_from="base", fix=fix)), inputs[-1]
    if agreed.problems:
        said = f"{made.location} cannot be written with the metadata of {inputs[0][1].location}"
        raise AlignmentError(said, agreed.problems)
    of_adapter = made.model.folder.notes if isinstance(made, Deltas) else ()
    warnings = (*(n.text for n in of_adapter if n.severity == "warning"), *agreed.warnings)
    notes = (*(n.text for n in of_adapter if n.severity == "note"), *agreed.notes)
    return [*(f"warning: {text}" for text in warnings), *(f"note: {text}" for text in notes)]


def _agree_models(base: Inventory, experts: Sequence[Inventory], output: OutputChoice) -> InputAgreement:
    """Configs and labels of a base and its experts."""
    written = base.folder.written.get(CONFIG, base.config)
    configs = [(expert.label, expert.config) for expert in experts]
    head = _label_head(base, (base.config, *dict(configs).values()), output)
    agreed = agree_configs(written, configs, output.config_from, output.fix, head)
    full = [e for e in experts if not e.is_adapter and e.folder.files and base.folder.files]
    notes = [*agreed.notes]
    if bare := [f"'{e.label}'" for e in full if (e.config is None) != (base.config is None)]:
        whose = "the base" if base.config is None else first_of(bare)
        notes.append(f"no config.json of {whose} is there to be compared. Fix: give the folder of the model")
    return replace(agreed, notes=tuple(notes))


def _agree_heads(agreed: InputAgreement, base: Inventory, experts: Sequence[Inventory]) -> InputAgreement:
    """Output heads that configs untie and no file stores, which loaders draw at random: tied if another input's is."""
    models = [i for i in (base, *experts) if not i.is_adapter and i.folder.files]
    headless, configs = [words_of(i.label) for i in models if _lacks_head(i)], [i.config for i in models]
    # of other classes nothing tells that they have a head over the vocabulary
    has_head = any(ties_embeddings(c) or "ForCausalLM" in str((c or {}).get("architectures")) for c in configs)
    if not (headless and has_head):
        return agreed
    said = f"config.json of {first_of(headless)} unties an output head that it does not store"
    if not any(map(ties_embeddings, configs)):
        return replace(agreed, warnings=(f"{said}: loaders draw one at random",))
    written = dict(agreed.configs)
    if base in models and _lacks_head(base):
        written[CONFIG] = {**written.get(CONFIG, base.folder.written.get(CONFIG, base.config or {})), TIE: True}
    return replace(agreed, notes=(*agreed.notes, f"{said}: taken as tied"), configs=written)


def _lacks_head(of_input: Inventory) -> bool:
    """True if a config unties an output head that is not stored, under any name: no matrix has a row per token."""
    config, specs = of_input.config, of_input.model.specs
    if not config or not may_have_head(config) or ties_embeddings(config):
        return False
    rows = {spec.shape[:1] for name, spec in specs.items() if is_token_table(name)}
    others = [n for n, s in specs.items() if len(s.shape) == 2 and s.shape[:1] in rows and not is_token_table(n)]
    # a head that has a name of its own may have fewer rows than a padded table
    named = (n for n in specs if is_output_head(n) or re.search(r"lm_heads\.\d+\.weight$", n))
    return bool(rows) and all("embed" in n.replace("unembed", "") for n in others) and not [*named]


def _header_notes(every: Sequence[Inventory], output: OutputChoice) -> list[str]:
    """A note on settings of tokenizers that headers of weight files hold and that differ; they are written as one."""
    settings = {i.label: dict(i.folder.header_settings()) for i in every}
    if output.kind == "file":
        folders = [
            i for i in every if not settings[i.label] and (i.template or (i.source and tokenizer_file(i.source)))
        ]
        settings |= {i.label: {HEADER_TEMPLATE: i.template or ""} for i in folders}
    holders = [(label, held) for label, held in settings.items() if held or output.kind == "file"]
    (first, ours), *others = holders or [("", {})]
    rows = [
        f"{key} ('{label}')"
        for label, theirs in others
        for key in unequal_keys({k: v for k, v in ours.items() if len(theirs) > 1 or k in theirs}, theirs)
    ]
    return [f"headers differ in {first_of(rows)}: those of {words_of(first)} are written"] if rows else []


def _label_head(base: Inventory, configs: Iterable[Mapping[str, Any] | None], output: OutputChoice) -> str:
    """Pattern of a merged tensor with a row per label of a config; empty without one."""
    names = next((names for config in configs if (names := label_names(config))), None)
    if names is None:
        return ""
    for name, spec in base.model.specs.items():
        is_last = split_layer(name) is None and not is_before_layers(name)
        rows = spec.shape[0] - len(names) if spec.shape else -1
        may_be_head = rows in (0, 1) and name not in output.kept  # detectors have a row for "no object"
        if may_be_head and (is_last or re.search("class|score|label", name)):
            return re.sub(r"\.\d+\.", ".*.", name).rpartition(".")[0] + ".*"
    return ""


def _tokens(every: Sequence[Inventory], output: OutputChoice) -> tuple[list[str], list[str]]:
    """Problems and notes on rows of token tables that mean different tokens; tables of other sizes are not compared."""
    base = every[0] if every[0].label == "base" and output.kind != "stack" else None
    rows, kept = MOST_ROWS, False
    if base is not None:
        if not (tables := base.tables()) or len(every) < 2:
            return [], []
        rows = max(base.model.specs[n].shape[0] for n in tables)
        heads = [n for n, s in base.model.specs.items() if is_output_head(n) and s.shape[:1] == (rows,)]
        kept = all(n in output.kept for n in (*tables, *heads))
    notes: list[str] = []
    inputs: list[TokenInput] = []
    for item in every:
        if base is None or item.is_adapter or rows in {item.model.specs[n].shape[0] for n in item.tables()}:
            inputs += item.tokens(notes)
    problems, remarks = compare_tokens(inputs, output.files_from or "base", rows, merged=not kept, fix=output.fix)
    return problems, [*remarks, *notes]
