"""Files on a server, each pinned by its size and version, and finished outputs there, as `verify` reads them."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from actmat.checkpoints.base import FileIdentity
from actmat.checkpoints.folder import read_index
from actmat.checkpoints.hashing import hash_file
from actmat.checkpoints.source import Source
from actmat.checkpoints.writing.listed import MANIFEST_NAME, OutputFiles
from actmat.errors import CheckpointError
from actmat.extras.remote.claims import RemoteFile
from actmat.extras.remote.retry import FIRST_RANGE


class RemoteFiles(Source):
    """Files on a server, each pinned by its size and version.

    Attributes:
        home: repository or URL that holds the files, with a slash at its end.
    """

    home: str

    @abc.abstractmethod
    def file(self, name: str) -> RemoteFile:
        """The pinned file."""

    def weight_map(self, index: str) -> dict[str, str]:
        """Content of an index file; where the folder was listed, every file that it names is there."""
        weight_map = read_index(self.fetch(index))
        missing = sorted(set(weight_map.values()) - set(self.names)) if self.can_list else []
        if missing:
            raise CheckpointError(
                f"{self.location}: weight files that {index} names are missing (or, offline, not in the cache). Likely "
                "cause: an upload that is not finished. Fix: upload the folder again.",
                [f"{self.location}: {name} is missing" for name in missing],
            )
        return weight_map

    def identity(self, names: Iterable[str]) -> tuple[FileIdentity, ...]:
        """Sizes and versions of files as they were when they were first seen."""
        files = [self.file(name) for name in names]
        return tuple(FileIdentity(self.home + f.name, f.size, etag=f.etag) for f in files)

    def fetch_sidecars(self) -> Path | None:
        """Download the side files; return their folder, or None without side files."""
        folder = self.directory
        for name in self.side_files(()).kept:
            folder = self.fetch(name).parents[name.count("/")]
        return folder

    def start_of(self, name: str) -> bytes:
        """The first bytes of a file, in one request; most headers are in them."""
        return self.read_range(name, 0, min(FIRST_RANGE, self.file(name).size))

    def read_remote(self, name: str) -> tuple[Callable[[int, int], bytes], int]:
        """`read_at(offset, length)` over ranges, and the size."""
        start = self.start_of(name)

        def read_at(offset: int, length: int) -> bytes:
            if offset + length <= len(start):
                return start[offset : offset + length]
            return self.read_range(name, offset, length)

        return read_at, self.file(name).size


class RemoteOutput(OutputFiles):
    """The files of an output at a URL."""

    def __init__(self, source: Source, names: Sequence[str]) -> None:
        if source.can_list and MANIFEST_NAME not in names:
            raise CheckpointError(f"{source.location} has no {MANIFEST_NAME}: it is not a finished merge of actmat.")
        super().__init__(source.fetch(MANIFEST_NAME).parent)
        self._source, self._names = source, names

    def names(self) -> list[str]:
        """See `OutputFiles`."""
        return sorted(self._names)

    def size(self, name: str) -> int:
        """See `OutputFiles`."""
        return self._source.identity([name])[0].size

    def content(self, name: str) -> str:
        """See `OutputFiles`."""
        return hash_file(self._source.fetch(name))
