"""Fit an adapter to its base: which stored tensor gets which delta, in which orientation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from actmat.checkpoints.base import Checkpoint
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.fields import AXES, StackWord
from actmat.experts.lora.modules import AdapterModule
from actmat.experts.lora.stacks import HOW_TO_SAY, axes_by_version, ways_to_fit
from actmat.layout import resolve_layout
from actmat.layout.in_memory import Located, locate
from actmat.layout.types import LayoutMap


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
    modules without a tensor, shapes that do not fit, and the problems of the adapter itself. `left_out` are components
    of a pipeline that the base is not, and the number of their modules.
    """

    pieces: Mapping[str, Piece]
    full: Mapping[str, str]
    hidden: frozenset[str]
    problems: tuple[str, ...]
    left_out: Mapping[str, int] = field(default_factory=dict)


def fit_adapter(adapter: Adapter, base: Checkpoint) -> Fit:
    """Find the stored tensor, the orientation and the rows for each delta of an adapter, from headers.

    Of a file that changes several components of a pipeline, those are left out of which the base has no module; at
    least one must be there.
    """
    fitting = _Fitting(adapter, base)
    left_out: dict[str, int] = {}
    for part in adapter.parts or {"": 0}:
        modules = [m for m in adapter.modules.values() if m.part == part]
        if not fitting.add(modules, is_optional=len(adapter.parts) > 1):
            left_out[part] = len(modules)
    if left_out and len(left_out) == len(adapter.parts):
        fitting.problems.append(
            f"none of its components ({', '.join(left_out)}) has a module in the base ({base.location}); is it an "
            "adapter of this base?"
        )
    full = {}
    for name, source in adapter.extras.items():
        slices = fitting.found[name].slices if name in fitting.found else ()
        # without one tensor in the base it is a new head: the plan notes that it is not merged
        full[slices[0].name if len(slices) == 1 else name] = source
    hidden = hidden_names(fitting.layouts, base, {*fitting.pieces, *full})
    return Fit(fitting.pieces, full, hidden, tuple(fitting.problems), left_out)


class _Fitting:
    """Pieces and problems found so far."""

    def __init__(self, adapter: Adapter, base: Checkpoint) -> None:
        self._adapter, self._base = adapter, base
        self.layouts = resolve_layout(base.specs, base.config)
        self.problems = list(adapter.problems)
        self.pieces: dict[str, Piece] = {}
        self.found: dict[str, Located] = {}
        self._taken: set[str] = set()

    def add(self, modules: Sequence[AdapterModule], *, is_optional: bool) -> bool:
        """Fit the modules of one component; False if it is optional and the base has none of them."""
        candidates, problems = _candidates(self._adapter, modules, self._base)
        biases = {m.name: f"{m.inside}.bias" for m in modules if m.bias is not None}
        found, why = locate(self._base, list(candidates.values()), [*self._adapter.extras, *biases.values()])
        self.found |= found
        if is_optional and not problems and not any(n in found for names in candidates.values() for n in names):
            return False
        self.problems += problems
        self._fit_stacks([m for m in modules if m.is_stack], candidates, why)
        for module in modules:
            if module.is_stack or (problems and not candidates[module.name]):
                continue  # one sentence says why
            self._fit(module, candidates[module.name], why, biases.get(module.name))
        return True

    def _fit_stacks(self, modules: Sequence[AdapterModule], candidates: Mapping[str, list[str]], why: str) -> None:
        """The pieces of stacked experts: all wrappers of one module together, and all modules by the same axes."""
        nests: dict[str, list[AdapterModule]] = {}
        for module in modules:
            nests.setdefault(module.inside.replace(".base_layer", ""), []).append(module)
        ways = {}
        for owner, members in nests.items():
            names = {n: None for m in members for n in candidates[m.name] if n in self.found}
            ways[owner] = ways_to_fit(
                [m.shape for m in members],
                [candidates[m.name] for m in members],
                {n: self.found[n].shape for n in names},
            )
            if not ways[owner]:
                options = [(n, self.found[n]) for n in names]
                self.problems += [_misfit(m, options, candidates[m.name], self._base, why) for m in members]
        proven = {next(iter(w)) for w in ways.values() if len(w) == 1}
        open_ones = []
        for owner, found in ways.items():
            axes = self._axes(found, proven)
            if found and axes is None:
                open_ones.append(owner)
            elif axes is not None and len(found[axes]) > 1:
                self.problems.append(
                    f"module '{owner}': the shapes of its factors fit its parameters in {len(found[axes])} ways, and "
                    "the adapter's names do not tell them apart. Fix: fold it into its base with the PEFT that wrote "
                    "it, and merge full models"
                )
            elif axes is not None:
                for module, name in zip(nests[owner], found[axes][0], strict=True):
                    self._add(module, name, transposed=axes == "e_i_o")
        if open_ones:
            self.problems.append(self._undecided(open_ones, nests))

    def _axes(self, found: Mapping[StackWord, list[tuple[str, ...]]], proven: set[StackWord]) -> StackWord | None:
        """Axes of the stacks of one module, of those that fit: as said, as other shapes prove, or by the version."""
        config = self._adapter.config
        said = config.said(AXES)
        if said is not None or len(found) < 2:
            return said if said in found else next(iter(found), None) if said is None else None
        if len(proven) == 1:
            return next(iter(proven))
        first = self.found[found["e_o_i"][0][0]].slices[0].name
        orientation = self.layouts.tensors[first].orientation
        return axes_by_version(config.version, orientation, str((self._base.config or {}).get("model_type")))

    def _undecided(self, owners: Sequence[str], nests: Mapping[str, Sequence[AdapterModule]]) -> str:
        """One sentence on stacks that can be read in two ways, or not in the way that the user says."""
        config, first = self._adapter.config, nests[owners[0]][0]
        shape = "x".join(map(str, first.shape))
        more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
        said = config.said(AXES)
        if said is not None:
            return (
                f"module '{owners[0]}'{more}: 'stacks' says {said}, and its delta of {shape} fits the base as "
                f"{next(a for a in AXES if a != said)} only; leave 'stacks' out"
            )
        return (
            f"module '{owners[0]}'{more}: its delta of {shape} fits the base as e_i_o and as e_o_i (A reads the second "
            f"or the last axis), and neither other stacks nor peft_version ({config.version or 'not given'}) tell. "
            "PEFT 0.17 and 0.18 wrote e_i_o, 0.19.1 and later e_o_i where experts are stored E x O x I; 0.19.0 and "
            f"transformers vary. {HOW_TO_SAY.format('e_i_o|e_o_i')}"
        )

    def _add(self, module: AdapterModule, name: str, *, transposed: bool) -> None:
        self._taken.add(name)
        for part in self.found[name].slices:
            self.pieces[part.name] = Piece(module, transposed, part.index, part.start, part.stop)

    def _fit(self, module: AdapterModule, names: list[str], why: str, bias: str | None) -> None:
        """The pieces of one module."""
        options = [(n, self.found[n]) for n in names if n in self.found and n not in self._taken]
        fitting = [(n, t, turned) for n, t in options if (turned := is_transposed(module, t, self.layouts)) is not None]
        if not fitting:
            self.problems.append(_misfit(module, options, names, self._base, why))
            return
        name, _, transposed = fitting[0]
        self._add(module, name, transposed=transposed)
        if bias is None:
            return
        located = self.found.get(bias)
        if located is None:
            self.problems.append(f"module '{module.name}' has a lora_bias, but the base has no '{bias}'")
        else:
            self.pieces[located.slices[0].name] = Piece(module, bias=True)


def _candidates(
    adapter: Adapter, modules: Sequence[AdapterModule], base: Checkpoint
) -> tuple[dict[str, list[str]], list[str]]:
    """Names in memory of the tensors that each module may change, one of which it changes; and problems."""
    if adapter.listing.find is not None:
        return adapter.listing.find(base.specs, modules)
    out = {}
    for module in modules:
        plain = module.inside.replace(".base_layer", "")
        if module.kind == "parameter":
            out[module.name] = [f"{plain}.{p}" for p in module.parameters]
        else:
            out[module.name] = [f"{plain}.weight", f"{plain}.in_proj_weight"]
    return out, []


def is_transposed(module: AdapterModule, target: Located, layouts: LayoutMap) -> bool | None:
    """True if the stored tensor is the transpose of the delta, None if their shapes do not fit.

    Where both orientations fit (a square matrix), the layout of the base decides, as it does for full checkpoints; for
    a family that it does not know, `fan_in_fan_out` of the adapter would be a guess about one of many modules.
    """
    if module.kind == "convolution":
        of_kernel = (module.shape[0], *module.kernel)
        return False if target.shape == of_kernel or _without_ones(target.shape) == _without_ones(of_kernel) else None
    if len(target.shape) > 2 and target.shape == (*module.shape, *(1 for _ in target.shape[2:])):
        return False  # a convolution of kernel 1
    straight = target.shape == module.shape
    turned = target.shape == (*module.shape[:-2], module.shape[-1], module.shape[-2])
    if module.kind == "embedding" or (module.kind == "parameter" and len(module.shape) == 2):
        return False if straight else None
    if straight and turned:
        return layouts.tensors[target.slices[0].name].orientation == "IO"
    return False if straight else True if turned else None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`O I` of a convolution of kernel 1, which layers of either kind may be stored as; other shapes as they are."""
    return shape[:2] if all(size == 1 for size in shape[2:]) else shape


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


def hidden_names(layouts: LayoutMap, base: Checkpoint, touched: set[str]) -> frozenset[str]:
    """Of tied names, all but the one that the adapter changes, or else the canonical one."""
    groups: dict[str, list[str]] = {}
    for alias, target in {**base.aliases, **layouts.ties}.items():
        groups.setdefault(target, [target]).append(alias)
    out: set[str] = set()
    for members in groups.values():
        shown = next((m for m in members if m in touched), members[0])
        out |= {m for m in members if m != shown}
    return frozenset(out)
