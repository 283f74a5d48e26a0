"""Options that are one number for all experts, or a list with one number each."""

from __future__ import annotations

from collections.abc import Sequence

from actmat.errors import RecipeError

__all__ = ["per_expert"]


def per_expert(name: str, value: float | Sequence[float], n_experts: int) -> list[float]:
    """An option that is one number for all experts or a list with one number in [0, 1] each, as a list.

    Raises:
        RecipeError: another length, or a number outside [0, 1].

    >>> per_expert("density", 0.5, 2)
    [0.5, 0.5]
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
