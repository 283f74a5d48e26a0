"""Short forms of `locate` for tests of what it finds."""

from pathlib import Path
from typing import Any

from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError
from actmat.experts.deltas import Deltas
from actmat.experts.locate import fit_expert, locate
from actmat.experts.lora.adapter import Adapter


def open_expert(place: Any, base: Model | None = None) -> Deltas:
    """The expert at a place, on its base."""
    return fit_expert(locate(place), base)


def open_adapter(place: str | Path) -> Adapter:
    """The adapter at a place.

    Raises:
        CheckpointError: it is a full checkpoint.
    """
    located = locate(place)
    if not isinstance(located, Adapter):
        raise CheckpointError(f"{place}: expected an adapter, found a full checkpoint")
    return located


def is_adapter(place: str | Path) -> bool:
    """True if the place holds an adapter."""
    with locate(place) as located:
        return isinstance(located, Adapter)
