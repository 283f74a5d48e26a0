"""Write files of statistics."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from torch import Tensor

from actmat.bounds import list_folder, local_path
from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.raw import raw_bytes
from actmat.checkpoints.writing.shards import plan_shards
from actmat.checkpoints.writing.staging import disk_errors
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.errors import OutputError
from actmat.statistics.header import FILE_NAME, METADATA_KEY, StatisticsHeader


def check_output(out: Path, *, overwrite: bool) -> None:
    """Check that statistics can be written to the folder `out`."""
    local_path(out, error=OutputError)
    if out.is_dir():
        there = list_folder(out, error=OutputError)
        if there and there != [FILE_NAME]:
            raise OutputError(f"{out} holds other files ({', '.join(there[:3])}); choose another place.")
        if there and not overwrite:
            raise OutputError(f"{out} holds statistics already; choose another place or pass --overwrite.")
    elif out.exists() or out.is_symlink():
        raise OutputError(f"{out} exists and is not a directory; choose another place.")


def write_statistics(
    out: Path,
    header: StatisticsHeader,
    specs: list[TensorSpec],
    read: Callable[[str], Tensor],
    *,
    overwrite: bool = False,
) -> None:
    """Write a statistics file into the folder `out`; it appears whole or not at all, in place of an earlier one.

    The header has the hashes of all tensors; `read` computes the values of a tensor, and is called once for each.
    """
    check_output(out, overwrite=overwrite)
    text = header.model_dump_json(exclude_defaults=True)
    (shard,) = plan_shards(specs, 1 << 62, stem="statistics", metadata={METADATA_KEY: text})
    partial = out.parent / f".{out.name}.actmat-partial-{os.getpid()}"
    with disk_errors(partial):
        partial.mkdir(parents=True)
        try:
            writer = ShardWriter(partial, [shard])
            try:
                for spec in specs:
                    writer.sink(spec.name).write(raw_bytes(read(spec.name).contiguous()))
                writer.finish(specs)
            finally:
                writer.close()
            out.mkdir(exist_ok=True)
            os.replace(partial / FILE_NAME, out / FILE_NAME)
            partial.rmdir()
        except BaseException:  # an interruption too: no partial folder is left
            shutil.rmtree(partial, ignore_errors=True)
            raise
