"""The study: what is chosen on one half of the tasks is reported on the other."""

from __future__ import annotations

import json

import pytest
from tests.helpers.vision import TINY, write_tasks

from actmat_experiments.harness import study
from actmat_experiments.harness import suite as suite_driver
from actmat_experiments.harness.merging import Candidate
from actmat_experiments.harness.study import (
    NEIGHBOURS,
    VARIANTS,
    Half,
    Point,
    compare_variants,
    halves,
    markdown_study,
)
from actmat_experiments.suites import RunRequest
from actmat_experiments.vision import small

CUTS = [Half(("a", "b"), ("c", "d")), Half(("c", "d"), ("a", "b"))]


def point(tasks: str, variant: str, validation: float, test: float, seed: int = 0) -> Point:
    return Point("full", seed, tuple(tasks), variant, validation, test)


def test_the_best_of_one_half_is_reported_on_the_other():
    points = [
        *(point("ab", "actmat", 0.5, 0.5), point("ab", "x", 0.9, 0.4), point("ab", "y", 0.6, 0.8)),
        *(point("cd", "actmat", 0.5, 0.6), point("cd", "x", 0.1, 0.7), point("cd", "y", 0.2, 0.9)),
    ]
    found = {c.variant: c for c in compare_variants(points, CUTS, references=["actmat", "y"])}
    chosen = found["chosen"]  # x on (a, b), reported on (c, d); actmat on (c, d), reported on (a, b)
    assert chosen.picks == {"x": 1, "actmat": 1}
    assert chosen.score == pytest.approx((0.7 + 0.5) / 2)
    assert chosen.against["actmat"].mean == pytest.approx((0.1 + 0.0) / 2)
    assert chosen.against["y"].mean == pytest.approx(((0.7 - 0.9) + (0.5 - 0.8)) / 2)
    y, x = found["y"].against["actmat"], found["x"].against["actmat"]
    assert y.mean == y.low == y.high == pytest.approx(0.3), "both halves agree"
    assert (y.better, y.worse) == (1, 0)
    assert (x.better, x.worse) == (0.5, 0.5)
    spread = 1.959963984540054 * 0.2 / 2 / 1  # of (0.1, -0.1): s = 0.1414, over two halves
    assert x.high - x.mean == pytest.approx(spread)
    assert found["actmat"].against["actmat"].mean == 0


def test_only_what_may_be_chosen_is_chosen():
    points = [point(t, v, s, s) for t in ("ab", "cd") for v, s in (("actmat", 0.5), ("x", 0.6), ("data", 0.9))]
    found = compare_variants(points, CUTS, choose_among=["actmat", "x"], references=["data"])
    assert found[0].picks == {"x": 2}
    assert [c.variant for c in found] == ["chosen", "data", "x", "actmat"]
    assert found[0].against["data"].mean == pytest.approx(-0.3)


def test_what_is_reported_was_not_chosen_on():
    for cut in halves(list("abcdefg"), 4):
        assert not set(cut.choose) & set(cut.report)
        assert set(cut.choose) | set(cut.report) == set("abcdefg")
    assert len(halves(list("abcdefg"), 4)) == 8
    with pytest.raises(ValueError, match="at least four tasks"):
        halves(list("abc"), 1)


def test_subsets_lie_within_a_half():
    subsets = study.subsets_within([Half(("a", "b", "c"), ("d", "e")), Half(("d", "e"), ("a", "b", "c"))])
    assert sorted(subsets) == [("a", "b"), ("a", "b", "c"), ("a", "c"), ("b", "c"), ("d", "e")]
    four = study.subsets_within([Half(tuple("abcd"), ("e",))])
    assert sorted(map(len, four)) == [2] * 6 + [4]


def test_variants_are_real_options_with_names_of_their_own():
    from actmat.methods import get_method

    rows = (*VARIANTS, *NEIGHBOURS)
    assert len({v.name for v in rows}) == len(rows)
    for variant in rows:
        assert variant.options.items() <= get_method(variant.method).resolve_options(variant.options).items()


def test_the_table_names_what_was_chosen():
    points = [point(t, v, s, s) for t in ("ab", "cd") for v, s in (("actmat", 0.5), ("x", 0.6))]
    text = markdown_study(compare_variants(points, CUTS, references=["actmat"]))
    assert text.splitlines()[2] == "| chosen (x: 2) | 60.0 | +10.0 | +10.0 to +10.0 | 100 / 0 % of 2 |"
    assert "| `actmat` | 50.0 | +0.0 | +0.0 to +0.0 | 0 / 0 % of 2 |" in text
    assert text.splitlines()[0] == "| variant | % of expert | against `actmat` | 95 % | better / worse on |"


@pytest.mark.slow
def test_the_study_runs_on_merged_models(tmp_path, monkeypatch):
    monkeypatch.setattr(
        suite_driver, "VARIANTS", (Candidate("actmat", "actmat"), Candidate("scale", "actmat", scale=0.5))
    )
    monkeypatch.setattr(suite_driver, "NEIGHBOURS", (Candidate("average", "average"),))
    data = write_tasks(tmp_path / "data", ("cifar100", "a", "b", "c", "d"))
    request = RunRequest("vision-small", tmp_path / "cache", tasks=tuple("abcd"), data=data, settings=TINY, threads=2)
    text = small.study(request)
    stored = json.loads((tmp_path / "cache" / "study" / "vision-small.json").read_text())
    assert (tmp_path / "cache" / "study" / "vision-small.md").read_text() == text
    assert {c["variant"] for c in stored["comparisons"]["full"]} == {"chosen", "actmat", "average", "scale"}
    assert len(stored["halves"]) == 4
    assert {len(p["tasks"]) for p in stored["points"]} == {2}
    by_variant = {p["variant"]: p for p in stored["points"] if p["tasks"] == stored["points"][0]["tasks"]}
    assert by_variant["scale"]["test"] > 0
