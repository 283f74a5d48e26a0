"""Files of an object store (S3, Google Cloud Storage, Azure, and every other file system of fsspec)."""

from __future__ import annotations

import datetime
import errno
import posixpath
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actmat.checkpoints.folder import is_plain_name
from actmat.checkpoints.remote import RemoteFile
from actmat.checkpoints.retry import TransientError, first_line
from actmat.checkpoints.side_files import DEEPEST
from actmat.errors import CheckpointError, MergeError
from actmat.extras.remote.store import MissingFileError, Store, changed, versions

PACKAGES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
}
"""Scheme -> the package that serves it, and the extra of actmat that installs it."""

VERSIONS = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
"""Fields of fsspec's description of a file that tell two states of it apart; the first that is there counts."""

CONDITIONAL = ("s3", "s3a")
"""Schemes whose reads the server itself refuses if the etag is another (`If-Match`); others are asked after a read."""


class ObjectStore(Store):
    """A folder of a bucket, or of any file system of fsspec. Credentials are those of its library."""

    def __init__(self, url: str, *, error: type[MergeError] = CheckpointError) -> None:
        self.url = url
        self._scheme = url.partition("://")[0]
        # fsspec keeps one instance for each set of arguments, so that connections are shared
        self._listed, self._root = _file_system(url, error, use_listings_cache=True)
        self._fresh, _ = _file_system(url, error, use_listings_cache=False)

    def list(self) -> dict[str, RemoteFile]:
        """Files of the folder; sizes and etags come with the listing."""
        with self._explained(""):
            self._listed.invalidate_cache(self._root)
            rows = self._listed.ls(self._root, detail=True)
        files = {}
        for row in rows:
            name = posixpath.basename(str(row["name"]).rstrip("/"))
            is_member = str(row["name"]).rstrip("/") == posixpath.join(self._root, name)
            if row["type"] == "file" and is_member and is_plain_name(name):
                files[name] = self._file(name, row)
        return files

    def below(self) -> dict[str, RemoteFile]:
        """Files down to a bounded depth, in one or a few requests."""
        with self._explained(""):
            rows = self._listed.find(self._root, maxdepth=DEEPEST + 1, detail=True)
        files = {}
        for path, row in rows.items():
            name = posixpath.relpath(str(path), self._root)
            if row["type"] == "file" and "/" in name and all(is_plain_name(part) for part in name.split("/")):
                files[name] = self._file(name, row)
        return files

    def head(self, name: str, length: int) -> tuple[RemoteFile, bytes]:
        """The file as listed, and its first bytes: one request after `list`, else two."""
        with self._explained(name):
            file = self._file(name, self._listed.info(self._path(name)))
        return file, self.read(file, 0, min(length, file.size))

    def read(self, file: RemoteFile, offset: int, length: int) -> bytes:
        """A range; S3 compares the etag itself, elsewhere the version is asked for again after the read."""
        if length == 0:
            return b""
        with self._explained(file.name), self._listed.open(self._path(file.name), "rb", cache_type="none") as opened:
            if hasattr(opened, "details"):
                self._compare(file, self._file(file.name, opened.details))
            opened.seek(offset)
            data = bytes(opened.read(length))
        if self._scheme not in CONDITIONAL:
            with self._explained(file.name):
                now = self._file(file.name, self._fresh.info(self._path(file.name)))
            self._compare(file, now)
        if len(data) != length:
            raise TransientError(f"the answer ended after {len(data)} of {length} bytes")
        return data

    def put(self, path: Path, name: str) -> RemoteFile:
        """Write a file; the library sends large ones in parts, of which nothing shows before the last."""
        with self._explained(name):
            self._fresh.put_file(str(path), self._path(name))
            written = self._file(name, self._fresh.info(self._path(name)))
        if written.size != path.stat().st_size:
            raise TransientError(f"{path.stat().st_size} bytes were sent, the store has {written.size}")
        return written

    def delete(self, names: Sequence[str]) -> None:
        """Remove files that are there."""
        with self._explained(""):
            for name in names:
                if self._fresh.exists(self._path(name)):
                    self._fresh.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def _file(self, name: str, row: Mapping[str, Any]) -> RemoteFile:
        found = next((row[key] for key in VERSIONS if row.get(key)), "")
        version = str(found.timestamp() if isinstance(found, datetime.datetime) else found)
        if row.get("size") is None or not version:
            raise CheckpointError(
                f"{self.url}/{name}: its store states no size or no version, so that a change during the merge would "
                "go unseen. Fix: download the folder and give it."
            )
        return RemoteFile(name, int(row["size"]), version.strip('"'))

    def _compare(self, before: RemoteFile, now: RemoteFile) -> None:
        if now != before:
            raise changed(f"{self.url}/{before.name}", versions(before, now))

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Turn errors of the library into ours; those of the network are worth another attempt."""
        what = f"{self.url}/{name}" if name else self.url
        try:
            yield
        except (CheckpointError, TransientError):
            raise
        except FileNotFoundError as error:
            raise MissingFileError(f"{what}: not found. Fix: correct the address.") from error
        except PermissionError as error:
            raise MissingFileError(
                f"{what}: access denied ({first_line(error)}). Fix: log in with the store's own tool, or set its "
                "environment variables (docs/remote.md)."
            ) from error
        except OSError as error:
            if error.errno == errno.EBUSY:  # FileExpired of s3fs: the etag is another
                raise changed(what, first_line(error)) from error
            raise TransientError(f"{type(error).__name__}: {first_line(error)}") from error
        except Exception as error:  # each store raises errors of its own library
            raise CheckpointError(
                f"{what}: cannot be used: {type(error).__name__}: {first_line(error)}. Likely cause: no credentials, "
                "or another region or endpoint (docs/remote.md)."
            ) from error


def open_store(url: str, *, error: type[MergeError] = CheckpointError) -> Store:
    """The store of a folder's URL, which passed `check_url`; makes no request.

    Raises:
        MergeError: an unknown scheme, or its package is not installed; of the type `error`.
    """
    if url.startswith(("http://", "https://")):
        from actmat.extras.remote.http import HttpStore

        return HttpStore(url)
    return ObjectStore(url, error=error)


def _file_system(url: str, error: type[MergeError], *, use_listings_cache: bool) -> tuple[Any, str]:
    """The file system of a URL, and the path in it."""
    from fsspec.core import url_to_fs

    scheme = url.partition("://")[0]
    try:
        more = {"auto_mkdir": True} if scheme in ("file", "local") else {}  # buckets have no folders to make
        found, path = url_to_fs(url, use_listings_cache=use_listings_cache, **more)
    except ImportError as problem:
        package, extra = PACKAGES.get(scheme, ("", ""))
        fix = f"pip install 'actmat[{extra}]' (or {package})" if package else "install the package that fsspec names"
        raise error(f"{url}: {scheme}:// needs a package that is not installed: {problem}. Fix: {fix}.") from problem
    except ValueError as problem:
        known = ", ".join(["https", "hf", *PACKAGES])
        raise error(
            f"{url}: expected a URL of a scheme that can be read, found {scheme}:// ({first_line(problem)}). Known: "
            f"{known}, and every other of fsspec."
        ) from problem
    return found, str(path)
