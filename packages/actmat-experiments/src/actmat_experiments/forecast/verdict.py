"""Every candidate against the measured drops: per family, on models it was not fitted to, and whether it holds.

Rows of one expert of one model share its accuracy, its deltas and its task, whatever was merged: they are a *cluster*,
and clusters, not rows, are drawn again. Resampled rows are weights of the rows that there are, so nothing is sorted
twice: with weights `w`, the mean rank of the values equal to `x` is `sum_{x' < x} w + sum_{x' = x} w / 2` (plus a
constant), and Spearman's coefficient is the weighted correlation of these.

Shapes: `N` rows, `F` features, `K` clusters, `G` groups.
C. A. Field and A. H. Welsh, "Bootstrapping clustered data", J. R. Statist. Soc. B 69(3), 2007.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from actmat_experiments.forecast.features import FEATURES
from actmat_experiments.forecast.rows import Row

RESAMPLES = 500
"""Draws of clusters: the ends of a 95 % interval are good to a few hundredths of its width."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Correlation:
    """Spearman's coefficient and the 2.5 % and 97.5 % quantiles of it over resampled clusters.

    Args:
        value, low, high: between -1 and 1; 0 where one side does not vary.
        rows, clusters: how many there were.
    """

    value: float
    low: float
    high: float
    rows: int
    clusters: int

    def __str__(self) -> str:
        return f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def between(
    x: Sequence[float], y: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0, resamples: int = RESAMPLES
) -> Correlation:
    """Spearman's coefficient over all rows.

    Args:
        x, y: one value each per row.
        clusters: to which cluster each row belongs.
    """
    ranks_x, ranks_y = _Ranks(x), _Ranks(y)
    numbers, count = _numbered(clusters)
    drawn = [_correlation(ranks_x(w), ranks_y(w), w) for w in (d[numbers] for d in _draws(count, seed, resamples))]
    ones = np.ones(len(numbers))
    return _with_interval(_correlation(ranks_x(ones), ranks_y(ones), ones), drawn, len(numbers), count)


def within(
    x: Sequence[float],
    y: Sequence[float],
    groups: Sequence[Hashable],
    clusters: Sequence[Hashable],
    *,
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Correlation:
    """Mean of Spearman's coefficient over groups of rows, in which `y` varies and which have three rows at least.

    Args:
        x, y: one value each per row.
        groups: rows are compared within their group alone.
        clusters: of the rows; all rows of a group belong to one.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    where, n_groups = _numbered(groups)
    owner, count = _numbered(clusters)
    values, owners, rows = [], [], 0
    for group in range(n_groups):
        inside = np.flatnonzero(where == group)
        if len(inside) < 3 or np.ptp(ys[inside]) == 0:
            continue
        values.append(spearman(xs[inside], ys[inside]))
        owners.append(owner[inside[0]])
        rows += len(inside)
    if not values:
        return Correlation(0.0, 0.0, 0.0, 0, 0)
    found, place = np.array(values), np.array(owners)
    drawn = []
    for draw in _draws(count, seed, resamples):
        weights = draw[place]
        if weights.sum():
            drawn.append(float(weights @ found / weights.sum()))
    return _with_interval(float(found.mean()), drawn, rows, len(set(owners)))


def spearman(x: Any, y: Any) -> float:
    """Spearman's coefficient with mean ranks for equal values; 0 where one side does not vary."""
    ones = np.ones(len(x))
    return _correlation(_Ranks(x)(ones), _Ranks(y)(ones), ones)


class _Ranks:
    """Mean ranks of fixed values under changing weights."""

    def __init__(self, values: Any) -> None:
        _, self._level, counts = np.unique(
            np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True
        )
        self._levels = len(counts)

    def __call__(self, weights: Array) -> Array:
        held = np.bincount(self._level, weights=weights, minlength=self._levels)
        ranks: Array = (np.cumsum(held) - held / 2)[self._level]
        return ranks


def _correlation(x: Array, y: Array, weights: Array) -> float:
    total = weights.sum()
    if not total:
        return 0.0
    dx, dy = x - weights @ x / total, y - weights @ y / total
    scale = float(np.sqrt((weights @ dx**2) * (weights @ dy**2)))
    return float(weights @ (dx * dy)) / scale if scale > 1e-12 * total else 0.0


def _numbered(labels: Sequence[Hashable]) -> tuple[NDArray[np.int64], int]:
    known: dict[Hashable, int] = {}
    return np.array([known.setdefault(label, len(known)) for label in labels], dtype=np.int64), len(known)


def _draws(count: int, seed: int, resamples: int) -> NDArray[np.float64]:
    """Counts of every cluster in `count` draws with replacement: resamples by clusters."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(count, np.full(count, 1 / count), size=resamples).astype(np.float64)


def _with_interval(value: float, drawn: Sequence[float], rows: int, clusters: int) -> Correlation:
    low, high = np.quantile(np.array(drawn), (0.025, 0.975))
    return Correlation(value, float(low), float(high), rows, clusters)


COMBINED = tuple(FEATURES)
"""Features for the ridge regression and for the choice of a single number: all that need no data."""

Forecaster = Callable[[Sequence[Row], Sequence[Row]], list[float]]
"""`(rows to fit on, rows to forecast) -> forecasts`; drops of the second must not be looked at."""

_RIDGE = 1.0
"""Relative to the number of rows: as much weight as one standardised feature."""
_FLOOR = 1e-6


def held_out(rows: Sequence[Row], fold: Callable[[Row], str], forecaster: Forecaster) -> list[float]:
    """A forecast for every row, by a forecaster fitted on the rows of all other folds."""
    out = [0.0] * len(rows)
    names = [fold(row) for row in rows]
    for name in dict.fromkeys(names):
        known = [row for row, of in zip(rows, names, strict=True) if of != name]
        where = [k for k, of in enumerate(names) if of == name]
        for k, value in zip(where, forecaster(known, [rows[k] for k in where]), strict=True):
            out[k] = value
    return out


def ridge(known: Sequence[Row], wanted: Sequence[Row], names: Sequence[str] = COMBINED) -> list[float]:
    """Ridge regression of the drop on standardised logarithms: `w = (Z^T Z + lambda N I)^{-1} Z^T (y - mean(y))`."""
    fitted, drops = _logs(known, names), np.array([row.drop for row in known])
    mean, spread = fitted.mean(0), fitted.std(0)
    spread[spread == 0] = 1.0
    z = (fitted - mean) / spread
    weights = np.linalg.solve(z.T @ z + _RIDGE * len(known) * np.eye(len(names)), z.T @ (drops - drops.mean()))
    found: list[float] = (((_logs(wanted, names) - mean) / spread) @ weights + drops.mean()).tolist()
    return found


def best_single(known: Sequence[Row], wanted: Sequence[Row], names: Sequence[str] = COMBINED) -> list[float]:
    """The one number that goes best with the drop, on average over the families that are known."""
    families = [[row for row in known if row.family == name] for name in dict.fromkeys(row.family for row in known)]

    def score(name: str) -> float:
        return sum(spearman([r.features[name] for r in rows], [r.drop for r in rows]) for rows in families)

    chosen = max(names, key=score)
    return [row.features[chosen] for row in wanted]


def rule_mean(known: Sequence[Row], wanted: Sequence[Row]) -> list[float]:
    """The mean drop of the same rule at the same scale and number of experts, without a look at the model.

    A combination that is not known has the mean of all.
    """
    drops: dict[tuple[str, float, int], list[float]] = {}
    for row in known:
        drops.setdefault((row.method, row.scale, len(row.experts)), []).append(row.drop)
    everything = float(np.mean([row.drop for row in known]))
    means = {key: float(np.mean(values)) for key, values in drops.items()}
    return [means.get((row.method, row.scale, len(row.experts)), everything) for row in wanted]


def _logs(rows: Sequence[Row], names: Sequence[str]) -> Array:
    """Logarithms, so that ratios of norms add up; angles and shares not taken, which may be negative, as they are."""
    values = np.array([[row.features[name] for name in names] for row in rows])
    signed = np.array([name in ("misalignment", "angle") for name in names])
    return np.where(signed, values, np.log(np.maximum(values, _FLOOR)))


BAR = 0.3
"""Least value for the lower end of every family's interval; fixed before anything was measured."""

See = Callable[[list[Row], list[float]], Correlation]

WITH_DATA = ("activation_residual", "activation_error", "disagreement", "divergence")
"""Numbers that a few unlabelled inputs give."""

_FITTED: Mapping[str, tuple[Forecaster, str]] = {
    "best_single": (best_single, "the data-free number that did best on the families that were seen"),
    "ridge": (ridge, "ridge regression on the logarithms of all data-free numbers"),
    "rule_mean": (rule_mean, "mean drop of the same rule, scale and number of experts: looks at no weights"),
}


@dataclass(frozen=True, slots=True)
class Candidate:
    """One number, and how it goes with the drop; positive is right.

    Args:
        kind: "data-free", "unlabelled data", or "fitted" on other families (other regimes, in `regimes`).
        families: Spearman over all rows of each family.
        rules: within each expert and subset of a family, over rules and scales: which merge is best for this expert?
        experts: within each merge of a family, over experts: which expert loses most?
        regimes: over all rows of full fine-tuning, and of LoRA; what is fitted saw the other one alone.
    """

    name: str
    kind: str
    families: Mapping[str, Correlation]
    rules: Mapping[str, Correlation]
    experts: Mapping[str, Correlation]
    regimes: Mapping[str, Correlation]

    @property
    def worst(self) -> float:
        """Smallest coefficient of a family."""
        return min(c.value for c in self.families.values())

    @property
    def holds(self) -> bool:
        """True if every interval lies above the bar, over all rows and between rules."""
        return all(c.low > BAR for view in (self.families, self.rules) for c in view.values())


def judge(rows: Sequence[Row], *, resamples: int = RESAMPLES) -> list[Candidate]:
    """All candidates, best first by their worst family; those of a kind together."""
    columns = candidates(rows)
    found = [_judge(name, kind, values, regimes, rows, resamples) for name, (kind, values, regimes) in columns.items()]
    kinds = list(dict.fromkeys(c.kind for c in found))
    return sorted(found, key=lambda c: (kinds.index(c.kind), -c.worst))


def candidates(rows: Sequence[Row]) -> dict[str, tuple[str, list[float], list[float]]]:
    """name -> kind, a value per row, and one by what saw the other regime alone (the same where nothing is fitted)."""
    out: dict[str, tuple[str, list[float], list[float]]] = {}
    for kind, names in (("data-free", tuple(FEATURES)), ("unlabelled data", WITH_DATA)):
        for name in names:
            values = [row.features[name] for row in rows]
            out[name] = (kind, values, values)
    for name, (forecaster, _) in _FITTED.items():
        apart = [held_out(rows, fold, forecaster) for fold in (lambda r: r.family, regime)]
        out[name] = ("fitted", apart[0], apart[1])
    return out


def regime(row: Row) -> str:
    """Regime of a row's experts, by the name of the family."""
    return "lora" if row.family.startswith("lora") else "full"


def _judge(
    name: str, kind: str, values: Sequence[float], apart: Sequence[float], rows: Sequence[Row], resamples: int
) -> Candidate:
    def over(names: Callable[[Row], str], see: See, x: Sequence[float]) -> dict[str, Correlation]:
        out = {}
        for part in dict.fromkeys(map(names, rows)):
            chosen = [k for k, row in enumerate(rows) if names(row) == part]
            out[part] = see([rows[k] for k in chosen], [x[k] for k in chosen])
        return out

    def pooled(of: list[Row], x: list[float]) -> Correlation:
        return between(x, _drops(of), [(r.model, r.task) for r in of], resamples=resamples)

    def by_rule(of: list[Row], x: list[float]) -> Correlation:
        groups = [(r.model, r.experts, r.task) for r in of]
        return within(x, _drops(of), groups, [(r.model, r.task) for r in of], resamples=resamples)

    def by_expert(of: list[Row], x: list[float]) -> Correlation:
        groups = [(r.model, r.experts, r.method, r.scale) for r in of]
        return within(x, _drops(of), groups, [(r.model, r.experts) for r in of], resamples=resamples)

    def family(row: Row) -> str:
        return row.family

    return Candidate(
        name=name,
        kind=kind,
        families=over(family, pooled, values),
        rules=over(family, by_rule, values),
        experts=over(family, by_expert, values),
        regimes=over(regime, pooled, apart),
    )


def _drops(rows: Sequence[Row]) -> list[float]:
    return [row.drop for row in rows]
