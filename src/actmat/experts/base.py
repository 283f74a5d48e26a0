"""The `Expert` contract: how a fine-tuned checkpoint or an adapter gives the deltas `D_t = W_t - W_0` of a base.

`actmat.extras.conformance.experts` is its shipped test-suite. `locate.Located.expert` picks the implementation.
Shapes: `O` rows and `I` columns of a tensor as it is stored.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, TypeAlias

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, CheckpointHandle, FileIdentity, TensorSpec
from actmat.checkpoints.side_files import ModelFiles, SideFiles
from actmat.errors import CheckpointError, did_you_mean, format_size
from actmat.experts.candidate import Candidate
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.fields import StackWord
from actmat.experts.lora.modules import AdapterLayout
from actmat.foreign import terminal
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


class Expert(AbstractContextManager["Expert"]):
    """Deltas of the tensors of one base, read or formed on request. Thread-safe for reading. Use as a context manager.

    `specs` are the tensors that it can give, by its own names (an adapter: those of its base, one name per tied group).

    Args:
        checkpoint: its stored tensors, which are closed with it.
    """

    location: str  # what the user called it, for messages
    kind: Literal["model", "adapter"]  # for records only
    specs: Mapping[str, TensorSpec]
    adapter: Adapter | None = None  # the factors, for outputs that are adapters
    models: tuple[str, ...] = ()  # locations of the models it is made of, see `Checkpoint`
    notes: tuple[str, ...] = ()  # remarks for the plan: what was read, what was left out; begin with a small letter
    warnings: tuple[str, ...] = ()  # remarks on a likely mistake
    # of an adapter that unties them: output heads of its own -> table that the base ties each to
    heads: Mapping[str, str] = MappingProxyType({})

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.location = checkpoint, checkpoint.location
        self.n_tensors = len(checkpoint.specs)
        self.nbytes = sum(spec.nbytes for spec in checkpoint.specs.values())

    @abc.abstractmethod
    def source(self, name: str) -> DeltaSource:
        """Form, dtype and cost of the delta of the tensor `name`.

        Raises:
            CheckpointError: no such tensor in `specs`.
        """

    @property
    def needs_base(self) -> bool:
        """True for changes to a base, which are not a model by themselves."""
        return self.kind == "adapter"

    def scheme(self, name: str) -> str:
        """Description of a quantized source's layout, see `Checkpoint.scheme`; empty for any other source."""
        return ""

    def read(self, name: str) -> Tensor:
        """The whole `W_t` of a stored source, see `Checkpoint.read`."""
        self._refuse(name, "read")

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with the bytes of a stored source from byte `start` on, see `Checkpoint.read_into`."""
        self._refuse(name, "read")

    def delta(self, name: str, start: int, stop: int, dtype: torch.dtype) -> Tensor:
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

    def hashes(self) -> Mapping[str, str] | None:
        """Content hash of every stored tensor where all are read on opening (adapters), else None."""
        return None

    def check_values(self, label: str) -> list[str]:
        """One sentence, which names the expert `label`, for each NaN or Inf tensor where all are read on opening."""
        return []

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Parsed `config.json` of a full model, else None."""
        return None

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of every weight file, for fingerprints; reads no tensor."""
        return self.checkpoint.identity()

    @abc.abstractmethod
    def handle(self) -> ExpertHandle:
        """Address from which another process opens the same expert, with `locate.open_handle`.

        Raises:
            CheckpointError: the expert or its base is not in storage that another process could open.
        """

    def prefetch(self, names: Iterable[str]) -> None:
        """Hint that these tensors will be read soon (disk read-ahead). Never fails."""

    @property
    def buffer_bytes(self) -> int:
        """See `Checkpoint.buffer_bytes`."""
        return self.checkpoint.buffer_bytes

    def sources(self) -> tuple[ModelFiles, ...]:
        """Files of every model that it is made of, see `Checkpoint.sources`."""
        return self.checkpoint.sources()

    def side_files(self) -> SideFiles:
        """Files of its folder other than the weights."""
        return self.checkpoint.side_files()

    def fetch_sidecars(self) -> Path | None:
        """Local folder of the side files; None without one."""
        return self.checkpoint.fetch_sidecars()

    def adopt(self, base: Checkpoint) -> None:
        """Take ownership of its base: close it with the expert, or at once if it is not read again."""
        base.close()

    def close(self) -> None:
        """Release files. Reading afterwards is an error. May be called twice."""
        self.checkpoint.close()

    def __repr__(self) -> str:
        size = format_size(self.nbytes)
        return f"<{type(self).__name__} {terminal(self.location)}: {self.kind}, {self.n_tensors} tensors, {size}>"

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
        look: the adapter that a candidate is, open, with config and headers read; None for anything else. Problems of
            its contents are in `Adapter.problems`; `CheckpointError` if its files cannot be read.
        fit: the adapter on its base; `CheckpointError` with all problems if it does not fit.
        no_factors: why no adapter can be merged from it without a base, with the fix; empty if one can.
        describe: entries of `inspect` in place of those of modules with two factors.
    """

    name: str
    look: Callable[[Candidate], Adapter | None]
    fit: Callable[[Adapter, Checkpoint], Expert]
    no_factors: Callable[[Adapter], str] | None = None
    describe: Callable[[Adapter], dict[str, Any]] = field(default=lambda adapter: {})

    def why_no_factors(self, adapter: Adapter) -> str:
        """See `no_factors`; a general reason for a family without that function."""
        if self.no_factors is not None:
            return self.no_factors(adapter)
        return (
            f"a {self.name} adapter has no factors from which an adapter could be merged. Fix: give the base and write "
            "a model (--base ..., --to model)"
        )


@dataclass(frozen=True, slots=True)
class AdapterHandle:
    """Address from which `locate.open_handle` opens an adapter again, also in another process. Plain data.

    A relative `location` is one of the working directory; `base` is what the adapter was fitted to; `etags` are name,
    size and version of remote files, which must be the same. `stacks` is the user's statement on stacked experts,
    `layout` the one that it was converted to, `weights` its tensors if their rows are those of another vocabulary.
    """

    location: str
    base: CheckpointHandle | None = None
    etags: tuple[tuple[str, int, str], ...] = ()
    stacks: tuple[StackWord, ...] = ()
    layout: AdapterLayout | None = None
    weights: CheckpointHandle | None = None

    @property
    def address(self) -> str:
        """Place of the adapter, as for a checkpoint."""
        return self.location


ExpertHandle: TypeAlias = CheckpointHandle | AdapterHandle
"""Address of an expert: that of a checkpoint for a full one."""
