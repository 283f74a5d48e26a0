"""Decisions that depend on the inputs of a recipe: the method of `auto`, and the kind of output."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.checkpoints.model import Model
from actmat.errors import RecipeError
from actmat.methods import METHODS, get_method
from actmat.recipe import Recipe
from actmat.recipe.output import AdapterOutput, ExtractedOutput, ModelOutput
from actmat.recipe.values import leaves
from actmat.run.automatic import AUTO, with_method
from actmat.run.locate import Located

BASELESS = tuple(m.name for m in METHODS if m.access.baseless)
PEFT = ("same", "peft")
"""Layouts of adapters that can be extracted."""


def decide(located: Located) -> Recipe:
    """The recipe with a named method and its kind of output, and with a base if its result depends on none.

    Raises:
        RecipeError: an adapter from full checkpoints, or a model without a base.
    """
    recipe = with_method(located)
    full = [label for label, e in zip(recipe.labels, located.experts, strict=True) if isinstance(e, Model)]
    if isinstance(recipe.output, AdapterOutput):
        return _adapter(recipe, recipe.output, located, full)
    if recipe.base:
        return recipe
    if isinstance(recipe.output, ExtractedOutput):
        raise RecipeError("An adapter is extracted from a merge into a base: give --base.")
    if full:
        return _on_first(recipe, full)
    if recipe.output is None:
        return recipe.model_copy(update={"output": AdapterOutput()})
    wanted = ", ".join(sorted(f"'{n}'" for n in recipe.model.model_fields_set - {"kind"}))
    raise RecipeError(
        f"A full model{f', as {wanted} asks for,' * bool(wanted)} is merged into a base: give --base, or write an "
        "adapter (--to adapter)."
    )


def _adapter(recipe: Recipe, output: AdapterOutput, located: Located, full: Sequence[str]) -> Recipe:
    """The recipe of an adapter: merged from factors, or extracted from a merge into the base."""
    extracts = recipe.base and output.layout in PEFT and (output.rank is not None or not full)
    if extracts and not located.have_factors:
        return recipe.model_copy(update={"output": ExtractedOutput(rank=output.rank, ranks=output.ranks)})
    if full:
        to = "adapter" if output.layout == "same" else output.layout
        raise RecipeError(
            f"--to {to} works on adapters only, not {', '.join(full)}. Give --base and --rank to extract one "
            " from the merge, write a model (--base ..., --to model), or make adapters first (actmat "
            "extract --base ... --model ... --rank 64 --out ...)."
        )
    return recipe


def _on_first(recipe: Recipe, full: Sequence[str]) -> Recipe:
    """The recipe with its first expert as the base, if its result depends on none.

    Without a base, `average`, `linear`, `karcher` and `slerp` between two experts give `W*` of the experts' weights
    only. The engine works with deltas, so the first expert is the point that they are measured from.

    Args:
        full: labels of the experts that are full checkpoints.
    """
    reasons = base_problems(recipe)
    if reasons or len(full) < len(recipe.experts):
        why = f"Without one: {'; '.join(reasons)}." if reasons else "Adapters are deltas of a base."
        raise RecipeError(
            f"--base must be given: {', '.join(full)} is not an adapter, so a full model is written, merged into "
            f"the checkpoint that all experts come from. {why}"
        )
    first = recipe.experts[0]
    note = (
        f"no base is given, and {recipe.method} needs none: deltas are measured from expert '{first.label}', which "
        "does not change the result; its config and tokenizer files, and unmerged tensors, go into the output"
    )
    changes = {"base": first.path, "measured_from": first.label, "notes": (*recipe.notes, note)}
    return recipe.model_copy(update={**changes, "output": recipe.output or ModelOutput()})


def base_problems(recipe: Recipe) -> list[str]:
    """Reasons why the result of a recipe depends on a base; empty if it can be merged without one.

    Raises:
        RecipeError: there is no method of that name.
    """
    problems = []
    named = [(recipe.method, recipe.options, "")]
    named += [(r.method or recipe.method, r.options, f"rules.{i}: ") for i, r in enumerate(recipe.rules) if not r.keep]
    for name, options, where in named:
        if name == AUTO:  # becomes a method that needs none
            continue
        if not get_method(name).is_baseless(options, len(recipe.experts)):
            near = {"slerp": "; slerp between two experts", "karcher": "; karcher without include_base"}.get(name, "")
            known = ", ".join(BASELESS)
            problems.append(f"{where}method '{name}' merges deltas from a base ({known} need none{near})")
    factors = [recipe.scale, *(r.scale for r in recipe.rules if r.scale is not None)]
    if any(leaf != 1.0 for factor in factors for leaf in leaves(factor)):
        problems.append("'scale' is a factor of the delta from a base")
    if recipe.keep or any(r.keep for r in recipe.rules):
        problems.append("'keep' copies tensors of a base")
    if recipe.post:
        problems.append("post-processing changes the delta from a base")
    if recipe.model.vocabulary is not None and recipe.model.vocabulary.source == "base":
        problems.append("'vocabulary: base' takes the tokens of a base")
    return problems


def check_shared(recipes: Sequence[Recipe]) -> None:
    """One reading serves all recipes of a run, so they must agree on the inputs and how they are read.

    Labels decide too: manifests name the inputs by them. Weights of experts may differ.

    Raises:
        RecipeError: they do not agree.
    """
    rows = [
        {
            "base": r.base,
            "experts": [(e.path, e.label, e.statistics, e.stacks) for e in r.experts],
            "vocabulary": r.model.vocabulary,
            "compute_dtype": r.compute_dtype,
            "output": None if r.output is None else r.output.kind,
            "layout": r.adapter.layout,
            "executor": r.executor,
        }
        for r in recipes
    ]
    for name in rows[0]:
        values = {str(row[name]) for row in rows}
        if len(values) > 1:
            raise RecipeError(
                f"Recipes of one run share {', '.join(rows[0])}, but '{name}' differs: {' and '.join(sorted(values))}. "
                "Run them one after the other."
            )
