"""The experiment of the small reasoning suite: a small decoder, one expert per puzzle by reinforcement learning."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.experiment import Counts, Experiment, Made
from actmat_experiments.harness.measuring import Batch
from actmat_experiments.harness.models import load_model
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.results import ScaleKind, Score
from actmat_experiments.reasoning.passk import scores_at_k
from actmat_experiments.reasoning.small.model import SmallSettings, new_tokenizer, save_model
from actmat_experiments.reasoning.small.puzzles import PUZZLES, Parts, Puzzle, split
from actmat_experiments.reasoning.small.train import Run, pretrain, reinforce, right_answers

_BATCH = 32


@dataclass(frozen=True, kw_only=True)
class Small(Experiment):
    """One seed of the suite.

    Args:
        tasks: the puzzles, one expert each.
    """

    settings: SmallSettings
    tasks: Sequence[Puzzle] = PUZZLES

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
            reinforce(self.read(self.base.path), task.right, prompts, self.settings.learning, run, **watching), out
        )

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
        """Scores of the base, and of every expert on all tasks and on its own."""
        lines = self.lines("base", "default", self.tested(self.base, self.names, "test", "base"))
        own = {}
        for name, expert in self.experts().items():
            found = self.tested(expert, self.names, "test", f"expert {name}")
            own[name] = found[name]
            lines += self.lines(f"expert {name}", "default", found)
        return lines + self.lines("experts", "default", own)


def trained_base(cache: Cache, watch: Watch, settings: SmallSettings, seed: int) -> Made:
    """The base of a seed."""

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
