"""Recipes from the flags of a command, and from the recipe file that they complete."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from actmat.checkpoints.layer_names import stack_parts
from actmat.errors import RecipeError

if TYPE_CHECKING:
    from actmat.recipe import Recipe

__all__ = ["RecipeFlags", "experts_of", "split_name", "statistics_of"]


@dataclass(frozen=True)
class RecipeFlags:
    """Flags that describe recipes, by field of `Recipe` and `ExpertRef`; None for a flag that is not given."""

    values: Mapping[str, Any]

    def __contains__(self, field: str) -> bool:
        return self.values.get(field) not in (None, [])

    def recipes(self, file: Path | None) -> list[Recipe]:
        """The recipe, or one for each combination of methods and listed option values, each with its own `out`.

        Args:
            file: a recipe file; flags replace its fields.

        Raises:
            RecipeError: the flags or the file do not make a recipe.
        """
        from actmat.recipe import load_recipe, make_recipe, parse_option, variants

        given = {name: value for name, value in self.values.items() if name in self}
        weights, statistics = given.pop("weight", None), given.pop("statistics", None)
        methods, options = given.pop("method", []), given.pop("options", [])
        if "experts" in given:
            given["experts"] = experts_of(given["experts"], weights)
        elif weights:
            raise RecipeError("--weight goes with --expert, one each; in a recipe file each expert has its 'weight'.")
        if "out" in given:
            given["out"] = str(given["out"])
        if len(methods) == 1:
            given["method"] = methods[0]
        if file is None:
            _check_complete(given)
        recipe = make_recipe(given) if file is None else load_recipe(file, given)
        if statistics:
            recipe = _with_statistics(recipe, statistics)
        choices = dict(parse_option(text) for text in options)
        if len(choices) < len(options):
            raise RecipeError("An option is given twice; list its values in one --option name=a,b.")
        found = variants(recipe, methods, choices)
        if file is None and not recipe.base:
            _check_base(found)
        return found


def split_name(text: str) -> tuple[str, str]:
    """`NAME=PLACE` as a pair; the name, which has no slash, is empty where none is given."""
    name, equals, place = text.partition("=")
    return (name, place) if equals and "/" not in name else ("", text)


def statistics_of(given: Sequence[str]) -> dict[str, str] | list[str]:
    """Values of --statistics: a mapping if all are NAME=PATH, else the paths in their order.

    Raises:
        RecipeError: a name is given twice.
    """
    pairs = [split_name(text) for text in given]
    by_name = all(name for name, _ in pairs)
    if by_name and len(dict(pairs)) < len(pairs):
        raise RecipeError("--statistics is given twice for one expert.")
    return dict(pairs) if by_name else list(given)


def _check_complete(given: Mapping[str, Any]) -> None:
    """Refuse flags without experts, or without a base for a model."""
    missing = [flag for flag, field in (("--base", "base"), ("--expert", "experts")) if not given.get(field)]
    if missing == ["--expert"] and stack_parts(given["base"]):
        return
    if missing and (missing != ["--base"] or given.get("to") == "model"):
        raise typer.BadParameter(f"give {' and '.join(missing)}, or a recipe file (actmat merge RECIPE.yaml)")


def _check_base(recipes: Sequence[Recipe]) -> None:
    """Refuse recipes without a base that need one: of full checkpoints, by a method that merges deltas."""
    from actmat.experts.resolve import is_adapter
    from actmat.run.open import base_problems

    if all(is_adapter(e.path) for e in recipes[0].experts):
        return
    reasons = dict.fromkeys(p for r in recipes for p in base_problems(r))
    if reasons:
        raise typer.BadParameter(
            f"give --base, or a recipe file (actmat merge RECIPE.yaml). Without a base: {'; '.join(reasons)}"
        )


def experts_of(given: Sequence[str], weights: Sequence[float] | None) -> list[dict[str, Any]]:
    """Values of --expert, NAME=PATH or PATH, and of --weight, as fields of a recipe.

    Raises:
        RecipeError: another number of weights than of experts.
    """
    if weights and len(weights) != len(given):
        raise RecipeError(f"There are {len(given)} experts and {len(weights)} weights; give one --weight each.")
    experts: list[dict[str, Any]] = []
    for i, text in enumerate(given):
        name, path = ("", text) if os.path.exists(text) else split_name(text)
        named = {"name": name} if name else {}
        experts.append({"path": path, **named} | ({"weight": weights[i]} if weights else {}))
    return experts


def _with_statistics(recipe: Recipe, given: Sequence[str]) -> Recipe:
    from actmat.recipe import ExpertRef, add_statistics

    experts = add_statistics([e.model_dump() for e in recipe.experts], statistics_of(given))
    return recipe.model_copy(update={"experts": tuple(ExpertRef.model_validate(e) for e in experts)})
