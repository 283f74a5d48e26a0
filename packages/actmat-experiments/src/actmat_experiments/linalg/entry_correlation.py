"""Whether the size of a token's gradient depends on its input: correlations of `z_i z_j` with `||g||^2`.

Theorem 1's middle term is zero where `z z^T` and `||g||^2` are uncorrelated. A correlation estimated from `N` tokens is
never exactly zero, so every figure of it needs the level that independence alone would give.

Shapes: `N` tokens, `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["entry_correlations", "null_rms", "permuted_rms", "rms_correlation"]


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
    centred_N = size_N.double() - size_N.double().mean()
    deviation = centred_N.square().mean().sqrt()
    covariance_II = (wide_NI * centred_N.unsqueeze(1)).mT @ wide_NI / len(wide_NI)
    scale_II = deviation_II * deviation
    return torch.where(scale_II > 0, covariance_II / scale_II, math.nan)
