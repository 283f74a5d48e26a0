"""Answers behind a frozen head: how many are right, and how far they are from the expert's own.

Shapes: `N` inputs, `C` classes.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


def counted(logits_NC: Tensor, labels_N: Tensor, expert_NC: Tensor | None = None) -> dict[str, Any]:
    """Right answers, `correct`, of all, `total`; and, given the expert's logits, the `divergence` from the expert:
    `mean_n KL(softmax(expert_n) || softmax(logits_n))`, in nats, which takes no labels.

    >>> import torch
    >>> counted(torch.tensor([[2.0, 0.0], [2.0, 0.0]]), torch.tensor([0, 1]), torch.tensor([[2.0, 0.0], [2.0, 0.0]]))
    {'correct': 1, 'total': 2, 'divergence': 0.0}
    """
    found: dict[str, Any] = {"correct": int((logits_NC.argmax(1) == labels_N).sum()), "total": len(labels_N)}
    if expert_NC is not None:
        found["divergence"] = divergence(expert_NC, logits_NC)
    return found


def divergence(expert_NC: Tensor, logits_NC: Tensor) -> float:
    """`mean_n KL(softmax(expert_n) || softmax(logits_n))`, in nats."""
    log_p, log_q = expert_NC.double().log_softmax(-1), logits_NC.double().log_softmax(-1)
    return float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
