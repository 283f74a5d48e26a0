"""Values of a recipe for each tensor by its depth, and the method calls that they make."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from actmat.checkpoints.layer_names import is_before_layers, split_layer
from actmat.errors import RecipeError
from actmat.layout.patterns import compile_pattern
from actmat.methods import MergeMethod
from actmat.planning.item import MethodCall
from actmat.recipe.values import Entry, Value, is_entries, leaves


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """Position of a tensor in depth: layer number `layer` of `count`; None outside of all layers."""

    layer: int | None = None
    count: int = 0


NOWHERE = TensorPlace()


def places_of(names: Iterable[str]) -> dict[str, TensorPlace]:
    """Positions of all tensors that are in layers.

    Names that agree before the layer's number form one stack (an encoder and a decoder count apart).

    >>> places_of(["h.0.w", "h.3.w", "head"])
    {'h.0.w': TensorPlace(layer=0, count=4), 'h.3.w': TensorPlace(layer=3, count=4)}
    """
    layers = {n: split[:2] for n in names if (split := split_layer(n)) is not None}
    deepest: dict[str, int] = {}
    for stack, layer in layers.values():
        deepest[stack] = max(deepest.get(stack, 0), layer)
    return {n: TensorPlace(layer, deepest[stack] + 1) for n, (stack, layer) in layers.items()}


def resolved(value: Value, name: str, place: TensorPlace) -> Any:
    """Resolve a value of a recipe to the scalar for the tensor `name`.

    Gradients are read at `t = layer / (count - 1)`, 1 if there is one layer; tensors outside of all layers have
    the first value.

    >>> resolved((0.0, 1.0), "h.1.w", TensorPlace(1, 5))
    0.25

    Raises:
        LookupError: no entry matches.
    """
    if not isinstance(value, tuple):
        return value
    if not isinstance(value[0], Entry):
        return interpolated(value, place)
    for entry in value:
        within = _within(entry, name, place)
        if within is not None and any(compile_pattern(p)(name) for p in entry.match):
            return interpolated(entry.value, within) if isinstance(entry.value, tuple) else entry.value
    raise LookupError(name)


def interpolated(values: Sequence[Any], place: TensorPlace) -> Any:
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


def _within(entry: Entry, name: str, place: TensorPlace) -> TensorPlace | None:
    """Position of the tensor within the layers of an entry; None if the entry is for others."""
    if entry.layers is None:
        return place
    if isinstance(entry.layers, str):
        outside = place.layer is None and is_before_layers(name) == (entry.layers == "before")
        return NOWHERE if outside else None
    start, stop = entry.layers
    if place.layer is None or not start <= place.layer < stop:
        return None
    return TensorPlace(place.layer - start, stop - start)


def patterns_in(values: Mapping[str, Value]) -> list[tuple[str, str]]:
    """(where, pattern) of all entries in values by their place in the recipe."""
    return [
        (where, pattern)
        for where, value in values.items()
        if isinstance(value, tuple)
        for entry in value
        if isinstance(entry, Entry)
        for pattern in entry.match
    ]


SMALLEST_SUM = 1e-8
"""Sum of weights by which `normalize` divides at least; weights with a smaller sum are not normalized."""


@dataclass(frozen=True)
class WeightsTemplate:
    """Weights of the experts for each tensor; None if all are 1.

    Args:
        labels: names of the experts.
        values: the recipe's values, one per expert.
        normalize: divide them by their sum.
    """

    labels: tuple[str, ...]
    values: tuple[Value, ...]
    normalize: bool = False

    @property
    def is_given(self) -> bool:
        """True if any weight is not 1."""
        return any(v != 1.0 for v in self.values)

    @property
    def varies(self) -> bool:
        """True if weights differ from tensor to tensor."""
        return any(isinstance(v, tuple) for v in self.values)

    def at(self, name: str, place: TensorPlace, *, plain: bool = False) -> tuple[float, ...] | None:
        """Weights for the tensor `name`; `plain`: not normalized.

        Raises:
            LookupError: the weight of an expert has no entry for the tensor; names the expert.
        """
        if not self.is_given and not self.normalize:
            return None
        weights = []
        for label, value in zip(self.labels, self.values, strict=True):
            try:
                weights.append(float(resolved(value, name, place)))
            except LookupError:
                raise LookupError(f"the weight of expert '{label}'") from None
        total = math.fsum(weights)
        if not self.normalize or plain or abs(total) < SMALLEST_SUM:
            return tuple(weights) if self.is_given else None
        return tuple(w / total for w in weights)

    def patterns(self) -> list[tuple[str, str]]:
        """See `patterns_in`."""
        return patterns_in({f"weight of expert '{n}'": v for n, v in zip(self.labels, self.values, strict=True)})


@dataclass
class CallTemplate:
    """A method call for each tensor.

    Args:
        method: the merge method.
        options: all its options, some of which may vary.
        own: per expert, its own values of options that take one number per expert.
        scale: factor of the merged delta.
        weights: of the experts; None for a method that takes none.
    """

    method: MergeMethod
    options: Mapping[str, Value]
    own: tuple[Mapping[str, Value], ...]
    scale: Value
    weights: WeightsTemplate | None
    _calls: dict[Any, MethodCall] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._own_names = list(dict.fromkeys(n for mine in self.own for n in mine))
        varying = (n for n, v in self.options.items() if is_entries(v) or _is_gradient(self.method, n, v))
        self._varying = [n for n in varying if n not in self._own_names]

    @cached_property
    def varies(self) -> bool:
        """True if anything differs from tensor to tensor."""
        weights = self.weights is not None and self.weights.varies
        of_experts = any(isinstance(v, tuple) for mine in self.own for v in mine.values())
        return bool(self._varying) or of_experts or isinstance(self.scale, tuple) or weights

    def at(self, name: str, place: TensorPlace) -> tuple[MethodCall, str]:
        """The call for the tensor `name`, and the words for its individual values.

        Raises:
            LookupError: a value has no entry for the tensor; names the value.
        """
        options = {n: self._option(n, name, place) for n in (*self._varying, *self._own_names)}
        scale = self._one(self.scale, "'scale'", name, place)
        weights = self.weights.at(name, place) if self.weights is not None else None
        key = (str(options), scale, weights)
        if key not in self._calls:
            self._calls[key] = MethodCall(self.method.name, {**self.options, **options}, scale, weights)
        words = []
        if self.weights is not None and self.weights.varies and weights is not None:
            words.append("weights " + ", ".join(f"{w:.4g}" for w in weights))
        words += [f"{n} {_shown(options[n])}" for n in options]
        words += [f"scale {scale:.4g}"] if isinstance(self.scale, tuple) else []
        return self._calls[key], f" with {'; '.join(words)}" if words else ""

    def patterns(self) -> list[tuple[str, str]]:
        """See `patterns_in`; without those of the weights."""
        of_experts = {f"{n} of expert {k + 1}": v for k, mine in enumerate(self.own) for n, v in mine.items()}
        return patterns_in({f"option '{n}'": v for n, v in self.options.items()} | of_experts | {"scale": self.scale})

    @classmethod
    def make(
        cls,
        method: MergeMethod,
        options: Mapping[str, Value],
        own: Sequence[Mapping[str, Value]],
        scale: Value,
        weights: WeightsTemplate,
    ) -> CallTemplate:
        """A template of a method with these options of a recipe, overlaid over its defaults.

        Raises:
            RecipeError: options that do not fit the method, all of them.
        """
        flat = {n: next(leaves(v), v) if is_entries(v) or _is_gradient(method, n, v) else v for n, v in options.items()}
        complete = method.resolve_options(flat) | dict(options)
        template = cls(method, complete, tuple(own), scale, weights if method.is_weighted else None)
        if problems := template.problems():
            raise RecipeError("The options do not fit the method.", problems)
        return template

    def problems(self) -> list[str]:
        """Problems of values that vary; the others are checked with the method's options."""
        problems = []
        for name in self._varying:
            checked = (self.method.options[name].problem(leaf) for leaf in leaves(self.options[name]))
            problems += [p for p in checked if p is not None]
        for name in self._own_names:
            option = self.method.options.get(name)
            if option is None:
                known = ", ".join(self.method.options) or "none"
                problems.append(f"an expert has an option '{name}', unknown to {self.method.name}; options: {known}")
                continue
            if option.problem([0.5] * len(self.own)) is not None:
                problems.append(
                    f"option '{name}' of {self.method.name} is one for all experts: give it under 'options' of the "
                    "recipe, not of an expert"
                )
                continue
            checked = (option.problem(leaf) for mine in self.own if name in mine for leaf in leaves(mine[name]))
            problems += [p for p in checked if p is not None]
        survey = self.method.survey
        if self.varies and survey is not None and survey.applies(self.options):
            problems.append(
                f"method '{self.method.name}' measures the whole model with these options, so that its numbers must be "
                "the same for all tensors: give plain numbers in place of gradients and entries"
            )
        return [f"method '{self.method.name}': {p}" for p in dict.fromkeys(problems)]

    def _option(self, option: str, name: str, place: TensorPlace) -> Any:
        if option not in self._own_names:
            value = self.options[option]
            return self._one(tuple(value) if isinstance(value, list) else value, f"option '{option}'", name, place)
        common = self.options[option]
        out = []
        for k, mine in enumerate(self.own):
            value = mine.get(option, common[k] if isinstance(common, list) else common)
            out.append(self._one(value, f"option '{option}' of expert {k + 1}", name, place))
        return out

    def _one(self, value: Value, where: str, name: str, place: TensorPlace) -> Any:
        try:
            return resolved(value, name, place)
        except LookupError:
            raise LookupError(where) from None


def _is_gradient(method: MergeMethod, name: str, value: Value) -> bool:
    """True for a list if the option takes one scalar."""
    option = method.options.get(name)
    return isinstance(value, list | tuple) and bool(value) and option is not None and option.problem(value) is not None


def _shown(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
