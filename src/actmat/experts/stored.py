"""Experts that are read as they are stored: full models, also in their base's layout, and adapters without a base."""

from __future__ import annotations

import torch
from torch import Tensor

from actmat.checkpoints.model import Model
from actmat.experts.deltas import Deltas, DeltasHandle, DeltaSource
from actmat.experts.lora.adapter import Adapter, AdapterHandle
from actmat.linalg.lowrank import LowRank


class StoredDeltas(Deltas):
    """The tensors `W_t` of an open model, which is closed with them."""

    needs_base = False

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.specs = model.specs

    def source(self, name: str) -> DeltaSource:
        """A stored source."""
        spec = self._spec(name)
        return DeltaSource(name, "stored", spec.dtype, sum(s.nbytes for s in self.model.tensors.parts(name)[0]))

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of the tensor."""
        self.model.tensors.read_into(name, start, out)

    def handle(self) -> DeltasHandle:
        """Address of the tensors."""
        return self.model.tensors.handle()


class UnfittedDeltas(StoredDeltas):
    """An adapter without a base, for outputs that are adapters: its tensors by their stored names, and its factors."""

    needs_base = True
    adapter: Adapter

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter.model)
        self.adapter, self.stored = adapter, adapter.origin or adapter
        self.note(*adapter.listing.warnings, severity="warning")
        self.note(*adapter.notes)

    def factors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> LowRank:
        """The delta of the module `name`."""
        return self.adapter.factors(self.adapter.modules[name], dtype)

    def bias(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Addition to the bias of the layer of the module `name`; None without one."""
        return self.adapter.bias_delta(self.adapter.modules[name], dtype)

    def handle(self) -> AdapterHandle:
        """Address of the adapter."""
        return self.adapter.handle()
