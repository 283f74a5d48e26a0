"""Fit an adapter to its base: which stored tensor gets which delta, in which orientation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from actmat.checkpoints.base import Checkpoint
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.modules import AdapterModule
from actmat.layout import resolve_layout
from actmat.layout.in_memory import Located, locate
from actmat.layout.types import LayoutMap

__all__ = ["Fit", "Piece", "fit_adapter"]


@dataclass(frozen=True, slots=True)
class Piece:
    """The delta of one stored tensor: that of a module, its expert `index`, its rows `start:stop`, transposed or not.

    `bias`: what the module adds to its layer's bias instead.
    """

    module: AdapterModule
    transposed: bool = False
    index: int | None = None
    start: int = 0
    stop: int | None = None
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """How an adapter lies on a base.

    Args:
        pieces: stored name in the base -> its delta.
        full: stored name in the base -> stored name in the adapter, for tensors trained in full.
        hidden: names of the base that the expert does not show: of tied names, all but the one with the delta.
        problems: modules without a tensor, shapes that do not fit, and all that is wrong with the adapter itself.
    """

    pieces: Mapping[str, Piece]
    full: Mapping[str, str]
    hidden: frozenset[str]
    problems: tuple[str, ...]


def fit_adapter(adapter: Adapter, base: Checkpoint) -> Fit:
    """Find the stored tensor, the orientation and the rows for each delta of an adapter, from headers."""
    problems = list(adapter.problems)
    layouts = resolve_layout(base.specs, base.config)
    candidates = {m.name: _candidates(adapter, m) for m in adapter.modules.values()}
    biases = {m.name: f"{m.name}.bias" for m in adapter.modules.values() if m.bias is not None}
    places, why = locate(base, list(candidates.values()), [*adapter.extras, *biases.values()])
    pieces: dict[str, Piece] = {}
    taken: set[str] = set()
    for module in adapter.modules.values():
        options = [(n, places[n]) for n in candidates[module.name] if n in places and n not in taken]
        fitting = [(n, p) for n, p in options if _fits(module, p, layouts) is not None]
        if not fitting:
            problems.append(_unplaced(module, options, candidates[module.name], base, why))
            continue
        name, place = fitting[0]
        taken.add(name)
        transposed = _fits(module, place, layouts)
        assert transposed is not None
        for part in place.slices:
            pieces[part.name] = Piece(module, transposed, part.index, part.start, part.stop)
        if module.name in biases:
            spot = places.get(biases[module.name])
            if spot is None:
                problems.append(f"module '{module.name}' has a lora_bias, but the base has no '{biases[module.name]}'")
            else:
                pieces[spot.slices[0].name] = Piece(module, bias=True)
    full = {}
    for name, source in adapter.extras.items():
        found = places.get(name)
        if found is not None and len(found.slices) == 1:
            full[found.slices[0].name] = source
        else:
            full[name] = source  # a new head: the base lacks it, alignment says that it is not merged
    return Fit(pieces, full, _hidden(layouts, base, {*pieces, *full}), tuple(problems))


def _candidates(adapter: Adapter, module: AdapterModule) -> list[str]:
    plain = module.name.replace(".base_layer", "")
    if module.kind == "parameter":
        return [f"{plain}.{p}" for p in adapter.config.parameters_of(plain)]
    return [f"{plain}.weight", f"{plain}.in_proj_weight"]


def _fits(module: AdapterModule, place: Located, layouts: LayoutMap) -> bool | None:
    """Whether the delta must be transposed to lie on the tensor; None when it does not fit at all.

    Where both readings fit (a square matrix), the layout of the base decides, as it does for full checkpoints; for a
    family that it does not know, `fan_in_fan_out` of the adapter would be a guess about one of many modules.
    """
    if module.kind == "convolution":
        return False if place.shape == (module.shape[0], *module.kernel) else None
    straight = place.shape == module.shape
    turned = place.shape == (*module.shape[:-2], module.shape[-1], module.shape[-2])
    if module.kind == "embedding" or (module.kind == "parameter" and len(module.shape) == 2):
        return False if straight else None
    if straight and turned:
        return layouts.tensors[place.slices[0].name].orientation == "IO"
    return False if straight else True if turned else None


def _unplaced(
    module: AdapterModule, options: list[tuple[str, Located]], names: list[str], base: Checkpoint, why: str
) -> str:
    if options:
        found = ", ".join(f"'{n}' {'x'.join(map(str, p.shape))}" for n, p in options)
        return (
            f"module '{module.name}' has a delta of {'x'.join(map(str, module.shape))}, which does not fit {found} of "
            "the base; is it an adapter of this base?"
        )
    text = f"module '{module.name}' finds no tensor in the base ({base.location}): '{names[0] if names else '?'}'"
    return text + (f"; {why}" if why else "; is it an adapter of this base?")


def _hidden(layouts: LayoutMap, base: Checkpoint, touched: set[str]) -> frozenset[str]:
    """Of tied names, all but one: the one that the adapter changes, else the canonical one."""
    groups: dict[str, list[str]] = {}
    for alias, target in {**base.aliases, **layouts.ties}.items():
        groups.setdefault(target, [target]).append(alias)
    out: set[str] = set()
    for members in groups.values():
        shown = next((m for m in members if m in touched), members[0])
        out |= {m for m in members if m != shown}
    return frozenset(out)
