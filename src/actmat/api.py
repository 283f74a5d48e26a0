"""The public functions: merge checkpoints, plan a merge, merge plain tensors."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.api_adapters import adapter_expert, check_adapter_values, plan_adapters, run_adapters, writes_adapter
from actmat.api_output import check_outputs, check_room, finish, finish_report
from actmat.checkpoints.adapter import Adapter
from actmat.checkpoints.adapter_expert import AdapterExpert
from actmat.checkpoints.adapter_open import is_adapter
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.checkpoints.writing.staging import Staging
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.diagnostics.model import Diagnosis
from actmat.diagnostics.run import beside, check_mutes, tensor_watches, with_measures
from actmat.engine.local import Job, execute
from actmat.engine.resources import check_device, share_resources
from actmat.engine.statistics import check_adapters, check_probes
from actmat.errors import CheckpointError, MergeError, RecipeError
from actmat.plan import MergePlan, build_plan
from actmat.plan.adapter_model import AdapterPlan
from actmat.plan.choose import Chooser
from actmat.plan.measured import Measured, declared_kinds, opened_statistics
from actmat.recipe import Recipe, add_statistics, make_recipe

__all__ = [
    "Location",
    "MergeReport",
    "Progress",
    "adapters_of",
    "checked_plans",
    "make",
    "merge",
    "opened",
    "plan",
    "plan_recipe",
    "run_recipes",
]

Location = str | Path


class Progress:
    """What a caller may watch. The default does nothing; the command line draws bars."""

    def started(self, plans: Sequence[MergePlan | AdapterPlan], resumed: int, workers: int) -> None:
        """Plans are made; `resumed` tensors of an interrupted run are taken over."""

    def tensor(self, name: str, nbytes: int) -> None:
        """One tensor is done; called from any thread."""

    def finishing(self) -> None:
        """All tensors are done; flushing to disk and renaming follow."""


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge did.

    Args:
        out: directory of the merged model.
        plan: what was planned.
        manifest: what is in `actmat_manifest.json`.
        seconds: wall time of this run.
        resumed: tensors taken over from an interrupted run.
        diagnosis: what is in `report.json`, where one was asked for.
    """

    out: Path
    plan: MergePlan | AdapterPlan
    manifest: Mapping[str, Any]
    seconds: float
    resumed: int = 0
    diagnosis: Diagnosis | None = None


def merge(
    base: Location | None,
    experts: Sequence[Location | Mapping[str, Any]],
    *,
    out: Location,
    method: str = "actmat",
    options: Mapping[str, Any] | None = None,
    scale: float = 1.0,
    scope: str = "linear",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    dtype: str | None = None,
    compute_dtype: str = "float32",
    device: str = "cpu",
    max_memory: str | int | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    diagnose: bool = False,
    exact: bool = False,
    progress: Progress | None = None,
    **fields: Any,
) -> MergeReport:
    """Merge checkpoints into one: `W* = W_0 + scale * D*`, tensor by tensor.

    Args:
        base: directory, file or hub id `org/name[@revision]` of the checkpoint that all experts come from; None
            merges adapters into an adapter.
        experts: likewise; a mapping may give `path`, `name` and `weight`.
        out: directory to write; must not exist, or be empty, unless `overwrite`.
        method: merge rule, see `actmat methods`.
        options: options of the rule.
        scale: factor of the merged delta.
        scope: "linear", "paper" or "all", see `recipe.Recipe`.
        weights: one per expert, for rules that take weights.
        statistics: what `actmat statistics collect` wrote, by the experts' names or one each in their order, for rules
            that need it.
        dtype: output dtype; default: the base's, per tensor.
        compute_dtype: "float32" or "float64".
        device: "cpu", "cuda[:N]" or "mps", for matrix rules.
        max_memory: such as "4GB"; default: what the machine has free.
        threads: tensors at work at the same time; default: one per core. Does not change the result.
        overwrite: replace an earlier output of actmat.
        durable: wait until the output is on the disk before it appears.
        diagnose: measure while merging, and write a report into the output; the model is the same.
        exact: with `diagnose`: measure without probes, see docs/diagnostics.md.
        progress: see `Progress`.
        fields: any other field of a recipe (`rules`, `keep`, `roles`, `seed`, `postprocess`, ...).

    Returns:
        The report; the model is in `out`.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    listed = _with_statistics(experts, statistics)
    recipe = make(base, listed, method, options, scale, scope, weights, dtype, compute_dtype, out, fields)
    return run_recipes(
        [recipe],
        device=device,
        max_memory=max_memory,
        threads=threads,
        overwrite=overwrite,
        durable=durable,
        diagnose=diagnose,
        exact=exact,
        progress=progress,
    )[0]


def plan(
    base: Location | None,
    experts: Sequence[Location | Mapping[str, Any]],
    *,
    method: str = "actmat",
    options: Mapping[str, Any] | None = None,
    scale: float = 1.0,
    scope: str = "linear",
    weights: Sequence[float] | None = None,
    statistics: Mapping[str, Location] | Sequence[Location] | None = None,
    dtype: str | None = None,
    compute_dtype: str = "float32",
    device: str = "cpu",
    **fields: Any,
) -> MergePlan | AdapterPlan:
    """What `merge` would do, tensor by tensor, from headers alone. Arguments as for `merge`.

    Raises:
        MergeError: the inputs do not fit; carries all problems.
    """
    listed = _with_statistics(experts, statistics)
    recipe = make(base, listed, method, options, scale, scope, weights, dtype, compute_dtype, None, fields)
    return plan_recipe(recipe, device=device)


def plan_recipe(recipe: Recipe, *, device: str = "cpu") -> MergePlan | AdapterPlan:
    """The plan of a recipe, from headers alone.

    Raises:
        MergeError: the inputs do not fit; carries all problems.
    """
    if writes_adapter(recipe):
        return plan_adapters(recipe)
    found: list[MergeError] = []
    with opened([recipe], found) as (base, experts), opened_statistics(recipe) as measured:
        return checked_plans([recipe], base, experts, device, found, measured)[0]


def run_recipes(
    recipes: Sequence[Recipe],
    *,
    device: str = "cpu",
    max_memory: str | int | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    sha256: bool = False,
    diagnose: bool = False,
    exact: bool = False,
    progress: Progress | None = None,
) -> list[MergeReport]:
    """Carry out recipes that share inputs and compute dtype; every tensor is read once for all of them.

    Each recipe has its own `out`. Arguments as for `merge`; `sha256` adds file hashes to the manifests.

    Raises:
        MergeError: nothing is left at any `out` unless that output was finished; interrupted ones can be resumed.
    """
    began = time.perf_counter()
    watch = progress or Progress()
    _check_shared(recipes)
    outs = [_out_path(r) for r in recipes]
    if diagnose:
        check_mutes(recipes)
    if writes_adapter(recipes[0]):
        check_outputs(recipes, outs, overwrite=overwrite)
        finished = run_adapters(
            recipes,
            outs,
            lambda plans: share_resources(plans, device, max_memory, threads),
            overwrite=overwrite,
            durable=durable,
            sha256=sha256,
            diagnose=diagnose,
            started=watch.started,
            progress=watch.tensor,
        )
        seconds = time.perf_counter() - began
        return [MergeReport(out, p, manifest, seconds, n, report) for out, p, manifest, n, report in finished]
    found: list[MergeError] = []
    with _noted(found):
        check_device(device)
    with _noted(found):
        check_outputs(recipes, outs, overwrite=overwrite)
    with opened(recipes, found) as (base, experts), opened_statistics(recipes[0]) as measured:
        plans = checked_plans(recipes, base, experts, device, found, measured)
        more = beside(plans[0]) if diagnose else lambda item: 0
        resources = share_resources(plans, device, max_memory, threads, more)
        with contextlib.ExitStack() as stack:
            stages = [Staging(o, p.fingerprint(), overwrite=overwrite) for o, p in zip(outs, plans, strict=True)]
            journals = []
            for stage in stages:
                journals.append(stage.open())
                stack.callback(stage.close)
            try:
                jobs = []
                check_room(stages, plans)
                for stage, p, journal in zip(stages, plans, journals, strict=True):
                    writer = ShardWriter(stage.path, p.shards, durable=durable)
                    stack.callback(writer.close)
                    watches = tensor_watches(p.recipe, exact=exact) if diagnose else None
                    if watches is not None:
                        journal = with_measures(journal, [t.name for t in p.tensors if t.call is not None])
                    done = {n: r for n, r in journal.items() if writer.holds(n, r["hash"])}
                    jobs.append(Job(p, writer, done, stage.record, watches))
                resumed = [len(j.done) for j in jobs]
                watch.started(plans, sum(resumed), resources.workers)
                check_adapter_values(recipes[0].labels, experts)
                check_adapters(recipes[0].labels, adapters_of(experts), measured)
                check_probes(base, experts, measured)
                execute(jobs, base, experts, resources, measured=measured, progress=watch.tensor)
                watch.finishing()
                wanted = {"base": base} | dict(zip(recipes[0].labels, experts, strict=True))
                folders = {n: wanted[n].fetch_sidecars() for n in {"base", *(r.files_from for r in recipes)}}
                manifests = [finish(j, s, experts, folders, began, sha256) for j, s in zip(jobs, stages, strict=True)]
                reports = [finish_report(j, s, experts, began) for j, s in zip(jobs, stages, strict=True)]
            except MergeError:  # the same command would fail again, another would not use what is done
                for stage in reversed(stages):  # the first one made the folder of all
                    stage.discard()
                raise
            for stage in stages:
                stage.commit()
        seconds = time.perf_counter() - began
        rows = zip(outs, plans, manifests, resumed, reports, strict=True)
        return [MergeReport(out, p, manifest, seconds, n, report) for out, p, manifest, n, report in rows]


def adapters_of(experts: Sequence[Checkpoint]) -> list[Adapter | None]:
    """The adapter of each expert that is one, else None."""
    return [e.adapter if isinstance(e, AdapterExpert) else None for e in experts]


def _with_statistics(
    experts: Sequence[Location | Mapping[str, Any]], given: Mapping[str, Location] | Sequence[Location] | None
) -> list[Location | Mapping[str, Any]]:
    """The experts, each with its statistics.

    Raises:
        RecipeError: not one each, or a name that no expert has.
    """
    if given is None:
        return list(experts)
    listed = [dict(e) if isinstance(e, Mapping) else {"path": str(e)} for e in experts]
    return list(add_statistics(listed, given if isinstance(given, Mapping) else [str(g) for g in given]))


def make(
    base: Location | None,
    experts: Sequence[Location | Mapping[str, Any]],
    method: str,
    options: Mapping[str, Any] | None,
    scale: float,
    scope: str,
    weights: Sequence[float] | None,
    dtype: str | None,
    compute_dtype: str,
    out: Location | None,
    fields: Mapping[str, Any],
) -> Recipe:
    """The recipe that the arguments of `merge` describe.

    Raises:
        RecipeError: they describe none; carries all problems.
    """
    listed: list[dict[str, Any]] = [dict(e) if isinstance(e, Mapping) else {"path": str(e)} for e in experts]
    if weights is not None:
        if len(weights) != len(listed):
            raise RecipeError(f"There are {len(listed)} experts and {len(weights)} weights; give one each.")
        listed = [e | {"weight": w} for e, w in zip(listed, weights, strict=True)]
    return make_recipe(
        {
            "base": "" if base is None else str(base),
            "experts": listed,
            "method": method,
            "options": dict(options or {}),
            "scale": scale,
            "scope": scope,
            "dtype": dtype,
            "compute_dtype": compute_dtype,
            "out": None if out is None else str(out),
            **fields,
        }
    )


@contextlib.contextmanager
def opened(recipes: Sequence[Recipe], found: list[MergeError]) -> Iterator[tuple[Checkpoint, list[Checkpoint]]]:
    """Base and experts, opened. What cannot be opened is reported together with what was `found` before."""
    with contextlib.ExitStack() as stack:
        opened: list[Checkpoint] = []
        problems: list[str] = []
        for place in (recipes[0].base, *(e.path for e in recipes[0].experts)):
            try:
                if opened and is_adapter(place):
                    opened.append(stack.enter_context(adapter_expert(place, opened[0])))
                else:
                    opened.append(stack.enter_context(open_checkpoint(place)))
            except CheckpointError as error:
                problems += error.problems if len(error.problems) > 1 else [str(error)]
        if problems:
            found.append(
                CheckpointError(f"{len(problems)} problem{'s' * (len(problems) > 1)} with the inputs.", problems)
            )
            choices = [p for r in recipes for p in Chooser(r, declared_kinds(r)).problems]
            raise _together([*found, RecipeError("The recipe is not valid.", choices)] if choices else found)
        yield opened[0], opened[1:]


_SHARED = ("base", "experts", "compute_dtype", "allow_nonfinite")


def _check_shared(recipes: Sequence[Recipe]) -> None:
    """One reading serves all recipes of a run, so they must agree on what is read, and how.

    Labels decide too: they are what manifests call the inputs. Weights of experts may differ.
    """
    for field in _SHARED:
        found = {str(_without_weights(getattr(r, field))) for r in recipes}
        if len(found) > 1:
            raise RecipeError(
                f"Recipes of one run share {', '.join(_SHARED)}, but '{field}' differs: {' and '.join(sorted(found))}. "
                "Run them one after the other."
            )


def _without_weights(value: Any) -> Any:
    return [(e.path, e.label, e.statistics) for e in value] if isinstance(value, tuple) else value


def checked_plans(
    recipes: Sequence[Recipe],
    base: Checkpoint,
    experts: Sequence[Checkpoint],
    device: str,
    found: list[MergeError],
    measured: Measured | None = None,
) -> list[MergePlan]:
    """The plans; all their problems are reported together with what was `found` before."""
    plans = []
    for recipe in recipes:
        with _noted(found):
            plans.append(build_plan(recipe, base, experts, device=device, measured=measured))
    if found:
        raise _together(found)
    return plans


@contextlib.contextmanager
def _noted(found: list[MergeError]) -> Iterator[None]:
    """Go on after an error, to find the next."""
    try:
        yield
    except MergeError as error:
        found.append(error)


def _together(errors: Sequence[MergeError]) -> MergeError:
    """One error with the problems of all, of the first one's kind."""
    if len(errors) == 1:
        return errors[0]
    problems = list(dict.fromkeys(p for e in errors for p in e.problems))
    return type(errors[0])(f"The merge cannot be done: {len(problems)} problem{'s' * (len(problems) > 1)}.", problems)


def _out_path(recipe: Recipe) -> Path:
    if recipe.out is None:
        raise RecipeError("Where shall the merged model go? Give --out, or 'out' in the recipe.")
    out = Path(recipe.out)
    return out if out.name not in ("", "..") else out.resolve()  # '.' and '..' have no siblings to build beside
