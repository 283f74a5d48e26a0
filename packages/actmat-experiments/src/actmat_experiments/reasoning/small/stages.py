"""The stages of the small suite, each a folder in the cache under all that determines it.

base -> experts -> (stored in bfloat16) -> merges -> answers
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from actmat.demo.merging import Candidate, merge_candidates
from actmat.engine.resources import one_thread
from actmat_experiments.harness.cache import Cache, digest, library_versions
from actmat_experiments.harness.merging import best_scale, merging_code, rescaled
from actmat_experiments.harness.progress import Watch
from actmat_experiments.reasoning.measure import measure, needs_statistics
from actmat_experiments.reasoning.small.evaluate import right_answers
from actmat_experiments.reasoning.small.model import load_model, save_model
from actmat_experiments.reasoning.small.puzzles import PUZZLES, Parts, Puzzle, split
from actmat_experiments.reasoning.small.settings import SmallSettings
from actmat_experiments.reasoning.small.train import pretrain, reinforce
from actmat_experiments.reasoning.storage import survival

__all__ = ["STORAGES", "Right", "Small"]

STORAGES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_VERSION = 1
_NAMES = "names.json"

Right = Mapping[str, Sequence[int]]
"""Task -> right answers per prompt."""


@dataclass(frozen=True, slots=True)
class Small:
    """One seed of the suite.

    Args:
        cache: of all stages.
        watch: bars and logs.
        settings: everything but the seed.
        seed: of prompts, weights, answers and random rules.
        puzzles: the tasks, one expert each.
        threads: workers of the merges; changes no number.
        device: where matrix rules compute.
    """

    cache: Cache
    watch: Watch
    settings: SmallSettings
    seed: int
    puzzles: Sequence[Puzzle] = PUZZLES
    threads: int | None = None
    device: str = "cpu"

    @property
    def parts(self) -> dict[str, Parts]:
        """Task -> its prompts."""
        s = self.settings
        return {p.name: split(p, s.validation, s.test, self.seed) for p in PUZZLES}

    def base_key(self) -> dict[str, Any]:
        """All that determines the base."""
        s = self.settings
        chosen = {n: getattr(s, n) for n in ("size", "reliability", "pretraining", "validation", "test")}
        return {
            "version": _VERSION,
            "seed": self.seed,
            **chosen,
            "libraries": library_versions("torch", "transformers", "tokenizers"),
        }

    def expert_key(self, puzzle: Puzzle) -> dict[str, Any]:
        """All that determines an expert."""
        return {
            "base": digest(self.base_key()),
            "task": puzzle.name,
            "learning": {n: getattr(self.settings, n) for n in ("steps", "prompts", "group", "rate", "temperature")},
            "libraries": library_versions("trl", "accelerate"),
        }

    def base(self) -> Path:
        """The base, in float32."""
        s, parts = self.settings, self.parts

        def make(folder: Path) -> None:
            with self.watch.stage(f"base: seed {self.seed}", s.base_steps) as stage, one_thread():
                texts = [(p, parts[p.name].train) for p in PUZZLES]
                model = pretrain(s.size, texts, s.reliability, s.pretraining, seed=self.seed, on_step=stage.advance)
                save_model(model, folder)

        return self.cache.get("reasoning-small-base", self.base_key(), make)

    def expert(self, puzzle: Puzzle) -> Path:
        """The expert on one task, in float32."""
        base, prompts, s = self.base(), self.parts[puzzle.name].train, self.settings

        def make(folder: Path) -> None:
            with (
                self.watch.stage(f"expert {puzzle.name}: seed {self.seed}", s.steps) as stage,
                one_thread(),
            ):
                model = load_model(base)
                expert = reinforce(
                    model,
                    puzzle,
                    prompts,
                    s,
                    seed=self.seed,
                    folder=folder,
                    on_step=stage.advance,
                    on_log=stage.log,
                )
                save_model(expert, folder)

        return self.cache.get("reasoning-small-expert", self.expert_key(puzzle), make)

    def stored(self, source: Path, storage: str, key: Mapping[str, Any]) -> Path:
        """A checkpoint as it is, or rounded to what `storage` holds."""
        if storage == "float32":
            return source

        def make(folder: Path) -> None:
            save_model(load_model(source), folder, STORAGES[storage])

        return self.cache.get("reasoning-small-stored", {"of": dict(key), "storage": storage}, make)

    def survival(self, puzzle: Puzzle) -> dict[str, float]:
        """What of an expert's change bfloat16 keeps."""
        base, expert = self.base(), self.expert(puzzle)

        def make(folder: Path) -> None:
            found = asdict(survival(load_model(base).state_dict(), load_model(expert).state_dict()))
            (folder / "survival.json").write_text(json.dumps(found), encoding="utf-8")

        folder = self.cache.get("reasoning-small-survival", {"expert": digest(self.expert_key(puzzle))}, make)
        found: dict[str, float] = json.loads((folder / "survival.json").read_text(encoding="utf-8"))
        return found

    def inputs(self, storage: str) -> tuple[Path, dict[str, Path]]:
        """Base and experts as they are merged."""
        base = self.stored(self.base(), storage, self.base_key())
        return base, {p.name: self.stored(self.expert(p), storage, self.expert_key(p)) for p in self.puzzles}

    def merge_key(self, storage: str, rows: Sequence[Candidate]) -> dict[str, Any]:
        """All that determines some merges."""
        key = {
            "experts": [digest(self.expert_key(p)) for p in self.puzzles],
            "storage": storage,
            "rows": [asdict(row) for row in rows],
            "merging": merging_code(),
            "libraries": library_versions("torch"),
        }
        return key | {"statistics": self.settings.measured} if needs_statistics(rows) else key

    def statistics(self, storage: str) -> dict[str, Path]:
        """Task -> second moments of the inputs of its expert's layers, on training prompts."""
        _, experts = self.inputs(storage)
        found = {}
        for puzzle in self.puzzles:
            prompts = self.parts[puzzle.name].train[: self.settings.measured]
            key = {"expert": digest(self.expert_key(puzzle)), "storage": storage, "prompts": len(prompts)}

            def make(folder: Path, puzzle: Puzzle = puzzle, prompts: Sequence[str] = prompts) -> None:
                with self.watch.stage(f"statistics: {puzzle.name}, {storage}"), one_thread():
                    measure(str(experts[puzzle.name]), prompts, folder / "statistics")

            found[puzzle.name] = self.cache.get("reasoning-small-statistics", key, make) / "statistics"
        return found

    def merges(self, storage: str, rows: Sequence[Candidate]) -> Path:
        """A folder with a checkpoint per row, all by the engine in one reading."""
        base, experts = self.inputs(storage)

        def make(folder: Path) -> None:
            with self.watch.stage(f"merges: {storage}, seed {self.seed}"):
                names = merge_candidates(
                    base,
                    experts,
                    rows,
                    {row.name: folder / row.name for row in rows},
                    seed=self.seed,
                    threads=self.threads,
                    device=self.device,
                    statistics=self.statistics(storage) if needs_statistics(rows) else None,
                )
            (folder / _NAMES).write_text(json.dumps(names), encoding="utf-8")

        return self.cache.get("reasoning-small-merges", self.merge_key(storage, rows), make)

    def right(self, checkpoint: Path, key: Mapping[str, Any], label: str) -> Right:
        """Right answers of a checkpoint on the test prompts of every task."""
        s, parts = self.settings, self.parts
        full = {"model": dict(key), "n_samples": s.samples, "temperature": s.temperature, "seed": self.seed}
        full["tasks"] = [p.name for p in self.puzzles]

        def make(folder: Path) -> None:
            with self.watch.stage(f"answers: {label}, seed {self.seed}", len(self.puzzles)) as stage, one_thread():
                model, found = load_model(checkpoint), {}
                for puzzle in self.puzzles:
                    prompts = parts[puzzle.name].test
                    right_NS = right_answers(
                        model, puzzle, prompts, s.samples, temperature=s.temperature, seed=self.seed
                    )
                    found[puzzle.name] = right_NS.sum(1).tolist()
                    stage.advance()
            (folder / "right.json").write_text(json.dumps(found), encoding="utf-8")

        folder = self.cache.get("reasoning-small-answers", full, make)
        found: Right = json.loads((folder / "right.json").read_text(encoding="utf-8"))
        return found

    def tuned(self, rows: Sequence[Candidate]) -> list[Candidate]:
        """Every row at the scale that answers most validation prompts, from the checkpoints in float32."""
        s = self.settings
        how = {"scales": s.scales, "samples": s.validation_samples, "temperature": s.temperature}
        keys = {row.name: self.merge_key("float32", [row]) | how for row in rows}
        missing = [row for row in rows if not self.cache.holds("reasoning-small-scales", keys[row.name])]
        if missing:
            merged = self.merges("float32", rows)
            with self.watch.stage(f"scales: seed {self.seed}", len(missing)) as stage, one_thread():
                for row in missing:
                    self.cache.get("reasoning-small-scales", keys[row.name], partial(self._tune, merged, row))
                    stage.advance()
        found = {n: self.cache.path("reasoning-small-scales", key) / "scale.json" for n, key in keys.items()}
        return [replace(row, scale=json.loads(found[row.name].read_text(encoding="utf-8"))) for row in rows]

    def _tune(self, merged: Path, row: Candidate, folder: Path) -> None:
        names = json.loads((merged / _NAMES).read_text(encoding="utf-8"))[row.name]
        model = load_model(self.base())
        before = {n: t.clone() for n, t in model.state_dict().items()}
        after = load_model(merged / row.name).state_dict()

        def share(scale: float) -> float:
            model.load_state_dict(rescaled(before, after, names, scale))
            return self._validation_share(model)

        chosen, _ = best_scale(share, self.settings.scales)
        (folder / "scale.json").write_text(json.dumps(chosen), encoding="utf-8")

    def _validation_share(self, model: Any) -> float:
        s, parts = self.settings, self.parts
        shares = [
            right_answers(
                model,
                p,
                parts[p.name].validation,
                s.validation_samples,
                temperature=s.temperature,
                seed=self.seed,
            )
            for p in self.puzzles
        ]
        return float(torch.stack([r.double().mean() for r in shares]).mean())
