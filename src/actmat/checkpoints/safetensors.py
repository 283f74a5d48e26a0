"""Safetensors checkpoints: one file, or a folder of shards.

What a folder means, in this order:

1. `model.safetensors.index.json`: the shards it names. A `model.safetensors` beside it that the index does not
   name makes the folder ambiguous, and it is refused.
2. `model.safetensors`.
3. exactly one other `*.safetensors`: that file.
4. several without an index: read as one checkpoint when they are one complete numbered set
   (`name-00001-of-00003.safetensors` ...), which says what the missing index would; refused otherwise.

Tensors are read with positional reads straight into the memory they are wanted in: no mapping, no copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from actmat.checkpoints.base import Checkpoint, FileIdentity, TensorSpec
from actmat.checkpoints.files import FileReader
from actmat.checkpoints.folder import join_shards, member, read_config, read_index
from actmat.checkpoints.formats import ADAPTER_WEIGHTS
from actmat.checkpoints.header import read_header
from actmat.checkpoints.raw import check_range, empty_tensor, find_spec, raw_bytes
from actmat.errors import CheckpointError

__all__ = ["INDEX_NAME", "SINGLE_NAME", "SafetensorsCheckpoint", "open_safetensors", "unindexed_files"]

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")


class SafetensorsCheckpoint(Checkpoint):
    """Tensors of one or several safetensors files; opening reads the headers alone.

    Args:
        location: what the user called it.
        files: label -> path of every weight file.
        directory: folder of `config.json`, or None.
        weight_map: tensor -> label, where an index gave one; headers must agree with it.

    Raises:
        CheckpointError: with every problem of every header.
    """

    def __init__(
        self,
        location: str,
        files: Mapping[str, Path],
        directory: Path | None = None,
        weight_map: Mapping[str, str] | None = None,
    ) -> None:
        self.location = location
        self.directory = directory
        self.aliases = MappingProxyType({})
        self._reader = FileReader(files)
        try:
            shards = _read_headers(self._reader, files, location)
            self.specs = MappingProxyType(join_shards(shards, weight_map, location=location))
        except CheckpointError:
            self._reader.close()
            raise

    @cached_property
    def _config(self) -> Mapping[str, Any] | None:
        return read_config(self.directory)

    @property
    def config(self) -> Mapping[str, Any] | None:
        """Parsed `config.json` of the folder."""
        return self._config

    def identity(self) -> tuple[FileIdentity, ...]:
        """Size and times of every weight file."""
        return self._reader.identity()

    def read(self, name: str) -> Tensor:
        """The whole tensor, read into fresh memory."""
        spec = find_spec(self, name)
        tensor = empty_tensor(spec)
        self._fill(spec, 0, raw_bytes(tensor))
        return tensor

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` from byte `start` of the tensor, straight from the file."""
        spec = find_spec(self, name)
        check_range(spec, start, out)
        self._fill(spec, start, out)

    def prefetch(self, names: Iterable[str]) -> None:
        """Ask the system to read these tensors ahead."""
        for spec in (self.specs[name] for name in names if name in self.specs):
            self._reader.prefetch(spec.file, spec.offset, spec.nbytes)

    def close(self) -> None:
        """Close the files."""
        self._reader.close()

    def _fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        self._reader.read_into(spec.file, spec.offset + start, out, tensor=spec.name)


def open_safetensors(path: Path, location: str | None = None) -> SafetensorsCheckpoint:
    """Open a safetensors file, an index file, or a folder (see the module's text for what a folder means).

    Raises:
        CheckpointError: nothing usable there, ambiguous, incomplete, or invalid headers.
    """
    location = str(path) if location is None else location
    if path.name.endswith(".index.json"):
        return _open_index(path, location)
    if not path.is_dir():
        return SafetensorsCheckpoint(location, {path.name: path})
    if (path / INDEX_NAME).is_file():
        checkpoint = _open_index(path / INDEX_NAME, location)
        if (path / SINGLE_NAME).exists() and all(s.file != SINGLE_NAME for s in checkpoint.specs.values()):
            checkpoint.close()
            raise CheckpointError(
                f"{location}: holds both {INDEX_NAME} and a {SINGLE_NAME} that the index does not name. Likely cause: "
                f"two saves into one folder. Fix: remove the older one, or give the path of the one you mean."
            )
        return checkpoint
    names = (
        [SINGLE_NAME]
        if (path / SINGLE_NAME).exists()
        else unindexed_files((entry.name for entry in path.iterdir()), location)
    )
    return SafetensorsCheckpoint(location, {name: member(path, name) for name in names}, path)


def _open_index(index: Path, location: str) -> SafetensorsCheckpoint:
    folder = index.parent
    weight_map = read_index(index)
    files: dict[str, Path] = {}
    problems: list[str] = []
    for name in sorted(set(weight_map.values())):
        try:
            files[name] = member(folder, name)
        except CheckpointError as error:
            problems.extend(error.problems)
    if problems:
        raise CheckpointError(f"{location}: shards that {index.name} names cannot be used", problems)
    return SafetensorsCheckpoint(location, files, folder, weight_map)


def unindexed_files(names: Iterable[str], location: str) -> list[str]:
    """Weight files of a folder without index and without `model.safetensors`, given the names in it.

    Raises:
        CheckpointError: none, or several that are not one complete numbered set.
    """
    names = sorted(n for n in names if n.endswith(".safetensors") and n not in ADAPTER_WEIGHTS)
    if len(names) == 1:
        return names
    if not names:
        raise CheckpointError(f"{location}: no safetensors file in this folder")
    parts = [NUMBERED.fullmatch(name) for name in names]
    sets = {(m["stem"], m["count"]) for m in parts if m}
    numbers = [int(m["number"]) for m in parts if m]
    if len(sets) == 1 and all(parts) and numbers == list(range(1, int(next(iter(sets))[1]) + 1)):
        return names
    raise CheckpointError(
        f"{location}: expected {SINGLE_NAME}, {INDEX_NAME}, one safetensors file or one complete numbered set, found "
        f"{len(names)} files: {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}. Likely cause: several "
        "checkpoints in one folder, or shards whose index or siblings are missing. Fix: give the path of one file, or "
        "fetch what is missing."
    )


def _read_headers(reader: FileReader, files: Iterable[str], location: str) -> dict[str, Mapping[str, TensorSpec]]:
    shards: dict[str, Mapping[str, TensorSpec]] = {}
    problems: list[str] = []
    for label in files:

        def read_at(offset: int, length: int, label: str = label) -> bytes:
            return reader.read(label, offset, length)

        try:
            shards[label] = read_header(read_at, reader.size(label), file=label).specs
        except CheckpointError as error:
            problems.extend(error.problems)
    if problems:
        raise CheckpointError(f"{location}: weight files that cannot be used", problems)
    return shards
