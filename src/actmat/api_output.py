"""What becomes of an output beside its tensors: may it be written there, has it room, what is written at the end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.checkpoints.adapter_expert import AdapterExpert
from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.writing.sidecars import copy_sidecars
from actmat.checkpoints.writing.staging import Staging, disk_errors
from actmat.checkpoints.writing.staging import check_output_path as check_output_place
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.diagnostics.build import RunFacts, build_diagnosis, storage_dtypes
from actmat.diagnostics.model import Diagnosis
from actmat.engine.local import Job
from actmat.errors import OutputError, format_size
from actmat.plan import MergePlan
from actmat.plan.adapter_model import AdapterPlan
from actmat.recipe import Recipe
from actmat.report import build_manifest, model_card, write_manifest
from actmat.report.write import write_report

__all__ = ["check_outputs", "check_room", "finish", "finish_report"]


def check_outputs(recipes: Sequence[Recipe], outs: Sequence[Path], *, overwrite: bool) -> None:
    """Whether outputs may be written to these places.

    Raises:
        OutputError: in use, an input, or wanted twice; all problems in one.
    """
    inputs = {"base": Path(recipes[0].base)} if recipes[0].base else {}
    inputs |= {f"expert '{e.label}'": Path(e.path) for e in recipes[0].experts}
    existing = {k: p for k, p in inputs.items() if p.exists()}
    problems = [p for out in outs for p in check_output_place(out, overwrite=overwrite, inputs=existing)]
    twice = sorted({str(o) for o in outs if [x.resolve() for x in outs].count(o.resolve()) > 1})
    problems += [f"several merges are to be written to {o}" for o in twice]
    if problems:
        raise OutputError("The output cannot be written there.", problems)


def check_room(stages: Sequence[Staging], plans: Sequence[MergePlan | AdapterPlan]) -> None:
    """Whether each disk has room for all outputs that go there, together; what an interrupted run left counts.

    Raises:
        OutputError: too little; says how many bytes are wanted and how many there are.
    """
    together: dict[int, list[tuple[Staging, MergePlan | AdapterPlan]]] = {}
    for stage, p in zip(stages, plans, strict=True):
        together.setdefault(stage.path.stat().st_dev, []).append((stage, p))
    for here in together.values():
        there = sum(f.stat().st_blocks * 512 for stage, _ in here for f in stage.path.iterdir() if f.is_file())
        with disk_errors(here[0][0].path):
            free = shutil.disk_usage(here[0][0].path).free
        needed = sum(p.write_bytes for _, p in here)
        if free + there < needed:
            names = ", ".join(str(stage.out) for stage, _ in here)
            raise OutputError(
                f"{names}: needs {format_size(needed)}, but the disk has only {format_size(free + there)} free. "
                "Free some space or choose another place with --out; the inputs are untouched."
            )


def finish(
    job: Job,
    stage: Staging,
    experts: Sequence[Checkpoint],
    directories: Mapping[str, Path | None],
    began: float,
    sha256: bool,
) -> dict[str, Any]:
    """Close the shards, copy what goes with them, write card and manifest; returns the manifest.

    Args:
        job: all its tensors are done.
        stage: where the output is built.
        experts: opened inputs, in the recipe's order.
        directories: folder with config and tokenizer files of the base and of the input that the recipe names.
        began: `time.perf_counter()` at the start of the merge, in seconds.
        sha256: hash the finished files as the hub does.

    Raises:
        OutputError: the disk.
    """
    recipe = job.plan.recipe
    assert isinstance(job.writer, ShardWriter), "a merge that is only watched has nothing to finish"
    job.writer.finish(job.plan.specs)
    with disk_errors(stage.path):
        files_from = directories[recipe.files_from]
        copied = copy_sidecars(directories["base"], files_from, stage.path, recipe.dtype)
        (stage.path / "README.md").write_text(model_card(job.plan), encoding="utf-8")
        manifest = build_manifest(job.plan, job.done, out=stage.out, seconds=time.perf_counter() - began, files=copied)
        for row, expert in zip(manifest["experts"], experts, strict=True):
            if isinstance(expert, AdapterExpert):  # its tensors are not those of the output: all are checked
                row["hashes"] = dict(expert.adapter.hashes)
        write_manifest(stage.path, manifest, sha256=sha256)
    return manifest


def finish_report(job: Job, stage: Staging, experts: Sequence[Checkpoint], began: float) -> Diagnosis | None:
    """The diagnosis of a watched merge, written beside the manifest."""
    if job.watch is None:
        return None
    run = RunFacts(
        source="merge",
        kinds=["adapter" if isinstance(e, AdapterExpert) else "model" for e in experts],
        storage_dtypes=storage_dtypes(job.plan),
        out=str(stage.out),
        seconds=time.perf_counter() - began,
    )
    diagnosis = build_diagnosis(job.plan, job.done, run)
    with disk_errors(stage.path):
        write_report(diagnosis, stage.path)
    return diagnosis
