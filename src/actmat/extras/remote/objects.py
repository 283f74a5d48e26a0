"""Files of an object store (S3, Google Cloud Storage, Azure, and other fsspec file systems)."""

from __future__ import annotations

import datetime
import errno
import posixpath
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from actmat.checkpoints.folder import is_plain_path
from actmat.checkpoints.side_files import DEEPEST
from actmat.errors import CheckpointError, MergeError
from actmat.extras.remote import claims
from actmat.extras.remote.retry import TransientError, first_line
from actmat.extras.remote.store import MissingFileError, Store

PACKAGES = {
    "s3": ("s3fs", "s3"),
    "s3a": ("s3fs", "s3"),
    "gs": ("gcsfs", "gcs"),
    "gcs": ("gcsfs", "gcs"),
    "az": ("adlfs", "azure"),
    "abfs": ("adlfs", "azure"),
    "abfss": ("adlfs", "azure"),
}
"""Scheme -> required package, and the extra of actmat that installs it."""

VERSIONS = ("ETag", "etag", "generation", "md5Hash", "LastModified", "last_modified", "updated", "mtime", "created")
"""Fields of fsspec's file info that identify a version; the first present one is used."""

CONDITIONAL = ("s3", "s3a")
"""Schemes whose server checks the etag on reading (`If-Match`); for others, the version is checked after a read."""


class ObjectStore(Store):
    """A folder of a bucket or of any fsspec file system. Credentials come from its library."""

    def __init__(self, url: str, *, error: type[MergeError] = CheckpointError) -> None:
        self.url = url
        self._scheme = url.partition("://")[0]
        # fsspec keeps one instance for each set of arguments, so that connections are shared
        self._listed, self._root = _file_system(url, error, use_listings_cache=True)
        self._fresh, _ = _file_system(url, error, use_listings_cache=False)

    def list(self) -> dict[str, claims.RemoteFile]:
        """List the folder's files, with sizes and etags."""
        with self._explained(""):
            self._listed.invalidate_cache(self._root)
            rows = self._listed.ls(self._root, detail=True)
        listed = self._files((str(row["name"]), row) for row in rows)
        self.notes = claims.odd_names_note(
            posixpath.basename(str(row["name"])) for row in rows if row["type"] == "file"
        )
        return {name: file for name, file in listed.items() if "/" not in name}

    def below(self) -> dict[str, claims.RemoteFile]:
        """List files to a bounded depth, in one or a few requests."""
        with self._explained(""):
            rows = self._listed.find(self._root, maxdepth=DEEPEST + 1, detail=True)
        return {name: file for name, file in self._files(rows.items()).items() if "/" in name}

    def head(self, name: str, length: int) -> tuple[claims.RemoteFile, bytes]:
        """Get the file and its first bytes: one request after `list`, else two."""
        with self._explained(name):
            file = self._file(name, self._listed.info(self._path(name)))
        return file, self.read(file, 0, min(length, file.size))

    def read(self, file: claims.RemoteFile, offset: int, length: int) -> bytes:
        """Read a range. S3 is told the etag and states the range; elsewhere the version is checked after the read."""
        if length == 0:
            return b""
        if self._scheme in CONDITIONAL:
            return self._read_s3(file, offset, length)
        with self._explained(file.name), self._listed.open(self._path(file.name), "rb", cache_type="none") as opened:
            if hasattr(opened, "details"):
                claims.check_same(f"{self.url}/{file.name}", file, self._file(file.name, opened.details))
            opened.seek(offset)
            data = bytes(opened.read(length))
        with self._explained(file.name):
            now = self._file(file.name, self._fresh.info(self._path(file.name)))
        claims.check_same(f"{self.url}/{file.name}", file, now)
        return _whole(data, length)

    def put(self, path: Path, name: str) -> claims.RemoteFile:
        """Write a file; large files are sent in parts and appear after the last part."""
        with self._explained(name):
            self._fresh.put_file(str(path), self._path(name))
            written = self._file(name, self._fresh.info(self._path(name)))
        if written.size != path.stat().st_size:
            raise TransientError(f"{path.stat().st_size} bytes were sent, but the store has {written.size}")
        return written

    def delete(self, names: Sequence[str]) -> None:
        """Remove existing files."""
        with self._explained(""):
            for name in names:
                if self._fresh.exists(self._path(name)):
                    self._fresh.rm_file(self._path(name))

    def _read_s3(self, file: claims.RemoteFile, offset: int, length: int) -> bytes:
        """Read a range; the answer's range, size and etag are compared, which s3fs does not."""
        from fsspec.asyn import sync

        async def get() -> tuple[Mapping[str, Any], bytes]:
            bucket, key, _ = self._listed.split_path(self._path(file.name))
            asked = {"Range": f"bytes={offset}-{offset + length - 1}", "IfMatch": f'"{file.etag}"'}
            answer = await self._listed._call_s3("get_object", Bucket=bucket, Key=key, **asked)
            data = bytearray()
            async with answer["Body"] as body:
                while len(data) < length and (piece := await body.read(length - len(data))):
                    data += piece
            return answer, bytes(data)

        with self._explained(file.name):
            answer, data = sync(self._listed.loop, get)
        what = f"{self.url}/{file.name}"
        headers = {"Content-Range": answer.get("ContentRange"), "Content-Length": answer.get("ContentLength")}
        total = claims.stated_total(what, headers, offset, length)
        claims.check_same(what, file, self._file(file.name, {**answer, "size": total}))
        return _whole(data, length)

    def _path(self, name: str) -> str:
        return posixpath.join(self._root, name)

    def _file(self, name: str, row: Mapping[str, Any]) -> claims.RemoteFile:
        version = next((row[key] for key in VERSIONS if row.get(key)), "")
        version = str(version.timestamp() if isinstance(version, datetime.datetime) else version)
        if row.get("size") is None or not version:
            raise CheckpointError(
                f"{self.url}/{name}: its store gives no size or no version, so a change during the merge would "
                "not be detected. Fix: download the folder and pass its path."
            )
        return claims.stated_file(self.url, name, row["size"], version.strip('"'))

    def _files(self, rows: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, claims.RemoteFile]:
        """Files of a listing, by path below the folder."""
        start = f"{self._root.rstrip('/')}/"
        below = [(path.removeprefix(start), row) for path, row in rows if path.startswith(start)]
        files = [self._file(name, row) for name, row in below if row["type"] == "file" and is_plain_path(name)]
        return claims.stated_files(self.url, ((f.name, f.size, f.etag) for f in files))

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Convert errors of the library to ours; network errors become retryable."""
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
            if error.errno == errno.EINVAL and "pre-conditions" in str(error):  # of S3: the etag changed
                raise claims.changed(what, first_line(error)) from error
            raise TransientError(f"{type(error).__name__}: {first_line(error)}") from error
        except Exception as error:  # each library has its own errors
            raise CheckpointError(
                f"{what}: cannot be used: {type(error).__name__}: {first_line(error)}. Likely cause: no credentials, "
                "or a wrong region or endpoint (docs/remote.md)."
            ) from error


def _whole(data: bytes, length: int) -> bytes:
    if len(data) != length:
        raise TransientError(f"the response ended after {len(data)} of {length} bytes")
    return data


def open_store(url: str, *, error: type[MergeError] = CheckpointError) -> Store:
    """Open the store of a folder's URL, already checked by `check_url`; makes no request.

    Raises:
        MergeError: of the type `error`; an unknown scheme, or its package is not installed.
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
        more = {"auto_mkdir": True} if scheme in ("file", "local") else {}  # buckets have no folders
        system, path = url_to_fs(url, use_listings_cache=use_listings_cache, **more)
    except ImportError as problem:
        package, extra = PACKAGES.get(scheme, ("", ""))
        fix = f"pip install 'actmat[{extra}]' (or {package})" if package else "install the package named by fsspec"
        raise error(f"{url}: {scheme}:// needs a package that is not installed: {problem}. Fix: {fix}.") from problem
    except ValueError as problem:
        known = ", ".join(["https", "hf", *PACKAGES])
        raise error(
            f"{url}: the scheme {scheme}:// is not supported ({first_line(problem)}). Supported: "
            f"{known}, and all others of fsspec."
        ) from problem
    return system, str(path)
