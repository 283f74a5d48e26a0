"""The passes over all tensors that some rules want before the first tensor is merged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from actmat.engine.deltas import LazyDeltas
from actmat.engine.reader import TensorReader
from actmat.methods import Survey, get_method
from actmat.plan.model import MergePlan, MethodCall, TensorPlan
from actmat.plan.parts import cut

__all__ = ["SurveyKey", "run_surveys", "survey_key"]


@dataclass
class _Running:
    """One survey: the tensors it is about, its state."""

    survey: Survey
    items: Sequence[TensorPlan]
    state: Any


SurveyKey = tuple[str, str, str]


def survey_key(call: MethodCall) -> SurveyKey:
    """Tensors whose calls agree in this are surveyed together: rule, options, weights, but not the scale."""
    return call.method, str(sorted(call.options.items())), str(call.weights)


def run_surveys(
    plans: Sequence[MergePlan], reader_for: Callable[[TensorPlan], TensorReader], pool: Executor
) -> list[dict[SurveyKey, Any]]:
    """What `Survey.finish` gave: for each plan, per kind of call.

    All tensors of a plan take part, also those that an earlier run finished: a threshold over the whole model must
    not depend on where a merge was interrupted. Plans that survey the same tensors in the same way share the pass.
    """
    shared: dict[tuple[SurveyKey, frozenset[str]], Any] = {}
    out: list[dict[SurveyKey, Any]] = []
    for plan in plans:
        found = {}
        for key, items in _surveyed(plan).items():
            call, names = items[0].call, frozenset(i.name for i in items)
            assert call is not None
            if (key, names) not in shared:
                survey = get_method(call.method).survey
                assert survey is not None
                running = _Running(survey, items, survey.start(len(items[0].sources), call.options))
                _run(running, reader_for, pool)
                shared[key, names] = survey.finish(running.state)
            found[key] = shared[key, names]
        out.append(found)
    return out


def _surveyed(plan: MergePlan) -> dict[SurveyKey, list[TensorPlan]]:
    """The tensors that one plan wants surveyed, per kind of call."""
    groups: dict[SurveyKey, list[TensorPlan]] = {}
    for item in plan.tensors:
        if item.call is None:
            continue
        survey = get_method(item.call.method).survey
        if survey is not None and survey.applies(item.call.options):
            groups.setdefault(survey_key(item.call), []).append(item)
    return groups


def _run(running: _Running, reader_for: Callable[[TensorPlan], TensorReader], pool: Executor) -> None:
    survey = running.survey
    turn = threading.Lock()  # a state is not thread-safe; reading and subtracting still overlap

    def observe(item: TensorPlan) -> None:
        assert item.call is not None
        reader = reader_for(item)
        acts_on = get_method(item.call.method).acts_on
        with torch.no_grad():
            for part in cut(item.shape, item.layout, acts_on):
                deltas = LazyDeltas(reader, part, reader.read_base(part)).hold()
                split = [part.layout.to_matrices(d) if acts_on == "matrix" else [d] for d in deltas]
                with turn:
                    for k in range(len(split[0])):
                        survey.observe(running.state, [s[k] for s in split], item.call.options)

    again = True
    while again:
        for _ in pool.map(observe, running.items):
            pass
        again = survey.advance(running.state)
