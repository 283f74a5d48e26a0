"""From a location or a handle to an open expert: a registry of adapter families, full checkpoints otherwise.

A new family of adapters is a file with an `Expert`, and an entry in `FAMILIES`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.experts.base import Expert, ExpertHandle, Family
from actmat.experts.checkpoint import CheckpointExpert
from actmat.experts.lora.expert import LORA
from actmat.experts.lora.open import open_adapter

__all__ = ["FAMILIES", "is_adapter", "open_adapter", "open_expert", "open_handle"]

FAMILIES: tuple[Family, ...] = (LORA,)
"""The known families of adapters; the first that claims a location opens it."""


def is_adapter(location: str | Path) -> bool:
    """Whether `location` holds an adapter and no full checkpoint; reads no tensor of a full checkpoint."""
    return _family(location) is not None


def open_expert(location: str | Path | Mapping[str, Tensor] | Checkpoint, base: Checkpoint) -> Expert:
    """Open what `location` names; reads headers, and no tensor of a full checkpoint.

    Args:
        location: an adapter, or whatever `open_checkpoint` takes.
        base: what the deltas are to be added to; not kept open.

    Raises:
        CheckpointError: nothing there, damaged, or an adapter that cannot be merged into this base; carries all
            problems.
    """
    family = _family(location) if isinstance(location, str | Path) else None
    return CheckpointExpert(open_checkpoint(location)) if family is None else family.open(str(location), base)


def open_handle(handle: ExpertHandle) -> Expert:
    """Open an expert again, in this process or in another.

    Raises:
        CheckpointError: its files are gone.
    """
    if handle.family is None:
        return CheckpointExpert(open_checkpoint(handle.location))
    if handle.base is None:
        return handle.family.open(handle.location, None)
    with open_checkpoint(handle.base) as base:
        return handle.family.open(handle.location, base)


def _family(location: str | Path) -> Family | None:
    return next((family for family in FAMILIES if family.claims(location)), None)
