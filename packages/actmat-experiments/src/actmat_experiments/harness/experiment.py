"""The driver of all suites: experts of one base, regime and seed, merged by every row and tested.

A suite derives from `Experiment` and says how its models are trained, loaded and tested. Every result is a stage of
the cache whose key holds the digests of the stages before it, so that a change anywhere changes all that follows.
"""

from __future__ import annotations

import abc
import contextlib
import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from actmat_experiments.harness.cache import Cache, code_digest, file_digest, library_versions
from actmat_experiments.harness.merging import (
    KINDS,
    SCALES,
    Candidate,
    best_scale,
    kinds_needed,
    merge_candidates,
    merging_code,
    needs_statistics,
)
from actmat_experiments.harness.progress import Stage, Watch, one_thread_on
from actmat_experiments.harness.results import Part, Regime, ScaleKind, Score, append_scores
from actmat_experiments.harness.study import Answers, Subject
from actmat_experiments.harness.training import side_by_side

_VERSION, _STATISTICS_VERSION = 3, 2
_VERSIONS = ("actmat", "torch", "transformers", "peft")
"""Libraries whose versions are noted with every score of a merge."""

_KINDS: tuple[tuple[ScaleKind, str, str], ...] = (("default", "test", "default"), ("tuned", "tuned", "scale"))
"""Kind of scale, and under what names a result of `merges` has the answers and the scale."""

Counts = Mapping[str, Any]
"""Results of a model on one task: `correct`, `total`, and further values of a suite, as plain data."""

Share = tuple[int, int]
"""Number of a process and how many there are."""


class Made(NamedTuple):
    """A folder (checkpoint, adapter, statistics) and the digest of all that determines it."""

    path: Path
    digest: str


class MergeInputs(NamedTuple):
    """Experts and their statistics, by task."""

    experts: Mapping[str, Made]
    statistics: Mapping[str, Made]


def mean_share(counts: Mapping[str, Counts]) -> float:
    """Mean over tasks of the share of right answers."""
    return float(sum(c["correct"] / c["total"] for c in counts.values()) / len(counts))


@dataclass(frozen=True, kw_only=True)
class Experiment(abc.ABC):
    """One model, regime and seed.

    Args:
        suite, model, regime, seed: for the scores.
        digest: of everything else that decides the numbers; `Score.settings`.
        base: checkpoint that the experts start from.
        threads: workers of the merges.
        testers: models tested at the same time, one thread each, on a CPU; None: one after the other, with all threads.
        together: models merged in one reading of the inputs, which lie on the disk until they are tested.
        keep: leave merged models in the cache.
        scales: factors of the merged delta that tuning tries; empty: nothing is tuned.
        samples: examples per task that statistics are measured on.
        measured: the part of the tasks that they are of.
        at_once: models on an accelerator that are tested in one pass over the data.
        one_merge: test every scale from the merge at scale 1: `W_0 + scale D*` is computed in memory.
        every_scale: with `one_merge`, whether all scales see test data, or only the default and the chosen one.
    """

    suite: str
    regime: Regime
    seed: int
    digest: str
    base: Made
    cache: Cache
    watch: Watch
    model: str = ""
    device: str = "cpu"
    threads: int | None = None
    testers: int | None = None
    together: int = 16
    keep: bool = False
    scales: Sequence[float] = SCALES
    samples: int = 320
    measured: Part = "train"
    at_once: int = 1
    one_merge: bool = False
    every_scale: bool = True

    # What a suite supplies

    @property
    @abc.abstractmethod
    def names(self) -> tuple[str, ...]:
        """The tasks, in the order of the tables."""

    @abc.abstractmethod
    def experts(self, share: Share = (0, 1)) -> dict[str, Made]:
        """Task -> its expert, trained now unless it is in the cache; of the i-th of n processes, every n-th."""

    @abc.abstractmethod
    def measure(
        self, task: str, expert: Path, n: int, out: Path, advance: Callable[[float], None], kinds: Sequence[str] = KINDS
    ) -> None:
        """Write the statistics of an expert on `n` examples of its task, of the part `measured`, to the folder `out`.

        Args:
            advance: called after every batch with the number of its examples.
            kinds: of statistics. The Fisher takes a backward pass per example, most of the time of a measurement.
        """

    @abc.abstractmethod
    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """All that decides what a model answers to these parts of these tasks, as plain data."""

    @abc.abstractmethod
    def load(self, folder: Path) -> Any:
        """The model of a checkpoint, or of the base with an adapter, ready to be tested."""

    @abc.abstractmethod
    def at_scales(self, folder: Path, acted: Sequence[str]) -> Callable[[float], Any]:
        """From a scale to the merged model at it, see `rescaled`; a model may be used up by the next call.

        Args:
            folder: the merged model at scale 1.
            acted: names of the tensors that the scale acts on.
        """

    @abc.abstractmethod
    def test(self, model: Any, task: str, part: str) -> Counts:
        """Test the model on a part ("validation", "test") of a task."""

    def test_all(self, models: Sequence[Any], task: str, part: str) -> list[Counts]:
        """Test several models, if possible in one pass over the data."""
        return [self.test(model, task, part) for model in models]

    def majority(self) -> dict[str, Counts]:
        """Counts of the most frequent answer on every task; empty: no such row."""
        return {}

    def lines(
        self, method: str, kind: ScaleKind, found: Mapping[str, Counts], detail: Mapping[str, Any] | None = None
    ) -> list[Score]:
        """Lines of the results of one model."""
        return [
            Score(
                *(self.suite, self.regime, method, kind, task, self.seed, counts["correct"], counts["total"]),
                model=self.model,
                settings=self.digest,
                detail={n: v for n, v in counts.items() if n not in ("correct", "total")} | dict(detail or {}),
            )
            for task, counts in found.items()
        ]

    # What follows from it

    def compare(self, rows: Sequence[Candidate], path: Path, inputs: MergeInputs | None = None) -> list[Score]:
        """All scores, added to a file as they become known: references first, then some merged models at a time.

        Args:
            inputs: other experts and statistics than the experiment's own.
        """
        scores = self.references()
        append_scores(path, scores)
        for some in self._groups(rows):
            found = self.merges(some, tune=bool(self.scales), inputs=inputs)
            new = [line for row in some for line in self.row_scores(row, found[row.name])]
            append_scores(path, new)
            scores += new
        return scores

    def references(self) -> list[Score]:
        """Scores of the most frequent answer, the base, and every task by its own expert."""
        found = {"majority": self.majority()}
        found["base"] = self.tested(self.base, self.names, "test", "base")
        found["experts"] = self.own_answers("test")
        return [line for row, counts in found.items() for line in self.lines(row, "default", counts)]

    def row_scores(self, row: Candidate, found: Mapping[str, Any]) -> list[Score]:
        """Scores of a result of `merges`, at the default scale and the tuned one, with what was merged how."""
        how = {"rule": row.method, "options": dict(row.options), **row.fields, "split": "test"}
        how |= {"versions": library_versions(*_VERSIONS)}
        lines: list[Score] = []
        for kind, answers, scale in _KINDS:
            if answers in found:
                about = how | {"scale": found[scale], "merge": found["hashes"][kind]}
                if self.one_merge:
                    about["merged_at"] = found["default"]
                seen = found["validation"].get(str(found[scale]), {})
                lines += [_noted(line, seen) for line in self.lines(row.name, kind, found[answers], about)]
        return [_with_scales(line, found) for line in lines] if self.one_merge else lines

    def statistics(self, samples: int | None = None, kinds: Sequence[str] = KINDS) -> dict[str, Made]:
        """Task -> statistics of its expert, measured now unless they are in the cache."""
        n, found = samples or self.samples, {}
        for task, expert in self.experts().items():
            key = {
                "version": _STATISTICS_VERSION,
                "expert": expert.digest,
                **self._key([task], [self.measured]),
                "samples": n,
                "seed": self.seed,
                "code": code_digest("statistics"),
                **({} if set(kinds) == set(KINDS) else {"kinds": sorted(kinds)}),
            }

            def make(folder: Path, task: str = task, expert: Made = expert) -> None:
                with self.watch.stage(f"statistics: {task} ({self.regime})", total=n) as stage, self._alone():
                    self.measure(task, expert.path, n, folder / "statistics", stage.advance, kinds)

            place = self.cache.get("statistics", key, make)
            found[task] = Made(place / "statistics", place.name)
        return found

    def tested(self, made: Made, tasks: Sequence[str], part: str, label: str) -> dict[str, Counts]:
        """Counts of a model that is no merge, on a part of some tasks."""
        key = {"version": _VERSION, "model": made.digest, **self._key(tasks, [part])}

        def make(folder: Path) -> None:
            with self.watch.stage(f"test: {label} ({self.regime})", total=len(tasks)) as stage, self._alone():
                (found,) = self._answers([self.load(made.path)], tasks, part, stage)
            _write(folder, found)

        found: dict[str, Counts] = _read(self.cache.get("answers", key, make))
        return found

    def own_answers(self, part: str) -> dict[str, Counts]:
        """Counts of every expert on its own task."""
        found: dict[str, Counts] = {}
        for task, made in self.experts().items():
            found |= self.tested(made, [task], part, task)
        return found

    def subject(self, rows: Sequence[Candidate]) -> Subject:
        """These experts as the subject of a study: subsets of them merged by all rows, each at its own scale."""

        def merged(subset: tuple[str, ...]) -> dict[str, Answers]:
            found = self.merges(rows, only=subset, tune=False)
            return {
                row: {"validation": _pairs(next(iter(r["validation"].values()))), "test": _pairs(r["test"])}
                for row, r in found.items()
            }

        own = {part: _pairs(self.own_answers(part)) for part in ("validation", "test")}
        return Subject(self.regime, self.seed, self.names, own, merged)

    def merges(
        self,
        rows: Sequence[Candidate],
        *,
        only: Sequence[str] | None = None,
        tune: bool = True,
        samples: int | None = None,
        inputs: MergeInputs | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Row -> what its merge answers: `test` at the scale `default`, `validation` by scale; and, if `tune`, the best
        scale on validation, `scale`, with `tuned` on test.

        Args:
            rows: what to merge, at scale 1 if it is to be tuned.
            only: tasks whose experts are merged, and which are tested; default: all.
            tune: whether a scale is chosen on validation, too.
            samples: training examples of the statistics, where a row needs them.
            inputs: other experts and statistics than the experiment's own.
        """
        if tune and any(row.scale != 1 for row in rows):
            raise ValueError("the scale of a row that has one already cannot be tuned")
        chosen = [n for n in self.names if only is None or n in only]
        given = inputs.experts if inputs else self.experts()
        experts = {name: made for name, made in given.items() if name in chosen}
        statistics: dict[str, Made] = {}
        if needs_statistics(rows):
            measured = inputs.statistics if inputs else self.statistics(samples, kinds_needed(rows))
            statistics = {name: made for name, made in measured.items() if name in chosen}
        key = {
            "version": _VERSION,
            **self._key(chosen, ["validation", "test"]),
            "experts": [[name, made.digest] for name, made in experts.items()],
            "seed": self.seed,
            "scales": self.scales if tune else None,
            **({"one_merge": self.every_scale or "chosen"} if self.one_merge else {}),
            "merging": merging_code(),
        }
        hashed = {name: made.digest for name, made in statistics.items()}
        keys = {
            row.name: {**key, "row": asdict(row), "statistics": hashed if needs_statistics([row]) else None}
            for row in rows
        }
        by_name = {row.name: row for row in rows}

        def make(folders: Mapping[str, Path]) -> None:
            some = [by_name[name] for name in folders]
            with self.watch.stage(f"merges: {self.regime}, {len(chosen)} experts", total=len(folders)) as stage:
                self._merge_and_test(some, folders, experts, statistics, tune, stage)

        done: dict[str, Path] = {}
        for group in self._groups(rows):
            done |= self.cache.get_many("merge", {row.name: keys[row.name] for row in group}, make)
        return {name: _read(folder) for name, folder in done.items()}

    def _merge_and_test(
        self,
        rows: Sequence[Candidate],
        folders: Mapping[str, Path],
        experts: Mapping[str, Made],
        statistics: Mapping[str, Made],
        tune: bool,
        stage: Stage,
    ) -> None:
        """One reading of the inputs for all rows, one more for the scales that were chosen."""
        tasks = list(experts)

        def merge(some: Sequence[Candidate], kind: str) -> dict[str, tuple[str, ...]]:
            stage.say("merging")
            return merge_candidates(
                self.base.path,
                {name: made.path for name, made in experts.items()},
                some,
                {row.name: folders[row.name] / kind for row in some},
                seed=self.seed,
                threads=self.threads,
                device=self.device if self.device.startswith("cuda") else "cpu",
                statistics={name: made.path for name, made in statistics.items()},
            )

        acted = merge(rows, "default")
        hashes = {row.name: {"default": _weights_digest(folders[row.name] / "default")} for row in rows}

        def score(some: Sequence[Candidate]) -> list[dict[str, Any]]:
            return self._scored(some, folders, acted if tune else None, tasks, stage)

        with self._alone():
            if self.testers:
                parts = side_by_side(score, [[row] for row in rows], self.testers)
            else:
                parts = [score(rows[start : start + self.at_once]) for start in range(0, len(rows), self.at_once)]
        scored = [one for part in parts for one in part]
        found = {row.name: result for row, result in zip(rows, scored, strict=True)}
        if tune and self.one_merge:
            for name in found:
                hashes[name]["tuned"] = hashes[name]["default"]
        elif tune:
            moved = [row.at(found[row.name]["scale"]) for row in rows if found[row.name]["scale"] != row.scale]
            if moved:
                merge(moved, "tuned")
            for name, result in found.items():
                result["tuned"] = result["test"]
                hashes[name]["tuned"] = hashes[name]["default"]
            with self._alone():
                for row in moved:
                    hashes[row.name]["tuned"] = _weights_digest(folders[row.name] / "tuned")
                    model = self.load(folders[row.name] / "tuned")
                    (found[row.name]["tuned"],) = self._answers([model], tasks, "test")
        for name, result in found.items():
            _write(folders[name], result | {"hashes": hashes[name]})
            for kind in () if self.keep else ("default", "tuned"):
                shutil.rmtree(folders[name] / kind, ignore_errors=True)

    def _scored(
        self,
        rows: Sequence[Candidate],
        folders: Mapping[str, Path],
        acted: Mapping[str, Sequence[str]] | None,
        tasks: Sequence[str],
        stage: Stage,
    ) -> list[dict[str, Any]]:
        """Results of merged models that are tested together; their scales are chosen if `acted` is given."""
        stage.say(", ".join(row.name for row in rows))
        if self.one_merge and acted is not None:
            return [
                self._at_all_scales(row, folders[row.name] / "default", acted[row.name], tasks, stage) for row in rows
            ]
        models = [self.load(folders[row.name] / "default") for row in rows]
        tests = self._answers(models, tasks, "test")
        found: list[dict[str, Any]] = [{"default": r.scale, "test": t} for r, t in zip(rows, tests, strict=True)]
        if acted is None:
            for row, one, counts in zip(rows, found, self._answers(models, tasks, "validation"), strict=True):
                one["validation"] = {str(row.scale): counts}
        models.clear()
        for row, one in zip(rows, found, strict=True):
            if acted is not None:
                one |= self._tuned(folders[row.name] / "default", acted[row.name], tasks)
            stage.advance()
            stage.log(f"{row.name}: {100 * mean_share(one['test']):.1f} % {one.get('scale', '')}")
        return found

    def _tuned(self, folder: Path, acted: Sequence[str], tasks: Sequence[str]) -> dict[str, Any]:
        """The scale of the highest mean validation share, and the answers at all scales."""
        model_at = self.at_scales(folder, acted)
        by_scale: dict[str, dict[str, Counts]] = {}

        def validate(scale: float) -> float:
            (by_scale[str(scale)],) = self._answers([model_at(scale)], tasks, "validation")
            return mean_share(by_scale[str(scale)])

        return {"scale": best_scale(validate, self.scales)[0], "validation": by_scale}

    def _at_all_scales(
        self, row: Candidate, folder: Path, acted: Sequence[str], tasks: Sequence[str], stage: Stage
    ) -> dict[str, Any]:
        """The result of a row, every scale tested from one merge."""
        model_at, tested, validated = self.at_scales(folder, acted), dict[str, Any](), dict[str, Any]()

        def validate(scale: float) -> float:
            model, name = model_at(scale), str(float(scale))
            if self.every_scale or scale == row.scale:
                (tested[name],) = self._answers([model], tasks, "test")
            (validated[name],) = self._answers([model], tasks, "validation")
            return mean_share(validated[name])

        chosen = best_scale(validate, tuple(dict.fromkeys((row.scale, *self.scales))))[0]
        if str(float(chosen)) not in tested:
            (tested[str(float(chosen))],) = self._answers([model_at(chosen)], tasks, "test")
        default, tuned = (tested[str(float(scale))] for scale in (row.scale, chosen))
        stage.advance()
        stage.log(f"{row.name}: {100 * mean_share(default):.1f} % {chosen}")
        found = {"default": row.scale, "test": default, "scale": chosen, "tuned": tuned}
        return found | {"validation": validated, "tested": tested}

    def _answers(
        self, models: Sequence[Any], tasks: Sequence[str], part: str, stage: Stage | None = None
    ) -> list[dict[str, Counts]]:
        """Per model, its counts by task."""
        found: list[dict[str, Counts]] = [{} for _ in models]
        for task in tasks:
            for one, counts in zip(found, self.test_all(models, task, part), strict=True):
                one[task] = counts
            if stage is not None:
                stage.advance()
        return found

    def _alone(self) -> contextlib.AbstractContextManager[None]:
        return one_thread_on(self.device) if self.testers else contextlib.nullcontext()

    def _groups(self, rows: Sequence[Candidate]) -> Iterator[Sequence[Candidate]]:
        return (rows[start : start + self.together] for start in range(0, len(rows), self.together))

    def _key(self, tasks: Sequence[str], parts: Sequence[str]) -> dict[str, Any]:
        return {
            "base": self.base.digest,
            "content": self.content(tasks, parts),
            "device": self.device.split(":")[0],
            "libraries": library_versions("torch", "transformers", "peft"),
        }


def _noted(line: Score, validation: Mapping[str, Counts]) -> Score:
    """The line with the model's answers to the task's validation data, where they are known."""
    if line.task not in validation:
        return line
    return replace(line, detail={**line.detail, "validation": dict(validation[line.task])})


def _with_scales(line: Score, found: Mapping[str, Any]) -> Score:
    """The line at the default scale with what was right at all scales, where all were tested, and the divergence."""
    if line.scale != "default" or "tested" not in found or len(found["tested"]) < len(found["validation"]):
        return line
    scales = {
        scale: {
            "test": counts[line.task]["correct"],
            "validation": found["validation"][scale][line.task]["correct"],
            "divergence": found["validation"][scale][line.task].get("divergence"),
        }
        for scale, counts in found["tested"].items()
    }
    return replace(line, detail={**line.detail, "scales": scales})


def _weights_digest(folder: Path) -> str:
    """SHA-256 of a model's weight files."""
    return file_digest(folder.glob("*.safetensors"))


def _pairs(found: Mapping[str, Counts]) -> dict[str, list[float]]:
    return {task: [counts["correct"], counts["total"]] for task, counts in found.items()}


def _write(folder: Path, value: Any) -> None:
    (folder / "scores.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _read(folder: Path) -> Any:
    return json.loads((folder / "scores.json").read_text(encoding="utf-8"))
