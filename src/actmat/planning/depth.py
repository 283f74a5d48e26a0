"""Depth of tensors in their stack of layers, and values of a recipe for each of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from actmat.checkpoints.layer_names import is_before_layers, split_layer
from actmat.layout.patterns import compile_pattern
from actmat.recipe.values import Entry, Gradient, Value

__all__ = ["NOWHERE", "Place", "depth_factors", "depth_of", "places_of", "resolved"]


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a tensor in depth: layer number `layer` of `count`; None outside of all layers."""

    layer: int | None = None
    count: int = 0


NOWHERE = Place()


def depth_of(name: str) -> int | None:
    """Number of the layer that a tensor belongs to: the first numeric component of its name, or None."""
    found = split_layer(name)
    return found[1] if found else None


def places_of(names: Iterable[str]) -> dict[str, Place]:
    """Places of all tensors that are in layers.

    Names that agree before the layer's number form one stack (an encoder and a decoder count apart).

    >>> places_of(["h.0.w", "h.3.w", "head"])
    {'h.0.w': Place(layer=0, count=4), 'h.3.w': Place(layer=3, count=4)}
    """
    layers = {n: found[:2] for n in names if (found := split_layer(n)) is not None}
    deepest: dict[str, int] = {}
    for stack, layer in layers.values():
        deepest[stack] = max(deepest.get(stack, 0), layer)
    return {n: Place(layer, deepest[stack] + 1) for n, (stack, layer) in layers.items()}


def depth_factors(names: list[str], first: float, last: float) -> dict[str, float]:
    """LiNeS: factor of each tensor, linear in the depth of its layer from `first` to `last`.

    Tensors outside any stack (see `places_of`) are not listed.
    K. Wang et al., "LiNeS: Post-training Layer Scaling Prevents Forgetting and Enhances Model Merging", ICLR 2025.
    """
    return {
        n: first + (last - first) * (p.layer / (p.count - 1) if p.count > 1 else 1.0)
        for n, p in places_of(names).items()
        if p.layer is not None
    }


def resolved(value: Value, name: str, place: Place) -> Any:
    """The scalar that a value of a recipe is for the tensor `name`.

    Gradients are read at `t = layer / (count - 1)`, 1 where there is one layer; tensors outside of all layers have
    the first value.

    >>> resolved((0.0, 1.0), "h.1.w", Place(1, 5))
    0.25

    Raises:
        LookupError: no entry matches.
    """
    if isinstance(value, Gradient):
        return interpolated(value.gradient, place)
    if not isinstance(value, tuple):
        return value
    if not isinstance(value[0], Entry):
        return interpolated(value, place)
    for entry in value:
        within = _within(entry, name, place)
        if within is not None and any(compile_pattern(p)(name) for p in entry.patterns):
            return interpolated(entry.value, within) if isinstance(entry.value, tuple) else entry.value
    raise LookupError(name)


def interpolated(values: Sequence[Any], place: Place) -> Any:
    """Value of a gradient at a place: piecewise linear; of booleans and texts, the one at or before it."""
    if place.layer is None or len(values) == 1:
        return values[0]
    t = place.layer / (place.count - 1) if place.count > 1 else 1.0
    x = t * (len(values) - 1)
    low = min(math.floor(x), len(values) - 1)
    if not all(isinstance(v, int | float) and not isinstance(v, bool) for v in values):
        return values[low]
    part = x - low
    return (1 - part) * values[low] + part * values[min(low + 1, len(values) - 1)]


def _within(entry: Entry, name: str, place: Place) -> Place | None:
    """Place of the tensor in the layers that an entry is for; None if it is for others."""
    if entry.layers is None:
        return place
    if isinstance(entry.layers, str):
        outside = place.layer is None and is_before_layers(name) == (entry.layers == "before")
        return NOWHERE if outside else None
    start, stop = entry.layers
    if place.layer is None or not start <= place.layer < stop:
        return None
    return Place(place.layer - start, stop - start)


def patterns_in(values: Mapping[str, Value]) -> list[tuple[str, str]]:
    """(where, pattern) of all entries in values by their place in the recipe."""
    return [
        (where, pattern)
        for where, value in values.items()
        if isinstance(value, tuple)
        for entry in value
        if isinstance(entry, Entry)
        for pattern in entry.patterns
    ]
