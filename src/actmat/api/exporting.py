"""Write a checkpoint in the format of another tool."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path

from actmat.errors import RecipeError, did_you_mean
from actmat.experts.locate import locate
from actmat.recipe.arguments import Location

Exporter = Callable[..., str]
"""`(located, out, *, options)`: writes one format and returns a sentence about the result."""


def export(checkpoint: Location, *, out: Location, to: str, **options: str) -> str:
    """Write a checkpoint, such as a merged model, in the format of another tool; returns a sentence about the result.

    Args:
        checkpoint: directory, file, hub id or URL of anything that `merge` reads.
        out: file to write, which must not exist.
        to: `gguf` (llama.cpp), or `comfy`, `kohya` or `diffusers` for a LoRA of an image or video model.
        options: of gguf: `like`, a GGUF file of the base, and `type` of the matrices: f32, f16, bf16 or q8_0.

    Raises:
        RecipeError: an unknown format or option.
        MergeError: the checkpoint or `out` is invalid; nothing is written.
    """
    form = _exporter(to)
    taken = [p.name for p in inspect.signature(form).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if strange := [name for name in options if name not in taken]:
        listed = ", ".join(taken) or "none"
        raise RecipeError(f"--to {to} takes no option {', '.join(strange)}; its options: {listed}.")
    with locate(str(checkpoint)) as located:
        return form(located, Path(out), **options)


def _exporter(form: str) -> Exporter:
    from actmat.extras.diffusion.files import export_lora
    from actmat.extras.gguf.writing import write_gguf

    layouts = {"comfy": partial(export_lora, "comfy"), "diffusers": partial(export_lora, "diffusers")}
    forms: dict[str, Exporter] = {**layouts, "gguf": write_gguf, "kohya": partial(export_lora, "kohya")}
    if form not in forms:
        known = ", ".join(forms)
        raise RecipeError(f"Unknown export format '{form}'.{did_you_mean(form, forms)} Formats: {known}.")
    return forms[form]
