"""Write a checkpoint for `torch.distributed.checkpoint`."""

from __future__ import annotations

import warnings
from pathlib import Path

from actmat.experts.locate import Located


def export_dcp(given: Located, out: Path, *, under: str = "") -> str:
    """Write a checkpoint for `torch.distributed.checkpoint.load`; returns a sentence with the number of tensors.

    Raises:
        MergeError: the export failed; nothing is written to `out`.
    """
    from actmat.extras.training.writing import write_dcp

    checkpoint = given.model()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        write_dcp(checkpoint, out, under=under)
    return f"{len(checkpoint.specs)} unchanged tensors"
