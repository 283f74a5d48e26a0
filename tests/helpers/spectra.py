"""Random matrices and low-rank deltas, orthonormal bases, and matrices with a chosen spectrum. float64 unless told."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from actmat.linalg import krylov, svd
from actmat.linalg.lowrank import LowRank


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def gaussian_of(seed: int) -> Callable[..., Tensor]:
    """A function of a shape that draws from one stream of normal numbers."""
    generator = seeded(seed)
    return lambda *shape: torch.randn(shape, generator=generator, dtype=torch.float64)


def orthonormal(rows: int, columns: int, seed: int) -> Tensor:
    """`rows x columns` with orthonormal columns, float64."""
    return torch.linalg.qr(torch.randn(rows, columns, generator=seeded(seed), dtype=torch.float64)).Q


def orthogonal(size: int, seed: int = 0) -> Tensor:
    """A random orthogonal matrix, float64."""
    return orthonormal(size, size, seed)


def with_spectrum(rows: int, columns: int, spectrum: Sequence[float] | Tensor, seed: int = 0) -> Tensor:
    """`rows x columns` float64 matrix with the given singular values and random singular vectors."""
    s = torch.as_tensor(spectrum, dtype=torch.float64)
    return (orthonormal(rows, len(s), seed) * s) @ orthonormal(columns, len(s), seed + 1000).mT


def symmetric(values: Sequence[float] | Tensor, seed: int = 0) -> Tensor:
    """`N x N` with these eigenvalues, float64."""
    basis = orthogonal(len(values), seed)
    return (basis * torch.as_tensor(values, dtype=torch.float64)) @ basis.T


def graded(rows: int, columns: int, condition: float, seed: int = 0) -> Tensor:
    """Singular values falling geometrically from 1 to `1 / condition`."""
    return with_spectrum(rows, columns, torch.logspace(0, -torch.tensor(condition).log10(), min(rows, columns)), seed)


def shared_rows(n_experts: int, size: int, smallest: float, seed: int = 0) -> list[Tensor]:
    """Square deltas with common right singular vectors, so that the spectrum of S is known: T s^2, s from 1 down."""
    s = torch.logspace(0, torch.log10(torch.tensor(smallest)).item(), size, dtype=torch.float64)
    right = orthogonal(size, seed + 99)
    return [(orthogonal(size, seed + t) * s) @ right.T for t in range(n_experts)]


def random_deltas(n_experts: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Gaussian deltas, each in memory of its own: a product's last bits may depend on where its operands begin."""
    draws = torch.randn(n_experts, *shape, generator=seeded(seed), dtype=torch.float64)
    return [draw.to(dtype, copy=True) for draw in draws]


def random_lowrank(ranks: Sequence[int], *shape: int, seed: int = 0) -> list[LowRank]:
    """A delta of each rank, from Gaussian factors; `shape` is that of the deltas."""
    gaussian, (*batch, rows, columns) = gaussian_of(seed), shape
    return [LowRank(gaussian(*batch, rows, r), gaussian(*batch, r, columns)) for r in ranks]


def attempts_at_parts(monkeypatch: pytest.MonkeyPatch, *, block: int, smallest: int) -> list[bool]:
    """Whether each attempt to decompose a matrix in part succeeds, from this side on and by blocks of this size."""
    attempts: list[bool] = []

    def attempt(*given: Any) -> krylov.Leading | None:
        pairs = krylov.leading(*given)
        attempts.append(pairs is not None)
        return pairs

    monkeypatch.setattr(krylov, "BLOCK", block)
    monkeypatch.setattr(svd, "SMALLEST", smallest)
    monkeypatch.setattr(svd, "leading", attempt)
    return attempts
