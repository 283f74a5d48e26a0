"""The passes over all items before the first is written: thresholds over a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from actmat.methods import get_method
from actmat.planning.item import Item, MethodCall
from actmat.planning.model import MergePlan

SurveyKey = tuple[int, str, str, str]
"""Items whose calls agree in this are surveyed together: plan, method, options and weights, but not the scale."""


def survey_key(plan: int, call: MethodCall) -> SurveyKey:
    """Key of the survey that an item of this plan with this call takes part in."""
    return plan, call.method, str(sorted(call.options.items())), str(call.weights)


Observe = Callable[[Callable[[], Any], Sequence[Item]], Iterable[Any]]
"""One pass, `observe(fork, items)`: every worker gets an empty state from `fork()` and observes some of the items with
`Session.observe`; returns the states of all workers. States pickle."""


def run_surveys(plans: Sequence[MergePlan], observe: Observe) -> Mapping[SurveyKey, Any]:
    """Results of the surveys of all plans.

    All items of a plan take part, also those that an earlier run finished: a threshold over the whole model must not
    depend on where a merge was interrupted. Plans that survey the same items in the same way share the passes.
    """
    shared: dict[tuple[tuple[str, ...], frozenset[str]], Any] = {}
    out: dict[SurveyKey, Any] = {}
    for key, items in _surveyed(plans).items():
        same = key[1:], frozenset(i.name for i in items)
        if same not in shared:
            shared[same] = _result(items, observe)
        out[key] = shared[same]
    return out


def _result(items: Sequence[Item], observe: Observe) -> Any:
    """The survey's result on items with the same call."""
    assert items[0].call is not None
    options, survey = items[0].call.options, get_method(items[0].call.method).survey
    assert survey is not None
    state = survey.start(len(items[0].sources), options)
    again = True
    while again:
        for of_worker in observe(partial(survey.fork, state), items):
            survey.join(state, of_worker)
        again = survey.advance(state)
    return survey.finish(state)


def _surveyed(plans: Sequence[MergePlan]) -> dict[SurveyKey, list[Item]]:
    """Items that a survey sees, by their call."""
    groups: dict[SurveyKey, list[Item]] = {}
    for p, plan in enumerate(plans):
        for item in plan.items:
            if item.call is None:
                continue
            survey = get_method(item.call.method).survey
            if survey is not None and survey.applies(item.call.options):
                groups.setdefault(survey_key(p, item.call), []).append(item)
    return groups
