"""Executors: one file for each place that units can run in; `base.Executor` is the contract."""

from __future__ import annotations

from collections.abc import Mapping

from actmat.engine.executors.base import ExecutorFactory
from actmat.engine.executors.threads import ThreadExecutor
from actmat.errors import RecipeError, did_you_mean

__all__ = ["EXECUTORS", "find_executor"]

EXECUTORS: Mapping[str, ExecutorFactory] = {"threads": ThreadExecutor}
"""Every executor, by the name under which a run asks for it."""


def find_executor(name: str) -> ExecutorFactory:
    """The executor of that name.

    Raises:
        RecipeError: there is none; says which there are.
    """
    if name not in EXECUTORS:
        hint = did_you_mean(name, EXECUTORS)
        raise RecipeError(f"There is no executor '{name}'.{hint} Executors: {', '.join(EXECUTORS)}.")
    return EXECUTORS[name]
