"""One tensor in a base and in experts, and its reader."""

from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.memory import hold_model
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.deltas import RegionDeltas
from actmat.engine.findings import Findings
from actmat.engine.inputs import Inputs
from actmat.engine.memory import Scratch
from actmat.engine.reader import ItemReader
from actmat.experts.stored import StoredDeltas
from actmat.layout.types import Role, TensorLayout
from actmat.planning.item import Strategy, Target, Write
from actmat.planning.model import Item
from actmat.planning.regions import cut
from actmat.planning.statistics import ExpertStatistics

VECTOR = TensorLayout(Role.VECTOR, "")


class OneTensor:
    """One tensor in a base and in experts, and its reader."""

    def __init__(self, base: Tensor, *experts: Tensor, compute: torch.dtype = torch.float32, **settings: Any) -> None:
        self.findings = Findings()
        labels = tuple(f"e{t}" for t in range(len(experts)))
        model = hold_model({"w": base})
        opened = [StoredDeltas(hold_model({"w": t})) for t in experts]
        dtype = model.specs["w"].dtype
        spec = TensorSpec("w", tuple(base.shape), dtype, "")
        target = Target(spec, VECTOR, sources=tuple(e.source("w") for e in opened))
        self.item = Item(target, "merge", "", Write("sum", (spec,)))
        inputs = Inputs((), model, opened, ExpertStatistics.none(labels))
        self.reader = ItemReader(self.item, inputs, compute, Scratch(), self.findings, settings.get("device"))

    def first_part(self, strategy: Strategy = "each") -> RegionDeltas:
        """The deltas of the first region, for a method that takes tensors whole."""
        region = cut(self.item.shape, VECTOR, "tensor")[0]
        return RegionDeltas(self.reader, region, self.reader.read_base(region), strategy)

    def read(self, acts_on: Any = "tensor") -> list[Tensor]:
        """The deltas, put together from all regions."""
        found: list[list[Tensor]] = []
        for region in cut(self.item.shape, VECTOR, acts_on):
            deltas = RegionDeltas(self.reader, region, self.reader.read_base(region))
            found.append([d.flatten().clone() for d in deltas])
        return [torch.cat(pieces).view(self.item.shape) for pieces in zip(*found, strict=True)]


def digest(tensor: Tensor) -> str:
    seen = ContentHash()
    seen.update(raw_bytes(tensor.clone()))
    return seen.hexdigest()
