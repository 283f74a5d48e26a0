"""The recipe of a merge, from YAML, flags or Python."""

from __future__ import annotations

from actmat.recipe.experts import ExpertRef
from actmat.recipe.load import recipe_yaml
from actmat.recipe.schema import PostRef, Recipe, RoleRule, Rule, add_statistics, make_recipe
from actmat.recipe.variants import parse_option, variants

__all__ = [
    "ExpertRef",
    "PostRef",
    "Recipe",
    "RoleRule",
    "Rule",
    "add_statistics",
    "make_recipe",
    "parse_option",
    "recipe_yaml",
    "variants",
]
