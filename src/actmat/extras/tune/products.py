"""Merged adapters as deltas of a model's parameters: products of factors, multiplied out one at a time.

Shapes: `O` rows and `I` columns of a matrix, `R` rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.errors import StatisticsError
from actmat.experts.base import Expert
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.expert import fitted_expert
from actmat.experts.peft import PEFT
from actmat.extras.collect.binding import locate_parameters
from actmat.extras.models.in_memory import MemoryMerge
from actmat.layout.in_memory import Located, Slice
from actmat.linalg.lowrank import LowRank


@dataclass(frozen=True)
class _Part:
    """The delta of one stored tensor, and its place in the parameter."""

    place: Slice
    value: LowRank | Tensor


class Products(Mapping[str, Tensor]):
    """Deltas by parameter, in float32; each is formed on its device when it is asked for.

    Args:
        parts: parameter -> deltas of the stored tensors that make it up.
        shapes: of the parameters.
    """

    def __init__(self, parts: Mapping[str, list[_Part]], shapes: Mapping[str, torch.Size]) -> None:
        self._parts, self._shapes = parts, shapes

    def __getitem__(self, name: str) -> Tensor:
        """The delta of a parameter."""
        shape, parts = self._shapes[name], self._parts[name]
        if len(parts) == 1 and parts[0].place == Slice(parts[0].place.name):
            return _dense(parts[0].value).view(shape)
        first = _dense(parts[0].value)
        out = first.new_zeros(shape)
        for part in parts:
            target = part.place.of(out)
            target.copy_(_dense(part.value).view(target.shape))
        return out

    def add_to(self, name: str, base: Tensor, factor: float, out: Tensor) -> bool:
        """Write `base + factor * delta` in one pass, without forming the delta; False where it is no plain product."""
        value = self._parts[name][0].value
        if isinstance(value, Tensor) or len(self._parts[name]) > 1 or not value.shape == out.shape == base.shape:
            return False
        if out.ndim != 2 or out.dtype != torch.float32 or base.device != out.device:
            return False
        torch.addmm(base, value.b_OR, value.a_RI, alpha=factor, out=out)
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all factors."""
        values = [p.value for parts in self._parts.values() for p in parts]
        tensors = [t for v in values for t in ((v,) if isinstance(v, Tensor) else (v.b_OR, v.a_RI))]
        return sum(t.numel() * t.element_size() for t in tensors)


def _dense(value: LowRank | Tensor) -> Tensor:
    return value if isinstance(value, Tensor) else value.dense()


def locate_state(model: nn.Module, state: Mapping[str, Tensor], base: Checkpoint) -> dict[str, Located]:
    """Name in `state` -> the stored tensors that make up the parameter.

    Args:
        state: tensors of the model, of which those that share memory stand once.
    """
    whole = model.state_dict()
    first = {(t.data_ptr(), t.numel()): name for name, t in state.items()}
    located, _ = locate_parameters(model, list(whole), base)
    names = {name: first.get((whole[name].data_ptr(), whole[name].numel())) for name in located}
    return {own: located[name] for name, own in names.items() if own is not None}


def products_of(
    merged: MemoryMerge, base: Checkpoint, located: Mapping[str, Located], state: Mapping[str, Tensor]
) -> Products:
    """The deltas of a merged adapter by parameter of a model.

    Args:
        merged: an adapter of PEFT.
        located, state: see `locate_state`.

    Raises:
        CheckpointError: it does not fit the base.
        StatisticsError: the model has no parameter for a delta.
    """
    config, problems = parse_adapter_config(merged.plan.adapter_config or {})
    weights = MemoryCheckpoint(merged.tensors, location="the merged adapter")
    with fitted_expert(Adapter(weights, config, problems), weights.location, base, PEFT) as expert:
        changed = {n for n in expert.specs if expert.source(n).kind == "formed"}
        parts: dict[str, list[_Part]] = {}
        for name, found in located.items():
            device = state[name].device
            own = [_Part(s, _delta(expert, s.name, device)) for s in found.slices if s.name in changed]
            if own:
                parts[name] = own
    placed = {part.place.name for own in parts.values() for part in own}
    if missing := sorted(changed - placed):
        raise StatisticsError(
            f"The adapters change '{missing[0]}' of the base, and the model that was loaded has no parameter for it. "
            "Choose the class that the base was saved from (--model-class)."
        )
    return Products(parts, {name: state[name].shape for name in parts})


def _delta(expert: Expert, name: str, device: torch.device) -> LowRank | Tensor:
    """Factors of a matrix; a bias whole."""
    spec = expert.specs[name]
    if not expert.source(name).rank:
        return expert.delta(name, 0, spec.numel, torch.float32).to(device)
    value = expert.factors(name, spec.shape, torch.float32)
    return LowRank(value.b_OR.to(device), value.a_RI.to(device))
