"""Write a checkpoint for torch.distributed.checkpoint (DCP) with torch's own writer.

Each tensor is read just before it is written, so that one is in memory at a time. Equal tensors give equal bytes: the
path and the random id that torch records are left out.
"""

from __future__ import annotations

import contextlib
import inspect
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import MetadataIndex, StorageMeta
from torch.distributed.checkpoint.state_dict_saver import save

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.checkpoints.writing.lock import OutputLock
from actmat.checkpoints.writing.sidecars import SideFolder, copy_sidecars
from actmat.checkpoints.writing.staging import check_output_path, disk_errors, occupied, sibling
from actmat.errors import OutputError
from actmat.system import rename_folder


def write_dcp(checkpoint: Checkpoint, out: Path, *, under: str = "") -> None:
    """Write all tensors, config and tokenizer files of a checkpoint to `out`, which appears when complete.

    Args:
        checkpoint: open checkpoint.
        out: folder that is missing or empty.
        under: state dict key to save the tensors under, such as `model`, which accelerate and most training programs
        use; empty: the tensors are the state dict itself, as from `model.state_dict()`.

    Raises:
        OutputError: `out` cannot be written.
    """
    source = {} if checkpoint.directory is None else {"the checkpoint": checkpoint.directory}
    lock, building = OutputLock(out, sibling(out, "lock")), sibling(out, "partial")
    if problems := check_output_path(out, overwrite=False, inputs=source):
        with contextlib.suppress(OutputError, OSError):
            if lock.path.is_file():  # left by a process that was stopped after the rename
                lock.take()
                lock.release()
        raise OutputError("The output cannot be written.", problems)
    with disk_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock.take()
        try:
            if problems := occupied(out, overwrite=False):  # another process finished it meanwhile
                raise OutputError("The output cannot be written.", problems)
            if building.exists():  # left by a killed process
                shutil.rmtree(building)
            building.mkdir()
            _save(checkpoint, building, under)
            folder = checkpoint.fetch_sidecars()
            sidecars = None if folder is None else SideFolder(folder, checkpoint.side_files())
            copy_sidecars(sidecars, sidecars, building, None, checkpoint.written_configs)
            rename_folder(building, out)  # replaces an empty folder
        except BaseException:  # also Ctrl-C: clean up, then re-raise
            shutil.rmtree(building, ignore_errors=True)
            raise
        finally:
            lock.release()


def _save(checkpoint: Checkpoint, folder: Path, under: str) -> None:
    shapes = {
        name: torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device="meta")
        for name, spec in checkpoint.specs.items()
    }
    state: dict[str, Any] = {under: shapes} if under else dict(shapes)
    # torch 2.6 lacks this argument, and treats a process without a group as the only one
    alone: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}
    try:
        save(state, storage_writer=_Writer(folder), planner=_Planner(checkpoint), **alone)
    except CheckpointException as failed:  # contains the errors of all ranks, here one
        for error, _ in failed.failures.values():
            raise error from None
        raise


class _Writer(FileSystemWriter):
    """torch's file writer, without path and random id."""

    def storage_meta(self) -> StorageMeta:
        """Return an empty record."""
        return StorageMeta()


class _Planner(DefaultSavePlanner):
    """torch's planner, but each tensor is read when it is written."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Read the tensor of a write item."""
        return self._checkpoint.read(str(self.mappings[index.fqn][-1]))
