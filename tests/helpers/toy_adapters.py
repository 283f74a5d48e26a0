"""A family of adapters in a page: one tensor of the base gets the delta `up down`, both listed in a JSON file.

Shapes: `O` rows and `I` columns of the tensor.
"""

import json
from pathlib import Path

import torch
from torch import Tensor

from actmat.checkpoints.files import file_identity
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.model import Model
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError
from actmat.experts.deltas import AdapterFamily, Deltas, DeltaSource
from actmat.experts.lora.adapter import Adapter, AdapterHandle
from actmat.experts.lora.config import AdapterConfig
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.modules import Listing
from actmat.linalg.lowrank import LowRank

FILE = "toy_adapter.json"


class ToyDeltas(Deltas):
    """`W_0 + up down` of one tensor."""

    needs_base = True

    def __init__(self, adapter: Adapter, base: Model) -> None:
        super().__init__(adapter.model)
        self._base = base
        (up, down) = adapter.weights.specs
        self._target = up.partition(" of ")[2]
        self._factors: LowRank | None = LowRank(adapter.weights.read(up)[:, None], adapter.weights.read(down)[None])
        self._shape = self._factors.shape
        self.specs = base.specs
        if self.specs[self._target].shape != tuple(self._shape):
            raise CheckpointError(f"{self.location}: does not fit '{self._target}' of {base.location}")

    def source(self, name: str) -> DeltaSource:
        dtype = self._spec(name).dtype
        if name == self._target:
            return DeltaSource(name, "formed", dtype, 8 * sum(self._shape), rank=1)
        return DeltaSource(name, "zero", dtype, 0)

    def dense(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        if self.source(name).kind == "zero":
            return super().dense(name, start, stop, dtype)
        return self._open().dense().flatten()[start:stop].to(dtype)

    def factors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> LowRank:
        if self.source(name).kind == "zero":
            return super().factors(name, shape, dtype)
        return self._open().to(dtype)

    def content(self, name: str) -> str:
        seen = ContentHash()
        if self.source(name).kind == "formed":
            seen.update(memoryview((Path(self.location) / FILE).read_bytes()))
        return seen.hexdigest()

    def handle(self) -> AdapterHandle:
        return AdapterHandle(self.location, self._base.tensors.handle())

    def close(self) -> None:
        self._factors = None

    def _open(self) -> LowRank:
        if self._factors is None:
            raise ValueError(f"{self.location}: read from an adapter that is closed")
        return self._factors


def look(source: Source, file: Model | None, stacks: tuple[StackWord, ...]) -> Adapter | None:
    if FILE not in source.names:
        return None
    path = source.fetch(FILE)
    fields = json.loads(path.read_text())
    tensors = {f"{n} of {fields['tensor']}": torch.tensor(fields[n], dtype=torch.float64) for n in ("up", "down")}
    model = hold_model(tensors, location=source.location, files=(file_identity(path),))
    return Adapter(model, AdapterConfig(r=1, alpha=1.0), (), Listing({}, {}, {}, ()))


TOY = AdapterFamily("toy", look, ToyDeltas, lambda adapter: "it has no factors. Fix: give the base")


def save_toy(folder: Path, tensor: str, up_O: Tensor, down_I: Tensor) -> None:
    """Write an adapter of this family."""
    folder.mkdir(parents=True)
    (folder / FILE).write_text(json.dumps({"tensor": tensor, "up": up_O.tolist(), "down": down_I.tolist()}))
