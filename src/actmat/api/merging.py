"""Merge checkpoints: whole, in memory, in parts, or as an average; or plan a merge."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.api.in_memory import MemoryMerge, run_in_memory
from actmat.api.notebook import usual_progress
from actmat.engine.shares import Part
from actmat.errors import RecipeError
from actmat.planning import MergePlan
from actmat.progress import Progress
from actmat.recipe import Recipe, add_statistics, make_recipe
from actmat.recipe.trajectory import average_recipe
from actmat.run import MergeReport, plan_recipe, run_recipes
from actmat.run.parts import FinishReport, PartReport, finish_parts, run_part
from actmat.settings import RunSettings

__all__ = [
    "FinishReport",
    "Location",
    "MemoryMerge",
    "MergeReport",
    "PartReport",
    "average",
    "finish",
    "make_arguments",
    "merge",
    "merge_in_memory",
    "merge_part",
    "plan",
]

Location = str | Path

_SETTINGS = frozenset(f.name for f in dataclasses.fields(RunSettings))


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
        experts: likewise; a mapping may give `path`, `name` and `weight`.
        out: directory to write, or its URL; must not exist, or be empty, unless `overwrite`.
        method: merge method, see `actmat methods`; auto takes the one that measurements prefer.
        weights: one per expert, for methods that take weights.
        statistics: output of `actmat statistics collect`, by the experts' names or one each in their order, for
            methods that need it.
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
    return run_recipes([recipe], settings, progress or usual_progress())[0]


def plan(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    method: str = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    **fields: Any,
) -> MergePlan:
    """Plan what `merge` would do, tensor by tensor, from headers only. Arguments as for `merge`.

    Raises:
        MergeError: the inputs do not fit; carries all problems.
    """
    recipe, settings = make_arguments(base, experts, {"method": method} | fields, weights, statistics)
    return plan_recipe(recipe, device=settings.device, device_memory=settings.device_memory)


def merge_in_memory(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    method: str = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> MemoryMerge:
    """Merge checkpoints and keep the result in memory; arguments as for `merge`, without `out`.

    `found.tensors` are the bytes that `merge` would write, `found.load().model` is the model, ready to run.

    Raises:
        MergeError: whatever `merge` would raise, or an output that is larger than the free memory.
    """
    recipe, settings = make_arguments(base, experts, {"method": method} | fields, weights, statistics)
    return run_in_memory(recipe, settings, progress or usual_progress())


def merge_part(
    base: Location | None = None,
    experts: Sequence[Location | Mapping[str, Any]] = (),
    *,
    part: str,
    out: Location,
    method: str = "auto",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    progress: Progress | None = None,
    **fields: Any,
) -> PartReport:
    """Merge one part of what `merge` with the same arguments would; `finish(out)` completes the output.

    Args:
        part: such as "3/16": the third of sixteen, counted from 1.
        base, experts, out, method, weights, statistics, progress, fields: as for `merge`, the same for all parts.

    Raises:
        OutputError: there are parts of another merge into `out`; says what differs.
        MergeError: whatever `merge` would raise.
    """
    recipe, settings = make_arguments(base, experts, {"out": str(out), "method": method} | fields, weights, statistics)
    return run_part(recipe, Part.parse(part), settings, progress)


def finish(out: Location, *, check: bool = True, overwrite: bool = False, sha256: bool = False) -> FinishReport:
    """Complete the output of which all parts are there; one that is finished is verified.

    Args:
        out: as given to `merge_part`.
        check: hash every tensor again as it lies on the disk.
        overwrite: replace an earlier output of actmat at `out`.
        sha256: add SHA-256 of the weight files to the manifest.

    Raises:
        OutputError: parts are missing, each named; nothing is changed then.
    """
    return finish_parts(Path(out), check=check, overwrite=overwrite, sha256=sha256)


def average(
    checkpoints: Sequence[Location],
    *,
    out: Location,
    weights: str | Sequence[float] = "uniform",
    as_given: bool = False,
    progress: Progress | None = None,
    **fields: Any,
) -> MergeReport:
    """Write `W* = sum_t w_t W_t`, the weighted average of checkpoints of one run; no base is needed.

    Args:
        checkpoints: directories, files, hub ids or URLs, in any form that `merge` reads.
        out: directory to write, or its URL.
        weights: `uniform`, `linear`, `ema:0.9`, `wsd`, or one number per checkpoint (see
            `recipe.trajectory.trajectory_weights`); divided by their sum.
        as_given: keep the order of `checkpoints`; else they are put in the order of their step numbers.
        progress: see `Progress`.
        fields: other fields of a recipe (`dtype`, `compute_dtype`, `max_shard_size`, ...) or of `RunSettings`.

    Returns:
        The report; the model is in `out`, with config and tokenizer of the last checkpoint.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    settings, rest = _split(fields)
    recipe = average_recipe([str(c) for c in checkpoints], weights, as_given=as_given, out=str(out), **rest)
    return run_recipes([recipe], settings, progress)[0]


def make_arguments(
    base: Location | None,
    experts: Sequence[Location | Mapping[str, Any]],
    fields: Mapping[str, Any],
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
) -> tuple[Recipe, RunSettings]:
    """The recipe and the settings that the arguments of `merge` describe.

    Raises:
        RecipeError: they describe none; carries all problems.
    """
    listed: list[dict[str, Any]] = [dict(e) if isinstance(e, Mapping) else {"path": str(e)} for e in experts]
    if statistics is not None:
        given = statistics if isinstance(statistics, Mapping) else [str(s) for s in statistics]
        listed = add_statistics(listed, given)
    if weights is not None:
        if len(weights) != len(listed):
            raise RecipeError(f"There are {len(listed)} experts and {len(weights)} weights; give one each.")
        listed = [e | {"weight": w} for e, w in zip(listed, weights, strict=True)]
    settings, rest = _split(fields)
    rest["options"] = dict(rest.get("options") or {})
    return make_recipe({"base": "" if base is None else str(base), "experts": listed, **rest}), settings


def _split(fields: Mapping[str, Any]) -> tuple[RunSettings, dict[str, Any]]:
    """The settings of a run among keyword arguments, and the others."""
    settings = {k: v for k, v in fields.items() if k in _SETTINGS}
    return RunSettings(**settings), {k: v for k, v in fields.items() if k not in _SETTINGS}
