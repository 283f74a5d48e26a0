"""The public functions: merge checkpoints, plan a merge, merge plain tensors."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat.api_adapters import plan_adapters, run_adapters, writes_adapter
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.checkpoints.sidecars import copy_sidecars
from actmat.checkpoints.staging import Staging, check_output_place, disk_errors
from actmat.checkpoints.writer import ShardWriter
from actmat.engine.local import Job, execute
from actmat.engine.resources import check_device, share_resources
from actmat.errors import AlignmentError, CheckpointError, MergeError, OutputError, RecipeError
from actmat.methods import get_method
from actmat.plan import MergePlan, build_plan
from actmat.plan.adapter_model import AdapterPlan
from actmat.recipe import Recipe, make_recipe
from actmat.report import build_manifest, model_card, write_manifest

__all__ = ["MergeReport", "Progress", "merge", "merge_matrices", "plan", "plan_recipe", "run_recipes"]

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
    """

    out: Path
    plan: MergePlan | AdapterPlan
    manifest: Mapping[str, Any]
    seconds: float
    resumed: int = 0


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
    dtype: str | None = None,
    compute_dtype: str = "float32",
    device: str = "cpu",
    max_memory: str | int | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
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
        dtype: output dtype; default: the base's, per tensor.
        compute_dtype: "float32" or "float64".
        device: "cpu", "cuda[:N]" or "mps", for matrix rules.
        max_memory: such as "4GB"; default: what the machine has free.
        threads: tensors at work at the same time; default: one per core. Does not change the result.
        overwrite: replace an earlier output of actmat.
        durable: wait until the output is on the disk before it appears.
        progress: see `Progress`.
        fields: any other field of a recipe (`rules`, `keep`, `roles`, `seed`, `postprocess`, ...).

    Returns:
        The report; the model is in `out`.

    Raises:
        MergeError: see `actmat.errors`; nothing is left at `out`.
    """
    recipe = _recipe(base, experts, method, options, scale, scope, weights, dtype, compute_dtype, out, fields)
    return run_recipes(
        [recipe],
        device=device,
        max_memory=max_memory,
        threads=threads,
        overwrite=overwrite,
        durable=durable,
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
    dtype: str | None = None,
    compute_dtype: str = "float32",
    device: str = "cpu",
    **fields: Any,
) -> MergePlan | AdapterPlan:
    """What `merge` would do, tensor by tensor, from headers alone. Arguments as for `merge`.

    Raises:
        MergeError: the inputs do not fit; carries all problems.
    """
    recipe = _recipe(base, experts, method, options, scale, scope, weights, dtype, compute_dtype, None, fields)
    return plan_recipe(recipe, device=device)


def plan_recipe(recipe: Recipe, *, device: str = "cpu") -> MergePlan | AdapterPlan:
    """The plan of a recipe, from headers alone.

    Raises:
        MergeError: the inputs do not fit; carries all problems.
    """
    if writes_adapter(recipe):
        return plan_adapters(recipe)
    with _opened(recipe) as (base, experts):
        return build_plan(recipe, base, experts, device=device)


def merge_matrices(
    method: str,
    deltas: Sequence[Tensor],
    *,
    base: Tensor | None = None,
    statistics: Mapping[str, Sequence[Tensor]] | None = None,
    weights: Sequence[float] | None = None,
    generator: torch.Generator | None = None,
    **options: Any,
) -> Tensor:
    """Merge the deltas of one layer.

    Args:
        method: merge rule.
        deltas: one `*batch O I` tensor per expert, `D_t = W_t - W_0` (any shape for elementwise rules); floating
            point, one dtype, one device. bfloat16 and float16 are computed in float32.
        base: `W_0`, for rules that look at it.
        statistics: kind ("gram", "fisher") -> one tensor per expert, for rules that need them.
        weights: one per expert, for rules that take them.
        generator: CPU generator of random rules; default: seeded with 0.
        options: options of the rule.

    Returns:
        The merged delta `D*`, in the dtype of the deltas.

    Raises:
        RecipeError: unknown rule or option, or something the rule needs is missing.
    """
    rule = get_method(method)
    resolved = rule.resolve_options(options)
    if not deltas:
        raise RecipeError("merge_matrices: there are no deltas to merge.")
    shapes = {tuple(d.shape) for d in deltas}
    if len(shapes) > 1:
        raise AlignmentError(f"merge_matrices: deltas of one layer have one shape; found {sorted(shapes)}.")
    if rule.acts_on == "matrix" and deltas[0].ndim < 2:
        raise AlignmentError(f"'{method}' merges matrices (..., O, I); got shape {tuple(deltas[0].shape)}.")
    needs: dict[str, Any] = {}
    for name, value in (("base", base), ("statistics", statistics), ("weights", weights)):
        if name in rule.needs:
            needs[name] = value
        elif value is not None:
            raise RecipeError(f"'{method}' makes no use of {name}; leave it out.")
    if rule.needs_base and base is None and rule.parameters["base"].default is not None:
        raise RecipeError(f"'{method}' looks at the base weights: pass base=W_0.")
    missing = [k for k in rule.needs_statistics if not statistics or k not in statistics]
    if missing:
        raise RecipeError(f"'{method}' needs statistics measured on data: pass statistics={{{missing[0]!r}: [...]}}.")
    if rule.is_random:
        needs["generator"] = torch.Generator("cpu").manual_seed(0) if generator is None else generator
    if "survey" in rule.needs:
        needs["survey"] = _survey(rule.survey, deltas, resolved)
    half = deltas[0].dtype in (torch.bfloat16, torch.float16)
    with torch.no_grad():
        inputs = [d.float() for d in deltas] if half else list(deltas)
        if half and base is not None:
            needs["base"] = base.float()
        return rule.merge(inputs, **needs, **resolved).value.to(deltas[0].dtype)


def _survey(survey: Any, deltas: Sequence[Tensor], options: Mapping[str, Any]) -> Any:
    """A layer on its own is a model of one tensor."""
    if survey is None or not survey.applies(options):
        return None
    state = survey.start(len(deltas), options)
    again = True
    while again:
        survey.observe(state, deltas, options)
        again = survey.advance(state)
    return survey.finish(state)


def run_recipes(
    recipes: Sequence[Recipe],
    *,
    device: str = "cpu",
    max_memory: str | int | None = None,
    threads: int | None = None,
    overwrite: bool = False,
    durable: bool = True,
    sha256: bool = False,
    progress: Progress | None = None,
) -> list[MergeReport]:
    """Carry out recipes that share base and experts; every tensor is read once for all of them.

    Each recipe has its own `out`. Arguments as for `merge`; `sha256` adds file hashes to the manifests.

    Raises:
        MergeError: nothing is left at any `out` unless that output was finished; interrupted ones can be resumed.
    """
    began = time.perf_counter()
    watch = progress or Progress()
    check_device(device)
    if writes_adapter(recipes[0]):
        outs = [_out_path(r) for r in recipes]
        _check_outputs(recipes, outs, overwrite=overwrite)
        finished = run_adapters(
            recipes,
            outs,
            lambda plans: share_resources(plans, device, max_memory, threads),
            durable=durable,
            sha256=sha256,
            started=watch.started,
            progress=watch.tensor,
        )
        seconds = time.perf_counter() - began
        return [MergeReport(out, p, manifest, seconds, resumed) for out, p, manifest, resumed in finished]
    with _opened(recipes[0]) as (base, experts):
        plans = [build_plan(r, base, experts, device=device) for r in recipes]
        outs = [_out_path(r) for r in recipes]
        _check_outputs(recipes, outs, overwrite=overwrite)
        resources = share_resources(plans, device, max_memory, threads)
        with contextlib.ExitStack() as stack:
            stages = [Staging(out, p.fingerprint()) for out, p in zip(outs, plans, strict=True)]
            jobs = []
            for stage, p in zip(stages, plans, strict=True):
                journal = stage.open()
                stack.callback(stage.close)
                _check_room(stage, p)
                writer = ShardWriter(stage.path, p.shards, durable=durable)
                stack.callback(writer.close)
                done = {n: r for n, r in journal.items() if writer.holds(n, r["hash"])}
                jobs.append(Job(p, writer, done, stage.record))
            resumed = [len(j.done) for j in jobs]
            watch.started(plans, sum(resumed), resources.workers)
            try:
                execute(jobs, base, experts, resources, progress=watch.tensor)
                watch.finishing()
                wanted = {"base": base} | dict(zip(recipes[0].labels, experts, strict=True))
                folders = {n: wanted[n].fetch_sidecars() for n in {"base", *(r.files_from for r in recipes)}}
                manifests = [_finish(j, s, folders, began, sha256) for j, s in zip(jobs, stages, strict=True)]
            except MergeError as error:
                if isinstance(error, CheckpointError | OutputError):  # nothing of it can be used again
                    for job, stage in zip(jobs, stages, strict=True):
                        job.writer.close()
                        stage.discard()
                raise
        seconds = time.perf_counter() - began
        return [MergeReport(o, p, m, seconds, n) for o, p, m, n in zip(outs, plans, manifests, resumed, strict=True)]


def _recipe(
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
def _opened(recipe: Recipe) -> Iterator[tuple[Checkpoint, list[Checkpoint]]]:
    """Base and experts, opened; all that cannot be opened are reported together."""
    with contextlib.ExitStack() as stack:
        opened: list[Checkpoint] = []
        problems: list[str] = []
        for place in (recipe.base, *(e.path for e in recipe.experts)):
            try:
                opened.append(stack.enter_context(open_checkpoint(place)))
            except CheckpointError as error:
                problems += error.problems if len(error.problems) > 1 else [str(error)]
        if problems:
            raise CheckpointError(f"{len(problems)} problem(s) with the inputs.", problems)
        yield opened[0], opened[1:]


def _out_path(recipe: Recipe) -> Path:
    if recipe.out is None:
        raise RecipeError("Where shall the merged model go? Give --out, or 'out' in the recipe.")
    return Path(recipe.out)


def _check_outputs(recipes: Sequence[Recipe], outs: Sequence[Path], *, overwrite: bool) -> None:
    inputs = {"base": Path(recipes[0].base)} if recipes[0].base else {}
    inputs |= {f"expert '{e.label}'": Path(e.path) for e in recipes[0].experts}
    existing = {k: p for k, p in inputs.items() if p.exists()}
    problems = [p for out in outs for p in check_output_place(out, overwrite=overwrite, inputs=existing)]
    twice = sorted({str(o) for o in outs if [x.resolve() for x in outs].count(o.resolve()) > 1})
    problems += [f"several merges are to be written to {o}" for o in twice]
    if problems:
        raise OutputError("The output cannot be written there.", problems)


def _check_room(stage: Staging, p: MergePlan) -> None:
    there = sum(f.stat().st_blocks * 512 for f in stage.path.iterdir() if f.is_file())
    with disk_errors(stage.path):
        free = shutil.disk_usage(stage.path).free
    if free + there < p.write_bytes:
        stage.discard()
        raise OutputError(
            f"{stage.out} needs {p.write_bytes / 1e9:.2f} GB, but its disk has only {(free + there) / 1e9:.2f} GB "
            "free. Free some space or choose another place with --out."
        )


def _finish(
    job: Job, stage: Staging, directories: Mapping[str, Path | None], began: float, sha256: bool
) -> dict[str, Any]:
    recipe = job.plan.recipe
    job.writer.finish(job.plan.specs)
    with disk_errors(stage.path):
        files_from = directories[recipe.files_from]
        copied = copy_sidecars(directories["base"], files_from, stage.path, recipe.dtype)
        (stage.path / "README.md").write_text(model_card(job.plan), encoding="utf-8")
        manifest = build_manifest(job.plan, job.done, out=stage.out, seconds=time.perf_counter() - began, files=copied)
        write_manifest(stage.path, manifest, sha256=sha256)
    stage.commit()
    return manifest
