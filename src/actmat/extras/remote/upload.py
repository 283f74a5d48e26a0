"""Outputs at URLs: built in a local folder, and sent when complete.

Objects of a bucket cannot be renamed, so the order of sending makes an output appear atomically:

1. `.actmat-upload.json` lists the files of the upload, and those of the older output it replaces;
2. the older output is removed, its manifest first;
3. config, tokenizer and other files, all shards except the first, the first, the index, the manifest;
4. the list is removed.

Loaders fail during steps 1 to 3, because weights and the index are missing. A folder with a manifest contains a
finished output, with or without the list. Repeating the command does not send shards again.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from actmat.bounds import MAX_BYTES, parse_object, read_object
from actmat.checkpoints.folder import INDEX_SUFFIX
from actmat.checkpoints.remote import Storage
from actmat.checkpoints.source import Source
from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.listed import MANIFEST_NAME, REPORTS, listed_files
from actmat.checkpoints.writing.staging import JOURNAL_NAME, Staging, disk_errors, not_ours_problems
from actmat.errors import CheckpointError, OutputError
from actmat.extras.remote.claims import RemoteFile
from actmat.extras.remote.files import RemoteOutput
from actmat.extras.remote.objects import open_store
from actmat.extras.remote.retry import retried
from actmat.extras.remote.source import open_remote
from actmat.extras.remote.store import MissingFileError, Store, check_url

MARK_NAME = ".actmat-upload.json"
"""File that marks a remote folder as an upload in progress and lists its files."""
FORMAT = 1
WEIGHTS = ".safetensors"

T = TypeVar("T")


class RemoteStaging(Staging, abc.ABC):
    """Staging of an output at a URL.

    Args:
        url: URL of the output.
        folder: local name of the output; it is built in a sibling folder.
        fingerprint: fingerprint of the plan.
        overwrite: replace an existing output.
    """

    def __init__(self, url: str, folder: Path, fingerprint: str, *, overwrite: bool = False) -> None:
        super().__init__(folder, fingerprint, overwrite=overwrite)
        self.url = url

    @property
    def place(self) -> str:
        """The URL."""
        return self.url

    @abc.abstractmethod
    def send(self, names: Collection[str]) -> None:
        """Send files of the local folder; the output looks unfinished until all are sent."""

    def commit(self) -> None:
        """Send all files; then remove the local folder."""
        files = (p for p in self.path.rglob("*") if p.is_file())
        self.send({n for p in files if (n := p.relative_to(self.path).as_posix()) != JOURNAL_NAME})
        with disk_errors(self.path):
            self.journal.close()
            shutil.rmtree(self.path)
        self.committed = self._gone = True
        self.close()


class UploadStaging(RemoteStaging):
    """Staging of an output in a bucket."""

    def __init__(self, url: str, folder: Path, fingerprint: str, *, overwrite: bool = False) -> None:
        super().__init__(check_url(url), folder, fingerprint, overwrite=overwrite)
        self._store = open_store(self.url, error=OutputError)
        self._sent_path = self.path.with_name(f"{self.path.name}-sent.json")

    def open(self) -> Journal:
        """Take the local lock, and read the local journal.

        Raises:
            OutputError: the folder has other content, or a user's files with names of the output.
        """
        journal = super().open()
        files = self._list()
        if files and not files.keys() & {MARK_NAME, MANIFEST_NAME}:
            raise OutputError(
                f"{self.url} is not empty and was not written by actmat (it has no {MANIFEST_NAME}), so nothing "
                "is written there; choose another location, or empty it"
            )
        if MANIFEST_NAME in files and not self.overwrite:
            raise OutputError(f"{self.url} contains a finished output; choose another location or pass --overwrite")
        if problems := not_ours_problems(self.url, sorted(files.keys() - self._own(files) - REPORTS)):
            raise OutputError(problems[0])
        return journal

    def send(self, names: Collection[str]) -> None:
        """Send the files in the order given in the module's docstring."""
        files = self._list()
        ours, sent = self._own(files), self._sent(files)
        mark = {"actmat_upload": FORMAT, "files": sorted({*names, *ours})}
        self._put_json(MARK_NAME, mark)
        for name in sorted(ours - sent.keys() - {MARK_NAME}, key=_rank, reverse=True):
            self._call(functools.partial(self._store.delete, [name]), self.url)
        first = min((n for n in names if n.endswith(WEIGHTS)), default="")
        for name in sorted(names - sent.keys(), key=lambda n: (_rank(n), n == first, n)):
            if name == MANIFEST_NAME:
                self._check_sent(sent)
            stored = self._put(self.path / name, name)
            if name.endswith(WEIGHTS):
                sent[name] = stored
                shards = {n: [f.size, f.etag] for n, f in sent.items()}
                with disk_errors(self._sent_path):
                    self._sent_path.write_text(json.dumps({"fingerprint": self.fingerprint, "shards": shards}))
        self._call(lambda: clear_upload(self._store), self.url)
        self._sent_path.unlink(missing_ok=True)

    def _sent(self, files: Mapping[str, RemoteFile]) -> dict[str, RemoteFile]:
        """Shards sent by an earlier run of the same plan that are still unchanged."""
        record: dict[str, Any] = {}
        if self._sent_path.exists():
            record = read_object(self._sent_path, error=OutputError)
        listed = record.get("shards", {}) if record.get("fingerprint") == self.fingerprint else {}
        return {n: files[n] for n, row in listed.items() if n in files and [files[n].size, files[n].etag] == row}

    def _check_sent(self, sent: Mapping[str, RemoteFile]) -> None:
        """Compare all shards in the store with the sent ones, before sending the manifest."""
        files = self._list()
        if wrong := [n for n, file in sent.items() if files.get(n) != file]:
            raise OutputError(
                f"{self.url}: {len(wrong)} shard(s) changed after they were sent. Likely cause: another process writes "
                "the same output. Fix: repeat the command when it is finished.",
                [f"{self.url}/{n}: sent {sent[n]}, found {files.get(n)}" for n in wrong],
            )

    def _own(self, files: Mapping[str, RemoteFile]) -> set[str]:
        """Remote files that belong to a finished output or an unfinished upload.

        Raises:
            OutputError: the manifest is damaged, so that the files are unknown.
        """
        marked, manifest = self._read(files, MARK_NAME), self._read(files, MANIFEST_NAME)
        if manifest is None and MANIFEST_NAME in files:
            raise OutputError(
                f"{self.url} cannot be replaced: its manifest is damaged, so a user's own files cannot be "
                "identified. Remove the folder yourself, or choose another location"
            )
        listed = (marked or {}).get("files")
        names = [n for n in listed if isinstance(n, str)] if isinstance(listed, list) else []
        return files.keys() & {MARK_NAME, MANIFEST_NAME, *names, *listed_files(manifest or {})}

    def _list(self) -> dict[str, RemoteFile]:
        return self._call(lambda: _listed(self._store), self.url)

    def _read(self, files: Mapping[str, RemoteFile], name: str) -> dict[str, Any] | None:
        """Read a JSON file of the folder; None if missing or damaged."""
        file = files.get(name)
        if file is None or file.size > MAX_BYTES:
            return None
        data = self._call(lambda: self._store.read(file, 0, file.size), f"{self.url}/{name}")
        with contextlib.suppress(OutputError):
            return parse_object(data, name, values=MAX_BYTES, error=OutputError)
        return None

    def _put(self, path: Path, name: str) -> RemoteFile:
        return self._call(lambda: self._store.put(path, name), f"{self.url}/{name}")

    def _put_json(self, name: str, data: Mapping[str, Any]) -> None:
        path = self.path.parent / f"{self.path.name}{name}"  # next to the folder, whose whole content is sent
        with disk_errors(path):
            path.write_text(json.dumps(data), encoding="utf-8")
        try:
            self._put(path, name)
        finally:
            path.unlink(missing_ok=True)

    def _call(self, request: Callable[[], T], what: str) -> T:
        """Make a request with retries; store errors become output errors."""
        try:
            return retried(request, what, error=OutputError)
        except CheckpointError as error:
            raise OutputError(f"Cannot write to {self.url}: {error}") from error


def clear_upload(store: Store) -> None:
    """Remove the file list of a finished upload.

    Raises:
        TransientError, CheckpointError: from the store.
    """
    store.delete([MARK_NAME])


def _listed(store: Store) -> dict[str, RemoteFile]:
    """Files of a folder; empty if the folder does not exist yet."""
    try:
        return {**(store.list() or {}), **store.below()}
    except MissingFileError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return {}
        raise


def _rank(name: str) -> int:
    """Sort key of the sending order; removal uses the reverse."""
    return 3 if name == MANIFEST_NAME else 2 if name.endswith(INDEX_SUFFIX) else 1 if name.endswith(WEIGHTS) else 0


class _Urls(Storage):
    def open_source(self, url: str, *, pinned: Mapping[str, tuple[int, str]]) -> Source:
        return open_remote(url, pinned=pinned)

    def open_output(self, url: str) -> RemoteOutput:
        source = open_remote(url, pinned={})
        return RemoteOutput(source, source.names)

    def upload_problems(self, url: str) -> list[str]:
        try:
            checked = check_url(url)
            if checked.startswith(("http://", "https://")):
                return [
                    f"{url} cannot be written: web servers are read only; write to a folder or a bucket, then upload it"
                ]
            open_store(checked, error=OutputError)
        except (CheckpointError, OutputError) as error:
            return list(error.problems)
        return []

    def stage(self, url: str, folder: Path, fingerprint: str, *, overwrite: bool = False) -> UploadStaging:
        return UploadStaging(url, folder, fingerprint, overwrite=overwrite)

    def sizes(self, url: str) -> dict[str, int]:
        store = open_store(check_url(url))
        stored = {**retried(lambda: store.list() or {}, url), **retried(store.below, url)}
        return {name: file.size for name, file in stored.items()}

    def clear(self, url: str) -> None:
        store = open_store(check_url(url))
        retried(lambda: clear_upload(store), url)


URLS = _Urls()
