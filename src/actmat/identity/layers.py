"""Entries of a config that speak of layers by number."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def expand(rule: Mapping[str, Any], config: Mapping[str, Any], depth: int) -> list[Any] | None:
    """The list that follows by a rule of the table from other keys; None if it cannot be told.

    >>> expand({"kind": "every", "period": 2, "on": "full", "off": "sliding"}, {}, 4)
    ['sliding', 'full', 'sliding', 'full']
    >>> expand({"kind": "from", "start": "k", "on": "moe", "off": "mlp"}, {"k": 1}, 3)
    ['mlp', 'moe', 'moe']
    """
    if "if" in rule and not config.get(rule["if"]):
        return [rule["else"]] * depth
    kind = rule.get("kind")
    if kind == "of":
        source = config.get(rule["list"])
        found = [rule["values"].get(str(x)) for x in source] if isinstance(source, list) else [None]
        return None if None in found else found
    number = rule.get("start" if kind == "from" else "period")
    number = config.get(number) if isinstance(number, str) else number
    if not isinstance(number, int) or (number < 1 and kind != "from"):
        return None
    if kind == "indices":
        return list(range(number - 1, depth, number))
    if kind == "from":
        return [rule["on"] if i >= number else rule["off"] for i in range(depth)]
    shift = 0 if rule.get("first") else 1
    return [rule["off"] if (i + shift) % number else rule["on"] for i in range(depth)]
