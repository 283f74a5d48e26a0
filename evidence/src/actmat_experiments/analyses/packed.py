"""`packed`: the paper's ablation of packed attention, RegMean with and without the split of q, k and v.

Where a model multiplies by packed attention weights without calling a module, hooks on linear layers collect nothing
for them; RegMean then averages its four matrices per layer (row `regmean_packed`). With the split they have statistics
(row `regmean`). The figures are those of the authors' run records and, if there are any, of a suite's scores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from actmat_experiments.analyses.result import Analysis
from actmat_experiments.harness.report import latest
from actmat_experiments.harness.results import read_scores
from actmat_experiments.harness.suite import score_file
from actmat_experiments.harness.table import new_table, summarize
from actmat_experiments.paper import paper_figures, paper_models

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROWS = ("average", "regmean_packed", "regmean")


@dataclass(frozen=True, slots=True)
class Arms:
    """Average accuracies in percent of one model: nothing measured, packed, split; half-intervals where known."""

    values: tuple[float, float, float]
    halves: tuple[float, float, float] | None = None

    @property
    def gain(self) -> float:
        """Accuracy that the split adds, in points."""
        return self.values[2] - self.values[1]


@dataclass(frozen=True)
class PackedResult(Analysis):
    """Arms by model; those of the paper are called "paper, MODEL"."""

    name = "packed"
    arms: Mapping[str, Arms]

    def data(self) -> dict[str, Any]:
        """Values by row, and the gain of the split."""
        return {"rows": list(ROWS), "models": {n: {"values": list(a.values), "halves": a.halves and list(a.halves),
                                                   "gain": a.gain} for n, a in self.arms.items()}}  # fmt: skip

    def tables(self) -> list[Table]:
        """One line per model."""
        caption = "Average test accuracy in percent; packed: attention without statistics is averaged."
        table = new_table("RegMean with packed and with split attention", caption, "model",
                          ("average", "packed", "split", "gain"))  # fmt: skip
        for name, arms in self.arms.items():
            halves = arms.halves or (None,) * 3
            pairs = zip(arms.values, halves, strict=True)
            cells = [f"{v:.1f}" + (f" ±{h:.1f}" if h is not None else "") for v, h in pairs]
            table.add_row(escape(name), *(f" {c}" for c in cells), f" {arms.gain:+.1f}")
        return [table]

    def figure(self) -> Figure:
        """Three bars per model, with intervals where there are any."""
        from actmat_experiments.harness.figures import COLORS, new_axes

        figure, axes = new_axes("RegMean with packed and with split attention")
        names = list(self.arms)
        for index, (label, color) in enumerate(zip(("average", "packed", "split q, k, v"), COLORS[:3], strict=True)):
            places = [i + 0.26 * (index - 1) for i in range(len(names))]
            heights = [self.arms[n].values[index] for n in names]
            errors = [(self.arms[n].halves or (0.0,) * 3)[index] for n in names]
            axes.bar(places, heights, 0.24, color=color, yerr=errors, label=label, error_kw={"linewidth": 0.8})
        axes.set_xticks(range(len(names)), names)
        axes.set_ylabel("average test accuracy, percent")
        axes.set_ylim(0, 100)
        figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        return figure


def packed(cache: Path | None = None) -> PackedResult:
    """The paper's models, and full fine-tuning of every model that a suite has scored in all three rows.

    Args:
        cache: of `actmat experiment run`.
    """
    found = {}
    for model in paper_models():
        figures = paper_figures(model, "full")
        if all((row, "default") in figures for row in ROWS):
            first, second, third = (figures[row, "default"] for row in ROWS)
            found[f"paper, {model}"] = Arms((first, second, third))
    for suite in ("vision", "vision-small") if cache is not None else ():
        scores = read_scores(score_file(cache, suite)) if cache is not None else []
        for model in dict.fromkeys(s.model for s in scores):
            own, _ = latest(scores, model, "full")
            lines = {x.method: x.average for x in summarize(own, list(dict.fromkeys(s.task for s in own)))
                     if x.scale == "default"}  # fmt: skip
            if all(row in lines for row in ROWS):
                a, b, c = (lines[row] for row in ROWS)
                found[", ".join(filter(None, (suite, model)))] = Arms(
                    (100 * a.value, 100 * b.value, 100 * c.value), (100 * a.half, 100 * b.half, 100 * c.half)
                )
    return PackedResult(found)
