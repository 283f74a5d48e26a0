"""The tables of docs/evidence.md from rows that are known, and the files in the repository."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest
from benchmarks.evidence.tables import FOLDER, SUITES, evidence_table, groups, over_tasks
from docs.generate import table

from actmat_experiments.harness.results import REFERENCES, Score, read_scores

TASKS = ("a", "b", "c")
ROWS = {
    "base": (50, 60, 70),
    "experts": (80, 80, 80),
    "average": (60, 62, 70),
    "tsv": (66, 70, 71),
    "ties": (51, 60, 69),
}
DIVERGENCES = {"average": 0.5, "tsv": 0.2, "ties": 0.9}


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
    text = evidence_table("methods_vision_full", table, folder)
    assert cells(text, "`tsv`")[1] == over_tasks([66, 70, 71])
    assert cells(text, "`tsv`")[2] == over_tasks([6, 8, 1], sign=True) == "+5.0 ±9.0"
    assert cells(text, "`tsv`")[3:] == ["0.200", over_tasks([69, 73, 74]), "2", "+5.0 ±9.0"]
    assert cells(text, "`ties`")[4:] == ["", "", ""], "was not tuned"
    order = re.findall(r"^\| `(\w+)`", text, re.MULTILINE)
    assert order == ["tsv", "average", "ties"], (
        "the best first; a row that lacks tasks is left out; so are old settings"
    )
    assert "seed 0; torch 2" in text


def test_references_and_the_choice_by_divergence(folder):
    (row,) = [x for x in evidence_table("references", table, folder).splitlines() if "vision-vits14" in x]
    assert "| 3 | 0 | 100 |" in row
    assert over_tasks([30, 20, 10], sign=True) in row
    (row,) = [x for x in evidence_table("divergence", table, folder).splitlines() if "vision-vits14" in x]
    assert "| 3 | 1.00 | `tsv` 69.0 | `tsv` 69.0 | +5.0 ±9.0 |" in row


def test_seeds_are_averaged_before_tasks_are_compared(tmp_path):
    named = [(m, t, c) for m in ("average", "tsv") for t, c in zip(TASKS, ROWS[m], strict=True)]
    write(tmp_path, [line(m, t, c + 4 * seed, seed=seed) for seed in (0, 1) for m, t, c in named])
    (group,) = groups(tmp_path)
    assert group.values("tsv") == {"a": 68, "b": 72, "c": 73}
    assert "+5.0 ±9.0" in evidence_table("methods_vision_full", table, tmp_path)


def test_what_was_not_run_is_said(folder):
    assert "Not run yet" in evidence_table("methods_text_lora", table, folder)


def test_cosines_are_grouped_by_kind_of_layer(folder):
    about = {"suite": "vision-vits14", "model": "ViT", "regime": "full"}
    rows = [
        about | {"tensor": f"encoder.layer.{n}.mlp.fc1.weight", "estimate": e, "identity": 0.3, "change": 0.01}
        for n, e in enumerate((0.2, 0.6))
    ]
    (folder / "vision-vits14-gram.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    text = evidence_table("gram", table, folder)
    assert "| vision-vits14, ViT, full | `mlp.fc1` | 2 | 0.40 | 0.30 | 50 % | 1.00 % |" in text


STORED = [suite for suite in SUITES if (FOLDER / f"{suite}.jsonl").is_file()]


@pytest.mark.parametrize("suite", STORED)
def test_every_number_in_the_repository_can_be_traced(suite):
    scores = read_scores(FOLDER / f"{suite}.jsonl")
    for score in (s for s in scores if s.method not in REFERENCES):
        assert {"rule", "options", "scale", "split", "versions", "merge"} <= set(score.detail), score
        assert re.fullmatch(r"[0-9a-f]{64}", score.detail["merge"])
    assert {s.suite for s in scores} == {suite}


def test_there_are_results():
    assert STORED
