"""Merged adapters as deltas of a model's parameters: products of factors, multiplied out one at a time.

Shapes: `O` rows and `I` columns of a matrix, `R` rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from actmat.checkpoints.base import Checkpoint
from actmat.checkpoints.memory import MemoryCheckpoint
from actmat.errors import StatisticsError
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import parse_adapter_config
from actmat.experts.lora.expert import AdapterExpert
from actmat.extras.collect.binding import locate_parameters
from actmat.extras.models.in_memory import MemoryMerge
from actmat.layout.in_memory import TensorOnDisk, TensorSlice
from actmat.linalg.lowrank import LowRank

ModelParts = Sequence[tuple[TensorSlice, LowRank]]
"""Deltas of the stored tensors that make up a parameter, and their places in it."""


class LiveProducts(Mapping[str, Tensor]):
    """Deltas by parameter, in float32; each is formed on its device when it is asked for.

    Args:
        parts: by parameter.
        shapes: of the parameters.
    """

    def __init__(self, parts: Mapping[str, ModelParts], shapes: Mapping[str, torch.Size]) -> None:
        self._parts, self._shapes = parts, shapes
        factors = [f for own in parts.values() for _, value in own for f in (value.b_OR, value.a_RI)]
        self.nbytes = sum(f.nbytes for f in factors)

    def __getitem__(self, name: str) -> Tensor:
        """The delta of a parameter."""
        parts = self._parts[name]
        out = parts[0][1].b_OR.new_zeros(self._shapes[name])
        for place, value in parts:
            target = place.of(out)
            target.copy_(value.dense().view(target.shape))
        return out

    def add_to(self, name: str, base: Tensor, factor: float, out: Tensor) -> bool:
        """Write `base + factor * delta` in one pass, without forming the delta; False where it is no plain product."""
        (_, value), *others = self._parts[name]
        is_plain = not others and value.shape == out.shape == base.shape and out.ndim == 2
        if not is_plain or out.dtype != torch.float32 or base.device != out.device:
            return False
        torch.addmm(base, value.b_OR, value.a_RI, alpha=factor, out=out)
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts)

    def __len__(self) -> int:
        return len(self._parts)


def locate_state(model: nn.Module, state: Mapping[str, Tensor], base: Checkpoint) -> dict[str, TensorOnDisk]:
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
    merged: MemoryMerge, base: Checkpoint, located: Mapping[str, TensorOnDisk], state: Mapping[str, Tensor]
) -> LiveProducts:
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
    parts: dict[str, list[tuple[TensorSlice, LowRank]]] = {}
    with AdapterExpert(Adapter(weights, config, problems), base) as expert:
        missing = {n for n in expert.specs if expert.source(n).kind == "formed"}
        for name, found in located.items():
            for place in found.slices:
                if place.name not in missing:
                    continue
                spec = expert.specs[place.name]
                if expert.source(place.name).rank:
                    value = expert.factors(place.name, spec.shape, torch.float32)
                else:  # a bias: a row
                    row = expert.delta(place.name, 0, spec.numel, torch.float32)
                    value = LowRank(torch.ones(1, 1), row[None])
                device = state[name].device
                parts.setdefault(name, []).append((place, LowRank(value.b_OR.to(device), value.a_RI.to(device))))
        missing -= {place.name for own in parts.values() for place, _ in own}
    if missing:
        raise StatisticsError(
            f"The adapters change '{min(missing)}' of the base, and the model that was loaded has no parameter for it. "
            "Choose the class that the base was saved from (--model-class)."
        )
    return LiveProducts(parts, {name: state[name].shape for name in parts})
