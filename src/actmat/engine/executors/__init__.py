"""Executors: one file or package for each place that units can run in; `base.Executor` is the contract."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from actmat.engine.executors.base import ExecutorFactory
from actmat.engine.executors.ray import RayExecutor, ray_at
from actmat.engine.executors.threads import ThreadExecutor
from actmat.errors import RecipeError, did_you_mean

__all__ = ["EXECUTORS", "THREADS", "computes_here", "find_executor"]

THREADS = "threads"
"""The executor of a run that names none."""

EXECUTORS: Mapping[str, ExecutorFactory] = {THREADS: ThreadExecutor, "ray": RayExecutor}
"""Every executor, by the name under which a run asks for it."""

ADDRESSED: Mapping[str, Callable[[str], ExecutorFactory]] = {"ray": ray_at}
"""Executors that take an address, `NAME=ADDRESS`: address, or "" -> the executor there."""

ELSEWHERE = frozenset({"ray"})
"""Executors whose units run on other machines, which may have other devices."""


def find_executor(text: str) -> ExecutorFactory:
    """The executor that `NAME` or `NAME=ADDRESS` names.

    Raises:
        RecipeError: there is none; says which there are. Or it takes no address, or its packages are not installed.
    """
    name, equals, address = text.partition("=")
    if name not in EXECUTORS:
        hint = did_you_mean(name, EXECUTORS)
        raise RecipeError(f"There is no executor '{name}'.{hint} Executors: {', '.join(EXECUTORS)}.")
    if name in ADDRESSED:
        return ADDRESSED[name](address)
    if equals:
        raise RecipeError(f"The executor '{name}' takes no address; found '{text}'. Write '{name}'.")
    return EXECUTORS[name]


def computes_here(text: str) -> bool:
    """True if the units of this executor run on this machine, with its devices."""
    return text.partition("=")[0] not in ELSEWHERE
