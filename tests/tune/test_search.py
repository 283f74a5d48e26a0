"""The space, the order of trials, budgets, the choice among trials."""

from typing import Any, cast

import numpy as np
import pytest

from actmat.errors import RecipeError
from actmat.extras.tune.evaluate import AnswerComparison, Evaluator, Trial
from actmat.extras.tune.report import RESAMPLES, compare_finally
from actmat.extras.tune.search import SearchBudget, choose, expected_trials, pareto_front, search
from actmat.extras.tune.space import ADAPTER_METHODS, DEFAULT_METHODS, MergeChoice, TuneCandidate, make_space

SPACE: dict[str, Any] = {"methods": ["average", "ties"], "scales": [0.5, 1.0, 2.0]}


class Bowl:
    """An evaluator whose losses are known: least at `ties` x 0.8."""

    def __init__(self) -> None:
        self.asked: list[TuneCandidate] = []

    def trial(self, candidate: TuneCandidate) -> Trial:
        self.asked.append(candidate)
        loss = (candidate.scale - 0.8) ** 2 + (0 if candidate.merge.method == "ties" else 1)
        return Trial(candidate, {"a": loss, "b": 2 * loss}, {"a": 1 - loss / 9, "b": 1 - loss / 5})


def run(bowl: Bowl, budget: SearchBudget | None = None, *, space: Any = SPACE) -> list[Trial]:
    space = make_space(space)
    return search(space, space.merges, cast(Evaluator, bowl), budget or SearchBudget())


def test_methods_are_tried_in_their_order_from_scale_1_and_the_best_scales_refined() -> None:
    bowl = Bowl()
    trials = run(bowl)
    assert [str(c) for c in bowl.asked[:2]] == ["average x 1", "average x 0.5"]
    assert len(trials) == expected_trials(2, 3, SearchBudget())
    best, _ = choose(trials)
    assert best.candidate.merge.method == "ties"
    assert abs(best.candidate.scale - 0.8) < 0.1


def test_a_budget_bounds_the_evaluations_and_one_too_small_still_gives_the_first() -> None:
    bowl = Bowl()
    run(bowl, SearchBudget(evaluations=3))
    assert len(bowl.asked) == 3
    (only,) = run(Bowl(), SearchBudget(seconds=0.0))
    assert only.candidate.scale == 1.0


def test_a_method_is_climbed_towards_smaller_losses_until_they_grow() -> None:
    bowl = Bowl()
    run(bowl, space={"methods": ["ties"]})
    assert [c.scale for c in bowl.asked[:3]] == [1.0, 0.7, 0.5], "least at 0.8: 0.5 is worse, and none is larger"
    assert len(bowl.asked) == 4
    scales = np.array([0.5, 0.7, 1.0])
    curve, slope, _ = np.polyfit(np.log(scales), (scales - 0.8) ** 2, 2)
    assert bowl.asked[3].scale == pytest.approx(np.exp(-slope / 2 / curve)), "the minimum of a parabola"


def test_the_usual_methods_suit_the_experts() -> None:
    usual = make_space({})
    adapters = usual.fitted(8, to_adapters=True)
    assert [c.method for c in adapters.merges] == list(ADAPTER_METHODS)
    assert [c.method for c in usual.fitted(8, to_adapters=False).merges] == list(DEFAULT_METHODS)
    assert adapters.merges[0].options == {"prior": 0.5, "ridge": 0.001}
    assert adapters.statistics == {"gram"}
    own = make_space({"methods": ["regmean", "cart@pico"]})
    assert own.fitted(8, to_adapters=True) == own
    assert own.merges[1] == MergeChoice("cart", space="pico")
    with pytest.raises(RecipeError, match="space"):
        make_space({"methods": ["cart@pica"]})


def trial(scale: float, a: float, b: float, agree: float = 1.0) -> Trial:
    return Trial(TuneCandidate(MergeChoice("average"), scale), {"a": a, "b": b}, {"a": agree, "b": 1.0})


def test_the_front_holds_what_nothing_beats_in_mean_and_worst() -> None:
    mean, worst, both, neither = trial(1, 0.0, 3.0), trial(2, 2.0, 2.0), trial(3, 1.0, 2.5), trial(4, 3.0, 3.0)
    assert pareto_front([neither, worst, both, mean]) == [mean, both, worst]


def test_no_expert_may_fall_below_the_agreement_that_is_asked_for() -> None:
    better, safer = trial(1, 0.0, 0.0, agree=0.4), trial(2, 1.0, 1.0, agree=0.9)
    assert choose([better, safer]) == (better, True)
    assert choose([better, safer], 0.8) == (safer, True)
    assert choose([better, safer], 0.95) == (safer, False)


def test_spaces_are_checked_as_a_whole() -> None:
    with pytest.raises(RecipeError) as error:
        make_space({"methods": ["avrage", {"method": "ties", "options": {"densty": [0.1]}}], "scales": [1.0]})
    assert len(error.value.problems) == 2
    assert "average" in str(error.value)
    assert "density" in str(error.value)
    for fields, says in (
        ({"scales": [-1.0]}, "above 0"),
        ({"scales": ["x"]}, "found"),
        ({"scale": [1.0]}, "unknown field"),
        ({"methods": []}, "at least one"),
        ({"methods": [{"name": "ties"}]}, "a method is a name"),
    ):
        with pytest.raises(RecipeError, match=says):
            make_space(fields)


def comparison(values: list[float]) -> AnswerComparison:
    ones = (1,) * len(values)
    return AnswerComparison(tuple(values), ones, ones, ones, tuple(values), ones)


def test_intervals_tell_a_clear_difference_from_noise() -> None:
    base = [0.1, 0.4, 0.2, 0.9, 0.3, 0.5] * 4
    noisy = [v + (0.3 if i % 2 else -0.3) for i, v in enumerate(base)]
    found = {
        "chosen": {"a": comparison(base)},
        "far": {"a": comparison([v + 1 for v in base])},
        "near": {"a": comparison(noisy)},
        "nearer": {"a": comparison([v - 0.05 for v in base])},
    }
    chosen, far, near, nearer = compare_finally(found, "divergence")
    assert (chosen.verdict, far.verdict, near.verdict) == ("chosen", "worse", "not told apart")
    assert nearer.verdict == "better"
    assert far.low == pytest.approx(1.0)
    assert far.high == pytest.approx(1.0)
    assert near.low < 0 < near.high
    assert RESAMPLES >= 1000
