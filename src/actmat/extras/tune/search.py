"""The search: every method's best scale on few inputs, the best candidates on more, then scale, groups and weights.

A method is not tried at every scale, but from the one nearest to 1 towards smaller losses, until they grow again: along
the scales, the loss has one minimum as a rule, and the choices in docs/tune-results.md are the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actmat.errors import RecipeError
from actmat.extras.tune.evaluate import Evaluator, Trial
from actmat.extras.tune.space import MergeChoice, SearchSpace, TuneCandidate
from actmat.methods import get_method

SHARES = (0.125, 0.25, 0.5, 1.0)
"""Shares of the inputs of the rounds of successive halving: the first or the second one, then the last two."""
KEPT = 1 / 5
"""Share of the candidates that go on to the next round."""
FEWEST_KEPT = 4
FEWEST_PREDICTIONS = 16
"""Predictions per expert in the first round, at least; of fewer in all, every round uses all inputs."""
CLIMBED = 3.6
"""Scales at which a method is tried, in the mean of the searches of docs/tune-results.md."""
REFINED = 2
"""Merges whose scale is refined."""
SCALE_RANGE = 1.5
"""Largest change of a scale that is refined."""
GROUP_RANGE = (0.5, 1.6)
WEIGHT_RANGE = (0.5, 2.0)
STEPS = 12
"""Evaluations for each factor of a group and each weight."""


@dataclass
class SearchBudget:
    """Evaluations and seconds that a search may take; None: no limit."""

    evaluations: int | None = None
    seconds: float | None = None
    began: float = field(default_factory=time.monotonic)
    used: int = 0

    @property
    def is_spent(self) -> bool:
        """True if nothing may be evaluated any more."""
        over = self.seconds is not None and time.monotonic() - self.began >= self.seconds
        return over or (self.evaluations is not None and self.used >= self.evaluations)

    def left(self, most: int) -> int:
        """Evaluations that may still be made, at most `most`."""
        return 0 if self.is_spent else most if self.evaluations is None else min(most, self.evaluations - self.used)


def parse_budget(text: str | int | None) -> SearchBudget:
    """`15m`, `2h`, `90s`: time; a number: evaluations.

    >>> parse_budget("15m").seconds, parse_budget(200).evaluations
    (900.0, 200)

    Raises:
        RecipeError: anything else.
    """
    if text is None:
        return SearchBudget()
    written = str(text).strip()
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(written[-1:])
    number = written[:-1] if unit else written
    if not number.isdecimal() or int(number) < 1:
        raise RecipeError(f"The budget is a number of evaluations (200) or a time (90s, 15m, 2h); found '{written}'.")
    return SearchBudget(seconds=int(number) * unit) if unit else SearchBudget(evaluations=int(number))


@dataclass(frozen=True)
class Varied:
    """Size of a search's inputs, and the numbers that are varied besides the scale.

    Args:
        predictions: of one expert, at least.
        groups: names of the groups of layers that get a factor of their own.
        weighted: number of experts whose weights are searched; 0: none.
        seed: of the optimizer.
    """

    predictions: int
    groups: Sequence[str] = ()
    weighted: int = 0
    seed: int = 0


def shares_of(predictions: int) -> tuple[float, ...]:
    """Shares of the inputs, round by round, for so many predictions of one expert."""
    if predictions < FEWEST_PREDICTIONS:
        return (1.0,)
    return (SHARES[0] if SHARES[0] * predictions >= FEWEST_PREDICTIONS else SHARES[1], *SHARES[2:])


def kept(candidates: int) -> int:
    """Number of candidates that go on to the next round."""
    return min(candidates, max(FEWEST_KEPT, math.ceil(KEPT * candidates)))


def search(
    space: SearchSpace,
    merges: Sequence[MergeChoice],
    evaluator: Evaluator,
    budget: SearchBudget,
    varied: Varied,
    report: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """All trials, in order; the last round's are on all inputs.

    Args:
        merges: choices that could be merged, which are all tried in the first round.
        report: called after each trial.

    A budget that ends before the last round leaves one trial more: the best so far on all inputs.
    """
    trials: list[Trial] = []

    def run(candidate: TuneCandidate, share: float = 1.0) -> Trial:
        found = evaluator.trial(candidate, share)
        budget.used += 1
        trials.append(found)
        report(found)
        return found

    first, *others = shares_of(varied.predictions)
    for merge in merges:
        _climb(merge, sorted(space.scales), lambda candidate: run(candidate, first).mean, budget)
    found = screened = list(trials)
    for share in others:
        ranked = [t.candidate for t in sorted(found, key=lambda t: t.mean)][: kept(len(found))]
        ranked.sort(key=lambda c: merges.index(c.merge))  # a merge is loaded once in a round
        found = [run(c, share) for c in ranked if not budget.is_spent]
    if not _whole(trials):
        run(_farthest(trials, TuneCandidate(merges[0], min(space.scales, key=lambda s: abs(s - 1)))))
    for trial in [] if budget.is_spent else _best_of_each(trials)[:REFINED]:
        scale = _refined(trial.candidate, screened)
        if scale is not None and not budget.is_spent:
            run(TuneCandidate(trial.candidate.merge, scale))
    for start, vary in _starts(_whole(trials), varied):
        _refine(start, run, budget.left(STEPS * (len(vary.groups) + vary.weighted)), vary)
    return trials


def _climb(
    merge: MergeChoice, scales: Sequence[float], loss: Callable[[TuneCandidate], float], budget: SearchBudget
) -> None:
    """Evaluate a merge from the scale nearest to 1 in the direction of smaller losses, until they grow again."""
    at = min(range(len(scales)), key=lambda n: abs(math.log(scales[n])))
    least = math.inf if budget.is_spent else loss(TuneCandidate(merge, scales[at]))
    for step in (-1, 1):
        best = at
        while 0 <= best + step < len(scales) and not budget.is_spent:
            if (found := loss(TuneCandidate(merge, scales[best + step]))) >= least:
                break
            best, least = best + step, found
        if best != at:
            return


def _refined(start: TuneCandidate, screened: Sequence[Trial]) -> float | None:
    """The minimum of a parabola through the losses around a candidate's scale, over the scale's logarithm.

    Beyond the ends of the tried scales: a step of `SCALE_RANGE`. None: there is nothing to refine.

    Args:
        screened: trials on the same inputs.
    """
    points = {t.candidate.scale: t.mean for t in screened if t.candidate.merge.key == start.merge.key}
    scales = sorted(points)
    at = scales.index(start.scale)
    if at in (0, len(scales) - 1):
        return start.scale * (SCALE_RANGE if at and len(scales) > 1 else 1 / SCALE_RANGE)
    low, middle, high = (math.log(s) for s in scales[at - 1 : at + 2])
    left, here, right = (points[s] for s in scales[at - 1 : at + 2])
    down, up = (here - left) / (middle - low), (right - here) / (high - middle)
    if up <= down:
        return None
    lowest = (low + middle) / 2 - down * (high - low) / 2 / (up - down)
    reach = math.log(SCALE_RANGE)
    return math.exp(min(max(lowest, middle - reach), middle + reach))


def _starts(whole: Sequence[Trial], varied: Varied) -> list[tuple[TuneCandidate, Varied]]:
    """Candidates to refine, with the numbers to vary: the best, and for weights the best that takes some."""
    best = min(whole, key=lambda t: t.mean)
    weighted = [t for t in whole if get_method(t.candidate.merge.method).is_weighted] if varied.weighted else []
    first = varied if best in weighted else replace(varied, weighted=0)
    starts = [(best.candidate, first)] if first.groups or first.weighted else []
    if weighted and best not in weighted:
        starts.append((min(weighted, key=lambda t: t.mean).candidate, replace(varied, groups=())))
    return starts


def _whole(trials: Sequence[Trial]) -> list[Trial]:
    return [t for t in trials if t.share == 1.0]


def _farthest(trials: Sequence[Trial], otherwise: TuneCandidate) -> TuneCandidate:
    """The best candidate of the last round that was begun."""
    return min(trials, key=lambda t: (-t.share, t.mean)).candidate if trials else otherwise


def _best_of_each(trials: Sequence[Trial]) -> list[Trial]:
    """The best trial on all inputs of each merge, the best first."""
    best: dict[str, Trial] = {}
    for trial in sorted(_whole(trials), key=lambda t: t.mean):
        best.setdefault(trial.candidate.merge.key, trial)
    return list(best.values())


def _refine(start: TuneCandidate, run: Callable[[TuneCandidate], Trial], steps: int, varied: Varied) -> None:
    """Minimize over scale, factors of groups and weights of experts together, near a candidate (Optuna's TPE)."""
    if steps < 1:
        return
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)

    def objective(trial: Any) -> float:
        scale = trial.suggest_float("scale", start.scale / SCALE_RANGE, start.scale * SCALE_RANGE, log=True)
        factors = {g: trial.suggest_float(f"group {g}", *GROUP_RANGE, log=True) for g in varied.groups}
        merge = start.merge
        if varied.weighted:
            names = [f"weight {t}" for t in range(varied.weighted)]
            weights = tuple(round(trial.suggest_float(n, *WEIGHT_RANGE, log=True), 2) for n in names)
            merge = replace(merge, weights=weights)
        return run(TuneCandidate(merge, scale, factors)).mean

    sampler = optuna.samplers.TPESampler(seed=varied.seed, multivariate=True, n_startup_trials=4)
    study = optuna.create_study(sampler=sampler)
    center = {"scale": start.scale} | {f"group {g}": 1.0 for g in varied.groups}
    study.enqueue_trial(center | {f"weight {t}": 1.0 for t in range(varied.weighted)})
    study.optimize(objective, n_trials=steps)


def choose(trials: Sequence[Trial], least_agreement: float = 0.0) -> tuple[Trial, bool]:
    """The trial on all inputs with the least mean loss among those with enough agreement; and True if there was any.

    Where no candidate agrees enough, the one whose worst agreement is largest.
    """
    whole = _whole(trials)
    allowed = [t for t in whole if min(t.agreement.values()) >= least_agreement]
    if allowed:
        return min(allowed, key=lambda t: t.mean), True
    return max(whole, key=lambda t: min(t.agreement.values())), False


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Trials on all inputs that no other beats in both the mean and the worst loss, by increasing mean."""
    front: list[Trial] = []
    for trial in sorted(_whole(trials), key=lambda t: (t.mean, t.worst)):
        if not front or trial.worst < front[-1].worst:
            front.append(trial)
    return front
