"""Variants of a recipe: combinations of methods and option values."""

from pathlib import Path

import pytest

from actmat.errors import RecipeError
from actmat.recipe import make_recipe, variants

RECIPE = make_recipe({"base": "b", "experts": ["e"], "method": "ties", "options": {"density": 0.2}, "out": "out"})


def test_without_choices_the_recipe_itself() -> None:
    assert variants(RECIPE) == [RECIPE]
    found = variants(RECIPE.model_copy(update={"out": None}), ["ties", "average"])
    assert [(r.options, r.out) for r in found] == [({"density": 0.2}, None), ({}, None)], "options are of one method"


def test_one_value_replaces_an_option_and_keeps_the_output() -> None:
    (found,) = variants(RECIPE, options={"density": [0.5], "trim": ["global"]})
    assert (found.options, found.out) == ({"density": 0.5, "trim": "global"}, "out")


def test_values_are_combined() -> None:
    found = variants(RECIPE, options={"density": [0.1, 0.3], "trim": ["local", "global"]})
    assert [(r.options["density"], r.options["trim"]) for r in found] == [
        (0.1, "local"),
        (0.1, "global"),
        (0.3, "local"),
        (0.3, "global"),
    ]
    assert found[0].out == str(Path("out") / "density=0.1,trim=local")


def test_an_unknown_option_is_left_to_the_plan_for_one_method_and_refused_for_several() -> None:
    assert variants(RECIPE, options={"densty": [0.1]})[0].options == {"density": 0.2, "densty": 0.1}
    with pytest.raises(RecipeError, match="None of the methods has an option 'densty'"):
        variants(RECIPE, ["ties", "average"], {"densty": [0.1]})
    with pytest.raises(RecipeError, match="Did you mean 'ties'"):
        variants(RECIPE, ["tie", "average"])


def test_weights_of_one_expert_are_files_next_to_each_other() -> None:
    file = RECIPE.model_copy(update={"out": "a/ink.safetensors"})
    found = variants(file, ["ties", "average"], {"density": [0.1, 0.3]}, [0.2, -1])
    assert [(r.method, r.weights, r.out) for r in found] == [
        ("ties", (0.2,), "a/ink-ties-density-0.1-0.2.safetensors"),
        ("ties", (-1.0,), "a/ink-ties-density-0.1--1.safetensors"),
        ("ties", (0.2,), "a/ink-ties-density-0.3-0.2.safetensors"),
        ("ties", (-1.0,), "a/ink-ties-density-0.3--1.safetensors"),
        ("average", (0.2,), "a/ink-average-0.2.safetensors"),
        ("average", (-1.0,), "a/ink-average--1.safetensors"),
    ]
    (alone,) = variants(RECIPE, weights=[0.5])
    assert (alone.weights, alone.out) == ((0.5,), "out")
    with pytest.raises(RecipeError, match="expected a number"):
        variants(RECIPE, weights=[0.5, "strong"])
