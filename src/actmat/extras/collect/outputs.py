"""Distances between the outputs of two layers or models.

Shapes: `O` out_features, `I` in_features, `N` predictions, `C` classes.
"""

from __future__ import annotations

from torch import Tensor


def output_energy(matrix_OI: Tensor, gram_II: Tensor) -> float:
    """`E||A z||^2 = tr(A C A^T)` with `C = E[z z^T]`, in float64, not below zero."""
    wide = matrix_OI.double()
    return max(0.0, float(((wide @ gram_II.double()) * wide).sum()))


def output_features(merged_NC: Tensor, expert_NC: Tensor) -> dict[str, float]:
    """Distance of the merged model's predictions from the expert's, from their logits on the same unlabeled inputs.

    `disagreement`: share of inputs whose most probable class differs; `divergence`: mean over inputs of
    `KL(expert || merged)` in nats.
    """
    mine, theirs = (x.double().log_softmax(-1) for x in (merged_NC, expert_NC))
    return {
        "disagreement": float((merged_NC.argmax(-1) != expert_NC.argmax(-1)).double().mean()),
        "divergence": float((theirs.exp() * (theirs - mine)).sum(-1).mean()),
    }
