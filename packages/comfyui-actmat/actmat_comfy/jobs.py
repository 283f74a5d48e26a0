"""Merges that nodes ask for: as values with a key, carried out once, their files kept by that key."""

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
from actmat.diagnostics.model import Diagnosis
from actmat.errors import RecipeError
from actmat.progress import Progress
from actmat.run import MergeReport

from .files import stamp
from .scaling import at_strength
from .stacks import Expert, Lora, expert_names

LAYOUTS = ("same", "kohya", "diffusers", "comfy")
"""Names of the tensors of a LoRA file: as in the merged files, or of one of these."""

STRENGTHS = ("scale", "weights")
"""Meaning of the strengths of a stack: factors of the deltas, as ComfyUI applies them, or weights of the method."""

KEPT = 8
"""Merged LoRA files that are kept at most, in ComfyUI's temporary directory."""

PARTS = ("first_stage_model.*", "vae.*", "cond_stage_model.*", "conditioner.*", "text_encoders.*")
"""Tensors of a checkpoint that are no part of the diffusion model."""


def _key(*parts: Any) -> str:
    """Hash of all that decides a result, with sizes and times in place of the contents of files."""
    return hashlib.sha256(repr((actmat.__version__, *parts)).encode()).hexdigest()[:32]


@dataclass(frozen=True, slots=True)
class LoraJob:
    """A merge of LoRA files into one.

    Args:
        loras: at least one.
        settings: fields of a recipe: method, its options, scale.
        rank: of the result; 0: the exact one.
        strengths: of `STRENGTHS`.
    """

    loras: tuple[Lora, ...]
    settings: Mapping[str, Any]
    rank: int = 0
    strengths: str = STRENGTHS[0]

    @contextlib.contextmanager
    def experts(self, folder: Path) -> Iterator[list[dict[str, Any]]]:
        """Experts of the recipe; scaled copies are in `folder` until the context ends."""
        names = expert_names([lora.name for lora in self.loras])
        if self.strengths == "weights":
            yield [{"path": str(x.file), "name": n, "weight": x.weight} for x, n in zip(self.loras, names, strict=True)]
            return
        with at_strength(self.loras, folder) as files:
            yield [{"path": str(file), "name": n} for file, n in zip(files, names, strict=True)]

    def fields(self, layout: str) -> dict[str, Any]:
        """Arguments of `actmat.merge` but for the inputs and the output."""
        output: dict[str, Any] = {"kind": "adapter", "layout": layout, "any_base": True}
        return {**self.settings} | {"output": output | ({"rank": self.rank} if self.rank else {})}

    def key(self, layout: str) -> str:
        """Key of the result in a layout."""
        return _key(layout, self, [stamp(lora.file) for lora in self.loras])


@dataclass(frozen=True, slots=True)
class CheckpointJob:
    """A merge of checkpoints of one base into one; `only_diffusion` keeps all else of the base."""

    base: Path
    experts: tuple[Expert, ...]
    settings: Mapping[str, Any]
    only_diffusion: bool = True

    @property
    def key(self) -> str:
        """Key of the result."""
        return _key(self, stamp(self.base), [stamp(e.file) for e in self.experts])

    def fields(self) -> dict[str, Any]:
        """Arguments of `actmat.merge` but for the base and the output."""
        names = expert_names([e.name for e in self.experts])
        experts: list[dict[str, Any]] = [
            {"path": str(e.file), "name": name} for e, name in zip(self.experts, names, strict=True)
        ]
        if any(e.weight != 1.0 for e in self.experts):  # methods without weights refuse any that are given
            experts = [row | {"weight": e.weight} for row, e in zip(experts, self.experts, strict=True)]
        kept = [{"match": list(PARTS), "keep": "base", "optional": True}] if self.only_diffusion else []
        return {**self.settings} | {"experts": experts, "rules": kept, "max_shard_size": "1000TB"}


@dataclass(frozen=True, slots=True)
class Merged:
    """A merged file, its manifest, and the result in a few sentences."""

    file: Path
    manifest: Mapping[str, Any]
    summary: str


class MergedLoras:
    """Merged LoRA files by their keys, in the folder of this session.

    Args:
        folder: gives the folder, which may be emptied at any time.
    """

    def __init__(self, folder: Callable[[], Path]) -> None:
        self._folder = folder
        self._done: dict[str, Merged] = {}

    def get(self, job: LoraJob, layout: str, progress: Progress) -> Merged:
        """The merged file, merged if it is not there.

        Raises:
            MergeError: the files cannot be merged so; says why.
        """
        if not job.loras:
            raise RecipeError("The LoRA stack is empty, or all its strengths are 0: there is nothing to merge.")
        key = job.key(layout)
        found = self._done.pop(key, None)
        if found is None or not found.file.is_file():
            found = self._merge(job, layout, self._folder() / f"{key}.safetensors", progress)
        self._done[key] = found  # the newest is last
        while len(self._done) > KEPT:
            oldest = self._done.pop(next(iter(self._done)))
            oldest.file.unlink(missing_ok=True)
        return found

    @staticmethod
    def _merge(job: LoraJob, layout: str, out: Path, progress: Progress) -> Merged:
        with job.experts(out.with_name(f"{out.stem}-inputs")) as experts:
            report = run_merge(out, progress, experts=experts, overwrite=True, **job.fields(layout))
        return merged_file(out, report, [f"{x.name} {x.model:g}/{x.clip:g}" for x in job.loras])


def run_merge(out: Path, progress: Progress, **fields: Any) -> MergeReport:
    """`actmat.merge` within ComfyUI: its nodes run in inference mode, whose tensors other threads may not change."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with torch.inference_mode(False), torch.no_grad():
        return actmat.merge(out=out, progress=progress, durable=False, **fields)


def run_diagnosis(job: LoraJob, folder: Path, progress: Progress) -> Diagnosis:
    """Measures of what the merge of a job does to every module; `folder` is for scaled copies meanwhile."""
    with job.experts(folder) as experts, torch.inference_mode(False), torch.no_grad():
        return actmat.diagnose(None, experts, progress=progress, **job.fields("same"))


def merged_file(out: Path, report: MergeReport, inputs: Iterable[str]) -> Merged:
    """The one weight file of an output, which is a folder or the file itself."""
    from actmat.report.words import size_words, warnings_of

    (file,) = out.glob("*.safetensors") if out.is_dir() else [out]
    lines = [f"{report.plan.recipe.method}: {' + '.join(inputs)}"]
    lines += [words for words in (size_words(report.totals.norms),) if words]
    if report.totals.relative_error:
        lines.append(f"relative error of the rank: {report.totals.relative_error:.3g}")
    notes = (*warnings_of(report.totals, report.plan.recipe.mute), *report.plan.notes)
    lines += [str(note) if note.severity == "warning" else f"note: {note}" for note in notes]
    return Merged(file, report.manifest, "\n".join(lines))


def write_record(target: Path, job: LoraJob | CheckpointJob, manifest: Mapping[str, Any]) -> None:
    """Next to a saved file: what it was merged from, and actmat's manifest, which names scaled copies of LoRA files."""
    record = {"inputs": asdict(job), "manifest": manifest}
    target.write_text(json.dumps(record, indent=1, default=str), "utf-8")


def publish(source: Path, target: Path, *, keep: bool) -> None:
    """Put a file at its name, whole or not at all; `keep` copies it, else it is moved, across file systems too."""
    part = target.with_name(f"{target.name}.part")  # no ending by which ComfyUI lists models
    try:
        (shutil.copyfile if keep else shutil.move)(source, part)
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)
