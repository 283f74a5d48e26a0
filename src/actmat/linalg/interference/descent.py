"""A fixed number of Adam steps on the interference objective, from the sum of the deltas (WUDI as published).

    L(D) = sum_t w_t ||(D - D_t) D_t^T||_F^2,   grad L = 2 (D S - B) = 2 (E S + R),   D = N + E,   R = N S - B

Steps are taken on `E`, and `R = sum_t w_t (N - D_t) K_t` is accumulated without the cancellation of `N S - B`:
Adam divides the gradient by its own size, so rounding in a gradient that should vanish would move the answer.

Shapes: `T` experts, `O` out_features, `I` in_features, `B` batch items.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from actmat.linalg.inner import frobenius_norm64
from actmat.linalg.interference.solver import batch_items, check_deltas, check_weight
from actmat.linalg.interference.spectral_solve import Stats
from actmat.linalg.scaling import exponent_of, scaled

ADAM_BETAS = (0.9, 0.999)
ADAM_EPS = 1e-8


@dataclass(frozen=True, slots=True)
class Adam:
    """`steps` steps of Adam with step size `lr`, in the units of the weights."""

    steps: int
    lr: float

    def moments_key(self) -> Hashable:
        """See `InterferenceRule.moments_key`."""
        return "interference by descent"


@dataclass(frozen=True, slots=True)
class Descent:
    """`N`, `S` and `R` of one tensor, per batch item; `shape` is `*batch O I`, `norms` are `||D_t||_F`."""

    sum_BOI: Tensor
    gram_BII: Tensor
    residual_BOI: Tensor
    shape: torch.Size
    norms: list[float]


def accumulate(deltas: Sequence[Tensor], weights: Sequence[float] | None) -> Descent:
    """One pass over the deltas, with `w_t = v_t / ||D_t||_F^2` (0 for a zero delta) and `N = sum_t v_t D_t`.

    Adding an expert turns `R` into `R + N K + v D S + (v - 1) D K`, `N` and `S` as they were before it.

    Raises:
        ValueError, NumericalError: as `interference.solver.prepare`.
    """
    out: Descent | None = None
    for delta, share, squared_norms in check_deltas(deltas, weights):
        items = batch_items(delta)
        if out is None:
            zeros = torch.zeros_like(items, memory_format=torch.contiguous_format)
            out = Descent(zeros, items.new_zeros(len(items), *2 * delta.shape[-1:]), zeros.clone(), delta.shape, [])
        for item, delta_OI in enumerate(items):
            if squared_norms[item] == 0:
                continue
            sum_OI, gram_II, residual_OI = out.sum_BOI[item], out.gram_BII[item], out.residual_BOI[item]
            exponent = exponent_of(math.sqrt(squared_norms[item]))  # its square would leave float32's range
            unit_OI, weight = scaled(delta_OI, -exponent), share / (squared_norms[item] * 4.0**-exponent)
            term_II = (unit_OI.mT @ unit_OI).mul_(check_weight(weight, delta_OI.dtype))
            residual_OI.addmm_(sum_OI, term_II).addmm_(delta_OI, gram_II, alpha=share)
            if share != 1.0:
                residual_OI.addmm_(delta_OI, term_II, alpha=share - 1.0)
            sum_OI.add_(delta_OI, alpha=share)
            gram_II.add_(term_II)
            del unit_OI, term_II  # the next ones do not stand beside them
        out.norms.append(math.sqrt(sum(squared_norms)))
    assert out is not None
    return out


def descend(start: Descent, adam: Adam) -> tuple[Tensor, Stats]:
    """`D` after the steps of Adam, and its record; the start is not modified.

    D. Kingma, J. Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, algorithm 1.
    """
    (beta1, beta2), eps = ADAM_BETAS, ADAM_EPS
    out_BOI = torch.empty_like(start.sum_BOI)
    for item, residual_OI in enumerate(start.residual_BOI):
        step_OI, mean_OI, square_OI = (torch.zeros_like(residual_OI) for _ in range(3))
        for count in range(1, adam.steps + 1):
            gradient_OI = torch.addmm(residual_OI, step_OI, start.gram_BII[item], beta=2, alpha=2)
            mean_OI.lerp_(gradient_OI, 1 - beta1)
            square_OI.mul_(beta2).addcmul_(gradient_OI, gradient_OI, value=1 - beta2)
            root_OI = square_OI.sqrt().div_(math.sqrt(1 - beta2**count)).add_(eps)
            step_OI.addcdiv_(mean_OI, root_OI, value=-adam.lr / (1 - beta1**count))
            del gradient_OI, root_OI
        torch.add(start.sum_BOI[item], step_OI, out=out_BOI[item])
    value = out_BOI.view(start.shape)
    norms = {"norm": frobenius_norm64(value), "mean_expert_norm": sum(start.norms) / len(start.norms)}
    return value, {"solver": "adam", "steps": adam.steps, **norms}
