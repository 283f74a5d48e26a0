"""Adapters as experts: the parts that all have in common, with and without a base."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from torch import Tensor

from actmat.checkpoints.base import FileIdentity, TensorSpec, versions_of_files
from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from actmat.checkpoints.hashing import hash_names
from actmat.checkpoints.side_files import ModelFiles, SideFiles
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError
from actmat.experts.base import AdapterHandle, DeltaSource, Expert
from actmat.experts.lora.adapter import Adapter
from actmat.experts.untied import TiedParts


class StoredAdapter(Expert):
    """The stored tensors of an adapter, which is closed with the expert."""

    kind = "adapter"

    def __init__(self, stored: Adapter) -> None:
        self.location = stored.location
        self.n_tensors = len(stored.weights.specs)
        self.nbytes = sum(spec.nbytes for spec in stored.weights.specs.values())
        self.specs = stored.weights.specs
        self._stored = stored
        self._full: Mapping[str, str] = {n: n for n in stored.weights.specs}

    def hashes(self) -> Mapping[str, str]:
        """Content hash of every stored tensor."""
        return self._stored.hashes

    def check_values(self, label: str) -> list[str]:
        """One sentence for each tensor that is merged and has NaN or Inf."""
        return self._stored.check_values(label)

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the adapter's weights."""
        return self._stored.weights.identity()

    def sources(self) -> tuple[ModelFiles, ...]:
        """The adapter's folder or file."""
        return self._stored.weights.sources()

    @property
    def stored(self) -> Adapter:
        """The adapter as it is stored."""
        return self._stored

    @property
    def _folder(self) -> Source | None:
        """PEFT's folder with its files, such as a tokenizer."""
        found = [whole for f in self.sources() if isinstance(whole := f.whole(), Source)]
        return next((f for f in found if ADAPTER_CONFIG in f.names), None)

    def side_files(self) -> SideFiles:
        """Files of PEFT's folder other than the adapter's weights."""
        return SideFiles() if self._folder is None else self._folder.side_files(ADAPTER_WEIGHTS)

    def fetch_sidecars(self) -> Path | None:
        """Local folder of these files."""
        return None if self._folder is None else self._folder.fetch_sidecars()

    def read(self, name: str) -> Tensor:
        """A tensor that is stored whole."""
        if name not in self._full:
            self._refuse(name, "read")
        return self._stored.weights.read(self._full[name])

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of a tensor that is stored whole."""
        if name not in self._full:
            self._refuse(name, "read")
        self._stored.weights.read_into(self._full[name], start, out)

    def handle(self) -> AdapterHandle:
        """The adapter's location, the versions of remote files, and the user's words that decided how it is read."""
        etags = versions_of_files(self.identity())
        return AdapterHandle(self.location, None, etags, self._stored.config.stacks, self._stored.converted_to)

    def close(self) -> None:
        """Close the adapter's files."""
        self._stored.weights.close()


class UnfittedAdapter(StoredAdapter):
    """An adapter without a base, for outputs that are adapters: its tensors by their stored names, and its factors."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self.adapter, self.notes, self.warnings = adapter, adapter.notes, adapter.listing.warnings

    def source(self, name: str) -> DeltaSource:
        """A stored source."""
        spec = self._spec(name)
        return DeltaSource(name, "stored", spec.dtype, spec.nbytes)


class FittedAdapter(StoredAdapter):
    """An adapter on its base; a subclass says where its deltas lie, and forms them."""

    def __init__(self, stored: Adapter, parts: TiedParts) -> None:
        super().__init__(stored)
        self._base, self.heads = parts.base, parts.heads

    def _take(self, parts: TiedParts, full: Mapping[str, str], hidden: frozenset[str], problems: Sequence[str]) -> None:
        """Record the tensors that were trained in full, and the base's tensors that the adapter may change.

        Args:
            full: name in the base -> stored name.
            hidden: other names of tensors of the base.
            problems: of the adapter on this base.

        Raises:
            CheckpointError: there are problems.
        """
        if problems := [*parts.problems, *problems]:
            raise CheckpointError(
                f"{self.location}: the adapter cannot be merged into {self._base.location}.",
                [f"{self.location}: {problem}" for problem in problems],
            )
        self._full = {name: stored for name, stored in full.items() if name not in parts.copies}
        specs = {name: spec for name, spec in self._base.specs.items() if name not in hidden}
        for name, stored in self._full.items():
            spec = self._stored.weights.specs[stored]
            specs[name] = TensorSpec(name, spec.shape, spec.dtype, spec.file)
        self.specs = MappingProxyType(specs)

    def _parts_of(self, name: str) -> tuple[str, ...]:
        """Stored names of the tensors that a formed delta is made of; empty for a zero delta."""
        raise NotImplementedError

    def content(self, name: str) -> str:
        """Hash over the stored tensors of the delta; the hash of no data for a zero delta."""
        if self.source(name).kind == "stored":
            self._refuse(name, "formed")
        return hash_names((n, self._stored.hashes[n]) for n in self._parts_of(name))

    def handle(self) -> AdapterHandle:
        """The same with the address of the base, and of tables with the rows of another vocabulary."""
        aligned = self._stored.weights.handle() if self._stored.has_other_rows else None
        return replace(super().handle(), base=self._base.handle(), weights=aligned)
