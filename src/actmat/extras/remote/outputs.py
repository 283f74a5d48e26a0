"""Finished outputs at URLs, as `verify` reads them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from actmat.checkpoints.hashing import hash_file
from actmat.checkpoints.ranges import BLOCK_BYTES
from actmat.checkpoints.source import Source
from actmat.checkpoints.writing.listed import MANIFEST_NAME
from actmat.errors import CheckpointError
from actmat.extras.remote.hub import HubRepository


class RemoteOutput:
    """The files of an output at a URL."""

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        if source.can_list and MANIFEST_NAME not in names:
            raise CheckpointError(f"{source.location} has no {MANIFEST_NAME}: it is not a finished merge of actmat.")
        self._source, self._names = source, names
        self.manifest_folder = source.fetch(MANIFEST_NAME).parent

    def names(self) -> list[str]:
        """See `OutputFiles`."""
        return sorted(self._names)

    def size(self, name: str) -> int:
        """See `OutputFiles`."""
        return self._source.identity([name])[0].size

    def content(self, name: str) -> str:
        """See `OutputFiles`."""
        return hash_file(self._source.fetch(name))

    def sha256(self, name: str) -> str:
        """See `OutputFiles`."""
        total, size = hashlib.sha256(), self.size(name)
        for offset in range(0, size, BLOCK_BYTES):
            total.update(self._source.read_range(name, offset, min(BLOCK_BYTES, size - offset)))
        return total.hexdigest()


class HubOutput(RemoteOutput):
    """A commit of the hub; weights are compared by the hash that the hub states."""

    def __init__(self, source: HubRepository) -> None:
        super().__init__(source, list(source.files))
        self._files = source.files

    def size(self, name: str) -> int:
        """See `OutputFiles`."""
        if name not in self._files:
            raise CheckpointError("it is missing")
        return self._files[name].size

    def sha256(self, name: str) -> str:
        """See `OutputFiles`."""
        return self._files[name].etag
