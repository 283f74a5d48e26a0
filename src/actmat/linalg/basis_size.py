"""Size of a Krylov basis, before it is grown: by the same iteration in one vector, on a spectrum of few values.

A block of `B` random vectors meets `N` eigenvalues as one vector meets `N / B` of them: which directions are exact
depends on the shape of the spectrum and on the share of `N` that the basis has. So Lanczos' iteration with a single
vector, on `N / B` values that stand for the whole spectrum, tells after which share the wanted pairs are exact, for a
ten-thousandth of the price. The values are quantiles of the spectrum, estimated from the first blocks
(`linalg.krylov`).

Sources: A. Kuijlaars, "Convergence analysis of Krylov subspace iterations with methods from potential theory", SIAM
Review 48, 2006 (which pairs are exact at which share); G. Golub, C. Van Loan, "Matrix Computations", 4th ed., section
10.1.

Shapes: `N` side of the matrix, `J` Ritz values of a first look, `M = N / B` values that stand for all, `D` steps.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["basis_for", "quantile"]

BLOCKS_MORE = 1.15
"""Need of a block above that of a single vector, for the same share, about (`benchmarks/basis_size.py`)."""

SMALLEST_VALUE = 1e-18
"""Relative size below which eigenvalues are rounding; they take part as this."""


def basis_for(values_J: Tensor, counts_J: Tensor, wanted: float, tolerance: float, block: int, limit: float) -> float:
    """Vectors after which the `wanted` leading pairs have residuals below `tolerance`; infinity if above `limit`.

    Args:
        values_J: Ritz values, descending.
        counts_J: how many eigenvalues each stands for; their sum is the side of the matrix.

    >>> falling, side = torch.logspace(0, -8, 60, dtype=torch.float64), 600.0
    >>> alike = torch.full((60,), 10.0, dtype=torch.float64)
    >>> 120 < basis_for(falling, alike, 60, 1e-6, 10, side) < 240
    True
    """
    size = float(counts_J.sum())
    if wanted <= 0 or float(values_J[0]) <= 0:
        return 0.0
    values_M = _quantiles(values_J, counts_J, max(1, round(size / block)))
    first = math.ceil(wanted / block)
    last = min(len(values_M), math.floor(limit / (BLOCKS_MORE * block)))
    if first > last:
        return math.inf
    t_DD = _lanczos(values_M, last)
    for steps in range(first, last + 1):
        _, vectors = torch.linalg.eigh(t_DD[:steps, :steps])
        residuals = t_DD[steps, steps - 1].abs() * vectors[-1, -first:].abs()
        if float(residuals.max()) <= tolerance:
            return BLOCKS_MORE * steps * block
    return math.inf


def quantile(values_J: Tensor, counts_J: Tensor, rank: float) -> float:
    """Estimate of the eigenvalue of this rank, counted from the largest."""
    return float(_at(values_J, counts_J, torch.tensor([rank], dtype=torch.float64)))


def _quantiles(values_J: Tensor, counts_J: Tensor, count: int) -> Tensor:
    """So many values that stand for equal shares of the spectrum."""
    return _at(values_J, counts_J, (torch.arange(count, dtype=torch.float64) + 0.5) * (float(counts_J.sum()) / count))


def _at(values_J: Tensor, counts_J: Tensor, at_M: Tensor) -> Tensor:
    """Eigenvalues at these ranks, by interpolation of the logarithms."""
    values_J, counts_J = values_J.cpu(), counts_J.cpu()
    middles_J = counts_J.cumsum(0) - counts_J / 2
    after_M = torch.searchsorted(middles_J, at_M).clamp(1, max(1, len(middles_J) - 1))
    share_M = ((at_M - middles_J[after_M - 1]) / (middles_J[after_M] - middles_J[after_M - 1])).clamp(0, 1)
    logs_J = values_J.clamp_min(SMALLEST_VALUE * float(values_J[0])).log()
    return torch.lerp(logs_J[after_M - 1], logs_J[after_M], share_M).exp()


def _lanczos(values_M: Tensor, steps: int) -> Tensor:
    """The tridiagonal matrix, `steps + 1` on a side, of the diagonal matrix of these and a vector of ones."""
    size = len(values_M)
    t_DD = values_M.new_zeros(steps + 1, steps + 1)
    basis_DM = values_M.new_zeros(steps + 1, size)
    basis_DM[0] = 1 / math.sqrt(size)
    for step in range(steps):
        new_M = values_M * basis_DM[step]
        t_DD[step, step] = new_M @ basis_DM[step]
        for _ in range(2):  # twice is enough to be orthogonal to rounding
            new_M = new_M - (basis_DM[: step + 1] @ new_M) @ basis_DM[: step + 1]
        length = torch.linalg.vector_norm(new_M)
        t_DD[step, step + 1] = t_DD[step + 1, step] = length
        if float(length) > 0:
            basis_DM[step + 1] = new_M / length
    return t_DD
