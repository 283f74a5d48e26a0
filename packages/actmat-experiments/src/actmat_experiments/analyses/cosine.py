"""`cosine`: how near `D^T D` is to the Gram matrix of the inputs, beside the identity and Gram matrices of few samples.

The identity is what an estimate must beat, since it knows nothing; Gram matrices measured on 1, 10 and 100 samples are
what a little data would give. All are compared with a Gram matrix of other data.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from actmat_experiments.analyses.matrices import Grams, Source, grams_of, layers_of, need_experts
from actmat_experiments.analyses.result import Analysis, new_table, short_names, shown
from actmat_experiments.linalg import angles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["CosineResult", "cosine"]

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
        from actmat_experiments.analyses.figures import COLOURS, MARKERS, layer_axis, new_axes

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
            axes.errorbar(x, middle, [low, high], fmt=MARKERS[index], color=COLOURS[index], markersize=4,
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
