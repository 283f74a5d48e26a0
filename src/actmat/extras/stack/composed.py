"""A checkpoint composed of tensors of other open checkpoints, under new names."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from actmat.checkpoints.base import Checkpoint, FileIdentity, TensorSpec
from actmat.checkpoints.resolve import commit_of
from actmat.checkpoints.side_files import ModelFiles, SideFiles
from actmat.checkpoints.view import DelegatingCheckpoint
from actmat.experts.base import Expert


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a tensor: checkpoint and its name there."""

    checkpoint: Checkpoint
    name: str

    @property
    def spec(self) -> TensorSpec:
        """Spec there."""
        return self.checkpoint.specs[self.name]


class ComposedCheckpoint(DelegatingCheckpoint):
    """Tensors of open checkpoints; closes them.

    Args:
        location: location as given by the user.
        first: source of config, tokenizer and code files.
        origins: name -> origin of every tensor.
    """

    is_composed = True

    def __init__(self, location: str, first: Checkpoint, origins: Mapping[str, Origin]) -> None:
        self.location, self.directory = location, first.directory
        self.first, self.origins = first, origins
        self.checkpoints = list(dict.fromkeys([first, *(o.checkpoint for o in origins.values())]))
        self.models = models_of(self.checkpoints)
        self.absent = tuple(dict.fromkeys(n for c in self.checkpoints for n in c.absent))
        self.specs = MappingProxyType({n: _spec(n, o) for n, o in origins.items()})
        stored = {(id(o.checkpoint), o.name): n for n, o in reversed(list(origins.items()))}
        aliases = {}
        for name, origin in origins.items():
            target = stored.get((id(origin.checkpoint), origin.checkpoint.aliases.get(origin.name, "")))
            if target is not None:
                aliases[name] = target
        self.aliases = MappingProxyType(aliases)

    def origin(self, name: str) -> tuple[Checkpoint, str]:
        """See `origins`."""
        return self.origins[name].checkpoint, self.origins[name].name

    def sources(self) -> tuple[ModelFiles, ...]:
        """Files of all checkpoints."""
        return tuple(source for c in self.checkpoints for source in c.sources())

    def identity(self) -> tuple[FileIdentity, ...]:
        """Identity of the weight files of all checkpoints."""
        return tuple(dict.fromkeys(i for c in self.checkpoints for i in c.identity()))

    @property
    def buffer_bytes(self) -> int:
        """Sum over all checkpoints, because each may read ahead."""
        return sum(c.buffer_bytes for c in self.checkpoints)

    def side_files(self) -> SideFiles:
        """Side files of the first checkpoint."""
        return self.first.side_files()

    def fetch_sidecars(self) -> Path | None:
        """Local folder of the files of the first checkpoint."""
        return self.first.fetch_sidecars()

    def close(self) -> None:
        """Close all checkpoints."""
        for checkpoint in self.checkpoints:
            checkpoint.close()


def _spec(name: str, origin: Origin) -> TensorSpec:
    return replace(origin.spec, name=name, file=f"{origin.checkpoint.location}/{origin.spec.file}")


def models_of(sources: Iterable[Checkpoint | Expert]) -> tuple[str, ...]:
    """Locations of the sources, with commits for the hub; composed sources are expanded."""
    return tuple(dict.fromkeys(name for source in sources for name in (source.models or (_pinned(source),))))


def _pinned(source: Checkpoint | Expert) -> str:
    return address if commit_of(address := source.handle().address) else source.location
