"""The experiment of the small reasoning suite: a small decoder, one expert per puzzle by reinforcement learning.

Base and experts are merged as they were trained, in float32, or rounded to what bfloat16 holds. Reinforcement learning
moves weights by little, and bfloat16 is coarse: a weight `w` has neighbours one ulp away, `2^-8` to `2^-7` of its
size; a change below half an ulp is mostly rounded away.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from actmat_experiments.harness.cache import Cache, digest, library_versions
from actmat_experiments.harness.experiment import Counts, Experiment, Made, Share
from actmat_experiments.harness.merging import KINDS, rescaled
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.results import ScaleKind, Score
from actmat_experiments.reasoning.generate import measure
from actmat_experiments.reasoning.passk import scores_at_k
from actmat_experiments.reasoning.small.model import SmallSettings, load_model, save_model
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
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Small(Experiment):
    """One seed of the suite, stored in one dtype, which is the `model` of its scores.

    Args:
        puzzles: the tasks, one expert each.
    """

    settings: SmallSettings
    puzzles: Sequence[Puzzle] = PUZZLES

    @property
    def names(self) -> tuple[str, ...]:
        """See `Experiment`."""
        return tuple(p.name for p in self.puzzles)

    @property
    def parts(self) -> dict[str, Parts]:
        """Task -> its prompts."""
        return {p.name: split(p, self.settings.validation, self.settings.test, self.seed) for p in PUZZLES}

    def trained(self, puzzle: Puzzle) -> Made:
        """The expert on one task, in float32."""
        s = self.settings
        key = {
            "base": digest(_base_key(s, self.seed)),
            "task": puzzle.name,
            "learning": {n: getattr(s, n) for n in ("steps", "prompts", "group", "rate", "temperature")},
            "libraries": library_versions("trl", "accelerate"),
        }

        def make(folder: Path) -> None:
            base, prompts = load_model(trained_base(self.cache, self.watch, s, self.seed).path), self.parts[puzzle.name]
            with self.watch.stage(f"expert {puzzle.name}: seed {self.seed}", s.steps) as stage:
                watching = {"on_step": stage.advance, "on_log": stage.log}
                expert = reinforce(base, puzzle.right, prompts.train, s.learning, Run(self.seed, folder), **watching)
                save_model(expert, folder)

        place = self.cache.get("reasoning-small-expert", key, make)
        return Made(place, place.name)

    def experts(self, share: Share = (0, 1)) -> dict[str, Made]:
        """See `Experiment`."""
        wanted = self.puzzles[share[0] :: share[1]]
        return {p.name: stored(self.cache, self.trained(p), self.model) for p in wanted}

    def measure(
        self, task: str, expert: Path, n: int, out: Path, advance: Callable[[float], None], kinds: Sequence[str] = KINDS
    ) -> None:
        """See `Experiment`: second moments of the inputs of the expert's layers, the only kind that there is."""
        assert "gram" in kinds
        prompts = self.parts[task].train[:n]
        measure(str(expert), prompts, out)
        advance(len(prompts))

    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """See `Experiment`."""
        s = self.settings
        sizes = [s.validation, s.test, s.validation_samples, s.samples, s.temperature]
        return {"tasks": list(tasks), "parts": list(parts), "sizes": sizes, "seed": self.seed}

    def load(self, folder: Path) -> Any:
        """See `Experiment`."""
        return load_model(folder)

    def at_scales(self, folder: Path, acted: Sequence[str]) -> Callable[[float], Any]:
        """See `Experiment`."""
        model = load_model(self.base.path)
        before = {n: t.clone() for n, t in model.state_dict().items()}
        after = load_model(folder).state_dict()

        def at(scale: float) -> Any:
            model.load_state_dict(rescaled(before, after, acted, scale))
            return model

        return at

    def test(self, model: Any, task: str, part: str) -> Counts:
        """See `Experiment`; `right` is the number of right answers per prompt."""
        s, puzzle = self.settings, next(p for p in self.puzzles if p.name == task)
        prompts = getattr(self.parts[task], part)
        n = s.samples if part == "test" else s.validation_samples
        right_NS = right_answers(model, puzzle, prompts, n, temperature=s.temperature, seed=self.seed)
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
        own = {}
        for puzzle in self.puzzles:
            label = f"expert {puzzle.name}"
            found = self.tested(self.experts()[puzzle.name], self.names, "test", label)
            own[puzzle.name] = found[puzzle.name]
            lines += self.lines(label, "default", found, {"survival": self.survival(puzzle)})
        return lines + self.lines("experts", "default", own)

    def survival(self, puzzle: Puzzle) -> dict[str, float]:
        """Shares of an expert's change that bfloat16 keeps."""
        base, expert = trained_base(self.cache, self.watch, self.settings, self.seed), self.trained(puzzle)

        def make(folder: Path) -> None:
            found = asdict(survival(load_model(base.path).state_dict(), load_model(expert.path).state_dict()))
            (folder / "survival.json").write_text(json.dumps(found), encoding="utf-8")

        folder = self.cache.get("reasoning-small-survival", {"expert": expert.digest}, make)
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

    place = cache.get("reasoning-small-base", _base_key(settings, seed), make)
    return Made(place, place.name)


def stored(cache: Cache, source: Made, storage: str) -> Made:
    """A checkpoint as it is, or rounded to what `storage` holds."""
    if storage == "float32":
        return source

    def make(folder: Path) -> None:
        save_model(load_model(source.path), folder, STORAGES[storage])

    place = cache.get("reasoning-small-stored", {"of": source.digest, "storage": storage}, make)
    return Made(place, place.name)


def _base_key(settings: SmallSettings, seed: int) -> dict[str, Any]:
    chosen = {n: getattr(settings, n) for n in ("size", "reliability", "pretraining", "validation", "test")}
    libraries = library_versions("torch", "transformers", "tokenizers")
    return {"version": _VERSION, "seed": seed, **chosen, "libraries": libraries}
