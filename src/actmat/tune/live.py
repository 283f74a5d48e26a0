"""A model in memory whose parameters become `W_0 + factor * D*`, in place, for one candidate after another.

Checkpoints are loaded by transformers, which may rename, stack or transpose tensors; all of that is linear, so the
difference of two loaded models is the loaded difference. The group of every entry is found in the same way: by loading
a checkpoint that holds the number of the group in every tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["Direction", "LiveModel", "state_of"]

FIXED = "fixed"
"""Name of the group of tensors that the scale of a merge does not reach, such as biases."""


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Float parameters and buffers by name; tensors that share memory once."""
    found: dict[tuple[int, int], str] = {}
    out = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.numel():
            if (tensor.data_ptr(), tensor.numel()) in found:
                continue
            found[tensor.data_ptr(), tensor.numel()] = name
            out[name] = tensor
    return out


@dataclass(frozen=True)
class Direction:
    """A merged delta at scale 1, `D*`, by name of the parameter; those that do not change are left out."""

    deltas: Mapping[str, Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of memory."""
        return sum(d.numel() * d.element_size() for d in self.deltas.values())


class LiveModel:
    """The base's model, which takes the weights of candidates.

    Args:
        model: loaded from the base; its parameters are changed.
        groups: names of the groups of layers, by their numbers.
        numbers: per parameter, the number of its group: one for all entries, or one each; see the module's text.
    """

    def __init__(self, model: nn.Module, groups: tuple[str, ...], numbers: Mapping[str, Tensor]) -> None:
        self.model = model
        self.groups = groups
        self._state = state_of(model)
        self._base = {name: t.detach().clone() for name, t in self._state.items()}
        self._numbers = numbers

    def direction_to(self, other: nn.Module) -> Direction:
        """`D*` of a merged model at scale 1."""
        deltas = {}
        for name, tensor in state_of(other).items():
            base = self._base.get(name)
            if base is not None and not torch.equal(tensor, base):
                deltas[name] = (tensor - base).to(base.dtype)
        return Direction(deltas)

    def write(self, direction: Direction, factor: Callable[[str], float]) -> None:
        """Make the parameters `W_0 + factor(group) * D*`; entries of the group `FIXED` get factor 1."""
        table = torch.tensor([1.0 if g == FIXED else factor(g) for g in self.groups])
        with torch.no_grad():
            for name, tensor in self._state.items():
                tensor.copy_(self._base[name])
                if (delta := direction.deltas.get(name)) is not None:
                    self._add(tensor, delta, self._numbers[name], table)

    def restore(self) -> None:
        """Make the parameters the base's."""
        self.write(Direction({}), lambda group: 0.0)

    def _add(self, tensor: Tensor, delta: Tensor, number: Tensor, table: Tensor) -> None:
        if number.numel() == 1:
            tensor.add_(delta, alpha=float(table[int(number)]))
        else:
            tensor.addcmul_(delta, table.to(tensor)[number])


def group_numbers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Group numbers from a model that was loaded from a checkpoint of them; one number where all entries agree."""
    out = {}
    for name, tensor in state.items():
        number = tensor.round().to(torch.long)
        first = number.reshape(-1)[:1]
        out[name] = first.clone() if bool((number == first).all()) else number
    return out
