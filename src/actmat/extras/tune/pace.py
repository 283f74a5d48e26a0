"""The time that a search still takes: its work from the planned rounds, its speed as measured."""

from __future__ import annotations

import math
import time

from actmat.extras.tune.evaluate import Trial
from actmat.extras.tune.search import CLIMBED, REFINED, STEPS, Varied, kept, shares_of
from actmat.extras.tune.settings import TuneProgress

FINALS = 4
"""Evaluations of the final comparison: the chosen merge, the average, the recipe's own, the base."""


class Effort:
    """Estimated work of a search, in evaluations of one candidate on all inputs; a later round takes only new inputs.

    Args:
        merges: choices that could be merged.
        scales: at which each may be tried.
        varied: see `search`.
        limit: evaluations of the budget, if it has any.

    >>> effort = Effort(10, 6, Varied(192))
    >>> effort.trials, effort.whole
    (50, 11.5)
    """

    def __init__(self, merges: int, scales: int, varied: Varied, limit: int | None = None) -> None:
        count = math.ceil(merges * min(scales, CLIMBED))
        self.trials, self.whole, before = 0, 0.0, 0.0
        for share in shares_of(varied.predictions):
            self.trials += count
            self.whole += count * (share - before)
            count, before = kept(count), share
        more = min(REFINED, merges) + STEPS * (len(varied.groups) + varied.weighted)
        self.trials, self.whole = self.trials + more, self.whole + more
        if limit is not None and limit < self.trials:
            self.trials, self.whole = limit, self.whole * limit / self.trials


class Pace:
    """Tells a search's progress, with the time that is left.

    Args:
        effort: of the search.
        seconds: of one evaluation on all inputs, measured as the experts were asked.
        progress: is told.
    """

    def __init__(self, effort: Effort, seconds: float, progress: TuneProgress) -> None:
        self._effort, self._seconds, self._progress = effort, seconds, progress
        self._began, self._done = time.perf_counter(), 0.0
        self._best: dict[float, Trial] = {}
        self._shares: dict[str, float] = {}

    @property
    def left(self) -> float:
        """Seconds, estimated."""
        rate = (self._seconds + time.perf_counter() - self._began) / (1 + self._done)
        return rate * (max(0.0, self._effort.whole - self._done) + FINALS)

    def add(self, trial: Trial) -> None:
        """A candidate was tried."""
        key = trial.candidate.key
        self._done += trial.share - self._shares.get(key, 0.0)
        self._shares[key] = trial.share
        best = min(trial, self._best.get(trial.share, trial), key=lambda t: t.mean)
        self._best[trial.share] = best
        self._progress.left(self.left)
        self._progress.trial(trial, best)
