"""Write a checkpoint for `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from pathlib import Path

from actmat.checkpoints.resolve import open_checkpoint


def export_dcp(checkpoint: str, out: Path, *, under: str = "") -> str:
    """Write a checkpoint for `torch.distributed.checkpoint.load`; returns the number of its tensors in words.

    Raises:
        MergeError: nothing is at `out`.
    """
    from actmat.extras.training.writing import write_dcp

    with open_checkpoint(checkpoint) as opened, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        write_dcp(opened, out, under=under)
        return f"{len(opened.specs)} tensors as they were"
