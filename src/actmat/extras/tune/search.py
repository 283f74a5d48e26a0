"""The search: every method at every scale on few inputs, the best on more, then scale, groups and weights together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from actmat.errors import RecipeError, StatisticsError
from actmat.extras.tune.evaluate import Evaluator, Trial
from actmat.extras.tune.space import Candidate, MergeChoice, Space
from actmat.methods import get_method

SHARES = (0.25, 0.5, 1.0)
"""Shares of the inputs of the rounds of successive halving."""
KEPT = 1 / 3
"""Share of the candidates that go on to the next round."""
FEWEST_KEPT = 6
FEWEST_INPUTS = 16
"""Inputs per expert below which every round uses all."""
REFINED = 3
"""Merges whose scale is refined."""
SCALE_STEPS = 6
"""Evaluations of a refined scale, within a factor of `SCALE_RANGE` of the best."""
SCALE_RANGE = 1.5
GROUP_RANGE = (0.5, 1.6)
WEIGHT_RANGE = (0.5, 2.0)


@dataclass
class Budget:
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


def parse_budget(text: str | int | None) -> Budget:
    """`15m`, `2h`, `90s`: time; a number: evaluations.

    >>> parse_budget("15m").seconds, parse_budget(200).evaluations
    (900.0, 200)

    Raises:
        RecipeError: anything else.
    """
    if text is None:
        return Budget()
    written = str(text).strip()
    unit = {"s": 1.0, "m": 60.0, "h": 3600.0}.get(written[-1:])
    number = written[:-1] if unit else written
    if not number.isdecimal() or int(number) < 1:
        raise RecipeError(f"The budget is a number of evaluations (200) or a time (90s, 15m, 2h); found '{written}'.")
    return Budget(seconds=int(number) * unit) if unit else Budget(evaluations=int(number))


@dataclass(frozen=True)
class Varied:
    """Size of a search's inputs, and the numbers that are varied besides the scale.

    Args:
        samples: inputs per expert.
        groups: names of the groups of layers that get a factor of their own.
        weighted: number of experts whose weights are searched; 0: none.
        seed: of the optimiser.
    """

    samples: int
    groups: Sequence[str] = ()
    weighted: int = 0
    seed: int = 0


def search(
    space: Space,
    merges: Sequence[MergeChoice],
    evaluator: Evaluator,
    budget: Budget,
    varied: Varied,
    report: Callable[[Trial], None] = lambda trial: None,
) -> list[Trial]:
    """All trials, in order; the last round's are on all inputs.

    Args:
        merges: choices that could be merged; the first stage tries each at every scale of the space.
        report: called after each trial.

    Raises:
        StatisticsError: the budget ended before any candidate was tried on all inputs.
    """
    trials: list[Trial] = []

    def run(candidate: Candidate, share: float = 1.0) -> Trial:
        found = evaluator.trial(candidate, share)
        budget.used += 1
        trials.append(found)
        report(found)
        return found

    candidates = [Candidate(m, s) for m in merges for s in space.scales]
    shares = SHARES if varied.samples >= FEWEST_INPUTS else (1.0,)
    for number, share in enumerate(shares):
        found = [run(c, share) for c in candidates if not budget.is_spent]
        ranked = [t.candidate for t in sorted(found, key=lambda t: t.mean)]
        if number + 1 < len(shares):
            ranked = ranked[: max(FEWEST_KEPT, math.ceil(KEPT * len(ranked)))]
        candidates = sorted(ranked, key=lambda c: merges.index(c.merge))  # a merge is loaded once in a round
    if not _whole(trials):
        raise StatisticsError(
            "The budget ended before any candidate was tried on all inputs: allow more (--budget), or try fewer "
            "methods."
        )
    for trial in _best_of_each(trials)[:REFINED]:
        _refine_scale(trial.candidate, run, budget.left(SCALE_STEPS))
    for start, vary in _starts(_whole(trials), varied):
        _refine(start, run, budget.left(12 * (len(vary.groups) + vary.weighted)), vary)
    return trials


def _starts(whole: Sequence[Trial], varied: Varied) -> list[tuple[Candidate, Varied]]:
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


def _best_of_each(trials: Sequence[Trial]) -> list[Trial]:
    """The best trial on all inputs of each merge, the best first."""
    best: dict[str, Trial] = {}
    for trial in sorted(_whole(trials), key=lambda t: t.mean):
        best.setdefault(trial.candidate.merge.key, trial)
    return list(best.values())


def _refine_scale(start: Candidate, run: Callable[[Candidate], Trial], steps: int) -> None:
    """Minimise over the scale (Brent's method, bounded, on its logarithm)."""
    if steps < 1:
        return
    from scipy.optimize import minimize_scalar

    def loss(log_scale: float) -> float:
        return run(Candidate(start.merge, float(math.exp(log_scale)))).mean

    middle, reach = math.log(start.scale), math.log(SCALE_RANGE)
    minimize_scalar(loss, bounds=(middle - reach, middle + reach), method="bounded", options={"maxiter": steps})


def _refine(start: Candidate, run: Callable[[Candidate], Trial], steps: int, varied: Varied) -> None:
    """Minimise over scale, factors of groups and weights of experts together, near a candidate (Optuna's TPE)."""
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
            merge = MergeChoice(merge.method, merge.options, weights)
        return run(Candidate(merge, scale, factors)).mean

    sampler = optuna.samplers.TPESampler(seed=varied.seed, multivariate=True, n_startup_trials=4)
    study = optuna.create_study(sampler=sampler)
    centre = {"scale": start.scale} | {f"group {g}": 1.0 for g in varied.groups}
    study.enqueue_trial(centre | {f"weight {t}": 1.0 for t in range(varied.weighted)})
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
