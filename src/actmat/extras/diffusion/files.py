"""A LoRA, or a model of a single-file base, as one `.safetensors` file: output of a merge or a conversion.

A merge runs in a hidden folder next to the file, with its journal, and continues there after an interruption. The
finished file is written under a temporary name and renamed. Its metadata contain the recipe under `actmat`, in place
of manifest and card.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.bounds import is_url
from actmat.checkpoints.formats.torch_files import TORCH_SUFFIXES
from actmat.checkpoints.memory import tensor_specs
from actmat.checkpoints.model import Model
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.writing.shards import plan_shards
from actmat.checkpoints.writing.staging import sibling, whole_file
from actmat.errors import CheckpointError, MergeError, Note, OutputError
from actmat.experts.locate import OpenInput, fit_expert, locate, stored_of
from actmat.experts.lora.adapter import Adapter
from actmat.extras.diffusion.layouts import FileLayout, convert_lora
from actmat.extras.diffusion.metadata import HASHES, OF_MODEL, RECORD, joint_metadata, kept_metadata
from actmat.identity.agreement import export_remarks
from actmat.planning.implied import IN_ONE_FILE
from actmat.progress import Progress
from actmat.recipe import Recipe
from actmat.recipe.output import AdapterOutput, ModelOutput
from actmat.run.locate import Held, locate_inputs
from actmat.run.resume import MergeReport
from actmat.settings import RunSettings
from actmat.version import __version__

END = ".safetensors"
ONE_FILE = (END, *TORCH_SUFFIXES)
"""Endings of models without a folder."""
ONE_SHARD = "8388607TiB"
RunRecipes = Callable[[Sequence[Recipe], RunSettings, Progress], list[MergeReport]]


def run_into_files(
    recipes: Sequence[Recipe], settings: RunSettings, progress: Progress, run: RunRecipes
) -> list[MergeReport] | None:
    """Merge LoRA, or single-file checkpoints, into files atomically; None if an output is not such a file.

    Args:
        recipes: recipes with outputs that end in `.safetensors`.
        settings: run settings.
        progress: receives callbacks.
        run: function that merges into folders.

    Raises:
        OutputError: a file exists and may not be replaced, or was not written by actmat.
    """
    merges = [merge for r in recipes if (merge := _look(r, settings.held)) is not None]
    if len(merges) < len(recipes):
        return None
    outs = [Path(str(r.out)) for r in recipes]
    if settings.diagnose:
        raise OutputError(f"{outs[0]}: a report needs a folder. Fix: give --out without '{END}', or diagnose first")
    if problems := [p for r, out in zip(recipes, outs, strict=True) for p in _problems(r, out, settings.overwrite)]:
        raise OutputError("The output cannot be written.", problems)
    folders = [sibling(out, "folder") for out in outs]
    moved = [
        r.model_copy(update={"out": str(folder)} | ({} if merge.is_lora else {"max_shard_size": ONE_SHARD}))
        for r, folder, merge in zip(recipes, folders, merges, strict=True)
    ]
    reports = run(moved, dataclasses.replace(settings, overwrite=True), progress)
    rows = zip(reports, outs, merges, strict=True)
    return [_as_file(report, out, merge, settings.overwrite) for report, out, merge in rows]


@dataclasses.dataclass(frozen=True)
class FileMerge:
    """A merge into one file, a LoRA or a model, and the header metadata of its experts."""

    is_lora: bool
    headers: tuple[Mapping[str, str], ...]


def _look(recipe: Recipe, held: Held) -> FileMerge | None:
    """The merge, if its output is one file: a LoRA, or a model of a single-file base.

    Raises:
        CheckpointError: inputs cannot be opened; carries all problems.
    """
    if not recipe.out or is_url(recipe.out) or recipe.adapter.layout == "peft":
        return None
    with locate_inputs(recipe, held) as inputs:
        headers = tuple(stored_of(e).folder.header for e in inputs.experts)
        base = inputs.base or inputs.experts[0]
        if isinstance(base, Model) and not isinstance(recipe.output, AdapterOutput):
            is_file = not base.folder.copies_config and base.location.endswith(ONE_FILE)
            is_model = isinstance(recipe.output, ModelOutput | None) and recipe.model.files_of == "base"
            return FileMerge(False, headers) if is_file and is_model else None
        stored = {e.layout if isinstance(e, Adapter) else "peft" for e in inputs.experts}
        layouts = stored if recipe.adapter.layout == "same" else {recipe.adapter.layout}
        return FileMerge(True, headers) if layouts <= IN_ONE_FILE else None


def _problems(recipe: Recipe, out: Path, overwrite: bool) -> list[str]:
    places = [e.path for e in recipe.experts] + ([recipe.base] if recipe.base else [])
    if any(os.path.realpath(place) == os.path.realpath(out) for place in places):
        return [f"{out} is an input of this merge; choose another output"]
    if not os.path.lexists(out):
        return []
    if not overwrite:
        return [f"{out} exists; choose another path or pass --overwrite"]
    if not _is_ours(out):
        return [
            f"{out} was not written by actmat (its metadata have no '{RECORD}'), so --overwrite will not delete it; "
            "remove it yourself or choose another path"
        ]
    return []


def _is_ours(out: Path) -> bool:
    try:
        if not out.is_file() or out.is_symlink():
            return False
        with locate(out) as output:
            return RECORD in stored_of(output).folder.header
    except MergeError:
        return False


def _as_file(report: MergeReport, out: Path, merge: FileMerge, overwrite: bool) -> MergeReport:
    """Write the weights of a finished folder as one file with metadata, and remove the folder."""
    folder, recipe = Path(str(report.out)), report.plan.recipe
    manifest = report.manifest
    (weights,) = folder.glob(f"*{END}")
    experts = [
        {k: e[k] for k in ("name", "location", "content") if k in e} | _hashes(header)
        for e, header in zip(manifest["experts"], merge.headers, strict=True)
    ]
    made = {
        "version": __version__,
        "recipe": recipe.model_dump(
            mode="json", exclude={"out"} if merge.is_lora else {"out", "max_shard_size"}, exclude_defaults=True
        ),
        "experts": experts,
    }
    metadata = {"format": "pt", **joint_metadata(merge.headers), **report.plan.metadata}
    if merge.is_lora:
        metadata = kept_metadata(merge.headers, {s.name: s for s in report.plan.specs})
        said = {k: sorted({m[k] for m in merge.headers if k in m}) for k in OF_MODEL}
        other = [f"{k} ({' and '.join(values)})" for k, values in said.items() if len(values) > 1]
        text = f"header metadata differ, and are not written: {'; '.join(other)}. Are these adapters of one model?"
        notes = (*report.plan.notes, *([Note("warning", "", text)] if other else []))
        report = dataclasses.replace(report, plan=dataclasses.replace(report.plan, notes=notes))
    with whole_file(out, may_replace=lambda: overwrite and _is_ours(out)) as building:
        _copy(weights, building, {**metadata, RECORD: json.dumps(made)})
    shutil.rmtree(folder)
    report = dataclasses.replace(report, out=out)
    report.__dict__["manifest"] = manifest  # the folder is gone
    return report


def _hashes(header: Mapping[str, str]) -> dict[str, Any]:
    """Hashes of an expert that its file states, if it does."""
    stated = {key: header[key] for key in HASHES if key in header}
    return {"hashes": stated} if stated else {}


def _copy(weights: Path, target: Path, metadata: Mapping[str, str]) -> None:
    """Copy a safetensors file with new metadata."""
    with weights.open("rb") as source, target.open("wb") as file:
        header = json.loads(source.read(int.from_bytes(source.read(8), "little")))
        text = json.dumps({**header, "__metadata__": metadata}).encode()
        text += b" " * (-len(text) % 8)
        file.write(len(text).to_bytes(8, "little") + text)
        shutil.copyfileobj(source, file, 1 << 20)
        file.flush()
        os.fsync(file.fileno())


def export_lora(layout: FileLayout, located: OpenInput, out: Path) -> str:
    """Write a LoRA file in a layout; returns a sentence about the result.

    Raises:
        OutputError: the file exists, or cannot be written.
        CheckpointError: the adapter cannot be written in this layout.
    """
    if os.path.lexists(out):
        raise OutputError(f"{out} exists; choose another path, or remove it.")
    if isinstance(located, Model):
        raise CheckpointError(f"{located.location} is a full checkpoint; this format holds adapters only")
    remarks = export_remarks([("adapter", fit_expert(located, None))])
    tensors = convert_lora(located, layout)
    specs = tensor_specs(tensors, out.name, location=str(out))
    metadata = kept_metadata([located.model.folder.header], specs)
    (shard,) = plan_shards([specs[n] for n in sorted(specs)], 1 << 62, metadata=metadata)
    with whole_file(out) as building, building.open("wb") as file:  # safetensors writes metadata in varying order
        file.write(shard.header)
        file.writelines(raw_bytes(tensors[n].contiguous()) for n in shard.specs)
    changed = "names and factors" if located.layout != layout else "unchanged factors"
    return "\n".join((f"{len(tensors)} tensors, {changed}, from {located.layout}'s layout", *remarks))
