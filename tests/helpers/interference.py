"""A naive float64 oracle of the interference family."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

EPS32 = 2.0**-23


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
