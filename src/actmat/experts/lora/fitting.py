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
    """The delta of one stored tensor, as a part of the delta of a module."""

    module: AdapterModule
    transposed: bool = False  # the stored tensor is the transpose of the module's delta
    index: int | None = None  # of the expert in a module that stacks them
    start: int = 0  # first row of the module's delta
    stop: int | None = None
    bias: bool = False  # the delta is that of the layer's bias, from `lora_B.bias`


@dataclass(frozen=True, slots=True)
class Fit:
    """The stored tensors of a base that an adapter changes: of each its delta, or the name of the full tensor.

    `hidden` are names of the base that are left out: of tied names, all but the one with the delta. `problems` are
    modules without a tensor, shapes that do not fit, and the problems of the adapter itself.
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
    found, why = locate(base, list(candidates.values()), [*adapter.extras, *biases.values()])
    pieces: dict[str, Piece] = {}
    taken: set[str] = set()
    for module in adapter.modules.values():
        options = [(n, found[n]) for n in candidates[module.name] if n in found and n not in taken]
        fitting = [(n, t, turned) for n, t in options if (turned := _is_transposed(module, t, layouts)) is not None]
        if not fitting:
            problems.append(_misfit(module, options, candidates[module.name], base, why))
            continue
        name, target, transposed = fitting[0]
        taken.add(name)
        for part in target.slices:
            pieces[part.name] = Piece(module, transposed, part.index, part.start, part.stop)
        if module.name in biases:
            bias = found.get(biases[module.name])
            if bias is None:
                problems.append(f"module '{module.name}' has a lora_bias, but the base has no '{biases[module.name]}'")
            else:
                pieces[bias.slices[0].name] = Piece(module, bias=True)
    full = {}
    for name, source in adapter.extras.items():
        slices = found[name].slices if name in found else ()
        # without one tensor in the base it is a new head: the plan notes that it is not merged
        full[slices[0].name if len(slices) == 1 else name] = source
    return Fit(pieces, full, _hidden(layouts, base, {*pieces, *full}), tuple(problems))


def _candidates(adapter: Adapter, module: AdapterModule) -> list[str]:
    """Names in memory of the tensors that the module may change; it changes one of them."""
    plain = module.name.replace(".base_layer", "")
    if module.kind == "parameter":
        return [f"{plain}.{p}" for p in adapter.config.parameters_of(plain)]
    return [f"{plain}.weight", f"{plain}.in_proj_weight"]


def _is_transposed(module: AdapterModule, target: Located, layouts: LayoutMap) -> bool | None:
    """True if the tensor is the transpose of the delta, None if their shapes do not fit.

    Where both orientations fit (a square matrix), the layout of the base decides, as it does for full checkpoints; for
    a family that it does not know, `fan_in_fan_out` of the adapter would be a guess about one of many modules.
    """
    if module.kind == "convolution":
        return False if target.shape == (module.shape[0], *module.kernel) else None
    straight = target.shape == module.shape
    turned = target.shape == (*module.shape[:-2], module.shape[-1], module.shape[-2])
    if module.kind == "embedding" or (module.kind == "parameter" and len(module.shape) == 2):
        return False if straight else None
    if straight and turned:
        return layouts.tensors[target.slices[0].name].orientation == "IO"
    return False if straight else True if turned else None


def _misfit(
    module: AdapterModule, options: list[tuple[str, Located]], names: list[str], base: Checkpoint, why: str
) -> str:
    """One sentence on a module that fits none of `options`, the tensors that were found of those called `names`."""
    if options:
        found = ", ".join(f"'{n}' {'x'.join(map(str, p.shape))}" for n, p in options)
        return (
            f"module '{module.name}' has a delta of {'x'.join(map(str, module.shape))}, which does not fit {found} of "
            "the base; is it an adapter of this base?"
        )
    text = f"module '{module.name}' finds no tensor in the base ({base.location}): '{names[0] if names else '?'}'"
    return text + (f"; {why}" if why else "; is it an adapter of this base?")


def _hidden(layouts: LayoutMap, base: Checkpoint, touched: set[str]) -> frozenset[str]:
    """Of tied names, all but the one that the adapter changes, or else the canonical one."""
    groups: dict[str, list[str]] = {}
    for alias, target in {**base.aliases, **layouts.ties}.items():
        groups.setdefault(target, [target]).append(alias)
    out: set[str] = set()
    for members in groups.values():
        shown = next((m for m in members if m in touched), members[0])
        out |= {m for m in members if m != shown}
    return frozenset(out)
