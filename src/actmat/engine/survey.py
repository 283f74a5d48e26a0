"""The passes over all tensors that some rules want before the first tensor is merged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from actmat.engine.deltas import TensorReader
from actmat.methods import MergeMethod, get_method
from actmat.plan.model import MergePlan, MethodCall, TensorPlan
from actmat.plan.parts import cut

__all__ = ["SurveyKey", "run_surveys", "survey_key"]


@dataclass
class _Running:
    """One survey: its rule, the tensors it is about, its state."""

    method: MergeMethod
    items: dict[str, TensorPlan]
    state: Any


SurveyKey = tuple[str, str, str]


def survey_key(call: MethodCall) -> SurveyKey:
    """Tensors whose calls agree in this are surveyed together: rule, options, weights, but not the scale."""
    return call.method, str(sorted(call.options.items())), str(call.weights)


def run_surveys(
    plans: Sequence[MergePlan], reader_for: Callable[[TensorPlan], TensorReader], pool: Executor
) -> dict[SurveyKey, Any]:
    """What `Survey.finish` gave, per kind of call.

    All tensors of the plans take part, also those that an earlier run finished: a threshold over the whole model
    must not depend on where a merge was interrupted.
    """
    running: dict[SurveyKey, _Running] = {}
    for plan in plans:
        for item in plan.tensors:
            if item.call is None:
                continue
            method = get_method(item.call.method)
            if method.survey is None or not method.survey.applies(item.call.options):
                continue
            key = survey_key(item.call)
            if key not in running:
                running[key] = _Running(method, {}, method.survey.start(len(item.sources), item.call.options))
            running[key].items.setdefault(item.name, item)
    for survey in running.values():
        _run(survey, reader_for, pool)
    out = {}
    for key, survey in running.items():
        assert survey.method.survey is not None
        out[key] = survey.method.survey.finish(survey.state)
    return out


def _run(running: _Running, reader_for: Callable[[TensorPlan], TensorReader], pool: Executor) -> None:
    survey = running.method.survey
    assert survey is not None
    turn = threading.Lock()  # a state is not thread-safe; reading and subtracting still overlap

    def observe(item: TensorPlan) -> None:
        assert item.call is not None
        reader = reader_for(item)
        with torch.no_grad():
            for part in cut(item.shape, item.layout, running.method.acts_on):
                deltas = list(reader.deltas(part, reader.read_base(part)))
                split = [part.layout.to_matrices(d) if running.method.acts_on == "matrix" else [d] for d in deltas]
                with turn:
                    for k in range(len(split[0])):
                        survey.observe(running.state, [s[k] for s in split], item.call.options)

    again = True
    while again:
        for _ in pool.map(observe, running.items.values()):
            pass
        again = survey.advance(running.state)
