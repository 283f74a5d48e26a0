"""Experts of an earlier merge that are not read again, because that merge kept the sums over their deltas.

`RememberedExpert` says of an expert what a plan asks; `KeptSums` has the sums that stand for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, FileIdentity, TensorSpec
from actmat.checkpoints.hashing import hash_names
from actmat.errors import CheckpointError
from actmat.experts.base import Expert, ExpertHandle, Source

__all__ = ["KeptSum", "KeptSums", "RememberedExpert"]


@dataclass(frozen=True, slots=True)
class KeptSum:
    """Record of one tensor in an earlier merge.

    Args:
        hashes: of the sum, and of the sum of sampled entries.
        base_hash, expert_hashes: of what was read.
        expert_norms: estimated norms of the experts' deltas; none of tensors that the method did not merge.
        weights: of the experts in the sum.
        unmoved: regions that no expert changed.
    """

    hashes: tuple[str, str]
    base_hash: str
    expert_hashes: tuple[str, ...]
    expert_norms: tuple[float, ...]
    weights: tuple[float, ...]
    unmoved: frozenset[int]


@dataclass(frozen=True, eq=False)
class KeptSums:
    """Sums over the deltas of the first experts, beside the output of an earlier merge.

    Args:
        location: of that output, for messages.
        count: number of experts.
        checkpoint: the sums, open.
        rows: what is recorded of each tensor.
    """

    location: str
    count: int
    checkpoint: Checkpoint
    rows: Mapping[str, KeptSum]

    def known(self, name: str) -> int:
        """Number of experts whose sum is kept of tensor `name`: all, or none where no method merged it."""
        return self.count if name in self.rows else 0


@dataclass(frozen=True, repr=False, eq=False)
class RememberedExpert(Expert):
    """An expert as an earlier merge recorded it. Only what it did not change can be read: those deltas are zero.

    Args:
        location, kind: of the expert.
        sources: by its own names of tensors.
        specs: likewise, with those that merges do not read.
        files: names and sizes of its weight files.
        n_tensors, nbytes: in storage.
        commit: of a repository on the hub.
        contents: of an adapter, content hash of every stored tensor.
    """

    location: str
    kind: Literal["model", "adapter"]
    sources: Mapping[str, Source]
    specs: Mapping[str, TensorSpec]
    files: tuple[FileIdentity, ...]
    n_tensors: int
    nbytes: int
    commit: str = ""
    contents: Mapping[str, str] | None = None

    def source(self, name: str) -> Source:
        """Form and dtype as they were; nothing is read for it."""
        spec = self._spec(name)
        found = self.sources.get(name)
        if found is None:  # of an adapter: it says nothing about the tensor
            return Source(name, "stored" if self.kind == "model" else "zero", spec.dtype, 0)
        return dataclasses.replace(found, nbytes=0)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Refuse: the sums stand for it.

        Raises:
            CheckpointError: always.
        """
        raise CheckpointError(f"{self.location}: '{name}' is not read again, because the sums over it were kept")

    def content(self, name: str) -> str:
        """Hash of nothing, for a zero delta.

        Raises:
            CheckpointError: for any other, as `read_into`.
        """
        if self.source(name).kind == "zero":
            return hash_names(())
        raise CheckpointError(f"{self.location}: '{name}' is not formed again, because the sums over it were kept")

    def hashes(self) -> Mapping[str, str] | None:
        """Of an adapter, content hashes of all that it stores."""
        return self.contents

    def identity(self) -> tuple[FileIdentity, ...]:
        """Names and sizes of its files; no times."""
        return self.files

    def handle(self) -> ExpertHandle:
        """Address of the expert itself, should it still be there."""
        address = f"{self.location.partition('@')[0]}@{self.commit}" if self.commit else self.location
        return CheckpointHandle(address, "", self.location)

    def close(self) -> None:
        """Nothing is open."""
