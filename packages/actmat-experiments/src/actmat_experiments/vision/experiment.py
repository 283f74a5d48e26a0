"""One architecture, one seed, from the base to scores: the chain of stages that both suites share.

Every stage's key holds the digests of the stages before it, so that a change anywhere changes all that follows.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from actmat.demo.heads import Head
from actmat.demo.merging import Candidate, merge_candidates
from actmat.demo.training import Schedule, side_by_side, steps_of
from actmat.methods import get_method
from actmat_experiments.harness.cache import Cache, code_digest, library_versions
from actmat_experiments.harness.merging import SCALES, best_scale, merging_code, rescaled
from actmat_experiments.harness.processes import one_thread_on
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.results import Regime, Score
from actmat_experiments.vision.backbones import Backbone, ClipHead, load_head, read_tensors
from actmat_experiments.vision.evaluate import Counts, load_expert, mean_share, right_answers
from actmat_experiments.vision.finetune import Precision, finetune
from actmat_experiments.vision.images import ImageTask
from actmat_experiments.vision.measure import measure

__all__ = ["Vision"]

_EXPERT_VERSION = 1
_SCORE_VERSION = 1
_STATISTICS_VERSION = 1
_MOST_BYTES, _MOST_ROWS = 8e9, 16
"""Merged models that lie on the disk at the same time, and that an interruption loses at most."""


@dataclass(frozen=True)
class Vision:
    """The stages after base and heads.

    Args:
        suite, model: for the scores.
        backbone: family of the encoders.
        tasks: in the order of the tables.
        base: checkpoint of the base, in the cache.
        heads: task -> folder of its head, in the cache.
        schedules: regime -> task -> schedule of its expert.
        seed: of the run.
        settings: digest of everything else, for the scores.
        cache, watch: see the harness.
        rank: of LoRA.
        device, threads, precision: how it is computed.
        public: task -> folder of a ready-made expert, in place of full fine-tuning.
        samples: images per task that statistics are measured on.
    """

    suite: str
    model: str
    backbone: Backbone
    tasks: Sequence[ImageTask]
    base: Path
    heads: Mapping[str, Path]
    schedules: Mapping[Regime, Mapping[str, Schedule]]
    seed: int
    settings: str
    cache: Cache
    watch: Watch
    rank: int = 16
    device: str = "cpu"
    threads: int = 1
    precision: Precision = "float32"
    public: Mapping[str, Path] = field(default_factory=dict)
    samples: int = 320

    @property
    def loaded_heads(self) -> dict[str, Head | ClipHead]:
        """All heads."""
        return {task: load_head(folder / "head.safetensors") for task, folder in self.heads.items()}

    def experts(self, regime: Regime, share: tuple[int, int] = (0, 1)) -> dict[str, Path]:
        """Task -> its expert; trained now unless it is in the cache.

        Args:
            regime: how they are trained.
            share: `(i, n)`: only every n-th expert, from the i-th on, for the i-th of n processes.
        """
        wanted = self.tasks[share[0] :: share[1]]
        if regime == "full" and self.public:
            return {task.name: self.public[task.name] for task in wanted}
        keys = {task.name: self._expert_key(regime, task) for task in wanted}
        left = [t for t in wanted if not self.cache.holds("expert", keys[t.name])]
        if left:
            total = sum(steps_of(self.schedules[regime][t.name], len(t.train)) for t in left)
            with self.watch.stage(f"experts: {regime}, seed {self.seed}", total=total) as stage:
                stage.log(f"to train: {', '.join(t.name for t in left)}")
                with one_thread_on(self.device):
                    side_by_side(lambda task: self._expert(regime, task, stage), left, self._workers)
        return {task.name: self.cache.path("expert", keys[task.name]) for task in wanted}

    def statistics(self, regime: Regime, samples: int | None = None) -> dict[str, Path]:
        """Task -> statistics of its expert on `samples` training images; measured now unless they are in the cache."""
        n = samples or self.samples
        experts, heads = self.experts(regime), self.loaded_heads
        keys = {
            task.name: {
                "version": _STATISTICS_VERSION,
                "base": self.base.parent.name,
                "expert": experts[task.name].name,
                "head": self.heads[task.name].name,
                "data": task.content["train"],
                "samples": n,
                "seed": self.seed,
                "device": self.device.split(":")[0],
                "code": code_digest("statistics"),
                "libraries": library_versions("torch", "transformers", "peft"),
            }
            for task in self.tasks
        }
        if left := [t for t in self.tasks if not self.cache.holds("statistics", keys[t.name])]:
            with self.watch.stage(f"statistics: {regime}, {n} images", total=n * len(left)) as stage:

                def measured(task: ImageTask) -> Path:
                    def make(out: Path) -> None:
                        measure(
                            *(self.backbone, self.base, experts[task.name], heads[task.name], task.train.head(n)),
                            out / "statistics",
                            name=task.name,
                            seed=self.seed,
                            device=self.device,
                            advance=stage.advance,
                        )

                    return self.cache.get("statistics", keys[task.name], make)

                with one_thread_on(self.device):
                    for task in left:
                        measured(task)
        return {name: self.cache.path("statistics", key) / "statistics" for name, key in keys.items()}

    def references(self, regime: Regime) -> list[Score]:
        """Scores of the majority's answer, the base, and every expert on its own task."""
        experts = self.experts(regime)
        heads = self.loaded_heads
        key = self._evaluation_key(experts) | {"what": "references", "train": [t.content["train"] for t in self.tasks]}

        def make(out: Path) -> None:
            with self.watch.stage(f"base: test, {regime}") as stage:
                model = self.backbone.load(self.base)
                base = right_answers(self.backbone, model, heads, self.tasks, "test", self.device)
                stage.log(f"base: {base}")
            own = self.own_answers(regime)["test"]
            found = {"majority": {t.name: t.majority for t in self.tasks}, "base": base, "experts": own}
            (out / "scores.json").write_text(json.dumps(found), encoding="utf-8")

        found = _read(self.cache.get("references", key, make))
        return [s for row, counts in found.items() for s in self._scores(regime, row, "default", counts, {})]

    def own_answers(self, regime: Regime) -> dict[str, Counts]:
        """Part ("validation", "test") -> what every expert answers rightly of its own task."""
        experts, heads = self.experts(regime), self.loaded_heads
        key = self._evaluation_key(experts) | {"what": "own answers"}

        def make(out: Path) -> None:
            found: dict[str, Counts] = {"validation": {}, "test": {}}
            for task in self.tasks:
                model = load_expert(self.backbone, self.base, experts[task.name])
                for part, counts in found.items():
                    counts |= right_answers(self.backbone, model, heads, [task], part, self.device)
            (out / "scores.json").write_text(json.dumps(found), encoding="utf-8")

        return _read(self.cache.get("own-answers", key, make))

    def merges(
        self,
        regime: Regime,
        rows: Sequence[Candidate],
        *,
        only: Sequence[str] | None = None,
        tune: bool = True,
        samples: int | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Row -> what its merge scores: `test` and `validation` by scale, and, if `tune`, `scale` and `tuned`.

        Args:
            regime: whose experts.
            rows: what to merge, at scale 1 if it is to be tuned.
            only: names of tasks whose experts are merged, and which are tested; default: all.
            tune: whether a scale is chosen on validation, too.
            samples: images per task of the statistics, where a row needs them; default: `self.samples`.
        """
        chosen = [t for t in self.tasks if only is None or t.name in only]
        experts = {name: path for name, path in self.experts(regime).items() if name in {t.name for t in chosen}}
        key = self._evaluation_key(experts) | {"tune": SCALES if tune else None, "seed": self.seed}
        if tune and any(row.scale != 1 for row in rows):
            raise ValueError("the scale of a row that has one already cannot be tuned")
        needy = {row.name for row in rows if get_method(row.method).needs_statistics}
        statistics = {n: p for n, p in self.statistics(regime, samples).items() if n in experts} if needy else {}
        measured = {n: p.parent.name for n, p in statistics.items()}
        keys = {
            row.name: key
            | {
                "row": asdict(row),
                "merging": merging_code(),
                "statistics": measured if row.name in needy else None,
            }
            for row in rows
        }
        by_name = {row.name: row for row in rows}

        def make(parts: Mapping[str, Path]) -> None:
            with self.watch.stage(f"merges: {regime}, {len(chosen)} experts", total=len(parts)) as stage:
                some = [by_name[name] for name in parts]
                room = next(iter(parts.values()))
                for name, found in self._merge_and_score(some, experts, statistics, chosen, tune, stage, room).items():
                    (parts[name] / "scores.json").write_text(json.dumps(found), encoding="utf-8")

        size = sum(f.stat().st_size for f in self.base.iterdir() if f.suffix == ".safetensors")
        at_once = max(1, min(_MOST_ROWS, int(_MOST_BYTES // (2 * size))))
        names = list(by_name)
        done: dict[str, Path] = {}
        for start in range(0, len(names), at_once):
            done |= self.cache.get_many("merge", {n: keys[n] for n in names[start : start + at_once]}, make)
        return {name: _read(folder) for name, folder in done.items()}

    def scores(self, regime: Regime, found: Mapping[str, Mapping[str, Any]]) -> list[Score]:
        """Scores of the result of `merges`, at the default scale and the tuned one."""
        scores = []
        for row, result in found.items():
            scores += self._scores(regime, row, "default", result["test"], {"scale": 1.0})
            if "tuned" in result:
                scores += self._scores(regime, row, "tuned", result["tuned"], {"scale": result["scale"]})
        return scores

    def _merge_and_score(
        self,
        rows: Sequence[Candidate],
        experts: Mapping[str, Path],
        statistics: Mapping[str, Path],
        tasks: Sequence[ImageTask],
        tune: bool,
        stage: Stage,
        room: Path,
    ) -> dict[str, dict[str, Any]]:
        """One reading for all rows, one more for the scales that were chosen; models lie in `room` until scored."""
        heads, base = self.loaded_heads, read_tensors(self.base)
        with tempfile.TemporaryDirectory(dir=room) as temporary:

            def merge(some: Sequence[Candidate], where: str) -> tuple[dict[str, Path], dict[str, tuple[str, ...]]]:
                outs = {row.name: Path(temporary) / where / row.name for row in some}
                stage.say("merging")
                return outs, merge_candidates(
                    *(self.base, experts, some, outs),
                    seed=self.seed,
                    threads=self.threads,
                    device=self.device if self.device.startswith("cuda") else "cpu",
                    statistics=statistics,
                )

            outs, acted = merge(rows, "default")

            def score(row: Candidate) -> dict[str, Any]:
                tensors = read_tensors(outs[row.name])
                found: dict[str, Any] = {"test": self._answers(tensors, heads, tasks, "test")}
                if tune:
                    by_scale = {}

                    def validate(scale: float) -> float:
                        changed = rescaled(base, tensors, acted[row.name], scale)
                        by_scale[scale] = self._answers(changed, heads, tasks, "validation")
                        return mean_share(by_scale[scale])

                    found["scale"] = best_scale(validate)[0]
                    found["validation"] = {str(scale): counts for scale, counts in by_scale.items()}
                else:
                    found["validation"] = {str(row.scale): self._answers(tensors, heads, tasks, "validation")}
                stage.advance()
                stage.log(f"{row.name}: {100 * mean_share(found['test']):.1f} % {found.get('scale', '')}")
                return found

            with one_thread_on(self.device):
                done = side_by_side(score, rows, self._workers)
            found = {row.name: result for row, result in zip(rows, done, strict=True)}
            if tune:
                moved = [row.at(found[row.name]["scale"]) for row in rows if found[row.name]["scale"] != row.scale]
                outs, _ = merge(moved, "tuned") if moved else ({}, {})
                for row in rows:
                    result = found[row.name]
                    result["tuned"] = (
                        self._answers(read_tensors(outs[row.name]), heads, tasks, "test")
                        if row.name in outs
                        else result["test"]
                    )
        return found

    def _answers(
        self, tensors: Mapping[str, Any], heads: Mapping[str, Head | ClipHead], tasks: Sequence[ImageTask], part: str
    ) -> Counts:
        model = self.backbone.from_tensors(self.base, tensors)
        return right_answers(self.backbone, model, heads, tasks, part, self.device)

    @property
    def _workers(self) -> int:
        """What goes side by side: on a CPU only, where one thread computes each."""
        return self.threads if self.device == "cpu" else 1

    def _expert(self, regime: Regime, task: ImageTask, stage: Stage) -> Path:
        key = self._expert_key(regime, task)
        return self.cache.get("expert", key, lambda out: self._train(regime, task, out, stage), resumable=True)

    def _train(self, regime: Regime, task: ImageTask, out: Path, stage: Stage) -> None:
        stage.say(task.name)
        finetune(
            self.backbone,
            self.base,
            load_head(self.heads[task.name] / "head.safetensors"),
            task.train,
            self.schedules[regime][task.name],
            out,
            name=task.name,
            seed=self.seed,
            regime=regime,
            rank=self.rank,
            device=self.device,
            precision=self.precision,
            on_step=stage.advance,
        )
        stage.log(f"{task.name}: {steps_of(self.schedules[regime][task.name], len(task.train))} steps")

    def _expert_key(self, regime: Regime, task: ImageTask) -> dict[str, Any]:
        return {
            "version": _EXPERT_VERSION,
            "base": self.base.parent.name,
            "head": self.heads[task.name].name,
            "data": task.content["train"],
            "task": task.name,
            "regime": regime,
            "rank": self.rank if regime == "lora" else None,
            "schedule": self.schedules[regime][task.name],
            "precision": self.precision,
            "device": self.device.split(":")[0],
            "seed": self.seed,
            "libraries": library_versions("torch", "transformers", "peft"),
        }

    def _evaluation_key(self, experts: Mapping[str, Path]) -> dict[str, Any]:
        """What decides the answers of models made of these experts."""
        chosen = [t for t in self.tasks if t.name in experts]
        return {
            "version": _SCORE_VERSION,
            "base": self.base.parent.name,
            "experts": [[name, folder.name] for name, folder in experts.items()],
            "heads": [self.heads[t.name].name for t in chosen],
            "data": [[t.content["validation"], t.content["test"]] for t in chosen],
            "device": self.device.split(":")[0],
            "libraries": library_versions("torch", "transformers"),
        }

    def _scores(
        self, regime: Regime, row: str, scale: Any, counts: Mapping[str, Sequence[int]], detail: Mapping[str, Any]
    ) -> list[Score]:
        return [
            Score(
                *(self.suite, regime, row, scale, task, self.seed, right, total),
                model=self.model,
                settings=self.settings,
                detail=detail,
            )
            for task, (right, total) in counts.items()
        ]


def _read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "scores.json").read_text(encoding="utf-8"))
    return found
