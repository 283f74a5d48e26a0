"""Resolve the layout of every tensor of a checkpoint from its headers, its config and the user's overrides."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from actmat.checkpoints.base import TensorSpec
from actmat.errors import RecipeError
from actmat.layout.classify import classify, owner_of
from actmat.layout.components import component_configs, single_file_of
from actmat.layout.families import FAMILIES, Towers, recognize, text_config_of
from actmat.layout.fused import FEED_FORWARD, PARTNERS, RECURRENT, Shape
from actmat.layout.patterns import compile_pattern
from actmat.layout.ties import find_ties, is_output_head, is_token_table, is_vocabulary, ties_embeddings
from actmat.layout.types import Block, LayoutMap, Orientation, Role, RoleOverride, TensorLayout

_INDEX = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")  # of a layer or an expert; the digits of fc1 and w2 are names


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
    components = component_configs(config)
    maps = [_recognized(specs, config)] if components is None else list(_of_components(specs, components))
    layouts = {name: layout for part in maps for name, layout in part.tensors.items()}
    ordered = {name: layouts[name] for name in specs}
    _apply_overrides(ordered, specs, overrides)
    single = single_file_of(specs)
    family = _family(config) or (None if single is None else single.kind)
    return LayoutMap(ordered, {a: c for part in maps for a, c in part.ties.items()}, family)


def _of_components(specs: Mapping[str, TensorSpec], components: Mapping[str, Mapping[str, Any]]) -> Iterator[LayoutMap]:
    """Layouts of a pipeline, those of each component by its own config."""
    for part, config in components.items():
        prefix = f"{part}."
        inside = {n.removeprefix(prefix): s for n, s in specs.items() if n.startswith(prefix)}
        local = {n: replace(s, name=n) for n, s in inside.items()}
        layouts = _recognized(local, config)
        yield LayoutMap(
            {prefix + n: layout for n, layout in layouts.tensors.items()},
            {prefix + a: prefix + c for a, c in layouts.ties.items()},
        )


def _recognized(specs: Mapping[str, TensorSpec], config: Mapping[str, Any] | None) -> LayoutMap:
    """Layouts and ties of one model."""
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
    _mark_tied_heads(layouts, ties, config, specs)
    return LayoutMap(layouts, ties)


def _partner_shape(name: str, specs: Mapping[str, TensorSpec]) -> Shape | None:
    """Stored shape of the partner layer (`fused.PARTNERS`), if there is one."""
    owner, _, _ = owner_of(name)
    candidates = PARTNERS.get(owner, ())
    if name.endswith(FEED_FORWARD[0]):  # the two layers of a feed-forward block differ in their number, too
        spec = specs.get(name.removesuffix(FEED_FORWARD[0]) + FEED_FORWARD[1])
        return None if spec is None else spec.shape
    if RECURRENT.fullmatch(owner):
        candidates = (owner.replace("_ih_", "_hh_"),)
    head, _, tail = name.rpartition(owner)
    for candidate in candidates:
        spec = specs.get(f"{head}{candidate}{tail}")
        if spec is not None and spec.name != name:
            return spec.shape
    return None


def _mark_tied_heads(
    layouts: dict[str, TensorLayout],
    ties: Mapping[str, str],
    config: Mapping[str, Any] | None,
    specs: Mapping[str, TensorSpec],
) -> None:
    """Give tied output heads the role of the token embedding, which they are."""
    for name, canonical in ties.items():
        layouts[name] = replace(layouts[canonical], reason=f"tied to {canonical}, merged once")
    if not ties_embeddings(config) or any(map(is_token_table, layouts)):
        return
    for name, layout in layouts.items():
        if layout.role is Role.LINEAR and is_output_head(name) and is_vocabulary(specs[name].shape, config):
            reason = "the config ties it to the token embedding, which is stored under this name only"
            layouts[name] = TensorLayout(Role.EMBEDDING, reason)


def _family(config: Mapping[str, Any] | None) -> str | None:
    """The recognized family of the whole model or of its language model; of diffusers' models, their class."""
    if config is not None and isinstance(config.get("_class_name"), str):
        return str(config["_class_name"])
    inner = recognize(text_config_of(config or {}))
    return inner if inner in FAMILIES else recognize(config) or inner


_AXES: Mapping[Role, tuple[int, int | None]] = {
    Role.LINEAR: (2, 2),
    Role.FUSED_LINEAR: (2, 2),
    Role.STACKED_EXPERTS: (3, 3),
    Role.ROUTER: (2, 2),
    Role.CONVOLUTION: (3, None),
    Role.EMBEDDING: (1, None),
    Role.VECTOR: (0, None),
    Role.BUFFER: (0, None),
}
"""Role -> smallest and largest number of axes that a tensor of that role can have."""


def _apply_overrides(
    layouts: dict[str, TensorLayout], specs: Mapping[str, TensorSpec], overrides: Sequence[RoleOverride]
) -> None:
    """Replace, in place, the layout of every tensor that an override matches; the first that matches wins."""
    if not overrides:
        return
    rules: list[tuple[Callable[[str], bool], RoleOverride]] = [(compile_pattern(o.match), o) for o in overrides]
    used: set[int] = set()
    problems: list[str] = []
    for name, spec in specs.items():
        for index, (matches, override) in enumerate(rules):
            if not matches(name):
                continue
            used.add(index)
            layout = _overridden(layouts[name], len(spec.shape), override)
            problem = _misfit(layout, spec)
            if problem:
                problems.append(f"{name} ({' x '.join(map(str, spec.shape))}, {spec.dtype}): {problem}")
            layouts[name] = layout
            break
    for index, (matches, override) in enumerate(rules):
        if index not in used:
            shadowed = any(matches(name) for name in specs)
            why = "every tensor it matches is taken by an earlier override" if shadowed else "it matches no tensor"
            problems.append(f"override {override.match!r}: {why}")
    if problems:
        raise RecipeError("The recipe's overrides of roles do not fit the tensors they match.", problems)


def _overridden(layout: TensorLayout, axes: int, override: RoleOverride) -> TensorLayout:
    role = override.role or layout.role
    if override.role is None and override.blocks:
        role = Role.STACKED_EXPERTS if axes == 3 else Role.FUSED_LINEAR
    orientation: Orientation = override.orientation or (layout.orientation if role.is_matrix else "OI")
    blocks: tuple[Block, ...] = override.blocks
    keeps_rows = override.orientation in (None, layout.orientation)
    if not blocks and keeps_rows and role is layout.role:
        blocks = layout.blocks  # the override names the role or orientation that the tensor has anyway
    return replace(layout, role=role, reason="set by the recipe", orientation=orientation, blocks=blocks)


def _misfit(layout: TensorLayout, spec: TensorSpec) -> str | None:
    """The reason why a layout does not fit a tensor, or None."""
    axes = len(spec.shape)
    least, most = _AXES[layout.role]
    if not spec.is_floating and layout.role is not Role.BUFFER:
        return f"{layout.role} needs floating-point entries; integers and booleans are buffers"
    if axes < least or (most is not None and axes > most):
        wanted = f"{least} axes" if most == least else f"at least {least} axes"
        return f"{layout.role} needs {wanted}, this tensor has {axes}"
    if not layout.role.is_matrix:
        if layout.blocks:
            return f"blocks make sense for linear maps only, not for {layout.role}"
        return "only linear maps have an orientation" if layout.orientation == "IO" else None
    if layout.role in (Role.LINEAR, Role.ROUTER) and layout.blocks:
        return f"a tensor with blocks is {Role.FUSED_LINEAR}, not {layout.role}"
    if layout.role is Role.FUSED_LINEAR and not layout.blocks:
        return f"{Role.FUSED_LINEAR} needs blocks: name the row range of each linear map"
    rows = spec.shape[-2] if layout.orientation == "OI" else spec.shape[-1]
    return _blocks_misfit(layout.blocks, rows) if layout.blocks else None


def _blocks_misfit(blocks: Sequence[Block], rows: int) -> str | None:
    """The reason why blocks do not share one grouping or do not cover its rows exactly once, or None."""
    groups = blocks[0].groups
    ordered = sorted(blocks, key=lambda b: b.start)
    starts, stops = [b.start for b in ordered], [b.stop for b in ordered]
    fits = groups > 0 and rows % groups == 0 and all(b.groups == groups and b.start < b.stop for b in blocks)
    if fits and [*starts, rows // groups] == [0, *stops]:
        return None
    listed = ", ".join(f"{b.name} {b.start}:{b.stop} of {b.groups} groups" for b in blocks)
    return (
        f"the blocks must have one number of groups, which divides its {rows} rows, and cover the rows of a group "
        f"exactly once; found {listed}"
    )
