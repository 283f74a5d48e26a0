"""Counts of kept answers, and the inputs that a merge by inputs counts as."""

from pathlib import Path

import pytest
from tests.helpers.family import TEXTS, experts_of

import actmat
from actmat.extras.tune.evaluate import AnswerComparison
from actmat.extras.tune.kept import Compared
from actmat.extras.tune.with_inputs import choose
from actmat.recipe import ExpertRef, Recipe
from actmat.report.manifest import read_manifest


def test_an_answer_is_kept_and_right_as_a_whole() -> None:
    own = AnswerComparison(differing=(0, 1, 3), right=(2, 1, 0), labeled=(2, 3, 0))
    compared = Compared(own, AnswerComparison(right=(4,), labeled=(4,)))
    assert compared.kept == [True, False, False]
    assert compared.accuracy == pytest.approx(2 / 3), "inputs with labels, all of whose predictions are right"
    assert Compared(AnswerComparison(right=(0,), labeled=(0,))).accuracy is None


def test_every_input_counts_once_however_many_an_expert_has() -> None:
    def compared(first: int, second: int) -> dict[str, Compared]:
        counts = {"a": (first, 2), "b": (second, 8)}
        return {k: Compared(AnswerComparison(differing=(0,) * n + (1,) * (of - n))) for k, (n, of) in counts.items()}

    recipe = Recipe(experts=(ExpertRef(path="x"), ExpertRef(path="y")), method="auto")
    chosen, _ = choose(recipe, compared(2, 4), {"without": (("ties", {}, "full"), compared(0, 7))})
    assert chosen.method == "ties", "7 of 10 answers against 6, though the mean share is lower"


def test_the_prior_counts_as_inputs_of_the_expert_with_the_fewest(family: Path, tmp_path: Path) -> None:
    data = {name: texts[: 2 + 3 * number] for number, (name, texts) in enumerate(TEXTS.items())}
    actmat.merge(family / "base", experts_of(family), data=data, out=tmp_path / "out", new_tokens=2)
    assert read_manifest(tmp_path / "out")["recipe"]["options"]["prior"] == pytest.approx(4 / 2)
