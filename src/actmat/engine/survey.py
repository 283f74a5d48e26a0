"""The passes over all items that some methods want before the first is merged (thresholds over a whole model)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from actmat.engine.session import SessionSpec, SurveyKey, survey_key
from actmat.methods import Survey, get_method
from actmat.plan.model import Item

__all__ = ["Observe", "run_surveys"]

Observe = Callable[[Survey, Any, Sequence[Item]], None]
"""One pass: give the deltas of all items to the survey's state."""


def run_surveys(spec: SessionSpec, observe: Observe) -> Mapping[SurveyKey, Any]:
    """Results of the surveys of all plans.

    All items of a plan take part, also those that an earlier run finished: a threshold over the whole model must not
    depend on where a merge was interrupted. Plans that survey the same items in the same way share the passes.
    """
    shared: dict[tuple[tuple[str, ...], frozenset[str]], Any] = {}
    out: dict[SurveyKey, Any] = {}
    for key, items in _surveyed(spec).items():
        same = key[1:], frozenset(i.name for i in items)
        if same not in shared:
            call = items[0].call
            assert call is not None
            survey = get_method(call.method).survey
            assert survey is not None
            state = survey.start(len(items[0].sources), call.options)
            observe(survey, state, items)
            while survey.advance(state):
                observe(survey, state, items)
            shared[same] = survey.finish(state)
        out[key] = shared[same]
    return out


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
