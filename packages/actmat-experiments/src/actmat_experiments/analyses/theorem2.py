"""`theorem2`: expected negative transfer against its bound, on a network with known Lipschitz constants.

    E[negative transfer] <= sum_l gamma_l E[local error of layer l]
                          + sum_l zeta_l sum_t ||C_t - C^_t||_F ||W^ - W_t||_2

The derivation, and every constant, is in docs/analyses/theorem2.md. All expectations are means over the samples given,
so both sides are computed, not estimated.

Shapes: `N` samples, `I` in_features, `O` out_features of a layer, `T` tasks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor

from actmat.errors import NumericalError
from actmat_experiments.analyses.mlp import MLP
from actmat_experiments.analyses.result import Analysis, new_table, shown
from actmat_experiments.linalg.interference import MinimiserGap, best_scale, least_interference, minimiser_gap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["LayerTerms", "Sample", "Theorem2Result", "transfer_bound"]


@dataclass(frozen=True, slots=True)
class Sample:
    """Data of one task.

    Args:
        x: inputs, `N ...`.
        loss_N: from outputs `N O` to the loss of every sample.
        lipschitz: constant of `loss_N` in the outputs (Euclidean norm), for every sample.
    """

    x: Tensor
    loss_N: Callable[[Tensor], Tensor]
    lipschitz: float


@dataclass(frozen=True, slots=True)
class LayerTerms:
    """What one layer adds to the bound.

    Args:
        gamma: `lambda prod_{m > l} ||W^_m||_2`.
        local_error: `E||(W_l - W_t) z + b - b_t||` of the merge with true Gram matrices, mean over tasks.
        merged_error: the same of the merge at hand.
        zeta: `gamma sqrt(tr(S^+) / T)`, `S = sum_t C_t`.
        gap: the lemma's quantities.
    """

    gamma: float
    local_error: float
    merged_error: float
    zeta: float
    gap: MinimiserGap

    @property
    def local_term(self) -> float:
        """`gamma E[local error]`."""
        return self.gamma * self.local_error

    @property
    def estimate_term(self) -> float:
        """`zeta (sum_t ||C_t - C^_t||_F ||W^ - W_t||_2 + residual)`."""
        return self.zeta * self.gap.weighted_error


@dataclass(frozen=True)
class Theorem2Result(Analysis):
    """Both sides of Theorem 2, layer by layer.

    Args:
        settings: what was merged.
        transfer: expected negative transfer, by task.
        layers: in their order.
    """

    name = "theorem2"
    settings: Mapping[str, Any]
    transfer: Mapping[str, float]
    layers: Sequence[LayerTerms]

    @property
    def left(self) -> float:
        """Expected negative transfer: mean over tasks of the loss of the merged model minus the expert's."""
        return statistics.fmean(self.transfer.values())

    @property
    def propagated(self) -> float:
        """`sum_l gamma_l E[local error of the merge at hand]`, between both sides."""
        return sum(t.gamma * t.merged_error for t in self.layers)

    @property
    def local(self) -> float:
        """First sum of the right side."""
        return sum(t.local_term for t in self.layers)

    @property
    def estimates(self) -> float:
        """Second sum of the right side."""
        return sum(t.estimate_term for t in self.layers)

    @property
    def right(self) -> float:
        """The bound."""
        return self.local + self.estimates

    def check(self) -> None:
        """Every inequality of the derivation, up to rounding.

        Raises:
            NumericalError: one does not hold, which would be an error of this package.
        """
        chain = [
            ("left side <= propagated", self.left, self.propagated, 0.0),
            ("propagated <= right side", self.propagated, self.right, 0.0),
        ]
        chain += [(f"lemma in layer {i}", t.gap.gap, t.gap.bound, t.gap.rounding) for i, t in enumerate(self.layers)]
        wrong = [
            f"{what}: {low:.6g} > {high:.6g}"
            for what, low, high, slack in chain
            if not low <= high * (1 + 1e-9) + 1e-12 + slack
        ]
        if wrong:
            raise NumericalError("Theorem 2 is violated. It cannot be: please report it with the settings.", wrong)

    def data(self) -> dict[str, Any]:
        """Both sides and every constant."""
        return {
            "settings": dict(self.settings),
            "left": self.left,
            "propagated": self.propagated,
            "right": {"local": self.local, "estimates": self.estimates, "sum": self.right},
            "transfer": dict(self.transfer),
            "layers": [
                {**asdict(t), "local_term": t.local_term, "estimate_term": t.estimate_term} for t in self.layers
            ],
        }

    def tables(self) -> list[Table]:
        """The sums, and each layer's part."""
        caption = (
            "gamma: Lipschitz constant behind the layer; local: E||(W - W_t) z + b - b_t||, W merged with\n"
            "true Gram matrices; zeta: gamma sqrt(tr(S^+)/T); error: sum_t ||C_t - C^_t|| ||W^ - W_t||;\n"
            "gap <= lemma: distance of the two merges and its bound."
        )
        columns = ("gamma", "local", "zeta", "error", "gamma local", "zeta error", "gap", "lemma")
        table = new_table("Theorem 2, layer by layer", caption, "layer", columns)
        for i, t in enumerate(self.layers):
            cells = (t.gamma, t.local_error, t.zeta, t.gap.weighted_error, t.local_term, t.estimate_term)
            table.add_row(str(i), *(f" {shown(c)}" for c in (*cells, t.gap.gap, t.gap.bound)))
        sums = new_table("Expected negative transfer and its bound", "", "", ("nats",))
        for label, value in (
            ("left side: E[loss of the merged model - loss of the expert]", self.left),
            ("between: sum_l gamma_l E[local error of the merged model]", self.propagated),
            ("right side", self.right),
            ("   sum_l gamma_l E[local error with true Gram matrices]", self.local),
            ("   sum_l zeta_l sum_t ||C_t - C^_t|| ||W^ - W_t||", self.estimates),
        ):
            sums.add_row(escape(label), f" {shown(value, '.4g')}")
        return [table, sums]

    def figure(self) -> Figure:
        """Each layer's two terms, and both sides, on a logarithmic scale."""
        from actmat_experiments.analyses.figures import COLOURS, new_axes

        figure, axes = new_axes("Expected negative transfer and the terms of its bound")
        places = range(len(self.layers))
        axes.bar([p - 0.2 for p in places], [t.local_term for t in self.layers], 0.36, color=COLOURS[0],
                 label="γ · E[local error]")  # fmt: skip
        axes.bar([p + 0.2 for p in places], [t.estimate_term for t in self.layers], 0.36, color=COLOURS[1], hatch="//",
                 edgecolor="white", label="ζ · Σ‖C − Ĉ‖‖Ŵ − W_t‖")  # fmt: skip
        for value, style, label in (
            (self.right, "-", "right side"),
            (self.propagated, "--", "between: errors of the merged model, propagated"),
            (self.left, ":", "left side: expected negative transfer"),
        ):
            if value > 0:
                axes.axhline(value, color="#000000", linestyle=style, linewidth=1.3, label=f"{label}, {shown(value)}")
        axes.set_yscale("log")
        axes.set_xticks(list(places), [f"layer {p}" for p in places])
        axes.set_ylabel("nats")
        figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
        return figure


@torch.no_grad()
def transfer_bound(
    base: MLP,
    experts: Sequence[MLP],
    merged: MLP,
    samples: Mapping[str, Sample],
    settings: Mapping[str, Any] | None = None,
) -> Theorem2Result:
    """Both sides of Theorem 2 for a merge with `C^_t` proportional to `D_t^T D_t`.

    Args:
        experts: one per task, in the order of `samples`.
        merged: any network of the same shape; the bound is meant for the minimiser under the estimates.
        samples: data of every task; expectations are means over it.
    """
    largest = max(s.lipschitz for s in samples.values())
    pairs = list(zip(experts, samples.values(), strict=True))
    inputs = [list(expert.inputs(sample.x)) for expert, sample in pairs]
    norms = [float(torch.linalg.matrix_norm(layer.weight, 2)) for layer in merged.layers]
    terms = []
    for index, (start, end) in enumerate(zip(base.layers, merged.layers, strict=True)):
        own = [expert.layers[index] for expert in experts]
        z_TNI = [z[index] for z in inputs]
        grams = [z_NI.mT @ z_NI / len(z_NI) for z_NI in z_TNI]
        deltas = [layer.weight - start.weight for layer in own]
        found = [delta.mT @ delta for delta in deltas]
        factor = best_scale(grams, found)
        gap = minimiser_gap(end.weight - start.weight, deltas, grams, [factor * k for k in found])
        oracle_OI = start.weight + least_interference(deltas, grams)
        gamma = largest * math.prod(norms[index + 1 :])
        errors = [
            statistics.fmean(
                float(torch.linalg.vector_norm(z_NI @ (w - layer.weight).mT + end.bias - layer.bias, dim=1).mean())
                for z_NI, layer in zip(z_TNI, own, strict=True)
            )
            for w in (oracle_OI, end.weight)
        ]
        zeta = gamma * math.sqrt(gap.trace_inverse / len(pairs))
        terms.append(LayerTerms(gamma, errors[0], errors[1], zeta, gap))
    transfer = {
        name: float((s.loss_N(merged(s.x)) - s.loss_N(expert(s.x))).mean())
        for (name, s), expert in zip(samples.items(), experts, strict=True)
    }
    return Theorem2Result(dict(settings or {}), transfer, terms)
