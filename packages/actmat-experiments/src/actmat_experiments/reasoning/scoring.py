"""From right answers per problem to lines of scores: one per benchmark and `k`, named `add@1`, `add@8`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from actmat_experiments.harness.results import Regime, ScaleKind, Score
from actmat_experiments.reasoning.passk import estimate

__all__ = ["at", "scores_at_k"]


def at(task: str, k: int) -> str:
    """Column of a benchmark at `k` answers."""
    return f"{task}@{k}"


def scores_at_k(
    right_N: Sequence[int],
    n_samples: int,
    ks: Sequence[int],
    *,
    task: str,
    suite: str,
    method: str,
    seed: int,
    regime: Regime = "full",
    scale: ScaleKind = "default",
    model: str = "",
    settings: str = "",
    detail: Mapping[str, Any] | None = None,
) -> list[Score]:
    """A line per `k`: `correct` is the sum over problems of the estimate of pass@k, `total` their number.

    Args:
        right_N: right answers per problem.
        n_samples: answers per problem.
        ks: numbers of answers allowed.
        task: the benchmark.
        detail: more that is worth knowing; the 95 % interval and the number of answers are added.
    """
    lines = []
    for k in ks:
        found = estimate(right_N, n_samples, k)
        interval = {"low": found.interval.low, "high": found.interval.high, "n_samples": n_samples}
        lines.append(
            Score(
                suite=suite,
                regime=regime,
                method=method,
                scale=scale,
                task=at(task, k),
                seed=seed,
                correct=found.interval.value * found.n_problems,
                total=found.n_problems,
                model=model,
                settings=settings,
                detail={**(detail or {}), **interval},
            )
        )
    return lines
