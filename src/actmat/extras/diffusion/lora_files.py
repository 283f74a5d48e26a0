"""LoRA files without a config, as written by kohya's trainers and diffusers: factor pairs with their scales.

    delta = alpha / rank * B A        `alpha` is a tensor stored with the factors

Without any `alpha`, the scale is 1, as in kohya's and diffusers' loaders, unless diffusers stored the config in the
file's metadata (`lora_adapter_metadata`).

Shapes: `O` out_features, `I` in_features, `R` rank, `k` kernel of a convolution.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from types import FunctionType
from typing import Any

from actmat import plugins
from actmat.bounds import parse_json
from actmat.checkpoints.base import Tensors, TensorSpec
from actmat.checkpoints.folder import shown
from actmat.checkpoints.keys import unknown_note
from actmat.checkpoints.model import Model
from actmat.checkpoints.source import Source
from actmat.errors import CheckpointError
from actmat.experts.deltas import AdapterFamily, Deltas
from actmat.experts.lora.adapter import Adapter
from actmat.experts.lora.config import AdapterConfig, parse_adapter_config
from actmat.experts.lora.deltas import fit_factors
from actmat.experts.lora.fields import LORA, StackWord
from actmat.experts.lora.modules import AdapterLayout, AdapterModule, Listing, ModuleKind, times, unreadable
from actmat.experts.lora.names import first_factor
from actmat.extras.diffusion.architectures import ARCHITECTURES
from actmat.extras.diffusion.metadata import alpha_notes, distilled_warning, metadata_notes
from actmat.extras.diffusion.names import FactorName, find_modules, foreign_factor, parse_factor
from actmat.extras.diffusion.recognized import HINTS, models_of
from actmat.layout.patterns import MatchError
from actmat.planning.missing import lost_parts

_TO_FIT: tuple[AdapterLayout, ...] = ("kohya", "diffusers")
"""Layouts with the names of single files, without their dots, and of folders."""
METADATA_KEY = "lora_adapter_metadata"
"""Metadata key under which diffusers stores the configs of all components of a file, as JSON."""


@dataclass
class _ModuleGroup:
    """Tensors of one module: side -> stored name."""

    first: FactorName
    names: dict[str, str] = field(default_factory=dict)


def list_file_modules(weights: Tensors, metadata: Mapping[str, str]) -> tuple[Listing, AdapterConfig]:
    """List the modules of a file and all problems, and build a config; reads only scales."""
    groups: dict[str, _ModuleGroup] = {}
    problems: list[str] = []
    others: dict[str, list[str]] = {}
    for name, spec in weights.specs.items():
        parsed = parse_factor(name)
        if (family := foreign_factor(name)) or parsed is None:
            others.setdefault(family, []).append(name)
        elif parsed.side != "alpha" and (not spec.is_floating or spec.dtype.startswith("float8")):
            problems.append(unreadable(spec))
        else:
            group = groups.setdefault(parsed.module, _ModuleGroup(parsed))
            if parsed.side in group.names:
                problems.append(f"module '{parsed.module}' has two tensors for {parsed.side}: '{name}' and "
                                f"'{group.names[parsed.side]}'")  # fmt: skip
            group.names[parsed.side] = name
    factors = [n for group in groups.values() for n in group.names.values()]
    problems += [_other_tensors(family, names, factors) for family, names in others.items()]
    layouts = {_layout(g.first): None for g in groups.values() if g.first.part or g.first.is_flat}
    if len(layouts) > 1:
        named = ", others as ".join(f"{x} does" for x in layouts)
        problems.append(f"module names mix {named}. Likely cause: two files were joined")
    notes, warnings = [*metadata_notes(metadata)], distilled_warning(weights.location, metadata)
    configs = _configs(metadata, problems, notes)
    scales = _Scales(weights, groups, configs)
    modules: dict[str, AdapterModule] = {}
    for module, group in groups.items():
        pair = _pair(module, group, weights.specs, scales)
        if isinstance(pair, str):
            problems.append(pair)
        else:
            modules[module] = pair
    for part, config in configs.items():
        own = (m.path for m in modules.values() if m.part == part)
        problems += [f"metadata '{METADATA_KEY}': {p}" for p in config.targets.problems(own)]
    problems += scales.problems
    ranks = [m.rank for m in modules.values()]
    if not scales.are_stored:
        notes += alpha_notes(metadata, set(ranks))
    r = max(set(ranks), key=lambda n: (ranks.count(n), n)) if ranks else 1
    layout: AdapterLayout = next(iter(layouts), "diffusers")
    listing = Listing(modules, {}, {}, problems, layout, find_modules if layout == "kohya" else None, notes, warnings)
    return listing, AdapterConfig(r=r, alpha=float(r))


def _layout(name: FactorName) -> AdapterLayout:
    return "kohya" if name.is_flat else "comfy" if name.is_comfy else "diffusers"


def _other_tensors(family: str, names: list[str], factors: Sequence[str]) -> str:
    """One sentence on tensors that are not among the LoRA factors of a file."""
    which = f"{len(names)} tensors, such as '{names[0]}'," if len(names) > 1 else f"tensor '{names[0]}'"
    verb = "are" if len(names) > 1 else "is"
    if family:
        return (
            f"{which} {verb} of {family}, but a file without a config must be plain LoRA. Fix: fold it into its base "
            "with the program that trained it, and merge full models"
        )
    if first_factor(names) is not None:
        return (
            f"{which} {verb} of an adapter whose names are not read, such as XLabs', MLX's, torchtune's or GLoRA's: "
            "their factors do not say how they multiply. Fix: convert the file to diffusers' or PEFT's names, or fold "
            "it into its base with the program that trained it"
        )
    flags = [f"--drop '{pattern}'" for pattern in lost_parts(names, factors)]
    return (
        f"{which} {verb} not a LoRA factor; an adapter file contains factors only. Likely cause: a model saved with "
        "its adapter unmerged, or embeddings of a trigger word. Fix: merge the adapter first (merge_and_unload, "
        f"fuse_lora), or leave {'them' if len(names) > 1 else 'it'} out ({' '.join(flags)})"
    )


def _configs(metadata: Mapping[str, str], problems: list[str], notes: list[str]) -> dict[str, AdapterConfig]:
    """Component -> config stored by diffusers; the component is '' for a file of one model."""
    text = metadata.get(METADATA_KEY)
    if text is None:
        return {}
    try:
        fields = parse_json(text)
    except ValueError:
        fields = None
    if not isinstance(fields, dict):
        problems.append(f"the metadata '{METADATA_KEY}' is not a JSON object: {shown(text)}")
        return {}
    by_part: dict[str, dict[str, Any]] = {}
    for key, value in fields.items():
        part, _, name = str(key).rpartition(".")
        by_part.setdefault(part, {})[name] = value
    out = {}
    for part, own in by_part.items():
        out[part], wrong = parse_adapter_config({"peft_type": "LORA", **own})
        problems += [f"metadata of {part or 'the adapter'}: {p}" for p in wrong]
        notes += unknown_note(f"metadata of {part or 'the adapter'}", LORA.unknown(own))
    return out


class _Scales:
    """Scale of every module, and problems."""

    def __init__(
        self, weights: Tensors, groups: Mapping[str, _ModuleGroup], configs: Mapping[str, AdapterConfig]
    ) -> None:
        self._weights, self._configs = weights, configs
        self.problems: list[str] = []
        having = [m for m, g in groups.items() if "alpha" in g.names]
        pairs = [m for m, g in groups.items() if "A" in g.names or "B" in g.names]
        lacking = [m for m in pairs if m not in set(having)]
        if having and lacking:
            self.problems.append(
                f"{len(lacking)} modules have no alpha, such as '{lacking[0]}', but {len(having)} have one: loaders "
                "use different scales for them. Fix: write the missing alphas (for scale 1: the rank)"
            )
        if having and configs:
            self.problems.append(f"the file has 'alpha' tensors and configs in '{METADATA_KEY}', which may differ")
        self.are_stored = bool(having or configs)

    def of(self, group: _ModuleGroup, rank: int) -> float | str:
        """Scale of `B A`, or a problem."""
        stored = group.names.get("alpha")
        if stored is None:
            config = self._configs.get(group.first.part)
            if config is None:
                return 1.0
            try:
                if (said := config.rank_of(group.first.path)) != rank:
                    return f"its factors have rank {rank}, '{METADATA_KEY}' says {said}: diffusers does not load them"
                return config.scaling_of(group.first.path)
            except MatchError as error:
                return str(error)
        alpha = read_alpha(self._weights, stored)
        return alpha if isinstance(alpha, str) else alpha / rank


def read_alpha(weights: Tensors, name: str) -> float | str:
    """The number in a tensor of one entry, or a problem."""
    if weights.specs[name].numel != 1:
        return f"tensor '{name}' has {weights.specs[name].numel} entries; expected one number"
    alpha = float(weights.read(name).double())
    return alpha if math.isfinite(alpha) else f"tensor '{name}' is {alpha}; expected a finite number"


def _pair(module: str, group: _ModuleGroup, specs: Mapping[str, TensorSpec], scales: _Scales) -> AdapterModule | str:
    """The module, or its problem as one sentence."""
    missing = [side for side in "AB" if side not in group.names]
    if missing:
        has = ", ".join(group.names.values())
        return f"module '{module}' has no factor {missing[0]} (it has {has}): half of a pair is missing"
    a, b = specs[group.names["A"]].shape, specs[group.names["B"]].shape
    if len(a) < 2 or len(b) != len(a) or a[0] != b[1] or any(size != 1 for size in b[2:]) or not a[0]:
        return (
            f"module '{module}': its factors are {times(a)} and {times(b)}; expected R x I and O x R, or kernels R x I "
            "x k and O x R x 1"
        )
    scale = scales.of(group, a[0])
    if isinstance(scale, str):
        return f"module '{module}': {scale}"
    kernel = tuple(a[1:]) if len(a) > 2 else ()
    kind: ModuleKind = "convolution" if kernel else "linear"
    columns = math.prod(kernel) if kernel else a[1]
    first = group.first
    return AdapterModule(
        module, kind, group.names["A"], group.names["B"], a[0], scale, (b[0], columns), kernel,
        alpha=group.names.get("alpha"), part=first.part, path=first.path,
    )  # fmt: skip


def adapter_of(file: Model, metadata: Mapping[str, str] | None = None) -> Adapter:
    """Build the adapter of a file; reads its scales.

    Args:
        metadata: of the file; default: those of its header.
    """
    metadata = file.folder.header if metadata is None else metadata
    listing, config = list_file_modules(file.tensors, metadata)
    models = models_of(Adapter(file, config, (), listing), metadata)
    return Adapter(file, config, (), replace(listing, models=models))


def _look(source: Source, file: Model | None, stacks: tuple[StackWord, ...]) -> Adapter | None:
    return adapter_of(file) if file is not None and first_factor(file.specs) is not None else None


def _fit(adapter: Adapter, base: Model) -> Deltas:
    """The deltas on a base; a file in the names of another tool than the base's is converted, if its model is known.

    Raises:
        CheckpointError: it fits in no layout; carries all problems of its own.
    """
    in_layout = plugins.needed("actmat.experts", "layout.image", FunctionType)
    try:
        return fit_factors(adapter, base)
    except CheckpointError:
        models = [a.words[0] for a in ARCHITECTURES if a.name in adapter.listing.models]  # the base tells which it is
        for layout, model in product(_TO_FIT, () if adapter.problems else models):
            converted, problems = in_layout(adapter, layout, {HINTS[0]: model})
            if not problems and converted is not adapter:
                with contextlib.suppress(CheckpointError):
                    return fit_factors(converted, base)
        raise


LORA_FILE = AdapterFamily("LoRA file", _look, _fit, lambda adapter: "")
