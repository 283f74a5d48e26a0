"""Merge jobs of nodes: each has a key, runs once, and its file is cached under the key."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

import actmat
from actmat.errors import RecipeError
from actmat.extras.diffusion.blocks import block_weights
from actmat.progress import Progress
from actmat.run import MergeReport

from .files import stamp
from .scaling import at_strength
from .stacks import Expert, Lora, expert_names

LAYOUTS = ("same", "kohya", "diffusers", "comfy")
"""Layouts of tensor names in a LoRA file; `same`: as in the merged files."""

KEPT = 8
"""Maximum number of merged LoRA files kept in ComfyUI's temporary directory."""

PARTS = ("first_stage_model.*", "vae.*", "cond_stage_model.*", "conditioner.*", "text_encoders.*")
"""Tensors of a checkpoint outside the diffusion model."""


def _key(*parts: Any) -> str:
    """Hash of everything that determines a result; files are identified by size and times."""
    return hashlib.sha256(repr((actmat.__version__, *parts)).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class LoraJob:
    """A merge of LoRA files into one.

    Args:
        loras: at least one.
        settings: recipe fields: method, options, scale.
        rank: rank of the result; 0: exact.
    """

    loras: tuple[Lora, ...]
    settings: Mapping[str, Any]
    rank: int = 0

    @contextlib.contextmanager
    def experts(self, folder: Path) -> Iterator[list[dict[str, Any]]]:
        """Yield the recipe's experts; scaled copies are in `folder` until the context ends."""
        names = expert_names([lora.name for lora in self.loras])
        with at_strength(self.loras, folder) as files:
            yield [{"path": str(file), "name": n} for file, n in zip(files, names, strict=True)]

    def fields(self, layout: str) -> dict[str, Any]:
        """Arguments of `actmat.merge` except inputs and output."""
        output: dict[str, Any] = {"kind": "adapter", "layout": layout, "any_base": True}
        return {**self.settings} | {"output": output | ({"rank": self.rank} if self.rank else {})}

    def key(self, layout: str) -> str:
        """Key of the result in a layout."""
        return _key(layout, self, [stamp(lora.file) for lora in self.loras])


@dataclass(frozen=True, slots=True)
class CheckpointJob:
    """A merge of checkpoints of one base; `only_diffusion` copies all other tensors from the base."""

    base: Path
    experts: tuple[Expert, ...]
    settings: Mapping[str, Any]
    only_diffusion: bool = True

    @property
    def key(self) -> str:
        """Key of the result."""
        return _key(self, stamp(self.base), [stamp(e.file) for e in self.experts])

    def fields(self) -> dict[str, Any]:
        """Arguments of `actmat.merge` except base and output."""
        names = expert_names([e.name for e in self.experts])
        experts: list[dict[str, Any]] = [
            {"path": str(e.file), "name": name} for e, name in zip(self.experts, names, strict=True)
        ]
        if any(e.weight != 1.0 or e.blocks for e in self.experts):  # methods without weights refuse them
            with actmat.open_model(self.base) as base:
                weights = [e.blocks and block_weights(e.blocks, base.specs, e.weight)[0] for e in self.experts]
            rows = zip(experts, self.experts, weights, strict=True)
            experts = [row | {"weight": weight or e.weight} for row, e, weight in rows]
        kept = [{"match": list(PARTS), "keep": "base", "optional": True}] if self.only_diffusion else []
        return {**self.settings} | {"experts": experts, "rules": kept, "max_shard_size": "1000TB"}


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged file, its manifest, and a summary."""

    file: Path
    manifest: Mapping[str, Any]
    summary: str


class MergedLoras:
    """Cache of merged LoRA files by key, in this session's folder.

    Args:
        folder: function that returns the folder, which may be emptied at any time.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._done: dict[str, Merged] = {}

    def get(self, job: LoraJob, layout: str, progress: Progress) -> Merged:
        """The merged file, merged if missing.

        Raises:
            MergeError: the files cannot be merged.
        """
        if not job.loras:
            raise RecipeError("The LoRA stack is empty, or all its strengths are 0: nothing to merge.")
        key = job.key(layout)
        found = self._done.pop(key, None)
        if found is None or not found.file.is_file():
            found = self._merge(job, layout, self._folder() / f"{key}.safetensors", progress)
        self._done[key] = found  # newest last
        while len(self._done) > KEPT:
            oldest = self._done.pop(next(iter(self._done)))
            oldest.file.unlink(missing_ok=True)
        return found

    @staticmethod
    def _merge(job: LoraJob, layout: str, out: Path, progress: Progress) -> Merged:
        with job.experts(out.with_name(f"{out.stem}-inputs")) as experts:
            report = run_merge(out, progress, experts=experts, overwrite=True, **job.fields(layout))
        return merged_file(out, report, [f"{x.name} {x.model:g}/{x.clip:g} {x.blocks}".strip() for x in job.loras])


def run_merge(out: Path, progress: Progress, **fields: Any) -> MergeReport:
    """Run `actmat.merge` outside ComfyUI's inference mode, whose tensors other threads cannot change."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(False), torch.no_grad():
        return actmat.merge(out=out, progress=progress, durable=False, **fields)


def merged_file(out: Path, report: MergeReport, inputs: Iterable[str]) -> Merged:
    """The weight file of an output, which is a folder or the file itself."""
    from actmat.report.words import size_words

    (file,) = out.glob("*.safetensors") if out.is_dir() else [out]
    lines = [f"{report.plan.recipe.method}: {' + '.join(inputs)}"]
    lines += [words for words in (size_words(report.totals.norms),) if words]
    if report.totals.relative_error:
        lines.append(f"relative error of the rank: {report.totals.relative_error:.3g}")
    notes = (*report.warnings, *report.plan.notes)
    lines += [str(note) if note.severity == "warning" else f"note: {note}" for note in notes]
    return Merged(file, report.manifest, "\n".join(lines))


def write_record(target: Path, job: LoraJob | CheckpointJob, manifest: Mapping[str, Any]) -> None:
    """Write a record of the inputs and actmat's manifest next to a saved file."""
    record = {"inputs": asdict(job), "manifest": manifest}
    target.write_text(json.dumps(record, indent=1, default=str), "utf-8")


def publish(source: Path, target: Path, *, keep: bool) -> None:
    """Copy (`keep`) or move a file to its target atomically, also across file systems."""
    part = target.with_name(f"{target.name}.part")  # a suffix that ComfyUI does not list
    try:
        (shutil.copyfile if keep else shutil.move)(source, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
