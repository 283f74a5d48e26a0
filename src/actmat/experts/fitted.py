"""Adapters as experts: the parts that all have in common, with and without a base."""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, TensorSpec, versions_of_files
from actmat.checkpoints.folder import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from actmat.checkpoints.hashing import hash_names
from actmat.checkpoints.side_files import SideFiles
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError
from actmat.experts.base import AdapterHandle, DeltaSource, Expert
from actmat.experts.lora.adapter import Adapter
from actmat.experts.untied import keeps_ties, tied_parts
from actmat.linalg.lowrank import LowRank


class StoredAdapter(Expert):
    """The stored tensors of an adapter, which is closed with the expert."""

    kind = "adapter"

    def __init__(self, stored: Adapter) -> None:
        super().__init__(stored.weights)
        self.specs = self.checkpoint.specs
        self.stored = stored
        self._full: Mapping[str, str] = {n: n for n in self.specs}

    def hashes(self) -> Mapping[str, str]:
        """Content hash of every stored tensor."""
        return self.stored.hashes

    def check_values(self, label: str) -> list[str]:
        """One sentence for each tensor that is merged and has NaN or Inf."""
        return self.stored.check_values(label)

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
        return self.checkpoint.read(self._full[name])

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of a tensor that is stored whole."""
        if name not in self._full:
            self._refuse(name, "read")
        self.checkpoint.read_into(self._full[name], start, out)

    def handle(self) -> AdapterHandle:
        """The adapter's location, the versions of remote files, and the user's words that decided how it is read."""
        etags = versions_of_files(self.identity())
        return AdapterHandle(self.location, None, etags, self.stored.config.stacks, self.stored.converted_to)


class UnfittedAdapter(StoredAdapter):
    """An adapter without a base, for outputs that are adapters: its tensors by their stored names, and its factors."""

    def __init__(self, adapter: Adapter) -> None:
        super().__init__(adapter)
        self._own = adapter
        self.adapter, self.notes, self.warnings = adapter, adapter.notes, adapter.listing.warnings

    def source(self, name: str) -> DeltaSource:
        """A stored source."""
        spec = self._spec(name)
        return DeltaSource(name, "stored", spec.dtype, spec.nbytes)

    def factors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> LowRank:
        """The delta of the module `name`."""
        return self._own.factors(self._own.modules[name], dtype)

    def bias(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Addition to the bias of the layer of the module `name`; None without one."""
        return self._own.bias_delta(self._own.modules[name], dtype)


class FittedAdapter(StoredAdapter):
    """An adapter on its base; a subclass says where its deltas lie, and forms them.

    Args:
        stored: the adapter.
        base: may be closed afterwards, unless deltas depend on it.
        extras: tensors trained in full, name in the model -> stored name.
        deltas: names in the model of the weights that it has deltas for, and their shapes, empty if not known.
    """

    def __init__(
        self, stored: Adapter, base: Checkpoint, extras: Mapping[str, str], deltas: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__(stored)
        self._parts = tied_parts(
            base,
            {name: self.checkpoint.specs[n] for name, n in extras.items()},
            deltas,
            keeps_ties=keeps_ties(stored.config.fields),
            equal=lambda a, b: stored.hashes[extras[a]] == stored.hashes[extras[b]],
        )
        self._base, self.heads = self._parts.base, self._parts.heads
        self._lock = threading.Lock()
        self._last: tuple[str, torch.dtype, Tensor | LowRank] | None = None

    def _take(self, full: Mapping[str, str], hidden: frozenset[str], problems: Sequence[str]) -> None:
        """Record the tensors that were trained in full, and the base's tensors that the adapter may change.

        Args:
            full: name in the base -> stored name.
            hidden: other names of tensors of the base.
            problems: of the adapter on this base.

        Raises:
            CheckpointError: there are problems.
        """
        if problems := [*self._parts.problems, *problems]:
            raise CheckpointError(
                f"{self.location}: the adapter cannot be merged into {self._base.location}.",
                [f"{self.location}: {problem}" for problem in problems],
            )
        self._full = {name: stored for name, stored in full.items() if name not in self._parts.copies}
        specs = {name: spec for name, spec in self._base.specs.items() if name not in hidden}
        for name, stored in self._full.items():
            spec = self.checkpoint.specs[stored]
            specs[name] = TensorSpec(name, spec.shape, spec.dtype, spec.file)
        self.specs = MappingProxyType(specs)

    @abc.abstractmethod
    def _formed_of(self, name: str) -> tuple[Sequence[str], int] | None:
        """Stored names behind a formed delta, and its rank (0: no product); None for a zero delta."""

    @abc.abstractmethod
    def _form(self, name: str, dtype: torch.dtype) -> Tensor | LowRank:
        """The whole delta of a tensor as it is stored."""

    def source(self, name: str) -> DeltaSource:
        """Stored if it was trained in full, formed if the adapter changes it otherwise, else zero."""
        dtype, stored = self._spec(name).dtype, self.checkpoint.specs
        if name in self._full:
            return DeltaSource(name, "stored", dtype, stored[self._full[name]].nbytes)
        if (formed := self._formed_of(name)) is None:
            return DeltaSource(name, "zero", dtype, 0)
        names, rank = formed
        return DeltaSource(name, "formed", dtype, sum(stored[n].nbytes for n in names), rank)

    def factors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> LowRank:
        """The delta as a product, with a convolution's kernel flattened into `I`."""
        if not self.source(name).rank:
            return super().factors(name, shape, dtype)
        product = self._whole(name, dtype)
        assert isinstance(product, LowRank), "a delta with a rank"
        return product

    def _whole(self, name: str, dtype: torch.dtype) -> Tensor | LowRank:
        """The delta of a tensor; the last one is kept, as callers read it in parts."""
        with self._lock:
            if self._last is not None and self._last[:2] == (name, dtype):
                return self._last[2]
        value = self._form(name, dtype)
        with self._lock:
            self._last = (name, dtype, value)
        return value

    def content(self, name: str) -> str:
        """Hash over the stored tensors of the delta; the hash of no data for a zero delta."""
        if self.source(name).kind == "stored":
            self._refuse(name, "formed")
        names, _ = self._formed_of(name) or ((), 0)
        return hash_names((n, self.stored.hashes[n]) for n in names)

    def handle(self) -> AdapterHandle:
        """The same with the address of the base, and of tables with the rows of another vocabulary."""
        aligned = self.checkpoint.handle() if self.stored.has_other_rows else None
        return replace(super().handle(), base=self._base.handle(), weights=aligned)

    def close(self) -> None:
        """Close the adapter's files."""
        super().close()
        with self._lock:
            self._last = None
