"""A model with an adapter merged into it, as one checkpoint: `base+lora`.

Each entry is the model's plus the adapter's delta, computed in float32 (float64 for a float64 model) and rounded once
to the model's dtype, as in PEFT's `merge_and_unload`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, FileIdentity, TensorSpec, torch_dtype
from actmat.checkpoints.raw import copy_range, raw_bytes
from actmat.checkpoints.side_files import ModelFiles
from actmat.checkpoints.view import CheckpointView
from actmat.errors import CheckpointError
from actmat.experts.base import Expert, ExpertHandle
from actmat.experts.locate import locate
from actmat.experts.locate import open_handle as open_expert_handle
from actmat.extras.stack.stack import models_of


class AdaptedCheckpoint(CheckpointView):
    """Tensors of a model with an adapter's deltas added; closes both."""

    def __init__(self, location: str, model: Checkpoint, adapter: Expert) -> None:
        super().__init__(model)
        self.location, self._adapter = location, adapter
        self.specs, self.aliases = MappingProxyType(dict(model.specs)), model.aliases
        self.notes = (*model.notes, *adapter.notes)
        self.models = models_of((model, adapter))

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the files of both."""
        return (*super().identity(), *self._adapter.identity())

    def sources(self) -> tuple[ModelFiles, ...]:
        """Files of both."""
        return (*super().sources(), *self._adapter.sources())

    def read(self, name: str) -> Tensor:
        """Read the whole tensor."""
        spec = self.find_spec(name)
        return self._entries(name, 0, spec.numel).view(spec.shape)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill with the tensor's bytes; for a changed tensor, computes the delta of these entries."""
        first, last = start // spec.itemsize, -(-(start + len(out)) // spec.itemsize)
        copy_range(self._entries(spec.name, first, last), start - first * spec.itemsize, out)

    def handle(self) -> CheckpointHandle:
        """Handles of the model and the adapter."""
        handle = self.inner.handle()
        view = AdaptedHandle(self.location, handle, self._adapter.handle())
        return CheckpointHandle(handle.address, "adapted", self.location, view=view)

    def close(self) -> None:
        """Close both."""
        self._adapter.close()
        super().close()

    def _entries(self, name: str, first: int, last: int) -> Tensor:
        """Entries `first:last` of the flattened tensor."""
        spec, kind = self.specs[name], self._adapter.source(name).kind
        dtype = torch_dtype(spec.dtype)
        if kind == "stored":  # a fully saved module
            stored = self._adapter.read(name)
            return stored.reshape(-1)[first:last].to(dtype)
        values = torch.empty(last - first, dtype=dtype)
        self.inner.read_into(name, first * spec.itemsize, raw_bytes(values))
        if kind == "zero":
            return values
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (values.to(wide) + self._adapter.delta(name, first, last, wide)).to(dtype)


@dataclass(frozen=True, slots=True)
class AdaptedHandle:
    """Address of a model with an adapter: a `View`."""

    location: str
    model: CheckpointHandle
    adapter: ExpertHandle

    def open(self, open_handle: Callable[[CheckpointHandle], Checkpoint]) -> Checkpoint:
        """The model with the adapter."""
        return AdaptedCheckpoint(self.location, open_handle(self.model), open_expert_handle(self.adapter))


def merged(location: str, model: Checkpoint, adapter: str) -> Checkpoint:
    """See `checkpoints.resolve.OpenAdapted`."""
    try:
        located = locate(adapter)
        if not located.needs_base:
            raise CheckpointError(f"{location}: '{adapter}' is not an adapter")
        opened = located.expert(model)
        if opened.heads:
            opened.close()
            raise CheckpointError(
                f"{location}: the adapter unties the output head, which the model does not have. Fix: pass the "
                "model as the base and the adapter as an expert"
            )
    except CheckpointError:
        model.close()
        raise
    return AdaptedCheckpoint(location, model, opened)
