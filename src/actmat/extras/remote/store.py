"""`Store`: the files of one remote folder by name, read by ranges and written whole; one request at a time.

A file is pinned at first access: its size and its etag (the server's version). Every later read compares them, so that
bytes of two versions are never mixed. The caller retries (`retry.retried`).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from actmat.bounds import URL
from actmat.checkpoints.folder import is_plain_name
from actmat.errors import CheckpointError
from actmat.extras.remote.claims import RemoteFile

FILE_SUFFIXES = (".safetensors", ".json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ckpt")
"""Suffixes of file names; any other URL is a folder."""


class MissingFileError(CheckpointError):
    """The store has no file of that name, or hides it without other credentials."""


class Store(abc.ABC):
    """Files of one folder.

    Attributes:
        url: of the folder, without a slash at the end.
        notes: remarks for plans on its last listing.
    """

    url: str
    notes: tuple[str, ...] = ()

    @abc.abstractmethod
    def list(self) -> dict[str, RemoteFile] | None:
        """Files directly in the folder, by name; None if the server cannot list.

        Raises:
            TransientError: the request can be retried.
            CheckpointError: no such folder, or no access.
        """

    def below(self) -> dict[str, RemoteFile]:
        """Files in subfolders, by path with slashes; empty if the server cannot list."""
        return {}

    @abc.abstractmethod
    def head(self, name: str, length: int) -> tuple[RemoteFile, bytes]:
        """A file's current version, and its first `length` bytes (all, if it is shorter).

        Raises:
            MissingFileError: the file does not exist.
        """

    @abc.abstractmethod
    def read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """Read bytes of a pinned file; the range must lie inside.

        Raises:
            TransientError: a timeout, a server error, or a lost connection.
            CheckpointError: the file changed or is gone, or the server ignores ranges.
        """

    def put(self, path: Path, name: str) -> RemoteFile:
        """Write a local file atomically, in parts if large. An existing file is replaced."""
        raise NotImplementedError(self.url)

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; missing files are ignored."""
        raise NotImplementedError(self.url)


def check_url(url: str) -> str:
    """Normalize a URL: lower-case scheme, no trailing slash.

    Raises:
        CheckpointError: the URL has credentials, which manifests would record, or is not a file or folder.
    """
    match = URL.fullmatch(url)
    assert match is not None, "the caller looked at `is_url`"
    scheme, rest = match["scheme"].lower(), match["rest"].rstrip("/")
    parts = urlsplit(f"{scheme}://{rest}")
    shown = f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}"[:200]
    problem = ""
    if not rest or not url.isprintable():
        problem = "expected a host or bucket after '://', and printable characters only"
    elif scheme in ("http", "https") and "@" in parts.netloc:
        problem = "it has a user name or password, which would be written to the manifest; put them in ~/.netrc"
    elif scheme in ("http", "https") and (parts.query or parts.fragment):
        problem = "it has a query, such as a signature, which would be written to the manifest; use the plain address"
    elif any(part in (".", "..") for part in rest.split("/")):
        problem = "it has '.' or '..' in its path; use the plain address"
    if problem:
        raise CheckpointError(f"{shown}: this URL cannot be used: {problem}.")
    return f"{scheme}://{rest}"


def split_url(url: str) -> tuple[str, str | None]:
    """Split a URL into folder and file name; the name is None if the suffix indicates a folder.

    >>> split_url("s3://bucket/model"), split_url("https://host/a/model.safetensors")
    (('s3://bucket/model', None), ('https://host/a', 'model.safetensors'))
    """
    folder, _, name = url.rpartition("/")
    is_file = name.endswith(FILE_SUFFIXES) and not folder.endswith(":/")
    return (folder, name) if is_file and is_plain_name(name) else (url, None)
