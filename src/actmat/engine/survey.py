"""The passes over all items before the first is written: thresholds over a whole model, factors of layers.

For factors of layers the model is merged twice: once to be measured, once to be written. Measures are keyed by item and
matrix, and factors are computed from all of them in the driver, so that neither the order nor the shares of workers
change a factor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from actmat.engine.calls import narrowed
from actmat.engine.observer import Merged
from actmat.linalg.lowrank import LowRank
from actmat.methods import get_method
from actmat.methods.post import LayerStep
from actmat.planning.item import Item, MethodCall, PostCall
from actmat.planning.model import MergePlan
from actmat.planning.post import layer_items, layers_of
from actmat.planning.regions import cut, matrix_label

SurveyKey = tuple[int, str, str, str]
"""Items whose calls agree in this are surveyed together: plan, method, options and weights, but not the scale."""


def survey_key(plan: int, call: MethodCall) -> SurveyKey:
    """Key of the survey that an item of this plan with this call takes part in."""
    return plan, call.method, str(sorted(call.options.items())), str(call.weights)


def layer_key(plan: int, call: PostCall) -> SurveyKey:
    """Key of the survey of a plan's merged layers."""
    return plan, f"post {call.name}", str(sorted(call.options.items())), ""


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


Observe = Callable[[Callable[[], Any], Sequence[Item]], Iterable[Any]]
"""One pass, `observe(fork, items)`: every worker gets an empty state from `fork()` and observes some of the items with
`Session.observe`; returns the states of all workers. States pickle."""


def run_surveys(plans: Sequence[MergePlan], observe: Observe) -> Mapping[SurveyKey, Any]:
    """Results of the surveys of all plans.

    All items of a plan take part, also those that an earlier run finished: a threshold over the whole model must not
    depend on where a merge was interrupted. Plans that survey the same items in the same way share the passes. Those of
    merged layers come last, one for each plan that wants them.
    """
    shared: dict[tuple[tuple[str, ...], frozenset[str]], Any] = {}
    out: dict[SurveyKey, Any] = {}
    for key, items in _surveyed(plans).items():
        same = key[1:], frozenset(i.name for i in items)
        if same not in shared:
            shared[same] = _result(items, observe)
        out[key] = shared[same]
    for p, plan in enumerate(plans):  # after the methods' own, which they need to merge
        if items := layer_items(plan.items):
            call = items[0].call.layer_call if items[0].call is not None else None
            assert call is not None, "chosen by it"
            out[layer_key(p, call)] = survey_layers(call, items, LayerState(p, dict(out)), observe)
    return out


def _result(items: Sequence[Item], observe: Observe) -> Any:
    """Result of the survey of items with the same call."""
    call = items[0].call
    assert call is not None
    survey = get_method(call.method).survey
    assert survey is not None
    state = survey.start(len(items[0].sources), call.options)
    again = True
    while again:
        for of_worker in observe(partial(survey.fork, state), items):
            survey.join(state, of_worker)
        again = survey.advance(state)
    return survey.finish(state)


def _surveyed(plans: Sequence[MergePlan]) -> dict[SurveyKey, list[Item]]:
    groups: dict[SurveyKey, list[Item]] = {}
    for p, plan in enumerate(plans):
        for item in plan.items:
            if item.call is None:
                continue
            survey = get_method(item.call.method).survey
            if survey is not None and survey.applies(item.call.options):
                groups.setdefault(survey_key(p, item.call), []).append(item)
    return groups
