"""Lemma B.3 of the paper with its printed constants, next to the smaller ones of `theorem2`.

    ||W_m - W*||_F  <=  sum_t ||C_t - C^_t||_F (
                            kappa_W kappa_S + kappa_W max{||S^+||_F^2, ||S~^+||_F^2} sum_t ||C^_t||_F )

with `W* = sum_t W_t C_t S^+`, `S = sum_t C_t`, and `W_m`, `S~` the same for the estimates `C^_t`; `kappa_W = max_t
||W_t||_F`, `kappa_S = ||S^+||_F`. It holds for any matrices `W_t`, so for deltas, too. docs/analyses/theorem2.md
compares the two.

Shapes: `T` experts, `O` out_features, `I` in_features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PrintedLemma:
    """Both sides of Lemma B.3 for one layer.

    Args:
        gap: `||W_m - W*||_F`.
        error: `sum_t ||C_t - C^_t||_F`.
        kappa_w: `max_t ||W_t||_F`.
        kappa_s: `||S^+||_F`.
        inverse: `max{||S^+||_F^2, ||S~^+||_F^2}`, the factor of Lemma B.4.
        estimates: `sum_t ||C^_t||_F`.
    """

    gap: float
    error: float
    kappa_w: float
    kappa_s: float
    inverse: float
    estimates: float

    @property
    def bound(self) -> float:
        """The right side."""
        return self.error * (self.kappa_w * self.kappa_s + self.kappa_w * self.inverse * self.estimates)


def printed_lemma(
    weights: Sequence[Tensor], grams: Sequence[Tensor], estimates: Sequence[Tensor], *, dtype: torch.dtype
) -> tuple[PrintedLemma, Tensor]:
    """Both sides in float64, and `W_m`, `O I`.

    Args:
        dtype: precision at whose rounding, `I eps`, the sum of the estimates is cut off (of the `C_t`: float64). What
            is cut off is taken out of the `C^_t`, so that the lemma holds as it stands.

    >>> matrices, gram = [torch.eye(2), -torch.eye(2)], torch.eye(2)
    >>> lemma, _ = printed_lemma(matrices, [gram, gram], [2 * gram, gram], dtype=torch.float64)
    >>> round(lemma.gap, 3), round(lemma.bound, 3)
    (0.471, 5.657)
    """
    matrices_TOI = torch.stack([w.double() for w in weights])
    true_TII, inverse_II = _cut_off(grams, torch.float64)
    found_TII, wrong_II = _cut_off(estimates, dtype)
    merged_OI = (matrices_TOI @ found_TII).sum(0) @ wrong_II
    return PrintedLemma(
        gap=float((merged_OI - (matrices_TOI @ true_TII).sum(0) @ inverse_II).norm()),
        error=float(torch.linalg.matrix_norm(true_TII - found_TII).sum()),
        kappa_w=float(torch.linalg.matrix_norm(matrices_TOI).max()),
        kappa_s=float(inverse_II.norm()),
        inverse=float(max(inverse_II.norm(), wrong_II.norm()) ** 2),
        estimates=float(torch.linalg.matrix_norm(found_TII).sum()),
    ), merged_OI


def _cut_off(terms: Sequence[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Terms on the directions that their sum keeps, `T I I`, and the pseudo-inverse of that sum, `I I`."""
    terms_TII = torch.stack([x.double() for x in terms])
    values_I, vectors_II = torch.linalg.eigh(terms_TII.sum(0))
    kept = values_I > values_I[-1] * len(values_I) * torch.finfo(dtype).eps
    kept_IR = vectors_II[:, kept]
    return terms_TII @ kept_IR @ kept_IR.mT, kept_IR / values_I[kept] @ kept_IR.mT
