"""An adapter as an expert without a base: its factors and the tensors trained in full, for merges into an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from actmat.checkpoints.base import Checkpoint, FileIdentity
from actmat.experts.base import Expert, ExpertHandle, Family, Source
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.open import is_adapter, open_adapter

__all__ = ["UNFITTED_LORA", "UnfittedAdapter", "open_unfitted"]


class UnfittedAdapter(Expert):
    """The tensors that an adapter stores, by their own names; its deltas are read through `adapter`."""

    kind = "adapter"
    adapter: Adapter

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.location = adapter.location
        self.specs = adapter.weights.specs
        self.n_tensors = len(self.specs)
        self.nbytes = sum(spec.nbytes for spec in self.specs.values())

    def source(self, name: str) -> Source:
        """Every tensor is stored."""
        spec = self._spec(name)
        return Source(name, "stored", spec.dtype, spec.nbytes)

    def hashes(self) -> Mapping[str, str]:
        """Content hash of every tensor of the adapter."""
        return self.adapter.hashes

    def check_values(self, label: str) -> list[str]:
        """One sentence for each tensor of the adapter with NaN or Inf."""
        return self.adapter.check_values(label)

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the adapter's weights."""
        return self.adapter.weights.identity()

    def handle(self) -> ExpertHandle:
        """The adapter's location."""
        return ExpertHandle(self.location, UNFITTED_LORA, None)

    def close(self) -> None:
        """Close the adapter's files."""
        self.adapter.weights.close()


def open_unfitted(location: str | Path, base: Checkpoint | None = None) -> UnfittedAdapter:
    """Open an adapter without looking at a base.

    Raises:
        CheckpointError: no adapter there, or a damaged one.
    """
    return UnfittedAdapter(open_adapter(location))


UNFITTED_LORA = Family("lora without a base", is_adapter, open_unfitted)
