"""A model in memory that becomes `W_0 + scale * D*` for one candidate after another.

Full models: checkpoints are loaded by transformers, which may rename, stack or transpose tensors; all of that is
linear, so the difference of two loaded models is the loaded difference. Base, delta and model are in memory. Adapters:
a merged adapter is switched onto the base, and its scaling is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from actmat.checkpoints.model import Model
from actmat.errors import StatisticsError
from actmat.extras.collect.binding import Binding, locate_parameters
from actmat.extras.models.layered import Placement
from actmat.extras.models.loading import Loaded, can_switch, load_model, switched
from actmat.layout.patterns import compile_pattern
from actmat.planning.model import MergePlan


@dataclass
class Loader:
    """Loads one model after the other, of transformers what is not `given`; adapters of one base are switched on it."""

    base: str
    model_class: str | None = None
    place: Placement = field(default_factory=Placement)
    given: Callable[[str], Loaded | None] = dict[str, Loaded]().get
    on_base: Loaded | None = None
    binding: Binding | None = None  # of the base on which adapters are switched

    def load(self, location: str) -> Loaded:
        """The model at a location; an adapter that was loaded before it cannot be used any more."""
        if (ready := self.given(location)) is not None:
            return ready
        before, self.on_base = self.on_base, None
        can = can_switch(location)
        model = switched(before, location) if before is not None and can else None
        del before  # a base is freed before a full model is loaded
        if model is None:
            self.binding = None
            model = load_model(
                location, adapters_base=self.base or None, model_class=self.model_class, place=self.place
            )
        self.on_base = model if can else None
        return model


class LiveAdapter:
    """The base with a merged adapter on it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._own: list[tuple[Any, str, float]] = []
        self.model: nn.Module = nn.Module()

    def take(self, place: str) -> None:
        """Make the model the merge at a place, at scale 1."""
        self.model = self._loader.load(place).model
        active = str(self.model.active_adapter)
        layers = [m for m in self.model.modules() if active in getattr(m, "lora_A", ())]
        self._own = [(m, active, float(m.scaling[active])) for m in layers]  # type: ignore[index]

    def scaled(self, scale: float) -> nn.Module:
        """The merge that was taken, at a scale; at 0 the base."""
        for layer, name, scaling in self._own:
            layer.scaling[name] = scale * scaling
        return self.model


def state_of(model: nn.Module) -> dict[str, Tensor]:
    """Float parameters and buffers by name; tensors that share memory once."""
    first: dict[tuple[int, int], tuple[str, Tensor]] = {}
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and tensor.numel():
            first.setdefault((tensor.data_ptr(), tensor.numel()), (name, tensor))
    return dict(first.values())


class LiveModel:
    """A full model.

    Args:
        loader: of the models.
        base: checkpoint of the base.
        fixed: tensors of the checkpoint that a scale does not reach, see `fixed_tensors`.
    """

    def __init__(self, loader: Loader, base: Model, fixed: Collection[str]) -> None:
        self._loader = loader
        self.model = loader.load(loader.base).model
        self._reached = reached(self.model, base, fixed)
        self._base = {name: t.detach().clone() for name, t in state_of(self.model).items()}
        self._deltas: dict[str, Tensor] = {}

    def take(self, place: str) -> None:
        """Make the model the merge at a place, at scale 1.

        Raises:
            StatisticsError: a changed parameter is not in the base's checkpoint.
        """
        self.model, self._deltas = nn.Module(), {}  # freed before the other one is loaded
        self.model = self._loader.load(place).model
        with torch.no_grad():
            for name, tensor in state_of(self.model).items():
                base = self._base.get(name)
                if base is not None and not torch.equal(tensor, base.to(tensor.device)):
                    self._deltas[name] = tensor - base.to(tensor.device)
        if unknown := [name for name in self._deltas if name not in self._reached]:
            raise StatisticsError(
                f"'{unknown[0]}' changes in a merge, but the base's checkpoint has no tensor of this name, so its "
                "scale is unknown. Models of load= keep the names of their checkpoint, with or without a prefix."
            )

    def scaled(self, scale: float) -> nn.Module:
        """The merge that was taken, at a scale; at 0 the base."""
        state = state_of(self.model)
        with torch.no_grad():
            for name, delta in self._deltas.items():
                mask = self._reached[name].to(delta.device, delta.dtype)
                factor = mask * scale + (1 - mask) * float(scale != 0)
                state[name].copy_(torch.addcmul(self._base[name].to(delta.device), delta, factor))
        return self.model


Live = LiveAdapter | LiveModel
"""The model of a search."""


def fixed_tensors(plan: MergePlan) -> set[str]:
    """Tensors of the output that the recipe's scale does not reach."""
    rules = [([compile_pattern(p) for p in r.match], r.scale is not None) for r in plan.recipe.rules]
    fixed: set[str] = set()
    for item in plan.items:
        has_own = next((scale for patterns, scale in rules if any(matches(item.name) for matches in patterns)), False)
        if item.action != "merge" or item.write.kind == "nothing" or has_own:
            fixed.update(spec.name for spec in item.outputs)
        if item.tied_to in fixed:
            fixed.add(item.name)
    return fixed


def reached(model: nn.Module, base: Model, fixed: Collection[str]) -> dict[str, Tensor]:
    """Parameter of a model -> 1 where the scale reaches it, else 0: one for all entries, or one each.

    Parameters that are not found in the checkpoint are left out, unless the scale reaches all.

    Args:
        model: loaded from `base`.
        fixed: tensors of the checkpoint that the scale does not reach.
    """
    state, whole = state_of(model), model.state_dict()
    first = {(t.data_ptr(), t.numel()): name for name, t in state.items()}
    out = {} if fixed else {name: torch.ones(1) for name in state}
    located, _ = locate_parameters(model, list(whole), base)
    for parameter, stored in located.items():
        name = first.get((whole[parameter].data_ptr(), whole[parameter].numel()))
        if name is None:
            continue
        values = [float(piece.name not in fixed) for piece in stored.slices]
        if len(set(values)) == 1:
            out[name] = torch.tensor(values[:1])
        else:
            out[name] = torch.zeros(state[name].shape)
            for piece, value in zip(stored.slices, values, strict=True):
                piece.of(out[name]).fill_(value)
    return out
