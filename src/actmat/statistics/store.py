"""Statistics on disk: one safetensors file per model, opened from its header, read tensor by tensor.

Shapes: `G` groups of a convolution, `I` in_features.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Literal

import torch
from torch import Tensor

from actmat.checkpoints.base import FileIdentity, TensorSpec
from actmat.checkpoints.files import FileReader
from actmat.checkpoints.hashing import ContentHash
from actmat.checkpoints.header import read_header
from actmat.checkpoints.raw import empty_tensor, raw_bytes
from actmat.checkpoints.writing.shards import plan_shards
from actmat.checkpoints.writing.staging import disk_errors
from actmat.checkpoints.writing.writer import ShardWriter
from actmat.errors import CheckpointError, OutputError, StatisticsError
from actmat.statistics.gram import packed_size, unpack
from actmat.statistics.header import FILE_NAME, METADATA_KEY, GramInfo, Header, parse_header

__all__ = [
    "Mean",
    "Statistics",
    "check_place",
    "content_hash",
    "gram_spec",
    "open_statistics",
    "write_statistics",
]

Mean = Literal["token", "sample", "sum"]
"""What a Gram is divided by: the tokens seen, the samples, or nothing."""


class Statistics:
    """An open statistics file. Thread-safe for reading. Use as a context manager.

    Args:
        location: what the user called it.
        path: the file.

    Raises:
        StatisticsError: not a statistics file, or damaged.
    """

    def __init__(self, location: str, path: Path) -> None:
        self.location = location
        self._reader = FileReader({path.name: path})
        try:
            size = self._reader.size(path.name)
            found = read_header(lambda at, n: self._reader.read(path.name, at, n), size, file=path.name)
            self.specs: Mapping[str, TensorSpec] = MappingProxyType(dict(found.specs))
            self.header = parse_header(found.metadata, found.specs, location)
        except CheckpointError as error:
            self._reader.close()
            raise StatisticsError(f"{location}: the statistics cannot be read.", error.problems) from None
        except StatisticsError:
            self._reader.close()
            raise
        self._hashes = self.header.tensor_hashes()

    def identity(self) -> tuple[FileIdentity, ...]:
        """What tells this state of the file from another."""
        return self._reader.identity()

    def find(self, name: str, *, expert: int | None = None, rows: tuple[int, int] | None = None) -> str | None:
        """The Gram that a part of a stored tensor reads: `expert` of a stack, output features `rows`; or None."""
        for place in self.header.places.get(name, ()):
            if place.expert is not None and place.expert != expert:
                continue
            inside = place.rows is None or (rows is not None and place.rows[0] <= rows[0] and rows[1] <= place.rows[1])
            if inside:
                return place.gram
        return None

    def why_absent(self, name: str) -> str:
        """Why there is no Gram of a stored tensor."""
        return self.header.absent.get(name, "no input of it was measured")

    def gram(self, key: str, *, mean: Mean = "token", dtype: torch.dtype = torch.float32) -> Tensor:
        """One Gram matrix: `I I`, or `G I I` for a convolution in groups.

        Raises:
            StatisticsError: the bytes are not those that were written.
        """
        info = self.header.grams[key]
        packed = self._read(f"gram.{key}").to(dtype)
        divisor = {"token": self.header.tokens_of(key), "sample": self.header.samples, "sum": 1}[mean]
        return unpack(packed.div_(max(divisor, 1)), info.width)

    def fisher(self, name: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The diagonal Fisher of a stored tensor, mean over samples, in its shape.

        Raises:
            StatisticsError: the bytes are not those that were written.
        """
        return self._read(f"fisher.{name}").to(dtype).div_(max(self.header.fisher_samples, 1))

    def counts(self, name: str) -> Tensor:
        """How often each row of a table was looked up, int64."""
        return self._read(f"counts.{name}")

    def raw(self, stored: str) -> Tensor:
        """A stored tensor as it is: sums, half of a symmetric matrix."""
        return self._read(stored)

    def close(self) -> None:
        """Release the file."""
        self._reader.close()

    def __enter__(self) -> Statistics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, stored: str) -> Tensor:
        spec = self.specs[stored]
        tensor = empty_tensor(spec)
        self._reader.read_into(spec.file, spec.offset, raw_bytes(tensor), tensor=stored)
        if content_hash(tensor) != self._hashes[stored]:
            raise StatisticsError(
                f"{self.location}: tensor '{stored}' is not what was written. Likely cause: a damaged copy. Fix: "
                "copy the file again, or collect the statistics anew."
            )
        return tensor


def open_statistics(location: str | Path) -> Statistics:
    """Open statistics; reads the header alone.

    Args:
        location: the folder that `actmat statistics collect` wrote, or the file in it.

    Raises:
        StatisticsError: nothing there, not statistics, or damaged.
    """
    path = Path(location).expanduser()
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise StatisticsError(f"{location}: expected a folder with {FILE_NAME} (actmat statistics collect), found none")
    return Statistics(str(location), file)


def content_hash(tensor: Tensor) -> str:
    """Content hash of a tensor's bytes."""
    seen = ContentHash()
    seen.update(raw_bytes(tensor.detach().cpu().contiguous()))
    return seen.hexdigest()


def gram_spec(key: str, info: GramInfo, dtype: str) -> TensorSpec:
    """Spec of a stored Gram matrix."""
    size = packed_size(info.width)
    return TensorSpec(f"gram.{key}", (size,) if info.groups == 1 else (info.groups, size), dtype, "")


def check_place(out: Path, *, overwrite: bool) -> None:
    """Whether statistics can be written there.

    Raises:
        OutputError: something else is there, or statistics that are not to be replaced.
    """
    if out.is_dir():
        there = sorted(p.name for p in out.iterdir())
        if there and there != [FILE_NAME]:
            raise OutputError(f"{out} holds other files ({', '.join(there[:3])}); choose another place.")
        if there and not overwrite:
            raise OutputError(f"{out} holds statistics already; choose another place or pass --overwrite.")
    elif out.exists() or out.is_symlink():
        raise OutputError(f"{out} exists and is not a directory; choose another place.")


def write_statistics(
    out: Path, header: Header, specs: list[TensorSpec], read: Callable[[str], Tensor], *, overwrite: bool = False
) -> None:
    """Write a statistics file; the folder appears whole or not at all.

    Args:
        out: folder to make.
        header: what the file says about itself; hashes included.
        specs: stored tensors, in order.
        read: name -> its values, asked for once each.
        overwrite: replace earlier statistics there.

    Raises:
        OutputError: no room, no permission, or something else is there.
    """
    check_place(out, overwrite=overwrite)
    text = header.model_dump_json(exclude_defaults=True)
    (shard,) = plan_shards(specs, 1 << 62, stem="statistics", metadata={METADATA_KEY: text})
    aside = out.parent / f".{out.name}.actmat-partial-{os.getpid()}"
    with disk_errors(aside):
        aside.mkdir(parents=True)
        try:
            writer = ShardWriter(aside, [shard])
            try:
                for spec in specs:
                    writer.sink(spec.name).write(raw_bytes(read(spec.name).contiguous()))
                writer.finish(specs)
            finally:
                writer.close()
            if out.is_dir():
                shutil.rmtree(out)
            aside.rename(out)
        except BaseException:  # an interruption too: nothing half-written is left
            shutil.rmtree(aside, ignore_errors=True)
            raise
