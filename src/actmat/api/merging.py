"""Merge checkpoints, or plan a merge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat.api.diagnosing import draw_page
from actmat.planning import MergePlan
from actmat.progress import NoProgress, Progress, usual_progress
from actmat.recipe import Recipe
from actmat.recipe.arguments import Location, make_arguments
from actmat.run import MergeReport, plan_recipe, run_recipes
from actmat.settings import RunSettings


def merge(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    out: Location,
    method: str = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> MergeReport:
    """Merge checkpoints into one: `W* = W_0 + scale * D*`, tensor by tensor.

    Args:
        base: directory, file, hub id `org/name[@revision]` or URL of the checkpoint that all experts come from; None
            merges adapters into an adapter.
        experts: the same, one per expert; a mapping gives `path`, `name` and `weight`.
        out: directory to write, or its URL; must be missing or empty, unless `overwrite` is set.
        method: merge method, see `actmat methods`; `auto` chooses by the inputs, from benchmark results.
        weights: one per expert, for methods that take weights.
        statistics: outputs of `actmat statistics collect`, by expert name or in the order of the experts, for
        methods that need them.
        progress: see `Progress`; None: a line in a notebook, nothing elsewhere. `NoProgress()` is silent anywhere.
        fields: any other field of a recipe (`options`, `scale`, `scope`, `rules`, `keep`, `dtype`, `seed`, ...; see
            `recipe.Recipe`) or of the settings of a run (`device`, `max_memory`, `threads`, `overwrite`, `diagnose`,
            ...; see `settings.RunSettings`).

    Returns:
        The report; the model is in `out`.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    recipe, settings = make_arguments(base, experts, {"out": str(out), "method": method} | fields, weights, statistics)
    return merge_recipes([recipe], settings, progress or usual_progress())[0]


def merge_recipes(
    recipes: Sequence[Recipe], settings: RunSettings, progress: Progress | None = None
) -> list[MergeReport]:
    """`run_recipes`, plus a page per measured merge; LoRA and single files are written as one where `out` ends so."""
    if recipes and all(str(r.out).endswith(".safetensors") for r in recipes):
        from actmat.extras.diffusion.files import run_into_files

        if (made := run_into_files(recipes, settings, progress or NoProgress(), run_recipes)) is not None:
            return made
    return run_recipes(recipes, settings, progress, draw=draw_page)


def plan(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    method: str = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    **fields: Any,
) -> MergePlan:
    """Plan a merge tensor by tensor, from headers only. Arguments as for `merge`.

    Raises:
        MergeError: the inputs are incompatible; lists all problems.
    """
    recipe, settings = make_arguments(base, experts, {"method": method} | fields, weights, statistics)
    return plan_recipe(recipe, device=settings.device, device_memory=settings.device_memory)
