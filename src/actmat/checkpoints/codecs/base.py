"""The contract of codecs: tensors that are stored as codes and read as floats, rows at a time.

A codec looks at the headers and the config of a checkpoint; for each logical tensor that stored codes, scales and zero
points make up, it gives a `CodedTensor`, which decodes any run of rows.
Letters of shapes: `O` rows and `I` columns of a matrix.
"""

from __future__ import annotations

import abc
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Tensors, TensorSpec, torch_dtype
from actmat.checkpoints.keys import Keys
from actmat.checkpoints.raw import raw_bytes


class CodeReader:
    """Read stored tensors behind the logical ones by runs of entries, or cached per thread."""

    def __init__(self, inner: Tensors) -> None:
        self.inner = inner
        self._held = threading.local()

    def entries(self, name: str, start: int, count: int) -> Tensor:
        """Entries `start : start + count` of a stored tensor in row-major order, flat, as stored."""
        out = torch.empty(count, dtype=torch_dtype(self.inner.specs[name].dtype))
        self.inner.read_into(name, start * out.itemsize, raw_bytes(out))
        return out

    def held(self, name: str, matrix: int, count: int) -> Tensor:
        """Run number `matrix` of `count` entries, kept until this thread asks for another run of a tensor `name`.

        For layouts whose rows lie scattered over the run; a thread keeps the parts of one tensor only.
        """
        parts: dict[str, tuple[int, Tensor]] = getattr(self._held, "parts", {})
        run = parts.get(name)
        if run is None or run[0] != matrix:
            parts.pop(name, None)
            run = matrix, self.entries(name, matrix * count, count)
            parts[name] = run
            self._held.parts = parts
        return run[1]

    def keep_only(self, names: tuple[str, ...]) -> None:
        """Release the runs of other tensors that this thread keeps."""
        parts: dict[str, tuple[int, Tensor]] = getattr(self._held, "parts", {})
        if any(name not in names for name in parts):
            self._held.parts = {n: part for n, part in parts.items() if n in names}


@dataclass(frozen=True)
class CodedTensor(abc.ABC):
    """One logical tensor of floats that is stored as codes.

    Args:
        name, shape, dtype: of the logical tensor.
        scheme: description of the storage.
        parts: names of the stored tensors that it is made of; the first holds the codes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    scheme: str
    parts: tuple[str, ...]

    def stored_as(self, name: str) -> str:
        """The name, if it is one of `parts`; else an empty string."""
        return name if name in self.parts else ""

    @property
    def rows(self) -> int:
        """Rows of one matrix, the last two axes; 1 for a tensor with one axis."""
        return self.shape[-2] if len(self.shape) > 1 else 1

    @property
    def columns(self) -> int:
        """Length of a row."""
        return self.shape[-1] if self.shape else 1

    @property
    def held_bytes(self) -> int:
        """Bytes of stored parts that a thread keeps while it reads the tensor."""
        return 0

    @abc.abstractmethod
    def decode(self, stored: CodeReader, matrix: int, start: int, stop: int) -> Tensor:
        """Rows `start:stop` of a matrix (counted over all leading axes): `[stop - start, I]`, float32 or float64."""


WINDOW = 1 << 17
"""Entries that are decoded at a time, unless a row has more: their floats fit a cache."""


@dataclass(frozen=True)
class Headers:
    """Everything a codec decides from.

    Args:
        location: of the checkpoint, for messages.
        specs: stored tensors.
        method: `quant_method` that the config declares, lower case; empty if it declares none.
        settings: the config's entry about quantization; may be empty.
        dtype: of logical tensors whose layout does not state it.
        read: returns a whole stored tensor, for layouts that store shapes in tensors.
    """

    location: str
    specs: Mapping[str, TensorSpec]
    method: str
    settings: Mapping[str, Any]
    dtype: str
    read: Callable[[str], Tensor]


FIX = "Fix: save a dequantized (bfloat16) copy with the library that wrote it"


@dataclass(frozen=True)
class Codec:
    """Declaration of a codec, a plug-in of the group `actmat.codecs`.

    Args:
        name: of the codec.
        methods: values of `Headers.method` with which it is asked.
        find: stored tensor -> its logical tensor, the reason why it cannot be read, or None if it is not the codec's.
        unused: last parts of the names of stored tensors that no weight needs, such as scales of activations.
        keys: `quant_method` -> lists of the settings that go with it.
    """

    name: str
    methods: Collection[str]
    find: Callable[[TensorSpec, Headers], CodedTensor | str | None]
    unused: Collection[str] = ()
    keys: Mapping[str, Keys] = field(default_factory=dict)

    def claim(self, headers: Headers) -> tuple[list[CodedTensor], list[str], list[str]]:
        """The part of a checkpoint that it reads.

        Returns:
            Its logical tensors; names of stored tensors that belong to them and have no counterpart; and problems of
            tensors that look like its own and cannot be read, one sentence for all with the same.
        """
        tensors, refused = list[CodedTensor](), dict[str, list[TensorSpec]]()
        for spec in headers.specs.values() if headers.method in self.methods else ():
            coded = self.find(spec, headers)
            if isinstance(coded, str):
                refused.setdefault(coded, []).append(spec)
            elif coded is not None:
                tensors.append(coded)
        problems = []
        for why, specs in refused.items():
            more = f" and {len(specs) - 1} more" if len(specs) > 1 else ""
            problems.append(f"tensor '{specs[0].name}' {specs[0].dtype} {list(specs[0].shape)}{more}: {why}. {FIX}")
        unused = [n for n in headers.specs if tensors and n.rpartition(".")[2] in self.unused]
        return tensors, unused, problems
