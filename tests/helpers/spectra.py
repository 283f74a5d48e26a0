"""Matrices with a chosen spectrum, and the distances that the tests of the singular-vector rules use."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from actmat.linalg.lowrank import LowRank


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def orthonormal(rows: int, columns: int, seed: int) -> Tensor:
    """`rows x columns` with orthonormal columns, float64."""
    return torch.linalg.qr(torch.randn(rows, columns, generator=generator(seed), dtype=torch.float64)).Q


def with_spectrum(rows: int, columns: int, spectrum: Sequence[float] | Tensor, seed: int = 0) -> Tensor:
    """`rows x columns` float64 matrix with the given singular values and random singular vectors."""
    s = torch.as_tensor(spectrum, dtype=torch.float64)
    return (orthonormal(rows, len(s), seed) * s) @ orthonormal(columns, len(s), seed + 1000).mT


def graded(rows: int, columns: int, condition: float, seed: int = 0) -> Tensor:
    """Singular values falling geometrically from 1 to `1 / condition`."""
    return with_spectrum(rows, columns, torch.logspace(0, -torch.tensor(condition).log10(), min(rows, columns)), seed)


def random_deltas(n_experts: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    draws = torch.randn(n_experts, *shape, generator=generator(seed), dtype=torch.float64)
    return list(draws.to(dtype).unbind(0))


def random_lowrank(
    n_experts: int, rows: int, columns: int, rank: int, seed: int = 0, batch: tuple[int, ...] = ()
) -> list[LowRank]:
    g = generator(seed)
    return [
        LowRank(
            torch.randn(*batch, rows, rank, generator=g, dtype=torch.float64),
            torch.randn(*batch, rank, columns, generator=g, dtype=torch.float64),
        )
        for _ in range(n_experts)
    ]


def gap(found: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance; absolute where `expected` is zero."""
    scale = float(expected.double().norm())
    return float((found.double() - expected.double()).norm()) / (scale or 1.0)
