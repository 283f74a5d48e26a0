"""T5 on disk and in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from actmat.errors import CheckpointError
from actmat_experiments.harness.models import is_adapter, load_model


def load_t5(folder: Path) -> Any:
    """An encoder-decoder in float32 and in evaluation mode.

    Raises:
        CheckpointError: not found.
    """
    try:
        return load_model("AutoModelForSeq2SeqLM", folder)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{folder} is no encoder-decoder model that transformers can load: {error}. Give a folder or a hub id of "
            "a T5 (v1.0: t5-base, t5-large)."
        ) from error


def load_tokenizer(base: Path) -> Any:
    """The base's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(base))


def save_expert(model: Any, tokenizer: Any, folder: Path) -> None:
    """As transformers or PEFT save it, a full model with its tokenizer."""
    model.save_pretrained(folder)
    if not is_adapter(folder):
        tokenizer.save_pretrained(folder)
