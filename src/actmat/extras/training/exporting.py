"""Write a checkpoint in the form of another tool."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

from actmat.api.merging import Location
from actmat.checkpoints.resolve import open_checkpoint
from actmat.errors import RecipeError, did_you_mean
from actmat.plugins import entries, hint, load

GROUP = "actmat.exports"


def export(checkpoint: Location, *, out: Location, to: str = "dcp", **options: str) -> str:
    """Write a checkpoint, such as a merged model, in the form of another tool; returns in words what was written.

    Args:
        checkpoint: directory, file, hub id or URL of anything that `merge` reads.
        out: what to write, which does not exist: a directory for dcp, a file for the others.
        to: `dcp`, of `torch.distributed.checkpoint`; `gguf`, of llama.cpp; `comfy`, `kohya` or `diffusers`, of a LoRA
            of an image or video model; or the name of a plug-in.
        options: of the form. dcp: `under`, the key of the state dict below which the tensors are saved, such as
            `model`. gguf: `like`, a GGUF file of the base, and `type` of the matrices: f32, f16, bf16 or q8_0.

    Raises:
        RecipeError: an unknown form or option.
        MergeError: the checkpoint or the place; nothing is at `out`.
    """
    form = load(GROUP, to)
    if form is None:
        known = list(entries(GROUP))
        raise RecipeError(
            f"There is no form '{to}' to export to.{did_you_mean(to, known)} Forms: {', '.join(known)}{hint(GROUP, to)}"
        )
    taken = [p.name for p in inspect.signature(form).parameters.values() if p.kind is p.KEYWORD_ONLY]
    if strange := [name for name in options if name not in taken]:
        listed = ", ".join(taken) or "none"
        raise RecipeError(f"The form {to} takes no option {', '.join(strange)}; its options: {listed}.")
    said: str = form(str(checkpoint), Path(out), **options)
    return said


def export_dcp(checkpoint: str, out: Path, *, under: str = "") -> str:
    """Write a checkpoint for `torch.distributed.checkpoint.load`; returns the number of its tensors in words.

    Raises:
        MergeError: nothing is at `out`.
    """
    from actmat.extras.training.writing import write_dcp

    with open_checkpoint(checkpoint) as opened, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.distributed is disabled.*")
        write_dcp(opened, out, under=under)
        return f"{len(opened.specs)} tensors as they were"
