"""From scores to tables: per task, averages with intervals, majorities, the paper's figures next to ours."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

from actmat_experiments.harness.results import REFERENCES, ScaleKind, Score

Z_95 = 1.959963984540054
"""97.5 % quantile of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Interval:
    """A share between 0 and 1 and its 95 % interval."""

    value: float
    low: float
    high: float

    @property
    def half(self) -> float:
        """Half its width."""
        return (self.high - self.low) / 2


def wilson_interval(n_right: float, n: int) -> Interval:
    """95 % interval of a share: `(p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)`.

    Unlike the textbook's `p +- z sqrt(p(1-p)/n)` it stays within 0..1 and holds near the ends.
    E. B. Wilson, "Probable inference, the law of succession, and statistical inference", JASA 1927.
    """
    share, z2 = n_right / n, Z_95**2
    center = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return Interval(share, max(0.0, center - half), min(1.0, center + half))


Figure = Mapping[tuple[str, ScaleKind], float]
"""(row, kind of scale) -> the paper's average, in percent."""


@dataclass(frozen=True, slots=True)
class Line:
    """One model of a table: a method at its default or tuned scale, or a reference.

    Args:
        tasks: task -> share of right answers, mean over seeds; its interval is that of the test items.
        average: over tasks and seeds, see `over_tasks`.
        normalized: mean over seeds and tasks of the share divided by the expert's; None without experts.
        seeds: seed -> average over tasks.
        scales: the scales that the seeds were merged at.
        paper: the paper's average as a share, if it has one.
    """

    method: str
    scale: ScaleKind
    tasks: Mapping[str, Interval]
    average: Interval
    normalized: float | None
    seeds: Mapping[int, float]
    scales: Sequence[float] = ()
    paper: float | None = None


def over_tasks(shares_ST: Sequence[Sequence[float]], n_items_T: Sequence[int]) -> Interval:
    """Mean over tasks with test sets of their own, and over seeds: `m +- z sqrt(v_test + v_seed)`.

    `v_test = sum_t p_t (1 - p_t) / n_t / T^2` with `p_t` the mean over seeds, which all answer the same items;
    `v_seed = s^2 / S` with `s` the standard deviation of the seeds' averages, 0 for one seed: then the interval says
    nothing about how another training run would have turned out.
    """
    n_tasks, n_seeds = len(n_items_T), len(shares_ST)
    mean_T = [sum(row[t] for row in shares_ST) / n_seeds for t in range(n_tasks)]
    mean = sum(mean_T) / n_tasks
    v_test = sum(p * (1 - p) / n for p, n in zip(mean_T, n_items_T, strict=True)) / n_tasks**2
    averages = [sum(row) / n_tasks for row in shares_ST]
    v_seed = 0.0 if n_seeds == 1 else sum((a - mean) ** 2 for a in averages) / (n_seeds - 1) / n_seeds
    half = Z_95 * math.sqrt(max(0.0, v_test) + v_seed)
    return Interval(mean, max(0.0, mean - half), min(1.0, mean + half))


def summarize(scores: Sequence[Score], tasks: Sequence[str], paper: Figure | None = None) -> list[Line]:
    """One line per method and kind of scale, references first, then by the average at the default scale.

    Args:
        scores: of one suite, model, regime and settings.
        tasks: of the average; a seed that lacks one of them in a row is not counted in that row.
        paper: figures of the paper.
    """
    found: dict[tuple[str, ScaleKind], dict[int, dict[str, Score]]] = {}
    for score in scores:
        found.setdefault((score.method, score.scale), {}).setdefault(score.seed, {})[score.task] = score
    experts = found.get(("experts", "default"), {})
    lines = []
    for (method, scale), by_seed in found.items():
        whole = {seed: row for seed, row in sorted(by_seed.items()) if all(t in row for t in tasks)}
        if whole:
            figure = (paper or {}).get((method, scale))
            lines.append(_line(method, scale, whole, tasks, experts, None if figure is None else figure / 100))
    reached = {line.method: line.average.value for line in lines if line.scale == "default"}

    def place(line: Line) -> tuple[int, float]:
        if line.method in REFERENCES:
            return REFERENCES.index(line.method), 0.0
        return len(REFERENCES), -reached.get(line.method, line.average.value)

    return sorted(lines, key=place)


def _line(
    method: str,
    scale: ScaleKind,
    by_seed: Mapping[int, Mapping[str, Score]],
    tasks: Sequence[str],
    experts: Mapping[int, Mapping[str, Score]],
    paper: float | None,
) -> Line:
    shares = [[row[t].share for t in tasks] for row in by_seed.values()]
    totals = [min(row[t].total for row in by_seed.values()) for t in tasks]
    ratios = [
        row[t].share / experts[seed][t].share
        for seed, row in by_seed.items()
        for t in tasks
        if t in experts.get(seed, {}) and experts[seed][t].correct
    ]
    means = [sum(column) / len(shares) for column in zip(*shares, strict=True)]
    used = {row[t].detail.get("scale") for row in by_seed.values() for t in tasks}
    return Line(
        method=method,
        scale=scale,
        tasks={t: wilson_interval(m * n, n) for t, m, n in zip(tasks, means, totals, strict=True)},
        average=over_tasks(shares, totals),
        normalized=sum(ratios) / len(ratios) if len(ratios) == len(tasks) * len(by_seed) else None,
        seeds={seed: sum(row) / len(tasks) for seed, row in zip(by_seed, shares, strict=True)},
        scales=sorted(s for s in used if isinstance(s, float)),
        paper=paper,
    )


def average_table(title: str, lines: Sequence[Line], caption: str = "") -> Table:
    """Averages in percent, data-free and tuned scale side by side, with the paper's figures; 80 columns."""
    tuned = {line.method: line for line in lines if line.scale == "tuned"}
    has_paper = any(line.paper is not None for line in lines)
    paper = ["paper"] if has_paper else []
    table = new_table(title, caption, "", ["average", "of expert", *paper, "tuned", "at scale", *paper])
    for line, is_last in _rows(lines):
        other = tuned.get(line.method)
        cells = [_with_half(line.average), _percent(line.normalized), *([_percent(line.paper)] if has_paper else [])]
        cells += [_with_half(other.average), _scales(other)] if other else ["", ""]
        if has_paper:
            cells.append(_percent(other.paper) if other else "")
        table.add_row(line.method, *cells, end_section=is_last)
    return table


def task_table(title: str, lines: Sequence[Line], tasks: Sequence[str]) -> Table:
    """Percent per task at the default scale; the heads of columns are folded to fit 80 columns."""
    table = new_table(title, "", "", _heads([line.method for line in lines], tasks))
    for line, is_last in _rows(lines):
        table.add_row(line.method, *(_percent(line.tasks[t].value) for t in tasks), end_section=is_last)
    return table


def figure_table(title: str, rows: Mapping[str, Sequence[str]], tasks: Sequence[str]) -> Table:
    """Figures from elsewhere per task, as they are written; the heads of columns are folded to fit 80 columns."""
    table = new_table(title, "", "", _heads(list(rows), tasks))
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def _heads(names: Sequence[str], tasks: Sequence[str]) -> list[str]:
    room = max(5, (80 - max(map(len, names), default=0) - 2) // max(1, len(tasks)) - 2)
    return ["\n".join(task[i : i + room] for i in range(0, len(task), room)) for task in tasks]


def markdown_table(lines: Sequence[Line], tasks: Sequence[str]) -> str:
    """All of both tables, for a page. Without a paper's figure anywhere, those columns are left out."""
    has_paper = any(line.paper is not None for line in lines)
    paper = ["paper"] if has_paper else []
    many = any(len(line.seeds) > 1 for line in lines)
    head = ["method", "scale", "average", *(["seeds"] if many else []), "of expert", *paper, *tasks]
    rows = []
    for line in lines:
        scale = "" if line.method in REFERENCES else "default" if line.scale == "default" else f"tuned: {_scales(line)}"
        spread = [" / ".join(_percent(v) for v in line.seeds.values())] if many else []
        cells = [f"`{line.method}`", scale, _with_half(line.average), *spread, _percent(line.normalized)]
        rows.append([*cells, *([_percent(line.paper)] if has_paper else [])])
        rows[-1] += [_percent(line.tasks[t].value) for t in tasks]
    return markdown(head, rows, n_left=2)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]], n_left: int = 1) -> str:
    """A table in Markdown whose first columns are aligned to the left, all others to the right."""
    lines = [head, ["---"] * n_left + ["---:"] * (len(head) - n_left), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def new_table(title: str, caption: str, names: str, columns: Sequence[str]) -> Table:
    """A table for the terminal: a column of names, which folds, and right-aligned cells beside it."""
    table = Table(title=title, caption=caption, caption_justify="left", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)
    table.collapse_padding = True
    table.add_column(names, overflow="fold", justify="left")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _rows(lines: Sequence[Line]) -> list[tuple[Line, bool]]:
    """Lines at the default scale, and whether a rule goes below each."""
    shown = [line for line in lines if line.scale == "default"]
    fixed = [line for line in shown if line.method in REFERENCES]
    return [(line, bool(fixed) and line is fixed[-1]) for line in shown]


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.1f}"


def _with_half(interval: Interval) -> str:
    return f"{100 * interval.value:.1f} ±{100 * interval.half:.1f}"


def _scales(line: Line) -> str:
    return ", ".join(f"{s:g}" for s in line.scales)
