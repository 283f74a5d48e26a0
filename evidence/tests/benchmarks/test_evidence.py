"""The tables of docs/evidence.md from rows that are known, and the files in the repository."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from statistics import mean, stdev, variance

import numpy as np
import pytest
from benchmarks.evidence.group import groups
from benchmarks.evidence.intervals import interval, paired
from benchmarks.evidence.tables import evidence_table
from scipy.stats import t

from actmat_experiments.harness.results import Score

TASKS = ("a", "b", "c", "d")
ROWS = {
    "base": (50, 60, 70, 60),
    "experts": (80, 80, 80, 80),
    "average": (60, 62, 70, 60),
    "tsv": (66, 70, 71, 65),
    "ties": (51, 60, 69, 57),
}
DIVERGENCES = {"average": 0.5, "tsv": 0.2, "ties": 0.9}


def over_tasks(values: list[float], *, sign: bool = False) -> str:
    """One seed: Student's t over tasks, written out."""
    half = t.ppf(0.975, len(values) - 1) * stdev(values) / len(values) ** 0.5
    return f"{mean(values):+.1f} ±{half:.1f}" if sign else f"{mean(values):.1f} ±{half:.1f}"


def line(method: str, task: str, correct: float, kind: str = "default", seed: int = 0, settings: str = "s") -> Score:
    detail = {"versions": {"torch": "2"}, "scale": 1.0 if kind == "default" else 2.0}
    if method in DIVERGENCES:
        detail["validation"] = {"correct": 1, "total": 2, "divergence": DIVERGENCES[method]}
    where = ("vision-vits14", "full", method, kind, task, seed, correct, 100)
    return Score(*where, model="ViT", settings=settings, detail=detail)


def write(folder: Path, scores: list[Score]) -> None:
    (folder / "vision-vits14.jsonl").write_text("".join(json.dumps(asdict(s)) + "\n" for s in scores))


@pytest.fixture
def folder(tmp_path):
    old = [line("average", task, 1, settings="older") for task in TASKS]
    new = [line(m, t, c) for m, values in ROWS.items() for t, c in zip(TASKS, values, strict=True)]
    tuned = [line(m, t, c + 3, "tuned") for m in ("average", "tsv") for t, c in zip(TASKS, ROWS[m], strict=True)]
    write(tmp_path, [*old, *new, *tuned, line("actmat", "a", 90)])
    return tmp_path


def cells(text: str, row: str) -> list[str]:
    (found,) = [x for x in text.splitlines() if x.startswith(f"| {row} |")]
    return [c.strip() for c in found.strip("|").split("|")]


def test_rows_are_means_over_tasks_with_paired_differences(folder):
    text = evidence_table("methods_vision_full", folder)
    assert cells(text, "`tsv`")[2] == over_tasks([66, 70, 71, 65])
    assert cells(text, "`tsv`")[3] == over_tasks([6, 8, 1, 5], sign=True) == "+5.0 ±4.7"
    assert cells(text, "`tsv`")[4:] == ["0.200", over_tasks([69, 73, 74, 68]), "2", "+5.0 ±4.7"]
    assert cells(text, "`ties`")[5:] == ["", "", ""], "was not tuned"
    order = re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    assert order == ["tsv", "average", "ties"], (
        "the best first; a row that lacks tasks is left out; so are old settings"
    )
    assert "seed 0; torch 2" in text


def test_references_have_the_head_room(folder):
    (row,) = [x for x in evidence_table("references", folder).splitlines() if "vision-vits14" in x]
    assert "| 4 | 0 | 100 |" in row
    assert over_tasks([30, 20, 10, 20], sign=True) in row


def test_seeds_are_averaged_before_tasks_are_compared(tmp_path):
    named = [(m, t, c) for m in ("average", "tsv") for t, c in zip(TASKS, ROWS[m], strict=True)]
    write(tmp_path, [line(m, t, c + 4 * seed, seed=seed) for seed in (0, 1) for m, t, c in named])
    (group,) = groups(tmp_path)
    assert group.points("tsv")[1] == {"a": 70, "b": 74, "c": 75, "d": 69}
    assert "+5.0 ±4.7" in evidence_table("methods_vision_full", tmp_path)


def test_a_row_of_some_seeds_is_compared_in_those(tmp_path):
    named = [(m, t, c) for m in ("average", "tsv") for t, c in zip(TASKS, ROWS[m], strict=True)]
    scores = [line(m, t, c + 20 * seed, seed=seed) for seed in (0, 1) for m, t, c in named if (m, seed) != ("tsv", 1)]
    write(tmp_path, scores)
    found = cells(evidence_table("methods_vision_full", tmp_path), "`tsv`")
    assert found[1:4] == ["0", over_tasks([66, 70, 71, 65]), "+5.0 ±4.7"]


def test_rows_are_ranked_in_the_seeds_that_they_share(tmp_path):
    """Seed 1 is easier, and `tsv` was not run there."""
    named = [(m, t, c) for m in ("ties", "tsv") for t, c in zip(TASKS, ROWS[m], strict=True)]
    scores = [line(m, t, c + 20 * seed, seed=seed) for seed in (0, 1) for m, t, c in named if (m, seed) != ("tsv", 1)]
    write(tmp_path, scores)
    (group,) = groups(tmp_path)
    assert interval(group.points("ties")).mean > interval(group.points("tsv")).mean
    assert group.rows() == ["tsv", "ties"]
    write(tmp_path, [s for s in scores if (s.method == "tsv") == (s.seed == 0)])
    (group,) = groups(tmp_path)
    with pytest.raises(ValueError, match="no seed in common"):
        group.rows()


def test_interval_over_seeds_and_tasks_is_that_of_the_two_way_table():
    cells = {0: {"a": 1.0, "b": 4.0, "c": 2.5, "d": 3.5}, 1: {"a": 2.0, "b": 7.0, "c": 1.5, "d": 3.0}}
    grand = mean(v for some in cells.values() for v in some.values())
    seeds = 4 * variance(mean(some.values()) for some in cells.values())
    tasks = 2 * variance(mean(some[k] for some in cells.values()) for k in TASKS)
    total = sum((v - grand) ** 2 for some in cells.values() for v in some.values())
    rest = (total - seeds * 1 - tasks * 3) / 3
    assert tasks > tasks + seeds - rest, "here seeds add nothing, so that tasks alone decide"
    found = interval(cells)
    assert (found.mean, found.df) == pytest.approx((grand, 3))
    assert found.half == pytest.approx(t.ppf(0.975, 3) * (tasks / 8) ** 0.5)


def test_interval_with_both_sources_has_fewer_degrees_of_freedom_than_cells():
    found = interval({s: {k: 10.0 * s + 3 * n + (s * n % 2) for n, k in enumerate(TASKS)} for s in (0, 1, 2)})
    assert found.df < 4
    assert found.half is not None
    values = [10.0 * s + 3 * n + (s * n % 2) for s in range(3) for n in range(4)]
    one_way = t.ppf(0.975, 11) * stdev(values) / len(values) ** 0.5
    assert found.half > one_way, "cells that share a seed or a task are no independent draws"


def test_interval_covers_the_mean_as_often_as_it_says():
    generator = np.random.default_rng(0)
    hits = 0
    for _ in range(400):
        a, b, e = generator.normal(size=3), generator.normal(size=7), generator.normal(size=(3, 7))
        found = interval({s: {str(k): a[s] + b[k] + e[s, k] for k in range(7)} for s in range(3)})
        hits += abs(found.mean) <= found.half
    assert hits >= 0.92 * 400


def test_noise_of_questions_that_all_seeds_share_widens_the_interval():
    """100 questions a task, the same in every seed: their noise does not shrink with the number of seeds."""
    generator = np.random.default_rng(1)
    hits = 0
    for _ in range(300):
        right = generator.binomial(100, 0.7, size=7)
        found = interval({s: {str(k): right[k] + generator.normal() for k in range(7)} for s in range(3)})
        hits += abs(found.mean - 70) <= found.half
    assert hits >= 0.92 * 300


def test_few_tasks_have_no_interval_over_tasks_but_one_over_seeds():
    three = {s: {"a": 1.0 + s, "b": 4.0, "c": 2.5} for s in (0, 1, 2)}
    assert interval(three).text() == "2.8"
    assert interval({s: {"all": mean(some.values())} for s, some in three.items()}).half > 0


def test_a_single_value_has_no_interval():
    assert interval({0: {"a": 2.0}}).text(sign=True) == "+2.0"
    assert paired({0: {"a": 1.0}}, {1: {"a": 1.0}}) is None
