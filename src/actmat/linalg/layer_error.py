"""Change of a layer's outputs by a change of its weights.

Shapes: `O` out_features, `I` in_features.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["output_energy"]


def output_energy(matrix_OI: Tensor, gram_II: Tensor) -> float:
    """`E||A z||^2 = tr(A C A^T)` with `C = E[z z^T]`, in float64, not below zero."""
    wide = matrix_OI.double()
    return max(0.0, float(((wide @ gram_II.double()) * wide).sum()))
