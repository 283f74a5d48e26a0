"""Naive float64 oracles of the interference family, and inputs with known spectra."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EPS32 = 2.0**-23


def gaussian(n_experts: int, *shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=source, dtype=torch.float64).to(dtype) for _ in range(n_experts)]


def orthogonal(size: int, seed: int = 0) -> Tensor:
    return torch.linalg.qr(gaussian(1, size, size, seed=seed)[0]).Q


def with_singular_values(values: Tensor, rows: int, columns: int, seed: int = 0) -> Tensor:
    """A matrix with these singular values and random singular vectors."""
    count = values.numel()
    return (orthogonal(rows, seed)[:, :count] * values) @ orthogonal(columns, seed + 1)[:, :count].T


def shared_rows(n_experts: int, size: int, smallest: float, seed: int = 0) -> list[Tensor]:
    """Square deltas with common right singular vectors, so that the spectrum of S is known: T s^2, s from 1 down."""
    s = torch.logspace(0, torch.log10(torch.tensor(smallest)).item(), size, dtype=torch.float64)
    right = orthogonal(size, seed + 99)
    return [(orthogonal(size, seed + t) * s) @ right.T for t in range(n_experts)]


def relative(found: Tensor, expected: Tensor) -> float:
    scale = torch.linalg.vector_norm(expected.double())
    error = torch.linalg.vector_norm(found.double() - expected.double())
    return float(error / scale) if scale > 0 else float(error)


def naive(
    deltas: Sequence[Tensor],
    estimates: Sequence[Tensor],
    *,
    weights: Sequence[float] | None = None,
    response: Callable[[Tensor], Tensor] | None = None,
    rtol: float | None = None,
    fill: Tensor | None = None,
) -> Tensor:
    """`N (I - V f V^T) + B V (f / l) V^T`, term by term; without `response`, f is the hard cut-off."""
    deltas = [d.double() for d in deltas]
    share = [1.0] * len(deltas) if weights is None else weights
    width = deltas[0].shape[-1]
    gram = sum((w * k.double() for w, k in zip(share, estimates, strict=True)), torch.zeros(width, width).double())
    left = sum((w * d @ k.double() for w, d, k in zip(share, deltas, estimates, strict=True)), torch.zeros(()).double())
    values, vectors = torch.linalg.eigh(gram)
    if response is None:
        kept = values > (width * EPS32 if rtol is None else rtol) * values.max()
        f, quotient = kept.double(), torch.where(kept, 1 / values, 0.0)
    else:
        values = values.clamp_min(1e-14 * float(values.max()))
        f = response(values)
        quotient = f / values
    out = left @ (vectors * quotient) @ vectors.T
    if fill is not None:
        out = out + fill @ (torch.eye(width, dtype=torch.float64) - (vectors * f) @ vectors.T)
    return out


def self_grams(deltas: Sequence[Tensor]) -> list[Tensor]:
    return [d.double().T @ d.double() for d in deltas]


class OnePass(Sequence[Tensor]):
    """Deltas that are made when asked for; asking twice for one, or out of order, fails."""

    def __init__(self, deltas: Sequence[Tensor]) -> None:
        self._deltas = deltas
        self._next = 0

    def __len__(self) -> int:
        return len(self._deltas)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if index >= len(self._deltas):
            raise IndexError(index)
        assert index == self._next, f"delta {index} was asked for when {self._next} was due"
        self._next += 1
        return self._deltas[index].clone()
