"""pass@k: the chance that at least one of `k` answers is right, estimated from `n >= k` answers without bias.

Scores have a line per benchmark and `k`, named `add@1`, `add@8`. Tables have a row per model, `@1` and `@k` per
benchmark, as the paper's.

Shapes: `N` problems.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from actmat_experiments.harness.results import Score
from actmat_experiments.harness.table import Z_95, Interval, markdown, new_table, wilson_interval


def pass_at_k(n: int, c: int, k: int) -> float:
    """`1 - C(n - c, k) / C(n, k)` as `1 - prod_{i = n - c + 1}^{n} (1 - k / i)`, which neither overflows nor cancels.

    The share of all sets of `k` of the `n` answers that hold a right one, and so free of bias for answers drawn
    independently. M. Chen et al., "Evaluating large language models trained on code", 2021.

    Args:
        n: answers drawn.
        c: right ones among them.
        k: answers allowed.

    Raises:
        ValueError: not `0 <= c <= n` and `1 <= k <= n`.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k wants 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    if n - c < k:
        return 1.0
    return 1.0 - math.prod(1.0 - k / i for i in range(n - c + 1, n + 1))


@dataclass(frozen=True, slots=True)
class Estimate:
    """pass@k of one benchmark.

    Args:
        interval: mean over problems and its 95 % interval.
    """

    k: int
    interval: Interval
    n_problems: int
    n_samples: int


def estimate(right_N: Sequence[int], n: int, k: int) -> Estimate:
    """Mean of pass@k over problems, `m +- z s / sqrt(N)`, with `s` the standard deviation over problems.

    Only the problems are a random sample: more answers to the same problems narrow the interval only as far as
    they make the score of each problem sharper. A single problem has the interval 0..1.

    Args:
        right_N: right answers per problem.
        n: answers per problem.
        k: answers allowed.
    """
    if not right_N:
        raise ValueError("pass@k of no problems is not defined")
    scores = [pass_at_k(n, c, k) for c in right_N]
    size = len(scores)
    mean = math.fsum(scores) / size
    if size == 1:
        return Estimate(k, Interval(mean, 0.0, 1.0), size, n)
    variance = math.fsum((s - mean) ** 2 for s in scores) / (size - 1)
    if variance == 0.0:  # all problems alike, mostly all or none solved: the normal interval would be a point
        exact = wilson_interval(mean * size, size)
        return Estimate(k, Interval(mean, min(mean, exact.low), max(mean, exact.high)), size, n)
    half = Z_95 * math.sqrt(variance / size)
    return Estimate(k, Interval(mean, max(0.0, mean - half), min(1.0, mean + half)), size, n)


def at(task: str, k: int) -> str:
    """Column of a benchmark at `k` answers."""
    return f"{task}@{k}"


def scores_at_k(right_N: Sequence[int], n_samples: int, ks: Sequence[int], like: Score) -> list[Score]:
    """A line per `k`: `correct` is the sum over problems of the estimate of pass@k, `total` their number.

    Args:
        right_N: right answers per problem.
        n_samples: answers per problem.
        ks: numbers of answers allowed.
        like: all else of the lines; `task` is the benchmark. The 95 % interval and the number of answers are added to
            its `detail`.
    """
    lines = []
    for k in ks:
        found = estimate(right_N, n_samples, k)
        interval = {"low": found.interval.low, "high": found.interval.high, "n_samples": n_samples}
        correct = found.interval.value * found.n_problems
        detail = {**like.detail, **interval}
        lines.append(replace(like, task=at(like.task, k), correct=correct, total=found.n_problems, detail=detail))
    return lines


Columns = Sequence[tuple[str, str]]
"""Task of the scores -> head of the column, in order."""


def at_k_rows(
    scores: Sequence[Score], columns: Columns, order: Sequence[str], cell: Callable[[float, float], str]
) -> list[list[str]]:
    """A row per model: its name and a cell per column, mean over seeds; empty without a score.

    Args:
        scores: of one suite, model, settings and kind of scale.
        order: names of the rows; those without a score are left out.
        cell: text for a share and half its 95 % interval, both in percent (the widest of the seeds).
    """
    found: dict[tuple[str, str], list[Score]] = {}
    for score in scores:
        found.setdefault((score.method, score.task), []).append(score)
    rows = []
    for name in order:
        cells = []
        for task, _ in columns:
            some = found.get((name, task), [])
            if some:
                mean = sum(s.share for s in some) / len(some)
                half = max((s.detail["high"] - s.detail["low"]) / 2 for s in some)
                cells.append(cell(100 * mean, 100 * half))
            else:
                cells.append("")
        if any(cells):
            rows.append([name, *cells])
    return rows


def at_k_table(title: str, scores: Sequence[Score], columns: Columns, order: Sequence[str], caption: str = "") -> Table:
    """For the terminal: percent without intervals, which would not fit."""
    table = new_table(title, caption, "", [head for _, head in columns])
    for row in at_k_rows(scores, columns, order, lambda share, half: f" {share:.1f}"):
        table.add_row(*row)
    return table


def at_k_markdown(scores: Sequence[Score], columns: Columns, order: Sequence[str]) -> str:
    """For a page: percent with half of the 95 % interval."""
    head = ["", *(h.replace("\n", " ") for _, h in columns)]
    rows = at_k_rows(scores, columns, order, lambda share, half: f"{share:.1f} ±{half:.1f}")
    return markdown(head, [[f"`{row[0]}`", *row[1:]] for row in rows])
