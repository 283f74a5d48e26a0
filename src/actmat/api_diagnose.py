"""The public functions that look at a merge without making it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.api import Location, Progress, adapters_of, checked_plans, make, opened
from actmat.api_adapters import check_adapter_values, diagnose_adapters, writes_adapter
from actmat.checkpoints.adapter_expert import AdapterExpert
from actmat.diagnostics.build import RunFacts, build_diagnosis, storage_dtypes
from actmat.diagnostics.model import REPORT_NAME, Diagnosis, read_diagnosis
from actmat.diagnostics.run import beside, check_mutes, tensor_watches
from actmat.engine.local import Job, execute
from actmat.engine.resources import check_device, share_resources
from actmat.engine.statistics import check_adapters
from actmat.engine.watch import NoWriter
from actmat.errors import MergeError
from actmat.plan.measured import opened_statistics
from actmat.recipe import Recipe, make_recipe
from actmat.report.inputs import input_location
from actmat.report.manifest import read_manifest

__all__ = ["diagnose", "diagnose_output", "diagnose_recipe", "recipe_of_output"]


def diagnose(
    base: Location | None,
    experts: Sequence[Location | Mapping[str, Any]],
    *,
    method: str = "actmat",
    options: Mapping[str, Any] | None = None,
    scale: float = 1.0,
    scope: str = "linear",
    weights: Sequence[float] | None = None,
    compute_dtype: str = "float32",
    device: str = "cpu",
    max_memory: str | int | None = None,
    threads: int | None = None,
    exact: bool = False,
    progress: Progress | None = None,
    **fields: Any,
) -> Diagnosis:
    """What `merge` with the same arguments would do to every matrix, measured; nothing is written.

    Args:
        base, experts, method, options, scale, scope, weights, compute_dtype, device, max_memory, threads, fields: as
            for `merge`; base None: adapters are merged into an adapter.
        exact: measure without probes, see docs/diagnostics.md; takes several times as long.
        progress: see `Progress`.

    Returns:
        Measures per matrix and the outcome of every check.

    Raises:
        MergeError: whatever `merge` would raise for the same inputs.
    """
    recipe = make(base, experts, method, options, scale, scope, weights, None, compute_dtype, None, fields)
    return diagnose_recipe(
        recipe, device=device, max_memory=max_memory, threads=threads, exact=exact, progress=progress
    )


def diagnose_recipe(
    recipe: Recipe,
    *,
    device: str = "cpu",
    max_memory: str | int | None = None,
    threads: int | None = None,
    exact: bool = False,
    progress: Progress | None = None,
) -> Diagnosis:
    """`diagnose` of a recipe; its `out` is not looked at.

    Raises:
        MergeError: whatever merging it would raise.
    """
    began = time.perf_counter()
    watch = progress or Progress()
    check_mutes([recipe])
    if writes_adapter(recipe):
        return diagnose_adapters(
            recipe,
            lambda plans: share_resources(plans, device, max_memory, threads),
            started=watch.started,
            progress=watch.tensor,
        )
    check_device(device)
    found: list[MergeError] = []
    with opened([recipe], found) as (base, experts), opened_statistics(recipe) as measured:
        (plan,) = checked_plans([recipe], base, experts, device, found, measured)
        resources = share_resources([plan], device, max_memory, threads, beside(plan))
        # what is copied from the base needs no look
        done: dict[str, dict[str, Any]] = {
            n: {} for t in plan.tensors if t.call is None and t.action != "tie" for n in (t.name, *t.aliases)
        }
        job = Job(plan, NoWriter(), done, watch=tensor_watches(recipe, exact=exact))
        watch.started([plan], 0, resources.workers)
        check_adapter_values(recipe.labels, experts)
        check_adapters(recipe.labels, adapters_of(experts), measured)
        execute([job], base, experts, resources, measured=measured, progress=watch.tensor)
        run = RunFacts(
            source="diagnose",
            kinds=["adapter" if isinstance(e, AdapterExpert) else "model" for e in experts],
            storage_dtypes=storage_dtypes(plan),
            out=None,
            seconds=time.perf_counter() - began,
        )
        return build_diagnosis(plan, job.done, run)


def recipe_of_output(directory: str | Path) -> Recipe:
    """The recipe of a merged model, from its manifest; inputs where they are now.

    Raises:
        CheckpointError: no manifest, or a damaged one.
        RecipeError: its recipe is none of this version.
    """
    place = Path(directory)
    manifest = read_manifest(place)
    fields = dict(manifest["recipe"])
    if manifest["base"] is not None:
        fields["base"] = input_location(manifest["base"], place)
    rows = zip(fields.get("experts", ()), manifest["experts"], strict=False)
    fields["experts"] = [{**e, "name": row["name"], "path": input_location(row, place)} for e, row in rows]
    return make_recipe(fields)


def diagnose_output(directory: str | Path, **settings: Any) -> Diagnosis:
    """The report of a merged model: the one that lies in it, else its merge is diagnosed again from the manifest.

    Args:
        directory: output of `merge`.
        settings: as for `diagnose_recipe`.

    Raises:
        MergeError: it has neither, or its inputs are gone.
    """
    place = Path(directory)
    if (place / REPORT_NAME).is_file():
        return read_diagnosis(place)
    return diagnose_recipe(recipe_of_output(place), **settings)
