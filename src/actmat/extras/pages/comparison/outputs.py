"""An opened output of `actmat merge`, a model or an adapter, and its items as the manifest lists them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.resolve import open_checkpoint
from actmat.experts.lora.adapter import Adapter
from actmat.experts.resolve import open_adapter
from actmat.linalg.lowrank import LowRank

__all__ = ["Output", "items_of", "makes_adapter", "open_output"]

Row = Mapping[str, Any]


def makes_adapter(manifest: Row) -> bool:
    """True for the manifest of a merged adapter."""
    return manifest.get("kind") == "adapter"


def items_of(manifest: Row) -> dict[str, Row]:
    """Name -> row of every item: tensors of a model, modules and full tensors of an adapter."""
    return {row["name"]: row for row in manifest["modules" if makes_adapter(manifest) else "tensors"]}


@dataclass(frozen=True, slots=True)
class Output:
    """An opened output: its manifest and items, the stored tensors, and the adapter if it is one."""

    directory: Path
    manifest: Row
    items: Mapping[str, Row]
    checkpoint: Checkpoint
    adapter: Adapter | None = None

    def factors(self, item: str) -> LowRank | None:
        """The item's delta in float64, where it is stored as factors."""
        module = None if self.adapter is None else self.adapter.modules.get(item)
        return None if module is None or self.adapter is None else self.adapter.factors(module, torch.float64)

    def stored_name(self, item: str) -> str:
        """Name under which an item that has no factors is stored."""
        return item if self.adapter is None else self.adapter.extras.get(item, item)

    def shape(self, item: str) -> tuple[int, ...] | None:
        """Shape of the stored item, None where it is missing."""
        if self.adapter is not None and item in self.adapter.modules:
            return self.adapter.modules[item].shape
        spec = self.checkpoint.specs.get(self.stored_name(item))
        return None if spec is None else spec.shape

    def identity(self, item: str) -> tuple[str, str] | None:
        """Hash and dtype of the stored bytes, where the manifest gives a hash per item.

        The dtype matters: small integers and zeros may have the same bytes in two dtypes by chance.
        """
        found = self.items[item].get("hash")
        return None if found is None else (found, self.checkpoint.specs[item].dtype)

    def action(self, item: str) -> str:
        """`copy`, `tie`, ..., or the method's name where one was used."""
        row = self.items[item]
        return str(row["method"] if row["action"] == "merge" else row["action"])

    def missing(self) -> list[str]:
        """Problems: items that the output does not store in the shape that the manifest gives."""
        return [
            f"{self.checkpoint.location} has no tensor '{n}' of shape {row['shape']}, which its manifest lists"
            for n, row in self.items.items()
            if self.shape(n) != tuple(row["shape"])
        ]

    def __enter__(self) -> Output:
        return self

    def __exit__(self, *error: object) -> None:
        self.checkpoint.close()


def open_output(directory: Path, manifest: Row) -> Output:
    """Open the output in `directory`, whose manifest was read already.

    Raises:
        CheckpointError: its files cannot be read.
    """
    adapter = open_adapter(directory) if makes_adapter(manifest) else None
    checkpoint = open_checkpoint(directory) if adapter is None else adapter.weights
    return Output(directory, manifest, items_of(manifest), checkpoint, adapter)
