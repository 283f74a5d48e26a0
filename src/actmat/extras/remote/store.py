"""`Store`: the files of one remote folder by name, read by ranges and written whole; one request at a time.

A file is pinned when it is first seen: its size and its etag (the version that the server states). Every later read
compares them, so that bytes of two versions are never mixed. Retries are the caller's (`checkpoints.retry.retried`).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from actmat.bounds import URL
from actmat.checkpoints.folder import is_plain_name
from actmat.checkpoints.remote import RemoteFile
from actmat.errors import CheckpointError

FILE_SUFFIXES = (".safetensors", ".json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx", ".npz", ".ckpt")
"""Endings of names that are files; a URL that ends otherwise is a folder."""


class MissingFileError(CheckpointError):
    """The store has no file of that name, or does not show it without other credentials."""


def changed(what: str, found: str) -> CheckpointError:
    """The error on a file of which there is another version now."""
    return CheckpointError(
        f"{what}: the file changed since it was opened: {found}. Likely cause: somebody uploads it. Fix: wait until "
        "that is done, then run again."
    )


def versions(before: RemoteFile, now: RemoteFile) -> str:
    """Two states of a file in words."""
    return f"{before.size} bytes, version {before.etag}; now {now.size} bytes, version {now.etag}"


class Store(abc.ABC):
    """Files of one folder.

    Attributes:
        url: of the folder, without a slash at the end.
    """

    url: str

    @abc.abstractmethod
    def list(self) -> dict[str, RemoteFile] | None:
        """Files directly in the folder, by name; None where the server cannot list.

        Raises:
            TransientError: worth another attempt.
            CheckpointError: no such folder, or no access.
        """

    def below(self) -> dict[str, RemoteFile]:
        """Files in folders below, by path with slashes; none where the server cannot list."""
        return {}

    @abc.abstractmethod
    def head(self, name: str, length: int) -> tuple[RemoteFile, bytes]:
        """A file as it is now, and its first `length` bytes (all, if it is shorter).

        Raises:
            MissingFileError: no file of that name.
        """

    @abc.abstractmethod
    def read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """Bytes of a pinned file; the range must lie inside.

        Raises:
            TransientError: a time-out, an error of the server, a connection that broke off.
            CheckpointError: the file changed, is gone, or the server does not send ranges.
        """

    def put(self, path: Path, name: str) -> RemoteFile:
        """Write a local file, whole or not at all; large ones in several parts. An existing file is replaced."""
        raise NotImplementedError(self.url)

    def delete(self, names: Sequence[str]) -> None:
        """Remove files; those that are missing are no error."""
        raise NotImplementedError(self.url)


def check_url(url: str) -> str:
    """The URL with its scheme in lower case and without a slash at the end.

    Raises:
        CheckpointError: it has credentials, which would end up in manifests, or is no address of a file or folder.
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
        problem = "it has a user name or password, which would be written to the manifest; put them into ~/.netrc"
    elif scheme in ("http", "https") and (parts.query or parts.fragment):
        problem = "it has a query, such as a signature, which would be written to the manifest; give the plain address"
    elif any(part in (".", "..") for part in rest.split("/")):
        problem = "it has '.' or '..' in its path; write the plain address"
    if problem:
        raise CheckpointError(f"{shown}: this URL cannot be used: {problem}.")
    return f"{scheme}://{rest}"


def split_url(url: str) -> tuple[str, str | None]:
    """URL of the folder and name of the file, None for a URL that is a folder, by its ending.

    >>> split_url("s3://bucket/model"), split_url("https://host/a/model.safetensors")
    (('s3://bucket/model', None), ('https://host/a', 'model.safetensors'))
    """
    folder, _, name = url.rpartition("/")
    is_file = name.endswith(FILE_SUFFIXES) and not folder.endswith(":/")
    return (folder, name) if is_file and is_plain_name(name) else (url, None)
