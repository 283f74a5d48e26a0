"""A full fine-tuned checkpoint as an expert, as it is stored or in its base's layout: all its tensors are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, CheckpointHandle
from actmat.experts.base import DeltaSource, Expert


class CheckpointExpert(Expert):
    """The tensors `W_t` of an open checkpoint, which is closed with the expert."""

    kind = "model"

    def __init__(self, checkpoint: Checkpoint) -> None:
        super().__init__(checkpoint)
        self.specs, self.notes, self.models = checkpoint.specs, checkpoint.notes, checkpoint.models

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

    def handle(self) -> CheckpointHandle:
        """Address of the checkpoint."""
        return self.checkpoint.handle()

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        self.checkpoint.prefetch(names)
