"""The files of an output, in a folder or at a URL, for `verify`."""

from __future__ import annotations

import abc
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING

from actmat.bounds import is_url
from actmat.checkpoints.folder import member
from actmat.checkpoints.hashing import hash_file, sha256_file
from actmat.checkpoints.ranges import BLOCK_BYTES
from actmat.checkpoints.remote import open_remote
from actmat.checkpoints.resolve import find_source
from actmat.checkpoints.source import Source
from actmat.checkpoints.writing.staging import MANIFEST_NAME
from actmat.errors import CheckpointError

if TYPE_CHECKING:
    from actmat.checkpoints.hub import HubFile, HubRepository

__all__ = ["OutputFiles", "open_output"]


class OutputFiles(abc.ABC):
    """Files by name; a name of a deeper one has slashes.

    Attributes:
        manifest_folder: local folder with the manifest.
    """

    manifest_folder: Path

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Everything that is stored, but folders; sorted. Links to folders are not followed."""

    @abc.abstractmethod
    def size(self, name: str) -> int:
        """Bytes of a file.

        Raises:
            CheckpointError, OSError: it is missing, or no file of the output.
        """

    @abc.abstractmethod
    def content(self, name: str) -> str:
        """Content hash of a file without weights."""

    @abc.abstractmethod
    def sha256(self, name: str) -> str:
        """SHA-256 of a file."""


class _Folder(OutputFiles):
    def __init__(self, folder: Path) -> None:
        self.manifest_folder = folder

    def names(self) -> list[str]:
        found = []
        for folder, folders, names in os.walk(self.manifest_folder):
            links = [n for n in folders if os.path.islink(os.path.join(folder, n))]
            found += [os.path.relpath(os.path.join(folder, n), self.manifest_folder) for n in (*names, *links)]
        return sorted(found)

    def size(self, name: str) -> int:
        return self._path(name).stat().st_size

    def content(self, name: str) -> str:
        return hash_file(self._path(name))

    def sha256(self, name: str) -> str:
        return sha256_file(self._path(name))

    def _path(self, name: str) -> Path:
        return member(self.manifest_folder, name) if "/" not in name else self.manifest_folder / name


class _Remote(OutputFiles):
    def __init__(self, source: Source) -> None:
        if source.can_list and MANIFEST_NAME not in source.names:
            raise CheckpointError(f"{source.location} has no {MANIFEST_NAME}: it is no finished merge made by actmat.")
        self._source = source
        self.manifest_folder = source.fetch(MANIFEST_NAME).parent

    def names(self) -> list[str]:
        return list(self._source.names)

    def size(self, name: str) -> int:
        return self._source.identity([name])[0].size

    def content(self, name: str) -> str:
        return hash_file(self._source.fetch(name))

    def sha256(self, name: str) -> str:
        total, size = hashlib.sha256(), self.size(name)
        for offset in range(0, size, BLOCK_BYTES):
            total.update(self._source.read_range(name, offset, min(BLOCK_BYTES, size - offset)))
        return total.hexdigest()


class _Hub(OutputFiles):
    """A commit of the hub; weights are compared by the hash that the hub states."""

    def __init__(self, source: HubRepository) -> None:
        if MANIFEST_NAME not in source.files:
            raise CheckpointError(f"{source.location} has no {MANIFEST_NAME}: it is no finished merge made by actmat.")
        self._source = source
        self.manifest_folder = source.fetch(MANIFEST_NAME).parent

    def names(self) -> list[str]:
        return sorted(self._source.files)

    def size(self, name: str) -> int:
        return self._file(name).size

    def content(self, name: str) -> str:
        return hash_file(self._source.fetch(name))

    def sha256(self, name: str) -> str:
        return self._file(name).etag

    def _file(self, name: str) -> HubFile:
        if name not in self._source.files:
            raise CheckpointError("it is missing")
        return self._source.files[name]


def open_output(out: str | Path) -> OutputFiles:
    """The files of an output.

    Raises:
        CheckpointError: a URL at which no manifest is.
    """
    if str(out).startswith("hf://"):
        from actmat.checkpoints.hub import HubRepository

        source = find_source(str(out))
        assert isinstance(source, HubRepository)
        return _Hub(source)
    return _Remote(open_remote(str(out))) if is_url(out) else _Folder(Path(out))
