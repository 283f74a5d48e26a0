"""Settings of a search, the callbacks that watch it, and the time that is left, by planned work and measured speed."""

from __future__ import annotations

import dataclasses
import math
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from actmat.extras.models.loading import Loaded
from actmat.extras.tune.evaluate import Predict, Score, Trial, default_predict
from actmat.extras.tune.live import Loader
from actmat.extras.tune.memory import MemoryPlan
from actmat.extras.tune.search import CLIMBED, REFINED, STEPS, SearchBudget, Varied, kept, shares_of
from actmat.foreign import terminal
from actmat.progress import in_notebook, tqdm_bar


@dataclass(frozen=True, kw_only=True)
class TuneSettings:
    """Settings of a search.

    Args:
        score: see `evaluate.Score`.
        budget: of the search; default: until every round is through.
        least_agreement: share of its own predictions that every expert must keep in the chosen merge.
        model_class, dtype, device: of the models while they run.
        new_tokens: tokens that a generating expert adds to an input.
        predict: logits of a model, for models whose output has none; or one for
            each expert by its name, if they have heads of their own.
        load: from a location to a model, in place of `extras.models.loading.load_model`.
        average: compare the chosen merge with the average in the end.
        seed: of the search and of the bootstrap.
        keep: keep the merges that were tried in the work folder.
    """

    score: Score = "divergence"
    budget: SearchBudget = dataclasses.field(default_factory=SearchBudget)
    least_agreement: float = 0.0
    model_class: str | None = None
    dtype: str = "float32"
    device: str = "cpu"
    new_tokens: int = 32
    predict: Predict | Mapping[str, Predict] = default_predict
    load: Callable[[str], Loaded] | None = None
    average: bool = True
    seed: int = 0
    keep: bool = False

    def predict_of(self, label: str) -> Predict:
        """Logits for the inputs of an expert."""
        return self.predict[label] if isinstance(self.predict, Mapping) else self.predict

    def loader(self, base: str) -> Loader:
        """Loads the models of a search."""
        return Loader(base, self.model_class, self.dtype, self.device, self.load)

    @property
    def score_name(self) -> str:
        """Name of the score in reports."""
        return self.score if isinstance(self.score, str) else str(getattr(self.score, "__name__", "score"))


class TuneProgress:
    """Callbacks of a search; does nothing."""

    def doing(self, what: str) -> None:
        """A stage begins."""

    def planned(self, plan: MemoryPlan) -> None:
        """The memory of the search is planned; no model has been loaded yet."""

    def note(self, text: str) -> None:
        """A fact that the user should know while the search runs."""

    def left(self, seconds: float) -> None:
        """Estimated time until the search and the comparison end; told before and after each trial."""

    def trial(self, found: Trial, best: Trial) -> None:
        """A candidate was tried; `best`: of those on as many inputs."""


class NotebookTuneProgress(TuneProgress):
    """Shows the stage of a search, and its best candidate so far, on a line of tqdm."""

    def __init__(self) -> None:
        self._bar = tqdm_bar("", bar_format="{desc}{n_fmt} tried{postfix}, {elapsed}")

    def doing(self, what: str) -> None:
        """Show the stage."""
        self._bar.set_description(what)

    def note(self, text: str) -> None:
        """Print the sentence above the line."""
        self._bar.write(terminal(text), file=sys.stderr)

    def trial(self, found: Trial, best: Trial) -> None:
        """Show how many were tried, and the best."""
        self._bar.set_postfix_str(f"best {best.candidate} ({best.mean:.4g})", refresh=False)
        self._bar.update()


def usual_tune_progress() -> TuneProgress:
    """The progress of searches that name none: a line in a notebook, else nothing."""
    return NotebookTuneProgress() if in_notebook() else TuneProgress()


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
