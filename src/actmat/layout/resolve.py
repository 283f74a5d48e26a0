"""Resolve the layout of every tensor of a checkpoint from its headers and config."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.layout.classify import classify, owner_of
from actmat.layout.families import FAMILIES, PLAIN, Towers, recognise, text_config_of
from actmat.layout.fused import PARTNERS, RECURRENT
from actmat.layout.overrides import apply_overrides
from actmat.layout.ties import find_ties, is_output_head, is_token_table, ties_embeddings
from actmat.layout.types import LayoutMap, Role, RoleOverride, TensorLayout

__all__ = ["resolve_layout"]

_INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")  # of a layer or an expert; the digits of fc1 and w2 are names

Shape = tuple[int, ...]


def resolve_layout(
    specs: Mapping[str, TensorSpec], config: Mapping[str, Any] | None, overrides: Sequence[RoleOverride] = ()
) -> LayoutMap:
    """Role, orientation and packed blocks of every tensor, each with its reason, and the ties of a checkpoint.

    The user's overrides come first (the first whose pattern matches a tensor decides on it), then the exceptions of the
    architecture family, then names and shapes. No tensor is read. Layers that differ only in their numbers are decided
    once, so that the cost is linear.

    >>> spec = TensorSpec("h.0.mlp.fc1.weight", (8, 4), "float32", "")
    >>> resolve_layout({spec.name: spec}, None).tensors[spec.name].reason
    'linear layer, name ends in fc1'

    Raises:
        RecipeError: an override matches nothing or does not fit a tensor; all such problems at once.
    """
    towers = Towers(config)
    decided: dict[tuple[str, Shape, str, Shape | None], TensorLayout] = {}
    layouts: dict[str, TensorLayout] = {}
    for name, spec in specs.items():
        partner = _partner_shape(name, specs)
        key = (_INDEX.sub("0", name), spec.shape, spec.dtype, partner)
        if key not in decided:
            decided[key] = classify(spec, partner, towers.of(name))
        layouts[name] = decided[key]
    ties = find_ties(specs, config)
    _mark_tied_heads(layouts, ties, config)
    apply_overrides(layouts, specs, overrides)
    return LayoutMap(layouts, ties, _family(config))


def _partner_shape(name: str, specs: Mapping[str, TensorSpec]) -> Shape | None:
    """Stored shape of the partner layer (`fused.PARTNERS`), if there is one."""
    owner, _, _ = owner_of(name)
    candidates = PARTNERS.get(owner, ())
    if RECURRENT.fullmatch(owner):
        candidates = (owner.replace("_ih_", "_hh_"),)
    head, _, tail = name.rpartition(owner)
    for candidate in candidates:
        spec = specs.get(f"{head}{candidate}{tail}")
        if spec is not None and spec.name != name:
            return spec.shape
    return None


def _mark_tied_heads(
    layouts: dict[str, TensorLayout], ties: Mapping[str, str], config: Mapping[str, Any] | None
) -> None:
    """Give tied output heads the role of the token embedding, which they are."""
    for name, canonical in ties.items():
        layouts[name] = replace(layouts[canonical], reason=f"tied to {canonical}, merged once")
    if not ties_embeddings(config) or any(map(is_token_table, layouts)):
        return
    for name, layout in layouts.items():
        if layout.role is Role.LINEAR and is_output_head(name):
            reason = "the config ties it to the token embedding, which is stored under this name only"
            layouts[name] = TensorLayout(Role.EMBEDDING, reason)


def _family(config: Mapping[str, Any] | None) -> str | None:
    """The recognised architecture family of the whole model or of its language model."""
    for candidate in (config, text_config_of(config or {})):
        family = recognise(candidate)
        if family in FAMILIES or family in PLAIN:
            return family
    return None
