"""Method `adamerging`.

This file holds the merge (a weighted sum) and the mathematics of one training step; the caller reads unlabeled
batches and runs the model on them:

    for batch in batches:                                     # one tensor shown; the loss sums over all of them
        logits = model(batch)                                 # with the weights W_0 + sum_t c_t D_t
        entropy(logits).backward()                            # gradient with respect to every weight
        slope = coefficient_gradient(weight.grad, deltas)
        c, state = adam_step(c, slope, state)

Shapes: `T` experts, `N` samples, `C` classes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.linalg.inner import inner_products, one_pass_sum
from actmat.methods.contract import MergeMethod
from actmat.methods.facets import SUM_LAWS, Access, Merged


def merge(
    deltas: Sequence[Tensor],
    *,
    statistics: Mapping[str, Sequence[Tensor]] | None = None,
    coefficients: list[float] | None = None,
    initial: float = 0.3,
) -> Merged:
    """Sum of the deltas with coefficients learned, without labels, to make predictions certain.

        D* = sum_t c_t D_t,   c = argmin of the entropy of the predictions

    The module has the merge and the mathematics of a training step; the caller reads unlabeled batches and runs the
    model.

    Args:
        statistics: `"coefficient"`, one scalar tensor per expert learned for this tensor (layer-wise AdaMerging).
        coefficients: one per expert, the same for all tensors (task-wise AdaMerging).
        initial: every coefficient where neither is given, which is where training starts.

    Source:
        E. Yang et al., "AdaMerging: adaptive model merging for multi-task learning", ICLR 2024, arXiv:2310.02575.
    """
    learned = None if statistics is None else statistics.get("coefficient")
    if learned is not None and coefficients is not None:
        raise ValueError("adamerging: give task-wise 'coefficients' or layer-wise statistics, not both")
    factors = coefficients if learned is None else learned
    share = [initial] * len(deltas) if factors is None else [float(c) for c in factors]
    if len(share) != len(deltas):
        raise ValueError(f"adamerging: {len(share)} coefficients for {len(deltas)} experts; give one per expert")
    return Merged(one_pass_sum(deltas, share))


def entropy(logits_NC: Tensor) -> Tensor:
    """Mean Shannon entropy of the predictions, in nats: `-(1/N) sum_n sum_c p_nc log p_nc`. Differentiable."""
    log_p_NC = logits_NC.log_softmax(dim=-1)
    return -(log_p_NC.exp() * log_p_NC).sum(dim=-1).mean()


def coefficient_gradient(weight_gradient: Tensor, deltas: Sequence[Tensor]) -> Tensor:
    """`dL/dc_t = <dL/dW, D_t>` for one tensor, float64 (`T`): the chain rule through `W = W_0 + sum_t c_t D_t`.

    Sum it over all tensors for task-wise coefficients; keep one per tensor for layer-wise ones.
    """
    return torch.stack([inner_products([weight_gradient, delta])[0, 1] for delta in deltas])


@dataclass(frozen=True, slots=True)
class AdamState:
    """First and second moment of the gradient, and the number of steps taken."""

    mean_T: Tensor
    square_T: Tensor
    steps: int = 0

    @classmethod
    def zeros(cls, n_experts: int) -> AdamState:
        """State before the first step."""
        return cls(torch.zeros(n_experts, dtype=torch.float64), torch.zeros(n_experts, dtype=torch.float64))


def adam_step(
    coefficients_T: Tensor,
    gradient_T: Tensor,
    state: AdamState,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
) -> tuple[Tensor, AdamState]:
    """One step of Adam (Kingma and Ba, 2015) on the coefficients; returns new coefficients and state."""
    steps = state.steps + 1
    mean_T = betas[0] * state.mean_T + (1 - betas[0]) * gradient_T
    square_T = betas[1] * state.square_T + (1 - betas[1]) * gradient_T.square()
    unbiased = mean_T / (1 - betas[0] ** steps)
    spread = (square_T / (1 - betas[1] ** steps)).sqrt() + eps
    return coefficients_T - lr * unbiased / spread, AdamState(mean_T, square_T, steps)


ADAMERGING = MergeMethod(
    "adamerging",
    merge,
    "tensor",
    laws=SUM_LAWS,
    access=Access(one_pass=True),
    elsewhere=lambda options, n_experts: "own",
)
