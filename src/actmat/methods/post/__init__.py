"""Post-processing steps: of single matrices and of layers, listed once in `STEPS`."""

from __future__ import annotations

from actmat.errors import RecipeError, did_you_mean
from actmat.methods.post.contract import Layer, LayerStep, Measures, PostStep, Step, apply_steps, apply_steps_lowrank
from actmat.methods.post.layer_steps import ESM, LARV
from actmat.methods.post.matrix_steps import ISOTROPISE, SUBSPACE_BOOSTING, SVC

__all__ = [
    "STEPS",
    "Layer",
    "LayerStep",
    "Measures",
    "PostStep",
    "Step",
    "apply_steps",
    "apply_steps_lowrank",
    "get_step",
]

STEPS: tuple[PostStep, ...] = (SVC, SUBSPACE_BOOSTING, ISOTROPISE, LARV, ESM)
"""All steps, in the order of the tables."""


def get_step(name: str) -> PostStep:
    """The step called `name`.

    Raises:
        RecipeError: no such step; the message offers the nearest name and lists all.

    >>> get_step("svc").options["alpha"].default
    1.0
    """
    for step in STEPS:
        if step.name == name:
            return step
    known = [s.name for s in STEPS]
    raise RecipeError(
        f"There is no post-processing '{name}'.{did_you_mean(name, known)} Post-processing: {', '.join(known)}"
    )
