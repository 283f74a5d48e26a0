"""The passes over all tensors that some rules want before the first tensor is merged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any

import torch

from actmat.engine.deltas import TensorReader
from actmat.methods import MergeMethod, get_method
from actmat.plan.model import MergePlan, TensorPlan
from actmat.plan.parts import cut

__all__ = ["run_surveys"]


@dataclass
class _Running:
    """One survey: its rule, the tensors it is about, its state."""

    method: MergeMethod
    items: list[TensorPlan]
    state: Any


def run_surveys(
    groups: Sequence[Sequence[tuple[MergePlan, TensorPlan]]],
    reader_for: Callable[[TensorPlan], TensorReader],
    pool: Executor,
) -> dict[tuple[int, str], Any]:
    """What `Survey.finish` gave, per (id of plan, call). Tensors merged with one call are surveyed together.

    A tensor that an earlier run finished is still part of its survey: the caller passes all tensors of the merge.
    """
    running: dict[tuple[int, str], _Running] = {}
    for group in groups:
        for plan, item in group:
            if item.call is None:
                continue
            method = get_method(item.call.method)
            if method.survey is None or not method.survey.applies(item.call.options):
                continue
            key = (id(plan), str(item.call))
            if key not in running:
                state = method.survey.start(len(item.sources), item.call.options)
                running[key] = _Running(method, [], state)
            running[key].items.append(item)
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

    def observe(item: TensorPlan) -> None:
        assert item.call is not None
        reader = reader_for(item)
        with torch.no_grad():
            for part in cut(item.shape, item.layout, running.method.acts_on):
                deltas = list(reader.deltas(part, reader.read_base(part)))
                if running.method.acts_on != "matrix":
                    survey.observe(running.state, deltas, item.call.options)
                    continue
                split = [part.layout.to_matrices(d) for d in deltas]
                for k in range(len(split[0])):
                    survey.observe(running.state, [s[k] for s in split], item.call.options)

    again = True
    while again:
        for _ in pool.map(observe, running.items):
            pass
        again = survey.advance(running.state)
