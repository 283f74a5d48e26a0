"""Remote storage: files on servers, models at URLs, and outputs that are built locally and sent to a URL.

A `Storage` comes in as a plug-in of the group `actmat.stores`, named by the scheme of its URLs; the one named `other`
serves schemes that have none of their own. Models on the hub are read by `hub`, without a plug-in.
"""

from __future__ import annotations

import abc
import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Final

from actmat import plugins
from actmat.checkpoints.base import FileIdentity
from actmat.checkpoints.claims import RemoteFile
from actmat.checkpoints.folder import read_index
from actmat.checkpoints.retry import FIRST_RANGE
from actmat.checkpoints.source import Source
from actmat.checkpoints.writing.staging import Staging
from actmat.errors import CheckpointError

GROUP: Final = "actmat.stores"


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


class Storage(abc.ABC):
    """Folders and files at the URLs of some schemes."""

    def open_source(self, url: str, *, pinned: Mapping[str, tuple[int, str]]) -> Source:
        """The folder or file at a URL.

        Args:
            pinned: name -> (size, version) that files must have.

        Raises:
            CheckpointError: nothing there, no access, or a package is missing.
        """
        raise CheckpointError(f"{url}: checkpoints cannot be read from this kind of URL")

    @abc.abstractmethod
    def upload_problems(self, url: str) -> list[str]:
        """Reasons, as sentences, why the URL cannot be written; sends no request."""

    @abc.abstractmethod
    def stage(self, url: str, folder: Path, fingerprint: str, *, overwrite: bool = False) -> Staging:
        """Staging of an output at a URL without `upload_problems`.

        Args:
            folder: local path of the output, which is built in a sibling of it.
            fingerprint: of the plan.
            overwrite: replace an existing output.
        """

    @abc.abstractmethod
    def sizes(self, url: str) -> dict[str, int]:
        """Size in bytes of every file of an output, by name."""

    def clear(self, url: str) -> None:  # noqa: B027 - most have nothing to remove
        """Remove what an interrupted commit left alongside a finished output."""


def storage_of(url: str) -> Storage:
    """The plug-in for a URL.

    Raises:
        CheckpointError: no plug-in serves the URL.
    """
    scheme = url.partition("://")[0].lower()
    found = plugins.load(GROUP, scheme, Storage) or plugins.load(GROUP, "other", Storage)
    if found is None:
        raise CheckpointError(f"{url}: no installed part of actmat serves this URL.{plugins.hint(GROUP)}")
    return found


def check_upload_url(url: str) -> list[str]:
    """Reasons why a URL cannot be written, see `Storage.upload_problems`."""
    try:
        return storage_of(url).upload_problems(url)
    except CheckpointError as error:
        return list(error.problems)


def staging_folder(url: str) -> Path:
    """Local folder next to which an output for `url` is built, in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    name = url.rstrip("/").rpartition("/")[2][:80] or "output"
    return Path(cache).expanduser() / "actmat" / "uploads" / f"{name}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def staging_for(url: str, fingerprint: str, *, overwrite: bool = False) -> Staging:
    """Staging of an output at a URL, in `staging_folder(url)`; see `Storage.stage`."""
    return storage_of(url).stage(url, staging_folder(url), fingerprint, overwrite=overwrite)
