"""Comparison of base and experts beside their weights: configs, labels, chat templates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.layer_names import is_before_layers, split_layer
from actmat.errors import CheckpointError
from actmat.experts.base import Expert
from actmat.identity.compare import FIX, ConfigAgreement, agree

TEMPLATE = "chat_template.jinja"


def agreement(
    base: Checkpoint,
    experts: Sequence[tuple[str, Expert]],
    take: str | None = None,
    written: Mapping[str, Any] | None = None,
    kept: Sequence[str] = (),
) -> ConfigAgreement:
    """Compare configs and labels of base and experts.

    Args:
        base: of the merge.
        experts: with their labels.
        take: whose entries are written where they differ.
        written: config of the base as an output has it; default: as stored.
        kept: patterns of tensors that are copied from the base.
    """
    configs = [(label, expert.config) for label, expert in experts]
    found = agree(base.config if written is None else written, configs, take)
    labels = {label: names for label, config in configs if (names := label_names(config))}
    if not labels:
        return found
    ours = label_names(base.config)
    if ours is None:  # generic names, or none: those of the experts count
        first, ours = next(iter(labels.items()))
        owner = f"expert '{first}'"
    else:
        owner = "base"
    other = {label: names for label, names in labels.items() if names != ours}
    rows = (n for n, s in base.specs.items() if s.shape and s.shape[0] == len(ours))
    outside = (n for n in rows if split_layer(n) is None and not is_before_layers(n))
    heads = [n for n in outside if not any(fnmatchcase(n, p) for p in kept)]
    if not other or not heads:
        return found
    listed = "; ".join(f"{label}: {_shown(names)}" for label, names in {owner: ours, **other}.items())
    text = f"config.json: id2label differs, so that rows of the head mean other labels ({listed})"
    if take is not None:
        return ConfigAgreement(found.problems, (*found.notes, text), found.configs)
    problem = (
        f"{text}: '{heads[0]}' cannot be merged row by row. Fix: give experts whose labels have one order, keep the "
        f"base's head (--keep '{heads[0]}'), or merge it all the same: {FIX}"
    )
    return ConfigAgreement((*found.problems, problem), found.notes, found.configs)


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


def template_note(
    base: Checkpoint, experts: Sequence[tuple[str, Expert]], taken: str, read: Callable[[Path], Mapping[str, Any]]
) -> list[str]:
    """Note on chat templates of local folders that differ.

    Args:
        taken: whose tokenizer files are written: 'base' or a label.
        read: reads a JSON file.
    """
    folders = {"base": base.directory} | {label: p for label, e in experts if (p := Path(e.location)).is_dir()}
    found = {label: chat_template(folder, read) for label, folder in folders.items() if folder is not None}
    templates = {label: text for label, text in found.items() if text is not None}
    other = [f"'{label}'" for label, text in templates.items() if text != templates.get(taken)]
    if not other:
        return []
    owner = "the base" if taken == "base" else f"expert '{taken}'"
    whose = f"that of {owner} is written" if taken in templates else f"{owner} has none, and none is written"
    return [f"chat templates differ ({', '.join(other)}): {whose}. Another one: --set files_from=NAME"]


def chat_template(folder: Path, read: Callable[[Path], Mapping[str, Any]] = read_object) -> str | None:
    """Chat template of a tokenizer in a local folder, from any of the files that transformers reads."""
    try:
        if (folder / TEMPLATE).is_file():
            return (folder / TEMPLATE).read_text(encoding="utf-8", errors="replace").strip()
        for name in ("chat_template.json", "tokenizer_config.json"):
            if (folder / name).is_file() and (found := read(folder / name).get("chat_template")):
                return (found if isinstance(found, str) else json.dumps(found)).strip()
    except (OSError, CheckpointError):
        return None
    return None
