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
from actmat.checkpoints.side_files import is_unknown
from actmat.errors import CheckpointError, Note, first_of
from actmat.experts.deltas import Deltas
from actmat.identity.reading import read_configs
from actmat.layout.components import component_configs, single_file_of
from actmat.layout.in_memory import names_in_memory
from actmat.recipe import Recipe

DIFFUSERS_STEM = "diffusion_pytorch_model"
"""Start of the names of diffusers' weight files."""


COARSE = ("bfloat16", "float16")


def stems_of(base: Model) -> tuple[str, Mapping[str, str]]:
    """Name of the output's weight files; and for a pipeline, prefix of a component -> folder and name of its files."""
    components = component_configs(base.config)
    if components is None:
        stem = _stem(base.config)
        stems = {prefix: f"{folder}/model" for prefix, folder in base.folder.parts.items()}
        return stem, {"": stem, **stems} if stems else {}
    return "model", {f"{name}.": f"{name}/{_stem(config)}" for name, config in components.items()}


def output_dtypes(recipe: Recipe, base: Model) -> tuple[dict[str, str], list[str]]:
    """Tensor of the base -> its dtype in the output, and notes.

    A coarser dtype than float32 is that of the model. Tensors keep theirs that the base stores apart from most of its
    entries, or that the class of the model keeps in float32: rounded, a bias near 10 of a router chooses other experts.
    """
    chosen, notes = recipe.dtype, list[str]()
    dtypes = {n: chosen if chosen and s.is_floating else s.dtype for n, s in base.specs.items()}
    parts = {f"{n}.": c for n, c in (component_configs(base.config) or {}).items()} or {"": base.config or {}}
    for prefix, config in parts.items() if chosen in COARSE else ():
        specs = [s for n, s in base.specs.items() if n.startswith(prefix) and s.is_floating]
        wide = {s.name: s.dtype for s in specs if s.dtype in ("float32", "float64")}
        if wide and 2 * sum(s.numel for s in specs if s.name in wide) > sum(s.numel for s in specs):
            [reading] = read_configs([config])
            patterns = "|".join(p for p, is_strict in reading.float32 if is_strict or chosen == "float16")
            names = names_in_memory(base)[0] if patterns else {}
            wide = {n: d for n, d in wide.items() if patterns and re.search(patterns, names.get(n, n)[len(prefix) :])}
        dtypes |= wide
        if wide:
            shown = first_of([f"{n} ({d})" for n, d in wide.items()], SHOWN)
            notes.append(f"not written in {chosen}, as base or class of the model keep their dtype: {shown}")
    return dtypes, notes


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
    left_out = dict(base.folder.side_files.left_out)
    if recipe.model.files_of in recipe.labels:
        files = experts[recipe.labels.index(recipe.model.files_of)].model.folder.side_files
        left_out |= {f"{path} ({recipe.model.files_of})": why for path, why in files.left_out.items()}
    return left_out


def unknown_note(base: Model) -> list[str]:
    """One sentence on files of the base that are copied, and of which nothing tells what they are."""
    unknown = [path for path in base.folder.side_files.kept if is_unknown(path)]
    text = (
        "of unknown kind are copied from the base as they are; if they hold weights, they are the base's: remove them"
    )
    return [f"files {text}: {first_of(unknown, SHOWN)}"] if unknown else []


def left_out_note(left_out: Mapping[str, Note]) -> list[str]:
    """One sentence about these files; empty without any.

    >>> left_out_note({"optimizer.pt": Note("note", "weights", "a pickle"), ".git/": Note("note", "hidden", "hidden")})
    ['not copied with the output: optimizer.pt (a pickle)']
    """
    listed = [f"{path} ({why.text})" for path, why in left_out.items() if why.code not in UNSAID]
    more = [f"and {len(listed) - SHOWN} more, see the manifest"] if len(listed) > SHOWN else []
    return [f"not copied with the output: {', '.join(listed[:SHOWN] + more)}"] if listed else []


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
