"""`interference`: change of every expert's layer outputs by a merge, relative to those outputs.

`E||(W* - W_t) z||^2 / E||W_t z||^2` per expert and layer, `z` the inputs of the layer in expert `t` on its own task. It
needs nothing but weights and Gram matrices: `tr((W* - W_t) C_t (W* - W_t)^T) / tr(W_t C_t W_t^T)`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table
from torch import Tensor

from actmat.errors import RecipeError
from actmat_experiments.analyses.matrices import Grams, Source, grams_of, layers_of, need_experts
from actmat_experiments.analyses.result import Analysis, short_names, shown
from actmat_experiments.core import output_energy
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class InterferenceResult(Analysis):
    """`values`: merged model -> layer -> expert -> relative interference; the base is among the models, as "base"."""

    name = "interference"
    values: Mapping[str, Mapping[str, Mapping[str, float]]]

    def layer_mean(self, model: str, layer: str) -> float:
        """Over experts; NaN where no expert's outputs are known."""
        known = [v for v in self.values[model][layer].values() if not math.isnan(v)]
        return statistics.fmean(known) if known else math.nan

    def task_mean(self, model: str, expert: str) -> float:
        """Over layers."""
        known = [v[expert] for v in self.values[model].values() if not math.isnan(v[expert])]
        return statistics.fmean(known) if known else math.nan

    def mean(self, model: str) -> float:
        """Over layers and experts."""
        known = [v for layer in self.values[model].values() for v in layer.values() if not math.isnan(v)]
        return statistics.fmean(known) if known else math.nan

    def data(self) -> dict[str, Any]:
        """All values and the means of the table."""
        experts = self._experts()
        return {
            "models": {
                model: {
                    "mean": self.mean(model),
                    "experts": {e: self.task_mean(model, e) for e in experts},
                    "layers": {n: dict(v) for n, v in layers.items()},
                }
                for model, layers in self.values.items()
            }
        }

    def tables(self) -> list[Table]:
        """Means over layers, least interference first; and the worst layer of every model."""
        experts = self._experts()
        caption = "E||(W* - W_t) z||^2 / E||W_t z||^2 in %, on expert t's own inputs; mean over layers."
        first = new_table("Interference by expert", caption, "model", [*experts, "mean"])
        second = new_table("Interference by layer", "Mean over experts, in %.", "model", ("mean", "worst", "in layer"))
        for model in sorted(self.values, key=self.mean):
            cells = [self.task_mean(model, e) for e in experts] + [self.mean(model)]
            first.add_row(escape(model), *(f" {shown(100 * c)}" for c in cells))
            layers = {n: self.layer_mean(model, n) for n in self.values[model]}
            worst = max(layers, key=lambda n: layers[n] if not math.isnan(layers[n]) else -1.0)
            name = escape(f" {short_names([worst])[worst]}")
            second.add_row(escape(model), f" {shown(100 * self.mean(model))}", f" {shown(100 * layers[worst])}", name)
        return [first, second]

    def figure(self) -> Figure:
        """Models by layers, mean over experts, as colors on a logarithmic scale."""
        from matplotlib.colors import LogNorm

        from actmat_experiments.harness.figures import new_axes

        models = sorted(self.values, key=self.mean)
        names = list(next(iter(self.values.values())))
        figure, axes = new_axes(
            "What merging does to the experts' layer outputs, mean over experts",
            width=3.2 + 0.42 * len(names),
            height=2.6 + 0.24 * len(models),
        )
        cells = [[100 * self.layer_mean(m, n) for n in names] for m in models]
        positive = [c for row in cells for c in row if c > 0]
        norm = LogNorm(min(positive), max(positive)) if positive else None
        picture = axes.imshow(cells, cmap="cividis", norm=norm, aspect="auto")
        dark = sorted(positive)[len(positive) // 2] if positive else 0.0
        for y, row in enumerate(cells):
            for x, value in enumerate(row):
                axes.text(x, y, shown(value, ".2g"), ha="center", va="center", fontsize=5.5,
                          color="white" if value < dark else "black")  # fmt: skip
        axes.grid(False)
        axes.set_xticks(range(len(names)), list(short_names(names).values()), rotation=90, fontsize=7)
        axes.set_yticks(range(len(models)), [f"{m} ({shown(100 * self.mean(m), '.2g')})" for m in models], fontsize=8)
        axes.set_ylabel("model (mean, %)")
        figure.colorbar(picture, ax=axes, label="interference, %")
        return figure

    def _experts(self) -> list[str]:
        return list(next(iter(next(iter(self.values.values())).values())))


def interference(
    base: Source, experts: Mapping[str, Source], merged: Mapping[str, Source], grams: Grams
) -> InterferenceResult:
    """Relative interference of merged models, and of the base itself.

    Args:
        grams: see `Grams`; sums or means. Layers without Gram matrices of all experts are left out.

    Raises:
        RecipeError: an expert has no Gram matrices, a name stands for two checkpoints, or no layer is left.
        AlignmentError: the checkpoints are not of one base.
    """
    need_experts(experts, grams)
    models = {"base": base, **merged}
    if "base" in merged:
        raise RecipeError("'base' is the name of the base; call the merged model something else.")
    others = {f"expert {n}": s for n, s in experts.items()} | {f"merged {n}": s for n, s in merged.items()}
    values: dict[str, dict[str, dict[str, float]]] = {model: {} for model in models}
    for layer in layers_of(base, others):
        own = grams_of(layer, experts, grams)
        if own is None:
            continue
        weights = {"base": layer.base_OI} | {n: layer.others_OI[f"merged {n}"] for n in merged}
        for model, weight in weights.items():
            values[model][layer.name] = {
                n: relative_interference(weight, layer.others_OI[f"expert {n}"], own[n]) for n in experts
            }
    if not values["base"]:
        raise RecipeError("No linear layer has Gram matrices of all experts: are the statistics of these models?")
    return InterferenceResult(values)


def relative_interference(merged_OI: Tensor, expert_OI: Tensor, gram_II: Tensor) -> float:
    """`E||(W* - W_t) z||^2 / E||W_t z||^2`; NaN where the expert's output is zero.

    `gram_II` may be a sum instead of a mean: its scale cancels.
    """
    energy = output_energy(expert_OI, gram_II)
    difference = output_energy(merged_OI.double() - expert_OI.double(), gram_II)
    return difference / energy if energy else math.nan
