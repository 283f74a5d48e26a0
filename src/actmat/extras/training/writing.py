"""Write a checkpoint for torch.distributed.checkpoint (DCP), by torch's own writer.

A tensor is read when it is its turn to be written, so that one is in memory at a time. The same tensors give the same
bytes: what torch records of a save (its place, a random id) is left out.
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
    """Write all tensors of a checkpoint to `out`, which appears when it is complete, with config and tokenizer files.

    Args:
        checkpoint: open.
        out: a folder that does not exist, or is empty.
        under: key of the state dict below which the tensors are saved, such as `model`, which accelerate and most
            training programs use; empty: the tensors are the state dict, as `model.state_dict()` has them.

    Raises:
        OutputError: the place cannot be written.
    """
    source = {} if checkpoint.directory is None else {"the checkpoint": checkpoint.directory}
    lock, building = OutputLock(out, sibling(out, "lock")), sibling(out, "partial")
    if problems := check_output_path(out, overwrite=False, inputs=source):
        with contextlib.suppress(OutputError, OSError):
            if lock.path.is_file():  # of a process that was stopped after the rename
                lock.take()
                lock.release()
        raise OutputError("The output cannot be written there.", problems)
    with disk_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock.take()
        try:
            if problems := occupied(out, overwrite=False):  # finished while we waited
                raise OutputError("The output cannot be written there.", problems)
            if building.exists():  # a process was killed here
                shutil.rmtree(building)
            building.mkdir()
            _save(checkpoint, building, under)
            folder = checkpoint.fetch_sidecars()
            sidecars = None if folder is None else SideFolder(folder, checkpoint.side_files())
            copy_sidecars(sidecars, sidecars, building, None, checkpoint.written_configs)
            rename_folder(building, out)  # an empty folder may be there
        except BaseException:  # Ctrl-C too: nothing is left, and it is passed on
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
    # torch 2.6 has no such argument, and takes a process without a group for the only one
    alone: dict[str, Any] = {"no_dist": True} if "no_dist" in inspect.signature(save).parameters else {}
    try:
        save(state, storage_writer=_Writer(folder), planner=_Planner(checkpoint), **alone)
    except CheckpointException as failed:  # holds the errors of all ranks, here of one
        for error, _ in failed.failures.values():
            raise error from None
        raise


class _Writer(FileSystemWriter):
    """torch's writer of files, which records no place and no random id."""

    def storage_meta(self) -> StorageMeta:
        """An empty record."""
        return StorageMeta()


class _Planner(DefaultSavePlanner):
    """torch's planner, which reads a tensor when it is written."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__()
        self._checkpoint = checkpoint

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """The tensor of a write item."""
        return self._checkpoint.read(str(self.mappings[index.fqn][-1]))
