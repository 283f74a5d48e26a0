"""Sidecars: the files other than weights that a model's folder needs (config, tokenizer, processor)."""

from __future__ import annotations

import fnmatch
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from actmat.bounds import list_folder, open_regular, read_object
from actmat.checkpoints.folder import member
from actmat.errors import CheckpointError

__all__ = ["check_sidecars", "copy_sidecars"]

CONFIG_PATTERNS = ("config.json", "*.py")
"""Files of the architecture, always from the base, whose tensors the output has. Code is copied, never run."""

PATTERNS = """
generation_config.json tokenizer* special_tokens_map.json added_tokens.json vocab.* merges.txt spiece.model *.tiktoken
chat_template* preprocessor_config.json processor_config.json image_processor_config.json
video_preprocessor_config.json feature_extractor_config.json
"""


def list_sidecars(directory: Path | None, patterns: Sequence[str]) -> list[Path]:
    """Files in `directory` that match, sorted; none for a checkpoint without a directory.

    Raises:
        CheckpointError: one of them is a link out of the folder, whose target would be published with the output, or
            is no regular file; names all of them.
    """
    if directory is None or not os.path.isdir(directory):
        return []
    found: list[Path] = []
    problems: list[str] = []
    for name in list_folder(directory):
        if os.path.isdir(directory / name) or not any(fnmatch.fnmatchcase(name, x) for x in patterns):
            continue
        try:
            found.append(member(directory, name))
        except CheckpointError as error:
            problems.extend(error.problems)
    if problems:
        raise CheckpointError(f"{directory}: files that an output needs cannot be copied", problems)
    return found


def check_sidecars(base: Path | None, files_from: Path | None) -> None:
    """Refuse folders from which `copy_sidecars` would not copy.

    Raises:
        CheckpointError: all reasons of one folder.
    """
    list_sidecars(base, CONFIG_PATTERNS)
    list_sidecars(files_from, PATTERNS.split())


def copy_sidecars(
    base: Path | None,
    files_from: Path | None,
    out: Path,
    dtype: str | None,
    config: Mapping[str, Any] | None = None,
) -> list[str]:
    """Copy the base's config and the other files of `files_from` into `out`; returns the names.

    An output dtype is written to `config.json`, so that loaders allocate the stored dtype. A `config` that is given
    takes the place of the base's.
    """
    copied = []
    for path in [*list_sidecars(base, CONFIG_PATTERNS), *list_sidecars(files_from, PATTERNS.split())]:
        target = out / path.name
        if path.name == "config.json" and (dtype is not None or config is not None):
            written = dict(read_object(path) if config is None else config)
            for key in ({"dtype", "torch_dtype"} & written.keys() or {"dtype"}) if dtype is not None else ():
                written[key] = dtype
            target.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
        else:
            with open_regular(path) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        copied.append(path.name)
    if config is not None and "config.json" not in copied:  # of a file that has it in its metadata
        text = json.dumps(dict(config) | ({} if dtype is None else {"dtype": dtype}), indent=2) + "\n"
        (out / "config.json").write_text(text, encoding="utf-8")
    return copied
