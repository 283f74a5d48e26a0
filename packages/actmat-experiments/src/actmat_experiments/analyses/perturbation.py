"""`perturbation`: how far wrong estimates move a merge, layer by layer, on real checkpoints; a gap and two bounds.

With `S = sum_t C_t`, the merge `D` of least interference under the true Gram matrices, and `D^` under estimates `C^_t`,

    ||(D^ - D) P||_F  <=  ||S^+||_2 ( sum_t ||C_t - C^_t||_F ||D^ - D_t||_2 + ||R||_F )                     (lemma)
                      <=  ||S^+||_2 ( sum_t ||C_t - C^_t||_F (||D^||_2 + ||D_t||_2) + ||R||_F )             (apart)

`P` projects on the inputs that the data has, `R` is what `D^` leaves of its own problem (zero up to its cut-off). The
second form, in which merge and experts stand apart, is the one whose right side needs no difference of weights.
They stand in for Lemma B.3 of the paper, about the same gap, whose larger constants are in `printed`.
docs/analyses/theorem2.md derives both and compares.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from actmat.errors import NumericalError, RecipeError
from actmat_experiments.analyses.angles import gram_of
from actmat_experiments.analyses.matrices import Grams, Source, grams_of, layers_of, need_experts
from actmat_experiments.analyses.result import Analysis, short_names, shown
from actmat_experiments.analyses.theorem2 import best_scale, least_interference, minimizer_gap
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True, slots=True)
class Perturbation:
    """One layer.

    Args:
        gap: `||(D^ - D) P||_F`.
        size: `||D||_F`.
        lemma: the first bound.
        apart: the second bound.
        inverse: `||S^+||_2`, what both multiply.
        errors: expert -> `||C_t - C^_t||_F / ||C_t||_F`.
        rounding: what rounding can add to the gap.
    """

    gap: float
    size: float
    lemma: float
    apart: float
    inverse: float
    errors: Mapping[str, float]
    rounding: float

    @property
    def relative(self) -> float:
        """The gap in units of the merged delta."""
        return self.gap / self.size if self.size else math.nan

    @property
    def tightness(self) -> float:
        """The lemma's bound over the gap; 1 is tight."""
        return self.lemma / self.gap if self.gap else math.inf


def perturbed(
    deltas: Mapping[str, Tensor], grams: Mapping[str, Tensor], estimates: Mapping[str, Tensor]
) -> Perturbation:
    """Gap and bounds of one layer, with both merges at float64's cut-off.

    Args:
        deltas: expert -> `D_t`.
        grams: expert -> `C_t`.
        estimates: expert -> `C^_t`; brought to the scale of the `C_t` together, which changes no merge.
    """
    own = [deltas[n].double() for n in grams]
    true, found = [grams[n].double() for n in grams], [estimates[n].double() for n in grams]
    factor = best_scale(true, found)
    found = [factor * k for k in found]
    merged_OI, least_OI = least_interference(own, found), least_interference(own, true)
    gap = minimizer_gap(merged_OI, own, true, found)
    length = float(torch.linalg.matrix_norm(merged_OI, 2))
    apart = gap.residual + sum(
        error * (length + float(torch.linalg.matrix_norm(d, 2))) for error, d in zip(gap.errors, own, strict=True)
    )
    sizes = [float(torch.linalg.matrix_norm(c)) for c in true]
    return Perturbation(
        gap=gap.gap,
        size=float(torch.linalg.matrix_norm(least_OI)),
        lemma=gap.bound,
        apart=apart / gap.smallest,
        inverse=1 / gap.smallest,
        errors={n: e / s if s else math.nan for n, e, s in zip(grams, gap.errors, sizes, strict=True)},
        rounding=gap.rounding,
    )


@dataclass(frozen=True)
class PerturbationResult(Analysis):
    """Layers by name."""

    name = "perturbation"
    layers: Mapping[str, Perturbation]

    def check(self) -> None:
        """Both inequalities in every layer, up to rounding.

        Raises:
            NumericalError: one does not hold, which would be an error of this package.
        """
        wrong = [
            f"{name}: {what}: {low:.6g} > {high:.6g}"
            for name, p in self.layers.items()
            for what, low, high in (("gap <= lemma", p.gap, p.lemma), ("lemma <= apart", p.lemma, p.apart))
            if not low <= high * (1 + 1e-9) + 1e-12 + p.rounding
        ]
        if wrong:
            raise NumericalError("A bound of the perturbation is violated. It cannot be: please report it.", wrong)

    def data(self) -> dict[str, Any]:
        """All numbers."""
        return {"layers": {n: {**asdict(p), "tightness": p.tightness} for n, p in self.layers.items()}}

    def tables(self) -> list[Table]:
        """Gap, bounds and tightness of every layer."""
        caption = (
            "D: merge with the true Gram matrices, D^: with D_t^T D_t. gap: ||(D^ - D) P||, in units of ||D||;\n"
            "lemma, apart: two bounds of it (smaller than Lemma B.3), in the same units; times: lemma / gap;\n"
            "error: mean over experts of ||C_t - C^_t|| / ||C_t||; |S^+|: what multiplies the errors."
        )
        columns = ("gap", "lemma", "apart", "times", "error", "|S^+|")
        table = new_table("Perturbation of the merge, layer by layer", caption, "layer", columns)
        for name, p in self.layers.items():
            mean = statistics.fmean(p.errors.values())
            units = [x / p.size if p.size else math.nan for x in (p.gap, p.lemma, p.apart)]
            cells = (*units, p.tightness, mean, p.inverse)
            table.add_row(escape(short_names([name])[name]), *(f" {shown(c)}" for c in cells))
        return [table]

    def figure(self) -> Figure:
        """Gap and bounds of every layer on a logarithmic scale."""
        from actmat_experiments.harness.figures import COLORS, MARKERS, layer_axis, new_axes

        names = list(self.layers)
        figure, axes = new_axes("Distance of the merges with estimates and with data, and its bounds", width=9.0)
        for index, (field, label) in enumerate((("gap", "gap"), ("lemma", "lemma"), ("apart", "apart"))):
            values = [getattr(self.layers[n], field) / (self.layers[n].size or math.nan) for n in names]
            axes.plot(range(len(names)), values, MARKERS[index], color=COLORS[index], markersize=4, label=label)
        axes.set_yscale("log")
        axes.set_ylabel("in units of ‖D‖")
        layer_axis(axes, list(short_names(names).values()))
        figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        return figure


def perturbation(base: Source, experts: Mapping[str, Source], grams: Grams) -> PerturbationResult:
    """Every linear map of which all experts have Gram matrices, with `D_t^T D_t` for the estimates.

    Raises:
        RecipeError: an expert has no Gram matrices, or no layer has those of all.
        AlignmentError: the checkpoints are not of one base.
        NumericalError: an inequality does not hold.
    """
    need_experts(experts, grams)
    found = {}
    for layer in layers_of(base, experts):
        own: dict[str, Tensor] | None = grams_of(layer, experts, grams)
        if own is None:
            continue
        deltas = {n: m.double() - layer.base_OI.double() for n, m in layer.others_OI.items()}
        if any(bool(d.any()) for d in deltas.values()):
            found[layer.name] = perturbed(deltas, own, {n: gram_of(d) for n, d in deltas.items()})
    if not found:
        raise RecipeError("No linear layer that the experts have changed has Gram matrices of all of them.")
    result = PerturbationResult(found)
    result.check()
    return result
