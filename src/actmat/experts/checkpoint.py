"""A full fine-tuned checkpoint as an expert, as it is stored or in its base's layout: all its tensors are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, FileIdentity
from actmat.checkpoints.rows import RowsCheckpoint
from actmat.checkpoints.side_files import ModelFiles, SideFiles
from actmat.experts.base import DeltaSource, Expert, ExpertHandle, RestackedHandle


class CheckpointExpert(Expert):
    """The tensors `W_t` of an open checkpoint, which is closed with the expert."""

    kind = "model"

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.location = checkpoint.location
        self.specs = checkpoint.specs
        self.notes, self.models = checkpoint.notes, checkpoint.models
        self.n_tensors = len(checkpoint.specs)
        self.nbytes = sum(spec.nbytes for spec in checkpoint.specs.values())

    def source(self, name: str) -> DeltaSource:
        """A stored source."""
        spec = self._spec(name)
        nbytes = self.checkpoint.stored_bytes(name) if self.scheme(name) else spec.nbytes
        return DeltaSource(name, "stored", spec.dtype, nbytes)

    def scheme(self, name: str) -> str:
        """Description of the layout, from the checkpoint."""
        return self.checkpoint.scheme(name)

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        return self.checkpoint.read(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of the tensor."""
        self.checkpoint.read_into(name, start, out)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Config of the checkpoint."""
        return self.checkpoint.config

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the checkpoint's weight files."""
        return self.checkpoint.identity()

    def handle(self) -> ExpertHandle:
        """Address of the checkpoint."""
        return self.checkpoint.handle()

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        self.checkpoint.prefetch(names)

    @property
    def buffer_bytes(self) -> int:
        """Bytes of read-ahead of the checkpoint."""
        return self.checkpoint.buffer_bytes

    def sources(self) -> tuple[ModelFiles, ...]:
        """Files of the checkpoint's models."""
        return self.checkpoint.sources()

    def side_files(self) -> SideFiles:
        """Side files of the checkpoint."""
        return self.checkpoint.side_files()

    def fetch_sidecars(self) -> Path | None:
        """Local folder of the side files."""
        return self.checkpoint.fetch_sidecars()

    def close(self) -> None:
        """Close the checkpoint."""
        self.checkpoint.close()


class RestackedExpert(CheckpointExpert):
    """A full checkpoint that is read in the base's layout.

    Args:
        checkpoint: in the base's layout, closed with this.
        base: the base.
        owns: close the base too.
    """

    def __init__(self, checkpoint: RowsCheckpoint, base: Checkpoint, *, owns: bool) -> None:
        super().__init__(checkpoint)
        self._stored, self._base, self._owns = checkpoint.inner, base, owns

    def handle(self) -> RestackedHandle:
        """Addresses of the expert and of the base."""
        return RestackedHandle(self._stored.handle(), self._base.handle())

    def close(self) -> None:
        """Close the checkpoint, and the base if it is its own."""
        super().close()
        if self._owns:
            self._base.close()
