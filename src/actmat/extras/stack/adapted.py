"""A model with an adapter merged into it, as one model: `base+lora`.

Each entry is the model's plus the adapter's delta, computed in float32 (float64 for a float64 model) and rounded once
to the model's dtype, as in PEFT's `merge_and_unload`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors, TensorsHandle, TensorSpec, View, torch_dtype
from actmat.checkpoints.layer_names import adapted_parts
from actmat.checkpoints.model import Model
from actmat.checkpoints.raw import copy_range, raw_bytes
from actmat.errors import CheckpointError
from actmat.experts.deltas import Deltas, DeltasHandle
from actmat.experts.locate import fit_expert, locate
from actmat.experts.locate import open_handle as open_expert_handle


class AdaptedTensors(View):
    """Tensors of a model with an adapter's deltas added; closes both."""

    def __init__(self, location: str, model: Tensors, adapter: Deltas) -> None:
        super().__init__([model, adapter.model.tensors])
        self._model, self._adapter = model, adapter
        self.location, self.specs, self.aliases = location, model.specs, model.aliases

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Fill with the tensor's bytes; for a changed tensor, computes the delta of these entries."""
        first, last = start // spec.itemsize, -(-(start + len(out)) // spec.itemsize)
        copy_range(self._entries(spec, first, last), start - first * spec.itemsize, out)

    def handle(self) -> TensorsHandle:
        """Handles of the model and the adapter."""
        handle, arguments = self._model.handle(), (self._adapter.handle(), self.location)
        return TensorsHandle(handle.address, self.location, make=_add_adapter, sources=(handle,), arguments=arguments)

    def close(self) -> None:
        """Close both."""
        self._adapter.close()
        self._model.close()

    def _entries(self, spec: TensorSpec, first: int, last: int) -> Tensor:
        """Entries `first:last` of the flattened tensor."""
        name, kind, dtype = spec.name, self._adapter.source(spec.name).kind, torch_dtype(spec.dtype)
        if kind == "stored":  # a fully saved module
            return self._adapter.read(name).reshape(-1)[first:last].to(dtype)
        values = torch.empty(last - first, dtype=dtype)
        self._model.read_into(name, first * spec.itemsize, raw_bytes(values))
        if kind == "zero":
            return values
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        return (values.to(wide) + self._adapter.dense(name, first, last, wide)).to(dtype)


def _add_adapter(model: Sequence[Tensors], adapter: DeltasHandle, location: str) -> Tensors:
    (stored,) = model
    return AdaptedTensors(location, stored, open_expert_handle(adapter))


def open_adapted(location: str, open_part: Callable[[str], Model]) -> Model:
    """Open a model with an adapter merged into it; see `checkpoints.resolve.OpenComposed`."""
    pair = adapted_parts(location)
    assert pair is not None, "the location names a model and an adapter"
    model = open_part(pair[0])
    try:
        located = locate(pair[1])
        if isinstance(located, Model):
            raise CheckpointError(f"{location}: '{pair[1]}' is not an adapter")
        adapter = fit_expert(located, model)
        if adapter.model.folder.untied:
            adapter.close()
            raise CheckpointError(
                f"{location}: the adapter unties the output head, which the model does not have. Fix: pass the "
                "model as the base and the adapter as an expert"
            )
    except CheckpointError:
        model.close()
        raise
    files = (*model.folder.files, *adapter.model.folder.files)
    folder = replace(model.folder, files=files, notes=(*model.folder.notes, *adapter.model.folder.notes))
    return Model(AdaptedTensors(location, model.tensors, adapter), folder)
