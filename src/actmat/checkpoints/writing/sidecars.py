"""Sidecars: the files other than weights that a model's folder needs (config, tokenizer, processor)."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["copy_sidecars"]

CONFIG_PATTERNS = ("config.json", "*.py")
"""Files of the architecture, always from the base, whose tensors the output has. Code is copied, never run."""

PATTERNS = """
generation_config.json tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt spiece.model *.tiktoken
chat_template* preprocessor_config.json processor_config.json image_processor_config.json
video_preprocessor_config.json feature_extractor_config.json
"""


def list_sidecars(directory: Path | None, patterns: Sequence[str]) -> list[Path]:
    """Plain files in `directory` that match, sorted; none for a checkpoint without a directory."""
    if directory is None or not directory.is_dir():
        return []
    files = sorted(path for path in directory.iterdir() if path.is_file())
    return [path for path in files if any(fnmatch.fnmatchcase(path.name, p) for p in patterns)]


def copy_sidecars(base: Path | None, files_from: Path | None, out: Path, dtype: str | None) -> list[str]:
    """Copy the base's config and the other files of `files_from` into `out`; returns the names.

    An output dtype is written to `config.json`, so that loaders allocate the stored dtype.
    """
    copied = []
    for path in [*list_sidecars(base, CONFIG_PATTERNS), *list_sidecars(files_from, PATTERNS.split())]:
        target = out / path.name
        if path.name == "config.json" and dtype is not None:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
            for key in {"dtype", "torch_dtype"} & config.keys() or {"dtype"}:
                config[key] = dtype
            target.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        else:
            shutil.copyfile(path, target)
        copied.append(path.name)
    return copied
