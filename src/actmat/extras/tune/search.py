"""The search: every method from scale 1 towards smaller losses, then the scales of the two best refined.

A method is not tried at every scale, but from the one nearest to 1 towards smaller losses, until they grow again: along
the scales, the loss has one minimum as a rule, and the choices in docs/tune-results.md are the same.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from actmat.extras.tune.evaluate import Evaluator, Trial
from actmat.extras.tune.space import MergeChoice, SearchSpace, TuneCandidate

CLIMBED = 3.6
"""Scales at which a method is tried, in the mean of the searches of docs/tune-results.md."""
REFINED = 2
"""Merges whose scale is refined."""
SCALE_RANGE = 1.5
"""Largest change of a scale that is refined."""


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


def expected_trials(merges: int, scales: int, budget: SearchBudget) -> int:
    """Estimated number of trials.

    >>> expected_trials(5, 6, SearchBudget())
    20
    """
    trials = math.ceil(merges * min(scales, CLIMBED)) + min(REFINED, merges)
    return trials if budget.evaluations is None else min(trials, budget.evaluations)


def search(
    space: SearchSpace,
    merges: Iterable[MergeChoice],
    evaluator: Evaluator,
    budget: SearchBudget,
    report: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """All trials, in order; at least one, whatever the budget.

    Args:
        merges: choices that could be merged.
        report: called after each trial.
    """
    trials: list[Trial] = []

    def run(candidate: TuneCandidate) -> Trial:
        trials.append(evaluator.trial(candidate))
        budget.used += 1
        report(trials[-1])
        return trials[-1]

    for merge in merges:
        _climb(merge, sorted(space.scales), lambda candidate: run(candidate).mean, budget, is_first=not trials)
    for trial in [] if budget.is_spent else _best_of_each(trials)[:REFINED]:
        scale = _refined(trial.candidate, trials)
        if scale is not None and not budget.is_spent:
            run(TuneCandidate(trial.candidate.merge, scale))
    return trials


def _climb(
    merge: MergeChoice,
    scales: Sequence[float],
    loss: Callable[[TuneCandidate], float],
    budget: SearchBudget,
    *,
    is_first: bool,
) -> None:
    """Evaluate a merge from the scale nearest to 1 in the direction of smaller losses, until they grow again."""
    if budget.is_spent and not is_first:
        return
    at = min(range(len(scales)), key=lambda n: abs(math.log(scales[n])))
    least = loss(TuneCandidate(merge, scales[at]))
    for step in (-1, 1):
        best = at
        while 0 <= best + step < len(scales) and not budget.is_spent:
            if (next_loss := loss(TuneCandidate(merge, scales[best + step]))) >= least:
                break
            best, least = best + step, next_loss
        if best != at:
            return


def _refined(start: TuneCandidate, trials: Sequence[Trial]) -> float | None:
    """The minimum of a parabola through the losses around a candidate's scale, over the scale's logarithm.

    Beyond the ends of the tried scales: a step of `SCALE_RANGE`. None: there is nothing to refine.
    """
    points = {t.candidate.scale: t.mean for t in trials if t.candidate.merge.key == start.merge.key}
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


def _best_of_each(trials: Sequence[Trial]) -> list[Trial]:
    """The best trial of each merge, the best first."""
    best: dict[str, Trial] = {}
    for trial in sorted(trials, key=lambda t: t.mean):
        best.setdefault(trial.candidate.merge.key, trial)
    return list(best.values())


def choose(trials: Sequence[Trial], least_agreement: float = 0.0) -> tuple[Trial, bool]:
    """The trial with the least mean loss among those with enough agreement; and True if there was any.

    Where no candidate agrees enough, the one whose worst agreement is largest.
    """
    allowed = [t for t in trials if min(t.agreement.values()) >= least_agreement]
    if allowed:
        return min(allowed, key=lambda t: t.mean), True
    return max(trials, key=lambda t: min(t.agreement.values())), False


def pareto_front(trials: Sequence[Trial]) -> list[Trial]:
    """Trials that no other beats in both the mean and the worst loss, by increasing mean."""
    front: list[Trial] = []
    for trial in sorted(trials, key=lambda t: (t.mean, t.worst)):
        if not front or trial.worst < front[-1].worst:
            front.append(trial)
    return front
