"""The tables of the search, from rows that are known."""

from __future__ import annotations

from typing import Any

import pytest
from benchmarks.evidence.group import Group
from benchmarks.tune.choices import evidence_goal, evidence_rows
from benchmarks.tune.tables import TABLES, goal_lines

from actmat_experiments.harness.results import Score


def row(seed: int, chosen: float, *, suite: str = "digits") -> dict[str, Any]:
    """Average 0.70 and 0.72, actmat 0.60 and 0.80 at two scales; the divergence prefers the best, noise the worst."""
    accuracies = {("average", 1.0): 0.70, ("average", 0.5): 0.72, ("actmat", 1.0): 0.60, ("actmat", 0.5): 0.80}
    candidates = [
        {"method": m, "scale": s, "test": a, "validation": -a, "own_8": a, "own_64": 1 - a, "other_64": 1 - a}
        | {"noise_64": a}
        for (m, s), a in accuracies.items()
    ]
    return {
        "subject": f"{suite}/full/{seed}", "suite": suite, "regime": "full", "seed": seed, "expert_test": 0.9,
        "chosen": {"candidate": "tsv x 1.1", "test": chosen, "verdict_on_average": "worse"},
        "candidates": candidates, "machine": "m", "date": "d",
    }  # fmt: skip


def test_tables_hold_the_differences_that_their_heads_name() -> None:
    rows = [row(0, 0.80), row(1, 0.78), row(2, 0.76), row(0, 0.81, suite="vision-small")]
    first, image, every = TABLES["choice"][1](rows)
    assert first[1:] == ["3", "90.0 ±0.0", "78.0 ±5.0", "2.0 ±5.0", "8.0 ±5.0", "+6.0", "18.0 ±5.0"]
    assert image[1:] == ["1", "90.0", "81.0", "0.0", "11.0", "+11.0", "21.0"], "a refined scale may beat the grid"
    assert every[1] == "4"
    rival = TABLES["rivals"][1](rows)[0]
    assert rival[2] == "18.0 ±5.0", "the labels of this toy are upside down"
    assert rival[3:] == ["", "1.00 (1.00)", "3"]
    assert TABLES["wrong"][1](rows)[0][2:] == ["0.0 ±0.0", "+10.0", "0.0 ±0.0", "+10.0", "20.0 ±0.0", "-10.0"]


@pytest.mark.parametrize(
    ("chosen", "says"), [(0.80, "at most 0.5 points: met on these 1"), (0.69, "`digits/full/0` (-1.0")]
)
def test_the_goal_is_judged_in_words(chosen: float, says: str) -> None:
    assert says in goal_lines([row(0, chosen)])


def group() -> Group:
    """Two seeds; with the first the divergence prefers TSV, with the second `actmat`, and `regmean` to both."""
    scores = []
    for seed, liked in ((0, "tsv"), (1, "actmat")):
        for method, right in (("average", 60), ("tsv", 70), ("actmat", 50), ("regmean", 65)):
            far = 0.05 if method == "regmean" else 0.1 if method == liked else 0.9
            scales = {s: {"divergence": far + extra, "validation": right - 50, "test": right - 10 * extra}
                      for s, extra in (("0.5", 0.2), ("1.0", 0.0))}  # fmt: skip
            detail = {"rule": method, "scales": scales, "validation": {"total": 24}}
            scores += [
                Score("vision-vits14", "full", method, "default", t, seed, right, 100, model="ViT", settings="s",
                      detail=detail)
                for t in "ab"
            ]  # fmt: skip
    return Group(scores)


def test_the_choice_among_the_merges_of_the_evidence() -> None:
    first, second = evidence_rows([group()])
    assert first[:3] == ["ViT, full", "0", "6"]
    assert first[4:] == ["`tsv` 70.0", "0.0", "+10.0", "+20.0", "+0.0", "`regmean` 65.0", "5.0", "+5.0"]
    assert second[4:9] == ["`actmat` 50.0", "20.0", "-10.0", "+0.0", "-20.0"]
    said = evidence_goal([group()])
    assert "* Without `regmean`, mean regret at most 0.5 points: **missed**, 10.0 (ViT, full 10.0)" in said
    assert "* With `regmean`, never more than 0.5 points below the average: met in all 2; +5.0 at worst." in said
    assert "**missed** in 1 of 2: ViT, full, seed 1 (-10.0); -10.0 at worst" in said
