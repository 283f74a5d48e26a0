"""Base, experts and merged models on the test parts; the scale of every rule tuned on the validation parts.

A merged model is large and quickly made again, so it is removed once it has been tested, unless it is to be kept.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from actmat.demo.merging import Candidate, merge_candidates
from actmat.methods import get_method
from actmat_experiments.harness.cache import Cache, code_digest, library_versions
from actmat_experiments.harness.merging import SCALES, best_scale, rescaled
from actmat_experiments.harness.progress import Stage, Watch
from actmat_experiments.harness.results import Regime, ScaleKind, Score, append_scores
from actmat_experiments.language.exams import Counts, Exam, examine
from actmat_experiments.language.experts import Made
from actmat_experiments.language.models import load_model

__all__ = ["Setup", "compare", "merge", "row_key"]

_VERSION = 1


@dataclass(frozen=True, slots=True)
class Setup:
    """One comparison: a base, its experts, and the rows of the table.

    Args:
        suite: its name.
        model: name of the architecture; empty where a suite has one.
        regime: how the experts were trained.
        seed: of the run.
        settings: digest of all settings, see `harness.results.Score`.
        base: checkpoint.
        experts: task -> checkpoint or adapter.
        exams: task -> its items.
        statistics: task -> what was measured on its expert; empty where no row needs it.
        rows: merged models.
        scales: factors of the merged delta that tuning tries.
        together: models merged in one reading of the inputs.
        keep: merged models stay in the cache.
        threads: workers of the merges.
        device: where models compute.
    """

    suite: str
    model: str
    regime: Regime
    seed: int
    settings: str
    base: Made
    experts: Mapping[str, Made]
    exams: Mapping[str, Exam]
    rows: Sequence[Candidate]
    statistics: Mapping[str, Made] = field(default_factory=dict)
    scales: Sequence[float] = SCALES
    together: int = 4
    keep: bool = False
    threads: int | None = None
    device: str = "cpu"

    def score(self, method: str, kind: ScaleKind, task: str, found: Counts, **detail: Any) -> Score:
        """A line of the results."""
        return Score(
            suite=self.suite,
            regime=self.regime,
            method=method,
            scale=kind,
            task=task,
            seed=self.seed,
            correct=found["correct"],
            total=int(found["total"]),
            model=self.model,
            settings=self.settings,
            detail={"balanced": found["balanced"], **detail},
        )


def compare(setup: Setup, cache: Cache, watch: Watch, scores: Path) -> None:
    """Add all scores to a file as they become known: references first, then a few merged models at a time."""
    append_scores(scores, _references(setup, cache, watch))
    for begin in range(0, len(setup.rows), setup.together):
        rows = setup.rows[begin : begin + setup.together]
        with watch.stage(f"merge and test: {setup.regime}", total=len(rows)) as stage:
            append_scores(scores, _merged(setup, rows, cache, stage))


def _references(setup: Setup, cache: Cache, watch: Watch) -> list[Score]:
    """The most frequent answer, the base, and every task by its own expert."""
    majority: dict[str, Counts] = {}
    for name, exam in setup.exams.items():
        correct, total = exam.task.majority
        majority[name] = {"correct": correct, "total": total, "balanced": 1 / len({item.label for item in exam.test})}
    base = _tested(setup, setup.base, setup.exams, cache, watch, "base")
    experts: dict[str, Counts] = {}
    for name, made in setup.experts.items():
        experts |= _tested(setup, made, {name: setup.exams[name]}, cache, watch, name)
    references = {"majority": majority, "base": base, "experts": experts}
    return [setup.score(m, "default", t, f) for m, found in references.items() for t, f in found.items()]


def _tested(
    setup: Setup, made: Made, exams: Mapping[str, Exam], cache: Cache, watch: Watch, name: str
) -> dict[str, Counts]:
    """Test counts of a model that is no merge, by task."""
    key = {
        "version": _VERSION,
        "model": made[1],
        "tests": [exam.key("test") for exam in exams.values()],
        "device": setup.device.split(":")[0],
        "libraries": library_versions("torch", "transformers", "peft"),
    }

    def make(folder: Path) -> None:
        with watch.stage(f"test: {name} ({setup.regime})", total=sum(len(e.test) for e in exams.values())) as stage:
            model = load_model(setup.base[0], made[0], device=setup.device)
            found = {n: examine(model, exam.test, stage.advance) for n, exam in exams.items()}
        _write_json(folder / "counts.json", found)

    place = cache.get("tests", key, make)
    found: dict[str, Counts] = json.loads((place / "counts.json").read_text(encoding="utf-8"))
    return found


def _merged(setup: Setup, rows: Sequence[Candidate], cache: Cache, stage: Stage) -> list[Score]:
    by_name = {row.name: row for row in rows}

    def make(folders: Mapping[str, Path]) -> None:
        _merge_and_test(setup, [by_name[name] for name in folders], folders, stage)

    keys = {row.name: row_key(setup, row) for row in rows}
    scores = []
    for name, place in cache.get_many("merged", keys, make).items():
        found = json.loads((place / "counts.json").read_text(encoding="utf-8"))
        kinds: tuple[ScaleKind, ...] = ("default", "tuned")
        for kind in kinds:
            for task, numbers in found[kind]["tasks"].items():
                scores.append(setup.score(name, kind, task, numbers, scale=found[kind]["scale"]))
    return scores


def row_key(setup: Setup, row: Candidate) -> dict[str, Any]:
    """All that determines the scores of a row."""
    measured = setup.statistics if get_method(row.method).needs_statistics else {}
    return {
        "version": _VERSION,
        "base": setup.base[1],
        "experts": {name: made[1] for name, made in setup.experts.items()},
        "row": row,
        "statistics": {name: made[1] for name, made in measured.items()},
        "seed": setup.seed,
        "device": setup.device.split(":")[0],
        "tasks": [exam.key("validation", "test") for exam in setup.exams.values()],
        "scales": setup.scales,
        "merging": code_digest("linalg", "methods", "checkpoints", "layout", "recipe", "plan", "engine"),
        "libraries": library_versions("torch", "transformers"),
    }


def _merge_and_test(setup: Setup, rows: Sequence[Candidate], folders: Mapping[str, Path], stage: Stage) -> None:
    """Merge all at their default, test; choose each one's scale on validation, merge at that scale, test."""
    acted = merge(setup, rows, {row.name: folders[row.name] / "default" for row in rows})
    base = load_model(setup.base[0], device=setup.device)
    found: dict[str, dict[str, Any]] = {}
    tuned = []
    for row in rows:
        stage.say(row.name)
        model = load_model(folders[row.name] / "default", device=setup.device)
        found[row.name] = {"default": {"scale": row.scale, "tasks": _test(setup, model)}}
        scale, scores = _tune(setup, base, model, acted[row.name])
        found[row.name]["tuned"] = {"scale": scale, "validation": scores}
        if scale == row.scale:
            found[row.name]["tuned"]["tasks"] = found[row.name]["default"]["tasks"]
        else:
            tuned.append(row.at(scale))
        stage.log(f"{row.name} {setup.regime} seed {setup.seed}: scale {scale}, validation {scores}")
        stage.advance(0.5)
    if tuned:
        merge(setup, tuned, {row.name: folders[row.name] / "tuned" for row in tuned})
    for row in tuned:
        stage.say(f"{row.name} at {row.scale:g}")
        model = load_model(folders[row.name] / "tuned", device=setup.device)
        found[row.name]["tuned"]["tasks"] = _test(setup, model)
    for name, numbers in found.items():
        _write_json(folders[name] / "counts.json", numbers)
        if not setup.keep:
            for kind in ("default", "tuned"):
                shutil.rmtree(folders[name] / kind, ignore_errors=True)
        stage.advance(0.5)


def merge(setup: Setup, rows: Sequence[Candidate], outs: Mapping[str, Path]) -> dict[str, tuple[str, ...]]:
    """Merge all experts by all rows; returns the tensors on which each row's rule acted."""
    experts = {name: made[0] for name, made in setup.experts.items()}
    return merge_candidates(
        setup.base[0],
        experts,
        rows,
        outs,
        seed=setup.seed,
        threads=setup.threads,
        device=setup.device,
        statistics={name: made[0] for name, made in setup.statistics.items()},
    )


def _test(setup: Setup, model: Any) -> dict[str, Counts]:
    return {name: examine(model, exam.test) for name, exam in setup.exams.items()}


def _tune(setup: Setup, base: Any, model: Any, acted: Sequence[str]) -> tuple[float, dict[float, float]]:
    """The scale of the highest mean validation accuracy; the model is used up."""
    start = {n: t.clone() for n, t in base.state_dict().items()}
    end = {n: t.clone() for n, t in model.state_dict().items()}

    def score(scale: float) -> float:
        with torch.no_grad():
            model.load_state_dict(rescaled(start, end, acted, scale))
        found = [examine(model, exam.validation) for exam in setup.exams.values()]
        return sum(f["correct"] / f["total"] for f in found) / len(found)

    return best_scale(score, setup.scales)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
