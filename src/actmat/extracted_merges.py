"""Merges of full models that are written as adapters: merged in float32 first, then extracted."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actmat.checkpoints.writing.staging import check_output_path, sibling
from actmat.errors import OutputError, RecipeError
from actmat.experts.resolve import is_adapter
from actmat.extracting import ExtractSettings, extract_adapter
from actmat.places import out_path
from actmat.progress import Progress
from actmat.recipe import Recipe
from actmat.run import MergeReport, run_recipes
from actmat.settings import RunSettings

__all__ = ["carry_out", "is_extracted"]


def is_extracted(recipe: Recipe) -> bool:
    """True if the recipe wants an adapter of a rank, and an expert is a full model.

    >>> from actmat.recipe import make_recipe
    >>> is_extracted(make_recipe({"base": "base", "experts": ["math"]}))
    False
    """
    wanted = recipe.to in ("adapter", "peft") and recipe.rank is not None and bool(recipe.base)
    return wanted and not all(is_adapter(e.path) for e in recipe.experts)


def carry_out(
    recipes: Sequence[Recipe], settings: RunSettings | None = None, progress: Progress | None = None
) -> list[MergeReport]:
    """Carry out recipes, see `run.run_recipes`; those that write an adapter of full models one after another.

    Raises:
        MergeError: nothing is at any `out` unless that output was finished.
    """
    if not any(is_extracted(r) for r in recipes):
        return run_recipes(recipes, settings, progress)
    if not all(is_extracted(r) for r in recipes):
        raise RecipeError("Recipes of one run are either all merged into adapters of full models, or none.")
    return [_merge_and_extract(r, settings or RunSettings(), progress) for r in recipes]


def _merge_and_extract(recipe: Recipe, settings: RunSettings, progress: Progress | None) -> MergeReport:
    """Merge beside the output, in float32, so that the delta is not rounded; extract; remove the model.

    A run that stops leaves the model, or the part of it that is finished, and the same command goes on. The report is
    that of the merge; the adapter has the record of an extraction, with the recipe, in place of a manifest.
    """
    out, began = out_path(recipe), time.perf_counter()
    if isinstance(out, str):
        raise RecipeError(f"{out}: an adapter is extracted into a local folder, not to a URL.")
    if settings.overwrite or settings.diagnose:
        raise RecipeError("An adapter of full models takes neither --overwrite nor --diagnose: remove the old output, "
                          "or diagnose the merge into a model (--to model).")  # fmt: skip
    inputs = {"base": Path(recipe.base)} | {f"expert '{e.label}'": Path(e.path) for e in recipe.experts}
    if problems := check_output_path(out, overwrite=False, inputs={n: p for n, p in inputs.items() if p.exists()}):
        raise OutputError("The output cannot be written there.", problems)
    merged = sibling(out, "merged")
    fields = {"to": "model", "rank": None, "dtype": "float32", "out": str(merged)}
    (report,) = run_recipes([recipe.model_copy(update=fields)], settings, progress)
    about = {"model": f"merge of {', '.join(recipe.labels)}", "recipe": _json(recipe)}
    wanted = ExtractSettings(rank=recipe.rank, dtype=recipe.dtype, threads=settings.threads)
    extract_adapter(recipe.base, str(merged), out, wanted, about=about)
    shutil.rmtree(merged)
    return replace(report, out=out, seconds=time.perf_counter() - began)


def _json(recipe: Recipe) -> dict[str, Any]:
    data: dict[str, Any] = recipe.model_dump(mode="json", exclude={"out"}, exclude_defaults=True)
    return data
