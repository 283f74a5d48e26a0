"""The recipe of a finished output."""

from __future__ import annotations

from pathlib import Path

from actmat.recipe import Recipe, make_recipe
from actmat.report.manifest import input_location, read_manifest


def recipe_of_output(directory: str | Path) -> Recipe:
    """The recipe of a merged model, from its manifest; inputs at their present locations.

    Raises:
        CheckpointError: no manifest, or a damaged one.
        RecipeError: its recipe is not one of this version.
    """
    folder = Path(directory)
    manifest = read_manifest(folder)
    fields = dict(manifest["recipe"])
    if manifest["base"] is not None:
        fields["base"] = input_location(manifest["base"], folder)
    rows = zip(fields.get("experts", ()), manifest["experts"], strict=False)
    fields["experts"] = [{**e, "name": row["name"], "path": input_location(row, folder)} for e, row in rows]
    return make_recipe(fields)
