"""The space, the order of trials, budgets, the choice among trials."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from actmat.errors import RecipeError
from actmat.extras.tune.evaluate import AnswerComparison, Evaluator, Trial
from actmat.extras.tune.report import RESAMPLES, compare_finally, notes_on_space
from actmat.extras.tune.search import SearchBudget, Varied, choose, pareto_front, parse_budget, search, shares_of
from actmat.extras.tune.settings import FINALS, Effort, Pace, TuneProgress
from actmat.extras.tune.space import ADAPTER_METHODS, MergeChoice, TuneCandidate, load_space, make_space

SPACE: dict[str, Any] = {"methods": ["average", "ties"], "scales": [0.5, 1.0, 2.0]}


class Bowl:
    """An evaluator whose losses are known: least at `ties` x 0.8, with factor 1.4 in group 'mlp'."""

    def __init__(self) -> None:
        self.asked: list[tuple[TuneCandidate, float]] = []

    def trial(self, candidate: TuneCandidate, share: float) -> Trial:
        self.asked.append((candidate, share))
        loss = (candidate.scale - 0.8) ** 2 + (0 if candidate.merge.method == "ties" else 1)
        loss += (candidate.groups.get("mlp", 1.0) - 1.4) ** 2
        loss += sum((w - 1.5) ** 2 for w in (candidate.merge.weights or ())[:1])
        return Trial(candidate, share, {"a": loss, "b": 2 * loss}, {"a": 1 - loss / 9, "b": 1 - loss / 5})


def run(bowl: Bowl, budget: SearchBudget | None = None, *, space: Any = SPACE, **around: Any) -> list[Trial]:
    space = make_space(space)
    fields: dict[str, Any] = {"predictions": 64} | around
    return search(space, space.merges(), cast(Evaluator, bowl), budget or SearchBudget(), Varied(**fields))


def test_rounds_use_more_inputs_for_fewer_candidates_and_then_refine_the_scale() -> None:
    bowl = Bowl()
    trials = run(bowl)
    assert [s for _, s in bowl.asked[:6]] == [0.25] * 6
    assert {c.merge.method for c, _ in bowl.asked[:6]} == {"average", "ties"}
    best, _ = choose(trials)
    assert best.candidate.merge.method == "ties"
    assert abs(best.candidate.scale - 0.8) < 0.1
    assert best.share == 1.0


def test_factors_of_groups_and_weights_are_searched_around_the_best() -> None:
    best, _ = choose(run(Bowl(), groups=["attention", "mlp"]))
    assert best.candidate.groups["mlp"] > 1.1
    assert best.mean < choose(run(Bowl()))[0].mean
    best, _ = choose(run(Bowl(), weighted=2))
    assert best.candidate.merge.weights is None or len(best.candidate.merge.weights) == 2
    assert any(t.candidate.merge.weights for t in run(Bowl(), weighted=2))


@pytest.mark.parametrize("grouped", [False, True])
def test_weights_are_searched_for_a_method_that_takes_some(grouped: bool) -> None:
    """The best merge is by KnOTS, which takes no weights, so they are searched around the best average, if any."""

    class KnotsIsBest(Bowl):
        def trial(self, candidate: TuneCandidate, share: float) -> Trial:
            found = super().trial(candidate, share)
            better = 1.0 if candidate.merge.method == "knots" else 0.0
            return Trial(candidate, share, {k: v - better for k, v in found.losses.items()}, found.agreement)

    space: dict[str, Any] = {"methods": ["average", "knots"], "scales": [0.5, 1.0]}
    trials = run(KnotsIsBest(), space=space, groups=["mlp"] if grouped else [], weighted=2)
    assert choose(trials)[0].candidate.merge.method == "knots"
    weighted = [t.candidate for t in trials if t.candidate.merge.weights is not None]
    assert {c.merge.method for c in weighted} == {"average"}
    assert not any(c.groups for c in weighted)
    assert any(t.candidate.groups for t in trials) == grouped
    trials = run(KnotsIsBest(), space=space | {"methods": ["knots"]}, weighted=2)
    assert not any(t.candidate.merge.weights for t in trials)


def test_methods_without_weights_are_named() -> None:
    space = make_space({"methods": ["average", "knots", "sce"], "weights": True})
    (note,) = notes_on_space(space, space.merges())
    assert note.endswith("not with knots, sce.")
    (note,) = notes_on_space(space, [MergeChoice("knots")])
    assert "not searched" in note
    assert not list(notes_on_space(space, [MergeChoice("average")]))
    assert not list(notes_on_space(make_space({"methods": ["knots"]}), [MergeChoice("knots")]))


def test_the_search_is_the_same_every_time() -> None:
    first, second = ([t.candidate.key for t in run(Bowl(), groups=["mlp"], seed=3)] for _ in range(2))
    assert first == second
    assert first != [t.candidate.key for t in run(Bowl(), groups=["mlp"], seed=4)]


def test_a_budget_bounds_the_evaluations_and_one_too_small_still_gives_the_best_so_far() -> None:
    bowl = Bowl()
    run(bowl, SearchBudget(evaluations=12))
    assert len(bowl.asked) == 12
    few = Bowl()
    found = run(few, SearchBudget(evaluations=3))
    assert len(few.asked) == 4, "one more, on all inputs"
    best = min(found[:3], key=lambda t: t.mean)
    assert (found[3].candidate, found[3].share) == (best.candidate, 1.0)
    (only,) = run(Bowl(), SearchBudget(seconds=0.0))
    assert (only.candidate.scale, only.share) == (1.0, 1.0)


@pytest.mark.parametrize("text", ["", "0", "-3", "10x", "m", "1.5h"])
def test_budgets_that_mean_nothing(text: str) -> None:
    with pytest.raises(RecipeError, match="number of evaluations"):
        parse_budget(text)


def test_a_method_is_climbed_towards_smaller_losses_until_they_grow() -> None:
    bowl = Bowl()
    run(bowl, space={"methods": ["ties"]}, predictions=8)
    assert [c.scale for c, _ in bowl.asked[:3]] == [1.0, 0.7, 0.5], "least at 0.8: 0.5 is worse, and none is larger"
    assert len(bowl.asked) == 4
    scales = np.array([0.5, 0.7, 1.0])
    curve, slope, _ = np.polyfit(np.log(scales), (scales - 0.8) ** 2, 2)
    assert bowl.asked[3][0].scale == pytest.approx(np.exp(-slope / 2 / curve)), "the minimum of a parabola"


@pytest.mark.parametrize(("predictions", "first"), [(15, 1.0), (16, 0.25), (127, 0.25), (128, 0.125)])
def test_the_first_round_has_enough_predictions(predictions: int, first: float) -> None:
    assert shares_of(predictions)[0] == first
    assert shares_of(predictions)[-1] == 1.0


def test_the_time_that_is_left_falls_to_that_of_the_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds for a whole evaluation, as was measured before."""
    clock = [0.0]
    monkeypatch.setattr("actmat.extras.tune.settings.time.perf_counter", lambda: clock[0])
    told: list[float] = []
    progress = cast(TuneProgress, SimpleNamespace(left=told.append, trial=lambda found, best: None))
    effort = Effort(2, 3, Varied(64))
    pace = Pace(effort, 2.0, progress)
    assert pace.left == pytest.approx(2 * (effort.whole + FINALS))
    assert effort.trials == 6 + 4 + 4 + 2
    for n in range(effort.trials):
        clock[0] += 2 * 0.25
        pace.add(Trial(TuneCandidate(MergeChoice("average"), 1.0 + n), 0.25, {"a": 1.0}, {"a": 1.0}))
    assert told == sorted(told, reverse=True)
    assert Effort(2, 3, Varied(64), limit=5).trials == 5


def test_the_usual_methods_suit_the_experts() -> None:
    usual = make_space({})
    adapters = usual.fitted(to_adapters=True)
    assert [str(c) for c in adapters.merges()] == list(ADAPTER_METHODS)
    assert usual.fitted(to_adapters=False).merges() == usual.merges()
    assert adapters.statistics == {"gram"}
    own = make_space({"methods": ["regmean", "cart@pico"]})
    assert own.fitted(to_adapters=True) == own
    assert own.merges()[1] == MergeChoice("cart", space="pico")
    with pytest.raises(RecipeError, match="space"):
        make_space({"methods": ["cart@pica"]})


def trial(scale: float, a: float, b: float, agree: float = 1.0) -> Trial:
    return Trial(TuneCandidate(MergeChoice("average"), scale), 1.0, {"a": a, "b": b}, {"a": agree, "b": 1.0})


def test_the_front_holds_what_nothing_beats_in_mean_and_worst() -> None:
    mean, worst, both, neither = trial(1, 0.0, 3.0), trial(2, 2.0, 2.0), trial(3, 1.0, 2.5), trial(4, 3.0, 3.0)
    assert pareto_front([neither, worst, both, mean]) == [mean, both, worst]


def test_no_expert_may_fall_below_the_agreement_that_is_asked_for() -> None:
    better, safer = trial(1, 0.0, 0.0, agree=0.4), trial(2, 1.0, 1.0, agree=0.9)
    assert choose([better, safer]) == (better, True)
    assert choose([better, safer], 0.8) == (safer, True)
    assert choose([better, safer], 0.95) == (safer, False)


def test_spaces_are_checked_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as error:
        make_space({"methods": ["avrage", {"method": "ties", "options": {"densty": [0.1]}}], "scales": [1.0]})
    assert len(error.value.problems) == 2
    assert "average" in str(error.value)
    assert "density" in str(error.value)
    with pytest.raises(RecipeError, match=r"scales\.0"):
        make_space({"scales": [-1.0]})
    with pytest.raises(RecipeError, match="Extra inputs"):
        make_space({"scale": [1.0]})
    file = tmp_path / "space.yaml"
    file.write_text("methods: [average, {method: ties, options: {density: [0.1, 0.2]}}]\nscales: [0.5, 1]\n")
    assert len(load_space(file).merges()) == 3
    file.write_text("- average\n")
    with pytest.raises(RecipeError, match="expected a mapping"):
        load_space(file)
    with pytest.raises(RecipeError, match="cannot be read"):
        load_space(tmp_path / "none.yaml")


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
    chosen, far, near, nearer = compare_finally(found, "divergence", seed=0)
    assert (chosen.verdict, far.verdict, near.verdict) == ("chosen", "worse", "not told apart")
    assert nearer.verdict == "better"
    assert far.low == pytest.approx(1.0)
    assert far.high == pytest.approx(1.0)
    assert near.low is not None
    assert near.high is not None
    assert near.low < 0 < near.high
    assert RESAMPLES >= 1000
