"""A model in memory that becomes `W_0 + scale * D*` for one candidate after another.

Full models: checkpoints are loaded by transformers, which may rename, stack or transpose tensors; all of that is
linear, so the difference of two loaded models is the loaded difference. Base, delta and model are in memory. Adapters:
a merged adapter is switched onto the base, and its scaling is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from actmat.checkpoints.model import Model
from actmat.errors import StatisticsError
from actmat.extras.collect.binding import locate_parameters
from actmat.extras.models.loading import Loaded, can_switch, load_model, switched
from actmat.layout.patterns import compile_pattern
from actmat.planning.model import MergePlan


@dataclass
class Loader:
    """Loads one model after the other, as `given` says or of transformers; adapters of one base are switched on it.

    Models in memory are `loaded` already, by their places.
    """

    base: str
    model_class: str | None = None
    dtype: str = "auto"
    device: str = "cpu"
    given: Callable[[str], Loaded] | None = None
    loaded: Mapping[str, Loaded] = field(default_factory=dict)
    on_base: Loaded | None = None

    def load(self, place: str) -> Loaded:
        """The model at a place; an adapter that was loaded before it cannot be used any more."""
        if self.given is not None:
            return self.given(place)
        if place in self.loaded:
            return self.loaded[place]
        before, self.on_base = self.on_base, None
        can = can_switch(place)
        found = switched(before, place) if before is not None and can else None
        del before  # a base is freed before a full model is loaded
        if found is None:
            found = load_model(
                place, adapters_base=self.base or None, model_class=self.model_class, dtype=self.dtype,
                device=self.device,
            )  # fmt: skip
        self.on_base = found if can else None
        return found


class Live(Protocol):
    """The model of a search."""

    model: nn.Module

    def take(self, place: str) -> None:
        """Make the model the merge at a place, at scale 1."""

    def scaled(self, scale: float) -> nn.Module:
        """The merge that was taken, at a scale; at 0 the base."""


class LiveAdapter:
    """The base with a merged adapter on it."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader
        self._own: list[tuple[Any, str, float]] = []
        self.model: nn.Module = nn.Module()

    def take(self, place: str) -> None:
        """See `Live`."""
        self.model = self._loader.load(place).model
        active = str(self.model.active_adapter)
        layers = [m for m in self.model.modules() if active in getattr(m, "lora_A", ())]
        self._own = [(m, active, float(m.scaling[active])) for m in layers]  # type: ignore[index]

    def scaled(self, scale: float) -> nn.Module:
        """See `Live`."""
        for layer, name, own in self._own:
            layer.scaling[name] = scale * own
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
        """See `Live`.

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
        """See `Live`."""
        state = state_of(self.model)
        with torch.no_grad():
            for name, delta in self._deltas.items():
                mask = self._reached[name].to(delta.device, delta.dtype)
                factor = mask * scale + (1 - mask) * float(scale != 0)
                state[name].copy_(torch.addcmul(self._base[name].to(delta.device), delta, factor))
        return self.model


def fixed_tensors(plan: MergePlan) -> set[str]:
    """Tensors of the output that the recipe's scale does not reach."""
    own = [([compile_pattern(p) for p in r.match], r.scale is not None) for r in plan.recipe.rules]
    fixed: set[str] = set()
    for item in plan.items:
        has_own = next((scale for patterns, scale in own if any(matches(item.name) for matches in patterns)), False)
        if not item.obeys_scale or has_own:
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
    for own, found in located.items():
        name = first.get((whole[own].data_ptr(), whole[own].numel()))
        if name is None:
            continue
        values = [float(piece.name not in fixed) for piece in found.slices]
        if len(set(values)) == 1:
            out[name] = torch.tensor(values[:1])
        else:
            out[name] = torch.zeros(state[name].shape)
            for piece, value in zip(found.slices, values, strict=True):
                piece.of(out[name]).fill_(value)
    return out
