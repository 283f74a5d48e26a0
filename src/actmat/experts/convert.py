"""Full checkpoints in another layout than their base: read in the base's, or refused."""

from __future__ import annotations

from collections.abc import Collection

from actmat.checkpoints.base import Checkpoint
from actmat.errors import CheckpointError
from actmat.experts.checkpoint import RestackedExpert
from actmat.experts.restacked import open_restacked, stacks_otherwise
from actmat.layout.components import single_file_of


def convert(checkpoint: Checkpoint, base: Checkpoint) -> RestackedExpert | None:
    """The checkpoint as an expert in another layout, that of the base; None if it needs no conversion.

    Raises:
        CheckpointError: not all of it can be converted, or only one of them is a single file of an image tool.
    """
    if stacks_otherwise(checkpoint, base):
        return open_restacked(checkpoint, base)
    if not _shares_names(base.specs, checkpoint.specs) and _is_diffusers(checkpoint) != _is_diffusers(base):
        single = base if _is_diffusers(checkpoint) else checkpoint
        kind = single_file_of(single.specs)
        if kind is not None:
            raise CheckpointError(
                f"{checkpoint.location}: its layout differs from the base's ({base.location}): {single.location} is "
                f"{kind.words}, the other is a folder of diffusers. Fix: convert the file with diffusers "
                "(from_single_file, then save_pretrained), and give folders only."
            )
    return None


def _is_diffusers(checkpoint: Checkpoint) -> bool:
    return checkpoint.config is not None and "_class_name" in checkpoint.config


def _shares_names(names: Collection[str], others: Collection[str]) -> bool:
    """True if at least half of the names are among the others: two checkpoints in one layout."""
    return 2 * sum(name in others for name in names) >= len(names)
