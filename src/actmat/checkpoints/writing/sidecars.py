"""Sidecars: the files other than weights that a model's folder needs, copied by the rule of `side_files`."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Any

from actmat.bounds import open_regular, read_object
from actmat.checkpoints.folder import member
from actmat.checkpoints.model import ModelFolder
from actmat.checkpoints.side_files import is_of_architecture
from actmat.errors import CheckpointError

DTYPE_KEYS = {"dtype", "torch_dtype"}


def _chosen(
    base: ModelFolder, files_from: ModelFolder, code: ModelFolder, taken: Mapping[str, ModelFolder]
) -> dict[str, ModelFolder]:
    """Path of every file that is copied -> folder that it comes from.

    Files that describe the tensors (config, code, modules) are the base's, and code in its place that of `code`. Those
    of `taken` come from there; a folder that lacks one takes it away.
    """
    modules = {*base.side_files.modules, *files_from.side_files.modules}
    out = {name: base for name in base.side_files.kept if is_of_architecture(name, modules)}
    out |= {name: files_from for name in files_from.side_files.kept if not is_of_architecture(name, modules)}
    out |= {name: code for name in code.side_files.kept if name.endswith(".py")}
    out |= taken
    return {name: folder for name, folder in sorted(out.items()) if name in folder.side_files.kept}


def check_sidecars(*folders: ModelFolder) -> None:
    """Refuse folders whose files `copy_sidecars` could not copy; they must be local.

    Raises:
        CheckpointError: a file is a link out of its folder, whose target would be published with the output, or is
            not a regular file; names all of them.
    """
    problems: list[str] = []
    places = {place: f.side_files.kept for f in folders if f.side_files.kept and (place := f.directory) is not None}
    for place, names in places.items():
        for name in names:
            if not os.path.lexists(place / name):  # not downloaded yet
                continue
            try:
                member(place, name)
            except CheckpointError as error:
                problems.extend(p for p in error.problems if p not in problems)
    if problems:
        named = ", ".join(map(str, places))
        raise CheckpointError(f"{named}: files that an output needs cannot be copied", problems)


def copy_sidecars(
    base: ModelFolder,
    files_from: ModelFolder,
    code: ModelFolder,
    *,
    out: Path,
    dtype: str | None,
    configs: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    taken: Mapping[str, ModelFolder] = MappingProxyType({}),
) -> list[str]:
    """Copy the base's config and code and the other files of `files_from` into `out`; returns their paths.

    An output dtype is written to `config.json`, so that loaders allocate the stored dtype. `configs` (path ->
    config) replace those of the base, the code of `code` that of the base, and files of `taken` all others.

    Raises:
        CheckpointError: see `check_sidecars`.
    """
    check_sidecars(base, files_from, *taken.values())
    copied = []
    for name, chosen in _chosen(base, files_from, code, taken).items():
        place, target = chosen.directory, out / name
        assert place is not None, "a folder with files"
        path = place / name
        target.parent.mkdir(parents=True, exist_ok=True)
        written = None
        if name in configs or (PurePosixPath(name).name == "config.json" and dtype is not None):
            written = _config(path, name, dtype, configs.get(name))
        if written is not None:
            target.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8", newline="\n")
        else:
            with open_regular(path) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy)
        copied.append(name)
    if "config.json" in configs and "config.json" not in copied:  # of a file that has it in its metadata
        text = json.dumps(dict(configs["config.json"]) | ({} if dtype is None else {"dtype": dtype}), indent=2) + "\n"
        (out / "config.json").write_text(text, encoding="utf-8", newline="\n")
    return copied


def _config(path: Path, name: str, dtype: str | None, config: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The config with the output's dtype, or None if the copy is right.

    Only transformers' configs know a dtype: the config of a folder gets one, a pipeline's component keeps its own.
    """
    written = dict(read_object(path) if config is None else config)
    keys = DTYPE_KEYS & written.keys()
    if not keys and name == "config.json" and "_class_name" not in written:
        keys = {"dtype"}
    if dtype is None or not keys:
        return written if config is not None else None
    return written | dict.fromkeys(sorted(keys), dtype)
