"""`cosine` and `scale`: how near `D^T D` is to the Gram matrix of the inputs, in direction and in size.

`cosine`: an estimate must beat the identity, which uses no information; Gram matrices measured on 1, 10 and 100
samples stand for a little data. All are compared with a Gram matrix of other data.

`scale`: `kappa_t = ||C_t||_F / ||D_t^T D_t||_F` of a layer. If all `kappa_t` of a layer are equal, merging with the
estimates is merging with matrices of the right size (multiplying all estimates by one number changes nothing); a ratio
`kappa_s / kappa_t` above 1 is the factor by which task `s` counts too little against task `t`.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from actmat_experiments.analyses import angles
from actmat_experiments.analyses.angles import gram_of, relative_scale
from actmat_experiments.analyses.matrices import Grams, Source, grams_of, layers_of, need_experts
from actmat_experiments.analyses.result import Analysis, short_names, shown
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Drawn = Callable[[str, int], Sequence[Mapping[str, Tensor]]]
"""(expert, number of samples) -> for every draw the Gram matrices by name of the linear map."""


@dataclass(frozen=True)
class CosineResult(Analysis):
    """Cosines with the full Gram matrix.

    Args:
        cosines: layer -> estimate ("D^T D", "identity", "1 sample", ...) -> expert -> cosine, for drawn samples the
            mean over the draws.
        n_draws: draws behind a mean.
    """

    name = "cosine"
    cosines: Mapping[str, Mapping[str, Mapping[str, float]]]
    n_draws: int

    def mean(self, layer: str, estimate: str) -> float:
        """Over experts."""
        return statistics.fmean(self.cosines[layer][estimate].values())

    def data(self) -> dict[str, Any]:
        """All cosines."""
        return {"n_draws": self.n_draws, "layers": {n: dict(c) for n, c in self.cosines.items()}}

    def tables(self) -> list[Table]:
        """Means over experts, per layer."""
        estimates = self._estimates()
        caption = (
            "Cosine with the Gram matrix of the inputs, mean over experts.\n"
            "The identity knows nothing; Gram matrices of a few samples are measured on other data."
        )
        table = new_table("Estimates of the Gram matrix", caption, "layer", estimates)
        for layer in self.cosines:
            cells = (f" {shown(self.mean(layer, e), '.3f')}" for e in estimates)
            table.add_row(escape(short_names([layer])[layer]), *cells)
        return [table]

    def figure(self) -> Figure:
        """One marker per estimate and layer, with the range over experts."""
        from actmat_experiments.harness.figures import COLORS, MARKERS, layer_axis, new_axes

        figure, axes = new_axes(
            "How near are estimates to the Gram matrix C of the inputs? Mean and range over experts"
        )
        names, estimates = list(self.cosines), self._estimates()
        for index, estimate in enumerate(estimates):
            shift = 0.7 * ((index + 0.5) / len(estimates) - 0.5)
            x = [i + shift for i in range(len(names))]
            middle = [self.mean(n, estimate) for n in names]
            values = [self.cosines[n][estimate].values() for n in names]
            low = [m - min(v) for m, v in zip(middle, values, strict=True)]
            high = [max(v) - m for m, v in zip(middle, values, strict=True)]
            axes.errorbar(x, middle, [low, high], fmt=MARKERS[index], color=COLORS[index], markersize=4,
                          elinewidth=0.8, label=estimate.replace("^T", "ᵀ"))  # fmt: skip
        axes.set_ylim(0, 1.02)
        axes.set_ylabel("cosine with C")
        layer_axis(axes, list(short_names(names).values()))
        figure.legend(loc="outside lower center", ncols=len(estimates), fontsize=8, frameon=False)
        return figure

    def _estimates(self) -> list[str]:
        return list(next(iter(self.cosines.values()), {}))


def cosine(
    base: Source, experts: Mapping[str, Source], grams: Grams, *, drawn: Drawn | None = None, sizes: Sequence[int] = ()
) -> CosineResult:
    """Cosines per layer and expert. Layers without Gram matrices of all experts are left out.

    Args:
        drawn: gives Gram matrices of a few samples, drawn from other data than `grams`.
        sizes: numbers of samples to ask `drawn` for.

    Raises:
        RecipeError: an expert has no Gram matrices.
        AlignmentError: the checkpoints are not of one base.
    """
    need_experts(experts, grams)
    few = {s: {n: drawn(n, s) for n in experts} for s in sizes} if drawn else {}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for layer in layers_of(base, experts):
        full = grams_of(layer, experts, grams)
        if full is None:
            continue
        deltas = {n: m.double() - layer.base_OI.double() for n, m in layer.others_OI.items()}
        row = {"D^T D": {n: angles.cosine(angles.gram_of(d), full[n]) for n, d in deltas.items()}}
        row["identity"] = {
            n: angles.cosine(torch.eye(len(c), dtype=c.dtype, device=c.device), c) for n, c in full.items()
        }
        for size, draws in few.items():
            row[f"{size} sample{'s' if size > 1 else ''}"] = {
                n: statistics.fmean(angles.cosine(g[layer.name], full[n]) for g in draws[n]) for n in experts
            }
        found[layer.name] = row
    n_draws = max((len(d) for by_expert in few.values() for d in by_expert.values()), default=0)
    return CosineResult(found, n_draws)


@dataclass(frozen=True)
class ScaleResult(Analysis):
    """`kappa`: layer -> expert -> `||C_t||_F / ||D_t^T D_t||_F`."""

    name = "scale"
    kappa: Mapping[str, Mapping[str, float]]

    def ratios(self, layer: str) -> dict[str, float]:
        """`"s / t" -> kappa_s / kappa_t` of every ordered pair of two experts with a delta in this layer (Figure 3)."""
        found = {n: k for n, k in self.kappa[layer].items() if 0 < k < math.inf}
        return {f"{s} / {t}": found[s] / found[t] for s, t in itertools.permutations(found, 2)}

    def larger(self, layer: str) -> dict[str, float]:
        """The ratios with the larger `kappa` above: every pair once, or twice where both are equal."""
        return {pair: ratio for pair, ratio in self.ratios(layer).items() if ratio >= 1}

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
            "Ratios of kappa = ||C||/||D^T D|| over pairs of experts, here the larger above the smaller;\n"
            "1.00 everywhere is what merging with the estimates supposes."
        )
        table = new_table("Scale of the estimates", caption, "layer", ("median", "largest", "between"))
        for layer in self.kappa:
            ratios = self.larger(layer)
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
        """One dot per ordered pair of experts and layer; a bar at the median of the larger over the smaller."""
        from matplotlib.ticker import LogLocator

        from actmat_experiments.harness.figures import COLORS, layer_axis, new_axes

        figure, axes = new_axes("Is the scale of DᵀD the same for all experts?")
        names = list(self.kappa)
        for x, layer in enumerate(names):
            values = sorted(self.ratios(layer).values())
            spread = [x + 0.5 * (i / max(1, len(values) - 1) - 0.5) for i in range(len(values))]
            axes.plot(spread, values, "o", color=COLORS[0], markersize=3, alpha=0.7, label=None if x else "a pair")
            if values:
                middle = statistics.median(self.larger(layer).values())
                axes.plot(
                    [x - 0.35, x + 0.35], [middle] * 2, color=COLORS[1], lw=2, label=None if x else "median above 1"
                )
        axes.axhline(1, color="#333333", linewidth=0.8)
        axes.set_yscale("log")
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_ylabel("κ_s / κ_t")
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
