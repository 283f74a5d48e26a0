"""Bind a model in memory to the checkpoint it came from: names on disk, content hashes, and the proof that they agree.

Statistics are of one state of one model. Every tensor of the checkpoint is read once, hashed, and compared with the
parameter it became; a model that was trained on since, or is another one, is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import Checkpoint, torch_dtype
from actmat.checkpoints.hashing import ContentHash, hash_names
from actmat.checkpoints.raw import raw_bytes
from actmat.errors import StatisticsError
from actmat.experts.lora.adapter import Adapter
from actmat.layout.in_memory import Located, Slice, locate, names_on_disk
from actmat.statistics.header import AdapterInfo, ModelInfo

__all__ = ["Binding", "bind", "clean_name", "model_parameters"]

_WRAPPED = re.compile(r"\.(base_layer|modules_to_save\.[^.]+)(?=\.|$)")
_ADAPTER_PARTS = (".lora_", ".original_module.", "lora_magnitude_vector", ".ranknum")


@dataclass(frozen=True)
class Binding:
    """A model and its checkpoint.

    Args:
        info: what is written down about them.
        parameters: name in memory -> parameter, for those that lie in the checkpoint.
        places: name in memory -> where it lies there.
    """

    info: ModelInfo
    parameters: Mapping[str, Tensor]
    places: Mapping[str, Located]


def bind(model: nn.Module, checkpoint: Checkpoint | None, adapter: Adapter | None = None) -> Binding:
    """Find every parameter in the checkpoint, compare and hash.

    Args:
        model: the model, in memory.
        checkpoint: what it was loaded from; None: the model itself, under its own names.
        adapter: the adapter on it, if there is one.

    Raises:
        StatisticsError: parameters and stored tensors differ, or no parameter is found.
    """
    parameters = model_parameters(model)
    if checkpoint is None:
        hashes = {n: _hash(p.detach().cpu().contiguous()) for n, p in parameters.items()}
        places = {n: Located(tuple(p.shape), (Slice(n),)) for n, p in parameters.items()}
        location = type(model).__name__
    else:
        places, why = _places(model, parameters, checkpoint)
        if not places:
            cause = why or "is it the checkpoint of this model?"
            raise StatisticsError(f"No parameter of the model is found in {checkpoint.location}: {cause}")
        trained = {} if adapter is None else dict.fromkeys(adapter.extras)
        hashes = _compared(checkpoint, parameters, places, trained)
        location = checkpoint.location
    content = hash_names(hashes.items())
    on_top = None if adapter is None else AdapterInfo(location=adapter.location, content=adapter_content(adapter))
    config = (checkpoint.config if checkpoint is not None else None) or {}
    architecture = next(iter(config.get("architectures") or ()), type(model).__name__)
    info = ModelInfo(location=location, architecture=architecture, content=content, tensors=hashes, adapter=on_top)
    return Binding(info, {n: p for n, p in parameters.items() if n in places}, places)


def adapter_content(adapter: Adapter) -> str:
    """Content hash of an adapter's state: its tensors and the scaling that its config gives them."""
    scales = {f"{m.name} scaling": f"{m.scaling!r}" for m in adapter.modules.values()}
    return hash_names([*adapter.hashes.items(), *scales.items()])


def model_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Parameters of the model proper, tied ones once; an adapter's own are left out, its wrappers out of the names."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not any(part in f".{name}" for part in _ADAPTER_PARTS):
            found[clean_name(name)] = parameter
    return found


def clean_name(name: str) -> str:
    """A parameter's name without PEFT's wrappers around it."""
    return _WRAPPED.sub("", name.removeprefix("base_model.model."))


def _places(
    model: nn.Module, parameters: Mapping[str, Tensor], checkpoint: Checkpoint
) -> tuple[dict[str, Located], str]:
    inner = _transformers_model(model)
    names = list(parameters)
    if inner is not None:
        state = {clean_name(n): None for n in inner.state_dict()}
        converted, why = names_on_disk(checkpoint, inner, state)
        return {n: p for n, p in converted.items() if n in parameters}, why
    return locate(checkpoint, [[n] for n in names])


def _transformers_model(model: nn.Module) -> Any:
    """The transformers model that this is, or that PEFT wraps; None for any other."""
    inner: Any = getattr(model, "get_base_model", lambda: model)()
    return inner if hasattr(inner, "base_model_prefix") and hasattr(inner, "config") else None


def _compared(
    checkpoint: Checkpoint, parameters: Mapping[str, Tensor], places: Mapping[str, Located], trained: Mapping[str, Any]
) -> dict[str, str]:
    """Content hash of every stored tensor.

    Raises:
        StatisticsError: a tensor's values are not those of its parameter.
    """
    of_disk = {s.name: (name, s) for name, place in places.items() for s in place.slices}
    hashes: dict[str, str] = {}
    problems: list[str] = []
    for name, spec in checkpoint.specs.items():
        stored = checkpoint.read(name)
        hashes[name] = _hash(stored)
        if name not in of_disk or not spec.is_floating:
            continue
        memory_name, piece = of_disk[name]
        if memory_name in trained:
            continue  # the adapter replaces it
        value = parameters[memory_name].detach()
        value = value if piece.index is None else value[piece.index]
        value = (value if piece.stop is None else value[..., piece.start : piece.stop, :]).cpu()
        if value.shape != stored.shape:
            problems.append(
                f"'{memory_name}' is {_x(value.shape)} in the model and {_x(stored.shape)} in the checkpoint"
            )
        elif not _same(value, stored):
            problems.append(f"'{memory_name}' has other values in the model than '{name}' in the checkpoint")
    if problems:
        raise StatisticsError(
            f"The model is not what {checkpoint.location} holds: {len(problems)} problem(s). Was it trained on since "
            "it was loaded? Save it, and give the place where it was saved.",
            problems,
        )
    return hashes


def _same(value: Tensor, stored: Tensor) -> bool:
    """Equal in the coarser of their dtypes."""
    coarser = min((value.dtype, stored.dtype), key=lambda d: (d.itemsize, d != torch_dtype("float16")))
    return torch.equal(value.to(coarser), stored.to(coarser))


def _hash(tensor: Tensor) -> str:
    seen = ContentHash()
    seen.update(raw_bytes(tensor))
    return seen.hexdigest()


def _x(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "a scalar"


def batch_hash(tensors: Mapping[str, Tensor], seen: ContentHash) -> None:
    """Add one batch to the hash of the data: names, shapes and values."""
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        seen.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        if math.prod(tensor.shape):
            seen.update(raw_bytes(tensor if tensor.dtype != torch.bool else tensor.to(torch.uint8)))
