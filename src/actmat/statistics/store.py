"""Statistics on disk: one safetensors file per model, opened from its header, read tensor by tensor.

Shapes: `G` groups of a convolution, `I` in_features.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch
from torch import Tensor

from actmat.bounds import local_path
from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.files import FileReader
from actmat.checkpoints.header import read_header
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import CheckpointError, StatisticsError
from actmat.statistics.header import FILE_NAME, StatisticsHeader, content_hash, parse_header
from actmat.statistics.triangle import packed_shape, unpack

Mean = Literal["token", "sum"]
"""Divisor of a Gram matrix: the tokens seen, or 1."""


class Statistics(AbstractContextManager["Statistics"]):
    """An open statistics file. Thread-safe for reading. Use as a context manager.

    Reading raises `StatisticsError` if the bytes changed since they were written.
    """

    def __init__(self, location: str, path: Path) -> None:
        self.location = location
        self._reader = FileReader({path.name: path})
        try:
            size = self._reader.size(path.name)
            specs, metadata = read_header(lambda at, n: self._reader.read(path.name, at, n), size, file=path.name)
            self.specs: Mapping[str, TensorSpec] = MappingProxyType(specs)
            self.header = parse_header(metadata, location)
            problems = [f"{location}: {p}" for p in _disagreements(self.header, self.specs)]
            if problems:
                raise StatisticsError(f"{location}: the statistics are inconsistent.", problems)
        except (CheckpointError, StatisticsError) as error:
            self._reader.close()
            if isinstance(error, CheckpointError):
                raise StatisticsError(f"{location}: the statistics cannot be read.", error.problems) from None
            raise
        self._hashes = self.header.tensor_hashes()

    def find(self, name: str, *, expert: int | None = None, rows: tuple[int, int] | None = None) -> str | None:
        """Key of the Gram of a part of a stored tensor: `expert` of a stack, output features `rows`; or None."""
        for part in self.header.places.get(name, ()):
            if part.expert is not None and part.expert != expert:
                continue
            if part.rows is None or (rows is not None and part.rows[0] <= rows[0] and rows[1] <= part.rows[1]):
                return part.gram
        return None

    def gram(self, key: str, *, mean: Mean = "token", dtype: torch.dtype = torch.float32) -> Tensor:
        """One Gram matrix: `I I`, or `G I I` for a convolution in groups."""
        info = self.header.grams[key]
        # an expert of a mixture: the mean is over all tokens that came to its router
        tokens = info.rows if info.stack is None else self.header.stacks[info.stack]
        divisor = max(tokens, 1) if mean == "token" else 1
        return unpack(self.raw(f"gram.{key}").to(dtype), info.width, info.groups).div_(divisor)

    def holds_rows(self, key: str) -> bool:
        """True if the few rows of a Gram are stored in place of their sum; False for experts of a mixture."""
        info = self.header.grams[key]
        return info.groups == 1 and info.stack is None and self.specs[f"gram.{key}"].shape == (info.rows, info.width)

    def root(self, key: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """`Z`, `N I`, with `Z^T Z = gram(key)`; for a key that `holds_rows`."""
        return self.raw(f"gram.{key}").to(dtype).div_(self.header.grams[key].rows ** 0.5)

    def fisher(self, name: str, *, dtype: torch.dtype = torch.float32) -> Tensor:
        """The diagonal Fisher of a stored tensor, mean over samples, in its shape."""
        return self.raw(f"fisher.{name}").to(dtype).div_(max(self.header.fisher_samples, 1))

    def raw(self, stored: str) -> Tensor:
        """A stored tensor as it is: a sum, half of a symmetric matrix, a count."""
        spec = self.specs[stored]
        tensor = spec.empty()
        self._reader.read_into(spec.file, spec.offset, raw_bytes(tensor), tensor=stored)
        if content_hash(tensor) != self._hashes[stored]:
            raise StatisticsError(
                f"{self.location}: tensor '{stored}' differs from what was written. Likely cause: a damaged copy. Fix: "
                "copy the file again, or collect the statistics again."
            )
        return tensor

    def read_into(self, name: str, start: int, out: memoryview) -> None:
        """Fill `out` with bytes of a stored tensor from `start`, unchecked."""
        spec = self.specs[name]
        self._reader.read_into(spec.file, spec.offset + start, out, tensor=name)

    def close(self) -> None:
        """Release the file."""
        self._reader.close()

    def __exit__(self, *error: object) -> None:
        self.close()


def open_statistics(location: str | Path) -> Statistics:
    """Open statistics, by the folder that `actmat statistics collect` wrote or the file in it; reads the header only.

    Raises:
        StatisticsError: nothing there, not statistics, or damaged.
    """
    path = local_path(location, error=StatisticsError)
    file = path / FILE_NAME if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise StatisticsError(f"{location}: expected a folder with {FILE_NAME} (actmat statistics collect), found none")
    return Statistics(str(location), file)


def _disagreements(header: StatisticsHeader, specs: Mapping[str, TensorSpec]) -> Iterator[str]:
    """Differences between the header and the stored tensors."""
    listed = header.tensor_hashes()
    yield from (f"tensor '{n}' is listed, but not stored" for n in listed if n not in specs)
    yield from (f"tensor '{n}' is stored, but not listed" for n in specs if n not in listed)
    for key, info in header.grams.items():
        spec, shape = specs.get(f"gram.{key}"), packed_shape(info.width, info.groups)
        known = (shape, (info.rows, info.width)) if info.groups == 1 else (shape,)
        if spec is not None and (spec.shape not in known or spec.dtype not in ("float32", "float64")):
            shape_words = f"{'x'.join(map(str, spec.shape))} {spec.dtype}"
            yield f"tensor 'gram.{key}': expected {'x'.join(map(str, shape))} floats, found {shape_words}"
        if info.stack is not None and info.stack not in header.stacks:
            yield f"'{key}' is of the stack '{info.stack}', which is not listed"
    for name, parts in header.places.items():
        for part in parts:
            if part.gram not in header.grams:
                yield f"'{name}' reads '{part.gram}', which is missing"
            if part.rows is not None and part.rows[0] >= part.rows[1]:
                yield f"'{name}': rows {part.rows} are not a range"
