"""A fine-tuned model as an expert, as it is stored or in its base's layout: all its tensors are stored."""

from __future__ import annotations

from actmat.checkpoints.base import TensorsHandle
from actmat.checkpoints.model import Model
from actmat.experts.deltas import Deltas, DeltaSource


class StoredDeltas(Deltas):
    """The tensors `W_t` of an open model, which is closed with them."""

    needs_base = False

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.specs = model.specs

    def source(self, name: str) -> DeltaSource:
        """A stored source."""
        spec = self._spec(name)
        return DeltaSource(name, "stored", spec.dtype, self.model.tensors.parts(name).nbytes)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of the tensor."""
        self.model.tensors.read_into(name, start, out)

    def handle(self) -> TensorsHandle:
        """Address of the tensors."""
        return self.model.tensors.handle()
