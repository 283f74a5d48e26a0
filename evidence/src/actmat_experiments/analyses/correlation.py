"""`correlation`: does the size of a token's gradient depend on its input? Compared with independent tokens.

For every product `z_i z_j` of a layer's inputs, Pearson's correlation over tokens with `||g||^2`, and the root mean
square of these over `i, j`. Theorem 3.1's middle term is zero where `z z^T` and `||g||^2` are uncorrelated. A
correlation estimated from `N` tokens is never exactly zero: chance gives `1 / sqrt(N - 1)`. A level that sinks along
with it as samples are added is chance; one that stays is real.

Shapes: `N` tokens, `I` in_features.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn

from actmat.errors import RecipeError
from actmat_experiments.analyses.monitor import token_rows
from actmat_experiments.analyses.result import Analysis, short_names, shown
from actmat_experiments.analyses.taps import Tap, find_taps, reading
from actmat_experiments.harness.table import new_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def entry_correlations(z_NI: Tensor, size_N: Tensor) -> Tensor:
    """Pearson's correlation over tokens of every product `z_i z_j` with `||g||^2`; `I x I`, symmetric, float64.

    Args:
        z_NI: inputs of a layer, one row per token.
        size_N: `||g||^2` of the same tokens.

    Returns:
        NaN where a product, or the size of the gradient, is the same for all tokens.

    Raises:
        ValueError: fewer than two tokens, or lengths that differ.
    """
    return _correlations(*_products(z_NI, size_N), size_N)


def rms_correlation(correlations_II: Tensor) -> float:
    """Root mean square over the entries on and above the diagonal that are defined; NaN if none is."""
    upper = correlations_II[torch.ones_like(correlations_II, dtype=torch.bool).triu()]
    known = upper[~upper.isnan()]
    return float(known.square().mean().sqrt()) if len(known) else math.nan


def null_rms(n_tokens: int) -> float:
    """`1 / sqrt(N - 1)`: the root mean square correlation where sizes are dealt to the tokens at random.

    Exact for any two samples of numbers: over all `N!` orders the squared correlation has the mean `1 / (N - 1)`.
    """
    return 1 / math.sqrt(n_tokens - 1)


def permuted_rms(z_NI: Tensor, size_N: Tensor, orders: Iterable[Tensor]) -> list[float]:
    """`rms_correlation` after the sizes were put into other orders.

    With orders that move whole samples this is the level for tokens that are alike within a sample, which
    `null_rms` of the number of tokens understates.
    """
    products = _products(z_NI, size_N)
    return [rms_correlation(_correlations(*products, size_N[order])) for order in orders]


def _products(z_NI: Tensor, size_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs, and mean and standard deviation of every product of two of their entries."""
    if len(z_NI) != len(size_N) or len(z_NI) < 2:
        raise ValueError(f"correlations need two or more tokens with a size each; got {len(z_NI)} and {len(size_N)}")
    wide_NI = z_NI.double()
    mean_II = wide_NI.mT @ wide_NI / len(wide_NI)
    squares_NI = wide_NI.square()
    square_II = squares_NI.mT @ squares_NI / len(wide_NI)
    variance_II = square_II - mean_II.square()
    # a product that is constant up to rounding has no correlation with anything
    deviation_II = torch.where(variance_II > 1e-12 * square_II, variance_II, 0.0).sqrt()
    return wide_NI, mean_II, deviation_II


def _correlations(wide_NI: Tensor, mean_II: Tensor, deviation_II: Tensor, size_N: Tensor) -> Tensor:
    centered_N = size_N.double() - size_N.double().mean()
    deviation = centered_N.square().mean().sqrt()
    covariance_II = (wide_NI * centered_N.unsqueeze(1)).mT @ wide_NI / len(wide_NI)
    scale_II = deviation_II * deviation
    return torch.where(scale_II > 0, covariance_II / scale_II, math.nan)


@dataclass(frozen=True, slots=True)
class Level:
    """Correlations of one linear map at one sample size.

    Args:
        rms: root mean square of the correlations over the entries of `z z^T`.
        null_tokens: `1 / sqrt(n_tokens - 1)`, exact for sizes dealt to tokens at random.
        null_samples: mean of `rms` with sizes dealt to whole samples at random, token by token position; keeps
            that tokens of one sample are alike and that positions differ.
        null_samples_95: its 95 % quantile.
    """

    n_samples: int
    n_tokens: int
    rms: float
    null_tokens: float
    null_samples: float
    null_samples_95: float


@dataclass(frozen=True)
class CorrelationResult(Analysis):
    """Levels of every linear map, by sample size; `n_permutations` behind the permuted ones."""

    name = "correlation"
    title: str
    layers: Mapping[str, Sequence[Level]]
    n_permutations: int

    def tables(self) -> list[Table]:
        """The largest sample, per layer."""
        last = next(iter(self.layers.values()))[-1]
        caption = (
            "rms: correlation of z_i z_j with ||g||^2, root mean square over i, j.\n"
            "tokens: level of chance for independent tokens, 1/sqrt(N-1); samples: mean and 95 %\n"
            f"quantile of {self.n_permutations} permutations of whole samples. * marks rms above that quantile."
        )
        title = f"{self.title}: {last.n_samples} samples, {last.n_tokens} tokens"
        table = new_table(title, caption, "layer", ("rms", "tokens", "samples", "95 %", ""))
        for name, levels in self.layers.items():
            level = levels[-1]
            numbers = (level.rms, level.null_tokens, level.null_samples, level.null_samples_95)
            mark = "*" if level.rms > level.null_samples_95 else ""
            table.add_row(escape(short_names([name])[name]), *(f" {shown(x, '.3f')}" for x in numbers), mark)
        return [table]

    def figure(self) -> Figure:
        """One panel per linear map: level over sample size, and both levels of chance."""
        from actmat_experiments.harness.figures import COLORS, finish_panels, new_panels

        names = list(self.layers)
        figure, panels = new_panels(len(names), f"Correlation of zzᵀ with ‖g‖² ({self.title})")
        for axes, name in zip(panels, names, strict=True):
            levels = self.layers[name]
            n = [level.n_samples for level in levels]
            axes.plot(n, [v.rms for v in levels], "o-", color=COLORS[6], markersize=3.5, label="measured (rms)")
            low, high = ([getattr(v, f) for v in levels] for f in ("null_samples", "null_samples_95"))
            axes.plot(n, low, "s--", color=COLORS[1], markersize=3, linewidth=1, label="chance, samples permuted")
            axes.fill_between(n, low, high, color=COLORS[1], alpha=0.25, linewidth=0, label="to its 95 % quantile")
            chance = [v.null_tokens for v in levels]
            axes.plot(n, chance, ":", color=COLORS[0], linewidth=1.4, label="chance, independent tokens")
        panels[0].set_yscale("log")
        panels[0].minorticks_off()
        finish_panels(figure, panels, list(short_names(names).values()), "samples", "correlation, root mean square")
        return figure


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """All tokens of one batch at one linear map, sample by sample: `z_NI` and `||g||^2`."""

    z_NI: Tensor
    size_N: Tensor


def token_records(
    model: nn.Module, loss: Callable[[], Tensor], n_samples: int, *, layers: Sequence[str] | None = None
) -> dict[str, TokenRecord]:
    """Inputs and sizes of output gradients of every token, by linear map; tokens of one sample stand together.

    Args:
        model: read along; its gradients (`.grad`) are left as they were.
        loss: forward pass of one batch; mean or sum over samples.
    """
    taps, _ = find_taps(model, layers=layers)
    records: dict[str, TokenRecord] = {}

    def keep(tap: Tap, z: Tensor, g: Tensor) -> None:
        with torch.no_grad():
            rows_NI, gradients_NO = (_by_sample(token_rows(x, None, tap), n_samples, tap) for x in (z, g))
            for layer in tap.maps:
                size_N = gradients_NO[:, layer.rows_O.to(g.device)].double().square().sum(1)
                records[layer.name] = TokenRecord(rows_NI.double(), size_N)

    def on_call(tap: Tap, z: Tensor, y: Tensor) -> None:
        y.register_hook(lambda g: keep(tap, z.detach(), g))  # type: ignore[no-untyped-call]

    with reading(taps, on_call):
        value = loss()
    watched = [t.weight for t in taps]
    torch.autograd.grad(value, watched, allow_unused=True)
    return {layer.name: records[layer.name] for t in taps for layer in t.maps if layer.name in records}


def correlation(
    model: nn.Module,
    loss: Callable[[int], Tensor],
    sizes: Sequence[int],
    *,
    layers: Sequence[str] | None = None,
    n_permutations: int = 20,
    seed: int = 0,
    title: str = "model",
    on_size: Callable[[], object] = lambda: None,
) -> CorrelationResult:
    """Correlations and their levels of chance, for several numbers of samples.

    Args:
        model: read along, not changed.
        loss: from a number of samples to the loss of a batch of so many, each with the same number of tokens.
        sizes: numbers of samples, ascending.

    Raises:
        RecipeError: fewer than two samples, or samples with different numbers of tokens.
    """
    if not sizes or min(sizes) < 2:
        raise RecipeError(f"A correlation takes two samples or more; got sizes {list(sizes)}.")
    generator = torch.Generator().manual_seed(seed)
    found: dict[str, list[Level]] = {}
    for n_samples in sizes:
        orders = [torch.randperm(n_samples, generator=generator) for _ in range(n_permutations)]
        for name, record in token_records(model, partial(loss, n_samples), n_samples, layers=layers).items():
            found.setdefault(name, []).append(_level(record, n_samples, orders))
        on_size()
    if not found:
        raise RecipeError("No linear layer of the model takes part in the loss.")
    return CorrelationResult(title, found, n_permutations)


def _level(record: TokenRecord, n_samples: int, orders: Sequence[Tensor]) -> Level:
    n_tokens = len(record.size_N)
    place_NL = torch.arange(n_tokens).view(n_samples, -1)
    permuted = permuted_rms(record.z_NI, record.size_N, [place_NL[order].flatten() for order in orders])
    return Level(
        n_samples,
        n_tokens,
        rms_correlation(entry_correlations(record.z_NI, record.size_N)),
        null_rms(n_tokens),
        statistics.fmean(permuted),
        sorted(permuted)[max(0, round(0.95 * len(permuted)) - 1)],
    )


def _by_sample(rows: Tensor, n_samples: int, tap: Tap) -> Tensor:
    """Rows with the tokens of one sample together, whatever order the layer sees them in."""
    if len(rows) % n_samples:
        raise RecipeError(
            f"{tap.weight_name} sees {len(rows)} tokens of {n_samples} samples: samples must have the same number of "
            "tokens. Choose samples of one length, or leave the layer out (layers=...)."
        )
    if not tap.sequence_first:
        return rows
    return rows.view(-1, n_samples, rows.shape[1]).transpose(0, 1).reshape(len(rows), -1)
