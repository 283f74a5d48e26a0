"""Tensors that adapters trained in full, merged without a base: the mean over the experts that have them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from actmat.checkpoints.base import TensorSpec
from actmat.experts.deltas import DeltaSource
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.names import PREFIX
from actmat.layout.types import Role, TensorLayout
from actmat.planning.choose import Chooser
from actmat.planning.implied import shapes_text
from actmat.planning.item import Item, MethodCall, Reading, Target, Write
from actmat.recipe import Recipe


def mean_items(
    recipe: Recipe, adapters: Sequence[Adapter], chooser: Chooser, kept: dict[str, str], dtype: str
) -> tuple[list[Item], list[str], list[str]]:
    """Items of tensors trained in full, problems and notes; names that the recipe keeps go to `kept`."""
    out: list[Item] = []
    problems: list[str] = []
    notes: list[str] = []
    for name in {n: None for a in adapters for n in a.extras}:
        if (pattern := chooser.keeps(name)) is not None:
            kept[name] = pattern
            continue
        stored = [a.weights.specs[a.extras[name]] if name in a.extras else None for a in adapters]
        shapes = {s.shape: None for s in stored if s is not None}
        if len(shapes) > 1:
            problems.append(
                f"tensor '{name}' has shapes {shapes_text(shapes)} in the adapters; other numbers of classes?"
            )
            continue
        missing = [label for label, s in zip(recipe.labels, stored, strict=True) if s is None]
        weights, problem, note = _weights_of_full(name, chooser, [s is not None for s in stored])
        reason = "trained in full: mean over the experts"
        if missing:
            reason += f" that have it; not in {', '.join(missing)}"
        if problem:
            problems.append(problem)
            continue
        notes += [note] if note else []
        if weights is not None and sum(w for w, s in zip(weights, stored, strict=True) if s is not None) == 0:
            having = ", ".join(label for label in recipe.labels if label not in missing)
            problems.append(
                f"tensor '{name}' is trained in full in {having} only, of total weight 0; give a weight, or keep the "
                "tensor as it is in the base (--keep)"
            )
            continue
        out.append(_full_item(name, reason, stored, weights, dtype))
    return out, problems, notes


def _weights_of_full(name: str, chooser: Chooser, having: Sequence[bool]) -> tuple[tuple[float, ...] | None, str, str]:
    """Weights of the mean of a tensor that experts store in full, a problem and a note.

    Without the base a sum of deltas is known only if its factors add up to 1; it is a mean then.
    """
    call = chooser.elsewhere(name, having)
    if call.method != "task_arithmetic":
        return call.weights, "", ""
    weights = call.weights or (1.0,) * len(having)
    scaling = call.scale * call.options["scaling"]
    used = [scaling * w for w, has in zip(weights, having, strict=True) if has]
    total = math.fsum(used)
    if math.isclose(total, 1.0, rel_tol=1e-6):
        return tuple(scaling * w for w in weights), "", ""
    subject = f"'{name}' is trained in full, so that the sum of its deltas, of factors that add up to {total:g}, needs"
    if min(used) < 0:
        return (
            weights,
            f"tensor {subject} the base. Write a full model (--base ..., --to model), or --keep '{name}'",
            "",
        )
    return weights, "", f"{subject} the base: the weighted mean is written (--base ... --to model writes the sum)"


def _full_item(
    name: str, reason: str, stored: Sequence[TensorSpec | None], weights: tuple[float, ...] | None, dtype: str
) -> Item:
    """The mean of a tensor that experts trained in full, of one shape."""
    first = next(s for s in stored if s is not None)
    is_plain = first.name.removeprefix(PREFIX).replace(".base_layer.", ".") == name
    output = TensorSpec(first.name if is_plain else PREFIX + name, first.shape, dtype, "")
    spec = TensorSpec(name, output.shape, dtype, "")
    sources = tuple(None if s is None else DeltaSource(s.name, "stored", s.dtype, s.nbytes) for s in stored)
    return Item(
        target=Target(spec, TensorLayout(Role.VECTOR, reason), sources=sources),
        action="average",
        reason=reason,
        write=Write("mean", (output,)),
        call=MethodCall("average", {}, 1.0, weights),
        reading=Reading("each", batched=True),
    )


def problems_of_full_tensors(recipe: Recipe, adapters: Sequence[Adapter], kept: Mapping[str, str]) -> list[str]:
    """Tensors that one expert trained in full and another adapted: without the base these do not add up."""
    problems = []
    labeled = list(zip(recipe.labels, adapters, strict=True))
    for name in {n: None for a in adapters for n in a.extras if n not in kept}:
        module = name.rpartition(".")[0]
        full = [label for label, a in labeled if name in a.extras]
        factored = [label for label, a in labeled if module in a.modules and name.endswith(".weight")]
        if factored:
            problems.append(
                f"tensor '{name}' is trained in full in {', '.join(full)} and adapted in {', '.join(factored)}; only "
                "the base tells the difference of the two: write a full model (--base ..., --to model), or keep it"
            )
    return problems
