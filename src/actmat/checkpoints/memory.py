"""Tensors in memory: a mapping of names to tensors."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import DTYPES, FileIdentity, Tensors, TensorSpec
from actmat.checkpoints.model import CONFIG, Config, Model, ModelFolder
from actmat.checkpoints.raw import copy_range
from actmat.errors import CheckpointError

LABEL = "<memory>"
NAME_OF_DTYPE = {dtype: name for name, (dtype, _) in DTYPES.items()}


class MemoryTensors(Tensors):
    """Tensors of a mapping, on any device and of any strides, copied to the CPU when they are read, never before.

    They must not be written to while these are in use. Parameters are read as plain tensors.

    >>> MemoryTensors({"w": torch.ones(2), "v": torch.zeros(3)}).read("w")
    tensor([1., 1.])

    Args:
        files: those that the tensors were read from; default: memory, which may have changed since an earlier run.
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], *, location: str = LABEL, files: tuple[FileIdentity, ...] = ()
    ) -> None:
        self.location = location
        self.specs = MappingProxyType(tensor_specs(tensors, LABEL, location=location))
        self._tensors: dict[str, Tensor] | None = {name: tensor.detach() for name, tensor in tensors.items()}
        self.aliases = MappingProxyType(shared_storage(self._tensors))
        size = sum(s.nbytes for s in self.specs.values())
        self._identity = files or (FileIdentity(LABEL, size, etag=secrets.token_hex(8)),)

    def fill(self, spec: TensorSpec, start: int, out: memoryview) -> None:
        """Copy bytes of the tensor into `out`."""
        if self._tensors is None:
            raise ValueError(f"{self.location}: read from a checkpoint that is closed")
        tensor = self._tensors[spec.name]
        if 0 < len(out) == spec.nbytes:  # the whole tensor, from any device and of any strides
            torch.frombuffer(out, dtype=tensor.dtype).view(spec.shape).copy_(tensor)
        else:
            copy_range(tensor.cpu(), start, out)

    def close(self) -> None:
        """Release the tensors."""
        self._tensors = None

    def identity(self) -> tuple[FileIdentity, ...]:
        """That of the files they were read from, else one of its own."""
        return self._identity


def hold_model(
    tensors: Mapping[str, Tensor],
    *,
    location: str = LABEL,
    config: Config | None = None,
    files: tuple[FileIdentity, ...] = (),
) -> Model:
    """A model of tensors in memory; an output gets its config. See `MemoryTensors`."""
    written = {} if config is None else {CONFIG: config}
    return Model(MemoryTensors(tensors, location=location, files=files), ModelFolder(config, written))


def tensor_specs(tensors: Mapping[Any, Any], file: str, *, location: str) -> dict[str, TensorSpec]:
    """Specs of a mapping of names to tensors; every entry that is not a dense tensor of a known dtype is listed.

    Raises:
        CheckpointError: there are such entries.
    """
    specs: dict[str, TensorSpec] = {}
    problems: list[str] = []
    for name, value in tensors.items():
        fault = _fault(name, value)
        if fault:
            problems.append(f"entry {str(name)[:120]!r} in {file}: {fault}")
        else:
            specs[name] = TensorSpec(name, tuple(value.shape), NAME_OF_DTYPE[value.dtype], file)
    if problems:
        raise CheckpointError(f"{location}: expected a mapping of names to plain tensors", problems)
    return specs


def _fault(name: Any, value: Any) -> str:
    if not isinstance(name, str):
        return f"the name is of type {type(name).__name__}, expected str"
    if not isinstance(value, Tensor):
        return f"is of type {type(value).__name__}, expected a tensor"
    if value.layout is not torch.strided:
        return f"has layout {value.layout}, expected a dense tensor"
    if value.is_meta:
        return "is on the meta device and has no data"
    if value.dtype not in NAME_OF_DTYPE:
        return f"dtype {value.dtype} is not supported; supported: {', '.join(DTYPES)}"
    return ""


def shared_storage(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> first name of the tensor with the same memory, shape, strides, dtype and sign."""
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel() == 0:  # no memory to share
            continue
        key = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.is_neg())
        canonical = first.setdefault(key, name)
        if canonical != name:
            aliases[name] = canonical
    return aliases
