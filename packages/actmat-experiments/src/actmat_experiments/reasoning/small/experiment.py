"""The experiment of the small reasoning suite: a small decoder, one expert per puzzle by reinforcement learning.

Base and experts are merged as they were trained, in float32, or rounded to what bfloat16 holds. Reinforcement learning
moves weights by little, and bfloat16 is coarse: a weight `w` has neighbors one ulp away, `2^-8` to `2^-7` of its
size; a change below half an ulp is mostly rounded away.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.experiment import Counts, Experiment, Made, Share
from actmat_experiments.harness.measuring import Batch
from actmat_experiments.harness.models import load_model, read_tensors
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.results import ScaleKind, Score
from actmat_experiments.reasoning.passk import scores_at_k
from actmat_experiments.reasoning.small.model import SmallSettings, new_tokenizer, save_model
from actmat_experiments.reasoning.small.puzzles import PUZZLES, Parts, Puzzle, split
from actmat_experiments.reasoning.small.train import Run, pretrain, reinforce, right_answers


@dataclass(frozen=True, slots=True)
class Survival:
    """Shares of the change of all weights that survive storage.

    Args:
        changed: share of weights that differ in the precision of training.
        survives: share of all weights whose stored values differ.
        above_half_ulp: share of all weights that changed by at least half an ulp of the base's stored value.
        relative_change: `||W_t - W_0||_F / ||W_0||_F` in the precision of training.
        energy: `||stored W_t - stored W_0||_F / ||W_t - W_0||_F`; above 1 where rounding amplifies.
        error: `||(stored W_t - stored W_0) - (W_t - W_0)||_F / ||W_t - W_0||_F`: rounding noise against the delta.
    """

    changed: float
    survives: float
    above_half_ulp: float
    relative_change: float
    energy: float
    error: float


def half_ulp(weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Half the distance of the stored `|weight|` to the next larger number of that dtype, in float64."""
    stored = weight.to(dtype).double().abs()
    smallest = torch.finfo(dtype).tiny
    _, exponent = torch.frexp(stored.clamp_min(smallest))
    return torch.ldexp(torch.full_like(stored, torch.finfo(dtype).eps / 4), exponent)


def survival(base: Mapping[str, Tensor], expert: Mapping[str, Tensor], dtype: torch.dtype = torch.bfloat16) -> Survival:
    """Compare two sets of weights before and after storage in `dtype`, over all tensors together."""
    n = changed = survives = above = 0
    weight2 = delta2 = stored2 = error2 = 0.0
    for name, before in base.items():
        after = expert[name]
        delta = after.double() - before.double()
        stored = after.to(dtype).double() - before.to(dtype).double()
        n += delta.numel()
        changed += int((delta != 0).sum())
        survives += int((stored != 0).sum())
        above += int((delta.abs() >= half_ulp(before, dtype)).sum())
        weight2 += float(before.double().square().sum())
        delta2 += float(delta.square().sum())
        stored2 += float(stored.square().sum())
        error2 += float((stored - delta).square().sum())
    norm = delta2**0.5
    return Survival(
        changed / n,
        survives / n,
        above / n,
        norm / weight2**0.5,
        stored2**0.5 / norm if norm else 0.0,
        error2**0.5 / norm if norm else 0.0,
    )


STORAGES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Small(Experiment):
    """One seed of the suite, stored in one dtype, which is the `model` of its scores.

    Args:
        source: the base as it was trained, in float32.
        tasks: the puzzles, one expert each.
    """

    settings: SmallSettings
    source: Made
    tasks: Sequence[Puzzle] = PUZZLES

    @property
    def start(self) -> Made:
        """See `Experiment`."""
        return self.source

    @property
    def parts(self) -> dict[str, Parts]:
        """Task -> its prompts."""
        return {p.name: split(p, self.settings.validation, self.settings.test, self.seed) for p in PUZZLES}

    def training(self, task: Puzzle) -> Mapping[str, Any]:
        """See `Experiment`."""
        return {"learning": self.settings.learning, "libraries": library_versions("trl", "accelerate")}

    def steps(self, task: Puzzle) -> int:
        """See `Experiment`."""
        return self.settings.steps

    def train(self, task: Puzzle, out: Path, stage: Stage) -> None:
        """See `Experiment`."""
        watching = {"on_step": stage.advance, "on_log": stage.log}
        prompts, run = self.parts[task.name].train, Run(self.seed, out)
        save_model(
            reinforce(self.read(self.source.path), task.right, prompts, self.settings.learning, run, **watching), out
        )

    def experts(self, share: Share = (0, 1)) -> dict[str, Made]:
        """See `Experiment`: as they were trained, then stored."""
        return {name: stored(self.cache, made, self.model) for name, made in super().experts(share).items()}

    def inputs(self, task: str, n: int) -> Iterator[Batch]:
        """See `Experiment`."""
        tokenizer, prompts = new_tokenizer(), self.parts[task].train[:n]
        for start in range(0, len(prompts), _BATCH):
            yield dict(tokenizer(list(prompts[start : start + _BATCH]), padding=True, return_tensors="pt"))

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        s = self.settings
        sizes = [s.validation, s.test, s.validation_samples, s.samples, s.temperature]
        return {"tasks": list(tasks), "parts": list(parts), "sizes": sizes, "seed": self.seed}

    def read(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_model("AutoModelForCausalLM", folder)

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`; `right` is the number of right answers per prompt."""
        s, prompts = self.settings, getattr(self.parts[task], part)
        n = s.samples if part == "test" else s.validation_samples
        right_NS = right_answers(model, self.task(task), prompts, n, temperature=s.temperature, seed=self.seed)
        return {"correct": int(right_NS.sum()) / n, "total": len(prompts), "right": right_NS.sum(1).tolist()}

    def lines(
        self, method: str, kind: ScaleKind, found: Mapping[str, Counts], detail: Mapping[str, Any] | None = None
    ) -> list[Score]:
        """A line per task and number of answers allowed."""
        s, how = self.settings, {**(detail or {}), "temperature": self.settings.temperature}
        lines = []
        for task, counts in found.items():
            fields = (self.suite, self.regime, method, kind, task, self.seed, counts["correct"], counts["total"])
            like = Score(*fields, model=self.model, settings=self.digest, detail=how)
            lines += scores_at_k(counts["right"], s.samples, (1, s.k), like)
        return lines

    def references(self) -> list[Score]:
        """Scores of the base, of every expert on all tasks with what bfloat16 keeps of it, and on its own task."""
        lines = self.lines("base", "default", self.tested(self.base, self.names, "test", "base"))
        own, trained = {}, super().experts()
        for name, expert in self.experts().items():
            found = self.tested(expert, self.names, "test", f"expert {name}")
            own[name] = found[name]
            kept = {"survival": self.survival(trained[name])}
            lines += self.lines(f"expert {name}", "default", found, kept)
        return lines + self.lines("experts", "default", own)

    def survival(self, trained: Made) -> dict[str, float]:
        """Shares of an expert's change that bfloat16 keeps."""

        def make(folder: Path) -> None:
            found = asdict(survival(read_tensors(self.source.path), read_tensors(trained.path)))
            (folder / "survival.json").write_text(json.dumps(found), encoding="utf-8")

        folder = self.cache.get("reasoning-small-survival", {"expert": trained.digest}, make)
        found: dict[str, float] = json.loads((folder / "survival.json").read_text(encoding="utf-8"))
        return found


def trained_base(cache: Cache, watch: Watch, settings: SmallSettings, seed: int) -> Made:
    """The base of a seed, in float32."""

    def make(folder: Path) -> None:
        s = settings
        texts = [(p, split(p, s.validation, s.test, seed).train) for p in PUZZLES]
        with watch.stage(f"base: seed {seed}", s.base_steps) as stage:
            model = pretrain(s.size, texts, s.reliability, s.pretraining, seed=seed, on_step=stage.advance)
            save_model(model, folder)

    chosen = {n: getattr(settings, n) for n in ("size", "reliability", "pretraining", "validation", "test")}
    libraries = library_versions("torch", "transformers", "tokenizers")
    place = cache.get("reasoning-small-base", {"seed": seed, **chosen, "libraries": libraries}, make)
    return Made(place, place.name)


def stored(cache: Cache, source: Made, storage: str) -> Made:
    """A checkpoint as it is, or rounded to what `storage` holds."""
    if storage == "float32":
        return source

    def make(folder: Path) -> None:
        save_model(load_model("AutoModelForCausalLM", source.path), folder, STORAGES[storage])

    place = cache.get("reasoning-small-stored", {"of": source.digest, "storage": storage}, make)
    return Made(place, place.name)
