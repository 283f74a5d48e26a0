"""A folder in memory for the files of a case, and what a command prints."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import typer

from fuzz.harness import Files


@cache
def root() -> Path:
    """Folder of this run, without a disk below it where there is one in memory; removed at the end."""
    memory = Path("/dev/shm")
    place = Path(tempfile.mkdtemp(prefix="actmat-fuzz-", dir=memory if os.access(memory, os.W_OK) else None))
    owner = os.getpid()
    atexit.register(lambda: os.getpid() == owner and shutil.rmtree(place, ignore_errors=True))
    return place


def in_folder(read: Callable[[Path], str | None]) -> Callable[[Files], str | None]:
    """A reader of files in a folder, which holds nothing else."""

    def read_files(files: Files) -> str | None:
        folder = root() / "case"
        folder.mkdir()
        try:
            for name, content in files.items():
                (folder / name).write_bytes(content)
            return read(folder)
        finally:
            shutil.rmtree(folder)

    return read_files


@contextlib.contextmanager
def printed() -> Iterator[io.StringIO]:
    """What a command prints inside; its exit code is ignored."""
    out = io.StringIO()
    with contextlib.suppress(typer.Exit), contextlib.redirect_stdout(out):
        yield out


def shows_table(folder: Path) -> bool:
    """True for one case in four, which a command shows as text; laying out tables takes longer than reading."""
    return sum(p.stat().st_size for p in folder.iterdir()) % 4 == 0
