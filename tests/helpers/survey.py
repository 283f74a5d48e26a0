"""Runs a method over the tensors of a small model in memory, the way an engine does, surveys included."""

import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from actmat.methods import Merged, MergeMethod


def run_survey(
    method: MergeMethod, deltas: Mapping[str, Sequence[Any]], options: Mapping[str, Any], *, backwards: bool = False
) -> Any:
    """What `Survey.finish` gives after as many rounds over all tensors as the survey asks for; None without one.

    Every tensor is observed by a fork of its own, which comes back from another process.
    """
    survey = method.survey
    if survey is None or not survey.applies(options):
        return None
    n_experts = len(next(iter(deltas.values())))
    state = survey.start(n_experts, options)
    names = sorted(deltas, reverse=backwards)
    wants_more = True
    while wants_more:
        forks = {name: survey.fork(state) for name in names}
        for name, fork in forks.items():
            survey.observe(fork, deltas[name], options)
            survey.join(state, pickle.loads(pickle.dumps(fork)))
        wants_more = survey.advance(state)
    return survey.finish(state)


def call(
    method: MergeMethod,
    deltas: Sequence[Tensor],
    options: Mapping[str, Any],
    *,
    base: Tensor | None = None,
    statistics: Mapping[str, Sequence[Tensor]] | None = None,
    weights: Sequence[float] | None = None,
    survey: Any = None,
    seed: int = 0,
) -> Merged:
    """One merge with every need of the method filled in."""
    given: dict[str, Any] = {
        "base": base,
        "statistics": statistics,
        "weights": weights,
        "survey": survey,
        "generator": torch.Generator().manual_seed(seed),
    }
    return method.merge(deltas, **{n: v for n, v in given.items() if n in method.needs}, **options)
