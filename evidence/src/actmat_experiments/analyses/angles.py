"""Angles between matrices, and the three error terms that they bound (Theorem 3.1 of the ACTMat paper).

A matrix is a vector of its entries: `<A, B> = tr(A^T B)`, and `angle(A, B) = arccos(<A, B> / (||A||_F ||B||_F))` is the
length of an arc on the unit sphere. It obeys the triangle inequality, which is all that Theorem 3.1 uses. Between
positive semi-definite matrices `<A, B> >= 0`, so no such angle exceeds `pi / 2`: a bound beyond that says nothing.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

RIGHT_ANGLE = math.pi / 2
"""The largest angle between positive semi-definite matrices."""


def angle(a: Tensor, b: Tensor) -> float:
    """Angle between two matrices in `[0, pi]`, in float64; NaN where one of them is zero (it has no direction).

    `2 atan2(||u - v||, ||u + v||)` of the unit vectors, which unlike `arccos` keeps all digits near 0 and `pi`.
    W. Kahan, "How futile are mindless assessments of roundoff in floating-point computation?", 2006, section 12.

    Raises:
        ValueError: the shapes differ.
    """
    if a.shape != b.shape:
        raise ValueError(f"an angle lies between matrices of one shape; got {tuple(a.shape)} and {tuple(b.shape)}")
    u, v = (_unit(x) for x in (a, b))
    return 2 * math.atan2(float(torch.linalg.vector_norm(u - v)), float(torch.linalg.vector_norm(u + v)))


def cosine(a: Tensor, b: Tensor) -> float:
    """`<A, B> / (||A||_F ||B||_F)` in float64; NaN where one of them is zero."""
    return float((_unit(a) * _unit(b)).sum())


def relative_scale(gram_II: Tensor, estimate_II: Tensor) -> float:
    """`kappa = ||C||_F / ||C^||_F`, a Gram matrix against its estimate; infinite for a zero estimate."""
    size = float(torch.linalg.vector_norm(estimate_II.double()))
    return float(torch.linalg.vector_norm(gram_II.double())) / size if size else math.inf


def gram_of(matrix_OI: Tensor) -> Tensor:
    """`A^T A` in float64."""
    wide = matrix_OI.double()
    return wide.mT @ wide


@dataclass(frozen=True, slots=True)
class DriftAngles:
    """Angles of the estimate `D^T D` with the Gram matrix `C`, and of the steps from one to the other; radians.

    Args:
        estimate: `angle(D^T D, C)`.
        optimizer: `angle(D^T D, G^T G)`: what makes the delta another direction than the summed gradient. Zero for
            gradient descent with a fixed step, where `D = -eta G`.
        cross: `angle(G^T G, S)`: products of gradients of different tokens and steps.
        correlation: `angle(S, S~)`: the size of a token's gradient depends on its input.
        drift: `angle(S~, C)`: inputs change while lower layers are trained.
        identity: `angle(1, C)`, of an estimate that knows nothing.
    """

    estimate: float
    optimizer: float
    cross: float
    correlation: float
    drift: float
    identity: float

    @property
    def bound(self) -> float:
        """`e_cross + e_corr + e_drift`: Theorem 3.1's right-hand side."""
        return self.cross + self.correlation + self.drift

    @property
    def full_bound(self) -> float:
        """The same and the optimizer's angle: holds for any optimizer, and is Theorem 3.1 where that angle is zero."""
        return self.optimizer + self.bound


def drift_angles(
    delta_OI: Tensor, gradient_OI: Tensor, second_II: Tensor, decoupled_II: Tensor, gram_II: Tensor
) -> DriftAngles:
    """Theorem 3.1's angles from accumulated matrices.

    Args:
        delta_OI: `D = W_K - W_0`.
        gradient_OI: `G = sum_k E[g z^T]`.
        second_II: `S = sum_k E[z z^T ||g||^2]`.
        decoupled_II: `S~ = sum_k E[z z^T] E||g||^2`.
        gram_II: `C = E[z z^T]` at the final weights.
    """
    estimate_II, gradients_II = gram_of(delta_OI), gram_of(gradient_OI)
    return DriftAngles(
        estimate=angle(estimate_II, gram_II),
        optimizer=angle(estimate_II, gradients_II),
        cross=angle(gradients_II, second_II),
        correlation=angle(second_II, decoupled_II),
        drift=angle(decoupled_II, gram_II),
        identity=angle(torch.eye(gram_II.shape[-1], dtype=torch.float64, device=gram_II.device), gram_II),
    )


def _unit(x: Tensor) -> Tensor:
    """`X / ||X||_F` in float64, scaled first so that squares of tiny entries do not vanish; NaN for zero."""
    wide = x.double()
    wide = wide / wide.abs().amax()
    unit: Tensor = wide / torch.linalg.vector_norm(wide)
    return unit
