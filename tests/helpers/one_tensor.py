"""One tensor in a base and in experts, and its reader."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.checkpoints.raw import raw_bytes
from actmat.engine.deltas import LazyDeltas
from actmat.engine.findings import Findings
from actmat.engine.memory import Scratch
from actmat.engine.reader import TensorReader
from actmat.layout.types import Role, TensorLayout
from actmat.plan.model import TensorPlan
from actmat.plan.parts import cut

__all__ = ["VECTOR", "OneTensor", "digest"]

VECTOR = TensorLayout(Role.VECTOR, "")


class OneTensor:
    """One tensor in a base and in experts, and its reader."""

    def __init__(self, base: Tensor, *experts: Tensor, compute: torch.dtype = torch.float32, **settings: Any) -> None:
        self.findings = Findings(tolerated=settings.get("tolerated", False))
        name = {
            torch.float32: "float32",
            torch.bfloat16: "bfloat16",
            torch.float16: "float16",
            torch.float64: "float64",
        }
        self.item = TensorPlan(
            "w", tuple(base.shape), name[base.dtype], name[base.dtype], VECTOR, "merge", "",
            sources=("w",) * len(experts), expert_dtypes=tuple(name[e.dtype] for e in experts),
        )  # fmt: skip
        checkpoints = [MemoryCheckpoint({"w": t}) for t in (base, *experts)]
        labels = [f"e{t}" for t in range(len(experts))]
        self.reader = TensorReader(
            self.item, checkpoints[0], checkpoints[1:], labels, compute, torch.device("cpu"), Scratch(), self.findings
        )

    def first_part(self) -> LazyDeltas:
        """The deltas of the first part, for a rule that takes tensors whole."""
        part = cut(self.item.shape, VECTOR, "tensor")[0]
        return LazyDeltas(self.reader, part, self.reader.read_base(part))

    def read(self, acts_on: Any = "tensor") -> list[Tensor]:
        """The deltas, put together from all parts."""
        found: list[list[Tensor]] = []
        for part in cut(self.item.shape, VECTOR, acts_on):
            deltas = LazyDeltas(self.reader, part, self.reader.read_base(part))
            found.append([d.flatten().clone() for d in deltas])
        return [torch.cat(pieces).view(self.item.shape) for pieces in zip(*found, strict=True)]


def digest(tensor: Tensor) -> str:
    seen = ContentHash()
    seen.update(raw_bytes(tensor.clone()))
    return seen.hexdigest()
