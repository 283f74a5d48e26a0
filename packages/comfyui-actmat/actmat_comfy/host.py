"""ComfyUI's side: its folders, its progress bar and interruption, its loader of LoRA files."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths

from actmat.errors import AlignmentError, RecipeError
from actmat.planning import MergePlan

logger = logging.getLogger("actmat")

_FACTORS = (".lora_up.weight", ".lora_B.weight", "_lora.up.weight", ".lora.up.weight", ".lora_linear_layer.up.weight")


class ComfyProgress:
    """Shows a merge in ComfyUI's progress bar; stops it where the user has pressed Cancel."""

    def __init__(self) -> None:
        self._bar: Any = None

    def started(self, plans: Sequence[MergePlan], resumed: int, workers: int) -> None:
        """Begin a bar of as many steps as there are tensors or modules."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._bar = comfy.utils.ProgressBar(max(1, sum(len(p.items) for p in plans)))
        self._bar.update(resumed)

    def tensor(self, name: str, nbytes: int) -> None:
        """One step. ComfyUI's exception for an interruption ends the merge as any other would."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._bar.update(1)

    def node(self, name: str, nbytes: int) -> None:
        """Do nothing: all work is on this machine."""

    def note(self, text: str) -> None:
        """Log it."""
        logger.info("%s", text)

    def finishing(self) -> None:
        """Do nothing."""


def find_lora(name: str) -> str | None:
    """Path of a LoRA file by its name in ComfyUI's lists."""
    path: str | None = folder_paths.get_full_path("loras", name)
    return path


def find_checkpoint(name: str) -> Path:
    """Path of a checkpoint by its name in ComfyUI's lists.

    Raises:
        RecipeError: there is none.
    """
    path = folder_paths.get_full_path("checkpoints", name)
    if path is None:
        raise RecipeError(
            f"ComfyUI finds no checkpoint '{name}'. Fix: press R to reload the lists, and choose it again."
        )
    return Path(path)


def temporary_folder() -> Path:
    """Folder of this session; ComfyUI empties it when it starts and ends."""
    return Path(folder_paths.get_temp_directory()) / "actmat"


def remove(folder: Path) -> None:
    """Remove a folder of this session and all in it."""
    shutil.rmtree(folder, ignore_errors=True)


def new_file(kind: str, prefix: str) -> tuple[Path, str]:
    """A path that does not exist yet in a folder of models, and its name in ComfyUI's lists.

    Args:
        kind: `loras` or `checkpoints`.
        prefix: of the name, perhaps with subfolders; ComfyUI refuses one that leads out of the folder.
    """
    root = folder_paths.get_folder_paths(kind)[0]
    folder, stem, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, root)
    name = f"{stem}_{counter:05}_.safetensors"
    return Path(folder) / name, str(Path(subfolder) / name)


def apply_lora(model: Any, clip: Any, file: Path) -> tuple[Any, Any, str]:
    """Model and CLIP with the LoRA file, by ComfyUI's own loader, and how many modules it took.

    Raises:
        AlignmentError: it takes none of them.
    """
    tensors: Mapping[str, Any] = comfy.utils.load_torch_file(str(file), safe_load=True)
    known: dict[str, Any] = {}
    if model is not None:
        known = comfy.lora.model_lora_keys_unet(model.model, known)
    if clip is not None:
        known = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, known)
    taken = comfy.lora.load_lora(comfy.lora_convert.convert_lora(dict(tensors)), known, log_missing=False)
    names = [n for n in tensors if n.endswith(_FACTORS)]
    if not taken:
        raise AlignmentError(
            f"ComfyUI's loader takes none of the {len(names)} modules of the merged LoRA, such as '{names[0]}', for "
            "the model and CLIP that are connected. Either the LoRA files were trained for another model, or ComfyUI "
            "does not read their names. Fix: connect the model that the LoRA files were trained for."
        )
    model, clip = comfy.sd.load_lora_for_models(model, clip, dict(tensors), 1.0, 1.0)
    return model, clip, f"applied: {len(taken)} of {len(names)} modules fit what is connected"
