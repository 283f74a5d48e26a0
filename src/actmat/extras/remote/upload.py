"""Outputs in a bucket: staged locally, sent shard by shard, committed by the index and then the manifest.

Objects cannot be renamed, so the order of writing makes an output appear whole or not at all:

1. `.actmat-upload.json` marks the folder as one that is being written, with the fingerprint of the plan;
2. each shard but the first, when its last tensor is done, and after it a note with its size, its etag and the records
   of its tensors; its local bytes are then freed;
3. at the end config, tokenizer and other files, the first shard, the index, the manifest;
4. the mark and the notes are removed.

No loader takes steps 1 and 2 for a model: weights are missing, and there is neither an index nor a config. A run of the
same fingerprint resumes from the local journal and, also on another machine, from the notes: a shard whose size or etag
is another than its note says is made again. A mark of another fingerprint is removed with the shards of its notes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from actmat.bounds import MAX_BYTES, parse_object
from actmat.checkpoints.hashing import sha256_file
from actmat.checkpoints.remote import MARK_NAME
from actmat.checkpoints.retry import retried
from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.listed import MANIFEST_NAME, REPORTS, listed_files
from actmat.checkpoints.writing.shards import Shard, index_files
from actmat.checkpoints.writing.staging import JOURNAL_NAME, Staging, disk_errors, not_ours_problems
from actmat.errors import CheckpointError, OutputError
from actmat.extras.remote.objects import open_store
from actmat.extras.remote.store import MissingFileError, RemoteFile, Store, check_url

NOTE_PREFIX = ".actmat-upload."
FORMAT = 1
PARALLEL_UPLOADS = 2
"""Files at the same time; the library sends the parts of each in parallel too."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Note:
    """A shard that was sent."""

    file: RemoteFile
    sha256: str
    entries: tuple[Mapping[str, Any], ...]  # of the journal, for every tensor in it

    def to_json(self) -> dict[str, Any]:
        return {
            "file": self.file.name,
            "size": self.file.size,
            "etag": self.file.etag,
            "sha256": self.sha256,
            "records": list(self.entries),
        }


class UploadStaging(Staging):
    """Staging of an output whose final place is a URL.

    Args:
        url: of the folder to write.
        folder: local name of the output; it is built beside it, and never there.
        fingerprint: of the plan.
        shards: the files to write.
        overwrite: replace an output of actmat that is there; it is removed when the first shard is sent.
    """

    def __init__(
        self, url: str, folder: Path, fingerprint: str, shards: Sequence[Shard], *, overwrite: bool = False
    ) -> None:
        super().__init__(folder, fingerprint, overwrite=overwrite)
        self.url = check_url(url)
        self._store = open_store(self.url, error=OutputError)
        self._shards = tuple(shards)
        self._shard_of = {name: s.file for s in shards for name in s.extents}
        self._missing = {s.file: set(s.extents) for s in shards}
        self._entries: dict[str, dict[str, Mapping[str, Any]]] = {s.file: {} for s in shards}
        self._notes: dict[str, _Note] = {}
        self._sending: dict[str, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._marked = False

    @property
    def place(self) -> str:
        """The URL."""
        return self.url

    @property
    def uploaded(self) -> Mapping[str, str]:
        """Content hash of every tensor in a shard that was sent."""
        return {
            name: digest
            for file, note in self._notes.items()
            for entry in note.entries
            for name, digest in entry["hashes"].items()
            if self._shard_of.get(name) == file
        }

    def open(self) -> Journal:
        """Take the local lock; read the local journal, and add the notes of shards that were sent.

        Raises:
            OutputError: the folder holds something else, or a user's own files among those of the output.
        """
        journal = super().open()
        files = self._call(lambda: _listed(self._store), self.url)
        mark = self._read(files, MARK_NAME)
        clearing = mark is not None and bool(mark.get("clearing"))
        is_ours = mark is not None and mark.get("fingerprint") == self.fingerprint and not clearing
        if files and mark is None and MANIFEST_NAME not in files:
            raise OutputError(
                f"{self.url} is not empty and was not written by actmat (it has no {MANIFEST_NAME}), so nothing "
                "is written there; choose another place, or empty it"
            )
        if MANIFEST_NAME in files and not (clearing or is_ours or self.overwrite):
            raise OutputError(f"{self.url} holds a finished output; choose another place or pass --overwrite")
        if MANIFEST_NAME in files and not (clearing or is_ours):
            self._check_own(files)
        if is_ours:
            self._marked = True
            self._read_notes(files)
        with disk_errors(self.path):
            for entry in (e for note in self._notes.values() for e in note.entries):
                if entry["name"] not in journal:
                    journal.append(entry)
        return journal

    def resume(self, entries: Iterable[Mapping[str, Any]]) -> None:
        """Count tensors that are done; shards that are whole are sent."""
        for entry in entries:
            self._count(entry)

    def settle(self, shards: Sequence[Shard]) -> None:
        """Send these files at the end; no earlier upload of them is known."""
        self._shards = tuple(shards)
        self._entries = {s.file: {} for s in shards}

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append a finished tensor to the journal; sends the shards that it completes.

        Raises:
            OutputError: an upload failed for good.
        """
        super().record(entry)
        self._count(entry)
        for future in list(self._sending.values()):
            if future.done():
                future.result()

    def sha256(self, file: str) -> str:
        """SHA-256 of a shard, also of one whose local bytes are freed."""
        if file in self._sending:
            self._sending[file].result()
        return self._notes[file].sha256 if file in self._notes else super().sha256(file)

    def commit(self) -> None:
        """Send all that is left, the index and the manifest last; then remove the notes and the local folder."""
        for future in self._sending.values():
            future.result()
        self._mark()
        weights = {s.file for s in self._shards}
        last = [n for n in (*index_files(self._shards, ()), MANIFEST_NAME) if (self.path / n).is_file()]
        there = [p.relative_to(self.path).as_posix() for p in self.path.rglob("*") if not p.is_dir()]
        names = sorted(n for n in there if n not in {JOURNAL_NAME, *last, *weights})
        for name in names:
            self._put(self.path / name, name)
        first = self._shards[0].file
        if first not in self._notes:
            self._send(first)
        self._check_sent()
        for name in last:
            self._put(self.path / name, name)
        self._call(lambda: clear_upload(self._store), self.url)
        with disk_errors(self.path):
            assert self._journal is not None
            self._journal.close()
            shutil.rmtree(self.path)
        self.committed = self._gone = True
        self.close()

    def close(self) -> None:
        """Wait for uploads that run, and release the lock."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        super().close()

    def discard(self) -> None:
        """Remove the local folder, and what was sent."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        if self._marked and self._lock.is_held and not self.committed:
            with contextlib.suppress(CheckpointError, OutputError):  # the next run removes it
                self._call(lambda: self._store.delete([s.file for s in self._shards]), self.url)
                self._call(lambda: clear_upload(self._store), self.url)
        super().discard()

    def _count(self, entry: Mapping[str, Any]) -> None:
        for name in entry["hashes"]:
            file = self._shard_of.get(name)
            if file is None or file in self._notes:
                continue
            self._entries[file][entry["name"]] = entry
            self._missing[file].discard(name)
            is_held = file == self._shards[0].file  # without it nothing looks complete
            if not self._missing[file] and not is_held and file not in self._sending:
                self._mark()
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(PARALLEL_UPLOADS, "actmat-upload")
                self._sending[file] = self._pool.submit(self._send, file)

    def _send(self, file: str) -> None:
        """Send a shard and its note, then free its local bytes."""
        path = self.path / file
        sent = self._put(path, file)
        note = _Note(sent, sha256_file(path), tuple(self._entries[file].values()))
        self._put_json(_note_name(file), note.to_json())
        self._notes[file] = note
        with disk_errors(path):
            os.truncate(path, 0)
            os.truncate(path, sent.size)

    def _mark(self) -> None:
        """Claim the folder, once; what another run or an older output left there is removed first."""
        if self._marked:
            return
        files = self._call(lambda: _listed(self._store), self.url)
        if files:
            self._put_json(MARK_NAME, {"actmat_upload": FORMAT, "fingerprint": self.fingerprint, "clearing": True})
            old = self._old_names(files)
            for name in (MANIFEST_NAME, *index_files(self._shards, ()), *old):
                if name in files:
                    self._call(functools.partial(self._store.delete, [name]), self.url)
        self._put_json(MARK_NAME, {"actmat_upload": FORMAT, "fingerprint": self.fingerprint})
        self._marked = True

    def _old_names(self, files: Mapping[str, RemoteFile]) -> list[str]:
        """Files of the output, or of the unfinished upload, that is there."""
        found = [_file_of(name) for name in files if name.startswith(NOTE_PREFIX) and name != MARK_NAME]
        found += [n for n in files if n.startswith(NOTE_PREFIX) and n != MARK_NAME]
        found += listed_files(self._read(files, MANIFEST_NAME) or {})
        return found

    def _check_own(self, files: Mapping[str, RemoteFile]) -> None:
        """Refuse to replace an output among files that it did not write, one of which might be written over.

        Raises:
            OutputError: names them; or the manifest is damaged.
        """
        manifest = self._read(files, MANIFEST_NAME)
        if manifest is None:
            raise OutputError(
                f"{self.url} cannot be replaced: its manifest is damaged, so that nothing tells which files are a "
                "user's own. Remove the folder yourself, or choose another place"
            )
        known = {MANIFEST_NAME, MARK_NAME, *REPORTS, *listed_files(manifest)}
        strange = sorted(n for n in files if n not in known and not n.startswith(NOTE_PREFIX))
        if problems := not_ours_problems(self.url, strange):
            raise OutputError(problems[0])

    def _read_notes(self, files: Mapping[str, RemoteFile]) -> None:
        """Keep the notes whose shard is there as it was sent."""
        for shard in self._shards:
            data = self._read(files, _note_name(shard.file))
            there = files.get(shard.file)
            if data is None or there is None or (data.get("size"), data.get("etag")) != (there.size, there.etag):
                continue
            entries = data.get("records")
            if there.size == shard.size and isinstance(entries, list) and all(map(_is_entry, entries)):
                names = {n for e in entries for n in e["hashes"]}
                if shard.extents.keys() <= names:
                    self._notes[shard.file] = _Note(there, str(data.get("sha256")), tuple(entries))

    def _check_sent(self) -> None:
        """Compare all shards in the store with what was sent, before the commit."""
        files = self._call(lambda: _listed(self._store), self.url)
        wrong = [n for n, note in self._notes.items() if files.get(n) != note.file]
        if wrong:
            raise OutputError(
                f"{self.url}: {len(wrong)} shard(s) are not as they were sent. Likely cause: another process writes "
                "the same output. Fix: give the same command again when it is done.",
                [f"{self.url}/{n}: sent {self._notes[n].file}, found {files.get(n)}" for n in wrong],
            )

    def _read(self, files: Mapping[str, RemoteFile], name: str) -> dict[str, Any] | None:
        """A JSON file of the folder; None if it is not there or damaged."""
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
        path = self.path.parent / f"{self.path.name}{name}"  # beside the folder, of which all is sent
        with disk_errors(path):
            path.write_text(json.dumps(data), encoding="utf-8")
        try:
            self._put(path, name)
        finally:
            path.unlink(missing_ok=True)

    def _call(self, request: Callable[[], T], what: str) -> T:
        """The result of a request, with retries; an error of the store is one of the output."""
        try:
            return retried(request, what, error=OutputError)
        except CheckpointError as error:
            raise OutputError(f"Cannot write to {self.url}: {error}") from error


def clear_upload(store: Store) -> None:
    """Remove the mark and the notes of an upload, the mark last; of a finished one, they are all that is left.

    Raises:
        TransientError, CheckpointError: from the store.
    """
    names = [n for n in _listed(store) if n.startswith(NOTE_PREFIX)]
    store.delete(sorted(names, key=lambda name: name == MARK_NAME))


def _listed(store: Store) -> dict[str, RemoteFile]:
    """Files of a folder; none where there is no such folder yet."""
    try:
        return {**(store.list() or {}), **store.below()}
    except MissingFileError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return {}
        raise


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("name"), str)
        and isinstance(entry.get("hashes"), dict)
        and all(isinstance(h, str) for h in entry["hashes"].values())
    )


def _note_name(file: str) -> str:
    return f"{NOTE_PREFIX}{quote(file, safe='')}.json"  # of a file in a folder, too


def _file_of(note: str) -> str:
    return unquote(note.removeprefix(NOTE_PREFIX).removesuffix(".json"))
