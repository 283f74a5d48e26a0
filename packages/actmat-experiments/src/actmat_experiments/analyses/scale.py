"""`scale`: whether the estimates `D_t^T D_t` have one common scale over the tasks.

`kappa_t = ||C_t||_F / ||D_t^T D_t||_F` of a layer. If all `kappa_t` of a layer are equal, merging with the estimates is
merging with matrices of the right size (multiplying all estimates by one number changes nothing); a ratio
`kappa_s / kappa_t` above 1 is the factor by which task `s` counts too little against task `t`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

from actmat_experiments.analyses.matrices import Grams, Source, grams_of, layers_of, need_experts
from actmat_experiments.analyses.result import Analysis, new_table, short_names
from actmat_experiments.linalg.angles import gram_of, relative_scale

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["ScaleResult", "scale"]


@dataclass(frozen=True)
class ScaleResult(Analysis):
    """`kappa`: layer -> expert -> `||C_t||_F / ||D_t^T D_t||_F`."""

    name = "scale"
    kappa: Mapping[str, Mapping[str, float]]

    def ratios(self, layer: str) -> dict[str, float]:
        """`"s / t" -> kappa_s / kappa_t`, the larger one above, of every pair of experts with a delta in this layer."""
        found = {n: k for n, k in self.kappa[layer].items() if 0 < k < math.inf}
        pairs = (sorted(pair, key=lambda n: -found[n]) for pair in itertools.combinations(found, 2))
        return {f"{s} / {t}": found[s] / found[t] for s, t in pairs}

    def data(self) -> dict[str, Any]:
        """Scales and ratios."""
        return {
            "layers": {
                layer: {"kappa": dict(kappa), "ratios": self.ratios(layer)} for layer, kappa in self.kappa.items()
            }
        }

    def tables(self) -> list[Table]:
        """Ratios over pairs of experts, per layer."""
        caption = (
            "Ratios of kappa = ||C||/||D^T D|| over pairs of experts, the larger above the smaller;\n"
            "1.00 everywhere is what merging with the estimates supposes."
        )
        table = new_table("Scale of the estimates", caption, "layer", ("median", "largest", "between"))
        for layer in self.kappa:
            ratios = self.ratios(layer)
            if not ratios:
                table.add_row(escape(short_names([layer])[layer]), "-", "-", "fewer than two deltas")
                continue
            worst = max(ratios, key=lambda pair: ratios[pair])
            middle = statistics.median(ratios.values())
            table.add_row(
                escape(short_names([layer])[layer]), f" {middle:.2f}", f" {ratios[worst]:.2f}", escape(f" {worst}")
            )
        return [table]

    def figure(self) -> Figure:
        """One dot per pair of experts and layer."""
        from matplotlib.ticker import LogLocator

        from actmat_experiments.analyses.figures import COLOURS, layer_axis, new_axes

        figure, axes = new_axes("Is the scale of DᵀD the same for all experts?")
        names = list(self.kappa)
        for x, layer in enumerate(names):
            values = sorted(self.ratios(layer).values())
            spread = [x + 0.5 * (i / max(1, len(values) - 1) - 0.5) for i in range(len(values))]
            axes.plot(spread, values, "o", color=COLOURS[0], markersize=3, alpha=0.7, label=None if x else "a pair")
            if values:
                middle = statistics.median(values)
                axes.plot(
                    [x - 0.35, x + 0.35], [middle] * 2, color=COLOURS[1], linewidth=2, label=None if x else "median"
                )
        axes.axhline(1, color="#333333", linewidth=0.8)
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("κ_s / κ_t, larger above smaller")
        layer_axis(axes, list(short_names(names).values()))
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        return figure


def scale(base: Source, experts: Mapping[str, Source], grams: Grams) -> ScaleResult:
    """`kappa_t` of every layer and expert. Layers without Gram matrices of all experts are left out.

    Args:
        grams: see `Grams`; means, not sums: a sum's scale would be that of the number of tokens.

    Raises:
        RecipeError: an expert has no Gram matrices.
        AlignmentError: the checkpoints are not of one base.
    """
    need_experts(experts, grams)
    kappa = {}
    for layer in layers_of(base, experts):
        own = grams_of(layer, experts, grams)
        if own is not None:
            deltas = {n: m.double() - layer.base_OI.double() for n, m in layer.others_OI.items()}
            kappa[layer.name] = {n: relative_scale(own[n], gram_of(d)) for n, d in deltas.items()}
    return ScaleResult(kappa)
