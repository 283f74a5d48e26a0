"""Checks of what the family sums up: deltas, weights, Gram matrices.

Shapes: `O` out_features, `I` in_features, `B` batch items, `M` rows and `N` columns of any matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from actmat.errors import NumericalError, StatisticsError
from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.interference.rule import weights_problem

__all__ = ["batch_items", "checked_deltas", "checked_grams"]


def batch_items(tensor: Tensor) -> Tensor:
    """`*batch M N` as `B M N`."""
    return tensor.unsqueeze(0) if tensor.dim() == 2 else tensor.flatten(0, -3)


def checked_deltas(
    deltas: Sequence[Tensor], weights: Sequence[float] | None
) -> Iterator[tuple[Tensor, float, list[float]]]:
    """Each delta, once, with its weight and `||D_t||_F^2` per batch item (summed in float64).

    Raises:
        ValueError: no deltas, or weights of the wrong number, negative or not finite.
        NumericalError: a delta holds NaN or infinity.
    """
    if not len(deltas):
        raise ValueError("a merge needs at least one expert; found no delta")
    shares = [1.0] * len(deltas) if weights is None else [float(w) for w in weights]
    if len(shares) != len(deltas):
        raise ValueError(f"expected one weight per expert ({len(deltas)}), found {len(shares)}")
    if problem := weights_problem(shares):
        raise ValueError(problem)
    for index, share in enumerate(shares):  # not over zip, whose result tuple keeps an older delta alive
        delta = deltas[index]
        squares = [frobenius_norm64(m) ** 2 for m in batch_items(delta)]
        if not math.isfinite(sum(squares)):
            raise NumericalError(
                f"expected finite deltas, but that of expert {index} (counted from 0) holds NaN or infinity. "
                "Likely cause: a diverged or damaged expert. Fix: check that checkpoint, or leave the expert out."
            )
        yield delta, share, squares


def checked_grams(grams: Sequence[Tensor], delta: Tensor, index: int) -> Tensor:
    """Gram matrix `index` as `B I I`, with the batch axes of the delta.

    Raises:
        StatisticsError: its shape does not fit the delta.
    """
    gram, width, batch = grams[index], delta.shape[-1], delta.shape[:-2]
    if gram.shape[-2:] != (width, width) or (gram.dim() > 2 and gram.shape[:-2] != batch):
        raise StatisticsError(
            f"expected a Gram matrix of shape ({width}, {width}), one per input feature, or with the batch axes "
            f"{tuple(batch)} before it; expert {index} has {tuple(gram.shape)}. Likely cause: statistics of another "
            "layer or model, or a transposed weight. Fix: collect the statistics again for this model."
        )
    return batch_items(gram.expand(*batch, width, width))
