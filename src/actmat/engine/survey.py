"""The passes over all items before the first is written: thresholds over a whole model, factors of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from actmat.engine.layers import LayerState, survey_layers
from actmat.engine.session import SessionSpec, SurveyKey, layer_key, survey_key
from actmat.methods import get_method
from actmat.planning.model import Item
from actmat.planning.post import layer_items

__all__ = ["Observe", "run_surveys"]

Observe = Callable[[Callable[[], Any], Sequence[Item]], Iterable[Any]]
"""One pass, `observe(fork, items)`: every worker gets an empty state from `fork()` and observes some of the items with
`Session.observe`; returns the states of all workers. States pickle."""


def run_surveys(spec: SessionSpec, observe: Observe) -> Mapping[SurveyKey, Any]:
    """Results of the surveys of all plans.

    All items of a plan take region, also those that an earlier run finished: a threshold over the whole model must not
    depend on where a merge was interrupted. Plans that survey the same items in the same way share the passes. Those of
    merged layers come last, one for each plan that wants them.
    """
    shared: dict[tuple[tuple[str, ...], frozenset[str]], Any] = {}
    out: dict[SurveyKey, Any] = {}
    for key, items in _surveyed(spec).items():
        same = key[1:], frozenset(i.name for i in items)
        if same not in shared:
            shared[same] = _result(items, observe)
        out[key] = shared[same]
    for p, plan in enumerate(spec.plans):  # after the methods' own, which they need to merge
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


def _surveyed(spec: SessionSpec) -> dict[SurveyKey, list[Item]]:
    groups: dict[SurveyKey, list[Item]] = {}
    for p, plan in enumerate(spec.plans):
        for item in plan.items:
            if item.call is None:
                continue
            survey = get_method(item.call.method).survey
            if survey is not None and survey.applies(item.call.options):
                groups.setdefault(survey_key(p, item.call), []).append(item)
    return groups
