"""Build an output aside, remember what is done, and let it appear whole.

`OUT` is built in `.OUT.actmat-partial` beside it and renamed at the end, so that at no moment a directory exists
under the final name that a loader would take for finished. A journal in the partial directory lists finished
tensors with the hash of their bytes; a later run with the same fingerprint verifies those bytes and goes on. A
journal of another fingerprint (other recipe, changed input) is thrown away with everything it describes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from actmat.errors import OutputError

__all__ = ["JOURNAL_NAME", "MANIFEST_NAME", "Staging", "check_output_place", "disk_errors"]

JOURNAL_NAME = "journal.jsonl"
MANIFEST_NAME = "actmat_manifest.json"


def check_output_place(out: Path, *, overwrite: bool, inputs: Mapping[str, Path]) -> list[str]:
    """Problems of writing to `out`, as sentences; empty when it is fine.

    `overwrite` replaces only what actmat itself wrote (a directory with a manifest): a mistyped path must not cost
    anyone a folder of other things. An input is never replaced.
    """
    problems = []
    resolved = out.resolve()
    for label, path in inputs.items():
        place = path.resolve()
        if place == resolved or resolved in place.parents:
            problems.append(f"{out} is, or contains, an input of this merge ({label}); write somewhere else")
        elif place in resolved.parents and place.is_dir():
            problems.append(f"{out} lies inside an input of this merge ({label}); write somewhere else")
    if out.is_symlink() or (out.exists() and not out.is_dir()):
        problems.append(f"{out} exists and is not a directory; choose another place")
    elif out.is_dir() and any(out.iterdir()):
        if not overwrite:
            problems.append(f"{out} exists and is not empty; choose another place or pass --overwrite")
        elif not (out / MANIFEST_NAME).is_file():
            problems.append(
                f"{out} was not written by actmat (it has no {MANIFEST_NAME}), so --overwrite will not delete it; "
                "remove it yourself or choose another place"
            )
    parent = resolved.parent
    while not parent.exists():
        parent = parent.parent
    if not os.access(parent, os.W_OK):
        problems.append(f"{parent} is not writable; choose a place you may write to")
    return problems


@contextlib.contextmanager
def disk_errors(place: Path) -> Iterator[None]:
    """Turn a full disk, an exceeded quota or a read-only place into an `OutputError` that says what to do."""
    try:
        yield
    except OSError as error:
        causes = {
            errno.ENOSPC: "the disk is full",
            errno.EDQUOT: "the disk quota is used up",
            errno.EROFS: "the file system is read-only",
            errno.EACCES: "permission denied",
            errno.EFBIG: "the file system does not take a file of this size",
        }
        cause = causes.get(error.errno or 0)
        if cause is None:
            raise
        free = shutil.disk_usage(place if place.exists() else place.parent).free
        raise OutputError(
            f"Cannot write to {place}: {cause} ({free / 1e9:.2f} GB free). Free some space or choose another place "
            "with --out; the inputs are untouched."
        ) from error


class Staging:
    """The partial directory of one output: lock, journal, final rename.

    Args:
        out: the final directory.
        fingerprint: of the plan; only a journal with the same fingerprint is resumed.
    """

    def __init__(self, out: Path, fingerprint: str) -> None:
        self.out = out
        self.fingerprint = fingerprint
        self.path = out.parent / f".{out.name}.actmat-partial"
        self.discarded = False
        self._previous = out.parent / f".{out.name}.actmat-previous"
        self._lock_file: IO[bytes] | None = None
        self._journal: IO[str] | None = None
        self._mutex = threading.Lock()

    def open(self) -> dict[str, dict[str, Any]]:
        """Take the lock and read the journal: tensor name -> its entry, for tensors finished earlier.

        Raises:
            OutputError: another process is writing the same output, or the place cannot be written.
        """
        with disk_errors(self.out.parent):
            self.out.parent.mkdir(parents=True, exist_ok=True)
            if self._previous.exists() and not self.out.exists():
                os.rename(self._previous, self.out)  # killed between the two renames of `commit`
            self.path.mkdir(exist_ok=True)
            self._lock()
            done = self._read_journal()
            if done is None:
                self.discarded = (self.path / JOURNAL_NAME).exists()
                self._clear()
                done = {}
            fresh = not (self.path / JOURNAL_NAME).exists()
            self._journal = (self.path / JOURNAL_NAME).open("a", encoding="utf-8")
            if fresh:
                self._append({"actmat_journal": 1, "fingerprint": self.fingerprint})
        return done

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one finished tensor; called after its last byte is written. Thread-safe."""
        with disk_errors(self.path):
            self._append(entry)

    def commit(self) -> None:
        """Everything is written: drop the journal, flush the directory, rename it to the final name."""
        assert self._journal is not None
        assert self._lock_file is not None
        with disk_errors(self.out.parent):
            self._journal.close()
            (self.path / JOURNAL_NAME).unlink()
            (self.path / ".lock").unlink()
            _sync_directory(self.path)
            if self.out.exists() and any(self.out.iterdir()):
                if self._previous.exists():
                    shutil.rmtree(self._previous)
                os.rename(self.out, self._previous)
            os.rename(self.path, self.out)
            _sync_directory(self.out.parent)
            if self._previous.exists():
                shutil.rmtree(self._previous)
        self._lock_file.close()

    def close(self) -> None:
        """Give up the lock, keep what is done for a later run."""
        for file in (self._journal, self._lock_file):
            if file is not None and not file.closed:
                file.close()

    def discard(self) -> None:
        """Remove the partial directory: the inputs were wrong, nothing of it can be used."""
        self.close()
        shutil.rmtree(self.path, ignore_errors=True)

    def _lock(self) -> None:
        self._lock_file = (self.path / ".lock").open("wb")
        try:
            fcntl.flock(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            self._lock_file.close()
            raise OutputError(
                f"Another actmat is writing {self.out} right now (it holds {self.path / '.lock'}). Wait for it, or "
                "choose another place with --out."
            ) from error

    def _read_journal(self) -> dict[str, dict[str, Any]] | None:
        """Entries of a journal with our fingerprint; None when there is none to go on with."""
        journal = self.path / JOURNAL_NAME
        if not journal.exists():
            return None
        lines = journal.read_text(encoding="utf-8", errors="replace").split("\n")
        whole = lines[:-1]  # a line without its newline was being written when the process died
        entries = []
        for line in whole:
            try:
                entries.append(json.loads(line))
            except json.JSONDecodeError:
                break
        if not entries or entries[0].get("fingerprint") != self.fingerprint:
            return None
        if lines[-1] or len(entries) < len(whole):
            journal.write_text("".join(json.dumps(e) + "\n" for e in entries), encoding="utf-8")
        return {e["name"]: e for e in entries[1:]}

    def _clear(self) -> None:
        for child in self.path.iterdir():
            if child.name == ".lock":
                continue
            if child.is_dir() and not child.is_symlink():
                shutil.rmtree(child)
            else:
                child.unlink()

    def _append(self, entry: Mapping[str, Any]) -> None:
        assert self._journal is not None
        with self._mutex:
            self._journal.write(json.dumps(entry) + "\n")
            self._journal.flush()


def _sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
