"""The choice by divergence among rows of the suites on pretrained models, from scores that are known."""

from __future__ import annotations

import pytest
from benchmarks.evidence.tables import Group
from benchmarks.tune.pretrained import HEADER, candidates, pretrained_rows

from actmat_experiments.harness.results import Score

TASKS = ("a", "b")


def line(method: str, kind: str, task: str, test: int, seen: tuple[int, float] | None, scale: float = 1.0) -> Score:
    detail = {"scale": scale}
    if seen is not None:
        detail |= {"validation": {"correct": seen[0], "total": 20, "divergence": seen[1]}}
    head = ("vision-vits14", "lora", method, kind, task, 0, test, 100)
    return Score(*head, model="ViT", settings="s", detail=detail)


def group(*, tsv: float = 0.2) -> Group:
    """Test accuracies 60 (average), 50 (actmat), 70 and 64 (tsv at its two scales); labels prefer the second."""
    rows = {
        ("average", "default"): (60, (14, 0.5), 1.0),
        ("average", "tuned"): (61, (15, 0.4), 2.0),
        ("actmat", "default"): (50, (10, 0.9), 1.0),
        ("tsv", "default"): (70, (15, tsv), 1.0),
        ("tsv", "tuned"): (64, (18, 0.3), 0.5),
        ("old", "default"): (99, None, 1.0),
    }
    scores = [line("base", "default", task, 40, None) for task in TASKS]
    for (method, kind), (test, seen, scale) in rows.items():
        scores += [
            line(method, kind, task, test + shift, seen, scale) for task, shift in zip(TASKS, (-2, 2), strict=True)
        ]
    return Group(scores)


def test_rows_without_what_was_seen_on_validation_are_no_candidates() -> None:
    found = {(c.method, c.kind): c for c in candidates(group())}
    assert ("old", "default") not in found
    assert len(found) == 5
    tsv = found["tsv", "tuned"]
    assert (tsv.scale, tsv.mean_test, tsv.right, tsv.divergence) == (0.5, 64.0, 0.9, pytest.approx(0.3))


def test_the_least_divergence_chooses_and_is_held_against_labels() -> None:
    (row,) = pretrained_rows([group()])
    assert len(row) == len(HEADER)
    assert row[:3] == ["ViT, LoRA, 2 tasks", "20", "5"]
    assert row[3] == "1.00"
    assert row[4:] == ["`tsv` x 1: 70.0", "0.0", "+10.0 ±0.0", "+20.0 ±0.0", "+6.0 ±0.0"]


def test_a_wrong_choice_has_a_regret() -> None:
    (row,) = pretrained_rows([group(tsv=0.35)])
    assert row[4:] == ["`tsv` x 0.5: 64.0", "6.0", "+4.0 ±0.0", "+14.0 ±0.0", "+0.0 ±0.0"]


def test_groups_with_hardly_any_merge_are_left_out() -> None:
    few = Group([line("average", "default", task, 60, (14, 0.5)) for task in TASKS])
    assert pretrained_rows([few]) == []
