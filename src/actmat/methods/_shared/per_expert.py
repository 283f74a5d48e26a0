"""Checks of arguments that several methods take: weights, options per expert, the base."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from actmat.errors import RecipeError
from actmat.linalg.masks.election import election_workspace


def workspace_of_election(shape: Sequence[int], n_experts: int, options: Mapping[str, Any]) -> int:
    """Workspace of a method that masks deltas and elects signs, and of its result; see `Cost`."""
    return math.prod(shape) + election_workspace(math.prod(shape), n_experts)


def given_base(method: str, base: Tensor | None) -> Tensor:
    """The base weights; RecipeError without them."""
    if base is None:
        raise RecipeError(f"{method} reads the base weights and needs the base; none was given. Pass base=W_0.")
    return base


def per_expert(name: str, value: float | Sequence[float], n_experts: int) -> list[float]:
    """An option that is one number for all experts or a list with one number each, as a list.

    Raises:
        RecipeError: a list of another length.
    """
    if isinstance(value, int | float):
        return [float(value)] * n_experts
    if len(value) != n_experts:
        raise RecipeError(
            f"option '{name}' is a list of {len(value)}, but {n_experts} experts are merged. "
            "Give one number per expert, in the order of the experts, or a single number for all."
        )
    return [float(v) for v in value]


def sum_problem(weights: Sequence[float]) -> str | None:
    """Why no mean can be taken with these weights, or None."""
    if math.fsum(weights) != 0:
        return None
    return (
        f"expected weights with a sum other than 0, found {', '.join(f'{w:g}' for w in weights)}: the mean of the "
        "deltas divides by it. Fix: --method task_arithmetic --option scaling=1, which adds w_t D_t, or other weights"
    )


def weights_and_sum(
    weights: Sequence[float] | None, n_experts: int, *, is_mean: bool = True
) -> tuple[list[float], float]:
    """The weights (1 unless given) and their sum.

    Raises:
        RecipeError: they sum to zero, of a mean.
    """
    share = [1.0] * n_experts if weights is None else list(weights)
    if is_mean and (problem := sum_problem(share)):
        raise RecipeError(problem)
    return share, math.fsum(share)
