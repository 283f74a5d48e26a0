"""Executors: one file for each place that units can run in; `base.Executor` is the contract.

Those of other distributions, and of `actmat.extras`, are entry points of the group `actmat.executors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from actmat import plugins
from actmat.engine.executors.base import ExecutorFactory
from actmat.engine.executors.threads import ThreadExecutor
from actmat.errors import RecipeError, did_you_mean

__all__ = ["EXECUTORS", "THREADS", "computes_here", "find_executor"]

THREADS = "threads"
"""Name of the default executor."""

EXECUTORS: Mapping[str, ExecutorFactory] = {THREADS: ThreadExecutor}
"""The executors of the core, by the names under which a run asks for them."""

GROUP: Final = "actmat.executors"

INSTALLED_BY = {"ray": "pip install 'actmat[ray]'"}
"""Command that installs an executor which is not of the core."""


def find_executor(text: str, device: str = "cpu") -> ExecutorFactory:
    """The executor that `NAME` or `NAME=ADDRESS` names.

    Args:
        text: the name.
        device: see `engine.devices`.

    Raises:
        RecipeError: an unknown name (all known ones are listed); it does not fit the devices, takes no address,
            or its packages are not installed.
    """
    name, equals, address = text.partition("=")
    kind = _named(name)
    if kind is None:
        known = dict.fromkeys((*EXECUTORS, *plugins.entries(GROUP)))
        fix = f" Fix: {INSTALLED_BY[name]}." if name in INSTALLED_BY else did_you_mean(name, known)
        raise RecipeError(f"There is no executor '{name}'.{fix} Executors: {', '.join(known)}.")
    at = getattr(kind, "at", None)
    if equals and at is None:
        raise RecipeError(f"The executor '{name}' takes no address; found '{text}'. Write '{name}'.")
    problem = getattr(kind, "device_problem", None)
    if problem is not None and (why := problem(device)):
        raise RecipeError(f"The executor '{name}' {why}")
    factory: ExecutorFactory = kind if at is None else at(address)
    return factory


def computes_here(text: str) -> bool:
    """True if the units of this executor run on this machine, with its devices."""
    return not getattr(_named(text.partition("=")[0]), "elsewhere", False)


def _named(name: str) -> Any:
    """The class of an executor; None for an unknown name."""
    return EXECUTORS[name] if name in EXECUTORS else plugins.load(GROUP, name, type)
