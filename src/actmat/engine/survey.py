"""The passes over all items before the first is written: thresholds over a whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from actmat.methods import get_method
from actmat.methods.facets import Survey
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
    for key, group in _surveyed(plans).items():
        same = key[1:], frozenset(i.name for i in group.items)
        if same not in shared:
            shared[same] = _result(group, observe)
        out[key] = shared[same]
    return out


class _Group(NamedTuple):
    """Items with the same call, and its survey."""

    survey: Survey
    call: MethodCall
    items: list[Item]


def _result(group: _Group, observe: Observe) -> Any:
    survey, call, items = group
    state = survey.start(len(items[0].sources), call.options)
    again = True
    while again:
        for of_worker in observe(partial(survey.fork, state), items):
            survey.join(state, of_worker)
        again = survey.advance(state)
    return survey.finish(state)


def _surveyed(plans: Sequence[MergePlan]) -> dict[SurveyKey, _Group]:
    groups: dict[SurveyKey, _Group] = {}
    for p, plan in enumerate(plans):
        for item in plan.items:
            if item.call is None:
                continue
            survey = get_method(item.call.method).survey
            if survey is not None and survey.applies(item.call.options):
                groups.setdefault(survey_key(p, item.call), _Group(survey, item.call, [])).items.append(item)
    return groups
