"""`distribution`: absolute correlations of the entries of `z z^T` with `||g||^2`, compared with independent tokens.

The paper shows them as violins per layer. Without the distribution under chance such a picture says nothing: of `N`
tokens without any dependence, half of the absolute correlations exceed `0.67 / sqrt(N)`. Two levels are printed next
to the measured one: the half-normal distribution of independent tokens, and sizes dealt to whole samples at random.

Shapes: `N` tokens, `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from actmat.errors import RecipeError
from actmat_experiments.analyses.correlation import TokenRecord, entry_correlations, token_records
from actmat_experiments.analyses.result import Analysis, short_names, shown
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_ERROR = (0.062707, 0.318639, 0.674490, 1.150349, 1.959964)
"""Quantiles of the absolute value of a standard normal number, at `QUANTILES`."""


def half_normal(n_tokens: int) -> tuple[float, ...]:
    """`QUANTILES` of the absolute correlation of `N` independent tokens: a normal number of variance `1 / (N - 1)`.

    >>> [round(q, 3) for q in half_normal(101)]
    [0.006, 0.032, 0.067, 0.115, 0.196]
    """
    return tuple(e / math.sqrt(n_tokens - 1) for e in _ERROR)


@dataclass(frozen=True, slots=True)
class Spread:
    """Quantiles of the absolute correlations of one linear map, at `QUANTILES`.

    Args:
        measured: over the entries on and above the diagonal.
        samples: the same with sizes dealt to whole samples at random, all permutations together.
        tokens: of independent tokens, analytic.
        above: share of the measured ones above the 95 % quantile of `samples`; 0.05 is chance.
    """

    n_tokens: int
    measured: tuple[float, ...]
    samples: tuple[float, ...]
    tokens: tuple[float, ...]
    above: float


@dataclass(frozen=True)
class DistributionResult(Analysis):
    """Spreads by linear map."""

    name = "distribution"
    title: str
    n_samples: int
    n_permutations: int
    layers: Mapping[str, Spread]

    def data(self) -> dict[str, Any]:
        """Quantiles of every layer."""
        layers = {n: asdict(s) for n, s in self.layers.items()}
        settings = {"title": self.title, "n_samples": self.n_samples, "n_permutations": self.n_permutations}
        return {**settings, "quantiles": list(QUANTILES), "layers": layers}

    def tables(self) -> list[Table]:
        """Medians and upper ends."""
        caption = (
            "Absolute correlation of z_i z_j with ||g||^2 over tokens: median and 95 % quantile over i, j;\n"
            "samples: with the sizes of whole samples permuted; tokens: independent ones, analytic.\n"
            "above: share of entries beyond the 95 % quantile of the permuted ones; 0.05 is chance."
        )
        columns = ("median", "95 %", "samples", "95 %", "tokens", "95 %", "above")
        table = new_table(f"{self.title}: {self.n_samples} samples", caption, "layer", columns)
        for name, spread in self.layers.items():
            numbers = [q[i] for q in (spread.measured, spread.samples, spread.tokens) for i in (2, 4)]
            cells = (*(shown(x, ".3f") for x in numbers), shown(spread.above, ".2f"))
            table.add_row(escape(short_names([name])[name]), *(f" {c}" for c in cells))
        return [table]

    def figure(self) -> Figure:
        """Per layer the middle half and the middle nine tenths, measured and under both chances."""
        from actmat_experiments.harness.figures import COLORS, layer_axis, new_axes

        names = list(self.layers)
        figure, axes = new_axes(f"|correlation| of zzᵀ with ‖g‖², against chance ({self.title})", width=9.0)
        series = (("measured", "measured", COLORS[6]), ("samples permuted", "samples", COLORS[1]),
                  ("independent tokens", "tokens", COLORS[0]))  # fmt: skip
        for index, (label, field, color) in enumerate(series):
            places = [i + 0.26 * (index - 1) for i in range(len(names))]
            rows = [getattr(self.layers[n], field) for n in names]
            axes.vlines(places, [r[0] for r in rows], [r[4] for r in rows], color=color, linewidth=1)
            axes.vlines(places, [r[1] for r in rows], [r[3] for r in rows], color=color, linewidth=4, alpha=0.6)
            axes.plot(places, [r[2] for r in rows], "o", color=color, markersize=3, label=label)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("median, middle 50 % and 90 %")
        layer_axis(axes, list(short_names(names).values()))
        figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
        return figure


def distribution(
    model: nn.Module,
    loss: Callable[[], Tensor],
    n_samples: int,
    *,
    layers: Sequence[str] | None = None,
    n_permutations: int = 5,
    seed: int = 0,
    title: str = "model",
) -> DistributionResult:
    """Distributions of one batch.

    Args:
        model: read along, not changed.
        loss: of a batch of `n_samples` samples, each with the same number of tokens.

    Raises:
        RecipeError: fewer than two samples, or samples with different numbers of tokens.
    """
    if n_samples < 2 or n_permutations < 1:
        raise RecipeError(
            f"A correlation takes two samples or more, chance a permutation or more; got {n_samples}, {n_permutations}."
        )
    generator = torch.Generator().manual_seed(seed)
    orders = [torch.randperm(n_samples, generator=generator) for _ in range(n_permutations)]
    records = token_records(model, loss, n_samples, layers=layers)
    if not records:
        raise RecipeError("No linear layer of the model takes part in the loss.")
    spreads = {name: _spread(record, n_samples, orders) for name, record in records.items()}
    return DistributionResult(title, n_samples, n_permutations, spreads)


def _spread(record: TokenRecord, n_samples: int, orders: Sequence[Tensor]) -> Spread:
    place_NL = torch.arange(len(record.size_N)).view(n_samples, -1)
    measured = _absolute(record.z_NI, record.size_N)
    chance = torch.cat([_absolute(record.z_NI, record.size_N[place_NL[order].flatten()]) for order in orders])
    limit = _quantiles(chance)[-1]
    above = float((measured > limit).double().mean()) if len(measured) else math.nan
    tokens = half_normal(len(record.size_N))
    return Spread(len(record.size_N), _quantiles(measured), _quantiles(chance), tokens, above)


def _absolute(z_NI: Tensor, size_N: Tensor) -> Tensor:
    """Absolute correlations on and above the diagonal that are defined."""
    found_II = entry_correlations(z_NI, size_N)
    upper = found_II[torch.ones_like(found_II, dtype=torch.bool).triu()].abs()
    return upper[~upper.isnan()]


def _quantiles(values: Tensor) -> tuple[float, ...]:
    """At `QUANTILES`, by sorting (`torch.quantile` takes 2^24 values at most)."""
    if not len(values):
        return (math.nan,) * len(QUANTILES)
    ordered = values.sort().values
    return tuple(float(ordered[round(q * (len(ordered) - 1))]) for q in QUANTILES)
