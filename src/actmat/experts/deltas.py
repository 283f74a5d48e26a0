"""The `Deltas` contract: how a fine-tuned model or an adapter gives the deltas `D_t = W_t - W_0` of a base.

`actmat.extras.conformance.deltas` is its shipped test-suite. `locate.fit_expert` picks the implementation.
Shapes: `O` rows and `I` columns of a tensor as it is stored.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, NoReturn, TypeAlias, final

import torch
from torch import Tensor

from actmat.checkpoints.base import TensorsHandle, TensorSpec
from actmat.checkpoints.model import Config, Model
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError, NoteSeverity, did_you_mean
from actmat.experts.lora.adapter import Adapter, AdapterHandle
from actmat.experts.lora.fields import StackWord
from actmat.linalg.lowrank import LowRank

SourceKind = Literal["stored", "formed", "zero"]
"""stored: `W_t` is in storage, to be reduced by `W_0`; formed: a product of factors, or what is added to a bias; zero:
the expert does not change the tensor."""


@dataclass(frozen=True, slots=True)
class DeltaSource:
    """The form in which an expert gives the delta of one tensor of the base; no data."""

    name: str  # as the expert calls it
    kind: SourceKind
    dtype: str  # of `W_t`; that of the base for a formed or zero delta
    nbytes: int  # bytes read for it
    rank: int = 0  # of a product of factors, else 0


class Deltas(AbstractContextManager["Deltas"]):
    """One expert: deltas of the tensors of one base. Thread-safe for reading. Use as a context manager.

    Args:
        model: its stored tensors with their files, closed with it.

    Attributes:
        specs: tensors that it can give, by its own names (an adapter: those of its base, one name per tied group).
        needs_base: it is changes to a base, which are not a model by themselves.
        adapter: its factors, for outputs that are adapters; None for changes of other forms.
        stored: the adapter of any family that it is made of, all of whose tensors are read on opening.
        owned: models that are closed with it, such as a base of its own in another process.
    """

    specs: Mapping[str, TensorSpec]
    needs_base: ClassVar[bool]
    adapter: Adapter | None = None
    stored: Adapter | None = None
    owned: tuple[Model, ...] = ()

    def __init__(self, model: Model) -> None:
        self.model = model

    @property
    def location(self) -> str:
        """Its location as the user wrote it, for messages."""
        return self.model.location

    @property
    def config(self) -> Config | None:
        """Parsed `config.json` of a full model, else None."""
        return self.model.config

    @abc.abstractmethod
    def source(self, name: str) -> DeltaSource:
        """Form, dtype and cost of the delta of the tensor `name`.

        Raises:
            CheckpointError: no such tensor in `specs`.
        """

    @final
    def read(self, name: str) -> Tensor:
        """The whole `W_t` of a stored source."""
        tensor = self._spec(name).empty()
        self.read_into(name, 0, raw_bytes(tensor))
        return tensor

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a stored source from byte `start` on, see `Tensors.read_into`."""
        self._refuse(name, "read")

    def dense(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
        """Entries `start:stop` of the flattened delta of a formed or zero source. The default serves zero sources."""
        if self.source(name).kind != "zero":
            self._refuse(name, "formed")
        return torch.zeros(stop - start, dtype=dtype)

    def factors(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> LowRank:
        """The delta of a formed source with a rank, or of a zero source, as a product. The default serves the latter.

        Args:
            shape: `*batch O I` of the requested product, a convolution's kernel flattened into `I`. A zero source is a
                product of zeros of this shape, of rank 1; a formed source has its own.
        """
        if self.source(name).kind != "zero":
            self._refuse(name, "factored")
        *batch, rows, columns = shape
        return LowRank(torch.zeros(*batch, rows, 1, dtype=dtype), torch.zeros(*batch, 1, columns, dtype=dtype))

    def bias(self, name: str, dtype: torch.dtype) -> Tensor | None:
        """Addition to the bias of the layer of a module `name`, of an adapter without a base; None without one."""
        self._refuse(name, "a module")

    def content(self, name: str) -> str:
        """Hash of the stored tensors behind a formed or zero delta."""
        self._refuse(name, "formed")

    def note(self, *texts: str, severity: NoteSeverity = "note") -> None:
        """Add remarks for the plan."""
        self.model = replace(self.model, folder=self.model.folder.noted(*texts, severity=severity))

    @abc.abstractmethod
    def handle(self) -> DeltasHandle:
        """Address from which another process opens the same expert, with `locate.open_handle`.

        Raises:
            CheckpointError: the expert or its base is not in storage that another process could open.
        """

    def close(self) -> None:
        """Release files. Reading afterwards is an error. May be called twice."""
        for model in (self.model, *self.owned):
            model.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def _spec(self, name: str) -> TensorSpec:
        """Spec of a tensor, or a `CheckpointError` that suggests the most similar name."""
        spec = self.specs.get(name)
        if spec is None:
            hint = did_you_mean(name, self.specs)
            raise CheckpointError(f"{self.location}: expected a tensor '{name}', found none of that name.{hint}")
        return spec

    def _refuse(self, name: str, wanted: str) -> NoReturn:
        """Raise the error of a caller that did not look at `DeltaSource.kind`."""
        raise ValueError(f"{self.location}: '{name}' is {self.source(name).kind} and cannot be {wanted}")


@dataclass(frozen=True, slots=True)
class AdapterFamily:
    """One kind of adapters: one of the core, or a plug-in of the group `actmat.experts`.

    Args:
        name: as users know it.
        look: the adapter that a source holds, open, with config and headers read; None for anything else. It is given
            the single file that may hold factors, open, if there is one, and the user's statements on stacked experts.
            Problems of its contents are in `Adapter.problems`; `CheckpointError` if its files cannot be read.
        fit: the adapter on its base; `CheckpointError` with all problems if it does not fit.
        why_no_factors: why no adapter can be merged from it without a base, with the fix; empty if one can.
        describe: entries of `inspect` in place of those of modules with two factors.
    """

    name: str
    look: Callable[[Source, Model | None, tuple[StackWord, ...]], Adapter | None]
    fit: Callable[[Adapter, Model], Deltas]
    why_no_factors: Callable[[Adapter], str]
    describe: Callable[[Adapter], dict[str, Any]] = lambda adapter: {}


DeltasHandle: TypeAlias = TensorsHandle | AdapterHandle
"""Address of an expert: that of its tensors for a full model."""
