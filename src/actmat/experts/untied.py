"""Experts that train the output head and the token table of a tied base apart, and the base that they are merged into.

PEFT unties the modules of `modules_to_save`, unless `ensure_weight_tying` is set: the saved table or head is replaced,
the other one stays as it was. A base with a head of its own gives the same. A delta of LoRA on a tied head is refused:
PEFT applies it to the head in training, and to the table as well in `merge_and_unload`.

Source: PEFT 0.21 (https://github.com/huggingface/peft), `tuners/tuners_utils.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import Model
from actmat.checkpoints.untied import untie
from actmat.errors import CheckpointError
from actmat.experts.deltas import Deltas
from actmat.experts.lora.adapter import Adapter
from actmat.layout.in_memory import find_on_disk
from actmat.layout.ties import (
    can_untie,
    find_ties,
    head_of,
    is_token_table,
    may_have_head,
    tied_heads,
    ties_embeddings,
)  # fmt: skip

FIX = (
    "Fix: merge into an untied copy of the base (load it in transformers, set config.tie_word_embeddings = False and "
    "lm_head.weight to a clone of the table, save_pretrained)"
)

_KEPT_TIED = frozenset({"embed_tokens", "lm_head"})
"""Modules for which PEFT obeys `ensure_weight_tying`; those with another name, as GPT-2's `wte`, it unties."""


def keeps_ties(fields: Mapping[str, Any]) -> bool:
    """True if PEFT trained a saved table and the head that is tied to it as one, by the config of the adapter.

    >>> keeps_ties({"ensure_weight_tying": True, "modules_to_save": ["lm_head"]})
    True
    >>> keeps_ties({"ensure_weight_tying": True, "modules_to_save": ["wte"]})
    False
    """
    saved = fields.get("modules_to_save") or ()
    names = {str(n).rpartition(".")[2] for n in saved} if isinstance(saved, list | tuple) else set()
    return bool(fields.get("ensure_weight_tying")) and not names.isdisjoint(_KEPT_TIED)


@dataclass(frozen=True, slots=True)
class TiedParts:
    """Treatment of the tied table and head of a base, for one adapter.

    Args:
        base: what the adapter is fitted to: the base, or the base with a head of its own.
        heads: output heads of their own -> the table that the base ties each to.
        copies: saved heads that equal the saved table, so that the tie stays.
        refused: weights whose deltas are refused, and need not be fitted.
        problems: one sentence each.
        notes: for the plan.
    """

    base: Model
    heads: Mapping[str, str]
    copies: frozenset[str] = frozenset()
    refused: Sequence[str] = ()
    problems: Sequence[str] = ()
    notes: Sequence[str] = ()


def tied_parts(
    adapter: Adapter, base: Model, extras: Mapping[str, str], deltas: Mapping[str, tuple[int, ...]]
) -> TiedParts:
    """Treatment of a table and a head that the base of an adapter ties.

    Args:
        adapter: on the base.
        base: as it is stored.
        extras: tensors trained in full, name in the model -> stored name.
        deltas: names in the model of the weights that it has deltas for, and their shapes, empty if not known.
    """
    if not (ties_embeddings(base.config) and may_have_head(base.config)):
        return TiedParts(base, {})
    saved = {name: adapter.weights.specs[stored] for name, stored in extras.items()}
    tables = _tables(base, [n for n in (*saved, *deltas) if is_token_table(n)])
    of_names = tied_heads(
        {n: TensorSpec(n, s, "", "") for n, s in deltas.items()} | dict(saved), base.specs, base.config
    )
    at = {n: of_names[n] for n in saved if n in of_names}
    saved_tables = {n: table for n, table in tables.items() if n in saved}
    twins = {table: n for n, table in reversed(list(saved_tables.items()))}
    pairs = {n: (extras[n], extras[twins[table]]) for n, table in at.items() if table in twins}
    copies = frozenset(n for n, (a, b) in pairs.items() if adapter.hashes[a] == adapter.hashes[b])
    apart = {n: table for n, table in at.items() if n not in copies}
    heads, problems = {}, []
    if keeps_ties(adapter.config.fields):
        problems = [
            f"ensure_weight_tying is set, but the saved '{n}' differs from the table it is tied to" for n in apart
        ]
    else:
        heads = {head_of(table) or n: table for n, table in apart.items()}
        heads |= {head_of(t) or "": t for t in (() if copies else saved_tables.values())}
    problems += [_no_head(base, table) for head, table in heads.items() if not can_untie(head, table)]
    refused = [n for n in deltas if n in of_names and not heads]
    problems += [_delta_of_head(base, n, of_names[n]) for n in refused]
    notes = [_delta_of_table(t) for n, t in tables.items() if n in deltas and not heads]
    untied = untie(base, heads) if heads and not problems else base
    return TiedParts(untied, heads, copies, refused, problems, notes)


def separate_heads(expert: Deltas, base: Model, *, ties: bool) -> Mapping[str, str]:
    """Separate output heads of a full checkpoint -> table of the base that ties them.

    A checkpoint whose config ties them too stores one tensor twice, which is compared when it is read.
    """
    config = expert.config
    is_untied = config is not None and not ties_embeddings(config)
    heads = tied_heads(expert.specs, base.specs, base.config) if is_untied or not ties else {}
    return {head_of(table) or head: table for head, table in heads.items()}


def untied_base(base: Model, experts: Sequence[Deltas], labels: Sequence[str], *, ties: bool) -> Model:
    """The base, with output heads of its own where an expert has one that it ties.

    Args:
        ties: False merges all names of a tied tensor apart.

    Raises:
        CheckpointError: it cannot be untied; one problem per expert.
    """
    heads: dict[str, str] = {}
    whose: list[str] = []
    problems = []
    for label, expert in zip(labels, experts, strict=True):
        of_expert = expert.model.folder.untied if expert.needs_base else separate_heads(expert, base, ties=ties)
        problems += [f"expert '{label}': {_no_head(base, t)}" for h, t in of_expert.items() if not can_untie(h, t)]
        heads |= of_expert
        whose += [f"'{label}'"] if of_expert else []
    if not ties:
        stored = find_ties(base.specs, base.config)
        heads |= {h: t for h, t in stored.items() if can_untie(h, t)}
    if problems:
        raise CheckpointError(f"{base.location}: its output head cannot be untied.", problems)
    if not heads:
        return base
    why = f"expert {', '.join(whose)} trains them apart" if whose else "the recipe merges tied tensors apart"
    listed = ", ".join(f"'{h}' from '{t}'" for h, t in heads.items())
    note = f"its output head is untied ({listed}), as {why}: the output has both, and tie_word_embeddings is false"
    return untie(base, heads, note)


def _tables(base: Model, names: Sequence[str]) -> dict[str, str]:
    """Name of a token table in the model -> its name in the base."""
    try:
        located = find_on_disk(base, [[n] for n in names])[0] if names else {}
    except CheckpointError:  # several parts have such a table; the fit of the adapter says so
        return {}
    whole = {n: p for n, p in located.items() if len(p.slices) == 1 and not p.rows}
    return {n: whole[n].slices[0].name for n in names if n in whole}


def _no_head(base: Model, table: str) -> str:
    return (
        f"it trains the output head or the table '{table}', which the base ({base.location}) ties, apart from the "
        f"other, and how this architecture loads them untied is not known. {FIX}"
    )


def _delta_of_head(base: Model, name: str, table: str) -> str:
    return (
        f"it has a delta for '{name}', which the base ({base.location}) ties to '{table}': PEFT applies it to the head "
        f"in training, and to the table as well when it merges. {FIX}, which gives what was trained"
    )


def _delta_of_table(table: str) -> str:
    return (
        f"its delta of '{table}' changes the output head too, as the base ties them and as merge_and_unload does; PEFT "
        "trained it on the table only. An untied copy of the base keeps the head as it was"
    )
