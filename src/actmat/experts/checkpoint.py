"""A full fine-tuned checkpoint as an expert, as it is stored or in its base's layout: all its tensors are stored."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import TensorsHandle
from actmat.checkpoints.model import Model
from actmat.experts.base import DeltaSource, Expert


class CheckpointExpert(Expert):
    """The tensors `W_t` of an open checkpoint, which is closed with the expert."""

    kind = "model"

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.specs, self.notes = model.specs, model.folder.notes

    def source(self, name: str) -> DeltaSource:
        """A stored source."""
        spec = self._spec(name)
        return DeltaSource(name, "stored", spec.dtype, self.model.tensors.parts(name).nbytes)

    def scheme(self, name: str) -> str:
        """Description of the layout, from the checkpoint."""
        return self.model.tensors.parts(name).scheme

    def read(self, name: str) -> Tensor:
        """The whole tensor."""
        return self.model.tensors.read(name)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of the tensor."""
        self.model.tensors.read_into(name, start, out)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Config of the checkpoint."""
        return self.model.config

    def handle(self) -> TensorsHandle:
        """Address of the checkpoint."""
        return self.model.tensors.handle()

    def prefetch(self, names: Iterable[str]) -> None:
        """Pass the hint on."""
        self.model.tensors.prefetch(names)
