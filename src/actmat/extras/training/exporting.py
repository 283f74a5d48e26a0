"""Write a checkpoint in the form of another tool."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Literal

from actmat.api.merging import Location
from actmat.checkpoints.resolve import open_checkpoint


def export(checkpoint: Location, *, out: Location, to: Literal["dcp"] = "dcp", under: str = "") -> None:
    """Write a checkpoint, such as a merged model, for `torch.distributed.checkpoint.load`.

    Args:
        checkpoint: directory, file, hub id or URL of anything that `merge` reads.
        out: a directory that does not exist, or is empty.
        to: form of the output; `dcp` is the one there is.
        under: key of the state dict below which the tensors are saved, such as `model`.

    Raises:
        MergeError: nothing is at `out`.
    """
    assert to == "dcp", "the type says so"
    from actmat.extras.training.writing import write_dcp

    with open_checkpoint(checkpoint) as opened, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        write_dcp(opened, Path(out), under=under)
