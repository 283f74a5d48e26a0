"""Fit an adapter to its base: which stored tensor gets which delta, in which orientation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from actmat.checkpoints.base import TensorSpec
from actmat.checkpoints.model import Model
from actmat.errors import CheckpointError, first_names
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.apart import count_rows, names_of_packed, names_of_parts, rows_of
from actmat.experts.lora.fields import AXES, StackWord
from actmat.experts.lora.modules import AdapterModule, times
from actmat.experts.lora.stacks import HOW_TO_SAY, axes_by_version, ways_to_fit
from actmat.layout.components import component_configs
from actmat.layout.in_memory import Fits, TensorOnDisk, TensorSlice, find_by_name, find_on_disk
from actmat.layout.resolve import resolve_layout
from actmat.layout.types import Block, LayoutMap, Orientation

OF_ANOTHER = "is it an adapter of this base?"


@dataclass(frozen=True, slots=True)
class ModulePart:
    """The delta of one stored tensor, as a part of the delta of a module."""

    module: AdapterModule
    transposed: bool = False  # the stored tensor is the transpose of the module's delta
    index: int | None = None  # of the expert in a module that stacks them
    start: int = 0  # first row of the module's delta
    stop: int | None = None
    bias: bool = False  # the delta is that of the layer's bias, from `lora_B.bias`
    rows: tuple[Block, ...] = ()  # of a packed tensor; none: all rows


class Fit:
    """The stored tensors of a base that an adapter changes, with their orientation and rows, from headers.

    Of a file that changes several components of a pipeline, those that the base's config shows it not to be are left
    out; at least one must match.

    Attributes:
        pieces: stored name -> its delta; that of a packed tensor has a piece for each of its layers that are changed.
        full: stored name -> name of the tensor that replaces it.
        hidden: names of the base that are left out: of tied names, all but the one with the delta.
        problems: modules without a tensor, shapes that do not fit, and the problems of the adapter itself.
        left_out: components of a pipeline that the base is not, and the number of their modules.
    """

    def __init__(self, adapter: Adapter, base: Model) -> None:
        self._adapter, self._base = adapter, base
        self._layouts = resolve_layout(base.specs, base.config)
        self.problems = list(adapter.problems)
        self.pieces: dict[str, list[ModulePart]] = {}
        self.left_out: dict[str, int] = {}
        self._on_disk: dict[str, TensorOnDisk] = {}
        self._taken: set[str] = set()
        self._apart: dict[str, str] = {}  # module -> the tensor that packs it, or the first of those that it packs
        self._lost: list[AdapterModule] = []
        for part in adapter.parts or {"": 0}:
            modules = [m for m in adapter.modules.values() if m.part == part]
            if not self._add_part(modules, is_optional=len(adapter.parts) > 1 and is_absent(part, base)):
                self.left_out[part] = len(modules)
        if self._lost and self.pieces:
            stems = {m.name: _shared_start([m.a, m.b]) for m in adapter.modules.values()}
            self.problems.append(drop_words([stems.pop(m.name) for m in self._lost], list(stems.values())))
        if self.left_out and len(self.left_out) == len(adapter.parts):
            self.problems.append(
                f"none of its components ({', '.join(self.left_out)}) has a module in the base ({base.location}); is "
                "it an adapter of this base?"
            )
        self.full = self._place_extras()
        self.hidden = hidden_names(self._layouts, base, {*self.pieces, *self.full})

    def _place_extras(self) -> dict[str, str]:
        """Stored name -> name of the tensor that replaces it."""
        full = {}
        for name, source in self._adapter.extras.items():
            slices = self._on_disk[name].slices if name in self._on_disk else ()
            if (packed := self._packed_in(name)) is not None:
                self.problems.append(
                    f"tensor '{name}' is trained in full, and the base packs it with others in '{packed}': rows of a "
                    "tensor are not replaced. Fix: fold the adapter into its base (merge_and_unload), and merge full "
                    "models"
                )
            else:  # without one tensor in the base it is a new head: the plan notes that it is not merged
                full[slices[0].name if len(slices) == 1 else name] = source
        return full

    def _add_part(self, modules: Sequence[AdapterModule], *, is_optional: bool) -> bool:
        """Fit the modules of one component; False if it is optional and the base has none of them."""
        candidates, problems = _candidates(self._adapter, modules, self._base)
        biases = {m.name: f"{m.inside}.bias" for m in modules if m.bias is not None}
        optional = [*self._adapter.extras, *biases.values()]
        part = (modules[0].part if modules else "") or self._adapter.config.trained_class
        try:
            on_disk, why = find_on_disk(
                self._base, list(candidates.values()), optional, self._judge(modules, candidates), part
            )
        except CheckpointError as error:
            self.problems.append(error.sentence)
            return True
        self._on_disk |= on_disk
        if is_optional and not problems and not any(n in on_disk for names in candidates.values() for n in names):
            return False
        self.problems += problems
        self._fit_stacks([m for m in modules if m.is_stack], candidates, why)
        unknown = self._locate_apart([m for m in modules if m.kind == "linear"], candidates, part)
        for module in modules:
            if module.is_stack or module.name in unknown or (problems and not candidates.get(module.name)):
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
            stored = {n: self._on_disk[n].shape for m in members for n in candidates[m.name] if n in self._on_disk}
            ways[owner] = ways_to_fit([m.shape for m in members], [candidates[m.name] for m in members], stored)
            if not ways[owner]:
                options = [(n, self._on_disk[n]) for n in stored]
                self.problems += [_unfitted(m, options, candidates[m.name], self._base, why) for m in members]
        proven = {next(iter(w)) for w in ways.values() if len(w) == 1}
        open_ones = []
        for owner, fitting in ways.items():
            axes = self._axes(fitting, proven)
            if fitting and axes is None:
                open_ones.append(owner)
            elif axes is not None and len(fitting[axes]) > 1:
                self.problems.append(
                    f"module '{owner}': the shapes of its factors fit its parameters in {len(fitting[axes])} ways, and "
                    "the adapter's names do not tell them apart. Fix: fold it into its base with the PEFT that wrote "
                    "it, and merge full models"
                )
            elif axes is not None:
                for module, name in zip(nests[owner], fitting[axes][0], strict=True):
                    self._add(module, name, transposed=axes == "e_i_o")
        if open_ones:
            self.problems.append(self._undecided(open_ones, nests))

    def _axes(self, ways: Mapping[StackWord, list[tuple[str, ...]]], proven: set[StackWord]) -> StackWord | None:
        """Axes of the stacks of one module, of those that fit: as said, as other shapes prove, or by the version."""
        config = self._adapter.config
        said = config.said(AXES)
        if said is not None or len(ways) < 2:
            return said if said in ways else next(iter(ways), None) if said is None else None
        if len(proven) == 1:
            return next(iter(proven))
        first = self._on_disk[ways["e_o_i"][0][0]].slices[0].name
        orientation = self._layouts.tensors[first].orientation
        return axes_by_version(config.version, orientation, str((self._base.config or {}).get("model_type")))

    def _undecided(self, owners: Sequence[str], nests: Mapping[str, Sequence[AdapterModule]]) -> str:
        """One sentence on stacks that can be read in two ways, or not in the way that the user says."""
        config, first = self._adapter.config, nests[owners[0]][0]
        shape = times(first.shape)
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
        for part in self._on_disk[name].slices:
            piece = ModulePart(module, transposed, part.index, part.start, part.stop, rows=self._on_disk[name].rows)
            self._put(part.name, piece)
        if self._on_disk[name].rows:
            self._apart[module.name] = self._on_disk[name].slices[0].name

    def _put(self, name: str, piece: ModulePart) -> None:
        """Add a piece of a stored tensor; all pieces of one are rows of it, or there is one piece."""
        others = self.pieces.setdefault(name, [])
        others.append(piece)
        if len(others) > 1 and not all(p.rows for p in others):
            self.problems.append(
                f"'{name}' of the base would be changed by several modules, {', '.join(p.module.name for p in others)}"
            )

    def _packed_in(self, name: str) -> str | None:
        """The tensor of the base that packs one of this name in memory with others, if one does."""
        located = self._on_disk.get(name)
        packed = located.slices[0].name if located is not None and located.rows else None
        return packed or self._apart.get(name.rpartition(".")[0])

    @property
    def notes(self) -> list[str]:
        """Remarks on modules that the base packs, or has separately."""
        if not self._apart:
            return []
        module, tensor = next(iter(self._apart.items()))
        return [
            f"{len(self._apart)} of its modules, such as '{module}', are packed in another way in the base, as in "
            f"'{tensor}': their deltas are put on the same rows, exactly"
        ]

    def _fit(self, module: AdapterModule, names: list[str], why: str, bias: str | None) -> None:
        """The pieces of one module."""
        options = [(n, self._on_disk[n]) for n in names if n in self._on_disk and n not in self._taken]
        turned = {n: is_transposed(module, located, self._layouts) for n, located in options}
        fitting = [(n, is_turned) for n, is_turned in turned.items() if is_turned is not None]
        if not fitting:
            self.problems.append(_unfitted(module, options, names, self._base, why))
            self._lost += [] if options else [module]
            return
        name, transposed = fitting[0]
        self._add(module, name, transposed=transposed)
        if bias is None:
            return
        if (located := self._on_disk.get(bias)) is None:
            self.problems.append(f"module '{module.name}' has a lora_bias, but the base has no '{bias}'")
            return
        for part in located.slices:
            self._put(part.name, ModulePart(module, start=part.start, stop=part.stop, bias=True, rows=located.rows))

    def _judge(self, modules: Sequence[AdapterModule], candidates: Mapping[str, list[str]]) -> Fits:
        """Judge whether a tensor of the base has the shape of the module, or of the tensor trained in full."""
        of_name = {n: m for m in modules for n in candidates[m.name]}
        stored = self._adapter.weights.specs

        def fits(name: str, spec: TensorSpec) -> bool:
            module = of_name.get(name)
            if module is None:
                extra = self._adapter.extras.get(name)
                return extra is None or stored[extra].shape == spec.shape
            whole = TensorOnDisk(spec.shape, (TensorSlice(spec.name),))
            return module.is_stack or is_transposed(module, whole, self._layouts) is not None

        return fits

    def _locate_apart(
        self, modules: Sequence[AdapterModule], candidates: dict[str, list[str]], part: str
    ) -> Mapping[str, str]:
        """Locate layers that the base packs, or that pack its separate layers.

        Returns:
            Modules of which the rows are not known, and the tensor that packs each.
        """
        lost = [m for m in modules if not any(n in self._on_disk for n in candidates[m.name])]
        inside = {m.name: [*candidates[m.name], m.inside][0].removesuffix(".weight") for m in lost}
        packed = {m.name: names_of_packed(inside[m.name]) for m in lost}
        parts = {m.name: names_of_parts(inside[m.name]) for m in lost}
        wanted = [n for names in packed.values() for n in names]
        wanted += [n for groups in parts.values() for names in groups for n in names]
        stored = find_by_name(self._base, wanted, part) if wanted else {}
        specs, layouts = self._base.specs, self._layouts.tensors
        unknown: dict[str, str] = {}
        for module in lost:
            whole = [stored[n].slices[0].name for n in packed[module.name] if n in stored]
            apart = [next((stored[n].slices[0].name for n in names if n in stored), "") for names in parts[module.name]]
            tensors = whole[:1] or apart
            rows = rows_of(inside[module.name], layouts[tensors[0]]) if whole else ()
            if whole and not rows:
                unknown[module.name] = whole[0]
                continue
            if not tensors or not all(tensors) or (not rows and any(layouts[n].orientation == "IO" for n in tensors)):
                continue
            weight, biases = f"{inside[module.name]}.weight", [f"{n.removesuffix('weight')}bias" for n in tensors]
            self._on_disk[weight] = _made_of([specs[n] for n in tensors], rows, layouts[tensors[0]].orientation)
            if all(n in specs for n in biases):
                self._on_disk[f"{module.inside}.bias"] = _made_of([specs[n] for n in biases], rows)
            candidates[module.name] = [weight]
            self._apart[module.name] = tensors[0]
        if unknown:
            self.problems.append(self._of_unknown_rows(unknown))
        return unknown

    def _of_unknown_rows(self, unknown: Mapping[str, str]) -> str:
        """One sentence on modules that a tensor packs in rows that are not known; `unknown`: module -> tensor."""
        first, tensor = next(iter(unknown.items()))
        return (
            f"{len(unknown)} modules such as '{first}' have a delta each, and the base ({self._base.location}) "
            f"packs them, as in '{tensor}', whose row layout is unknown: "
            f"{self._layouts.tensors[tensor].reason}. Fix: give the base with its config.json, or in the layout "
            "that the adapter was trained on; or fold the adapter into that one (merge_and_unload), save it in "
            "the layout of this base, and merge full models"
        )


def _made_of(specs: Sequence[TensorSpec], rows: tuple[Block, ...], orientation: Orientation = "OI") -> TensorOnDisk:
    """Some rows of a tensor, or all rows of several, one after the other."""
    inputs = specs[0].shape[1:] if orientation == "OI" else specs[0].shape[:1]
    if rows:
        return TensorOnDisk((count_rows(rows), *inputs), (TensorSlice(specs[0].name),), rows)
    ends = list(accumulate((s.shape[0] for s in specs), initial=0))
    slices = tuple(TensorSlice(s.name, None, *e) for s, e in zip(specs, pairwise(ends), strict=True))
    return TensorOnDisk((ends[-1], *inputs), slices)


def _candidates(
    adapter: Adapter, modules: Sequence[AdapterModule], base: Model
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


def is_transposed(module: AdapterModule, target: TensorOnDisk, layouts: LayoutMap) -> bool | None:
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
    if target.rows or target.slices[0].stop is not None:  # counted along the outputs
        return layouts.tensors[target.slices[0].name].orientation == "IO" if straight else None
    turned = target.shape == (*module.shape[:-2], module.shape[-1], module.shape[-2])
    if module.kind == "embedding" or (module.kind == "parameter" and len(module.shape) == 2):
        return False if straight else None
    if straight and turned:
        return layouts.tensors[target.slices[0].name].orientation == "IO"
    return False if straight else True if turned else None


def _without_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """`O I` of a convolution of kernel 1, which layers of either kind may be stored as; other shapes as they are."""
    return shape[:2] if all(size == 1 for size in shape[2:]) else shape


def is_absent(part: str, base: Model) -> bool:
    """True if the config of a base shows that a component is not in it: a pipeline without it, or another model."""
    components = component_configs(base.config)
    return base.config is not None if components is None else part not in components


def drop_words(lost: Sequence[str], others: Sequence[str]) -> str:
    """What to do about factors without a tensor in the base; beginnings of their names, and of those of all others."""
    start = _shared_start(lost)
    pattern = f"{start}*" if len(lost) == 1 else f"{start}{{{','.join(n.removeprefix(start) for n in lost)}}}*"
    if start and not any(n.startswith(start) for n in others):
        pattern = f"{start}*"
    return (
        f"{len(lost)} of its modules have no tensor in the base, so that their training would be lost. Fix: give the "
        f"base that they were trained on, or leave them out (--drop '{pattern}')"
    )


def _shared_start(names: Sequence[str]) -> str:
    first, last = min(names), max(names)
    return first[: next((k for k, (a, b) in enumerate(zip(first, last, strict=False)) if a != b), len(first))]


def _unfitted(
    module: AdapterModule, options: list[tuple[str, TensorOnDisk]], names: list[str], base: Model, why: str
) -> str:
    """One sentence on a module that fits none of `options`, the tensors that were found of those called `names`."""
    if options:
        places = []
        for _, located in options:
            of = [", ".join(b.name for b in located.rows), first_names([s.name for s in located.slices])]
            places.append(f"the {times(located.shape)} of {' in '.join(filter(None, of))}")
        delta = f"module '{module.name}' has a delta of {times(module.shape)}"
        return f"{delta}, which does not fit {', '.join(places)} in the base; {OF_ANOTHER}"
    text = f"module '{module.name}' finds no tensor in the base ({base.location})"
    return f"{text}{f': {names[0]!r}' if names else ''}; {why if why and names else OF_ANOTHER}"


def hidden_names(layouts: LayoutMap, base: Model, touched: set[str]) -> frozenset[str]:
    """Of tied names, all but the one that the adapter changes, or else the canonical one."""
    groups: dict[str, list[str]] = {}
    for alias, target in {**base.tensors.aliases, **layouts.ties}.items():
        groups.setdefault(target, [target]).append(alias)
    out: set[str] = set()
    for members in groups.values():
        shown = next((m for m in members if m in touched), members[0])
        out |= {m for m in members if m != shown}
    return frozenset(out)
