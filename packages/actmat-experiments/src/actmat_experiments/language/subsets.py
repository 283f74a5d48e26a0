"""Merges of subsets of the experts, tested on the subset's tasks without any tuning: what a study compares."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from actmat.demo.merging import Candidate
from actmat_experiments.harness.cache import Cache, library_versions
from actmat_experiments.harness.progress import Watch
from actmat_experiments.harness.study_run import Answers, Subject
from actmat_experiments.language.compare import Setup, merge, row_key
from actmat_experiments.language.exams import Exam, examine
from actmat_experiments.language.models import load_model

__all__ = ["subject"]

_VERSION = 1
_PARTS = ("validation", "test")


def subject(setup: Setup, cache: Cache, watch: Watch) -> Subject:
    """The experts of a comparison as the subject of a study; its rows are the variants."""
    return Subject(
        regime=setup.regime,
        seed=setup.seed,
        tasks=tuple(setup.exams),
        own=_own(setup, cache, watch),
        merged=lambda subset: _merged(setup, subset, cache, watch),
    )


def _own(setup: Setup, cache: Cache, watch: Watch) -> Answers:
    """What every expert answers of its own task."""
    key = {
        "version": _VERSION,
        "experts": {name: made[1] for name, made in setup.experts.items()},
        "tasks": [exam.key(*_PARTS) for exam in setup.exams.values()],
        "device": setup.device.split(":")[0],
        "libraries": library_versions("torch", "transformers", "peft"),
    }

    def make(folder: Path) -> None:
        found: dict[str, dict[str, list[float]]] = {part: {} for part in _PARTS}
        with watch.stage(f"test: experts ({setup.regime})", total=len(setup.exams)) as stage:
            for name, exam in setup.exams.items():
                answers = _answers(load_model(setup.base[0], setup.experts[name][0], device=setup.device), [exam])
                for part in _PARTS:
                    found[part] |= answers[part]
                stage.advance()
        _write(folder, found)

    return _read(cache.get("own-answers", key, make))


def _merged(setup: Setup, subset: Sequence[str], cache: Cache, watch: Watch) -> dict[str, Answers]:
    """Row -> its merge of the subset's experts on the subset's tasks, at the row's own scale."""
    some = replace(
        setup,
        experts={name: setup.experts[name] for name in subset},
        exams={name: setup.exams[name] for name in subset},
        statistics={name: made for name, made in setup.statistics.items() if name in subset},
        scales=(),
    )
    by_name = {row.name: row for row in setup.rows}

    def make(folders: Mapping[str, Path]) -> None:
        title = f"study: {setup.regime}, seed {setup.seed}, {', '.join(subset)}"
        with watch.stage(title, total=len(folders)) as stage:
            for name, answers in _merge_and_test(some, [by_name[name] for name in folders]).items():
                _write(folders[name], answers)
                stage.advance()

    done: dict[str, Path] = {}
    for begin in range(0, len(setup.rows), setup.together):
        rows = setup.rows[begin : begin + setup.together]
        done |= cache.get_many("subsets", {row.name: row_key(some, row) for row in rows}, make)
    return {name: _read(folder) for name, folder in done.items()}


def _merge_and_test(setup: Setup, rows: Sequence[Candidate]) -> dict[str, Answers]:
    with tempfile.TemporaryDirectory() as temporary:
        outs = {row.name: Path(temporary) / row.name for row in rows}
        merge(setup, rows, outs)
        return {
            name: _answers(load_model(out, device=setup.device), list(setup.exams.values()))
            for name, out in outs.items()
        }


def _answers(model: Any, exams: Sequence[Exam]) -> dict[str, dict[str, list[float]]]:
    found = {part: {exam.name: examine(model, getattr(exam, part)) for exam in exams} for part in _PARTS}
    return {part: {n: [c["correct"], c["total"]] for n, c in counts.items()} for part, counts in found.items()}


def _write(folder: Path, answers: Answers) -> None:
    (folder / "answers.json").write_text(json.dumps(answers) + "\n", encoding="utf-8")


def _read(folder: Path) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = json.loads((folder / "answers.json").read_text(encoding="utf-8"))
    return found
