"""A model in memory whose parameters become `W_0 + factor * D*`, in place, for one candidate after another.

Checkpoints are loaded by transformers, which may rename, stack or transpose tensors; all of that is linear, so the
difference of two loaded models is the loaded difference. The group of every entry is found in the same way: by loading
a checkpoint that holds the number of the group in every tensor.

`W_0` and `D*` are kept in memory; or, where they do not fit, in files from which a candidate is formed tensor by
tensor. Then only one model is in memory at any time: one that is loaded takes the place of the live one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from actmat.extras.tune.stored import StoredTensors

__all__ = ["FIXED", "Direction", "LiveModel", "group_numbers", "state_of"]

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
        """Bytes of memory; none for deltas in a file."""
        if isinstance(self.deltas, StoredTensors):
            return 0
        return sum(d.numel() * d.element_size() for d in self.deltas.values())


class LiveModel:
    """The base's model, which takes the weights of candidates.

    Args:
        model: loaded from the base; its parameters are changed.
        groups: names of the groups of layers, by their numbers.
        numbers: per parameter, the number of its group: one for all entries, or one each; see the module's text.
        folder: for files of the base and of merged deltas; None: these stay in memory.
    """

    def __init__(
        self, model: nn.Module, groups: tuple[str, ...], numbers: Mapping[str, Tensor], folder: Path | None = None
    ) -> None:
        self.groups = groups
        self._numbers = numbers
        self._folder = folder
        self._model: nn.Module | None = model
        self._state = state_of(model)
        self._base: Mapping[str, Tensor]
        if folder is None:
            self._base = {name: t.detach().clone() for name, t in self._state.items()}
        else:
            self._base = StoredTensors.store(folder / "base", self._state)

    @property
    def model(self) -> nn.Module:
        """The model with the weights that were written last."""
        assert self._model is not None, "a model is being loaded"
        return self._model

    def direction(self, name: str, load: Callable[[], nn.Module]) -> Direction:
        """`D*` of a merged model at scale 1.

        Args:
            name: of its file, where deltas are kept in files.
            load: loads the merged model.
        """
        if self._folder is None:
            return Direction(dict(self._deltas(state_of(load()), in_place=False)))
        path = self._folder / name
        if not StoredTensors.is_complete(path):
            self._state, self._model = {}, None  # freed before the other one is loaded, which takes its place
            self._model = load()
            self._state = state_of(self._model)
            StoredTensors.store(path, dict(self._deltas(self._state, in_place=True)))
        return Direction(StoredTensors(path))

    def _deltas(self, state: Mapping[str, Tensor], *, in_place: bool) -> list[tuple[str, Tensor]]:
        """The merged deltas that are not zero; `in_place`: the merged weights are overwritten by them."""
        out = []
        with torch.no_grad():
            for name, tensor in state.items():
                if (base := self._base.get(name)) is not None:
                    there = base.to(tensor.device)
                    if not torch.equal(tensor, there):
                        out.append((name, tensor.sub_(there) if in_place else tensor - there))
        return out

    def write(self, direction: Direction, factor: Callable[[str], float]) -> None:
        """Make the parameters `W_0 + factor(group) * D*`; entries of the group `FIXED` get factor 1."""
        table = torch.tensor([1.0 if g == FIXED else factor(g) for g in self.groups])
        with torch.no_grad():
            for name, tensor in self._state.items():
                tensor.copy_(self._base[name])
                if (delta := direction.deltas.get(name)) is not None:
                    _add(tensor, delta.to(tensor.device), self._numbers[name], table)

    def restore(self) -> None:
        """Make the parameters the base's."""
        self.write(Direction({}), lambda group: 0.0)


def _add(tensor: Tensor, delta: Tensor, number: Tensor, table: Tensor) -> None:
    if number.numel() == 1:
        tensor.add_(delta, alpha=float(table[int(number)]))
    else:
        tensor.addcmul_(delta, table.to(tensor)[number.to(tensor.device, torch.long)])


def group_numbers(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Group numbers from a model that was loaded from a checkpoint of them; one number where all entries agree."""
    out = {}
    for name, tensor in state.items():
        number = tensor.round().to(torch.uint8)
        first = number.reshape(-1)[:1]
        out[name] = (first if bool((number == first).all()) else number).clone()
    return out
