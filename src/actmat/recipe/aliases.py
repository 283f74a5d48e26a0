"""mergekit's names of methods that are options of methods here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["ALIASES", "real_method", "with_real_method"]

ALIASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "dare_ties": ("dare", {"rule": "ties", "rescale": "l1", "reduce": "sum"}),
    "dare_linear": ("dare", {"rule": "linear", "rescale": "l1"}),
    "della_linear": ("della", {"rescale": "l1", "sign_election": False}),
    "breadcrumbs_ties": ("breadcrumbs", {"scaling": 1.0, "sign_election": True}),
}
"""Name -> method, and the options that make it what mergekit calls so."""


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
    """Fields of a recipe or a rule with the method in place of its alias; options that are given win."""
    if not isinstance(data, Mapping) or data.get("method") not in ALIASES:
        return data
    method, preset = real_method(data["method"])
    given = data.get("options") or {}
    return {**data, "method": method, "options": {**preset, **given} if isinstance(given, Mapping) else given}
