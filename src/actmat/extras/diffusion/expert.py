"""Experts in another layout than the base: a single file merged into a diffusers folder, or the reverse.

The mapping is diffusers' own: its conversion functions (`loaders/single_file_utils.py`) run on placeholders that hold
row numbers in place of weights, so that the result gives the stored rows of every tensor. Tensors that those functions
do not convert are copied from the base, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from actmat.checkpoints.base import Checkpoint, TensorSpec
from actmat.checkpoints.rows import RowRange, RowsCheckpoint, TensorRows, numbered_rows, ranges_of
from actmat.errors import CheckpointError
from actmat.experts.base import Conversion
from actmat.experts.checkpoint import ConvertedExpert
from actmat.layout.components import component_configs, single_file_of

_OPEN_CLIP = ("conditioner.embedders.1.model.", "conditioner.embedders.0.model.", "cond_stage_model.model.")
_TRANSFORMERS = (
    "cond_stage_model.transformer.", "conditioner.embedders.0.transformer.", "text_encoders.clip_l.transformer.",
    "text_encoders.clip_g.transformer.", "text_encoders.t5xxl.transformer.",
)  # fmt: skip
"""Prefixes below which a text encoder has transformers names."""
_TABLES = ("token_embedding.weight", "shared.weight")
"""Suffixes of the token tables of CLIP and T5."""
_COMPONENTS_OF = {"diffusion model": ("unet", "transformer"), "VAE": ("vae",), "text encoder": ("text_encoder",)}
"""Word in a part name of a single file -> prefixes of matching component names."""

Rows = dict[str, TensorRows]
Convert = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


def _is_in_other_layout(checkpoint: Checkpoint, base: Checkpoint) -> bool:
    """True if one checkpoint is a single file of an image or video tool and the other a diffusers folder."""
    first, second = _is_diffusers(checkpoint), _is_diffusers(base)
    if first == second:
        return False
    return single_file_of((base if first else checkpoint).specs) is not None


def _open_converted(checkpoint: Checkpoint, base: Checkpoint, owns_base: bool) -> ConvertedExpert:
    """Open an expert converted to the layout of the base.

    Raises:
        CheckpointError: diffusers is missing, or has no conversion between the two.
    """
    single, folder = (base, checkpoint) if _is_diffusers(checkpoint) else (checkpoint, base)
    forward = _folder_rows(single, folder)
    into_folder = base is folder
    rows = forward if into_folder else _inverted(forward, single.specs)
    if unread := _unread(forward, single, folder):
        raise CheckpointError(
            f"{checkpoint.location}: its layout differs from the base's ({base.location}), and diffusers cannot "
            "convert all of it. Likely cause: a size or variant of the model that diffusers does not support (for Flux "
            "the width must be 3072). Fix: give checkpoints in one layout, or convert one with diffusers "
            "(from_single_file, save_pretrained).",
            unread,
        )
    if not rows:
        raise CheckpointError(
            f"{checkpoint.location}: its layout differs from the base's ({base.location}), and diffusers cannot "
            "convert any of its tensors. Likely cause: different kinds of models. Fix: give checkpoints of one model, "
            "or convert one with diffusers (from_single_file, save_pretrained)."
        )
    shapes = {n: base.specs[n].shape for n in rows}
    kind = "diffusers folder" if folder is checkpoint else "single file"
    lacks = {n: f"without a counterpart in the {kind}" for n in base.specs if n not in rows}
    return ConvertedExpert(RowsCheckpoint(checkpoint, shapes, rows), base, lacks, CONVERSION, owns=owns_base)


def _is_diffusers(checkpoint: Checkpoint) -> bool:
    return checkpoint.config is not None and "_class_name" in checkpoint.config


def _folder_rows(single: Checkpoint, folder: Checkpoint) -> Rows:
    """Name in the diffusers folder -> rows of the single file, for tensors with matching shapes."""
    components = component_configs(folder.config)
    configs = {"": folder.config or {}} if components is None else components
    out: Rows = {}
    for component, config in configs.items():
        prefix = f"{component}." if component else ""
        own = {n.removeprefix(prefix): s for n, s in folder.specs.items() if n.startswith(prefix)}
        for convert in _conversions(single, component, config, own):
            found = _fitting(_run(convert, single), own, single)
            if len(found) > len(own) // 2:
                out |= {prefix + n: rows for n, rows in found.items()}
                break
    return out


def _unread(forward: Rows, single: Checkpoint, folder: Checkpoint) -> list[str]:
    """One sentence per component of the folder that is not converted although the file has a similar part."""
    components = component_configs(folder.config)
    kind = single_file_of(single.specs)
    if components is None or kind is None:
        return []
    used = {r.name for rows in forward.values() for r in rows.ranges}
    idle = {part: p for part, p in kind.parts.items() if not any(n.startswith(p) for n in used)}
    out = []
    for name in components:
        if any(n.startswith(f"{name}.") for n in forward):
            continue
        alike = [f"{p}* ({part})" for part, p in idle.items() if _may_be(part, name)]
        out += [f"component '{name}' would not be converted, but the file has {', '.join(alike)}"] if alike else []
    return out


def _may_be(part: str, component: str) -> bool:
    return any(word in part and component.startswith(starts) for word, starts in _COMPONENTS_OF.items())


def _conversions(
    single: Checkpoint, component: str, config: Mapping[str, Any], own: Mapping[str, TensorSpec]
) -> Iterator[Convert]:
    """Yield diffusers functions that may produce a component with this config, applied to placeholders."""
    try:
        from diffusers.loaders import single_file_utils as utils
        from diffusers.loaders.single_file_model import SINGLE_FILE_LOADABLE_CLASSES
    except ImportError as error:
        raise CheckpointError(
            f"{single.location}: merging a single file with a diffusers folder needs diffusers, which is not installed "
            f"({error}). Fix: pip install 'actmat[diffusion]'."
        ) from None
    kind = config.get("_class_name")
    if kind in SINGLE_FILE_LOADABLE_CLASSES:
        convert = SINGLE_FILE_LOADABLE_CLASSES[kind]["checkpoint_mapping_fn"]
        yield partial(_by_keywords, convert, dict(config))
        return
    width = next((s.shape[1] for n, s in own.items() if n.endswith(_TABLES) and len(s.shape) == 2), None)
    if width is None:
        return
    model = SimpleNamespace(config=SimpleNamespace(hidden_size=width))
    found: list[Convert] = []
    for prefix in _TRANSFORMERS:
        if any(n.startswith(prefix) for n in single.specs):
            found.append(partial(_inside, utils.convert_ldm_clip_checkpoint, prefix))
    for prefix in _OPEN_CLIP:
        if any(n.startswith(prefix) for n in single.specs):
            found.append(partial(utils.convert_open_clip_checkpoint, model, prefix=prefix))
    yield from found if component in ("", "text_encoder") else reversed(found)  # the second encoder comes later


def _by_keywords(convert: Any, config: dict[str, Any], standins: dict[str, Tensor]) -> Mapping[str, Tensor]:
    found: Mapping[str, Tensor] = convert(checkpoint=standins, config=config)
    return found


def _inside(convert: Any, prefix: str, standins: dict[str, Tensor]) -> Mapping[str, Tensor]:
    """Convert only tensors below the prefix; the function would use every prefix that it knows."""
    inside = {n: t for n, t in standins.items() if n.startswith(prefix)}
    found: Mapping[str, Tensor] = convert(inside, remove_prefix=prefix)
    return found


def _run(convert: Convert, single: Checkpoint) -> dict[str, TensorRows]:
    """Rows of the single file in every converted tensor; empty if the conversion fails on these names."""
    standins, names, starts = numbered_rows(single.specs)
    try:
        with torch.no_grad():
            found = convert(standins)
    except (KeyError, IndexError, ValueError, RuntimeError, TypeError):  # not the names of its model
        return {}
    out = {}
    for name, tensor in found.items():
        if isinstance(tensor, Tensor) and tensor.numel():
            turned = tensor.ndim == 2 and tensor.shape[0] == 1 and tensor.shape[1] > 1
            out[name] = TensorRows(ranges_of(tensor, names, starts), turned)
    return out


def _fitting(found: Mapping[str, TensorRows], own: Mapping[str, TensorSpec], single: Checkpoint) -> Rows:
    """Keep tensors whose name and number of entries match the component; CLIP names may lack their first part."""
    out: Rows = {}
    for name, rows in found.items():
        spellings = (name, name.removeprefix("text_model."), f"text_model.{name}")
        mine = next((n for n in spellings if n in own), None)
        if mine is None:
            continue
        sources = [single.specs[r.name] for r in rows.ranges]
        widths = {s.numel // (s.shape[0] if s.shape else 1) for s in sources}
        total = sum((r.stop - r.start) for r in rows.ranges) * next(iter(widths))
        if len(widths) == 1 and len({s.dtype for s in sources}) == 1 and total == own[mine].numel:
            out[mine] = rows
    return out


def _inverted(forward: Rows, specs: Mapping[str, TensorSpec]) -> Rows:
    """Rows of the folder for every tensor of the single file whose rows are all in the folder."""
    pieces: dict[str, list[tuple[int, RowRange]]] = {}
    out: Rows = {}
    for name, rows in forward.items():
        if rows.transposed:
            out[rows.ranges[0].name] = TensorRows((RowRange(name, 0, specs[rows.ranges[0].name].shape[1]),), True)
            continue
        position = 0
        for part in rows.ranges:
            count = part.stop - part.start
            pieces.setdefault(part.name, []).append((part.start, RowRange(name, position, position + count)))
            position += count
    for name, found in pieces.items():
        end = 0
        ordered = sorted(found, key=lambda pair: pair[0])
        for start, part in ordered:
            if start != end:
                break
            end += part.stop - part.start
        else:
            if end == (specs[name].shape[0] if specs[name].shape else 1):
                out[name] = TensorRows(tuple(part for _, part in ordered))
    return out


CONVERSION = Conversion(_is_in_other_layout, _open_converted)
