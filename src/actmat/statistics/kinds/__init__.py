"""Kinds of statistics: a file and an entry in `KINDS` for each."""

from __future__ import annotations

from typing import Any

from actmat.errors import StatisticsError, did_you_mean
from actmat.statistics.kinds.base import Kind
from actmat.statistics.kinds.fisher import FISHER
from actmat.statistics.kinds.gram import GRAM

__all__ = ["KINDS", "get_kind"]

KINDS: dict[str, Kind[Any]] = {kind.name: kind for kind in (GRAM, FISHER)}
"""Name -> kind."""


def get_kind(name: str) -> Kind[Any]:
    """The kind of this name, or an error that lists all."""
    if name not in KINDS:
        known = ", ".join(KINDS)
        raise StatisticsError(f"Unknown kind of statistics '{name}'; known are {known}.{did_you_mean(name, KINDS)}")
    return KINDS[name]
