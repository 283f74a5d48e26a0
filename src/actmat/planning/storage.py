"""Storage of the inputs and its consequences for the output: components, side files, codes, texts in headers."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence

from actmat.checkpoints.base import Tensors, TensorSpec
from actmat.checkpoints.folder import shown
from actmat.checkpoints.model import Model
from actmat.checkpoints.side_files import is_unknown
from actmat.errors import Note, first_of
from actmat.experts.deltas import Deltas
from actmat.identity.reading import read_configs
from actmat.layout.components import component_configs, single_file_of
from actmat.layout.in_memory import names_in_memory
from actmat.planning.implied import labeled_adapters
from actmat.recipe import Recipe

DIFFUSERS_STEM = "diffusion_pytorch_model"
"""Start of the names of diffusers' weight files."""


COARSE = ("bfloat16", "float16")


def stems_of(base: Model) -> Mapping[str, str]:
    """Prefix of a component -> folder and name of the output's weight files; of a single model, with the prefix ""."""
    if (components := component_configs(base.config)) is not None:
        return {f"{name}.": f"{name}/{_stem(config)}" for name, config in components.items()}
    return {"": _stem(base.config), **{prefix: f"{folder}/model" for prefix, folder in base.folder.parts.items()}}


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
            kept_wide = first_of([f"{n} ({d})" for n, d in wide.items()], SHOWN)
            notes.append(f"not written in {chosen}, as base or class of the model keep their dtype: {kept_wide}")
    return dtypes, notes


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


def left_out_note(left_out: Mapping[str, Note]) -> list[str]:
    """One sentence about these files; empty without any.

    >>> left_out_note({"optimizer.pt": Note("note", "weights", "a pickle"), ".git/": Note("note", "hidden", "hidden")})
    ['not copied with the output: optimizer.pt (a pickle)']
    """
    listed = [f"{path} ({why.text})" for path, why in left_out.items() if why.code not in UNSAID]
    return [f"not copied with the output: {first_of(listed, SHOWN)}"] if listed else []


def storage_notes(recipe: Recipe, base: Model, experts: Sequence[Deltas]) -> list[str]:
    """Notes on the kind of the base, its unknown files, and inputs that are stored in other forms, or as codes."""
    components, single = component_configs(base.config), single_file_of(base.specs)
    notes = [f"the base is {single.words}"] if single is not None else []
    if components is not None:
        notes = [f"the base is a pipeline with weights in {', '.join(components)}; its other files are copied"]
    if unknown := [path for path in base.folder.side_files.kept if is_unknown(path)]:
        notes.append(
            "files of unknown kind are copied from the base as they are; if they hold weights, they are the base's: "
            f"remove them: {first_of(unknown, SHOWN)}"
        )

    def dtypes(specs: Mapping[str, TensorSpec]) -> str:
        return ", ".join(sorted({s.dtype for s in specs.values() if s.is_floating}))

    mine = dtypes(base.specs)
    notes += [
        f"expert '{label}' is stored in {dtypes(e.specs)}, the base in {mine}: the delta of a coarser copy is part "
        "rounding"
        for label, e in zip(recipe.labels, experts, strict=True)
        if dtypes(e.specs) != mine
    ]
    return [*notes, *_quantization_notes(recipe, base, experts), *_named_base_notes(recipe, base, experts)]


def _quantization_notes(recipe: Recipe, base: Model, experts: Sequence[Deltas]) -> list[str]:
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
    if full and notes:
        notes.append("base and experts were not rounded to codes together: deltas hold the rounding errors of both")
    return notes


FOUR_BITS = re.compile(r"bnb[-_]?4bit|4bit[-_]?bnb|nf4|qlora", re.IGNORECASE)
"""Names of bases of 4 bits, as trainers of adapters call them."""


def _named_base_notes(recipe: Recipe, base: Model, experts: Sequence[Deltas]) -> list[str]:
    """Notes on adapters that name a base in 4 bits, or another one, by the last part of its name on the hub."""
    hub_id = next((files.hub_id for files in base.folder.files), "")
    named = [(label, a.config.base_model) for label, a in labeled_adapters(recipe, experts) if a.config.base_model]
    notes = [
        f"expert '{label}' was trained on a base in 4 bits ({name}), from which this base differs by rounding. To "
        "add it to the base as it was trained on, load that in 4 bits in transformers, save it dequantized "
        "(model.dequantize()), and give the copy as --base"
        for label, name in named
        if FOUR_BITS.search(name) and not _schemes(base.tensors)
    ]
    others = [f"{label}: {n}" for label, n in named if os.path.basename(n.rstrip("/")) != os.path.basename(hub_id)]
    if hub_id and others:
        notes.append(
            f"adapters name another base ({first_of(others, SHOWN)}): unless it is a copy of {hub_id}, the merge is "
            "wrong"
        )
    return notes


def _schemes(tensors: Tensors) -> Mapping[str, int]:
    """Number of tensors of each scheme."""
    return Counter(scheme for name in tensors.specs if (scheme := tensors.parts(name)[1]))


_OUTDATED = ("format", "actmat", "total_", "sshs_", "modelspec.hash", "lora_adapter_metadata", "_quant", "quant")
"""Beginnings of keys that tell the bytes, the format or the codes of one file."""
_FUNCTION = ("config", "prediction_type", "architecture", "timestep_range", "v_pred", "ztsnr")
"""Ends of keys by which loaders choose the code or the settings of a model."""
_OF_ONE_FILE = ("ss_", "modelspec.", "sd_merge_")
"""Beginnings of keys that describe one file: title, author, training."""


def merged_metadata(base: Model, experts: Sequence[Deltas], labels: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """The texts for a model merged into a base, and notes on those that its inputs contradict.

    A text that all full checkpoints have alike is kept. Of one that decides how the model is loaded, that of the
    experts is written where they agree, else the base's.
    """
    pairs = zip(labels, experts, strict=True)
    by_label = {label: _valid(e.model) for label, e in pairs if not e.needs_base}
    of_base = _valid(base)
    agreed: dict[str, str] = {}
    notes, dropped = [], []
    for key in dict.fromkeys(k for texts in (of_base, *by_label.values()) for k in texts):
        values = {texts.get(key) for texts in by_label.values()} or {of_base.get(key)}
        mine, (first, *more) = of_base.get(key), list(values)
        if not more and first is not None and (first == mine or key.endswith(_FUNCTION)):
            agreed[key] = first
        elif key.endswith(_FUNCTION) and mine is not None:
            agreed[key] = mine
        if values == {mine}:
            continue
        if key.endswith(_FUNCTION):
            label, other = next((n, texts.get(key)) for n, texts in by_label.items() if texts.get(key) != mine)
            written = "nothing" if key not in agreed else "the base's" if agreed[key] == mine else "the experts'"
            notes.append(
                f"header metadata '{key}' are {shown(other)} in expert '{label}' and {shown(mine)} in the base: "
                f"{written} is written"
            )
        elif not key.startswith(_OF_ONE_FILE):
            dropped.append(key)
    if dropped:
        notes.append(f"header metadata that the inputs do not have alike are not written: {first_of(dropped)}")
    return agreed, notes


def _valid(model: Model) -> Mapping[str, str]:
    return {key: text for key, text in model.folder.header.items() if not key.startswith(_OUTDATED)}
