"""Merging adapters into an adapter: what `api.run_recipes` and `api.plan_recipe` do when that is what is wanted."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.api_output import check_room
from actmat.checkpoints.adapter import Adapter
from actmat.checkpoints.adapter_expert import AdapterExpert
from actmat.checkpoints.adapter_open import is_adapter, open_adapter
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.checkpoints.writing.staging import Staging, disk_errors
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.diagnostics.build import RunFacts, build_diagnosis
from actmat.diagnostics.model import Diagnosis
from actmat.diagnostics.run import module_watches, with_measures
from actmat.engine.adapters import AdapterJob, check_finite, execute_adapters
from actmat.engine.resources import Resources
from actmat.engine.watch import NoWriter
from actmat.errors import CheckpointError, MergeError, RecipeError
from actmat.plan.adapter_model import AdapterPlan
from actmat.plan.adapter_places import fit_adapter
from actmat.plan.adapters import build_adapter_plan
from actmat.plan.measured import opened_statistics
from actmat.recipe import Recipe
from actmat.report.adapter_manifest import adapter_card, build_adapter_manifest
from actmat.report.manifest import write_manifest
from actmat.report.write import write_report

__all__ = [
    "adapter_expert",
    "check_adapter_values",
    "diagnose_adapters",
    "opened_adapters",
    "plan_adapters",
    "run_adapters",
    "writes_adapter",
]


def writes_adapter(recipe: Recipe) -> bool:
    """Whether the recipe's output is an adapter: asked for, or every expert is one and there is no base.

    Raises:
        RecipeError: an adapter is wanted of experts that are none, a model without a base, or neither is possible.
    """
    if recipe.to == "model" or (recipe.to is None and recipe.base):
        if not recipe.base:
            raise RecipeError("A full model is merged into a base: give --base, or write an adapter (--to adapter).")
        if recipe.rank is not None:
            raise RecipeError("'rank' is the rank of a merged adapter; write one with --to adapter, or leave it out.")
        return False
    full = [e.label for e in recipe.experts if not is_adapter(e.path)]
    if full:
        raise RecipeError(
            f"--base must be given: {', '.join(full)} is no adapter, so a full model is written, which is merged into "
            "the checkpoint that all experts come from."
            if recipe.to is None
            else f"--to adapter needs adapters; {', '.join(full)} is none. Write a model (--base ..., --to model)."
        )
    return True


@contextlib.contextmanager
def opened_adapters(recipe: Recipe) -> Iterator[list[Adapter]]:
    """The experts, opened as adapters; all that cannot be opened are reported together."""
    with contextlib.ExitStack() as stack:
        opened: list[Adapter] = []
        problems: list[str] = []
        for expert in recipe.experts:
            try:
                opened.append(stack.enter_context(open_adapter(expert.path)))
            except CheckpointError as error:
                problems += error.problems if len(error.problems) > 1 else [str(error)]
        if problems:
            raise CheckpointError(f"{len(problems)} problem(s) with the inputs.", problems)
        yield opened


def plan_adapters(recipe: Recipe) -> AdapterPlan:
    """The plan of a merged adapter, from headers alone.

    Raises:
        MergeError: the inputs do not fit; carries all problems.
    """
    with opened_adapters(recipe) as adapters, opened_statistics(recipe) as measured:
        return build_adapter_plan(recipe, adapters, _base_config(recipe), measured)


def run_adapters(
    recipes: Sequence[Recipe],
    outs: Sequence[Path],
    resources_of: Callable[[Sequence[AdapterPlan]], Resources],
    *,
    overwrite: bool,
    durable: bool,
    sha256: bool,
    diagnose: bool,
    started: Callable[[Sequence[AdapterPlan], int, int], None],
    progress: Callable[[str, int], None],
) -> list[tuple[Path, AdapterPlan, Mapping[str, Any], int, Diagnosis | None]]:
    """Merge, write, and finish each output; (place, plan, manifest, resumed modules, diagnosis) per recipe.

    Raises:
        MergeError: nothing is left at any place unless that output was finished; interrupted ones can be resumed.
    """
    began = time.perf_counter()
    with opened_adapters(recipes[0]) as adapters, contextlib.ExitStack() as stack:
        config = _base_config(recipes[0])
        measured = stack.enter_context(opened_statistics(recipes[0]))
        plans = [build_adapter_plan(r, adapters, config, measured) for r in recipes]
        resources = resources_of(plans)
        stages = [Staging(o, p.fingerprint(), overwrite=overwrite) for o, p in zip(outs, plans, strict=True)]
        journals = []
        for stage in stages:
            journals.append(stage.open())
            stack.callback(stage.close)
        try:
            jobs = []
            check_room(stages, plans)
            for stage, plan, journal in zip(stages, plans, journals, strict=True):
                writer = ShardWriter(stage.path, plan.shards, durable=durable)
                stack.callback(writer.close)
                if diagnose:
                    journal = with_measures(journal, [m.name for m in plan.modules])
                done = {n: r for n, r in journal.items() if all(writer.holds(k, h) for k, h in r["hashes"].items())}
                jobs.append(AdapterJob(plan, writer, done, stage.record, module_watches() if diagnose else None))
            resumed = [len(j.done) for j in jobs]
            started(plans, sum(resumed), resources.workers)
            execute_adapters(jobs, adapters, resources, measured=measured, progress=progress)
            manifests = [_finish(j, s, adapters, began, sha256) for j, s in zip(jobs, stages, strict=True)]
            reports = [_report(j, s, adapters, began) for j, s in zip(jobs, stages, strict=True)]
        except MergeError:  # the same command would fail again, another would not use what is done
            for stage in reversed(stages):  # the first one made the folder of all
                stage.discard()
            raise
        for stage in stages:
            stage.commit()
    return list(zip(outs, plans, manifests, resumed, reports, strict=True))


def diagnose_adapters(
    recipe: Recipe,
    resources_of: Callable[[Sequence[AdapterPlan]], Resources],
    *,
    started: Callable[[Sequence[AdapterPlan], int, int], None],
    progress: Callable[[str, int], None],
) -> Diagnosis:
    """Merge in memory, module by module, and measure; nothing is written.

    Raises:
        MergeError: whatever merging them would raise.
    """
    began = time.perf_counter()
    with opened_adapters(recipe) as adapters, opened_statistics(recipe) as measured:
        plan = build_adapter_plan(recipe, adapters, _base_config(recipe), measured)
        resources = resources_of([plan])
        job = AdapterJob(plan, NoWriter(), watch=module_watches())
        started([plan], 0, resources.workers)
        execute_adapters([job], adapters, resources, measured=measured, progress=progress)
        return build_diagnosis(plan, job.done, _run_facts(adapters, None, began))


def _report(job: AdapterJob, stage: Staging, adapters: Sequence[Adapter], began: float) -> Diagnosis | None:
    """The diagnosis of a watched merge, written beside the manifest."""
    if job.watch is None:
        return None
    diagnosis = build_diagnosis(job.plan, job.done, _run_facts(adapters, stage.out, began))
    with disk_errors(stage.path):
        write_report(diagnosis, stage.path)
    return diagnosis


def _run_facts(adapters: Sequence[Adapter], out: Path | None, began: float) -> RunFacts:
    return RunFacts(
        source="adapters",
        kinds=["adapter"] * len(adapters),
        storage_dtypes=sorted({s.dtype for a in adapters for s in a.weights.specs.values()}),
        out=None if out is None else str(out),
        seconds=time.perf_counter() - began,
    )


def _finish(job: AdapterJob, stage: Staging, adapters: Sequence[Adapter], began: float, sha256: bool) -> dict[str, Any]:
    assert isinstance(job.writer, ShardWriter), "a merge that is only watched has nothing to finish"
    job.writer.finish(job.plan.specs)
    with disk_errors(stage.path):
        (stage.path / "adapter_config.json").write_text(json.dumps(job.plan.config, indent=2) + "\n", encoding="utf-8")
        (stage.path / "README.md").write_text(adapter_card(job.plan), encoding="utf-8")
        seconds = time.perf_counter() - began
        manifest = build_adapter_manifest(job.plan, adapters, job.done, out=stage.out, seconds=seconds)
        write_manifest(stage.path, manifest, sha256=sha256)
    return manifest


def adapter_expert(location: str, base: Checkpoint) -> AdapterExpert:
    """An adapter, fitted to the base that it is to be merged into.

    Raises:
        CheckpointError: not an adapter of this base, or none that can be merged; carries all problems.
    """
    adapter = open_adapter(location)
    expert, problems = fit_adapter(adapter, base)
    if problems:
        expert.close()
        raise CheckpointError(
            f"{location}: the adapter cannot be merged into {base.location}.", [f"{location}: {p}" for p in problems]
        )
    return expert


def check_adapter_values(labels: Sequence[str], experts: Sequence[Checkpoint]) -> None:
    """Whether all adapters among the experts hold finite numbers.

    Raises:
        CheckpointError: they do not; lists all.
    """
    pairs = zip(labels, experts, strict=True)
    check_finite({label: e.adapter for label, e in pairs if isinstance(e, AdapterExpert)})


def _base_config(recipe: Recipe) -> Mapping[str, Any] | None:
    if not recipe.base:
        return None
    with open_checkpoint(recipe.base) as base:
        return base.config
