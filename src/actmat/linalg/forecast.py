"""Distance between the predictions of two models.

Shapes: `N` predictions, `C` classes.
"""

from __future__ import annotations

from torch import Tensor

__all__ = ["output_features"]


def output_features(merged_NC: Tensor, expert_NC: Tensor) -> dict[str, float]:
    """Distance of the merged model's predictions from the expert's, on unlabelled inputs.

    `disagreement`: share of inputs whose most probable class differs; `divergence`: mean over inputs of
    `KL(expert || merged)` in nats.

    Args:
        merged_NC, expert_NC: logits of both on the same inputs.
    """
    mine, theirs = (x.double().log_softmax(-1) for x in (merged_NC, expert_NC))
    return {
        "disagreement": float((merged_NC.argmax(-1) != expert_NC.argmax(-1)).double().mean()),
        "divergence": float((theirs.exp() * (theirs - mine)).sum(-1).mean()),
    }
