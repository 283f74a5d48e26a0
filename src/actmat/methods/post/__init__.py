"""Post-processing steps, of single matrices and of layers: plug-ins of the group `actmat.post`."""

from __future__ import annotations

from actmat.errors import RecipeError, did_you_mean
from actmat.methods.post.contract import Layer, LayerStep, Measures, PostStep, Step, apply_steps, apply_steps_lowrank
from actmat.plugins import entries, hint, load, load_all

__all__ = [
    "Layer",
    "LayerStep",
    "Measures",
    "PostStep",
    "Step",
    "all_steps",
    "apply_steps",
    "apply_steps_lowrank",
    "get_step",
]

GROUP = "actmat.post"


def all_steps() -> list[PostStep]:
    """All steps by name, those of other distributions last."""
    return list(load_all(GROUP).values())


def get_step(name: str) -> PostStep:
    """The step called `name`.

    Raises:
        RecipeError: no such step; the message offers the nearest name and lists all.

    >>> get_step("svc").options["alpha"].default
    1.0
    """
    found: PostStep | None = load(GROUP, name)
    if found is not None:
        return found
    known = list(entries(GROUP))
    near, listed = did_you_mean(name, known), ", ".join(known)
    raise RecipeError(f"There is no post-processing '{name}'.{near} Post-processing: {listed}{hint(GROUP, name)}")
