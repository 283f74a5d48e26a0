"""Means over seeds and tasks with 95 % intervals of Student's t.

Both were drawn: other seeds would train other experts, and other tasks of the kind could have been taken. For a table
`d[s, t]` of `S` seeds and `T` tasks with `d[s, t] = m + a[s] + b[t] + e[s, t]` (two-way random effects, one value per
cell) and the mean squares of seeds, tasks and the rest,

    Var(mean) = max(MS_s + MS_t - MS_e, MS_s, MS_t) / (S T)

with the degrees of freedom of Satterthwaite, `(sum c_i MS_i)^2 / sum (c_i MS_i)^2 / df_i` over the mean squares that
are in it (F. E. Satterthwaite, "An approximate distribution of estimates of variance components", 1946). With one seed
it is the interval over tasks, with `T - 1` degrees of freedom.

The questions of a task are a sample, too, and the same in every seed: their noise is part of `b[t]`, so that it counts
where tasks count. An interval over seeds only holds for these tasks and these questions. Fewer than `LEAST_TASKS` tasks
give no interval over tasks: they are too few to estimate a spread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import mean

from scipy.stats import t

LEAST_TASKS = 4
LEAST_HALF = 0.05
"""Half an interval in points below which all values agree by chance: that says nothing of others."""
Points = Mapping[int, Mapping[str, float]]
"""Seed -> task -> points."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean, half the width of its 95 % interval (None of one value, or few tasks) and the degrees of freedom."""

    mean: float
    half: float | None
    df: float

    def text(self, *, sign: bool = False) -> str:
        """One decimal, as in `+2.0 ±2.5`."""
        center = f"{self.mean:+.1f}" if sign else f"{self.mean:.1f}"
        return center if self.half is None or (sign and self.half < LEAST_HALF) else f"{center} ±{self.half:.1f}"


def interval(points: Points) -> Interval:
    """Of the mean over seeds and tasks; all seeds have the same tasks. Of one "task", over seeds only.

    >>> interval({0: {"a": 1.0, "b": 2.0, "c": 3.0, "d": 2.0}}).text(sign=True)
    '+2.0 ±1.3'
    >>> interval({0: {"a": 1.0, "b": 2.0, "c": 3.0}}).text(sign=True)
    '+2.0'
    """
    seeds, tasks = list(points), list(next(iter(points.values())))
    n_seeds, n_tasks = len(seeds), len(tasks)
    center = mean(points[s][k] for s in seeds for k in tasks)
    if 1 < n_tasks < LEAST_TASKS:
        return Interval(center, None, 0)
    by_seed = {s: mean(points[s].values()) for s in seeds}
    by_task = {k: mean(points[s][k] for s in seeds) for k in tasks}
    squares = {
        "seed": n_tasks * sum((v - center) ** 2 for v in by_seed.values()),
        "task": n_seeds * sum((v - center) ** 2 for v in by_task.values()),
        "rest": sum((points[s][k] - by_seed[s] - by_task[k] + center) ** 2 for s in seeds for k in tasks),
    }
    df = {"seed": n_seeds - 1, "task": n_tasks - 1, "rest": (n_seeds - 1) * (n_tasks - 1)}
    ms = {name: squares[name] / df[name] for name in df if df[name]}
    sums = [{"seed": 1.0}, {"task": 1.0}, {"seed": 1.0, "task": 1.0, "rest": -1.0}]
    known = [some for some in sums if set(some) <= set(ms)]
    if not known:
        return Interval(center, None, 0)
    chosen = max(known, key=lambda some: sum(c * ms[n] for n, c in some.items()))
    total = sum(c * ms[n] for n, c in chosen.items())
    spread = sum((c * ms[n]) ** 2 / df[n] for n, c in chosen.items())
    freedom = total**2 / spread if spread else float(min(df[n] for n in chosen))
    return Interval(center, float(t.ppf(0.975, freedom)) * math.sqrt(total / (n_seeds * n_tasks)), freedom)


def paired(one: Points, other: Points) -> Interval | None:
    """Of the differences, seed by seed and task by task, over the seeds that both have; None without one."""
    seeds = [s for s in one if s in other]
    return interval({s: {k: v - other[s][k] for k, v in one[s].items()} for s in seeds}) if seeds else None
