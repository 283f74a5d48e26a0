"""Stacks of LoRA files, in the form of ComfyUI's node packs, and stacks of checkpoints."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from actmat.errors import RecipeError

NO_NAME = ("None", "none", "")
"""Names that mark an empty row in node packs."""

TEXT_ENCODER = r"(base_model\.model\.)?(lora_(prior_)?te\d?_|text_encoders?\.|text_encoder_\d\.|clip_[glh]\.|t5xxl\.)"
"""Prefix of modules scaled by the CLIP strength; all others use the model strength."""


@dataclass(frozen=True, slots=True)
class Lora:
    """One LoRA file with its strengths."""

    name: str  # name in ComfyUI's lists
    file: Path
    model: float
    clip: float
    blocks: str = ""  # factors by block, see actmat's docs/images.md

    def strength_of(self, tensor: str) -> float:
        """Strength of a tensor or module of the file."""
        return self.clip if is_text(tensor) else self.model


@dataclass(frozen=True, slots=True)
class Expert:
    """One fine-tuned checkpoint with its weight."""

    name: str
    file: Path
    weight: float
    blocks: str = ""


def is_text(module: str) -> bool:
    """True for a module or tensor of a text encoder.

    >>> is_text("lora_te1_text_model_encoder_layers_0_mlp_fc1"), is_text("diffusion_model.double_blocks.0.txt_attn.qkv")
    (True, False)
    """
    return re.match(TEXT_ENCODER, module) is not None


def read_loras(stack: Any, find: Callable[[str], str | None]) -> tuple[Lora, ...]:
    """Read the LoRA files of a `LORA_STACK`, without empty rows and rows with both strengths 0.

    Args:
        stack: list of `(name, model strength, clip strength)`, as in Efficiency Nodes, Comfyroll and others; a fourth
            value is a text with factors of blocks.
        find: function from name to path, or None.

    Raises:
        RecipeError: the stack has another form, or files do not exist; lists all problems.

    >>> read_loras([("None", 1.0, 1.0), ("ink.safetensors", 0.8, 0.5)], lambda name: f"/loras/{name}")
    (Lora(name='ink.safetensors', file=PosixPath('/loras/ink.safetensors'), model=0.8, clip=0.5, blocks=''),)
    """
    if stack is None:
        return ()
    if not isinstance(stack, Sequence) or isinstance(stack, str):
        raise RecipeError(
            f"The input lora_stack expects a list of (name, model strength, clip strength), got {stack!r}."
        )
    found: list[Lora] = []
    problems: list[str] = []
    for k, row in enumerate(stack, 1):
        lora = _lora(row, find)
        if isinstance(lora, str):
            problems.append(f"row {k}: {lora}")
        elif lora is not None:
            found.append(lora)
    if problems:
        raise RecipeError(f"The LoRA stack cannot be merged: {len(problems)} problem(s).", problems)
    return tuple(found)


def _lora(row: Any, find: Callable[[str], str | None]) -> Lora | str | None:
    """Read one row: a LoRA, a problem as one sentence, or None if the row is empty."""
    if not isinstance(row, Sequence) or isinstance(row, str) or len(row) < 3 or not isinstance(row[0], str | None):
        return f"expected (name, model strength, clip strength), found {row!r}"
    name, *strengths = row[:3]
    if name is None or name in NO_NAME:
        return None
    blocks, *more = *row[3:], ""
    if any(more) or not isinstance(blocks, str):
        return f"'{name}' has {row[3:]!r} after its strengths; expected a text with factors of blocks, or nothing"
    try:
        model, clip = (float(s) for s in strengths)
    except (TypeError, ValueError):
        return f"'{name}' has the strengths {strengths}; expected two numbers"
    if not (math.isfinite(model) and math.isfinite(clip)):
        return f"'{name}' has the strengths {strengths}; expected finite numbers"
    if not model and not clip:
        return None
    file = find(name)
    if file is None:
        return (
            f"ComfyUI finds no LoRA file '{name}'. Likely cause: renamed or removed. Fix: press R to reload the lists"
        )
    return Lora(name, Path(file), model, clip, blocks.strip())


def expert_names(names: Sequence[str]) -> list[str]:
    """Distinct short names for records.

    >>> expert_names(["styles/ink.safetensors", "ink.safetensors", "oil v2.safetensors"])
    ['ink', 'ink-2', 'oil_v2']
    """
    out: list[str] = []
    for name in names:
        stem = Path(name.replace("\\", "/")).stem
        short = "".join(c if c.isalnum() or c in "._-" else "_" for c in stem) or "lora"
        same = [short, *(f"{short}-{k}" for k in range(2, len(names) + 2))]
        out.append(next(s for s in same if s not in out))
    return out


def read_options(text: str) -> dict[str, Any]:
    r"""Parse method options from lines `name=value`; a value is JSON, else a string.

    Raises:
        RecipeError: a line has no `=`, or a name is given twice.

    >>> read_options("density=0.3\nsolver=stacked\n")
    {'density': 0.3, 'solver': 'stacked'}
    """
    out: dict[str, Any] = {}
    for line in filter(None, (line.strip() for line in text.splitlines())):
        name, equals, value = (part.strip() for part in line.partition("="))
        if not equals or not name or name in out:
            raise RecipeError(f"The input options expects one name=value per line, each name once; found '{line}'.")
        try:
            out[name] = json.loads(value)
        except ValueError:
            out[name] = value
    return out
