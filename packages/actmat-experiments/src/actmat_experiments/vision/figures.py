"""The figure of a vision suite: all methods side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from actmat_experiments.harness.figures import COLORS, new_axes
from actmat_experiments.harness.report import TITLES, latest, show
from actmat_experiments.harness.results import REFERENCES, REGIMES, Regime, Score
from actmat_experiments.harness.table import Line, summarize
from actmat_experiments.suites import TableRequest

_COLORS = {"full": COLORS[0], "lora": COLORS[1]}


def show_and_draw(request: TableRequest) -> None:
    """Print the tables of a suite and, if a folder is given, draw its figures."""
    for figure in draw(request, show(request)):
        if request.console is not None:
            request.console.print(f"drawn: {figure}", highlight=False)


def draw(request: TableRequest, scores: Sequence[Score]) -> list[Path]:
    """Draw the scores of every model, as PNG, into `request.figures`.

    Returns:
        The files.
    """
    if request.figures is None:
        return []
    request.figures.mkdir(parents=True, exist_ok=True)
    drawn = []
    for model in dict.fromkeys(s.model for s in scores):
        name = "-".join(filter(None, [request.suite, model.replace("/", "-")]))
        found = {regime: latest(scores, model, regime)[0] for regime in REGIMES}
        lines = {r: summarize(own, list(dict.fromkeys(s.task for s in own))) for r, own in found.items() if own}
        drawn.append(_bars(lines, request.figures / f"{name}-methods.png"))
    return drawn


def _bars(lines: Mapping[Regime, Sequence[Line]], path: Path) -> Path:
    """Bars per method at the default scale with intervals, a mark at the tuned one; base and experts as lines."""
    order = list(dict.fromkeys(r.method for rows in lines.values() for r in rows if r.method not in REFERENCES))
    figure, axes = new_axes("Test accuracy, mean over tasks", width=max(7.0, 0.42 * len(order) + 1.5))
    width = 0.8 / len(lines)
    for i, (regime, rows) in enumerate(lines.items()):
        default = {r.method: r for r in rows if r.scale == "default"}
        tuned = {r.method: r for r in rows if r.scale == "tuned"}
        at = [k for k, m in enumerate(order) if m in default]
        x = [k + (i - (len(lines) - 1) / 2) * width for k in at]
        own = [default[order[k]] for k in at]
        heights = [100 * r.average.value for r in own]
        halves = [100 * r.average.half for r in own]
        axes.bar(x, heights, width, yerr=halves, color=_COLORS[regime], label=TITLES[regime], error_kw={"lw": 0.8})
        marks = [(a, 100 * tuned[order[k]].average.value) for a, k in zip(x, at, strict=True) if order[k] in tuned]
        label = "scale tuned on validation" if i == 0 else None
        axes.plot(*zip(*marks, strict=True), "k_", ms=7, mew=1.4, label=label) if marks else None
        if "experts" in default:
            value = 100 * default["experts"].average.value
            axes.axhline(value, color=_COLORS[regime], ls="--", lw=1, label=f"experts, {TITLES[regime]}")
        if "base" in default and i == 0:  # one base for all regimes
            axes.axhline(100 * default["base"].average.value, color="black", ls=":", lw=1, label="base")
    axes.set_xticks(range(len(order)), order, rotation=60, ha="right", fontsize=8)
    axes.set_ylabel("test accuracy in %, mean over tasks")
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.legend(fontsize=7, ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    figure.savefig(path, dpi=150)
    return path
