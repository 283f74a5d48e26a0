"""The survey of a merged model, for post-processing that scales layers: merge all items, keep only their measures.

The model is merged twice: once to be measured, once to be written. Measures are keyed by item and matrix, and factors
are computed from all of them in the driver, so that neither the order nor the shares of workers change a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from actmat.engine.after import narrowed
from actmat.engine.observer import Merged
from actmat.linalg.lowrank import LowRank
from actmat.methods.post import LayerStep
from actmat.planning.model import Item, PostCall
from actmat.planning.post import layers_of
from actmat.planning.regions import cut, matrix_label

__all__ = ["LayerFactors", "LayerObserver", "LayerState", "survey_layers"]

LayerFactors = Mapping[str, Mapping[str, float]]
"""Name of the item -> label of the matrix -> factor."""


@dataclass
class LayerState:
    """Measures of one worker's share of the merged items; pickles.

    Args:
        plan: position of the plan in the run.
        surveys: results of the surveys of its methods, which come before this one.
        found: (name of the item, label of the matrix) -> measures.
    """

    plan: int
    surveys: Mapping[Any, Any]
    found: dict[tuple[str, str], tuple[float, ...]] = field(default_factory=dict)

    def fork(self) -> LayerState:
        """An empty state of the same survey."""
        return LayerState(self.plan, self.surveys)


@dataclass
class LayerObserver:
    """Measures the merged matrices of one item; see `engine.observer`."""

    step: LayerStep
    found: dict[str, tuple[float, ...]] = field(default_factory=dict)

    def region(self, merged: Merged) -> None:
        """Measure the matrices of a region."""
        value = merged.value
        if isinstance(value, LowRank):
            self._measure_factors(value, merged.region.label)
            return
        whole, flat = merged.region, value.reshape(-1)
        for region in cut(whole.shape, whole.layout, "matrix"):
            matrices = region.layout.to_matrices(narrowed(flat, region).view(region.shape))
            bases: Sequence[torch.Tensor | None] = [None] * len(matrices)
            if self.step.needs_base:
                assert merged.base is not None, "the plan checked that there is one"
                stored = narrowed(merged.base, region).view(region.shape).to(value.dtype)
                bases = region.layout.to_matrices(stored)
            for k, (matrix, base) in enumerate(zip(matrices, bases, strict=True)):
                label = "/".join(part for part in (whole.label, matrix_label(region, k)) if part)
                self.found[label] = self.step.measure(matrix, base)

    def finish(self) -> dict[str, Any]:
        """Nothing for the record: this merge is not written."""
        return {}

    def _measure_factors(self, value: LowRank, label: str) -> None:
        if value.b_OR.ndim == 2:
            self.found[label] = self.step.measure(value, None)
            return
        for e in range(value.b_OR.shape[0]):
            one = LowRank(value.b_OR[e], value.a_RI[e])
            self.found[f"{e}/{label}" if label else str(e)] = self.step.measure(one, None)


def survey_layers(
    call: PostCall,
    items: Sequence[Item],
    state: LayerState,
    observe: Callable[[Callable[[], Any], Sequence[Item]], Iterable[Any]],
) -> LayerFactors:
    """Factors of all matrices of these items.

    Args:
        call: the step over layers.
        items: that are merged, of one plan; also those that an earlier run finished.
        state: an empty one.
        observe: see `engine.survey.Observe`.
    """
    step = call.step.layers
    assert step is not None, "a step over layers"
    found: dict[tuple[str, str], tuple[float, ...]] = {}
    for of_worker in observe(state.fork, items):
        found.update(of_worker.found)
    places = layers_of(sorted(found))
    factors = step.factors({key: (places[key], found[key]) for key in sorted(found)}, **call.options)
    out: dict[str, dict[str, float]] = {}
    for (name, label), factor in sorted(factors.items()):
        out.setdefault(name, {})[label] = factor
    return out
