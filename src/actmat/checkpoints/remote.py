"""Remote storage: models at URLs and on the hub, and outputs that are built locally and sent to a URL.

A `Storage` comes in as a plug-in of the group `actmat.stores`, named by the scheme of its URLs; the one named `other`
serves schemes that have none of their own.
"""

from __future__ import annotations

import abc
import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from actmat import plugins
from actmat.checkpoints.source import Source
from actmat.checkpoints.writing.listed import OutputFiles
from actmat.checkpoints.writing.staging import Staging
from actmat.errors import CheckpointError

GROUP: Final = "actmat.stores"


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

    def open_output(self, url: str) -> OutputFiles:
        """The files of a finished output.

        Raises:
            CheckpointError: no manifest there.
        """
        raise CheckpointError(f"{url}: outputs cannot be read from this kind of URL")

    def open_repository(
        self, repo_id: str, revision: str | None, *, cache_dir: str | Path | None = None, streams: bool = False
    ) -> Source:
        """One commit of a repository of the Hugging Face hub, the plug-in named `hf`: its models have names as well.

        Args:
            streams: read tensors by ranges; else shards are downloaded when they are first read.

        Raises:
            CheckpointError: not found, no access, or offline and not in the cache.
        """
        raise CheckpointError(f"{repo_id}: expected a URL, found the name of a repository")

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
    storage = plugins.load(GROUP, scheme, Storage) or plugins.load(GROUP, "other", Storage)
    if storage is None:
        raise CheckpointError(f"{url}: no installed part of actmat serves this URL.")
    return storage


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
