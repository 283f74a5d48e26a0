"""One picture: every number, its rank correlation with the drop in every family, and the bar."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from actmat_experiments.forecast.verdict import BAR, Candidate

__all__ = ["draw"]


def draw(found: Sequence[Candidate], folder: Path) -> Path:
    """Write `forecast.png` into the folder: a dot with its interval per number and family."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    families = list(found[0].families)
    figure = Figure(figsize=(7.5, 0.32 * len(found) + 1.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for k, family in enumerate(families):
        own = [c.families[family] for c in found]
        height = [len(found) - row + 0.3 - 0.6 * k / max(len(families) - 1, 1) for row in range(len(found))]
        spread = [[c.value - c.low for c in own], [c.high - c.value for c in own]]
        clipped = [[max(v, 0.0) for v in side] for side in spread]
        axes.errorbar([c.value for c in own], height, xerr=clipped, fmt="o", ms=3, lw=0.8, label=family)
    axes.axvline(0, color="black", lw=0.8)
    axes.axvline(BAR, color="black", lw=0.8, ls=":")
    axes.set_yticks([len(found) - row for row in range(len(found))], [c.name for c in found], fontsize=8)
    axes.set_xlim(-1, 1)
    axes.set_ylim(0.3, len(found) + 0.7)
    axes.set_xlabel("Spearman with the measured drop, 95 % interval; dotted: the bar")
    axes.legend(fontsize=7, ncols=min(len(families), 6), loc="lower center", bbox_to_anchor=(0.4, 1.0), frameon=False)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "forecast.png"
    figure.savefig(path, dpi=130)
    return path
