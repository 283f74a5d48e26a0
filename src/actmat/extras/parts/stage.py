"""Staging of an output that several processes build together, on this machine or on others: the parts of a merge.

    .OUT.actmat-parts/
        parts.json      fingerprint of the merge and number of parts
        plan.json       the whole plan
        journals/       one file per part and attempt: 00003-<random>.jsonl
        model/          the output: shards of their final size, with their headers

Nothing here relies on locks, which network file systems may not have. The folder is made under a name of its own, with
all files in it, and renamed: of several processes that do so, one succeeds and the others use its folder. Journals are
never shared: an attempt at a part makes its own and reads those before it. Two attempts at one part write the same
bytes to the same places.
"""

from __future__ import annotations

import contextlib
import glob
import json
import os
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from actmat.bounds import kind_of_file, read_object
from actmat.checkpoints.writing.journal import Journal
from actmat.checkpoints.writing.lock import OutputLock
from actmat.checkpoints.writing.shards import Shard
from actmat.checkpoints.writing.staging import disk_errors, occupied, parts_folder, sibling
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.errors import OutputError
from actmat.system import rename_folder, sync_directory

PLAN_NAME = "plan.json"
HEAD_NAME = "parts.json"


class SharedStage:
    """The folder in which the parts of one merge are built.

    Args:
        out: final directory.

    Attributes:
        folder: the folder of all parts.
        path: the output in it.
        plan_path: the plan in it.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.folder = parts_folder(out)
        self.path = self.folder / "model"
        self.plan_path = self.folder / PLAN_NAME
        self._journals = self.folder / "journals"
        self._previous = sibling(out, "previous")
        self._lock = OutputLock(out, sibling(out, "lock"))

    @property
    def is_open(self) -> bool:
        """True if parts can be built: the folder exists and was not committed."""
        return os.path.isdir(self.path)  # False, too, where the name is too long for the file system

    def head(self) -> dict[str, Any]:
        """The first file: `fingerprint`, `parts`, and what all parts share.

        Raises:
            OutputError: it is missing or damaged.
        """
        try:
            head = read_object(self.folder / HEAD_NAME, error=OutputError)
        except OutputError as error:
            raise OutputError(
                f"{self.folder} is damaged: {error.problems[0]}. Fix: remove it (rm -r) and run all parts again."
            ) from None
        if head.get("actmat_parts") != 1 or not isinstance(head.get("parts"), int):
            raise OutputError(f"{self.folder} is of another version of actmat; finish it there, or remove it (rm -r).")
        return head

    def create(self, head: Mapping[str, Any], write_plan: Callable[[Path], object], shards: tuple[Shard, ...]) -> None:
        """Make the folder, unless another process was faster.

        Raises:
            OutputError: the disk, or something else in its place.
        """
        self._check_place()
        if self.is_open:
            return
        temporary = self.folder.with_name(f"{self.folder.name}.{secrets.token_hex(4)}")
        with disk_errors(self.out.parent):
            try:
                for folder in (temporary, temporary / "model", temporary / "journals"):
                    folder.mkdir(parents=True)
                writer = ShardWriter(temporary / "model", shards, durable=False)
                writer.settle()
                write_plan(temporary / PLAN_NAME)
                (temporary / HEAD_NAME).write_text(json.dumps({"actmat_parts": 1, **head}, indent=1), encoding="utf-8")
                for folder in (temporary / "model", temporary / "journals", temporary):
                    sync_directory(folder)
                with contextlib.suppress(OSError):  # not empty: another process made it; judged by what is there now
                    os.rename(temporary, self.folder)
                sync_directory(self.out.parent)
                if not self.is_open:
                    raise OutputError(f"{self.folder} could not be made: found another file or folder in its place.")
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def begin(self, part: int) -> Journal:
        """A new journal for an attempt at a part; opened for appending."""
        with disk_errors(self.folder):
            journal = Journal(self._journals / f"{part:05d}-{secrets.token_hex(8)}.jsonl")
            journal.start({"actmat_journal": 1, "part": part})
        return journal

    def journals(self, part: int) -> list[Journal]:
        """Journals of earlier attempts at a part.

        Raises:
            OutputError: a journal cannot be read.
        """
        return [Journal.read(path) for path in sorted(self._journals.glob(f"{part:05d}-*.jsonl"))]

    def commit(self, *, overwrite: bool) -> None:
        """Rename the output to its final name and remove the folder, when everything is written.

        Raises:
            OutputError: something is at the final name that may not be replaced; the disk.
        """
        with disk_errors(self.out.parent):
            if problems := occupied(self.out, overwrite=overwrite):
                raise OutputError(problems[0])
            sync_directory(self.path)
            if self.out.exists() and any(self.out.iterdir()):
                if self._previous.exists():
                    shutil.rmtree(self._previous)
                os.rename(self.out, self._previous)
            rename_folder(self.path, self.out)
            sync_directory(self.out.parent)
        self.sweep()

    def sweep(self) -> None:
        """Remove what is left of a merge that was committed."""
        with disk_errors(self.out.parent):
            for folder in (self._previous, self.folder, *self.out.parent.glob(f"{glob.escape(self.folder.name)}.*")):
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder, ignore_errors=True)

    def take_lock(self) -> None:
        """Keep other processes on this output away, where the file system has locks.

        Raises:
            OutputError: another process builds or commits it.
        """
        with disk_errors(self.out.parent):
            self._lock.take(required=False)
            if self._previous.exists() and not self.out.exists():
                os.rename(self._previous, self.out)  # killed between the two renames of `commit`

    def release_lock(self) -> None:
        """Let others at this output."""
        self._lock.release()

    def _check_place(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            mode = self.folder.lstat().st_mode
            if not self.folder.is_dir() or self.folder.is_symlink():
                raise OutputError(
                    f"{self.folder} is in the way: expected the folder of a merge's parts, found {kind_of_file(mode)}; "
                    "remove it"
                )
