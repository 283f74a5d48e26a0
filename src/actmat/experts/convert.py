"""Full checkpoints in another layout than their base: read in the base's, by the core or by a plug-in."""

from __future__ import annotations

from collections.abc import Collection

from actmat import plugins
from actmat.checkpoints.base import Checkpoint
from actmat.experts.base import Conversion, Expert
from actmat.experts.restacked import RESTACKED


def convert(checkpoint: Checkpoint, base: Checkpoint, *, owns_base: bool = False) -> Expert | None:
    """The checkpoint as an expert in another layout, that of the base; None if it needs no conversion, or none applies.

    Raises:
        CheckpointError: not all of it can be converted.
    """
    if RESTACKED.applies(checkpoint, base):
        return RESTACKED.open(checkpoint, base, owns_base)
    if _shares_names(base.specs, checkpoint.specs):
        return None
    for conversion in plugins.load_all("actmat.experts", Conversion, "conversion").values():
        if conversion.applies(checkpoint, base):
            return conversion.open(checkpoint, base, owns_base)
    return None


def _shares_names(names: Collection[str], others: Collection[str]) -> bool:
    """True if at least half of the names are among the others: two checkpoints in one layout."""
    return 2 * sum(name in others for name in names) >= len(names)
