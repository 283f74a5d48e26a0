"""The contract of a post-processing step: a change of every merged matrix after its method, and one declaration.

There are two kinds. A *matrix step* sees one merged matrix and the experts' deltas of it; it has a dense form and an
exact form on factors. A *layer step* gives each merged matrix one factor, which depends on measures of all of them, so
that the model is merged twice: once to be measured, once to be written.

Options are the keyword-only parameters of the function that takes them, as for a merge method.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from actmat.linalg.lowrank import LowRank
from actmat.methods.contract import Option, declared_options, resolved_options
from actmat.methods.facets import Merged, MergedLowRank


@dataclass(frozen=True, slots=True)
class Layer:
    """Position of a merged matrix in the model.

    Args:
        kind: its name without numbers; matrices of one kind play the same part in different layers.
        number: of its layer, counted from 1; None for a matrix outside of the layers.
        count: number of layers of its stack.
    """

    kind: str
    number: int | None
    count: int


Measures = Mapping[tuple[str, str], tuple[Layer, tuple[float, ...]]]
"""Name of the item and label of the matrix -> its position and what was measured of it."""


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One factor for each matrix of a model.

    Args:
        measure: `(merged, base) -> numbers` of one matrix; `base` is `W_0` in the merged delta's dtype, or None.
        factors: `(measures, *, <options>) -> factors` of all matrices; must not depend on the order of `measures`.
        needs_base: `measure` reads the base.
    """

    measure: Callable[[Tensor | LowRank, Tensor | None], tuple[float, ...]]
    factors: Callable[..., dict[tuple[str, str], float]]
    needs_base: bool = False


@dataclass(frozen=True)
class PostStep:
    """Declaration of one step: `apply` and `apply_lowrank`, or `layers`.

    Args:
        summary: the idea in one sentence.
        equation: the changed delta, in plain text.
        apply: `(merged, deltas, *, <options>) -> Merged` of one `*batch O I` matrix.
        apply_lowrank: the same on factors, exact, without forming an `O x I` matrix.
        layers: of a layer step.
    """

    name: str
    summary: str
    equation: str
    reference: str
    apply: Callable[..., Merged] | None = None
    apply_lowrank: Callable[..., MergedLowRank] | None = None
    layers: LayerStep | None = None

    @cached_property
    def options(self) -> Mapping[str, Option]:
        """Options by name, in the order of the signature."""
        function = self.apply if self.layers is None else self.layers.factors
        assert function is not None, "a step has one of both forms"
        return declared_options(self.name, function)

    def resolve_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Defaults overlaid with `given`; RecipeError with all problems."""
        return resolved_options(f"post-processing '{self.name}'", self.options, given)


Step = tuple[PostStep, Mapping[str, Any]]
"""A matrix step with all its options."""


def apply_steps(value: Tensor, deltas: Sequence[Tensor], steps: Sequence[Step]) -> Merged:
    """The matrix steps one after the other, and their records together."""
    stats: dict[str, Any] = {}
    for step, options in steps:
        assert step.apply is not None, "a matrix step"
        changed = step.apply(value, deltas, **options)
        value, stats = changed.value, {**stats, **changed.stats}
    return Merged(value, stats)


def apply_steps_lowrank(value: LowRank, deltas: Sequence[LowRank], steps: Sequence[Step]) -> MergedLowRank:
    """The same on factors, in float64."""
    stats: dict[str, Any] = {}
    for step, options in steps:
        assert step.apply_lowrank is not None, "a matrix step"
        changed = step.apply_lowrank(value, deltas, **options)
        value, stats = changed.value, {**stats, **changed.stats}
    return MergedLowRank(value, stats)
