"""Interface to ComfyUI: folders, progress bar, interruption, LoRA loader."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comfy.lora
import comfy.lora_convert
import comfy.model_management
import comfy.sd
import comfy.utils
import folder_paths

from actmat.errors import AlignmentError, RecipeError
from actmat.progress import Progress

from .stacks import is_text

logger = logging.getLogger("actmat")

_FACTORS = (".lora_up.weight", ".lora_B.weight", "_lora.up.weight", ".lora.up.weight", ".lora_linear_layer.up.weight")


class ComfyProgress(Progress):
    """Shows a merge in ComfyUI's progress bar; stops it when the user presses Cancel."""

    _bar: Any

    def doing(self, what: str, total: int = 0) -> None:
        """Start a bar with one step per tensor or module."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._bar = comfy.utils.ProgressBar(max(1, total))

    def done(self, parts: int) -> None:
        """Advance by one step. ComfyUI's interruption exception ends the merge like any other."""
        comfy.model_management.throw_exception_if_processing_interrupted()
        self._bar.update_absolute(parts)

    def note(self, text: str) -> None:
        """Log it."""
        logger.info("%s", text)


def find_lora(name: str) -> str | None:
    """Path of a LoRA file by its name in ComfyUI's lists."""
    path: str | None = folder_paths.get_full_path("loras", name)
    return path


def find_checkpoint(name: str) -> Path:
    """Path of a checkpoint by its name in ComfyUI's lists.

    Raises:
        RecipeError: the checkpoint is not found.
    """
    path = folder_paths.get_full_path("checkpoints", name)
    if path is None:
        raise RecipeError(
            f"ComfyUI finds no checkpoint '{name}'. Fix: press R to reload the lists, and choose it again."
        )
    return Path(path)


def temporary_folder() -> Path:
    """Temporary folder of this session; ComfyUI empties it at start and exit."""
    return Path(folder_paths.get_temp_directory()) / "actmat"


def new_file(kind: str, prefix: str) -> tuple[Path, str]:
    """A new path in a model folder, and its name in ComfyUI's lists.

    Args:
        kind: `loras` or `checkpoints`.
        prefix: prefix of the name, may contain subfolders; ComfyUI refuses paths outside the folder.
    """
    root = folder_paths.get_folder_paths(kind)[0]
    folder, stem, counter, subfolder, _ = folder_paths.get_save_image_path(prefix, root)
    name = f"{stem}_{counter:05}_.safetensors"
    return Path(folder) / name, str(Path(subfolder) / name)


@dataclass(frozen=True, slots=True)
class Fit:
    """A LoRA file, and the modules that ComfyUI's loader accepts.

    Args:
        file: the file.
        taken: number of modules that the loader finds in the connected model and CLIP.
        left: names of factors for the connected model and CLIP that the loader does not find.
    """

    file: Path
    tensors: Mapping[str, Any]
    taken: int
    left: tuple[str, ...]

    @property
    def text(self) -> str:
        """Summary line."""
        if not self.left:
            return f"applied: {self.taken} modules, all for the connected model and CLIP"
        return (
            f"warning: {self.taken} modules are applied; ComfyUI does not know {len(self.left)}, such as {self.left[0]}"
        )


def fit_lora(model: Any, clip: Any, file: Path) -> Fit:
    """Find the modules of a file that ComfyUI's loader accepts; the loader itself only logs the others."""
    tensors = comfy.utils.load_torch_file(str(file), safe_load=True)
    known: dict[str, Any] = {}
    if model is not None:
        known = comfy.lora.model_lora_keys_unet(model.model, known)
    if clip is not None:
        known = comfy.lora.model_lora_keys_clip(clip.cond_stage_model, known)
    stored = _Asked(comfy.lora_convert.convert_lora(dict(tensors)))
    comfy.lora.load_lora(stored, known, log_missing=False)
    modules = {
        up: up.removesuffix(next(f for f in _FACTORS if up.endswith(f))) for up in stored if up.endswith(_FACTORS)
    }
    own = [m for up, m in modules.items() if up not in stored.asked and (clip if is_text(m) else model) is not None]
    return Fit(file, tensors, sum(up in stored.asked for up in modules), tuple(own))


class _Asked(dict[str, Any]):
    """Tensors of a file; records those read by the loader."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


def apply_lora(model: Any, clip: Any, fit: Fit) -> tuple[Any, Any]:
    """Apply the LoRA file to model and CLIP with ComfyUI's own loader.

    Raises:
        AlignmentError: the loader accepts none of the modules.
    """
    if not fit.taken:
        listed = ", ".join(fit.left[:3]) or "those of the part that is not connected"
        raise AlignmentError(
            f"ComfyUI's loader accepts no module of the merged LoRA for the connected model and CLIP: {listed}. "
            "Likely cause: LoRA files of another model, or names that ComfyUI does not read. Fix: connect "
            "the model that the LoRA files were trained for."
        )
    model, clip = comfy.sd.load_lora_for_models(model, clip, dict(fit.tensors), 1.0, 1.0)
    return model, clip


def load_checkpoint(file: Path) -> tuple[Any, Any, Any]:
    """Load model, CLIP and VAE of a checkpoint like ComfyUI's own node."""
    embeddings = folder_paths.get_folder_paths("embeddings")
    found = comfy.sd.load_checkpoint_guess_config(
        str(file), output_vae=True, output_clip=True, embedding_directory=embeddings
    )
    return found[0], found[1], found[2]
