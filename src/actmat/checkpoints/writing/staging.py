"""Staging of an output: a partial directory with a journal and a lock, renamed when it is complete.

`OUT` is built in its sibling `.OUT.actmat-partial` and renamed at the end, so that no directory of the final name
exists that a loader would take for finished. A journal in the partial directory lists finished tensors with the hash
of their bytes; a later run with the same fingerprint verifies those bytes and continues. A journal of another
fingerprint (other recipe, changed input) is deleted with everything it describes. For the moment of the rename the
journal is a sibling, `.OUT.actmat-journal`: it must not show up in the output, and must not be lost before.

The process that builds or renames holds the lock on `.OUT.actmat-lock`, a sibling too because the directories are
renamed. Renaming siblings stays within one file system and is atomic. An output that is one file is written by
`whole_file`: it appears whole or not at all, and one process makes it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from actmat.bounds import kind_of_file, list_folder, local_path
from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.listed import MANIFEST_NAME, unlisted_files
from actmat.errors import OutputError, first_of, format_size
from actmat.system import is_file_name, rename_folder, replace_file, sync_directory


class OutputLock:
    """Held by one process at a time; the system releases it when that process ends.

    Args:
        out: the output, for messages.
        path: the file that is locked.
    """

    def __init__(self, out: Path, path: Path) -> None:
        self.out = out
        self.path = path
        # A lock that is the mere existence of a file would outlive a process that is killed on another machine.
        self._lock = FileLock(path, blocking=False, thread_local=False, fallback_to_soft=False)

    @property
    def is_held(self) -> bool:
        """True if this process holds it."""
        return self._lock.is_locked

    def take(self) -> None:
        """Take the lock, or fail at once.

        Raises:
            OutputError: another process holds it.
            OSError: the file system offers no locks.
        """
        while not self.is_held:
            try:
                self._lock.acquire()
            except Timeout:
                if os.path.lexists(self.path):  # else its owner removed it between our opening and our locking
                    raise OutputError(
                        f"Another actmat is writing {self.out} right now (it holds {self.path}). Wait for it, or "
                        "choose another place with --out."
                    ) from None
                os.close(os.open(self.path, os.O_RDWR | os.O_CREAT))  # or the error of a place that takes no files

    def release(self) -> None:
        """Release the lock and remove its file. May be called twice."""
        if self.is_held:
            with contextlib.suppress(PermissionError):  # Windows removes no open file; it stays, unlocked
                self.path.unlink(missing_ok=True)  # while locked: later it may be of another process
            self._lock.release()


JOURNAL_NAME = "journal.jsonl"
LONGEST_NAME = 255
SHOWN_FILES = 20


def check_output_path(out: Path, *, overwrite: bool, inputs: Mapping[str, Path]) -> list[str]:
    """Problems of writing to `out`, as sentences; may be empty.

    `overwrite` replaces only an output of actmat, a directory with a manifest that records every file in it: neither a
    mistyped path nor a user's notes next to a model may be deleted. An input is never replaced.
    """
    try:
        local_path(out, error=OutputError)
    except OutputError as error:
        return list(error.problems)
    if len(os.fsencode(sibling(out, "previous").name)) > LONGEST_NAME:
        return [f"the name of {out} is too long: while it is built, its folder has a prefix and a suffix; shorten it"]
    if not is_file_name(out.name):
        return [f"'{out.name}' is not a folder name on Windows (a device, a character such as ':', or a final dot)"]
    problems = _obstacles(out)
    resolved = Path(os.path.realpath(out))
    place, above = _identity(resolved), {_identity(p) for p in resolved.parents}
    for label, path in inputs.items():
        source = Path(os.path.realpath(path))
        if place in {_identity(p) for p in (source, *source.parents)}:
            problems.append(f"{out} is, or contains, an input of this merge ({label}); write somewhere else")
        elif _identity(source) in above and os.path.isdir(source):
            problems.append(f"{out} lies inside an input of this merge ({label}); write somewhere else")
    if os.path.islink(out) or (os.path.exists(out) and not os.path.isdir(out)):
        problems.append(f"{out} is a link or a file, expected a folder; choose another place, or one inside the link")
    else:
        problems += occupied(out, overwrite=overwrite)
    parent = resolved.parent
    while not os.path.exists(parent):
        parent = parent.parent
    if not os.path.isdir(parent):
        problems.append(f"{parent} is a file, {out} cannot lie in it; choose another place")
    elif not os.access(parent, os.W_OK):
        problems.append(f"{parent} is not writable; choose a place you may write to")
    return problems


def _identity(path: Path) -> object:
    """A value that all names of a file or folder share: they may differ in upper and lower case (Windows, macOS)."""
    with contextlib.suppress(OSError):
        status = os.stat(path)
        if status.st_ino:
            return status.st_dev, status.st_ino
    return path


def _obstacles(out: Path) -> list[str]:
    """Problems: siblings with the names that a run needs, which no run made (such as links)."""
    problems = []
    for suffix, is_ours, expected in (
        ("partial", stat.S_ISDIR, "the directory of an interrupted run"),
        ("previous", stat.S_ISDIR, "the output that is being replaced"),
        ("lock", stat.S_ISREG, "the lock file of a run"),
    ):
        path = sibling(out, suffix)
        with contextlib.suppress(OSError):
            mode = path.lstat().st_mode
            if not is_ours(mode):
                problems.append(f"{path} is in the way: expected {expected}, found {kind_of_file(mode)}; remove it")
    return problems


def occupied(out: Path, *, overwrite: bool) -> list[str]:
    """Problems: an existing file or folder at `out`, unless it is an output that may be replaced."""
    previous = sibling(out, "previous")
    if not os.path.exists(out) and os.path.exists(previous) and not overwrite:
        return [
            f"{out} was being replaced when an earlier run was killed; its old content is in {previous}. Run the "
            "same command with --overwrite again, or rename that folder back"
        ]
    if not os.path.isdir(out) or not list_folder(out, error=OutputError):
        return []
    if not overwrite:
        return [f"{out} exists and is not empty; choose another place or pass --overwrite"]
    if not os.path.isfile(out / MANIFEST_NAME):
        return [
            f"{out} was not written by actmat (it has no {MANIFEST_NAME}), so --overwrite will not delete it; "
            "remove it yourself or choose another place"
        ]
    try:
        return not_ours_problems(str(out), unlisted_files(out))
    except OutputError as error:
        return [
            f"{out} cannot be replaced: its manifest is damaged, so your own files in it cannot be recognized "
            f"({error.problems[0]}). Remove the folder yourself, or choose another place"
        ]


def not_ours_problems(place: str, names: Sequence[str]) -> list[str]:
    """Problem: a user's own files in an output that is to be replaced; empty without such files."""
    if not names:
        return []
    return [
        f"{place} holds files that its merge did not write and --overwrite will not delete: "
        f"{first_of(names, SHOWN_FILES)}. Move them elsewhere, or choose another place"
    ]


def sibling(out: Path, suffix: str) -> Path:
    """Path of a hidden file or folder next to `out`, kept while `out` is built."""
    return out.parent / f".{out.name}.actmat-{suffix}"


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an error of the disk into an `OutputError` with the fix."""
    try:
        yield
    except OSError as error:
        free = ""
        with contextlib.suppress(OSError):
            free = f" ({format_size(shutil.disk_usage(path if path.exists() else path.parent).free)} free)"
        raise OutputError(
            f"Cannot write to {path}{free}: {error.strerror or error}. Likely cause: the disk, its quota or its file "
            "system, or another program that uses the folder. Fix: free some space, or choose another place with "
            "--out; the inputs are untouched."
        ) from error


class Staging:
    """The partial directory of one output: lock, journal, final rename.

    Only a journal with the same fingerprint (of the plan) is resumed.

    Args:
        out: final directory.
        fingerprint: of the plan.
        overwrite: replace an earlier output.
    """

    def __init__(self, out: Path, fingerprint: str, *, overwrite: bool = False) -> None:
        self.out = out
        self.fingerprint = fingerprint
        self.overwrite = overwrite
        self.path = sibling(out, "partial")
        self.committed = False
        self._previous = sibling(out, "previous")
        self._journal_aside = sibling(out, "journal")
        self._lock = OutputLock(out, sibling(out, "lock"))
        self._journal: Journal | None = None
        self._made: list[Path] = []
        self._gone = False

    @property
    def place(self) -> Path | str:
        """The output's final place, as a user calls it."""
        return self.out

    @property
    def finished(self) -> int:
        """Number of items in the journal; 0 when it is gone, because the output was committed or discarded."""
        if self._journal is None or self._gone:
            return 0
        self._journal.catch_up()
        return len(self._journal)

    def open(self) -> Journal:
        """Take the lock and read the journal: tensor name -> its entry, for tensors finished earlier."""
        with disk_errors(self.out.parent):
            self._made = [p for p in (self.out.parent, *self.out.parent.parents) if not p.exists()]
            self.out.parent.mkdir(parents=True, exist_ok=True)
            if problems := _obstacles(self.out):
                raise OutputError(f"The output {self.out} cannot be written.", problems)
            self._lock.take()
            if self._previous.exists() and not self.out.exists():
                rename_folder(self._previous, self.out)  # killed between the two renames of `commit`
            if problems := occupied(self.out, overwrite=self.overwrite):  # finished while we waited or planned
                raise OutputError(problems[0])
            if self._journal_aside.exists() and self.path.exists():
                replace_file(self._journal_aside, self.path / JOURNAL_NAME)  # stopped before the end of `commit`
            self._journal_aside.unlink(missing_ok=True)
            self._journal = self._read_journal()
            if self._journal is None:
                if self.path.exists():
                    shutil.rmtree(self.path)
                self.path.mkdir()
                self._journal = Journal(self.path / JOURNAL_NAME)
                self._journal.start({"actmat_journal": 1, "fingerprint": self.fingerprint})
            else:
                self._journal.resume()
        return self._journal

    @property
    def journal(self) -> Journal:
        """The journal of a stage that was opened."""
        assert self._journal is not None
        return self._journal

    def record(self, entry: Mapping[str, Any]) -> None:
        """Append one finished tensor; called after its last byte is written. Thread-safe."""
        with disk_errors(self.path):
            self.journal.append(entry)

    def commit(self) -> None:
        """Remove the journal, flush the directory and rename it to the final name, when everything is written."""
        with disk_errors(self.out.parent):
            if problems := occupied(self.out, overwrite=self.overwrite):
                raise OutputError(problems[0])
            self.journal.close()
            replace_file(self.path / JOURNAL_NAME, self._journal_aside)
            sync_directory(self.path)
            if self.out.exists() and any(self.out.iterdir()):
                if self._previous.exists():
                    shutil.rmtree(self._previous)
                rename_folder(self.out, self._previous)
            rename_folder(self.path, self.out)
            self.committed = self._gone = True
            sync_directory(self.out.parent)
            self._journal_aside.unlink()
            if self._previous.exists():
                shutil.rmtree(self._previous)
        self.close()

    def sweep(self) -> None:
        """Remove what runs of the same plan left next to a finished output, and make its last rename durable.

        Raises:
            OutputError: another process writes the same output.
        """
        with disk_errors(self.out.parent):
            self._lock.take()
            sync_directory(self.out.parent)
            self._journal_aside.unlink(missing_ok=True)
            folders = [self._previous] + ([self.path] if self._read_journal() is not None else [])
            for folder in folders:
                if folder.exists():
                    shutil.rmtree(folder)
        self.close()

    def close(self) -> None:
        """Release the lock and keep the partial directory for a later run. May be called twice."""
        if self._journal is not None:
            self._journal.close()
        self._lock.release()

    def discard(self) -> None:
        """Remove the partial directory, if `open` took the lock, and the empty folders above it that `open` made."""
        if self._lock.is_held and self._journal is not None:
            shutil.rmtree(self.path, ignore_errors=True)
            self._journal_aside.unlink(missing_ok=True)
            self._gone = True
        self.close()
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()

    def _read_journal(self) -> Journal | None:
        """The journal of this run, or None; None too if its folder holds anything that no run writes."""
        path = self.path / JOURNAL_NAME
        if not os.path.exists(path) or _foreign(self.path):
            return None
        try:
            journal = Journal.read(path)
        except OutputError:  # not written by a run
            return None
        return journal if journal.head.get("fingerprint") == self.fingerprint else None


def _foreign(folder: Path) -> bool:
    """True if the folder holds anything except regular files and folders, such as links: no run made it."""
    with os.scandir(folder) as scanned:
        entries = list(scanned)
    folders = [e for e in entries if e.is_dir(follow_symlinks=False)]
    files = [e for e in entries if e.is_file(follow_symlinks=False)]
    return len(folders) + len(files) < len(entries) or any(_foreign(Path(e.path)) for e in folders)


@contextlib.contextmanager
def whole_file(out: Path, *, may_replace: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """A hidden file next to `out` to write to; it is renamed to `out` when the block ends, and removed on any error.

    Args:
        may_replace: returns True if an `out` that exists by then may be replaced.

    Raises:
        OutputError: another process writes `out`, it exists and may not be replaced, or writing failed.
    """
    lock, building = OutputLock(out, sibling(out, "lock")), sibling(out, "partial")
    with disk_errors(out.parent):
        out.parent.mkdir(parents=True, exist_ok=True)
        lock.take()
        try:
            building.unlink(missing_ok=True)  # of a process that was killed here
            yield building
            if os.path.lexists(out) and not may_replace():  # another program was faster
                raise OutputError(f"{out} exists; choose another place, or remove it.")
            replace_file(building, out)
            sync_directory(out.parent)
        except BaseException:  # Ctrl-C too: nothing is left, and it is passed on
            building.unlink(missing_ok=True)
            raise
        finally:
            lock.release()
