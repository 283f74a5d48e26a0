"""Forecasts of rows from models that the forecast has not seen.

Shapes: `N` rows, `F` features.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from actmat_experiments.forecast.correlation import spearman
from actmat_experiments.forecast.rows import Row
from actmat_experiments.linalg.forecast import FEATURES

__all__ = ["COMBINED", "Forecaster", "best_single", "held_out", "ridge", "rule_mean"]

COMBINED = tuple(FEATURES)
"""What the ridge regression and the choice of a single number may use: everything without data."""

Array = NDArray[np.float64]
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
    """What needs no look at the model: the mean drop of the same rule at the same scale and number of experts.

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
