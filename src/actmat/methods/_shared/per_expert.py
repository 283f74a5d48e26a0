"""Weights and options that are one number for all experts, or a list with one number each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from actmat.errors import RecipeError

__all__ = ["per_expert", "weights_and_sum"]


def per_expert(name: str, value: float | Sequence[float], n_experts: int) -> list[float]:
    """An option that is one number for all experts or a list with one number in [0, 1] each, as a list.

    Raises:
        RecipeError: another length, or a number outside [0, 1].
    """
    if isinstance(value, int | float):
        return [float(value)] * n_experts
    if len(value) != n_experts:
        raise RecipeError(
            f"option '{name}' is a list of {len(value)}, but {n_experts} experts are merged. "
            "Give one number per expert, in the order of the experts, or a single number for all."
        )
    if wrong := [v for v in value if not 0 <= v <= 1]:
        raise RecipeError(f"option '{name}' must lie in [0, 1] for every expert, got {wrong}")
    return [float(v) for v in value]


def weights_and_sum(
    method: str, weights: Sequence[float] | None, n_experts: int, divisor_of: str
) -> tuple[list[float], float]:
    """The weights (1 unless given) and their sum.

    Raises:
        RecipeError: they sum to zero, and `divisor_of` is to be divided by it.
    """
    share = [1.0] * n_experts if weights is None else list(weights)
    total = math.fsum(share)
    if total == 0 and divisor_of:
        raise RecipeError(
            f"{method}: expected weights with a sum other than 0, got {share}; {divisor_of} divides by it. "
            "Change the weights, or use task_arithmetic for differences of experts."
        )
    return share, total
