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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from actmat.extras.demo.tasks import generator_for
from actmat_experiments.harness.cache import Cache, code_digest, digest, file_digest, library_versions
from actmat_experiments.harness.measuring import Batch, drawn_likelihood, measure_expert
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
from actmat_experiments.harness.models import in_place, is_adapter, with_adapter
from actmat_experiments.harness.origin import current_origin, join_origins, read_origin, write_origin
from actmat_experiments.harness.progress import Stage, Watch, one_thread_on
from actmat_experiments.harness.results import Part, Regime, ScaleKind, Score, append_scores
from actmat_experiments.harness.training import side_by_side

_VERSION, _EXPERT_VERSION, _STATISTICS_VERSION = 4, 2, 3
_VERSIONS = ("actmat", "torch", "transformers", "peft")
"""Libraries whose versions are noted with every score of a merge."""

Counts = Mapping[str, Any]
"""Results of a model on one task: `correct`, `total`, and further values of a suite, as plain data."""


Answer = TypeVar("Answer")


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
        tasks: in the order of the tables; each has a `name` and, if it is classified, a `majority`.
        threads: workers of the merges.
        testers: models trained or tested at the same time, one thread each, on a CPU; None: one after the other, with
            all threads.
        together: models merged in one reading of the inputs, which lie on the disk until they are tested.
        keep: leave merged models in the cache.
        scales: factors of the merged delta that tuning tries; empty: nothing is tuned.
        every_scale: whether all scales see test data, or only the default and the chosen one.
        samples: examples per task that statistics are measured on.
        measured: the part of the tasks that they are of.
    """

    suite: str
    regime: Regime
    seed: int
    digest: str
    base: Made
    cache: Cache
    watch: Watch
    tasks: Sequence[Any]
    model: str = ""
    device: str = "cpu"
    threads: int | None = None
    testers: int | None = None
    together: int = 16
    keep: bool = False
    scales: Sequence[float] = SCALES
    every_scale: bool = True
    samples: int = 320
    measured: Part = "train"
    known: dict[str, Any] = field(default_factory=dict, init=False, repr=False, compare=False)

    # Supplied by a suite

    @abc.abstractmethod
    def training(self, task: Any) -> Mapping[str, Any]:
        """All but base, task, regime, seed, device and libraries that determines an expert, as plain data."""

    @abc.abstractmethod
    def steps(self, task: Any) -> int:
        """Steps of the training of an expert, for the bar."""

    @abc.abstractmethod
    def train(self, task: Any, out: Path, stage: Stage) -> None:
        """Train an expert into a folder, which may hold files of an interrupted run."""

    @abc.abstractmethod
    def inputs(self, task: str, n: int) -> Iterator[Batch]:
        """Batches of the first `n` examples that statistics are measured on, on the device."""

    @abc.abstractmethod
    def content(self, tasks: Sequence[str], parts: Sequence[str]) -> Any:
        """Everything that decides a model's answers to these parts of these tasks, as plain data."""

    @abc.abstractmethod
    def read(self, folder: Path) -> Any:
        """The model of a checkpoint, ready to be tested."""

    @abc.abstractmethod
    def test(self, model: Any, task: str, part: str) -> Counts:
        """Test the model on a part ("validation", "test") of a task."""

    def logits(self, task: str) -> Callable[[Any, Batch], Any] | None:
        """Of a classifier, for the Fisher; None: a model that computes its own loss."""
        return None

    def majority(self) -> dict[str, Counts]:
        """Counts of the most frequent answer on every task; empty: no such row."""
        return {t.name: dict(zip(("correct", "total"), t.majority, strict=True)) for t in self.tasks}

    def lines(
        self, method: str, kind: ScaleKind, found: Mapping[str, Counts], detail: Mapping[str, Any] | None = None
    ) -> list[Score]:
        """Lines of the results of one model, each with the training of the experts and the origin of the run."""
        origin = {"training": self.trained_by(), "run": current_origin(self.device)}
        return [
            Score(
                *(self.suite, self.regime, method, kind, task, self.seed, counts["correct"], counts["total"]),
                model=self.model,
                settings=self.digest,
                detail={n: v for n, v in counts.items() if n not in ("correct", "total")} | origin | dict(detail or {}),
            )
            for task, counts in found.items()
        ]

    # What follows from it

    @property
    def about(self) -> dict[str, Any]:
        """Fields of all lines of results."""
        named = {name: getattr(self, name) for name in ("suite", "model", "regime", "seed")}
        return {**named, "settings": self.digest}

    @property
    def names(self) -> tuple[str, ...]:
        """Of the tasks."""
        return tuple(task.name for task in self.tasks)

    def task(self, name: str) -> Any:
        """The task of a name."""
        return next(task for task in self.tasks if task.name == name)

    def load(self, folder: Path) -> Any:
        """The model of a checkpoint, or of the base with an adapter merged into it."""
        if not is_adapter(folder):
            return self.read(folder)
        return with_adapter(self.read, self.base.path, folder).merge_and_unload().eval()

    def experts(self) -> dict[str, Made]:
        """Task -> its expert, trained now unless it is in the cache."""
        keys = {task.name: self._expert_key(task) for task in self.tasks}
        if left := [task for task in self.tasks if not self.cache.holds("expert", keys[task.name])]:
            title, total = f"experts: {self.regime}, seed {self.seed}", sum(map(self.steps, left))
            with self.watch.stage(title, total=total) as stage, one_thread_on(self.device):

                def make(task: Any) -> None:
                    stage.say(task.name)
                    train = partial(self._train_on_record, task, stage)
                    self.cache.get("expert", keys[task.name], train, resumable=True)
                    stage.log(f"{task.name} is trained")

                side_by_side(make, left, self.testers or 1)
        places = {name: self.cache.path("expert", key) for name, key in keys.items()}
        return {name: Made(place, place.name) for name, place in places.items()}

    def _train_on_record(self, task: Any, stage: Stage, out: Path) -> None:
        self.train(task, out, stage)
        write_origin(out, self.device)

    def trained_by(self) -> dict[str, str]:
        """Training of the experts: digests of the settings and of the weights, and machine, date and commit."""
        if "training" not in self.known:
            folders = [made.path for made in self.experts().values()]
            files = [path for folder in folders for path in sorted(folder.glob("*.safetensors"))]
            weights = digest([file_digest([path]) for path in files])
            joined = join_origins(map(read_origin, folders))
            self.known["training"] = {"settings": self.digest, "weights": weights, **joined}
        return dict(self.known["training"])

    def of_expert(self, task: str, answer: Callable[[Any], Answer]) -> Answer:
        """Answers of the expert of a task; computed once."""
        if task not in self.known:
            self.known[task] = answer(self.load(self.experts()[task].path))
        found: Answer = self.known[task]
        return found

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
        """Scores of a result of `merges`, at the default scale and the tuned one, with tensors and rules."""
        how = {"rule": row.method, "options": dict(row.options), **row.fields, "split": "test"}
        how |= {"versions": library_versions(*_VERSIONS), "merge": found["merge"], "merged_at": found["default"]}
        lines: list[Score] = []
        kinds: tuple[ScaleKind, ...] = ("default", "tuned") if "tuned" in found else ("default",)
        for kind in kinds:
            scale = found[kind]
            lines += self.lines(row.name, kind, found["test"][str(scale)], how | {"scale": scale})
        return [_with_scales(line, found) for line in lines]

    def statistics(self, kinds: Sequence[str] = KINDS) -> dict[str, Made]:
        """Task -> statistics of its expert, measured now unless they are in the cache.

        Args:
            kinds: of statistics. The Fisher takes a backward pass per example, most of the time of a measurement.
        """
        found = {}
        for task, expert in self.experts().items():
            key = {
                "version": _STATISTICS_VERSION,
                "expert": expert.digest,
                **self._key([task], [self.measured]),
                "samples": self.samples,
                "seed": self.seed,
                "code": code_digest("statistics"),
                "kinds": sorted(kinds),
            }
            place = self.cache.get("statistics", key, partial(self._measure, task, expert.path, kinds))
            found[task] = Made(place / "statistics", place.name)
        return found

    def _measure(self, task: str, expert: Path, kinds: Sequence[str], folder: Path) -> None:
        logits, labels = self.logits(task), generator_for(self.seed, f"labels {task}")
        title = f"statistics: {task} ({self.regime})"
        with self.watch.stage(title, total=self.samples) as stage, self._alone():

            def batches() -> Iterator[Batch]:
                for batch in self.inputs(task, self.samples):
                    yield batch
                    stage.advance(len(next(iter(batch.values()))))

            measure_expert(
                self.read,
                batches(),
                expert=expert,
                base=self.base.path,
                device=self.device,
                fisher="fisher" in kinds,
                loss=None if logits is None else drawn_likelihood(logits, labels),
                out=folder / "statistics",
                seed=self.seed,
                source=task,
            )

    def tested(self, made: Made, tasks: Sequence[str], part: str, label: str) -> dict[str, Counts]:
        """Counts of a model that is no merge, on a part of some tasks."""
        key = {"version": _VERSION, "model": made.digest, **self._key(tasks, [part])}

        def make(folder: Path) -> None:
            with self.watch.stage(f"test: {label} ({self.regime})", total=len(tasks)) as stage, self._alone():
                _write(folder, self._answers(self.load(made.path), tasks, part, stage))

        found: dict[str, Counts] = _read(self.cache.get("answers", key, make))
        return found

    def own_answers(self, part: str) -> dict[str, Counts]:
        """Counts of every expert on its own task."""
        found: dict[str, Counts] = {}
        for task, made in self.experts().items():
            found |= self.tested(made, [task], part, task)
        return found

    def merges(
        self,
        rows: Sequence[Candidate],
        *,
        tune: bool = True,
        inputs: MergeInputs | None = None,
    ) -> dict[str, dict[str, Any]]:
        """Row -> what its merge answers, `test` and `validation` by scale; the scales `default` and, if `tune`,
        `tuned`, which is best on validation; and the hash of its weights, `merge`.

        Args:
            rows: what to merge, at scale 1 if it is to be tuned.
            tune: whether a scale is chosen on validation.
            inputs: other experts and statistics than the experiment's own.
        """
        if tune and any(row.scale != 1 for row in rows):
            raise ValueError("the scale of a row that has one already cannot be tuned")
        experts = inputs.experts if inputs else self.experts()
        statistics: Mapping[str, Made] = {}
        if needs_statistics(rows):
            statistics = inputs.statistics if inputs else self.statistics(kinds_needed(rows))
        scales = [1.0] + [scale for scale in self.scales if scale != 1] if tune else []
        key = {
            "version": _VERSION,
            **self._key(self.names, ["validation", "test"]),
            "experts": [[name, made.digest] for name, made in experts.items()],
            "seed": self.seed,
            "scales": [scales, self.every_scale],
            "merging": merging_code(),
        }
        hashed = {name: made.digest for name, made in statistics.items()}
        by_name = {row.name: row for row in rows}

        def make(folders: Mapping[str, Path]) -> None:
            some = [by_name[name] for name in folders]
            with self.watch.stage(f"merges: {self.regime}, {len(experts)} experts", total=len(folders)) as stage:
                self._merge_and_test(some, folders, experts, statistics, scales, stage)

        done: dict[str, Path] = {}
        for group in self._groups(rows):
            needed = {row.name: hashed if needs_statistics([row]) else None for row in group}
            keys = {row.name: {**key, "row": asdict(row), "statistics": needed[row.name]} for row in group}
            done |= self.cache.get_many("merge", keys, make)
        return {name: _read(folder) for name, folder in done.items()}

    def _merge_and_test(
        self,
        rows: Sequence[Candidate],
        folders: Mapping[str, Path],
        experts: Mapping[str, Made],
        statistics: Mapping[str, Made],
        scales: Sequence[float],
        stage: Stage,
    ) -> None:
        """One reading of the inputs for all rows; every scale is tested from the merge."""
        stage.say("merging")
        models = {row.name: folders[row.name] / "model" for row in rows}
        acted = merge_candidates(
            self.base.path,
            {name: made.path for name, made in experts.items()},
            rows,
            models,
            seed=self.seed,
            threads=self.threads,
            device=self.device if self.device.startswith("cuda") else "cpu",
            statistics={name: made.path for name, made in statistics.items()},
        )

        def score(row: Candidate) -> None:
            stage.say(row.name)
            model_at = in_place(self.read, self.base.path, models[row.name], acted[row.name])
            found = self._scored(row.scale, scales, model_at, list(experts))
            stage.advance()
            share = mean_share(found["test"][str(row.scale)])
            stage.log(f"{row.name}: {100 * share:.1f} % {found.get('tuned', '')}")
            _write(folders[row.name], found | {"merge": file_digest(models[row.name].glob("*.safetensors"))})
            if not self.keep:
                shutil.rmtree(models[row.name])

        with self._alone():
            side_by_side(score, rows, self.testers or 1)

    def _scored(
        self, default: float, scales: Sequence[float], model_at: Callable[[float], Any], tasks: Sequence[str]
    ) -> dict[str, Any]:
        """Answers of a merged model at the scale that it was merged at and, if there are some, at other scales."""
        tested, validated = dict[str, Any](), dict[str, Any]()

        def answers(scale: float, part: str) -> dict[str, Counts]:
            return self._answers(model_at(1.0 if scale == default else scale), tasks, part)

        def validate(scale: float) -> float:
            validated[str(scale)] = answers(scale, "validation")
            if self.every_scale or scale == default:
                tested[str(scale)] = answers(scale, "test")
            return mean_share(validated[str(scale)])

        chosen = best_scale(validate, scales or [default])[0]
        if str(chosen) not in tested:
            tested[str(chosen)] = answers(chosen, "test")
        found = {"default": default, "test": tested, "validation": validated}
        return found | {"tuned": chosen} if scales else found

    def _answers(self, model: Any, tasks: Sequence[str], part: str, stage: Stage | None = None) -> dict[str, Counts]:
        found = {}
        for task in tasks:
            found[task] = self.test(model, task, part)
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

    def _expert_key(self, task: Any) -> dict[str, Any]:
        return {
            "version": _EXPERT_VERSION,
            "base": self.base.digest,
            "task": task.name,
            "regime": self.regime,
            "training": dict(self.training(task)),
            "seed": self.seed,
            "device": self.device.split(":")[0],
            "libraries": library_versions("torch", "transformers", "peft"),
        }


def _with_scales(line: Score, found: Mapping[str, Any]) -> Score:
    """The line with the model's answers to the task's validation data; at the default scale, if all were tested, with
    what was right at all scales, and the divergence; unchanged where it is no task's own count, such as `add@4`.
    """
    by_scale, detail = found["validation"], dict(line.detail)
    if line.task not in by_scale[str(detail["scale"])]:
        return line
    detail["validation"] = by_scale[str(detail["scale"])][line.task]
    if line.scale == "default" and len(by_scale) > 1 and found["test"].keys() >= by_scale.keys():
        detail["scales"] = {
            scale: {
                "test": found["test"][scale][line.task]["correct"],
                "validation": counts[line.task]["correct"],
                "divergence": counts[line.task].get("divergence"),
            }
            for scale, counts in by_scale.items()
        }
    return replace(line, detail=detail)


def _write(folder: Path, value: Any) -> None:
    (folder / "scores.json").write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _read(folder: Path) -> Any:
    return json.loads((folder / "scores.json").read_text(encoding="utf-8"))
