"""Storage of the inputs and its consequences for the output: components, side files, codes."""

from __future__ import annotations

import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.bounds import read_object
from actmat.checkpoints.base import Tensors
from actmat.checkpoints.model import Model
from actmat.checkpoints.quantization import quantization_config
from actmat.errors import CheckpointError, Note, first_of
from actmat.experts.deltas import Deltas, DeltaSource
from actmat.identity.accounted import adapter_warnings, file_warnings, module_warnings
from actmat.layout.components import component_configs, parts_of, single_file_of
from actmat.recipe import Recipe

DIFFUSERS_STEM = "diffusion_pytorch_model"
"""Start of the names of diffusers' weight files."""


def absent_parts(base: Model, experts: Sequence[Deltas], labels: Sequence[str]) -> dict[str, str]:
    """Base tensor -> why it is copied: an expert has no tensor at all of its part, or its layout has no such tensor.

    An expert that is one component of a pipeline has its names without the component's prefix.
    """
    out: dict[str, str] = {}
    for part, prefix in parts_of(base.specs, base.config).items():
        names = [n for n in base.specs if n.startswith(prefix)]
        lacking = [
            label
            for label, expert in zip(labels, experts, strict=True)
            if not expert.needs_base
            and not any(n.startswith(prefix) for n in expert.specs)
            and not any(n.removeprefix(prefix) in expert.specs for n in names)
        ]
        if lacking:
            who = ", ".join(f"'{label}'" for label in lacking)
            out |= dict.fromkeys(names, f"expert {who} has no {part} ({prefix}*): copied from the base")
    return out


def stems_of(base: Model) -> tuple[str, Mapping[str, str]]:
    """Name of the output's weight files; and for a pipeline, prefix of a component -> folder and name of its files."""
    components = component_configs(base.config)
    if components is None:
        return _stem(base.config), {}
    return "model", {f"{name}.": f"{name}/{_stem(config)}" for name, config in components.items()}


def part_notes(base: Model) -> list[str]:
    """Notes on a base that is a single file of an image or video tool, or a pipeline."""
    components = component_configs(base.config)
    if components is not None:
        return [f"the base is a pipeline with weights in {', '.join(components)}; its other files are copied"]
    single = single_file_of(base.specs)
    return [] if single is None else [f"the base is {single.words}"]


def _stem(config: Mapping[str, object] | None) -> str:
    return DIFFUSERS_STEM if config is not None and "_class_name" in config else "model"


SHOWN = 8
"""Files that a note names."""
UNSAID = ("hidden", "output")
"""Kinds of files that need no note: nobody looks for them in an output."""


def files_left_out(recipe: Recipe, base: Model | None, experts: Sequence[Deltas]) -> dict[str, Note]:
    """Path -> reason, for the base's folder and that of the expert that `files_from` names (its label in brackets)."""
    if base is None:
        return {}
    left_out = dict(base.folder.side_files().left_out)
    if recipe.model.files_of in recipe.labels:
        files = experts[recipe.labels.index(recipe.model.files_of)].model.folder.side_files()
        left_out |= {f"{path} ({recipe.model.files_of})": why for path, why in files.left_out.items()}
    return left_out


def unread_warnings(recipe: Recipe, base: Model | None, experts: Sequence[Deltas]) -> list[str]:
    """Warnings on trained weights of the inputs that the merge does not read."""
    warnings = []
    named = list(zip(recipe.labels, experts, strict=True))
    full = {label: e.model.folder for label, e in named if not e.needs_base}
    if base is not None:
        of_base, files = base.folder.side_files(), {label: folder.side_files() for label, folder in full.items()}
        if of_base.modules or any(of_expert.modules for of_expert in files.values()):
            of_experts = {label: (files[label], folder.fetch()) for label, folder in full.items()}
            warnings += module_warnings((of_base, base.folder.fetch()), of_experts)
        warnings += file_warnings(of_base, files)
    for label, expert in named:
        if (stored := expert.stored) is not None:
            names = {n for f in expert.model.folder.files for n in f.whole().names}
            known = () if base is None else base.specs
            warnings += adapter_warnings(label, names, stored.config.fields, stored.weights.specs, known)
    return warnings


def left_out_note(left_out: Mapping[str, Note]) -> list[str]:
    """One sentence about these files; empty without any.

    >>> left_out_note({"optimizer.pt": Note("note", "weights", "a pickle"), ".git/": Note("note", "hidden", "hidden")})
    ['not copied with the output: optimizer.pt (a pickle)']
    """
    listed = [f"{path} ({why.text})" for path, why in left_out.items() if why.code not in UNSAID]
    more = [f"and {len(listed) - SHOWN} more, see the manifest"] if len(listed) > SHOWN else []
    return [f"not copied with the output: {', '.join(listed[:SHOWN] + more)}"] if listed else []


def scheme_words(
    name: str, base: Model, sources: Sequence[DeltaSource | None], experts: Sequence[Deltas], labels: Sequence[str]
) -> str:
    """Clause about the inputs that store a tensor as codes; empty without any.

    Args:
        name: of the tensor in the base.
        sources: per expert, where its delta comes from; empty if no expert is read.
    """
    inputs: dict[str, list[str]] = {}
    if scheme := base.tensors.parts(name)[1]:
        inputs.setdefault(scheme, []).append("the base")
    for label, expert, source in zip(labels, experts, sources, strict=False):
        if source is None or expert.needs_base:
            continue
        if scheme := expert.model.tensors.parts(source.name)[1]:
            inputs.setdefault(scheme, []).append(f"expert '{label}'")
    return "".join(f"; decoded from {scheme} in {_listed(who)}" for scheme, who in inputs.items())


def quantization_notes(recipe: Recipe, base: Model, experts: Sequence[Deltas]) -> list[str]:
    """Notes about quantized inputs: their layouts, the form of the output, and differences."""
    labels = recipe.labels
    of_base = _schemes(base.tensors)
    full = {label for label, expert in zip(labels, experts, strict=True) if not expert.needs_base}
    of_experts = [(n, _schemes(e.model.tensors) if n in full else {}) for n, e in zip(labels, experts, strict=True)]
    notes = [
        f"{who} stores {sum(schemes.values())} tensors as codes ({'; '.join(schemes)}): they are decoded as they are "
        "read"
        for who, schemes in (("the base", of_base), *((f"expert '{n}'", s) for n, s in of_experts))
        if schemes
    ]
    if of_base:
        notes.append(
            "the output is not quantized: decoded tensors are written as floats, and config.json without its entry "
            "about quantization; the program that quantized the base can quantize the output"
        )
    other = [n for n, schemes in of_experts if n in full and set(schemes) != set(of_base)]
    if other:
        notes.append(
            f"{_listed([f'expert {n!r}' for n in other])} and the base are quantized in different ways, or one of them "
            "is not: their deltas hold the rounding errors of both"
        )
    elif of_base and full:
        notes.append("base and experts were rounded to codes separately: deltas hold the rounding errors of both")
    return notes


FOUR_BITS = re.compile(r"bnb[-_]?4bit|4bit[-_]?bnb|nf4|qlora", re.IGNORECASE)
"""Names of bases of 4 bits, as trainers of adapters call them."""


def trained_on_codes_notes(recipe: Recipe, base: Model, experts: Sequence[Deltas]) -> list[str]:
    """Notes on adapters that were trained on a base in 4 bits, and are added to one of floats."""
    if _schemes(base.tensors):
        return []
    names = [(label, e.adapter.config.base_model) for label, e in zip(recipe.labels, experts, strict=True) if e.adapter]
    return [
        f"expert '{label}' was trained on a base in 4 bits ({name}), from which this base differs by rounding. To "
        "add it to the base as it was trained on, load that in 4 bits in transformers, save it dequantized "
        "(model.dequantize()), and give the copy as --base"
        for label, name in names
        if FOUR_BITS.search(name) or _has_four_bits(name)
    ]


def named_base_notes(recipe: Recipe, base: Model, experts: Sequence[Deltas]) -> list[str]:
    """Note on adapters that name another base than this one, by the last part of its name on the hub."""
    hub_id = next((files.hub_id for files in base.folder.files), "")
    named = [(label, e.adapter.config.base_model) for label, e in zip(recipe.labels, experts, strict=True) if e.adapter]
    others = [
        f"{label}: {n}" for label, n in named if n and os.path.basename(n.rstrip("/")) != os.path.basename(hub_id)
    ]
    fix = f"unless it is a copy of {hub_id}, the merge is wrong"
    return [f"adapters name another base ({first_of(others, SHOWN)}): {fix}"] if hub_id and others else []


def _has_four_bits(location: str) -> bool:
    """True if `config.json` of a local folder says so; no other location is read."""
    path, settings = os.path.join(location, "config.json"), dict[str, Any]()
    with contextlib.suppress(CheckpointError):
        settings = dict(quantization_config(read_object(Path(path)) if location and os.path.isfile(path) else {}))
    return bool(settings.get("load_in_4bit")) or "4bit" in str(settings.get("quant_method"))


def _schemes(tensors: Tensors) -> Mapping[str, int]:
    """Number of tensors of each scheme."""
    return Counter(scheme for name in tensors.specs if (scheme := tensors.parts(name)[1]))


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
