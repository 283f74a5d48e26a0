"""Recipe files of actmat, and configurations of mergekit; checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from actmat.checkpoints.resolve import open_model as open_model
from actmat.recipe import Recipe
from actmat.recipe.load import make_local_recipe, parse_file


def read_recipe(path: str | Path, overrides: Mapping[str, Any] | None = None) -> Recipe:
    r"""Read a recipe file, or a configuration of mergekit, which is converted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "recipe.yaml")
    ...     _ = file.write_text("base: org/base\nexperts: [org/math, org/code]\nmethod: ties\n")
    ...     recipe = read_recipe(file, {"scale": 0.5})
    >>> recipe.method, recipe.labels, recipe.scale
    ('ties', ('math', 'code'), 0.5)

    Args:
        path: YAML (or JSON) file; relative paths in it are relative to its folder.
        overrides: fields that replace those of the file.

    Raises:
        RecipeError: the file is unreadable or not a recipe; lists all mergekit fields without a counterpart.
    """
    folder, fields, where = parse_file(path)
    if not fields.keys() <= Recipe.model_fields.keys():  # a configuration of another tool, or a mistake
        from actmat.extras.mergekit import convert, is_mergekit

        if is_mergekit(fields):
            fields, where = convert(fields, where), {}
    return make_local_recipe(fields, folder, dict(overrides or {}), where)
