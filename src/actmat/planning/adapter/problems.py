"""Problems of merging adapters, one sentence each, all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from actmat.experts.lora.adapter import Adapter
from actmat.methods import get_method
from actmat.planning.choose import Decision
from actmat.recipe import Recipe

__all__ = ["adapter_problems", "problems_of_full_tensors", "recipe_problems"]


def adapter_problems(recipe: Recipe, adapters: Sequence[Adapter]) -> list[str]:
    """Problems of the adapters themselves, and of their combination."""
    pairs = list(zip(recipe.labels, adapters, strict=True))
    problems = [f"expert '{label}' ({a.location}): {p}" for label, a in pairs for p in a.problems]
    lists = [label for label, a in pairs if a.is_pair_list]
    if 0 < len(lists) < len(pairs):
        problems.append(
            f"{', '.join(lists)}: a list of (up, down) pairs names no modules, and the other adapters do; nothing says "
            "which pair belongs to which module"
        )
    bases = {a.config.base_model: label for label, a in reversed(pairs) if a.config.base_model}
    if len(bases) > 1 and not recipe.adapter.any_base:
        listed = ", ".join(f"'{b}' ({label})" for b, label in reversed(bases.items()))
        problems.append(
            f"the adapters name different bases: {listed}. Deltas of different bases do not add up; if these are "
            "copies of one model, say so with --any-base ('any_base: true' in a recipe)"
        )
    return problems


def recipe_problems(recipe: Recipe, decided: Mapping[str, Decision]) -> list[str]:
    """Wishes of the recipe that an adapter cannot hold."""
    problems = []
    for name in dict.fromkeys(d.call.method for d in decided.values() if d.call is not None):
        if get_method(name).needs_base and get_method(name).lowrank is None:
            problems.append(f"method '{name}' looks at the base's weights; write a full model (--base ..., --to model)")
    if recipe.pool:
        problems.append("'pool' merges layers as one matrix, of which modules are no factors; write a full model")
    if recipe.allow_nonfinite:
        problems.append("'allow_nonfinite' acts on single entries of a delta, and NaN in a factor reaches whole rows")
    return problems


def problems_of_full_tensors(recipe: Recipe, adapters: Sequence[Adapter], kept: Mapping[str, str]) -> list[str]:
    """Tensors that one expert trained in full and another adapted: without the base these do not add up."""
    problems = []
    labelled = list(zip(recipe.labels, adapters, strict=True))
    for name in {n: None for a in adapters for n in a.extras if n not in kept}:
        module = name.rpartition(".")[0]
        full = [label for label, a in labelled if name in a.extras]
        factored = [label for label, a in labelled if module in a.modules and name.endswith(".weight")]
        if factored:
            problems.append(
                f"tensor '{name}' is trained in full in {', '.join(full)} and adapted in {', '.join(factored)}; only "
                "the base tells the difference of the two: write a full model (--base ..., --to model), or keep it"
            )
    return problems
