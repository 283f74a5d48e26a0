"""What a change of weights does to a layer's outputs, and how far wrong Gram matrices move a merge.

Shapes: `T` experts, `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.linalg.outputs import output_energy

__all__ = [
    "MinimiserGap",
    "best_scale",
    "least_interference",
    "minimiser_gap",
    "relative_interference",
]

EPS = torch.finfo(torch.float64).eps


def relative_interference(merged_OI: Tensor, expert_OI: Tensor, gram_II: Tensor) -> float:
    """`E||(W* - W_t) z||^2 / E||W_t z||^2`; NaN where the expert's output is zero.

    `gram_II` may be a sum instead of a mean: its scale cancels.
    """
    energy = output_energy(expert_OI, gram_II)
    difference = output_energy(merged_OI.double() - expert_OI.double(), gram_II)
    return difference / energy if energy else math.nan


def least_interference(deltas: Sequence[Tensor], grams: Sequence[Tensor]) -> Tensor:
    """`(sum_t D_t C_t)(sum_t C_t)^+`, of all minimisers of `sum_t tr((D - D_t) C_t (D - D_t)^T)` the smallest, float64.

    For analyses of small layers: plain normal equations with a cut-off at float64's rounding, no options.
    """
    left_OI = _total([d.double() @ c.double() for d, c in zip(deltas, grams, strict=True)])
    merged_OI: Tensor = left_OI @ torch.linalg.pinv(_total(grams), hermitian=True)
    return merged_OI


def best_scale(grams: Sequence[Tensor], estimates: Sequence[Tensor]) -> float:
    """The number `a` for which `sum_t ||C_t - a C^_t||_F^2` is least; multiplying all estimates changes no merge."""
    product = sum(float((c.double() * k.double()).sum()) for c, k in zip(grams, estimates, strict=True))
    square = sum(float(k.double().square().sum()) for k in estimates)
    return product / square if square else 0.0


@dataclass(frozen=True, slots=True)
class MinimiserGap:
    """How far apart two merged deltas are, and how far they can be.

    Args:
        gap: `||D^ - D||_F` on the inputs that the true Gram matrices know.
        bound: `sum_t ||D^ - D_t||_2 ||C_t - C^_t||_F / l_min`, plus the residual's part.
        errors: `||C_t - C^_t||_F` of every expert.
        distances: `||D^ - D_t||_2` of every expert.
        residual: `||sum_t (D^ - D_t) C^_t||_F`, zero for the exact minimiser of the estimated problem.
        smallest: `l_min`, smallest eigenvalue of `sum_t C_t` above rounding; infinite where all inputs are zero.
        trace_inverse: `tr((sum_t C_t)^+)`.
        rounding: what rounding can add to the gap, `I eps ||D||_F l_max / l_min`.
    """

    gap: float
    bound: float
    errors: tuple[float, ...]
    distances: tuple[float, ...]
    residual: float
    smallest: float
    trace_inverse: float
    rounding: float = 0.0

    @property
    def weighted_error(self) -> float:
        """`sum_t ||D^ - D_t||_2 ||C_t - C^_t||_F`, and the residual: what the inverse of `sum_t C_t` multiplies."""
        return sum(e * d for e, d in zip(self.errors, self.distances, strict=True)) + self.residual


def minimiser_gap(
    merged_OI: Tensor, deltas: Sequence[Tensor], grams: Sequence[Tensor], estimates: Sequence[Tensor]
) -> MinimiserGap:
    """The lemma: `(D^ - D) S = sum_t (D^ - D_t)(C_t - C^_t) + R`, with `S = sum_t C_t` and the residual `R` of `D^`.

    Both sides of the resulting inequality. It holds for any `D^`, and is of use where `D^` nearly minimises the
    interference under the estimates `C^_t`, so that `R = sum_t (D^ - D_t) C^_t` is small. docs/analyses/theorem2.md
    derives it.

    Args:
        merged_OI: `D^`.
        deltas: `D_t`.
        grams: `C_t`.
        estimates: `C^_t`, on the scale of the `C_t` (`best_scale`).
    """
    merged = merged_OI.double()
    total_II = _total(grams)
    values_I, vectors_II = torch.linalg.eigh(total_II)
    kept = values_I > values_I[-1] * len(values_I) * EPS
    seen_IR = vectors_II[:, kept]
    errors, distances = [], []
    residual_OI = torch.zeros_like(merged)
    for delta, gram, estimate in zip(deltas, grams, estimates, strict=True):
        difference_OI = merged - delta.double()
        errors.append(float(torch.linalg.matrix_norm(gram.double() - estimate.double())))
        distances.append(float(torch.linalg.matrix_norm(difference_OI, 2)))
        residual_OI += difference_OI @ estimate.double()
    smallest = float(values_I[kept].min()) if bool(kept.any()) else math.inf  # no input, no direction to differ in
    residual = float(torch.linalg.matrix_norm(residual_OI))
    weighted = sum(e * d for e, d in zip(errors, distances, strict=True)) + residual
    least_OI = least_interference(deltas, grams)
    condition = float(values_I[-1]) / smallest
    return MinimiserGap(
        gap=float(torch.linalg.matrix_norm((merged - least_OI) @ seen_IR)),
        bound=weighted / smallest,
        errors=tuple(errors),
        distances=tuple(distances),
        residual=residual,
        smallest=smallest,
        trace_inverse=float((1 / values_I[kept]).sum()),
        rounding=len(values_I) * EPS * condition * float(torch.linalg.matrix_norm(least_OI)),
    )


def _total(terms: Sequence[Tensor]) -> Tensor:
    return torch.stack([x.double() for x in terms]).sum(0)
