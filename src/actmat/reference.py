"""Merges without a base: one expert stands in for `W_0` where the merged weights do not depend on it.

`average`, `linear`, `karcher` and `slerp` between two experts give `W*` of the experts' weights only. The engine works
with deltas, so the first expert is the point that they are measured from, and what is not merged is copied from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from actmat.errors import RecipeError
from actmat.experts.resolve import needs_base
from actmat.methods import METHODS, get_method
from actmat.recipe import Recipe
from actmat.recipe.schema import Postprocess
from actmat.recipe.values import leaves

__all__ = ["base_problems", "with_reference", "with_references"]

BASELESS = tuple(m.name for m in METHODS if m.access.baseless)


def with_references(recipes: Sequence[Recipe]) -> list[Recipe]:
    """Every recipe, with a base where it can do without one."""
    return [with_reference(r) for r in recipes]


def with_reference(recipe: Recipe) -> Recipe:
    """The recipe; one without a base whose result does not depend on it gets its first expert as the base.

    A recipe of adapters is returned as it is, and so is one that needs a base, which `inputs.writes_adapter` refuses.
    """
    if recipe.base or recipe.to is not None or not recipe.experts or base_problems(recipe):
        return recipe
    if any(needs_base(e.path) for e in recipe.experts):
        return recipe
    first = recipe.experts[0]
    note = (
        f"no base is given, and {recipe.method} needs none: deltas are measured from expert '{first.label}', which "
        "does not change the result; its config and tokenizer files, and what is not merged, go into the output"
    )
    return recipe.model_copy(update={"base": first.path, "notes": (*recipe.notes, note)})


def base_problems(recipe: Recipe) -> list[str]:
    """Reasons for which the result of a recipe depends on a base; empty where it can be merged without one."""
    return list(_problems(recipe))


def _problems(recipe: Recipe) -> Iterator[str]:
    n_experts = len(recipe.experts)
    named = [(recipe.method, recipe.options, "")]
    named += [(r.method or recipe.method, r.options, f"rules.{i}: ") for i, r in enumerate(recipe.rules) if not r.keep]
    for name, options, where in named:
        try:
            needs_none = get_method(name).is_baseless(options, n_experts)
        except RecipeError as error:  # of an unknown name
            yield where + error.sentence
            continue
        if not needs_none:
            yield f"{where}method '{name}' merges deltas from a base ({', '.join(BASELESS)} need none{_near(name)})"
    factors = [recipe.scale, *(r.scale for r in recipe.rules if r.scale is not None)]
    if any(leaf != 1.0 for factor in factors for leaf in leaves(factor)):
        yield "'scale' is a factor of the delta from a base"
    if recipe.keep or any(r.keep for r in recipe.rules):
        yield "'keep' copies tensors of a base"
    if recipe.post or recipe.postprocess != Postprocess():
        yield "post-processing changes the delta from a base"
    if recipe.vocabulary is not None and recipe.vocabulary.source == "base":
        yield "'vocabulary: base' takes the tokens of a base"


def _near(name: str) -> str:
    """Condition under which a method of `BASELESS` needs no base."""
    return {"slerp": "; slerp between two experts", "karcher": "; karcher without include_base"}.get(name, "")
