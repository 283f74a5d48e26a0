"""Do the experts fit the base? Meaning and correspondence of all tensors, and every problem, from headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import Checkpoint, TensorSpec
from actmat.checkpoints.untied import UntiedCheckpoint
from actmat.errors import MergeError
from actmat.experts.base import Expert
from actmat.layout import resolve_layout
from actmat.layout.in_memory import MULTIMODAL, begun_otherwise
from actmat.layout.ties import is_output_head, tied_heads, tied_partner
from actmat.layout.types import Block, LayoutMap, Role, RoleOverride
from actmat.planning.missing import missing_problems
from actmat.recipe import Recipe


def resolve_roles(
    recipe: Recipe, specs: Mapping[str, TensorSpec], config: Mapping[str, Any] | None
) -> tuple[LayoutMap, list[str]]:
    """Layouts of all tensors, without ties if the recipe says so; and problems with its `roles`."""
    overrides = [
        RoleOverride(
            match=r.match,
            role=Role(r.role) if r.role else None,
            orientation=r.orientation,
            blocks=tuple(Block(name, start, stop) for name, (start, stop) in r.blocks.items()),
        )
        for r in recipe.roles
    ]
    problems: list[str] = []
    try:
        layouts = resolve_layout(specs, config, overrides)
    except MergeError as error:
        layouts, problems = resolve_layout(specs, config), list(error.problems)
    return (layouts if recipe.ties else dataclasses.replace(layouts, ties={})), problems


DIFFUSION_MODEL = "model.diffusion_model."
"""Prefix under which single files of image tools hold the diffusion model, and which other files of it lack."""


@dataclass(frozen=True, slots=True)
class Alignment:
    """Correspondence of the tensors of all checkpoints.

    Args:
        canonical: base tensors to be merged or copied, in storage order -> tied names stored next to them.
        sources: for each canonical tensor, its name in each expert (None if the expert lacks it).
        twins: for each canonical tensor, the other names under which each expert stores it too.
        ignored: per expert, its tensors that the base does not have.
        problems: why the merge cannot be done, one sentence each.
        notes: decisions made.
    """

    canonical: Mapping[str, tuple[str, ...]]
    sources: Mapping[str, tuple[str | None, ...]]
    twins: Mapping[str, tuple[tuple[str, ...], ...]]
    ignored: tuple[tuple[str, ...], ...]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def align(
    base: Checkpoint, experts: Sequence[Expert], labels: Sequence[str], layouts: LayoutMap, kept: frozenset[str]
) -> Alignment:
    """Match every tensor of the base with one tensor of each expert.

    Ties count as one tensor, however many of its names a checkpoint stores. An expert that stores all names under
    one extra prefix ("model.", "bert."), or lacks one the base has, is matched through it. Tensors in `kept` are
    copied from the base and need no counterpart.
    """
    ties = dict(base.aliases) | {a: c for a, c in layouts.ties.items() if a in base.specs}
    groups = _groups(base.specs, ties)
    problems: list[str] = []
    notes: list[str] = []
    sources: dict[str, list[str | None]] = {name: [] for name in groups}
    twins: dict[str, list[tuple[str, ...]]] = {name: [] for name in groups}
    ignored = []
    untied = base.heads if isinstance(base, UntiedCheckpoint) else {}
    for label, expert in zip(labels, experts, strict=True):
        renaming = _renaming(base.specs, expert.specs)
        if renaming is not None:
            notes.append(f"expert '{label}' {renaming.describe()}; its names were matched with the base's")
        missing: list[str] = []
        heads = tied_heads(expert.specs, base.specs, base.config)
        used: set[str] = set()
        before = len(problems)
        for name, aliases in groups.items():
            known = [name, *aliases, *(a for a, c in layouts.ties.items() if c == name)]
            names = dict.fromkeys(renaming.apply(n) if renaming else n for n in known)
            names |= {h: None for h, table in heads.items() if table == name}
            stored = [n for n in names if n in expert.specs]
            source = stored[0] if stored else None
            if source is None and is_output_head(name):
                source = _table_for(next(iter(names)), expert, untied.get(name))
                if source is not None:
                    notes.append(f"expert '{label}' ties its output head: its '{source}' stands for '{name}'")
            sources[name].append(source)
            twins[name].append(tuple(stored[1:]))
            used.update(names)
            if name in kept or layouts.tensors[name].role is Role.BUFFER:
                continue
            if source is None:
                missing.append(name)
            else:
                problems.extend(_mismatch(base.specs[name], expert.specs[source], label, layouts.tensors[name].role))
        extra = tuple(n for n in expert.specs if n not in used)
        there = [n for n, found in sources.items() if found[-1] is not None]
        problems += missing_problems([base.specs[n] for n in missing], there, extra, label, expert.location)
        if len(base.specs) > 1 and not any(found[-1] for found in sources.values()):
            problems[before:] = [_nothing_in_common(base, label, expert)]
        ignored.append(extra)
        if extra:
            notes.append(_ignored_note(label, extra))
    return Alignment(
        canonical=groups,
        sources={k: tuple(v) for k, v in sources.items()},
        twins={k: tuple(v) for k, v in twins.items()},
        ignored=tuple(ignored),
        problems=tuple(problems),
        notes=tuple(notes),
    )


def _table_for(head: str, expert: Expert, table: str | None) -> str | None:
    """The tensor of an expert that stands for an output head; an expert without a config is tied like the base."""
    found = tied_partner(head, expert.specs, expert.config)
    return table if found is None and expert.config is None and table in expert.specs else found


def _ignored_note(label: str, extra: Sequence[str]) -> str:
    shown = ", ".join(extra[:3]) + (", ..." if len(extra) > 3 else "")
    return f"expert '{label}' has {len(extra)} tensors that the base lacks; not merged: {shown}"


@dataclass(frozen=True, slots=True)
class _Renaming:
    """Other beginnings of the expert's names: pairs of the base's and the expert's; the first that fits counts."""

    pairs: tuple[tuple[str, str], ...]

    def apply(self, name: str) -> str:
        return begun_otherwise(name, self.pairs)

    def describe(self) -> str:
        (old, new), *more = self.pairs
        if more or (old and new):
            return "names its tensors differently: " + ", ".join(f"'{a}' is '{b}' there" for a, b in self.pairs)
        return f"stores its tensors {'without' if old else 'under'} the prefix '{old or new}'"


def _groups(specs: Mapping[str, TensorSpec], ties: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Canonical stored name -> other stored names of the same tensor."""
    root = {}
    for name in specs:
        seen, target = {name}, name
        while target in ties and ties[target] not in seen:
            target = ties[target]
            seen.add(target)
        root[name] = target
    members: dict[str, list[str]] = {}
    for name in specs:
        members.setdefault(root[name], []).append(name)
    out = {}
    for target, names in members.items():
        head = target if target in names else names[0]
        same = [
            n for n in names if n != head and (specs[n].shape, specs[n].dtype) == (specs[head].shape, specs[head].dtype)
        ]
        out[head] = tuple(same)
        out.update({n: () for n in names if n != head and n not in same})
    return {name: out[name] for name in specs if name in out}


def _renaming(base: Mapping[str, TensorSpec], expert: Mapping[str, TensorSpec]) -> _Renaming | None:
    """The renaming, if any, by which the expert has more of the base's names than without it."""
    direct = sum(n in expert for n in base)
    if direct == len(base):
        return None
    probe = next((n for n in base if n not in expert), None)
    added = {e.removesuffix(probe) for e in expert if probe and e.endswith("." + probe)}
    removed = {n[: n.index(".") + 1] for n in base if "." in n and n.partition(".")[2] in expert}
    if any(n.startswith(DIFFUSION_MODEL) and n.removeprefix(DIFFUSION_MODEL) in expert for n in base):
        removed.add(DIFFUSION_MODEL)
    pairs = {(("", text),) for text in added} | {((text, ""),) for text in removed}
    candidates = [_Renaming(p) for p in sorted(pairs)]
    for known in MULTIMODAL:
        candidates += [_Renaming(known), _Renaming(tuple((new, old) for old, new in known))]
    found = [sum(c.apply(n) in expert for n in base) for c in candidates]
    best = max(found, default=0)
    return candidates[found.index(best)] if best > direct else None


def _nothing_in_common(base: Checkpoint, label: str, expert: Expert) -> str:
    first, other = next(iter(base.specs)), next(iter(expert.specs), None)
    has = "holds no tensors" if other is None else f"has other names, such as '{other}'"
    return (
        f"expert '{label}' ({expert.location}) has no tensor name in common with the base ({base.location}): the base "
        f"has {len(base.specs)} tensors, such as '{first}', the expert {has}. Is it of another architecture?"
    )


def _mismatch(spec: TensorSpec, other: TensorSpec, label: str, role: Role) -> list[str]:
    problems = []
    if spec.shape != other.shape:
        text = f"tensor '{spec.name}' is {_shape(spec)} in the base and {_shape(other)} in expert '{label}'"
        rows_differ = len(spec.shape) == len(other.shape) == 2 and spec.shape[1] == other.shape[1]
        if rows_differ and (role is Role.EMBEDDING or spec.name.endswith("lm_head.weight")):
            text += (
                f": another vocabulary ({other.shape[0]} tokens instead of {spec.shape[0]}; tokens were added or the "
                "table was padded). Take rows by token (--vocabulary union), resize the expert's embeddings, "
                "or list it under 'keep' (--keep)"
            )
        else:
            text += ". Is it fine-tuned from this base? To copy it from the base, list it under 'keep' (--keep)"
        problems.append(text)
    if not other.is_floating:
        problems.append(
            f"tensor '{spec.name}' is {spec.dtype} in the base and {other.dtype} in expert '{label}': integers cannot "
            "be merged; is the expert quantized? Use its unquantized weights"
        )
    return problems


def _shape(spec: TensorSpec) -> str:
    return "x".join(map(str, spec.shape)) or "a scalar"
