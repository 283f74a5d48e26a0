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


OPTION_ALIASES: Mapping[str, Mapping[str, str]] = {"dare": {"merge": "rule"}}
"""Method -> other names of its options: `dare` merges by a second rule."""


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
    """Fields of a recipe or a rule with method and options in place of their aliases; options that are given win."""
    if not isinstance(data, Mapping) or not isinstance(data.get("method"), str):
        return data
    method, preset = real_method(data["method"])
    given, names = data.get("options") or {}, OPTION_ALIASES.get(method, {})
    if method == data["method"] and not (isinstance(given, Mapping) and names.keys() & given.keys()):
        return data
    if isinstance(given, Mapping):
        given = {names.get(k, k) if names.get(k) not in given else k: v for k, v in given.items()}
    return {**data, "method": method, "options": {**preset, **given} if isinstance(given, Mapping) else given}
