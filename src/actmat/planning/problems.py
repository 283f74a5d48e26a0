"""Reasons why a recipe does not fit its inputs; all of them are raised together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from actmat.checkpoints.model import Model
from actmat.checkpoints.quantization import quantization_problems
from actmat.errors import AlignmentError, MergeError, first_names
from actmat.experts.deltas import Deltas
from actmat.experts.lora.adapter import Adapter
from actmat.layout.classify import is_computed
from actmat.layout.types import Role
from actmat.methods import get_method
from actmat.planning.choose import Chooser
from actmat.planning.implied import labeled_adapters
from actmat.planning.item import MethodCall, Target
from actmat.recipe import Recipe


def check(problems: Sequence[str], kind: type[MergeError] = AlignmentError) -> None:
    """Raise the problems of a plan as one error, if there are any."""
    if problems:
        many = "s" * (len(problems) > 1)
        raise kind(f"The merge cannot be done: {len(problems)} problem{many}.", problems)


def input_problems(recipe: Recipe, base: Model, experts: Sequence[Deltas]) -> list[str]:
    """Problems of inputs: signs of codes instead of weights, or no tensors."""
    inputs: list[tuple[str, Model | Deltas]] = [
        ("base", base),
        *((f"expert '{n}'", e) for n, e in zip(recipe.labels, experts, strict=True)),
    ]
    problems = []
    for label, checkpoint in inputs:
        problems += [f"{label}: {p}" for p in quantization_problems(checkpoint.specs, checkpoint.config)]
        if not checkpoint.specs:
            problems.append(f"{label} ({checkpoint.location}) holds no tensors")
    return problems


def buffer_problems(
    base: Model, experts: Sequence[Deltas], labels: Sequence[str], targets: Sequence[Target]
) -> Iterator[str]:
    """Integers, and numbers of a noise schedule, that differ in an expert: they are copied from the base, and what was
    changed there would be lost. Floats are compared up to the rounding of the coarser dtype.
    """
    names, who = dict[str, None](), dict[str, None]()
    for target in (t for t in targets if t.layout.role is Role.BUFFER and not is_computed(t.name)):
        for label, expert, source in zip(labels, experts, target.sources, strict=True):
            if source is not None and source.kind == "stored":
                ours, theirs = base.tensors.read(target.name), expert.read(source.name)
                rounding = max((torch.finfo(x.dtype).eps for x in (ours, theirs) if x.is_floating_point()), default=0.0)
                wide = torch.float64 if rounding else torch.int64
                if not torch.allclose(ours.to(wide), theirs.to(wide), rounding, 0.0, equal_nan=True):
                    names[target.name] = who[label] = None
    if names:
        keep = " ".join(f"--keep '{name}'" for name in names)
        yield (
            f"{first_names(names)}: integers, or a noise schedule, which cannot be merged, and those of expert "
            f"{first_names(who)} are not the base's. Fix: give experts that agree with it, or copy the base's ({keep})"
        )


def base_problems(recipe: Recipe, base: Model, experts: Sequence[Deltas], chooser: Chooser) -> Iterator[str]:
    """Problems of a recipe that merges into a base."""
    pairs = zip(recipe.labels, experts, strict=True)
    yield from _space_problems(recipe, [label for label, expert in pairs if expert.adapter is None])
    yield from _factor_problems(recipe, labeled_adapters(recipe, experts))
    yield from (f"the pattern '{p}' matches no tensor of the base" for p in chooser.unused_patterns(base.specs))


def idle_problems(labels: Sequence[str], merged: Sequence[Target]) -> Iterator[str]:
    """Experts without a delta in any target that is merged: the output would be the same without them."""
    for k, label in enumerate(labels):
        sources = (target.sources[k] for target in merged if target.sources)
        if not any(source is not None and source.kind != "zero" for source in sources):
            yield (
                f"expert '{label}' changes nothing: no tensor of it is merged. Likely cause: patterns (keep, drop) "
                "that match all of it, a base without the parts that it has, or another expert without them. Fix: "
                "leave it out, give its base, or merge it by itself"
            )


def factor_output_problems(
    recipe: Recipe,
    adapters: Sequence[Adapter],
    calls: Mapping[str, MethodCall | None],
    known: Sequence[str],
    chooser: Chooser,
) -> Iterator[str]:
    """Problems of a recipe that merges adapters without a base.

    Args:
        calls: by module.
        known: names of all tensors that the adapters imply or store.
        chooser: of the recipe.
    """
    yield from _factor_problems(recipe, list(zip(recipe.labels, adapters, strict=True)))
    for name in dict.fromkeys(call.method for call in calls.values() if call is not None):
        if get_method(name).needs_base and get_method(name).lowrank is None:
            yield f"method '{name}' reads the base's weights; write a full model (--base ..., --to model)"
    yield from (f"the pattern '{p}' matches no module of the adapters" for p in chooser.unused_patterns(known))


def _space_problems(recipe: Recipe, full: Sequence[str]) -> list[str]:
    """Problem of experts that are full checkpoints, named in `full`, in a space of factors."""
    if recipe.space == "full" or not full:
        return []
    names, has = ", ".join(full), "have" if len(full) > 1 else "has"
    return [
        f"'space: {recipe.space}' merges factors of adapters, but {names} {has} none; drop 'space', or give adapters"
    ]


def _factor_problems(recipe: Recipe, adapters: Sequence[tuple[str, Adapter]]) -> list[str]:
    """Modules whose factors cannot be added up, entry by entry: other ranks, or other scalings."""
    if recipe.space != "factors":
        return []
    problems = []
    for name in dict.fromkeys(n for _, a in adapters for n in a.modules):
        having = [(label, a.modules[name]) for label, a in adapters if name in a.modules]
        for what, values in (
            ("ranks", {label: m.rank for label, m in having}),
            ("scalings alpha / r", {label: m.scaling for label, m in having}),
        ):
            if len(set(values.values())) > 1:
                listed = ", ".join(f"{value:g} ({label})" for label, value in values.items())
                problems.append(
                    f"'space: factors' adds factors entry by entry, and module '{name}' has {what} {listed}; take "
                    "'space: core'"
                )
    return problems
