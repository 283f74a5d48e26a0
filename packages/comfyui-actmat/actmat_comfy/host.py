"""ComfyUI's side: its folders, its progress bar and interruption, its loader of LoRA files."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
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
from actmat.planning import MergePlan
from actmat.progress import NoProgress

from .stacks import is_text

logger = logging.getLogger("actmat")

_FACTORS = (".lora_up.weight", ".lora_B.weight", "_lora.up.weight", ".lora.up.weight", ".lora_linear_layer.up.weight")


class ComfyProgress(NoProgress):
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


@dataclass(frozen=True, slots=True)
class Fit:
    """A LoRA file, and how many of its modules ComfyUI's loader takes.

    Args:
        file: the file.
        taken: modules that the loader finds in what is connected.
        left: names of factors that belong to what is connected, and that the loader does not find.
    """

    file: Path
    tensors: Mapping[str, Any]
    taken: int
    left: tuple[str, ...]

    @property
    def text(self) -> str:
        """One line for a summary."""
        if not self.left:
            return f"applied: {self.taken} modules, all that belong to what is connected"
        return (
            f"warning: {self.taken} modules are applied; ComfyUI does not know {len(self.left)}, such as {self.left[0]}"
        )


def fit_lora(model: Any, clip: Any, file: Path) -> Fit:
    """Look which modules of a file ComfyUI's loader takes, which only logs those that it does not."""
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
    """Tensors of a file that notes which of them the loader takes."""

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.asked: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.asked.add(name)
        return super().__getitem__(name)


def apply_lora(model: Any, clip: Any, fit: Fit) -> tuple[Any, Any]:
    """Model and CLIP with the LoRA file, by ComfyUI's own loader.

    Raises:
        AlignmentError: it takes none of the modules.
    """
    if not fit.taken:
        listed = ", ".join(fit.left[:3]) or "those of the part that is not connected"
        raise AlignmentError(
            f"ComfyUI's loader takes no module of the merged LoRA for the model and CLIP that are connected: {listed}. "
            "Either the LoRA files were trained for another model, or ComfyUI does not read their names. Fix: connect "
            "the model that the LoRA files were trained for."
        )
    model, clip = comfy.sd.load_lora_for_models(model, clip, dict(fit.tensors), 1.0, 1.0)
    return model, clip


def load_checkpoint(file: Path) -> tuple[Any, Any, Any]:
    """Model, CLIP and VAE of a checkpoint, as ComfyUI's own node loads them."""
    embeddings = folder_paths.get_folder_paths("embeddings")
    found = comfy.sd.load_checkpoint_guess_config(
        str(file), output_vae=True, output_clip=True, embedding_directory=embeddings
    )
    return found[0], found[1], found[2]
