"""A folder in memory for the files of a case, and readers that several doors have."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
import typer

from actmat.checkpoints.resolve import open_tensors
from actmat.cli.inspect import inspect
from actmat.experts.locate import locate
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.names import first_factor
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


def read_all(place: Path | str) -> None:
    """Read every tensor of a checkpoint; names are data here, and escaped where they are shown."""
    with open_tensors(place) as checkpoint:
        for name in checkpoint.specs:
            checkpoint.read(name)


def form_factors(folder: Path) -> bool:
    """Form the factors of an adapter; True if it has no problems. A file without factors is none."""
    with locate(folder) as adapter:
        if not isinstance(adapter, Adapter):
            assert first_factor(adapter.specs) is None
            return False
        for module in () if adapter.problems else adapter.modules.values():
            adapter.factors(module, torch.float32)
        return not adapter.problems


def inspected(folder: Path, *, json: bool = True) -> str:
    """Output of `actmat inspect`: a table for one case in four, as laying it out takes longer than reading; else JSON."""
    out, table = io.StringIO(), sum(p.stat().st_size for p in folder.iterdir()) % 4 == 0
    with contextlib.suppress(typer.Exit), contextlib.redirect_stdout(out):
        if table or json:
            inspect([str(folder)], json=not table, every=True)
    return out.getvalue()
