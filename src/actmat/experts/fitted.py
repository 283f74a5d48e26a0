"""Adapters on their base as experts: the parts that all families have in common."""

from __future__ import annotations

import abc
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.hashing import hash_names
from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError
from actmat.experts.deltas import Deltas, DeltaSource
from actmat.experts.lora.adapter import Adapter, AdapterHandle
from actmat.experts.untied import keeps_ties, tied_parts
from actmat.linalg.lowrank import LowRank


class FittedDeltas(Deltas):
    """An adapter on its base; a subclass says where its deltas lie, and forms them.

    Args:
        stored: the adapter, which is closed with it.
        base: may be closed afterwards, unless deltas depend on it.
        extras: tensors trained in full, name in the model -> stored name.
        deltas: names in the model of the weights that it has deltas for, and their shapes, empty if not known.
    """

    needs_base = True
    stored: Adapter

    def __init__(
        self, stored: Adapter, base: Model, extras: Mapping[str, str], deltas: Mapping[str, tuple[int, ...]]
    ) -> None:
        super().__init__(stored.model)
        self.stored = stored
        self._parts = tied_parts(
            base,
            {name: self.model.specs[n] for name, n in extras.items()},
            deltas,
            keeps_ties=keeps_ties(stored.config.fields),
            equal=lambda a, b: stored.hashes[extras[a]] == stored.hashes[extras[b]],
        )
        self._base = self._parts.base
        self._full: Mapping[str, str] = {}
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
            spec = self.model.specs[stored]
            specs[name] = TensorSpec(name, spec.shape, spec.dtype, spec.file)
        self.specs = MappingProxyType(specs)
        self.model = replace(self.model, folder=replace(self.model.folder, untied=self._parts.heads))

    @abc.abstractmethod
    def _formed_of(self, name: str) -> tuple[Sequence[str], int] | None:
        """Stored names behind a formed delta, and its rank (0: no product); None for a zero delta."""

    @abc.abstractmethod
    def _form(self, name: str, dtype: torch.dtype) -> Tensor | LowRank:
        """The whole delta of a tensor as it is stored."""

    def source(self, name: str) -> DeltaSource:
        """Stored if it was trained in full, formed if the adapter changes it otherwise, else zero."""
        dtype, stored = self._spec(name).dtype, self.model.specs
        if name in self._full:
            return DeltaSource(name, "stored", dtype, stored[self._full[name]].nbytes)
        if (formed := self._formed_of(name)) is None:
            return DeltaSource(name, "zero", dtype, 0)
        names, rank = formed
        return DeltaSource(name, "formed", dtype, sum(stored[n].nbytes for n in names), rank)

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Bytes of a tensor that is stored whole."""
        if name not in self._full:
            self._refuse(name, "read")
        self.model.tensors.read_into(self._full[name], start, out)

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
        """That of the adapter with the address of the base, and of tables with the rows of another vocabulary."""
        aligned = self.model.tensors.handle() if self.stored.has_other_rows else None
        return replace(
            self.stored.handle(), base=self._base.tensors.handle(), config=self._base.config, weights=aligned
        )

    def close(self) -> None:
        """Close the adapter's files, and forget its last delta."""
        super().close()
        with self._lock:
            self._last = None
