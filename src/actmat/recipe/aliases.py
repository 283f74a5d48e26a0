"""Recipes as others write them: mergekit's names of methods that are options of methods here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dare_ties": ("dare", {"rule": "ties", "rescale": "l1", "reduce": "sum"}),
    "dare_linear": ("dare", {"rule": "linear", "rescale": "l1"}),
    "della_linear": ("della", {"rescale": "l1", "sign_election": False}),
    "breadcrumbs_ties": ("breadcrumbs", {"scaling": 1.0, "sign_election": True}),
}
"""Name -> method, and the options with which it is mergekit's method."""


def real_method(name: str) -> tuple[str, dict[str, Any]]:
    """The method that a name stands for, and the options that come with it.

    >>> real_method("dare_linear")
    ('dare', {'rule': 'linear', 'rescale': 'l1'})
    >>> real_method("ties")
    ('ties', {})
    """
    method, options = ALIASES.get(name, (name, {}))
    return method, dict(options)


def with_real_method(data: Any) -> Any:
    """Fields of a recipe or a rule with method and options in place of their aliases; given options win.

    A function and a declaration get a name that stands for them in this process.
    """
    if isinstance(data, Mapping) and (callable(method := data.get("method")) or hasattr(method, "acts_on")):
        from actmat.methods import name_of_method  # imports torch

        data = {**data, "method": name_of_method(data["method"])}
    if not isinstance(data, Mapping) or not isinstance(data.get("method"), str):
        return data
    method, preset = real_method(data["method"])
    if method == data["method"]:
        return data
    options = data.get("options") or {}
    return {**data, "method": method, "options": {**preset, **options} if isinstance(options, Mapping) else options}
