"""Variants of one merge: a recipe for each combination of methods and option values."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.bounds import is_url
from actmat.errors import RecipeError
from actmat.recipe.aliases import real_method
from actmat.recipe.schema import Recipe, make_recipe
from actmat.recipe.text import UnreadableError, parse_yaml

FILE = ".safetensors"
"""Ending of an output that is one file."""


def variants(
    recipe: Recipe,
    methods: Sequence[str] = (),
    options: Mapping[str, Sequence[Any]] | None = None,
    weights: Sequence[Any] = (),
) -> list[Recipe]:
    """Recipes for each combination of `methods`, option values and weights; several have an `out` each.

    The outputs are in the folder `out`; if that is a single file, they are files next to it.

    >>> from actmat.recipe import make_recipe
    >>> recipe = make_recipe({"base": "base", "experts": ["math"], "method": "ties", "out": "grid"})
    >>> [(r.options, r.out) for r in variants(recipe, options={"density": [0.1, 0.3]})]
    [({'density': 0.1}, 'grid/density=0.1'), ({'density': 0.3}, 'grid/density=0.3')]
    >>> lora = make_recipe({"experts": ["ink.safetensors"], "out": "soft.safetensors"})
    >>> [r.out for r in variants(lora, weights=[0.2, 0.5])]
    ['soft-0.2.safetensors', 'soft-0.5.safetensors']

    Args:
        recipe: the recipe to vary; its options are kept for its own method.
        methods: default: the recipe's.
        options: name -> values to try. With several methods, an option goes to those that have it.
        weights: of the only expert; default: the recipe's.

    Raises:
        RecipeError: an unknown method, or an option that none of several methods has.
    """
    methods = list(methods) or [recipe.method]
    of_weights = [(f"{w}", _at_weight(recipe, w)) for w in weights] or [("", recipe)]
    recipes, labels = [], []
    for method, choices in _options_by_method(methods, options or {}):
        real, preset = real_method(method)
        fixed = preset | recipe.options if real == recipe.method else preset
        for values in itertools.product(*choices.values()):
            chosen = dict(zip(choices, values, strict=True))
            varied = [_folder(method)] * (len(methods) > 1)
            varied += [f"{n}={v}" for n, v in chosen.items() if len(choices[n]) > 1]
            for strength, weighted in of_weights:
                labels.append([*varied, strength] if strength else varied)
                recipes.append(weighted.model_copy(update={"method": real, "options": {**fixed, **chosen}}))
    if len(recipes) == 1 or recipe.out is None:
        return recipes
    outs = [_place(recipe.out, label) for label in labels]
    return [r.model_copy(update={"out": out}) for r, out in zip(recipes, outs, strict=True)]


def _at_weight(recipe: Recipe, weight: Any) -> Recipe:
    """The recipe with this weight of its only expert.

    Raises:
        RecipeError: it is no weight.
    """
    (expert,) = recipe.experts
    experts = make_recipe({"experts": [{**expert.model_dump(), "weight": weight}]}).experts
    return recipe.model_copy(update={"experts": experts})


def _place(out: str, words: Sequence[str]) -> str:
    """The output of a variant; names of files have no '=', which begins an argument in prompts, <lora:NAME:1>."""
    if out.endswith(FILE):
        return f"{out.removesuffix(FILE)}-{'-'.join(words).replace('=', '-')}{FILE}"
    return os.path.join(out.rstrip("/") if is_url(out) else str(Path(out)), ",".join(words))


def parse_option(text: str) -> tuple[str, list[Any]]:
    """Name and values of an option that is written `name=value,value`; values are read as YAML, `1e-6` as a number.

    >>> parse_option("rtol=1e-6,1e-4")
    ('rtol', [1e-06, 0.0001])
    >>> parse_option("density=[0.2, 0.4]")  # one value, a list
    ('density', [[0.2, 0.4]])

    Raises:
        RecipeError: no `=`, or a value that is not YAML.
    """
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise RecipeError(
            f"An option of the method is written -o name=value; found '{_cut(text)}'. The place of the output is --out."
        )
    value = value.strip()
    pieces = [value] if value.startswith(("[", "{")) else map(str.strip, value.split(","))
    try:
        return name.strip(), [parse_yaml(piece)[1] if piece else "" for piece in pieces]
    except UnreadableError as error:
        problem = f"'{_cut(value)}': {error.problem}"
        raise RecipeError(f"The value of the option '{_cut(name.strip())}' cannot be read: {problem}.") from None


def _folder(method: str) -> str:
    """A method's name as the name of a folder: `my_rule-SOFT` for SOFT of `./rules/my_rule.py`."""
    file, _, name = method.rpartition(":")
    return f"{Path(file).stem}-{name}" if file.endswith(".py") else method


def _cut(text: str) -> str:
    return text if len(text) <= 100 else f"{text[:100]}..."


def _options_by_method(
    methods: Sequence[str], options: Mapping[str, Sequence[Any]]
) -> list[tuple[str, Mapping[str, Sequence[Any]]]]:
    """Options of each method: all for a single one, since planning reports unknown names with all other problems."""
    if len(methods) == 1:
        return [(methods[0], options)]
    from actmat.methods import get_method

    known = {m: get_method(real_method(m)[0]).options for m in methods}
    for name in options:
        if not any(name in known[m] for m in methods):
            raise RecipeError(f"None of the methods has an option '{name}'.")
    return [(m, {n: v for n, v in options.items() if n in known[m]}) for m in methods]
