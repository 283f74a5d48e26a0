"""Estimates of a layer's input second moment that need no data, and merges by them.

A merge by estimates `G_t` minimises `sum_t tr((D - D_t) G_t (D - D_t)^T)`: `D* = (sum_t D_t G_t) (sum_t G_t)^-1`.
Estimates are brought to mean eigenvalue 1 and mixed with the identity, by which every expert knows a little of all
directions; with the identity only, the merge is the average.

Shapes: `T` experts, `O` out_features, `I` in_features, `R` rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

SHARES = (0.0, 0.1, 0.5, 0.9)
"""Shares of the estimate among which `left_out_share` chooses; the identity has the rest."""


def unit(gram_II: Tensor) -> Tensor:
    """The matrix with mean eigenvalue 1; a zero matrix becomes the identity, which claims nothing.

    >>> unit(torch.diag(torch.tensor([3.0, 1.0]))).diagonal().tolist()
    [1.5, 0.5]
    """
    mean = gram_II.diagonal().mean()
    return gram_II / mean if mean > 0 else torch.eye(len(gram_II), dtype=gram_II.dtype)


def mixed(gram_II: Tensor, share: float, prior_II: Tensor | None = None) -> Tensor:
    """`share` of the estimate and `1 - share` of the prior (default: the identity), both with mean eigenvalue 1."""
    other = torch.eye(len(gram_II), dtype=gram_II.dtype) if prior_II is None else unit(prior_II)
    return share * unit(gram_II) + (1 - share) * other


def delta_gram(delta_OI: Tensor) -> Tensor:
    """`D^T D`: fine-tuning leaves a trace of the inputs in the delta."""
    return delta_OI.mT @ delta_OI


def moved_gram(a_RI: Tensor, start_RI: Tensor, b_OR: Tensor | None = None) -> Tensor:
    """`M^T M` with `M = A - A_0`, the movement of an adapter's `A`, whose gradients are sums of inputs.

    Args:
        b_OR: weights the movement by use, `M^T B^T B M`.

    >>> moved_gram(torch.tensor([[1.0, 3.0]]), torch.tensor([[1.0, 1.0]])).tolist()
    [[0.0, 0.0], [0.0, 4.0]]
    """
    moved_RI = a_RI - start_RI
    return delta_gram(moved_RI if b_OR is None else b_OR @ moved_RI)


def excess_gram(a_RI: Tensor) -> Tensor:
    """The movement of `A` where its start is not known, from the statistics of the start.

    PEFT draws `A_0` uniformly in `+-1/sqrt(I)`, so that its singular values are near `sqrt(1/3)`; the Gram matrix is
    that of the singular directions of `A` with `max(s^2 - edge, 0)`, `edge = (1 + sqrt(R/I))^2 / 3` the
    Marchenko-Pastur edge.
    """
    rank, width = a_RI.shape
    _, s_R, vh_RI = torch.linalg.svd(a_RI, full_matrices=False)
    edge = (1 + math.sqrt(rank / width)) ** 2 / 3
    found_II: Tensor = (vh_RI.mT * (s_R.square() - edge).clamp_min(0)) @ vh_RI
    return found_II


def merge_by(deltas_OI: Sequence[Tensor], grams_II: Sequence[Tensor]) -> Tensor:
    """`D* = (sum_t D_t G_t) (sum_t G_t)^-1`, for Gram matrices whose sum is regular; by its Cholesky factor.

    >>> deltas = [torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 4.0]])]
    >>> merge_by(deltas, [torch.eye(2), torch.eye(2)]).tolist()
    [[1.0, 2.0]]
    """
    total_II = torch.stack(list(grams_II)).sum(0)
    right_OI = sum((d @ g for d, g in zip(deltas_OI, grams_II, strict=True)), torch.zeros_like(deltas_OI[0]))
    solved_IO = torch.cholesky_solve(right_OI.mT, torch.linalg.cholesky(total_II))
    return solved_IO.mT


def alignment(gram_II: Tensor, measured_II: Tensor) -> float:
    """Cosine of an estimate with what was measured: `<G, C> / (||G|| ||C||)`."""
    return float((gram_II * measured_II).sum() / (gram_II.norm() * measured_II.norm()).clamp_min(1e-30))


def left_out_share(
    deltas_OI: Sequence[Mapping[object, Tensor]],
    grams_II: Sequence[Mapping[object, Tensor]],
    shares: Sequence[float] = SHARES,
) -> float:
    """The share at which an expert suffers least that does not speak for itself.

    For every expert in turn its own estimate is replaced by the identity; its interference with the merge, by its own
    estimate, is `sum_layers tr((D - D_t) G_t (D - D_t)^T) / sum_layers tr(D_t G_t D_t^T)`. The share with the least
    mean over experts is returned; one share for all layers.

    Args:
        deltas_OI, grams_II: per expert, by layer.
    """
    losses = []
    for share in shares:
        found = []
        for t, (own_OI, own_II) in enumerate(zip(deltas_OI, grams_II, strict=True)):
            apart = whole = 0.0
            for key, delta_OI in own_OI.items():
                seen = [mixed(g[key], 0.0 if s == t else share) for s, g in enumerate(grams_II)]
                error_OI = merge_by([d[key] for d in deltas_OI], seen) - delta_OI
                gram_II = unit(own_II[key])
                apart += float(((error_OI @ gram_II) * error_OI).sum())
                whole += float(((delta_OI @ gram_II) * delta_OI).sum())
            found.append(apart / max(whole, 1e-30))
        losses.append(sum(found) / len(found))
    return shares[losses.index(min(losses))]
