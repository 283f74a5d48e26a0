"""The one way from recipes to finished outputs: open -> plan -> stage -> execute -> finish -> commit."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from actmat.diagnostics.build import build_diagnosis
from actmat.diagnostics.model import Diagnosis, read_diagnosis
from actmat.diagnostics.observer import Observers, check_mutes
from actmat.engine.content import FOREIGN
from actmat.engine.devices.device import device_room
from actmat.engine.executors import AUTO, find_executor
from actmat.engine.findings import Findings
from actmat.engine.inputs import Inputs
from actmat.engine.resources import Resources
from actmat.engine.session import SessionSpec
from actmat.engine.units import plan_units
from actmat.errors import CheckpointError, RecipeError, StatisticsError, memory_errors
from actmat.finished import check_finished, has_manifest_of, present_output
from actmat.foreign import html_table, terminal
from actmat.inputs import Problems, check_copied_files, check_values, opened_inputs, plans_of
from actmat.output import StagedOutput, check_outputs, staged_outputs
from actmat.places import checked_room, executor_of, out_path, resources_of
from actmat.planning import MergePlan
from actmat.planning.placement import HOST
from actmat.progress import NoProgress, Progress
from actmat.recipe import Recipe
from actmat.reference import with_reference, with_references
from actmat.report import Totals, read_manifest, recorded_totals, sum_records
from actmat.report.words import size_finding, size_words
from actmat.settings import RunSettings

__all__ = [
    "MergeReport",
    "diagnose_recipe",
    "execute_units",
    "plan_recipe",
    "run_recipes",
]


@dataclass(frozen=True, repr=False)
class MergeReport:
    """Result of one merge.

    Args:
        out: directory of the merged model, or its URL.
        plan: what was planned.
        seconds: wall time of this run.
        resumed: items taken over from an interrupted run.
        diagnosis: contents of `report.json`, where one was asked for.
        was_finished: an earlier call finished the output; it was only verified.
        totals: sums over all tensors.
    """

    out: Path | str
    plan: MergePlan
    seconds: float
    resumed: int = 0
    diagnosis: Diagnosis | None = None
    was_finished: bool = False
    totals: Totals = field(default_factory=Totals)

    def __repr__(self) -> str:
        how = "was finished before" if self.was_finished else f"{self.seconds:.1f} s"
        what = f"{len(self.plan.items)} items by {self.plan.recipe.method}"
        said = [size_words(self.totals.norms), *self._warning()]
        return terminal(f"<MergeReport {self.out}: {'; '.join(s for s in (how, what, *said) if s)}>")

    def _warning(self) -> list[str]:
        """The code of the check that finds the size far off, and what is wrong."""
        found = size_finding(self.totals.norms, self.plan.recipe.mute)
        return [] if found is None else [f"warning {found[0]}: {found[1]}"]

    def _repr_html_(self) -> str:
        found = "" if self.diagnosis is None else self.diagnosis._repr_html_()
        return str(html_table(repr(self), (), ())) + found + self.plan._repr_html_()

    @functools.cached_property
    def manifest(self) -> Mapping[str, Any]:
        """Contents of `actmat_manifest.json`, read when they are first asked for: about 2 kB per tensor."""
        with present_output(self.out) as folder:
            return read_manifest(folder)


def plan_recipe(recipe: Recipe, *, device: str = "cpu", device_memory: str | int | None = None) -> MergePlan:
    """The plan of a recipe, from headers only.

    Args:
        recipe: what is wanted.
        device, device_memory: see `RunSettings`; the devices need not be on this machine.

    Raises:
        MergeError: the inputs do not fit; carries all problems.
    """
    recipe = with_reference(recipe)
    problems, room = Problems(), HOST
    with problems.noted():
        room = device_room(device, device_memory)
    with opened_inputs([recipe], problems) as inputs:
        with problems.noted():
            check_copied_files([recipe], inputs)
        return plans_of([recipe], inputs, room, problems)[0]


@memory_errors()  # outside of the staged outputs, which keep what is finished
def run_recipes(
    recipes: Sequence[Recipe],
    settings: RunSettings | None = None,
    progress: Progress | None = None,
) -> list[MergeReport]:
    """Carry out recipes that share inputs and compute dtype; every tensor is read once for all of them.

    An output that an earlier call with the same recipe and inputs finished is verified and not made again, unless it
    may be overwritten.

    Args:
        recipes: each with its own `out`.
        settings: how to run them.
        progress: receives callbacks.

    Raises:
        MergeError: nothing is at any `out` unless that output was finished. What was done of the others is kept for
            the same call, which a note of the error says, unless the error would recur.
    """
    began = time.perf_counter()
    settings, progress = settings or RunSettings(), progress or NoProgress()
    recipes = with_references(recipes)
    _check_shared(recipes)
    executor = executor_of(settings, recipes[0])
    outs = [out_path(r) for r in recipes]
    problems = Problems()
    if settings.diagnose:
        check_mutes(recipes)
    room = checked_room(settings, executor, problems)
    same = () if settings.overwrite else {o for r, o in zip(recipes, outs, strict=True) if has_manifest_of(r, o)}
    with problems.noted():
        check_outputs(recipes, outs, overwrite=settings.overwrite, finished=same)
    with opened_inputs(recipes, problems) as inputs:
        with problems.noted():
            check_copied_files(recipes, inputs)
        plans = dict(zip(outs, plans_of(recipes, inputs, room, problems), strict=True))
        reports = {out: _finished(plans[out], out, settings) for out in outs if out in same}
        plans = {out: plan for out, plan in plans.items() if out not in same}
        if plans:
            reports |= {r.out: r for r in _merge(plans, inputs, replace(settings, executor=executor), progress, began)}
    return [reports[out] for out in outs]


def _finished(plan: MergePlan, out: Path | str, settings: RunSettings) -> MergeReport:
    """Report of an output that an earlier run finished.

    Raises:
        OutputError: it is not what the plan gives now.
    """
    began = time.perf_counter()
    with present_output(out) as folder:
        check_finished(plan, out, folder, settings)
        totals = recorded_totals(read_manifest(folder))
        diagnosis = read_diagnosis(folder) if settings.diagnose else None
    items = sum(i.action != "tie" for i in plan.items)
    return MergeReport(out, plan, time.perf_counter() - began, items, diagnosis, was_finished=True, totals=totals)


def _merge(
    plans: Mapping[Path | str, MergePlan], inputs: Inputs, settings: RunSettings, progress: Progress, began: float
) -> list[MergeReport]:
    """Carry out plans over the same inputs; `began`: start of the run on the performance counter."""
    (recipe, *_) = (p.recipe for p in plans.values())
    observers = Observers(recipe.seed, settings.exact) if settings.diagnose else None
    resources = resources_of(list(plans.values()), settings, inputs, observers)
    if any(isinstance(out, str) for out in plans):  # shards that are finished can be sent
        resources = replace(resources, in_order=True)
    with staged_outputs(list(plans), list(plans.values()), settings, inputs) as outputs:
        resumed = [len(o.done) for o in outputs]
        progress.started(list(plans.values()), sum(resumed), resources.workers)
        check_values(inputs)
        execute_units(outputs, inputs, settings.executor or AUTO, resources, observers, progress)
        progress.finishing()
        reports = [o.write_report(time.perf_counter() - began) for o in outputs] if settings.diagnose else []
        for o in outputs:
            o.finish(inputs, time.perf_counter() - began, sha256=settings.sha256)
        totals = [sum_records(o.plan, o.records) for o in outputs]
    seconds = time.perf_counter() - began
    return [
        MergeReport(o.out, o.plan, seconds, n, reports[i] if reports else None, totals=total)
        for i, (o, total, n) in enumerate(zip(outputs, totals, resumed, strict=True))
    ]


@memory_errors()
def diagnose_recipe(recipe: Recipe, settings: RunSettings | None = None, progress: Progress | None = None) -> Diagnosis:
    """Measure what merging a recipe would do; nothing is written, its `out` is ignored.

    Raises:
        MergeError: whatever merging it would raise.
    """
    began = time.perf_counter()
    settings, progress = settings or RunSettings(), progress or NoProgress()
    recipe = with_reference(recipe)
    executor = executor_of(settings, recipe)
    check_mutes([recipe])
    problems = Problems()
    room = checked_room(settings, executor, problems)
    with opened_inputs([recipe], problems) as inputs:
        (plan,) = plans_of([recipe], inputs, room, problems)
        observers = Observers(recipe.seed, settings.exact)
        resources = resources_of([plan], settings, inputs, observers)
        copies = [i.name for i in plan.items if i.call is None]  # nothing to measure
        output = StagedOutput.unwritten(plan, skip=copies)
        progress.started([plan], 0, resources.workers)
        check_values(inputs)
        execute_units([output], inputs, executor, resources, observers, progress)
        return build_diagnosis(plan, output.records, out=None, seconds=time.perf_counter() - began)


def execute_units(
    outputs: Sequence[StagedOutput],
    inputs: Inputs,
    executor_name: str,
    resources: Resources,
    observers: Observers | None,
    progress: Progress,
) -> None:
    """Merge everything that is not done yet; keep the journal, judge the findings.

    Raises:
        CheckpointError: NaN or Inf in the inputs (all of them listed), or a file that changed or ended early.
        StatisticsError: statistics of another model than the one that was read.
    """
    plans = tuple(o.plan for o in outputs)
    units = plan_units(plans, [o.done for o in outputs], observers)
    if not units:
        return
    spec = SessionSpec(
        plans=plans,
        base=None if inputs.base is None else inputs.base.handle(),
        experts=tuple(e.handle() for e in inputs.experts),
        outputs=tuple(o.folder for o in outputs),
        observers=observers,
        device=resources.device,
    )
    executor = find_executor(executor_name, resources.device)(inputs, [o.writer for o in outputs], resources)
    spec = replace(spec, surveys=executor.survey(spec))
    findings = Findings(tolerated=plans[0].recipe.allow_nonfinite)
    with contextlib.closing(executor.run(spec, units)) as results:
        for result in results:
            findings.add(result.findings)
            if not findings.fatal:
                for p, record in result.records:
                    outputs[p].keep(record)
            for group in result.unit.groups:
                items = [plans[p].items[n] for p, n in group]
                nbytes = max(i.cost.read_bytes + i.cost.write_bytes for i in items)
                progress.tensor(items[0].name, nbytes)
                if result.where:
                    progress.node(result.where, nbytes)
            for note in result.notes:
                progress.note(note)
    _judge(findings)


def _judge(findings: Findings) -> None:
    if findings.foreign_statistics:
        raise StatisticsError(FOREIGN, sorted(findings.foreign_statistics))
    if findings.broken_ties and (findings.tolerated or not findings.nonfinite):
        raise CheckpointError(
            f"The inputs hold tensors that config.json ties and that differ: {len(findings.broken_ties)} problem(s). "
            "Merging one for both would lose the other.",
            sorted(findings.broken_ties),
        )
    if findings.fatal:
        problems = findings.problems()
        error = CheckpointError(
            f"The inputs hold values that cannot be merged: {len(problems)} problem(s). NaN and Inf would spread; find "
            "out why the fine-tuning produced them, or pass --allow-nonfinite to treat them as unchanged.",
            problems,
        )
        error.recurs = True
        raise error


_SHARED = ("base", "experts", "vocabulary", "compute_dtype", "allow_nonfinite", "to", "executor")


def _check_shared(recipes: Sequence[Recipe]) -> None:
    """One reading serves all recipes of a run, so they must agree on what is read, and how.

    Labels decide too: they are what manifests call the inputs. Weights of experts may differ.

    Raises:
        RecipeError: they do not.
    """
    for name in _SHARED:
        found = {str(_without_weights(getattr(r, name))) for r in recipes}
        if len(found) > 1:
            raise RecipeError(
                f"Recipes of one run share {', '.join(_SHARED)}, but '{name}' differs: {' and '.join(sorted(found))}. "
                "Run them one after the other."
            )


def _without_weights(value: Any) -> Any:
    return [(e.path, e.label, e.statistics) for e in value] if isinstance(value, tuple) else value
