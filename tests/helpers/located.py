"""Short forms of `locate` for tests of what it finds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError
from actmat.experts.base import Expert
from actmat.experts.locate import LocatedAdapter, locate
from actmat.experts.lora.adapter import Adapter


def open_expert(place: Any, base: Model | None = None) -> Expert:
    """The expert at a place, on its base."""
    return locate(place).expert(base)


def open_adapter(place: str | Path) -> Adapter:
    """The adapter at a place.

    Raises:
        CheckpointError: it is a full checkpoint.
    """
    found = locate(place)
    if not isinstance(found, LocatedAdapter):
        raise CheckpointError(f"{place}: expected an adapter, found a full checkpoint")
    return found.adapter


def is_adapter(place: str | Path) -> bool:
    """True if the place holds an adapter."""
    with locate(place) as found:
        return found.needs_base
