"""Targets of a merge into a base: every tensor that it stores, with its counterparts in the experts, from headers."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import Model
from actmat.errors import MergeError, first_of
from actmat.experts.deltas import Deltas
from actmat.layout.components import parts_of, single_file_of
from actmat.layout.in_memory import Beginnings, find_beginnings, names_in_memory, names_of_class, replace_beginning
from actmat.layout.renamed import rename_legacy
from actmat.layout.resolve import resolve_layout
from actmat.layout.ties import is_output_head, tied_heads, tied_partner
from actmat.layout.types import Block, LayoutMap, Role, RoleOverride, TensorLayout
from actmat.planning.item import Target
from actmat.planning.missing import lost_problems, missing_problems
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


@dataclass(frozen=True, slots=True)
class BaseTargets:
    """Tensors of a base with their counterparts in the experts.

    Args:
        targets: one for every tensor, and for those that are tied to it; in storage order.
        ignored: per expert, its tensors that the base does not have and no training changes.
        absent: tensors of parts of the base that an expert does not have -> why they are copied.
        problems: why the merge cannot be done, one sentence each.
        notes: decisions made.
    """

    targets: tuple[Target, ...]
    ignored: tuple[tuple[str, ...], ...]
    absent: Mapping[str, str]
    problems: tuple[str, ...]
    notes: tuple[str, ...]


def targets_of(
    base: Model, experts: Sequence[Deltas], labels: Sequence[str], layouts: LayoutMap, kept: Collection[str]
) -> BaseTargets:
    """Match every tensor of the base with one tensor of each expert.

    Ties count as one tensor, however many of its names a checkpoint stores. An expert that stores all names under
    one extra prefix ("model.", "bert."), or lacks one the base has, is matched through it. Tensors in `kept` are
    copied from the base and need no counterpart; so are parts of it (a VAE, a component) that an expert lacks.
    """
    ties = dict(base.tensors.aliases) | {a: c for a, c in layouts.ties.items() if a in base.specs}
    groups = _groups(base.specs, ties)
    spellings = {n: [n, *aliases, *(a for a, c in layouts.ties.items() if c == n)] for n, aliases in groups.items()}
    matches = [_match_expert(base, e, label, spellings) for label, e in zip(labels, experts, strict=True)]
    absent = _absent_parts(base, matches)
    merged = {n: layouts.tensors[n].role for n in groups if n not in kept and n not in absent}
    merged = {n: role for n, role in merged.items() if role is not Role.BUFFER}
    return BaseTargets(
        targets=tuple(_target(base.specs[n], tied, layouts.tensors[n], matches) for n, tied in groups.items()),
        ignored=tuple(m.untrained for m in matches),
        absent=absent,
        problems=tuple(p for m in matches for p in m.problems(base, merged)),
        notes=(*(note for m in matches for note in m.notes), *dict.fromkeys(absent.values())),
    )


def _absent_parts(base: Model, matches: Sequence[_Match]) -> dict[str, str]:
    """Tensors of parts of the base that a full expert does not have, nor tensors of their shapes by other names."""
    out: dict[str, str] = {}
    modules = {folder: prefix for prefix, folder in base.folder.parts.items()}
    for part, prefix in (parts_of(base.specs, base.config) | modules).items():
        names = [n for n in base.specs if n.startswith(prefix)]
        full = [m for m in matches if not m.expert.needs_base and any(m.sources.values())]
        lacking = [m for m in full if not any(m.sources.get(n) for n in names)]
        shapes = {base.specs[n].shape for n in names if len(base.specs[n].shape) > 1}
        who = [f"'{m.label}'" for m in lacking if shapes.isdisjoint(m.expert.specs[n].shape for n in m.lost)]
        if who:
            out |= dict.fromkeys(names, f"expert {', '.join(who)} has no {part} ({prefix}*): copied from the base")
    return out


def _target(spec: TensorSpec, tied: tuple[str, ...], layout: TensorLayout, matches: Sequence[_Match]) -> Target:
    names = [m.sources[spec.name] for m in matches]
    sources = tuple(None if n is None else m.expert.source(n) for m, n in zip(matches, names, strict=True))
    twins = tuple(tuple(m.stored[spec.name][1:]) for m in matches)
    return Target(dataclasses.replace(spec, file="", offset=0), layout, tied, sources, twins)


@dataclass(frozen=True, slots=True)
class _Match:
    """One expert's counterparts of the base's tensors.

    Args:
        sources: for each canonical tensor, the tensor that it is merged with.
        stored: likewise, all names under which the expert stores it.
        lost: trained tensors that the base does not have; `untrained`: others.
        ambiguous: prefixes of several parts of the base that its names complete.
    """

    label: str
    expert: Deltas
    sources: Mapping[str, str | None]
    stored: Mapping[str, list[str]]
    lost: tuple[str, ...]
    untrained: tuple[str, ...]
    notes: list[str]
    ambiguous: Sequence[str] = ()

    def problems(self, base: Model, roles: Mapping[str, Role]) -> list[str]:
        """Why tensors of these roles cannot be merged."""
        if self.ambiguous:
            shown = " and ".join(f"'{prefix}'" for prefix in self.ambiguous)
            if any(name.startswith(self.ambiguous[0]) for name in self.expert.specs):
                return [
                    f"expert '{self.label}' ({self.expert.location}) has the base's names under each of {shown}: which "
                    "are meant is unknown. Likely cause: a moving average beside the weights. Fix: leave the others "
                    f"out, such as --drop '{self.ambiguous[0]}*'"
                ]
            return [
                f"the names of expert '{self.label}' ({self.expert.location}) are completed by several parts of the "
                f"base ({base.location}), {shown}: which one it changes is unknown. Likely cause: it is a part of the "
                "model, saved by itself. Fix: save the whole model, or give that part as the base"
            ]
        present = [n for n, source in self.sources.items() if source is not None]
        if len(base.specs) > 1 and not present:
            return [_nothing_in_common(base, self.label, self.expert)]
        pairs = [(n, source) for n in roles if (source := self.sources[n]) is not None]
        misfits = [_mismatch(base.specs[n], self.expert.specs[source], self.label, roles[n]) for n, source in pairs]
        missing = [base.specs[n] for n in roles if self.sources[n] is None]
        others = {n: self.expert.specs[n] for n in (*self.lost, *self.untrained)}
        problems = missing_problems(missing, present, others, self.label, self.expert.location)
        if not problems:  # else the lost ones may be the missing ones by other names
            problems = lost_problems(self.expert, self.label, self.lost, self.untrained)
        return [*(p for of_tensor in misfits for p in of_tensor), *problems]


def _match_expert(base: Model, expert: Deltas, label: str, spellings: Mapping[str, Sequence[str]]) -> _Match:
    """Find the counterparts in one expert; `spellings`: of each canonical tensor, all its names in the base."""
    present, new = rename_legacy(expert.specs), {old: name for name, old in rename_legacy(base.specs).items()}
    known = {n: expert.specs[s] for n, s in present.items()}
    renaming, ambiguous = _find_renaming({new[n]: s for n, s in base.specs.items()}, known, expert.config)
    heads = tied_heads(expert.specs, base.specs, base.config)
    names = {
        n: dict.fromkeys(replace_beginning(new.get(s, s), renaming) for s in of_tensor)
        for n, of_tensor in spellings.items()
    }
    for head, table in heads.items():
        if table in names:
            names[table][head] = None
    stored = {n: [present[s] for s in of_tensor if s in present] for n, of_tensor in names.items()}
    sources = {n: next(iter(of_tensor), None) for n, of_tensor in stored.items()}
    notes = []
    if renaming:
        notes.append(f"expert '{label}' {_words_of(renaming)}; its names were matched with the base's")
    untied = base.folder.untied
    for name in (n for n, source in sources.items() if source is None and is_output_head(n)):
        partner = tied_partner(next(iter(names[name])), expert.specs, expert.config)
        is_as_base = partner is None and expert.config is None and untied.get(name) in expert.specs
        sources[name] = table_name = untied.get(name) if is_as_base else partner
        if table_name is not None:
            notes.append(f"expert '{label}' ties its output head: its '{table_name}' stands for '{name}'")
    used = {present[s] for of_tensor in names.values() for s in of_tensor if s in present}
    renamed = {n: s for n, s in sources.items() if s is not None and (new[n] == n) != (s in present)}
    if absent := [n for n, source in sources.items() if source is None and len(used) < len(expert.specs)]:
        loaded = _as_loaded(base, expert, absent)
        sources = {**sources, **loaded}
        stored |= {n: [s] for n, s in loaded.items()}
        used.update(loaded.values())
        renamed |= loaded
    if renamed:
        first = next(iter(renamed))
        notes.append(
            f"expert '{label}' has {len(renamed)} tensors under other names, which transformers loads as the base's: "
            f"'{first}' is '{renamed[first]}' there"
        )
    extra = [n for n in expert.specs if n not in used]
    lost = _trained(base, expert, extra, used) if extra else ()
    if untrained := tuple(n for n in extra if n not in lost):
        shown = f"{len(untrained)} tensors that the base lacks: {first_of(untrained)}"
        notes.append(f"expert '{label}' has {shown}; a model computes them, or has them twice")
    return _Match(label, expert, sources, stored, lost, untrained, notes, ambiguous)


def _trained(base: Model, expert: Deltas, extra: Sequence[str], used: Collection[str]) -> tuple[str, ...]:
    """Those of an expert's tensors that training changes: no second names of one that is used, no buffers."""
    layouts = resolve_layout(expert.specs, expert.config)
    ties = {**layouts.ties, **({} if expert.needs_base else expert.model.tensors.aliases)}
    layouts_of = {n: layouts.tensors[n] for n in extra if expert.specs[n].numel}  # an empty one is a mark
    trained = [n for n, layout in layouts_of.items() if layout.role is not Role.BUFFER and ties.get(n) not in used]
    if single_file_of(expert.specs) is not None:  # its numbers outside all modules are of the noise schedule
        trained = [n for n in trained if "." in n or len(expert.specs[n].shape) > 1]
    buffers, twins = names_of_class(base.config if expert.needs_base else expert.config) if trained else ((), {})
    twice = {n for n in trained if twins.get(n) in used and _stored_alike(expert, n, twins[n])}
    return tuple(n for n in trained if n not in twice and (expert.needs_base or not n.endswith(buffers)))


def _stored_alike(expert: Deltas, name: str, twin: str) -> bool:
    """True if two tensors that an expert stores in full have the same values."""
    places = expert.stored.extras if expert.stored is not None else {}
    first, second = (expert.model.tensors.read(places.get(n, n)) for n in (name, twin))
    return first.shape == second.shape and bool((first == second).all())


def _as_loaded(base: Model, expert: Deltas, lost: Sequence[str]) -> dict[str, str]:
    """Tensor of the base -> that of the expert which transformers loads into the same parameter, by its own table."""
    if expert.needs_base:
        return {}
    try:
        mine, theirs = names_in_memory(base)[0], names_in_memory(expert.model)[0]
    except (ValueError, TypeError, LookupError, AttributeError, ImportError, RuntimeError, OSError):
        return {}  # a config that transformers cannot read
    stored = {name: n for n, name in theirs.items()}
    pairs = {n: stored[mine[n]] for n in lost if mine.get(n) in stored}
    return {n: s for n, s in pairs.items() if base.specs[n].shape == expert.specs[s].shape}


def _words_of(renaming: Beginnings) -> str:
    (old, new), *more = renaming
    if more or (old and new):
        return "names its tensors differently: " + ", ".join(f"'{a}' is '{b}' there" for a, b in renaming)
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


def _find_renaming(
    base: Mapping[str, TensorSpec], names: Mapping[str, TensorSpec], config: Mapping[str, Any] | None
) -> tuple[Beginnings, list[str]]:
    """The beginnings by which the expert has more of the base's names than without them, in the right shapes.

    Of several parts of the base that complete the names, none, and their prefixes.
    """

    def score(pairs: Sequence[tuple[str, str]]) -> tuple[int, int]:
        return sum(base[n].shape == names[r].shape for n, r in pairs), len(pairs)

    missing = [n for n in base if n not in names]
    architecture = next(iter((config or {}).get("architectures") or ()), "")
    return find_beginnings(base, names, score, str(architecture), missing[:1]) if missing else ((), [])


def _nothing_in_common(base: Model, label: str, expert: Deltas) -> str:
    first, other = next(iter(base.specs)), next(iter(expert.specs), None)
    has = "holds no tensors" if other is None else f"has other names, such as '{other}'"
    return (
        f"expert '{label}' ({expert.location}) has no tensor name in common with the base ({base.location}): the base "
        f"has {len(base.specs)} tensors, such as '{first}', the expert {has}. Is it of another architecture?"
    )


def _mismatch(spec: TensorSpec, other: TensorSpec, label: str, role: Role) -> list[str]:
    problems = []
    if spec.shape != other.shape and not other.numel:
        problems.append(
            f"tensor '{other.name}' of expert '{label}' is empty ({_shape(other)}), expected {_shape(spec)}. "
            "Likely cause: it was saved while it was sharded (DeepSpeed ZeRO-3, FSDP). Fix: save again with all shards "
            "gathered (stage3_gather_16bit_weights_on_model_save, or zero_to_fp32.py)"
        )
    elif spec.shape != other.shape:
        text = f"tensor '{spec.name}' is {_shape(spec)} in the base and {_shape(other)} in expert '{label}'"
        rows_differ = len(spec.shape) == len(other.shape) == 2 and spec.shape[1] == other.shape[1]
        if rows_differ and (role is Role.EMBEDDING or spec.name.endswith("lm_head.weight")):
            text += (
                f": another vocabulary ({other.shape[0]} tokens instead of {spec.shape[0]}; tokens were added or the "
                "table was padded). Fix: for a model, take rows by token (--set vocabulary=union); else resize the "
                "expert's embeddings"
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
