"""The style of all figures. No global state of matplotlib is used.

The colors are those of M. Okabe and K. Ito, "Color universal design" (2008): distinguishable with any kind of color
vision, and each series has a marker or a line style of its own besides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from actmat.errors import MergeError

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_INK = "#333333"


def new_axes(title: str, *, width: float = 7.2, height: float = 4.4) -> tuple[Figure, Axes]:
    """One pair of axes under a title."""
    figure, panels = new_panels(1, title, width=width, height=height, columns=1)
    return figure, panels[0]


def new_panels(
    count: int, title: str, *, width: float = 9.0, height: float | None = None, columns: int = 4
) -> tuple[Figure, list[Axes]]:
    """Small multiples: `count` axes in rows, with common scales, under one title.

    Raises:
        MergeError: there is nothing to show.
    """
    if count < 1:
        raise MergeError("The figure has no layers: the analysis found no linear layer.")
    columns = min(columns, count)
    rows = math.ceil(count / columns)
    figure = Figure(figsize=(width, height or 0.9 + 1.75 * rows), layout="constrained")
    figure.suptitle(title, fontsize=11, color=_INK)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
    axes: list[Axes] = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    for one in axes[:count]:
        one.spines[["top", "right"]].set_visible(False)
        one.spines[["left", "bottom"]].set_color(_INK)
        one.tick_params(labelsize=8, colors=_INK)
        one.grid(True, axis="y", color="#DDDDDD", linewidth=0.6)
        one.set_axisbelow(True)
        one.minorticks_off()
    # a panel that ends its column shows the numbers of the axis, also where the row below has no panel there
    for index in range(max(0, count - columns), count):
        axes[index].tick_params(labelbottom=True)
    return figure, axes[:count]


def layer_axis(axes: Axes, names: Sequence[str]) -> None:
    """Layers along the horizontal axis, names upright."""
    axes.set_xticks(range(len(names)))
    axes.set_xticklabels(names, rotation=90, fontsize=7)
    axes.set_xlim(-0.6, len(names) - 0.4)


def finish_panels(figure: Figure, panels: Sequence[Axes], names: Sequence[str], x_label: str, y_label: str) -> None:
    """Titles, a logarithmic horizontal axis, labels and one legend for all panels."""
    for axes, name in zip(panels, names, strict=True):
        axes.set_title(name, fontsize=7.5)
    panels[0].set_xscale("log")
    for axes in panels[-min(4, len(panels)) :]:
        axes.set_xlabel(x_label, fontsize=8)
    figure.supylabel(y_label, fontsize=9)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
