"""Bind a model in memory to its checkpoint: names on disk and content hashes, checked against the parameters.

Every tensor of the checkpoint is read once, hashed, and compared with its parameter; a model that has been trained
since it was loaded, or another model, is refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import torch_dtype
from actmat.checkpoints.hashing import hash_names
from actmat.checkpoints.model import Model
from actmat.errors import StatisticsError
from actmat.experts.lora.adapter import Adapter
from actmat.layout.in_memory import TensorOnDisk, TensorSlice, find_on_disk, names_on_disk
from actmat.statistics.header import AdapterInfo, ModelInfo, adapter_content, content_hash

_WRAPPED = re.compile(r"\.(base_layer|modules_to_save\.[^.]+)(?=\.|$)")
_ADAPTER_PARTS = (".lora_", ".original_module.", "lora_magnitude_vector", ".ranknum")


@dataclass(frozen=True)
class Binding:
    """A model and its checkpoint."""

    info: ModelInfo  # record of both for the header
    parameters: Mapping[str, Tensor]  # name in memory -> parameter, for those that are in the checkpoint
    located: Mapping[str, TensorOnDisk]  # name in memory -> the stored tensors that make it up

    def weights(self) -> dict[str, Tensor]:
        """Floating-point parameters with at least two axes."""
        return {n: p for n, p in self.parameters.items() if p.ndim >= 2 and p.is_floating_point()}

    def stored(self, parameter: str, value: Tensor) -> Iterator[tuple[str, Tensor]]:
        """Stored tensors of a parameter, each with its part of `value`, which has the parameter's shape."""
        for piece in self.located[parameter].slices:
            yield piece.name, piece.of(value)

    def renamed(self) -> dict[str, str]:
        """Stored tensor -> name in memory, if they differ."""
        return {s.name: name for name, stored in self.located.items() for s in stored.slices if s.name != name}


def bind(model: nn.Module, checkpoint: Model | None, adapter: Adapter | None = None) -> Binding:
    """Find every parameter of a model (with an adapter on it) in its checkpoint, compare and hash.

    Without a checkpoint, the model is recorded under its own names.
    """
    named = [(n, p) for n, p in model.named_parameters() if not any(part in f".{n}" for part in _ADAPTER_PARTS)]
    parameters: dict[str, Tensor] = {_clean_name(n): p for n, p in named}  # tied ones once
    if checkpoint is None:
        hashes = {n: content_hash(p) for n, p in parameters.items()}
        located = {n: TensorOnDisk(tuple(p.shape), (TensorSlice(n),)) for n, p in parameters.items()}
        location = type(model).__name__
    else:
        located, why = locate_parameters(model, parameters, checkpoint)
        if not located:
            cause = why or "is it the checkpoint of this model?"
            raise StatisticsError(f"No parameter of the model is found in {checkpoint.location}: {cause}")
        replaced = frozenset(() if adapter is None else adapter.extras)
        hashes = _compared(checkpoint, parameters, located, replaced)
        location = checkpoint.location
    content = hash_names(hashes.items())
    config = (checkpoint.config if checkpoint is not None else None) or {}
    architecture = next(iter(config.get("architectures") or ()), type(model).__name__)
    info = ModelInfo(location=location, architecture=architecture, content=content, tensors=hashes)
    binding = Binding(info, {n: p for n, p in parameters.items() if n in located}, located)
    return binding if adapter is None else with_adapter(binding, adapter)


def with_adapter(binding: Binding, adapter: Adapter) -> Binding:
    """The binding of the same model with another adapter on it."""
    on_top = AdapterInfo(location=adapter.location, content=adapter_content(adapter))
    return replace(binding, info=binding.info.model_copy(update={"adapter": on_top}))


def _clean_name(name: str) -> str:
    """A parameter's name without PEFT's wrappers around it."""
    return _WRAPPED.sub("", name.removeprefix("base_model.model."))


def locate_parameters(
    model: nn.Module, names: Collection[str], checkpoint: Model
) -> tuple[dict[str, TensorOnDisk], str]:
    """Parameters located in the checkpoint, and the reason why others may not have been found.

    Args:
        names: of the parameters, without PEFT's wrappers around them.
    """
    inner = transformers_model(model)
    if inner is None:
        return find_on_disk(checkpoint, [[n] for n in names])
    state = {_clean_name(n): None for n in inner.state_dict()}
    converted, why = names_on_disk(checkpoint, inner, state)
    return {n: p for n, p in converted.items() if n in names}, why


def transformers_model(model: nn.Module) -> Any:
    """The transformers model that `model` is, or that PEFT wraps in it; None for any other."""
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    return inner if hasattr(inner, "base_model_prefix") and hasattr(inner, "config") else None


def _compared(
    checkpoint: Model,
    parameters: Mapping[str, Tensor],
    located: Mapping[str, TensorOnDisk],
    replaced: frozenset[str],
) -> dict[str, str]:
    """Content hash of every stored tensor; parameters that the adapter has `replaced` are not compared."""
    in_memory = {s.name: (name, s) for name, found in located.items() for s in found.slices}
    hashes: dict[str, str] = {}
    problems: list[str] = []
    for name, spec in checkpoint.specs.items():
        stored = checkpoint.tensors.read(name)
        hashes[name] = content_hash(stored)
        parameter, piece = in_memory.get(name, ("", None))
        if piece is None or not spec.is_floating or parameter in replaced:
            continue
        value = piece.of(parameters[parameter].detach()).cpu()
        if value.shape != stored.shape:
            problems.append(f"'{parameter}' is {_x(value.shape)} in the model and {_x(stored.shape)} in the checkpoint")
        elif not _same(value, stored):
            problems.append(f"'{parameter}' and '{name}' in the checkpoint have different values")
    if problems:
        raise StatisticsError(
            f"The model differs from {checkpoint.location}: {len(problems)} problem(s). Likely cause: it was trained "
            "after loading. Fix: save it, and give the location where it was saved.",
            problems,
        )
    return hashes


def _same(value: Tensor, stored: Tensor) -> bool:
    """Equal in the coarser of their dtypes."""
    coarser = min((value.dtype, stored.dtype), key=lambda d: (d.itemsize, d != torch_dtype("float16")))
    return torch.equal(value.to(coarser), stored.to(coarser))


def _x(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"
