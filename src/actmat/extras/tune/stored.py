"""The float tensors of a model in one file, mapped into memory: read one at a time, where the models do not fit."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.raw import raw_bytes

__all__ = ["StoredTensors"]

ALIGNMENT = 64
"""Bytes: where a tensor may begin in the file."""


class StoredTensors(Mapping[str, Tensor]):
    """Tensors of a file that `store` wrote; each is mapped when it is asked for.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     stored = StoredTensors.store(Path(folder) / "a", {"w": torch.tensor([1.0, 2.0])})
    ...     stored["w"].clone(), list(stored)
    (tensor([1., 2.]), ['w'])
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._index: dict[str, tuple[int, list[int], str]] = json.loads(_index_of(path).read_text(encoding="utf-8"))

    @classmethod
    def store(cls, path: Path, tensors: Mapping[str, Tensor]) -> StoredTensors:
        """Write tensors one after the other; the index, which makes the file complete, comes last."""
        path.parent.mkdir(parents=True, exist_ok=True)
        index: dict[str, tuple[int, list[int], str]] = {}
        with path.open("wb") as file:
            for name, tensor in tensors.items():
                file.write(bytes(-file.tell() % ALIGNMENT))
                index[name] = (file.tell(), list(tensor.shape), str(tensor.dtype).removeprefix("torch."))
                file.write(raw_bytes(tensor.detach().cpu().contiguous()))
        part = path.with_name(f"{path.name}.part")
        part.write_text(json.dumps(index), encoding="utf-8")
        os.replace(part, _index_of(path))
        return cls(path)

    @staticmethod
    def is_complete(path: Path) -> bool:
        """True if `store` has finished there."""
        return _index_of(path).is_file()

    def __getitem__(self, name: str) -> Tensor:
        """The tensor in mapped memory, which is not to be written to."""
        start, shape, dtype = self._index[name]
        kind = torch_dtype(dtype)
        stop = start + math.prod(shape) * kind.itemsize
        mapped = torch.from_file(str(self._path), shared=False, size=stop, dtype=torch.uint8)
        return mapped[start:].view(kind).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._index)

    def __len__(self) -> int:
        return len(self._index)


def _index_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")
