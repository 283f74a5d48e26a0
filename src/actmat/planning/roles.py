"""Meaning of tensors: as recognised, with the recipe's `roles` on top."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.errors import MergeError
from actmat.layout import resolve_layout
from actmat.layout.types import Block, LayoutMap, Role, RoleOverride
from actmat.recipe import Recipe

__all__ = ["resolve_roles"]


def resolve_roles(
    recipe: Recipe, specs: Mapping[str, TensorSpec], config: Mapping[str, Any] | None
) -> tuple[LayoutMap, list[str]]:
    """Layouts of all tensors, without ties where the recipe says so; and what is wrong with its `roles`."""
    overrides = [
        RoleOverride(
            match=r.match,
            role=Role(r.role) if r.role else None,
            orientation=r.orientation,
            blocks=tuple(Block(name, start, stop) for name, (start, stop) in r.blocks.items()),
        )
        for r in recipe.roles
    ]
    problems: list[str] = []
    try:
        layouts = resolve_layout(specs, config, overrides)
    except MergeError as error:
        layouts, problems = resolve_layout(specs, config), list(error.problems)
    return (layouts if recipe.ties else dataclasses.replace(layouts, ties={})), problems
