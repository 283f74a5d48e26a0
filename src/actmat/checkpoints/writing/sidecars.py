"""Sidecars: the files other than weights that a model's folder needs (config, tokenizer, processor)."""

from __future__ import annotations

import fnmatch
import json
import shutil
from pathlib import Path
from typing import IO, Any

from actmat.errors import CheckpointError

__all__ = ["copy_sidecars"]

CONFIG_PATTERNS = ("config.json", "*.py")
"""Files of the architecture, always from the base, whose tensors the output has. Code is copied, never run."""

PATTERNS = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "spiece.model",
    "*.tiktoken",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "image_processor_config.json",
    "video_preprocessor_config.json",
    "feature_extractor_config.json",
)


def list_sidecars(directory: Path | None, patterns: tuple[str, ...]) -> list[Path]:
    """Plain files in `directory` that match, sorted; none for a checkpoint without a directory."""
    if directory is None or not directory.is_dir():
        return []
    return sorted(
        p for p in directory.iterdir() if p.is_file() and any(fnmatch.fnmatchcase(p.name, x) for x in patterns)
    )


def copy_sidecars(base: Path | None, files_from: Path | None, out: Path, dtype: str | None) -> list[str]:
    """Copy the base's config and the other files of `files_from` into `out`; returns the names.

    An output dtype is written to `config.json`, so that loaders allocate the stored dtype.
    """
    copied = []
    for path in [*list_sidecars(base, CONFIG_PATTERNS), *list_sidecars(files_from, PATTERNS)]:
        target = out / path.name
        if path.name == "config.json" and dtype is not None:
            with _opened(path) as source:
                config: dict[str, Any] = json.load(source)
            for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
                config[key] = dtype
            target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        else:
            with _opened(path) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
        copied.append(path.name)
    return copied


def _opened(path: Path) -> IO[bytes]:
    """The file, open for reading: an error of an input must not be told as one of the output."""
    try:
        return path.open("rb")
    except OSError as error:
        raise CheckpointError(
            f"{path} cannot be read ({error.strerror}). It is copied into the merged model: make it readable, or "
            "remove it if the model does not need it."
        ) from error
